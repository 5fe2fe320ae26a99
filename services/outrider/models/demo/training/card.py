"""The model card: ``README.md``, written from what was measured for these weights."""

from __future__ import annotations

import platform
from pathlib import Path
from string import Template
from typing import Any

from outrider.models.demo.training.bundle import training_record
from outrider.models.demo.training.corpus import Corpus
from outrider.models.demo.training.evaluate import Agreement, Measurements, measure

_CARD = Template(
    """\
# The Outrider demo pair

Two small language models of Python source code that share one tokenizer: a **target** of
$target_size parameters and a **draft** of $draft_size that was distilled from it. They exist so
that speculative decoding can be shown, tested and measured on any CPU, offline, with real
acceptance rates. Written by `python -m outrider.models.demo.training.train`, together with this card.

| | target | draft |
|---|---|---|
| Llama of | 6 layers, width 256, MLP 688, 4 heads | 2 layers, width 192, MLP 448, 3 heads |
| parameters | $target_parameters | $draft_parameters |
| training tokens | $target_tokens | $draft_tokens |
| optimiser steps | $target_steps | $draft_steps |
| wall-clock training time, CPU threads: $threads | $target_minutes min | $draft_minutes min |
| training runs | $target_runs | $draft_runs |
| held-out loss, nats a token | **$target_loss** | **$draft_loss** |
| the same, positions 512 to 1023 only | $target_late | $draft_late |

Both: 2048 entries of byte-level BPE, tied embeddings, rotary positions (theta 10000),
2048 positions (trained on sequences of up to 1024 tokens), weights in bfloat16.
The tokenizer files of the two folders are identical, byte for byte.

## Agreement

`sum(min(p, q))` is the probability that rejection sampling accepts a token of the draft. Measured
along $prompts continuations of 96 tokens that the *target* samples after held-out prompts of 120
tokens, each ending in a `def` line; saved weights, float32.

| temperature | acceptance | same most likely token | repeated 4-grams |
|---|---|---|---|
$agreement_rows

At temperature 0 the acceptance is the share of equal most likely tokens. The error is one standard
error over the prompts. "Repeated" is the share of 4-grams that already occurred in the same
continuation: greedy text runs into loops, so its acceptance flatters every method.

## Data and licence

The `.py` files of CPython's standard library, its tests included ($python), without `encodings`,
`lib2to3`, `turtledemo` and installed packages: $train_files files and $train_characters million
characters for training. They are read from the running Python; none of them is shipped here.
CPython is distributed under the
[PSF License Agreement](https://docs.python.org/3/license.html), copyright Python Software
Foundation. A model this small can repeat common passages of it literally.

Held out, and seen by neither model nor by the tokenizer: every file whose path below the library
folder has a SHA-256 digest with its first eight bytes (big-endian) divisible by 50. Here these are
$heldout_files files with $heldout_tokens tokens; the SHA-256 of their sorted names, one a line, is
`$heldout_digest`.

## Recipe

* Muon (0.02, weight decay 0.05, momentum 0.95) for the matrices inside the layers, AdamW (0.003,
  betas 0.9 and 0.95) for embedding and norms, gradient norm clipped to 1, bfloat16 products on
  float32 weights, 2048 tokens a step: sequences of 256, then 512, at the end also 1024.
* 50 steps of warm-up; the rate falls linearly to zero over the last 70 % of the *time*, which is
  what ends the training. So another machine gives other weights; the seed fixes the rest.
* Target: cross-entropy on the text.
* Draft: forward KL to the target's probabilities, computed on the fly. From 40 % of the time on,
  every other batch is text that the target itself sampled (temperatures 1 and 0.7). From 60 % on,
  the KL counts half and the total-variation distance at temperatures 1 and 0.7 is added:
  it is one minus the acceptance.
* A draft with more than one run was trained on with `--resume`: fresh optimisers, other batches,
  and the schedule from 60 % to its end once more.
* The draft has two wide layers rather than four narrow ones because at this size a forward pass
  costs operator calls.

Rebuild with `make demo-models`, or one stage at a time:

    python -m outrider.models.demo.training.train --stage draft --draft-minutes 25
    python -m outrider.models.demo.training.train --stage draft --draft-minutes 19 --resume
    python -m outrider.models.demo.training.train --stage card

## Use

    from transformers import AutoModelForCausalLM, AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("services/outrider/models/demo/target")
    target = AutoModelForCausalLM.from_pretrained("services/outrider/models/demo/target")

`<|endoftext|>` (id 0) starts, ends and separates documents. The chat template writes messages as
comments (`# user: ...`), which is enough to drive a chat interface, not to hold a conversation.

To compute in bfloat16, load with that `dtype`. Do not call `.to(torch.bfloat16)` on a loaded model:
it also casts the rotary frequencies, which shifts the logits.

## Inflated variants

A 5 M parameter target is so fast that there is nothing to win. Variants that *cost* as much as a
larger model and *say* the same are not stored: they are built at load time, by appending identity
blocks (random inner weights, zero output projections) and by widening the MLPs with columns whose
output weights are zero.

They are ordinary Llama checkpoints, as expensive to run as trained
ones of that shape, and they show real acceptance rates at realistic cost ratios. They are no better
at writing code, and their attention is cheaper than that of a real model of that size.

## Limits

Toy models, for measuring decoders. They produce text that looks like Python's own sources and tests
and seldom means anything. They know no natural language beyond comments and docstrings. Greedy
decoding falls into loops within a few lines; 0.5 to 0.7 gives the most code-like text. One seed:
how much the numbers vary between trainings was not measured. Not for any use in which the text
matters.
"""
)


def write_card(models: Path, corpus: Corpus) -> None:
    """Measure the pair in ``models`` and write its ``README.md``."""
    card = _CARD.substitute(_values(models, corpus, measure(models, corpus)))
    (models / "README.md").write_text(card)


def _values(models: Path, corpus: Corpus, found: Measurements) -> dict[str, Any]:
    values: dict[str, Any] = {
        "agreement_rows": "\n".join(_row(agreement) for agreement in found.agreements),
        "heldout_digest": corpus.heldout_digest,
        "heldout_files": found.heldout_files,
        "heldout_tokens": f"{found.heldout_tokens:,}",
        "prompts": found.prompts,
        "python": f"version {platform.python_version()}",
        "train_characters": f"{sum(len(source.text) for source in corpus.train) / 1e6:.1f}",
        "train_files": len(corpus.train),
    }
    for name, loss in (("target", found.target_loss), ("draft", found.draft_loss)):
        record = training_record(models / name)
        values |= {
            f"{name}_size": f"{record['parameters'] / 1e6:.1f} M",
            f"{name}_parameters": f"{record['parameters']:,}",
            f"{name}_tokens": f"{record['tokens']:,}",
            f"{name}_steps": f"{record['steps']:,}",
            f"{name}_runs": record["runs"],
            f"{name}_minutes": f"{record['seconds'] / 60:.1f}",
            f"{name}_loss": f"{loss.mean:.3f}",
            f"{name}_late": f"{loss.second_half:.3f}",
            "threads": record["threads"],
        }
    return values


def _row(found: Agreement) -> str:
    return (
        f"| {found.temperature:g} | **{found.acceptance:.3f}** ± {found.acceptance_error:.3f}"
        f" | {found.greedy_match:.3f} | {found.repetition:.2f} |"
    )
