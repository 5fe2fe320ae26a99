"""Measure the demo pair on held-out files: ``python -m outrider.models.demo.training.evaluate``.

The number that matters is the agreement of the two models, ``sum(min(p, q))``:
the probability that rejection sampling accepts a token drafted at that place.
It is measured where it counts, along text that the target itself samples.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.training.batches import sample_continuations
from outrider.models.demo.training.bundle import load_bundle
from outrider.models.demo.training.corpus import Corpus, code_prompts, load_corpus
from outrider.models.demo.training.vocabulary import encode_files, load_tokenizer

PROMPT_TOKENS = 120
NEW_TOKENS = 96
TEMPERATURES = (0.0, 0.7, 1.0)
WINDOW = 1024
SEED = 1234


@dataclass(frozen=True)
class Agreement:
    """Measures how well the draft predicts the target along text sampled at one temperature."""

    temperature: float
    #: Mean probability that a drafted token is accepted, and its standard error by prompts.
    acceptance: float
    acceptance_error: float
    #: Share of places where both models have the same most likely token.
    greedy_match: float
    #: Share of generated 4-grams that already occurred in the same continuation.
    repetition: float


@dataclass(frozen=True)
class Loss:
    """Cross-entropy in nats a token on windows of 1024 tokens, and on their second half."""

    mean: float
    second_half: float


@dataclass(frozen=True)
class Measurements:
    """Everything the model card quotes."""

    heldout_files: int
    heldout_tokens: int
    prompts: int
    target_loss: Loss
    draft_loss: Loss
    agreements: tuple[Agreement, ...]


def measure(models: Path, corpus: Corpus, prompts: int = 64) -> Measurements:
    """Evaluate ``models/target`` and ``models/draft`` from their saved weights, in float32."""
    target, draft = load_bundle(models / "target"), load_bundle(models / "draft")
    tokenizer = load_tokenizer(models / "target")
    stream = torch.from_numpy(encode_files(tokenizer, corpus.heldout))
    rows = []
    for text in code_prompts(corpus, prompts, shortest=450, longest=700):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) >= PROMPT_TOKENS:
            rows.append(ids[-PROMPT_TOKENS:])
    return Measurements(
        heldout_files=len(corpus.heldout),
        heldout_tokens=len(stream),
        prompts=len(rows),
        target_loss=heldout_loss(target, stream),
        draft_loss=heldout_loss(draft, stream),
        agreements=tuple(agreement(target, draft, torch.tensor(rows), temperature) for temperature in TEMPERATURES),
    )


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: Tensor) -> Loss:
    """Loss over the stream, cut into windows that do not overlap."""
    count = (len(stream) - 1) // WINDOW
    inputs = stream[: count * WINDOW].view(count, WINDOW)
    labels = stream[1 : count * WINDOW + 1].view(count, WINDOW)
    losses = [
        functional.cross_entropy(model(input_ids=ids, use_cache=False).logits.transpose(1, 2), goal, reduction="none")
        for ids, goal in zip(torch.split(inputs, 4), torch.split(labels, 4), strict=True)
    ]
    table = torch.cat(losses)
    return Loss(mean=table.mean().item(), second_half=table[:, WINDOW // 2 :].mean().item())


@torch.no_grad()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Tensor, temperature: float) -> Agreement:
    """Sample from the target, then compare the two models at every sampled place."""
    generator = torch.Generator().manual_seed(SEED)
    text = sample_continuations(target, prompts, NEW_TOKENS, temperature, generator)
    # A row predicts the token after it: from the prompt's last one to the last but one of all.
    places = slice(prompts.shape[1] - 1, -1)
    p_logits = target(input_ids=text, use_cache=False).logits[:, places]
    q_logits = draft(input_ids=text, use_cache=False).logits[:, places]
    matches = (p_logits.argmax(-1) == q_logits.argmax(-1)).float()
    if temperature == 0:
        accepted = matches
    else:
        p, q = (p_logits / temperature).softmax(-1), (q_logits / temperature).softmax(-1)
        accepted = torch.minimum(p, q).sum(-1)
    by_prompt = accepted.mean(1)
    return Agreement(
        temperature=temperature,
        acceptance=by_prompt.mean().item(),
        acceptance_error=(by_prompt.std() / len(by_prompt) ** 0.5).item(),
        greedy_match=matches.mean().item(),
        repetition=_repetition(text[:, prompts.shape[1] :]),
    )


def _repetition(continuations: Tensor) -> float:
    repeated = total = 0
    for row in continuations.tolist():
        grams = [tuple(row[start : start + 4]) for start in range(len(row) - 3)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the measurements as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.demo.training.evaluate",
        description="Measure held-out loss and agreement of the demo pair.",
    )
    parser.add_argument(
        "--models",
        type=Path,
        default=DEMO_FOLDER,
        metavar="DIR",
        help="folder with target/ and draft/ (default: where demo models are loaded from)",
    )
    parser.add_argument("--prompts", type=int, default=64, metavar="N", help="prompts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    print(json.dumps(asdict(measure(options.models, load_corpus(), options.prompts)), indent=2))


if __name__ == "__main__":
    main()
