"""The loss in one pass is that of the whole distributions, and so is its gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from outrider.models.training import distillation_loss
from outrider_draft.loss import draft_buckets, head_loss, measure, target_buckets

ROWS, VOCABULARY, WIDTH = 2100, 37, 8


def inputs(num_top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    top = torch.randn(ROWS, VOCABULARY, generator=generator).log_softmax(-1).topk(num_top)
    return hidden, weight, top.indices, top.values


@pytest.mark.parametrize("has_all", [True, False])
@pytest.mark.parametrize("progress", [0.1, 0.9])
def test_loss_and_gradients_are_those_of_a_plain_computation(progress: float, has_all: bool) -> None:
    hidden, weight, top_ids, top_logprobs = inputs(5)
    if not has_all:
        top_ids[::3, 1] = top_ids[1::4, 0] = -1
    loss = head_loss(hidden, weight, top_ids, top_logprobs, progress)
    gradients = torch.autograd.grad(3 * loss, [hidden, weight])

    def at(temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        logits = hidden @ weight.T
        sums = (logits / temperature).logsumexp(-1)
        found = draft_buckets(top_ids, logits.gather(1, top_ids.clamp_min(0)), sums, temperature)
        return target_buckets(top_ids, top_logprobs, temperature), found

    plain = distillation_loss(at, progress)
    wanted = torch.autograd.grad(3 * plain, [hidden, weight])
    torch.testing.assert_close(loss, plain)
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_all_tokens_the_buckets_are_the_distribution(temperature: float) -> None:
    *_, top_ids, top_logprobs = inputs(VOCABULARY)
    found = target_buckets(top_ids, top_logprobs, temperature)[:, :-1]
    torch.testing.assert_close(found, (top_logprobs / temperature).log_softmax(-1), rtol=1e-4, atol=1e-4)


def test_acceptance_is_at_most_that_of_the_whole_distributions() -> None:
    hidden, weight, top_ids, top_logprobs = (each.detach() for each in inputs(VOCABULARY))
    logits = functional.linear(hidden, weight)
    p = torch.zeros_like(logits).scatter_(1, top_ids, top_logprobs.exp())
    whole = torch.minimum(p, logits.softmax(-1)).sum().item()
    found = measure(hidden, weight, top_ids[:, :5], top_logprobs[:, :5])
    assert 0.2 * whole < found.overlaps[0] < whole
    assert measure(hidden, weight, top_ids, top_logprobs).overlaps[0] == pytest.approx(whole, rel=1e-3)
    assert found.num_same == (logits.argmax(-1) == top_ids[:, 0]).sum()


def test_what_the_head_has_not_is_never_kept() -> None:
    hidden, weight, top_ids, top_logprobs = (each.detach() for each in inputs(VOCABULARY))
    kept = torch.arange(0, VOCABULARY, 2)
    columns = torch.full((VOCABULARY,), -1)
    columns[kept] = torch.arange(len(kept))
    logits = functional.linear(hidden, weight[kept])
    p = torch.zeros(ROWS, VOCABULARY).scatter_(1, top_ids, top_logprobs.exp())[:, kept]
    found = measure(hidden, weight[kept], columns[top_ids], top_logprobs)
    assert found.overlaps[0] == pytest.approx(torch.minimum(p, logits.softmax(-1)).sum().item(), rel=1e-3)
    assert found.num_same == (kept[logits.argmax(-1)] == top_ids[:, 0]).sum()
