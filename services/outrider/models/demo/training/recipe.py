"""The recipe of the demo pair: the two shapes, the losses, the loop.

Optimisers and schedule are those of every draft (``outrider.models.training``).
The rest was chosen by measurement on two ordinary CPU cores:

* ``eager`` attention trains a fifth faster than ``sdpa`` at these widths, and
  bfloat16 products (with float32 weights) twice as fast as float32 ones.
* Time, not steps, drives the learning rate, because the speed of the machine
  is unknown and an annealed model is much better than an interrupted one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.demo.training.batches import Draw
from outrider.models.demo.training.vocabulary import END_OF_TEXT_ID, VOCABULARY_SIZE
from outrider.models.training import Schedule, build_optimizers, distillation_loss, step

CONTEXT = 2048

#: Maps (student, token windows, share of the time that has passed) to a loss.
Loss = Callable[[nn.Module, Tensor, float], Tensor]


def target_config() -> LlamaConfig:
    """5.3 M parameters: six layers, 256 wide."""
    return _llama(hidden=256, layers=6, intermediate=688, heads=4)


def draft_config() -> LlamaConfig:
    """1.2 M parameters in only two layers.

    At this size a forward pass costs operator calls, not arithmetic, so width
    is nearly free and depth is not.
    """
    return _llama(hidden=192, layers=2, intermediate=448, heads=3)


def _llama(*, hidden: int, layers: int, intermediate: int, heads: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits for every position, in float32; the matrix products run in bfloat16."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def text_loss(model: nn.Module, windows: Tensor, _progress: float) -> Tensor:
    """Cross-entropy on the text: how the target learns."""
    logits = logits_of(model, windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def loss_to(teacher: nn.Module) -> Loss:
    """The distance to the teacher's probabilities: how the draft learns."""

    def loss(student: nn.Module, windows: Tensor, progress: float) -> Tensor:
        ids = windows[:, :-1]
        with torch.no_grad():
            goal = logits_of(teacher, ids).flatten(0, 1)
        logits = logits_of(student, ids).flatten(0, 1)
        return distillation_loss(lambda t: ((goal / t).log_softmax(-1), (logits / t).log_softmax(-1)), progress)

    return loss


@dataclass(frozen=True)
class Progress:
    """Describes where a training run stands."""

    steps: int
    tokens: int
    seconds: float
    loss: float


def fit(
    model: LlamaForCausalLM,
    draw: Draw,
    loss_of: Loss,
    *,
    minutes: float,
    report: Callable[[Progress], None],
    first_share: float = 0.0,
) -> Progress:
    """Train ``model`` in place for ``minutes``; ``report`` is called after every step.

    With ``first_share`` above zero, the minutes cover only the rest of the schedule.
    """
    optimizers = build_optimizers(model)
    schedule = Schedule(optimizers)
    model.train()
    started = time.perf_counter()
    state = Progress(steps=0, tokens=0, seconds=0.0, loss=0.0)
    while (passed := state.seconds / (60 * minutes)) < 1.0:
        share = first_share + (1.0 - first_share) * passed
        schedule.set(state.steps, share)
        windows = draw(state.steps, share)
        loss = loss_of(model, windows, share)
        loss.backward()  # type: ignore[no-untyped-call]
        step(model, optimizers)
        value = loss.item()
        state = Progress(
            steps=state.steps + 1,
            tokens=state.tokens + windows[:, 1:].numel(),
            seconds=time.perf_counter() - started,
            loss=value if state.steps == 0 else 0.95 * state.loss + 0.05 * value,
        )
        report(state)
    model.train(False)
    return state
