"""Trains a draft on a target's answers: the loop, what of it outlives the process, and what becomes of the folder.

The folder is always a draft that can be served: its weights are those of the best held-out acceptance so far. What an
interrupted training needs to go on lies below `training/` in it, and is gone when the training is complete.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.models.runner import head_token_ids
from outrider.models.training import Schedule, autocast, build_optimizers, step
from outrider_cli.failures import FlagError
from outrider_draft.answers import Document, documents_of
from outrider_draft.card import Card, machine, read_card
from outrider_draft.display import Display
from outrider_draft.documents import ATTENTION, MAX_LEN, cut, endless, split
from outrider_draft.files import written
from outrider_draft.held_out import acceptance, head_of, hidden_of, limited
from outrider_draft.loss import head_loss
from outrider_draft.new import write_weights

STATE = Path("training") / "state.pt"
CHECKPOINT_S = 180.0
"""Time between two checkpoints, and measurements on what is held out."""


@dataclass(frozen=True, slots=True)
class Request:
    """Says what to train on, and for how long."""

    folder: Path
    data: Sequence[Path]
    hours: float | None = None
    tokens: int | None = None
    """Tokens of the target to learn from, in place of hours."""
    held_out: float = 0.02
    """Share of the documents that are held out."""
    device: str = "cpu"
    batch_tokens: int = 4096
    """Most tokens of a step."""
    seed: int = 0
    checkpoint_s: float = CHECKPOINT_S


@dataclass(slots=True)
class Position:
    """Describes how far a training has come."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = 0.0
    """Mean loss of late."""
    best: float = -1.0
    """Mean acceptance of the folder's weights."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """As in the card."""

    def progress(self, request: Request) -> float:
        """Returns the share of the training that has passed."""
        if request.tokens is not None:
            return self.tokens / request.tokens
        assert request.hours is not None
        return self.seconds / (3600 * request.hours)


class Training:
    """Trains one draft."""

    def __init__(self, request: Request, display: Display) -> None:
        """Reads draft and data, and the checkpoint of an interrupted training.

        Raises:
            FlagError: The data do not fit the draft.
            NoDraft: The folder is no draft.
        """
        self._request, self._display = request, display
        self._card = read_card(request.folder)
        self.target = self._card.target
        self._model = _opened(request, keeps_embedding=self._card.keeps_embedding)
        documents = _documents(request, self._model)
        learnt, held_out = split(documents, request.held_out)
        self._num_documents = len(learnt)
        length = min(MAX_LEN, request.batch_tokens)
        self._learnt = [piece for document in learnt for piece in cut(document, length)]
        self._held_out = limited([piece for document in held_out for piece in cut(document, length)])
        if not self._learnt or not self._held_out:
            raise FlagError("--data", "at least two answers", ", ".join(map(str, request.data)))
        self._optimizers = build_optimizers(self._model)
        self._schedule = Schedule(self._optimizers)
        self._state = request.folder / STATE
        self.position = Position()
        self._restore()

    def run(self) -> bool:
        """Trains until the end, or until an interrupt. Returns True if the training is complete.

        Raises:
            OSError: A file could not be written. The last checkpoint is whole, and a later run goes on from it.
        """
        request, position = self._request, self.position
        if not position.curve:
            self._evaluate()
        batches = endless(self._learnt, request.batch_tokens, request.seed, position.steps)
        saved_at = started = time.monotonic()
        before_s = position.seconds
        with _interrupts() as interrupted, self._display:
            while (progress := position.progress(request)) < 1.0:
                if interrupted:
                    self._save()
                    return False
                batch = next(batches).to(request.device)
                self._schedule.set(position.steps, progress)
                with autocast(request.device):
                    hidden = hidden_of(self._model, batch)
                    loss = head_loss(hidden, head_of(self._model), batch.top_ids, batch.top_logprobs, progress)
                loss.backward()  # type: ignore[no-untyped-call]
                step(self._model, self._optimizers)
                value = loss.item()
                position.loss = value if position.steps == 0 else 0.95 * position.loss + 0.05 * value
                position.steps += 1
                position.tokens += len(batch.rows)
                position.seconds = before_s + time.monotonic() - started
                self._show()
                if time.monotonic() - saved_at >= request.checkpoint_s:
                    self._evaluate()
                    self._save()
                    saved_at = time.monotonic()
            self._evaluate()
        shutil.rmtree(self._state.parent, ignore_errors=True)
        return True

    def _show(self) -> None:
        position, last = self.position, self.position.curve[-1]
        accepted = f"held out {last['greedy']:.2f} {last['T=0.7']:.2f} {last['T=1']:.2f}"
        progress = position.progress(self._request)
        self._display.show(progress, position.seconds, position.tokens, position.loss, accepted)

    def _evaluate(self) -> None:
        """Measures on what is held out; the folder gets the weights if they are the best so far."""
        request, position, card = self._request, self.position, self._card
        found = acceptance(self._model, self._held_out, request.batch_tokens)
        position.curve.append(
            {
                "tokens": card.tokens + position.tokens,
                "hours": round(card.hours + position.seconds / 3600, 4),
                "greedy": round(found.greedy, 4),
                "T=0.7": round(found.at_0_7, 4),
                "T=1": round(found.at_1, 4),
            }
        )
        is_better = found.mean > position.best
        if is_better:
            # Before the first step they are what the folder has already.
            if position.steps:
                write_weights(self._model, request.folder)
            position.best = found.mean
        self._card_now().write(request.folder)
        note = "" if is_better else "; not better than before, so the folder keeps what it has"
        self._display.note(f"{position.tokens} tokens, held out: {found}{note}")

    def _card_now(self) -> Card:
        request, position, card = self._request, self.position, self._card
        recipe = {
            "loss": "KL, then KL and overlap at T = 1 and 0.7, of the target's best tokens and the rest",
            "optimizers": "Muon, AdamW",
            "batch_tokens": request.batch_tokens,
            "seed": request.seed,
            "budget": {"tokens": request.tokens} if request.tokens is not None else {"hours": request.hours},
            "documents": self._num_documents,
            "held_out": request.held_out,
            "data": [str(path) for path in request.data],
        }
        return replace(
            card,
            recipe=recipe,
            machine=machine(request.device),
            tokens=card.tokens + position.tokens,
            hours=round(card.hours + position.seconds / 3600, 4),
            curve=[*card.curve, *position.curve],
            # Of other weights than these, once the folder has new ones.
            judged={} if position.steps else card.judged,
        )

    def _save(self) -> None:
        """Writes a checkpoint: all that a later process needs to take the very next step."""
        position = self.position
        self._state.parent.mkdir(exist_ok=True)
        state = {
            "model": self._model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "position": {name: getattr(position, name) for name in Position.__slots__},
            # What the card said when the training began: the position counts from there.
            "begun": {"tokens": self._card.tokens, "hours": self._card.hours, "curve": self._card.curve},
        }
        with written(self._state) as partial, partial.open("wb") as file:
            torch.save(state, file)
        self._display.note(f"checkpoint after {position.tokens} tokens")

    def _restore(self) -> None:
        """Reads the checkpoint, if there is one. Raises FlagError for one that cannot be read."""
        if not self._state.is_file():
            return
        try:
            state = torch.load(self._state, map_location=self._request.device, weights_only=True)
            self._model.load_state_dict(state["model"])
            for optimizer, found in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(found)
        except Exception as error:  # whatever the library finds in the file
            rule = "a draft whose checkpoint can be read (without its folder training/ a new training begins)"
            raise FlagError("DIR", rule, f"{self._state}: {' '.join(str(error).split())}") from error
        self.position = Position(**state["position"])
        begun: dict[str, Any] = state["begun"]
        self._card.tokens, self._card.hours, self._card.curve = begun["tokens"], begun["hours"], begun["curve"]
        self._display.note(f"goes on after {self.position.tokens} tokens")


def _opened(request: Request, *, keeps_embedding: bool) -> PreTrainedModel:
    # In float32: steps are too small for the digits of bfloat16.
    found: Any = AutoModelForCausalLM.from_pretrained(
        request.folder, dtype=torch.float32, attn_implementation=ATTENTION
    )
    model: PreTrainedModel = found.to(request.device).train()
    if keeps_embedding:
        for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[no-untyped-call]
            matrix.requires_grad_(False)
    return model


def _documents(request: Request, model: PreTrainedModel) -> list[Document]:
    """Returns the documents of all folders, their best tokens as columns of the draft's head; -1 for those that it has
    not. Raises FlagError if they are not for the draft."""
    if not request.data:
        raise FlagError("--data", "a folder of answers, as `outrider draft data` makes one", "none")
    vocab_size: int = model.config.vocab_size
    documents = documents_of(request.data, tokenizer_hash(AutoTokenizer.from_pretrained(request.folder)), vocab_size)
    if (kept := head_token_ids(model)) is None:
        return documents
    columns = np.full(vocab_size, -1, np.int32)
    columns[kept.cpu().numpy()] = np.arange(len(kept))
    return [replace(document, top_ids=columns[document.top_ids]) for document in documents]


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Yields a list that the signals which would end the process are added to. A second one ends it at once."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
