"""Every wrong key and value is refused with a sentence that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.core.methods import METHODS
from outrider.core.params import RetrievalScope
from outrider.vllm.settings import read_settings

HERE = {"speculator": "127.0.0.1:50052"}


def refusal(outrider: object) -> str:
    with pytest.raises(ValueError, match=r"\S") as caught:
        read_settings({"outrider": outrider})
    return str(caught.value)


def test_settings_come_from_the_config_and_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VLLM_METHOD", "pearl")
    monkeypatch.setenv("OUTRIDER_VLLM_PATIENCE_MS", "5")
    settings = read_settings({"outrider": {**HERE, "method": "auto"}, "other": 1})
    assert (settings.method, settings.patience_ms) == ("auto", 5.0)


@pytest.mark.parametrize("method", ["best-first", "pearl", "saguaro", "card", "double", "speculative", "auto"])
def test_each_method_verifies_chains_of_vllms_length(method: str) -> None:
    params = read_settings({"outrider": {**HERE, "method": method, "lookahead": 4}}).speculation(8)
    assert (params.method, params.num_speculative_tokens, params.lookahead) == (METHODS[method], 8, 8)


def test_spacelike_looks_at_the_tenants_texts_unless_told_otherwise() -> None:
    given = {"method": "spacelike", "datastore": "127.0.0.1:1"}
    assert read_settings({"outrider": given}).scope is RetrievalScope.TENANT
    assert read_settings({"outrider": {**given, "retrieval_scope": "global"}}).scope is RetrievalScope.GLOBAL


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"speculater": "x:1"}, "no setting 'speculater': did you mean speculator?"),
        ({**HERE, "method": "sequoia"}, "method (or OUTRIDER_VLLM_METHOD)"),
        ({**HERE, "patience_ms": 21}, "patience_ms (or OUTRIDER_VLLM_PATIENCE_MS): Input should be less than or equal"),
        ({"speculator": "a:1,a:1", "peer_insecure": True}, "must name each speculator once"),
        ({"speculator": "far.example:1"}, "give peer_ca for TLS, or peer_insecure"),
        ({}, "best-first drafts with a speculator"),
        ({"method": "spacelike"}, "spacelike looks up a datastore"),
        ({**HERE, "contribute": True}, "contribute: needs retrieval_scope tenant or global"),
        ({**HERE, "metrics_listen": "9100"}, "must be HOST:PORT"),
        ("127.0.0.1:1", '"outrider" must hold the settings by their names'),
    ],
)
def test_a_wrong_setting_is_named(given: Any, told: str) -> None:
    assert told in refusal(given)


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VLLM_PATIENCE", "5")
    assert "OUTRIDER_VLLM_PATIENCE is no variable of the proposer: did you mean" in refusal(HERE)


def test_a_token_file_is_never_shown() -> None:
    assert "secret" not in refusal({**HERE, "peer_token_file": ["secret"]})


def test_the_guide_lists_every_setting_with_its_default() -> None:
    guide = (Path(__file__).parents[2] / "deploy" / "vllm" / "README.md").read_text(encoding="utf-8")
    for name in type(read_settings({"outrider": HERE})).model_fields:
        assert f"| `{name}` |" in guide, name
