"""The loss of a draft over the target's best tokens and the rest, without a row of probabilities of the vocabulary.

The target's file has its best tokens at each place. All others together are one more bucket: what the draft gives to
them in excess is lost, whatever it gives to which. So a row of the loss depends on the logits of the best tokens, and
on the logsumexp of all at each temperature; the gradient of the latter is a softmax. The head's product, this loss and
both its gradients are made in one pass over blocks of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.training import OVERLAP_STARTS, OVERLAP_TEMPERATURES, distillation_loss

BLOCK = 1024
"""Rows of the head's product that are held at a time."""
PART = 32
"""Rows of which a computation in float32 is made at a time: they stay in a cache."""
SMALLEST = 1e-6
"""Least probability of a bucket: its logarithm stays finite."""
NEVER = -1e4
"""Log-probability of a token that the head of the draft does not have: finite, with a probability of 0."""


class Measured(NamedTuple):
    """Sums over rows: divided by their number they are the acceptance."""

    num_rows: int
    overlaps: tuple[float, ...]
    """Of `sum(min(p, q))` over the target's best tokens, at each of `OVERLAP_TEMPERATURES`; the rest is left out, so
    they are lower bounds."""
    num_same: float
    """Rows whose likeliest token is the target's."""


def target_buckets(top_ids: Tensor, top_logprobs: Tensor, temperature: float) -> Tensor:
    """Returns log-probabilities of the target's best tokens, and of the rest, [num_rows, num_top + 1].

    At another temperature than 1 the rest is taken for as even as it can be: each of it as likely as the last of the
    best tokens. A token that the draft cannot say has a probability of 0, and the others keep theirs: a place counts as
    much as there is to be guessed.
    """
    rest = (1.0 - top_logprobs.exp().sum(-1, keepdim=True)).clamp_min(SMALLEST).log()
    rest = rest + (1.0 / temperature - 1.0) * top_logprobs[:, -1:]
    buckets = torch.cat([top_logprobs / temperature, rest], -1).log_softmax(-1)
    return buckets.masked_fill(functional.pad(top_ids < 0, (0, 1)), NEVER)


def draft_buckets(top_ids: Tensor, top_logits: Tensor, logsumexp: Tensor, temperature: float) -> Tensor:
    """Returns the same of a draft, by its logits of those tokens, and the logsumexp of all at the temperature."""
    top = (top_logits / temperature - logsumexp[:, None]).masked_fill(top_ids < 0, NEVER)
    rest = (1.0 - top.exp().sum(-1, keepdim=True)).clamp_min(SMALLEST).log()
    return torch.cat([top, rest], -1)


def head_loss(hidden: Tensor, weight: Tensor, top_ids: Tensor, top_logprobs: Tensor, progress: float) -> Tensor:
    """Returns the mean loss of rows.

    Args:
        hidden: Input of the head, [num_rows, hidden_size].
        weight: The head, [num_tokens, hidden_size].
        top_ids: Rows of the head, [num_rows, num_top]; -1 for a token that it does not have.
        top_logprobs: Those of the target at temperature 1, [num_rows, num_top].
        progress: Share of the training that has passed.
    """
    loss: Tensor = _HeadLoss.apply(hidden, weight, top_ids, top_logprobs, progress)  # type: ignore[no-untyped-call]
    return loss


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, hidden: Tensor, weight: Tensor, top_ids: Tensor, top_logprobs: Tensor, progress: float
    ) -> Tensor:
        dtype = torch.bfloat16 if torch.is_autocast_enabled(hidden.device.type) else hidden.dtype
        head = weight.to(dtype)
        hidden_grad = torch.empty_like(hidden, dtype=dtype)
        weight_grad: Tensor | None = None
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), BLOCK):
            block = slice(start, start + BLOCK)
            inputs = hidden[block].to(dtype)
            logits = inputs @ head.T
            total += _differentiate(logits, top_ids[block], top_logprobs[block], progress) / len(hidden)
            logits /= len(hidden)
            hidden_grad[block] = logits @ head
            if not context.needs_input_grad[1]:
                continue
            product = logits.T @ inputs
            weight_grad = product.to(weight.dtype) if weight_grad is None else weight_grad.add_(product)
        context.save_for_backward(hidden_grad.to(hidden.dtype), weight_grad)
        return total

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        hidden_grad, weight_grad = context.saved_tensors
        return hidden_grad * grad, None if weight_grad is None else weight_grad * grad, None, None, None


def _differentiate(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, progress: float) -> Tensor:
    """Returns the sum of the losses of rows, and puts its gradient by the logits in their place."""
    temperatures = (1.0,) if progress < OVERLAP_STARTS else OVERLAP_TEMPERATURES
    total = logits.new_zeros((), dtype=torch.float32)
    for part, ids, logprobs in zip(_parts(logits), _parts(top_ids), _parts(top_logprobs), strict=True):
        rows = part.float()
        columns = ids.clamp_min(0)
        top_logits = rows.gather(1, columns).requires_grad_()
        shift = rows.amax(-1, keepdim=True)
        rows -= shift
        powers = [rows.exp() if t == 1 else (rows / t).exp_() for t in temperatures]
        sums = [power.sum(-1, keepdim=True) for power in powers]
        logsumexps = {
            t: (shift / t + of_t.log())[:, 0].requires_grad_() for t, of_t in zip(temperatures, sums, strict=True)
        }
        with torch.enable_grad():
            loss = len(part) * distillation_loss(
                lambda t, ids=ids, top=top_logits, sums=logsumexps, lp=logprobs: (  # type: ignore[misc]
                    target_buckets(ids, lp, t),
                    draft_buckets(ids, top, sums[t], t),
                ),
                progress,
            )
            top_grad, *sum_grads = torch.autograd.grad(loss, [top_logits, *logsumexps.values()])
        total += loss.detach()
        # The gradient of a logsumexp is the softmax.
        for power, of_t, grad, t in zip(powers, sums, sum_grads, temperatures, strict=True):
            power *= grad[:, None] / (t * of_t)
        gradient = powers[0] if len(powers) == 1 else powers[0].add_(powers[1])
        part.copy_(gradient.scatter_add_(1, columns, top_grad))
    return total


def _parts(rows: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, PART)


@torch.no_grad()
def measure(hidden: Tensor, weight: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Measured:
    """Measures the acceptance at rows. The arguments are those of `head_loss`."""
    overlaps = [0.0] * len(OVERLAP_TEMPERATURES)
    num_same = 0.0
    for part, ids, logprobs in zip(_parts(hidden), _parts(top_ids), _parts(top_logprobs), strict=True):
        logits = functional.linear(part, weight).float()
        top_logits = logits.gather(1, ids.clamp_min(0))
        for index, temperature in enumerate(OVERLAP_TEMPERATURES):
            log_q = draft_buckets(ids, top_logits, (logits / temperature).logsumexp(-1), temperature)
            log_p = target_buckets(ids, logprobs, temperature)
            overlaps[index] += torch.minimum(log_p, log_q)[:, :-1].exp().sum().item()
        num_same += (logits.argmax(-1) == ids[:, 0]).sum().item()
    return Measured(len(hidden), tuple(overlaps), num_same)
