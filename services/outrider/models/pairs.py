"""Judges a target and a draft model by their files, before anything is loaded. Imports no torch.

    python -m outrider.models.pairs --device DEVICE --target MODEL [--draft MODEL]

prints what is wrong, a line for each flag; nothing if a service can try.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from importlib import metadata

from tokenizers import Tokenizer

from outrider.models import gguf
from outrider.models.names import file_of, gguf_of, why_no_model
from outrider.models.wheels import WHEELS

Vocabulary = Mapping[int, str]
"""Tokens by their ids."""


def refusal(target: str, draft: str, difference: str) -> str:
    """Returns the message that a draft model does not fit a target, given how their tokenizers differ."""
    return f"--draft must be a model with the target's tokenizer, got {draft!r} for {target!r}: {difference}"


def difference_of(target: Vocabulary, draft: Vocabulary) -> str:
    """Returns in one line how the tokens of a draft model differ from the target's; empty if they do not."""
    for token_id in range(max([*target, *draft], default=-1) + 1):
        ours, theirs = target.get(token_id), draft.get(token_id)
        if ours != theirs:
            sizes = f"vocab sizes {len(target)} and {len(draft)}"
            return f"{sizes}; the first tokens that differ are {token_id}: {ours!r} and {theirs!r}"
    return ""


def vocabulary_of(model_id: str) -> Vocabulary | None:
    """Returns the tokens of a model by its files. None means that the files do not tell."""
    if (file := gguf_of(model_id)) is not None:
        return gguf.vocabulary_of(gguf.read_header(file))
    if model_id in WHEELS or (path := file_of(model_id, "tokenizer.json")) is None:
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # the library raises nothing more special
        return None
    found = {token_id: token for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items()}
    settings = file_of(model_id, "tokenizer_config.json")
    added = json.loads(settings.read_bytes()).get("added_tokens_decoder", {}) if settings is not None else {}
    # transformers adds them if the other file lacks them.
    return {**{int(token_id): token["content"] for token_id, token in added.items()}, **found}


def why_no_cuda() -> str:
    """Returns why there is no CUDA device, as far as can be told without torch; empty means that there may be one."""
    build = metadata.version("torch").partition("+")[2]
    return "no CUDA device here: this torch is for CPUs only" if build == "cpu" else ""


def complaints(device: str, target: str, draft: str | None) -> Iterator[str]:
    """Yields what is wrong with models and device, each with its flag."""
    if device.startswith("cuda") and (why := why_no_cuda()):
        yield f"--device {device}: {why}"
    models = {"--target": target} | ({} if draft is None else {"--draft": draft})
    wrong = {flag: why for flag, model in models.items() if (why := why_no_model(model))}
    yield from (f"{flag} {models[flag]}: {why}" for flag, why in wrong.items())
    if draft is None or wrong:
        return
    ours, theirs = vocabulary_of(target), vocabulary_of(draft)
    if ours is not None and theirs is not None and (difference := difference_of(ours, theirs)):
        yield refusal(target, draft, difference)


def main() -> None:
    """Prints the complaints about what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    given = parser.parse_args()
    for complaint in complaints(given.device, given.target, given.draft):
        print(complaint)


if __name__ == "__main__":
    main()
