"""The ratio rule on the device, that of `outrider.models.acceptance`: judges chains of all sessions without a wait.

1. `_weigh` looks at each row of each chain: where its filters cut, what its probabilities are divided by, if its token
   is refused, and if something would be left of p then. Filters need no sort: the least value that is kept is found by
   bisection.
2. `_leave` finds each chain's first refused token, and writes the row that the next token is drawn from.
3. `outrider.models.cuda.draws` draws there.

Sums that a token's share is compared with are float64 wherever float32 might decide differently.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.chains import LEAST_LOGPROB
from outrider.models.cuda.draws import best_tokens, float_of, tempered
from outrider.models.cuda.rows import CHAIN_WORDS, ROW_WORDS, TESTED_WORDS, UNSETTLED

WEIGHING = {"BLOCK": 2048, "CLAIMS": 64, "NUM_STAGES": 3, "num_warps": 16}
"""Launch of `_weigh`: tokens of a block, claims that are looked at together, and blocks that are read ahead."""
LEAVING = {"BLOCK": 1024, "NUM_BLOCKS": 8, "CLAIMS": 64, "num_warps": 4}
"""Launch of `_leave`: tokens of a block, and blocks of a stretch, which has a program of its own."""
WEIGHED_WORDS = 6
"""int32 words of what `_weigh` writes for a row: peak and logarithm of the sum of all shares (float32), the least value
that the filters keep (float32), the last token of that value that they keep, a verdict."""

_INF = tl.constexpr(float("inf"))
_UNSETTLED = tl.constexpr(UNSETTLED)
_LEAST_LOGPROB = tl.constexpr(LEAST_LOGPROB)
_LEAST_REST = tl.constexpr(math.exp(LEAST_LOGPROB))
# Relative to the sum of all shares: sums in float32 are off by less.
_ROUGH_SHARE = tl.constexpr(1e-4)
# The place before minus infinity in the order of all float32.
_BELOW_ALL = tl.constexpr(-0x7F800002)
# Verdicts on a row's token, besides `UNSETTLED`. A token is refused in vain if nothing would be left of p after it.
_KEPT = tl.constexpr(0)
_REFUSED = tl.constexpr(1)
_REFUSED_IN_VAIN = tl.constexpr(2)


@triton.jit
def _peak(
    logits: tl.tensor, vocab_size: tl.tensor, divisor: tl.tensor, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr
) -> tl.tensor:
    """Find the largest tempered logit. NaN counts as infinite."""
    peaks = tl.full([BLOCK], -_INF, tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        own = tempered(logits, start + tl.arange(0, BLOCK), vocab_size, divisor)
        peaks = tl.maximum(peaks, tl.where(own == own, own, _INF))
    return tl.max(peaks, 0)


@triton.jit
def _above(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    floor: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EXACT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Count the tokens above a value, sum their shares relative to the most probable token's, and find the values next
    to it: the least above, and the greatest that is not above."""
    counts = tl.zeros([BLOCK], tl.int32)
    sums = tl.zeros([BLOCK], tl.float64 if EXACT else tl.float32)
    above, below = tl.full([BLOCK], _INF, tl.float32), tl.full([BLOCK], -_INF, tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        own = tempered(logits, start + tl.arange(0, BLOCK), vocab_size, divisor)
        shares = tl.exp((own - peak).to(tl.float64)) if EXACT else tl.exp(own - peak)
        counts += (own > floor).to(tl.int32)
        sums += tl.where(own > floor, shares, 0.0)
        above = tl.minimum(above, tl.where(own > floor, own, _INF))
        below = tl.maximum(below, tl.where(own > floor, -_INF, own))
    return tl.sum(counts, 0), tl.sum(sums.to(tl.float64), 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def _order_of(value: tl.tensor) -> tl.tensor:
    """Return the place of a float32 in the order of all of them: int64, the inverse of `float_of`."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _last_of_equals(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    value: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Find the `count`-th of the tokens that have a value."""
    seen, last = tl.cast(0, tl.int32), tl.cast(-1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        is_equal = (tempered(logits, token_ids, vocab_size, divisor) == value).to(tl.int32)
        is_last = (is_equal > 0) & (seen + tl.cumsum(is_equal, 0) == count)
        last = tl.maximum(last, tl.max(tl.where(is_last, token_ids, -1), 0))
        seen += tl.sum(is_equal, 0)
    return last


@triton.jit
def _last_kept(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    needed: tl.tensor,
    total: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find the last token that has fewer than `top_k` tokens before it, with shares of less than `needed`.

    Returns its value, the last token of that value that is kept, and how many tokens of that value are kept.
    """
    # As the least value that is kept, `high` satisfies this, and `low` does not.
    low, high = tl.cast(_BELOW_ALL, tl.int64), _order_of(peak)
    # Above the values that `low` and `high` stand for.
    count_low, count_high = vocab_size, tl.cast(0, tl.int32)
    is_rough = needed < _INF
    while high - low > 1:
        middle = (low + high) >> 1
        floor = float_of(middle)
        count, share, above, below = _above(logits, vocab_size, divisor, peak, floor, BLOCK, NUM_STAGES, False)
        if needed < _INF:
            # From here on values are so close to the last one that float32 cannot tell them apart.
            is_rough &= (tl.abs(share - needed) > total * _ROUGH_SHARE) | (count >= top_k)
            if not is_rough:
                count, share, above, below = _above(
                    logits, vocab_size, divisor, peak, floor, BLOCK, NUM_STAGES, True
                )  # fmt: skip
        is_kept = (count < top_k) & (share < needed)
        # All values between two that tokens have, have the same tokens above them. (0 has two places in the order.)
        high = tl.where(is_kept, tl.minimum(middle, _order_of(below)), high)
        low = tl.where(is_kept, low, tl.maximum(middle, _order_of(above) - 1))
        count_high, count_low = tl.where(is_kept, count, count_high), tl.where(is_kept, count_low, count)

    floor = float_of(high)
    last, num_last = vocab_size, tl.cast(0, tl.int32)
    if floor > -_INF:
        num_last = tl.minimum(count_low - count_high, top_k - count_high)
        if needed < _INF:
            _, share, _, _ = _above(logits, vocab_size, divisor, peak, floor, BLOCK, NUM_STAGES, True)
            own = tl.exp((floor - peak).to(tl.float64))
            # Keeps as many tokens as begin before the needed sum is reached; all of them if they have no share.
            most = tl.ceil((needed - share) / tl.where(own > 0, own, 1.0))
            most = tl.where(own > 0, tl.minimum(most, vocab_size.to(tl.float64)), vocab_size.to(tl.float64))
            num_last = tl.maximum(1, tl.minimum(num_last, most.to(tl.int32)))
        if num_last < count_low - count_high:
            last = _last_of_equals(logits, vocab_size, divisor, floor, num_last, BLOCK)
    return floor, last, num_last


@triton.jit
def _cut(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    least: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find the least value that all filters keep, and the last token of that value that they keep."""
    floor, last, num_last = tl.cast(-_INF, tl.float32), vocab_size, tl.cast(0, tl.int32)
    endless = tl.cast(_INF, tl.float64)
    if top_k < vocab_size:
        floor, last, num_last = _last_kept(
            logits, vocab_size, divisor, peak, top_k, endless, endless, BLOCK, NUM_STAGES
        )  # fmt: skip
    if top_p < 1:
        # top_p is a share of what top_k has left.
        _, total, _, _ = _above(logits, vocab_size, divisor, peak, floor, BLOCK, NUM_STAGES, True)
        total += num_last.to(tl.float64) * tl.exp((floor - peak).to(tl.float64))
        floor, last, _ = _last_kept(
            logits, vocab_size, divisor, peak, top_k, top_p * total, total, BLOCK, NUM_STAGES
        )  # fmt: skip
    return tl.maximum(floor, least), tl.where(least > floor, vocab_size, last)


@triton.jit
def _logprobs(
    values: tl.tensor,
    token_ids: tl.tensor,
    peak: tl.tensor,
    log_total: tl.tensor,
    floor: tl.tensor,
    last: tl.tensor,
) -> tl.tensor:
    """Compute log p of tokens from tempered logits: minus infinity for tokens that the filters do not keep."""
    is_kept = (values > floor) | ((values == floor) & (token_ids <= last))
    return tl.where(is_kept, values - peak - log_total, -_INF)


@triton.jit
def _weigh(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    rows: tl.tensor,
    row_floats: tl.tensor,
    row_doubles: tl.tensor,
    tested: tl.tensor,
    tested_doubles: tl.tensor,
    claimed_ids: tl.tensor,
    claimed_shares: tl.tensor,
    weighed: tl.tensor,
    weighed_floats: tl.tensor,
    BLOCK: tl.constexpr,
    CLAIMS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    TESTED_WORDS: tl.constexpr,
    WEIGHED_WORDS: tl.constexpr,
) -> None:
    """Find the probabilities of each row, and judge its token."""
    number = tl.program_id(0)
    rows += number * ROW_WORDS
    row_floats += number * ROW_WORDS
    tested += number * TESTED_WORDS
    logits += tl.load(tested + 3).to(tl.int64) * stride
    divisor = tl.load(row_floats + 4)
    top_k = tl.load(rows + 5)
    top_p = tl.load(row_doubles + number * (ROW_WORDS // 2))

    peak = _peak(logits, vocab_size, divisor, BLOCK, NUM_STAGES)
    is_settled = (peak > -_INF) & (peak < _INF)
    floor, last = tl.cast(-_INF, tl.float32), vocab_size
    if is_settled:
        least = peak + tl.load(row_floats + 6)
        floor, last = _cut(logits, vocab_size, divisor, peak, top_k, top_p, least, BLOCK, NUM_STAGES)
    totals, counts = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        token_ids = start + tl.arange(0, BLOCK)
        own = tempered(logits, token_ids, vocab_size, divisor)
        relative = _logprobs(own, token_ids, peak, 0.0, floor, last)
        totals += tl.exp(relative).to(tl.float64)
        counts += (relative > _LEAST_LOGPROB).to(tl.int32)
    log_total = tl.log(tl.sum(totals, 0)).to(tl.float32)
    count = tl.sum(counts, 0)

    token_id = tl.load(tested + 2)
    value = tempered(logits, tl.maximum(token_id, 0), vocab_size, divisor)
    probability = tl.exp(_logprobs(value, token_id, peak, log_total, floor, last).to(tl.float64))
    is_refused = (token_id >= 0) & (tl.load(tested_doubles + number * (TESTED_WORDS // 2)) >= probability)
    is_left = tl.zeros([CLAIMS], tl.int32)
    first, num_claims = tl.load(tested + 4), tl.load(tested + 5)
    for start in range(0, num_claims, CLAIMS):
        lanes = start + tl.arange(0, CLAIMS)
        is_claim = lanes < num_claims
        claimed = tl.load(claimed_ids + first + lanes, mask=is_claim, other=vocab_size)
        shares = tl.load(claimed_shares + first + lanes, mask=is_claim, other=2.0)
        own = tempered(logits, claimed, vocab_size, divisor)
        relative = _logprobs(own, claimed, peak, 0.0, floor, last)
        count -= tl.sum((relative > _LEAST_LOGPROB).to(tl.int32), 0)
        is_left |= (tl.exp((relative - log_total).to(tl.float64)) - shares > _LEAST_REST).to(tl.int32)
    # Tokens that are not claimed keep all of p.
    is_any_left = (count > 0) | (tl.max(is_left, 0) > 0)
    verdict = tl.where(is_refused, tl.where(is_any_left, _REFUSED, _REFUSED_IN_VAIN), _KEPT)

    weighed_floats += number * WEIGHED_WORDS
    tl.store(weighed_floats, peak)
    tl.store(weighed_floats + 1, log_total)
    tl.store(weighed_floats + 2, floor)
    tl.store(weighed + number * WEIGHED_WORDS + 3, last)
    tl.store(weighed + number * WEIGHED_WORDS + 4, tl.where(is_settled, verdict, _UNSETTLED))


@triton.jit
def _leave(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    rows: tl.tensor,
    row_floats: tl.tensor,
    tested: tl.tensor,
    claimed_ids: tl.tensor,
    claimed_shares: tl.tensor,
    chains: tl.tensor,
    weighed: tl.tensor,
    weighed_floats: tl.tensor,
    num_kept: tl.tensor,
    residuals: tl.tensor,
    drawn: tl.tensor,
    drawn_floats: tl.tensor,
    drawn_doubles: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    CLAIMS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    TESTED_WORDS: tl.constexpr,
    WEIGHED_WORDS: tl.constexpr,
    CHAIN_WORDS: tl.constexpr,
) -> None:
    """Write a stretch of the row that each chain's next token is drawn from, [chains, vocab], and how it is drawn."""
    chain = tl.program_id(0)
    number, length = tl.load(chains + chain * CHAIN_WORDS), tl.load(chains + chain * CHAIN_WORDS + 1)
    kept = tl.cast(0, tl.int32)
    verdict = tl.load(weighed + number * WEIGHED_WORDS + 4)
    while (kept < length) & (verdict == _KEPT):
        kept += 1
        number += 1
        verdict = tl.load(weighed + number * WEIGHED_WORDS + 4)
    tested += number * TESTED_WORDS
    logits += tl.load(tested + 3).to(tl.int64) * stride
    residuals += chain.to(tl.int64) * vocab_size
    divisor = tl.load(row_floats + number * ROW_WORDS + 4)
    weighed_floats += number * WEIGHED_WORDS
    peak, log_total, floor = tl.load(weighed_floats), tl.load(weighed_floats + 1), tl.load(weighed_floats + 2)
    last = tl.load(weighed + number * WEIGHED_WORDS + 3)

    begin = tl.program_id(1) * NUM_BLOCKS * BLOCK
    end = tl.minimum(begin + NUM_BLOCKS * BLOCK, vocab_size)
    for start in range(begin, end, BLOCK):
        token_ids = start + tl.arange(0, BLOCK)
        own = tempered(logits, token_ids, vocab_size, divisor)
        logprobs = _logprobs(own, token_ids, peak, log_total, floor, last)
        # After a whole chain the sampler's own scores, so that the draw is the sampler's.
        values = tl.where((kept == length) & (logprobs > -_INF), own, logprobs)
        tl.store(residuals + token_ids, values, mask=token_ids < end)
    if verdict == _REFUSED:
        # Overwrites what other threads have written.
        tl.debug_barrier()
        first, num_claims = tl.load(tested + 4), tl.load(tested + 5)
        for start in range(0, num_claims, CLAIMS):
            lanes = start + tl.arange(0, CLAIMS)
            is_claim = lanes < num_claims
            claimed = tl.load(claimed_ids + first + lanes, mask=is_claim, other=vocab_size)
            shares = tl.load(claimed_shares + first + lanes, mask=is_claim, other=2.0)
            own = tempered(logits, claimed, vocab_size, divisor)
            rest = tl.exp(_logprobs(own, claimed, peak, log_total, floor, last).to(tl.float64)) - shares
            values = tl.where(rest > 0, tl.log(tl.where(rest > 0, rest, 1.0)).to(tl.float32), -_INF)
            tl.store(residuals + claimed, values, mask=(claimed >= begin) & (claimed < end))
    if tl.program_id(1) == 0:
        tl.store(num_kept + chain, tl.where(verdict == _UNSETTLED, _UNSETTLED, kept))
        # Temperature and filters were applied to p before the residual was taken.
        rows += number * ROW_WORDS
        drawn += chain * ROW_WORDS
        tl.store(drawn_doubles + chain * (ROW_WORDS // 2), tl.cast(1.0, tl.float64))
        tl.store(drawn + 2, tl.load(rows + 2))
        tl.store(drawn + 3, tl.load(rows + 3))
        tl.store(drawn_floats + chain * ROW_WORDS + 4, 1.0)
        tl.store(drawn + 5, vocab_size)
        tl.store(drawn_floats + chain * ROW_WORDS + 6, -_INF)


def judge_chains(
    logits: Tensor, rows: Tensor, tested: Tensor, claimed_ids: Tensor, claimed_shares: Tensor, chains: Tensor
) -> Tensor:
    """Judge chains by the ratio rule.

    Args:
        logits: float32 [all rows, vocab], contiguous in a row.
        rows: int32 [rows, ROW_WORDS]: how each row of the chains is drawn from.
        tested: int32 [rows, TESTED_WORDS]: each row's number in the logits, and what is judged there.
        claimed_ids: int32 [claims], all within the vocabulary, each once for a row.
        claimed_shares: float64 [claims]: their q.
        chains: int32 [chains, CHAIN_WORDS]: first row of each, and number of drafted tokens, one less than the chain's
            rows.

    Returns:
        int32 [2, chains]: how many tokens are kept, and the next token. `UNSETTLED` stands in either place if the host
        has to judge.
    """
    vocab_size, num_chains = logits.shape[-1], len(chains)
    weighed, num_kept = rows.new_empty(len(rows), WEIGHED_WORDS), rows.new_empty(num_chains)
    residuals, drawn = logits.new_empty(num_chains, vocab_size), rows.new_empty(num_chains, ROW_WORDS)
    words = {"ROW_WORDS": ROW_WORDS, "TESTED_WORDS": TESTED_WORDS, "WEIGHED_WORDS": WEIGHED_WORDS}
    common = logits, logits.stride(0), vocab_size, rows, rows.view(torch.float32)
    _weigh[len(rows),](
        *common, rows.view(torch.float64), tested, tested.view(torch.float64), claimed_ids, claimed_shares,
        weighed, weighed.view(torch.float32), **words, **WEIGHING,
    )  # fmt: skip
    num_stretches = triton.cdiv(vocab_size, LEAVING["BLOCK"] * LEAVING["NUM_BLOCKS"])
    _leave[num_chains, num_stretches](
        *common, tested, claimed_ids, claimed_shares, chains, weighed, weighed.view(torch.float32), num_kept,
        residuals, drawn, drawn.view(torch.float32), drawn.view(torch.float64),
        CHAIN_WORDS=CHAIN_WORDS, **words, **LEAVING,
    )  # fmt: skip
    return torch.stack([num_kept, best_tokens(residuals, drawn, 1)[0, :, 0]])
