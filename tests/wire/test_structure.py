"""Descriptions of structured output survive a round trip."""

from __future__ import annotations

import pytest

from outrider.core.structure import Structure, StructureKind
from outrider.wire.structure import structure_from_proto, structure_to_proto

TEXTS = {StructureKind.JSON_OBJECT: "", StructureKind.CHOICE: '["yes", "no"]'}


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("kind", StructureKind)
def test_every_kind_goes_there_and_back(kind: StructureKind, as_text: bool) -> None:
    structure = Structure(kind, TEXTS.get(kind, "a+"), special_tokens_as_text=as_text)
    message = structure_to_proto(structure)
    assert message.WhichOneof("constraint") == kind.value
    assert message.HasField("special_tokens_as_text") is as_text
    assert structure_from_proto(message) == structure
