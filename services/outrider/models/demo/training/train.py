"""Train the demo pair from scratch: ``python -m outrider.models.demo.training.train``.

Four stages. Each starts from what the one before it saved:

``tokenizer``  learn the vocabulary from the corpus (seconds)
``target``     train the target on the text
``draft``      distil the draft from the target
``card``       measure the pair on held-out files and write ``README.md``

Both training stages stop after a given time, so the weights differ a little
from machine to machine, and the card says what was measured for these.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.training import recipe
from outrider.models.demo.training.batches import Draw, mixed_batches, text_batches
from outrider.models.demo.training.bundle import load_bundle, save_bundle, training_record
from outrider.models.demo.training.card import write_card
from outrider.models.demo.training.corpus import Corpus, load_corpus
from outrider.models.demo.training.vocabulary import encode_files, load_tokenizer, train_tokenizer
from outrider.models.training import OVERLAP_STARTS

STAGES = ("tokenizer", "target", "draft", "card")
CHECKPOINT_SECONDS = 300.0
REPORT_STEPS = 25


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the stages asked for on the command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.resume and options.stage != "draft":
        parser.error("--resume needs --stage draft")
    torch.set_num_threads(options.threads)
    corpus = load_corpus()
    for stage in STAGES if options.stage == "all" else (options.stage,):
        print(f"stage {stage}", flush=True)
        if stage == "tokenizer":
            tokenizer = train_tokenizer(corpus.train, recipe.CONTEXT)
            for name in ("target", "draft"):
                tokenizer.save_pretrained(options.out / name)
        elif stage == "target":
            train_target(options.out, corpus, options.target_minutes, options.seed)
        elif stage == "draft":
            train = resume_draft if options.resume else train_draft
            train(options.out, corpus, options.draft_minutes, options.seed)
        else:
            write_card(options.out, corpus)


def train_target(out: Path, corpus: Corpus, minutes: float, seed: int) -> None:
    """Train the target on the text and save it to ``out/target``."""
    run = _Run(out / "target", recipe.target_config(), corpus, seed)
    run.fit(text_batches(run.stream, seed), recipe.text_loss, minutes)


def train_draft(out: Path, corpus: Corpus, minutes: float, seed: int) -> None:
    """Distil the draft from ``out/target`` and save it to ``out/draft``."""
    run = _Run(out / "draft", recipe.draft_config(), corpus, seed)
    _distil(run, out / "target", minutes, first_share=0.0)


def resume_draft(out: Path, corpus: Corpus, minutes: float, seed: int) -> None:
    """Train the draft in ``out/draft`` on, with the last phase of the schedule again.

    The batches differ from those before, and so does the text sampled from the target.
    """
    record = training_record(out / "draft")
    run = _Run(out / "draft", recipe.draft_config(), corpus, seed + record["runs"], record)
    run.model.load_state_dict(load_bundle(out / "draft").state_dict())
    _distil(run, out / "target", minutes, first_share=OVERLAP_STARTS)


def _distil(run: _Run, target_folder: Path, minutes: float, *, first_share: float) -> None:
    sampled = load_bundle(target_folder, torch.bfloat16)
    draw = mixed_batches(run.stream, sampled, minutes, run.seed)
    loss_of = recipe.loss_to(load_bundle(target_folder))
    run.fit(draw, loss_of, minutes, first_share=first_share)


class _Run:
    """One model in training, and the folder that it is saved to."""

    def __init__(
        self,
        folder: Path,
        config: LlamaConfig,
        corpus: Corpus,
        seed: int,
        earlier: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(seed)  # before the model is made, because its initial weights are drawn then
        self.folder = folder
        self.seed = seed
        self.stream = encode_files(load_tokenizer(folder), corpus.train, shuffle_seed=seed)
        self.model = LlamaForCausalLM(config)
        self.model.set_attn_implementation("eager")
        self._earlier = earlier or {"runs": 0, "seconds": 0.0, "steps": 0, "tokens": 0}
        self._next_checkpoint = CHECKPOINT_SECONDS
        print(f"{self.model.num_parameters()} parameters, {len(self.stream)} tokens", flush=True)

    def fit(self, draw: Draw, loss_of: recipe.Loss, minutes: float, *, first_share: float = 0.0) -> None:
        """Train for the given time and save the result."""
        final = recipe.fit(self.model, draw, loss_of, minutes=minutes, report=self._report, first_share=first_share)
        self._save(final, complete=True)
        print(f"saved {self.folder}: {final.steps} steps, {final.tokens} tokens", flush=True)

    def _report(self, state: recipe.Progress) -> None:
        """Print now and then, and save the unfinished model every five minutes."""
        if state.steps % REPORT_STEPS == 0:
            print(
                f"{state.seconds:7.1f} s  step {state.steps:5d}  loss {state.loss:.4f}"
                f"  {state.tokens / state.seconds:.0f} tokens/s",
                flush=True,
            )
        if state.seconds >= self._next_checkpoint:
            self._next_checkpoint += CHECKPOINT_SECONDS
            self._save(state, complete=False)

    def _save(self, state: recipe.Progress, *, complete: bool) -> None:
        record = {
            "complete": complete,
            "parameters": self.model.num_parameters(),
            "runs": self._earlier["runs"] + 1,
            "seconds": round(self._earlier["seconds"] + state.seconds, 1),
            "seed": self.seed,
            "steps": self._earlier["steps"] + state.steps,
            "threads": torch.get_num_threads(),
            "tokens": self._earlier["tokens"] + state.tokens,
        }
        save_bundle(self.model, self.folder, record)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outrider.models.demo.training.train",
        description="Train the demo pair (target and draft) on Python's standard library.",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=DEMO_FOLDER,
        metavar="DIR",
        help="where target/, draft/ and README.md go (default: where demo models are loaded from)",
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default: %(default)s)")
    parser.add_argument(
        "--target-minutes",
        type=float,
        default=22.0,
        metavar="M",
        help="training time of the target (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-minutes",
        type=float,
        default=25.0,
        metavar="M",
        help="training time of the draft (default: %(default)s)",
    )
    parser.add_argument(
        "--stage",
        choices=(*STAGES, "all"),
        default="all",
        help="run one stage only; it needs the results of those before it (default: %(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="with --stage draft: train the saved draft on")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (default: %(default)s)")
    return parser


if __name__ == "__main__":
    main()
