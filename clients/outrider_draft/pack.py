"""Packs a draft into one GGUF file: half as large as its folder, and llama.cpp reads it too.

Matrices are stored as Q8_0, with an error far below what a draft's guesses could show. The tokenizer is the target's,
copied from its own file, so that both are the same to the letter.
"""

from __future__ import annotations

from pathlib import Path

from outrider.models.checkpoint import CONFIG, WEIGHTS, read_json
from outrider.models.gguf import REST_OF, SHARED, TOKENIZER, read_header
from outrider.models.gguf_writer import why_no_gguf, write_gguf
from outrider.models.names import gguf_of
from outrider.models.wheels import WHEELS
from outrider_cli.failures import FlagError
from outrider_draft.card import read_card
from outrider_draft.files import written


def pack(folder: Path, out: Path, *, layers_only: bool = False) -> int:
    """Writes a draft as a GGUF file.

    Args:
        folder: The draft.
        out: The file.
        layers_only: Leaves embedding, head and tokenizer to the target's file, where it is found by its short name.

    Returns:
        Bytes of the file.

    Raises:
        FlagError: The target is no GGUF file, or such a file cannot hold the draft.
        NoDraft: The folder is no draft.
        OSError: The file cannot be written; one that was there is as it was.
    """
    card, config = read_card(folder), read_json(folder / CONFIG)
    of_target = gguf_of(card.target)
    if of_target is None:
        rule = "a draft whose target is a GGUF file on this machine, because its tokenizer is copied from there"
        raise FlagError("DIR", rule, f"{folder}, for {card.target}")
    if why := why_no_gguf(config):
        raise FlagError("DIR", f"a draft that a GGUF file can hold ({why})", folder)
    if layers_only and not (card.keeps_embedding and card.target in WHEELS):
        rule = f"unset for a draft that has another embedding than {', '.join(WHEELS)}"
        raise FlagError("--layers-only", rule, f"{folder}, for {card.target}")
    facts = read_header(of_target).facts
    with written(out) as partial:
        if layers_only:
            write_gguf(partial, config, folder / WEIGHTS, {REST_OF: card.target}, without=SHARED)
        else:
            of_tokenizer = {name: value for name, value in facts.items() if name.startswith(TOKENIZER)}
            write_gguf(partial, config, folder / WEIGHTS, of_tokenizer)
    return out.stat().st_size
