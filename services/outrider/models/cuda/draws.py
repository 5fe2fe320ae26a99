"""Draws on the device, the bits of `outrider.models.sampling`: the best tokens of `logits / temperature + noise`.

1. `_offer_splits` finds the best tokens of every stretch of a row. Rough noise tells which tokens can be among them.
   Only those get exact noise, in float64: all of them at once if several tokens are looked for; one by one if it is one
   token, or if too many can be among the best.
2. `_settle` joins the stretches, and checks which of the found tokens the filters keep. Filters keep the most probable
   tokens. So tokens that are less probable than a refused one are refused too, and the best are looked for again among
   the tokens that are more probable. No row is sorted.

A row that kernels do not settle has `UNSETTLED`: its best logit is no finite number, or too many tokens can win.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.models.cuda.noise import ROUGH_ERROR, gumbel_of_words, hashed, rough_gumbel_of_words
from outrider.models.cuda.rows import ROW_WORDS, UNSETTLED

OFFERING = {"BLOCK": 512, "NUM_BLOCKS": 16, "num_warps": 4}
"""Launch of `_offer_splits` for one token: tokens of a block, and blocks of a stretch, which has a program of its
own."""
OFFERING_SEVERAL = {"BLOCK": 512, "NUM_BLOCKS": 8, "num_warps": 4}
"""Launch of `_offer_splits` for several tokens: a program has the whole stretch in registers, and each column of
these blocks lies in one thread."""
SETTLING = {"BLOCK": 1024, "WIDTH": 512, "NUM_STAGES": 3, "num_warps": 8}
"""Launch of `_settle`: tokens of a block, and of a block that is counted; some of the latter are read ahead."""

_INF = tl.constexpr(float("inf"))
_UNSETTLED = tl.constexpr(UNSETTLED)
_SLACK = tl.constexpr(2 * ROUGH_ERROR)
# Relative to a score: eight units in the last place of float32, to which scores are rounded.
_RELATIVE_SLACK = tl.constexpr(2.0**-20)
# Tokens of a block that get exact noise. Mostly it is one; they are many only where noise is lost in rounding.
_MAX_TRIES = tl.constexpr(64)
# Groups of a stretch's tokens, by their ids: about nine tokens reach the K-th largest of their maxima.
_NUM_GROUPS = tl.constexpr(32)
# Tokens of a stretch that get exact noise at once.
_NUM_SLOTS = tl.constexpr(32)
# Copies of the slots, one for each of four warps.
_NUM_COPIES = tl.constexpr(4)
# If all tokens are equally probable, each round leaves about half of them.
_MAX_ROUNDS = tl.constexpr(40)
# Relative to the sum of all shares: sums in float32 are off by less.
_ROUGH_SHARE = tl.constexpr(1e-4)


@triton.jit
def tempered(logits: tl.tensor, token_ids: tl.tensor, vocab_size: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    """Divide the logits of tokens by the temperature. Beyond the vocabulary they are minus infinity."""
    return tl.div_rn(tl.load(logits + token_ids, mask=token_ids < vocab_size, other=-_INF), divisor)


@triton.jit
def _offer_block(
    logits: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    is_noisy: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    bound: tl.tensor,
    bound_id: tl.tensor,
    scores: tl.tensor,
    ids: tl.tensor,
    tries: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Put a block's tokens that are more probable than the bound among the K best, if they belong there."""
    token_ids = start + tl.arange(0, BLOCK)
    values = tempered(logits, token_ids, vocab_size, divisor)
    # NaN counts as infinite.
    peak = tl.max(tl.where(values == values, values, _INF), 0)
    left = tries
    if peak >= bound:
        is_open = (values > bound) | ((values == bound) & (token_ids < bound_id))
        noise = tl.where(is_noisy, rough_gumbel_of_words(hashed(token_ids, first_key, second_key)), 0.0)
        rough = tl.where(is_open, values + noise, -_INF)
        top = tl.max(rough, 0)
        least = tl.min(scores, 0)
        slack = tl.where(is_noisy & (top > -_INF), _SLACK + _RELATIVE_SLACK * tl.abs(top), 0.0)
        left = _MAX_TRIES
        # Without noise, a token that equals the least one so far comes later, has a higher id, and does not belong
        # there.
        while (top > -_INF) & ((top > least) | (is_noisy & (top + slack >= least))) & (left > 0):
            # The lowest id of equals.
            token_id = start + tl.argmax(rough, 0)
            value = tl.max(tl.where(token_ids == token_id, values, -_INF), 0)
            score = value + tl.where(is_noisy, gumbel_of_words(hashed(token_id, first_key, second_key)), 0.0)
            worst_id = tl.max(tl.where(scores == least, ids, -1), 0)
            is_better = (score > least) | ((score == least) & (token_id < worst_id))
            is_place = ids == tl.where(is_better, worst_id, -1)
            scores = tl.where(is_place, score, scores)
            ids = tl.where(is_place, token_id, ids)
            least = tl.min(scores, 0)
            rough = tl.where(token_ids == token_id, -_INF, rough)
            top = tl.max(rough, 0)
            left -= 1
    return scores, ids, tl.minimum(tries, left), peak


@triton.jit
def _reaching(own: tl.tensor, rough: tl.tensor, is_noisy: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Mark the tokens of a tile, [blocks, BLOCK] of logits and of rough scores, that can be among the K best."""
    tl.static_assert(BLOCK // _NUM_GROUPS * _NUM_GROUPS == BLOCK)
    tl.static_assert(K <= _NUM_GROUPS)
    tl.static_assert(K <= _NUM_SLOTS)
    # Each maximum is a token of its own, so K tokens reach the K-th largest. A token that beats one of these by the
    # exact scores comes within the slack of it by the rough ones. The slack is enough for products in place of
    # quotients: both tokens' scores are off by two and a half units in the last place each, and by `ROUGH_ERROR`.
    maxima = tl.max(tl.reshape(tl.max(rough, 0), [BLOCK // _NUM_GROUPS, _NUM_GROUPS]), 0)
    num_reaching = tl.sum((maxima[:, None] <= maxima[None, :]).to(tl.int32), 1)
    bound = tl.max(tl.where(num_reaching >= K, maxima, -_INF), 0)
    slack = tl.where(is_noisy & (bound > -_INF), _SLACK + _RELATIVE_SLACK * tl.abs(bound), 0.0)
    # Products may be infinite where quotients are not. The bound is then NaN or minus infinity, and all are marked.
    return (own > -_INF) & ~(rough < bound - slack)


@triton.jit
def _offer_at_once(
    logits: tl.tensor,
    start: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    is_noisy: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    slots: tl.tensor,
    scores_out: tl.tensor,
    ids_out: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Store the K best tokens of a stretch, unless too many can be among them. Return whether they were stored, and the
    peak."""
    token_ids = start + tl.arange(0, NUM_BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    # Without the hint a thread loads four neighbours at once but stores to slots one by one, and the pointers of a
    # whole tile move from thread to thread.
    own = tl.load(tl.multiple_of(logits + token_ids, [1, 1]), mask=token_ids < vocab_size, other=-_INF)
    # NaN counts as infinite. The division changes no order.
    peak = tl.div_rn(tl.max(tl.max(tl.where(own == own, own, _INF), 0), 0), divisor)
    noise = tl.where(is_noisy, rough_gumbel_of_words(hashed(token_ids, first_key, second_key)), 0.0)
    # A product is quicker than a correctly rounded division, which only slots need. The reciprocal is finite: no
    # temperature is below 1e-30 (`SamplingParams`).
    is_open = _reaching(own, own * tl.div_rn(1.0, divisor) + noise, is_noisy, K, BLOCK).to(tl.int32)
    # Every open token gets a slot, column after column, through memory: threads read what others write.
    of_columns = tl.sum(is_open, 0)
    places = (tl.cumsum(of_columns, 0) - of_columns)[None, :] + tl.cumsum(is_open, 0) - 1
    num_open = tl.sum(of_columns, 0)
    tl.store(slots + places, token_ids, mask=(is_open > 0) & (places < _NUM_SLOTS))
    tl.debug_barrier()
    is_done = num_open <= _NUM_SLOTS
    if is_done:
        # Each warp has a copy. Without the maxima over copies each thread would compute the noise of eight slots, in
        # the layout in which they are compared.
        lanes = tl.zeros([_NUM_COPIES, 1], tl.int32) + tl.arange(0, _NUM_SLOTS)[None, :]
        # Free slots have ids of their own, beyond the vocabulary, and minus infinity.
        ids = tl.load(slots + lanes, mask=lanes < num_open, other=0)
        ids = tl.where(lanes < num_open, ids, vocab_size + lanes)
        scores = tempered(logits, ids, vocab_size, divisor)
        scores += tl.where(is_noisy, gumbel_of_words(hashed(ids, first_key, second_key)), 0.0)
        scores, ids = tl.max(scores, 0), tl.max(ids, 0)
        is_before = scores[:, None] > scores[None, :]
        is_before |= (scores[:, None] == scores[None, :]) & (ids[:, None] < ids[None, :])
        ranks = tl.sum(is_before.to(tl.int32), 0)
        tl.store(scores_out + ranks, scores, mask=ranks < K)
        tl.store(ids_out + ranks, ids, mask=ranks < K)
    return is_done, peak


@triton.jit
def _offer_one_by_one(
    logits: tl.tensor,
    first: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    is_noisy: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    scores_out: tl.tensor,
    ids_out: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
) -> tl.tensor:
    """Store the K best tokens of a stretch, block by block. Return the peak, infinite if too many tokens can win."""
    lanes = tl.arange(0, K)
    # Free places have ids of their own, beyond the vocabulary.
    scores, ids = tl.full([K], -_INF, tl.float32), vocab_size + lanes
    tries, peak = _MAX_TRIES, -_INF
    for start in range(first, tl.minimum(first + NUM_BLOCKS * BLOCK, vocab_size), BLOCK):
        scores, ids, tries, own_peak = _offer_block(
            logits, start, vocab_size, divisor, is_noisy, first_key, second_key, -_INF, vocab_size,
            scores, ids, tries, K, BLOCK,
        )  # fmt: skip
        peak = tl.maximum(peak, own_peak)
    tl.store(scores_out + lanes, scores)
    tl.store(ids_out + lanes, ids)
    return tl.where(tries > 0, peak, _INF)


@triton.jit
def _offer_splits(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    row_words: tl.tensor,
    row_floats: tl.tensor,
    slots: tl.tensor,
    scores_out: tl.tensor,
    ids_out: tl.tensor,
    peaks: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
) -> None:
    """Find the K best tokens of a stretch, [rows, stretches, K], and its largest tempered logit, [rows, stretches]."""
    row = tl.program_id(0)
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    logits += row.to(tl.int64) * stride
    first_key = tl.load(row_words + row * ROW_WORDS + 2).to(tl.uint32, bitcast=True)
    second_key = tl.load(row_words + row * ROW_WORDS + 3).to(tl.uint32, bitcast=True)
    temperature = tl.load(row_floats + row * ROW_WORDS + 4)
    is_noisy = temperature > 0
    divisor = tl.where(is_noisy, temperature, 1.0)
    first = tl.program_id(1) * NUM_BLOCKS * BLOCK
    is_done, peak = False, -_INF
    if K > 1:
        is_done, peak = _offer_at_once(
            logits, first, vocab_size, divisor, is_noisy, first_key, second_key,
            slots + place * _NUM_SLOTS, scores_out + place * K, ids_out + place * K, K, BLOCK, NUM_BLOCKS,
        )  # fmt: skip
    if not is_done:
        peak = _offer_one_by_one(
            logits, first, vocab_size, divisor, is_noisy, first_key, second_key,
            scores_out + place * K, ids_out + place * K, K, BLOCK, NUM_BLOCKS,
        )  # fmt: skip
    tl.store(peaks + place, peak)


@triton.jit
def _standing(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    EXACT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Count tokens more probable than each of K, sum their shares of the best one's, and sum all shares."""
    counts = tl.zeros([BLOCK, K], tl.int32)
    sums = tl.zeros([BLOCK, K], tl.float64 if EXACT else tl.float32)
    total = tl.zeros([BLOCK], tl.float64 if EXACT else tl.float32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        token_ids = start + tl.arange(0, BLOCK)
        own = tempered(logits, token_ids, vocab_size, divisor)
        shares = tl.exp((own - peak).to(tl.float64)) if EXACT else tl.exp(own - peak)
        is_more = own[:, None] > values[None, :]
        is_more |= (own[:, None] == values[None, :]) & (token_ids[:, None] < ids[None, :])
        counts += is_more.to(tl.int32)
        sums += tl.where(is_more, shares[:, None], 0.0)
        total += shares
    return tl.sum(counts, 0), tl.sum(sums.to(tl.float64), 0), tl.sum(total.to(tl.float64), 0)


@triton.jit
def float_of(order: tl.tensor) -> tl.tensor:
    """Return the float32 that comes at a place, an int64, in the order of all of them."""
    bits = order.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_best(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    BLOCK: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tl.tensor:
    """Sum the shares of the `top_k` most probable tokens in float64, by halving the values that the last may have."""
    # From minus infinity, which all tokens reach, to the value after infinity.
    low, high = tl.cast(-0x7F800001, tl.int64), tl.cast(0x7F800001, tl.int64)
    count = vocab_size
    while (high - low > 1) & (count != top_k):
        middle = (low + high) >> 1
        floor = float_of(middle)
        counts = tl.zeros([BLOCK], tl.int32)
        for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
            own = tempered(logits, start + tl.arange(0, BLOCK), vocab_size, divisor)
            counts += (own >= floor).to(tl.int32)
        count = tl.sum(counts, 0)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count >= top_k, high, middle)
    floor = float_of(low)
    total, counts = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab_size, BLOCK, num_stages=NUM_STAGES):
        own = tempered(logits, start + tl.arange(0, BLOCK), vocab_size, divisor)
        total += tl.where(own > floor, tl.exp((own - peak).to(tl.float64)), 0.0)
        counts += (own > floor).to(tl.int32)
    # The others equal the floor.
    rest = (top_k - tl.sum(counts, 0)).to(tl.float64)
    return tl.sum(total, 0) + rest * tl.exp((floor - peak).to(tl.float64))


@triton.jit
def _kept(
    logits: tl.tensor,
    vocab_size: tl.tensor,
    divisor: tl.tensor,
    peak: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    floor: tl.tensor,
    values: tl.tensor,
    ids: tl.tensor,
    total_of_best: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_STAGES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Mark those of K tokens that the filters keep. `_sum_of_best` is called once: until then its result is below 0."""
    counts, sums, total = _standing(logits, vocab_size, divisor, peak, values, ids, K, WIDTH, NUM_STAGES, False)
    is_kept = (counts < top_k) & (values >= floor)
    is_cut = top_k < vocab_size
    if top_p < 1:
        # The shares of the best tokens sum to at least those of a token and the tokens before it.
        needed = top_p * tl.where(is_cut, sums + tl.exp((values - peak).to(tl.float64)), total)
        unsure = sums >= needed - _ROUGH_SHARE * total
        unsure &= sums <= tl.where(is_cut, _INF, needed + _ROUGH_SHARE * total)
        if tl.max((unsure & is_kept & (ids < vocab_size)).to(tl.int32), 0) > 0:
            counts, sums, total = _standing(logits, vocab_size, divisor, peak, values, ids, K, WIDTH, NUM_STAGES, True)
            if is_cut:
                if total_of_best < 0:
                    total_of_best = _sum_of_best(logits, vocab_size, divisor, peak, top_k, BLOCK, NUM_STAGES)
                total = total_of_best
            needed = tl.zeros([K], tl.float64) + top_p * total
        is_kept &= sums < needed
    return is_kept, total_of_best


@triton.jit
def _joined(
    split_scores: tl.tensor,
    split_ids: tl.tensor,
    row: tl.tensor,
    num_splits: tl.tensor,
    vocab_size: tl.tensor,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Find the K best of what all stretches offer: scores and ids."""
    lanes, offers = tl.arange(0, K), tl.arange(0, SPLITS * K)
    place = row.to(tl.int64) * num_splits * K + offers
    offered = tl.load(split_scores + place, mask=offers < num_splits * K, other=-_INF)
    offered_ids = tl.load(split_ids + place, mask=offers < num_splits * K, other=0x7FFFFFFF)
    scores, ids = tl.full([K], -_INF, tl.float32), vocab_size + lanes
    for lane in range(K):
        top = tl.max(offered, 0)
        token_id = tl.min(tl.where(offered == top, offered_ids, 0x7FFFFFFF), 0)
        # Nothing is left where the best is minus infinity.
        is_place = lanes == tl.where(top > -_INF, lane, K)
        scores, ids = tl.where(is_place, top, scores), tl.where(is_place, token_id, ids)
        offered = tl.where((offered == top) & (offered_ids == token_id), -_INF, offered)
    return scores, ids


# The address of the scores depends on the number of rows, and the kernel must not be compiled again for that.
@triton.jit(do_not_specialize_on_alignment=("ids_out", "scores_out"))
def _settle(
    logits: tl.tensor,
    stride: tl.tensor,
    vocab_size: tl.tensor,
    row_words: tl.tensor,
    row_floats: tl.tensor,
    row_doubles: tl.tensor,
    split_scores: tl.tensor,
    split_ids: tl.tensor,
    peaks: tl.tensor,
    num_splits: tl.tensor,
    ids_out: tl.tensor,
    scores_out: tl.tensor,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
) -> None:
    """Find the K best tokens that a row's filters allow, the best first: ids and scores, [rows, K] each."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    first_key = tl.load(row_words + row * ROW_WORDS + 2).to(tl.uint32, bitcast=True)
    second_key = tl.load(row_words + row * ROW_WORDS + 3).to(tl.uint32, bitcast=True)
    temperature = tl.load(row_floats + row * ROW_WORDS + 4)
    top_k = tl.load(row_words + row * ROW_WORDS + 5)
    log_min_p = tl.load(row_floats + row * ROW_WORDS + 6)
    top_p = tl.load(row_doubles + row * (ROW_WORDS // 2))
    is_noisy = temperature > 0
    divisor = tl.where(is_noisy, temperature, 1.0)
    lanes = tl.arange(0, K)

    splits = tl.arange(0, SPLITS)
    peak = tl.max(tl.load(peaks + row.to(tl.int64) * num_splits + splits, mask=splits < num_splits, other=-_INF), 0)
    scores, ids = _joined(split_scores, split_ids, row, num_splits, vocab_size, K, SPLITS)

    is_settled = (peak > -_INF) & (peak < _INF)
    is_open = is_settled & ((top_k < vocab_size) | (top_p < 1) | (log_min_p > -_INF))
    total_of_best = tl.cast(-1.0, tl.float64)
    rounds = _MAX_ROUNDS
    while is_open & (rounds > 0):
        rounds -= 1
        # Minus infinity for a free place.
        values = tempered(logits, ids, vocab_size, divisor)
        is_kept, total_of_best = _kept(
            logits, vocab_size, divisor, peak, top_k, top_p, peak + log_min_p, values, ids, total_of_best,
            K, BLOCK, WIDTH, NUM_STAGES,
        )  # fmt: skip
        is_refused = (ids < vocab_size) & ~is_kept
        is_open = tl.max(is_refused.to(tl.int32), 0) > 0
        if is_open:
            # The most probable refused token: every token that is kept comes before it.
            bound = tl.max(tl.where(is_refused, values, -_INF), 0)
            bound_id = tl.min(tl.where(is_refused & (values == bound), ids, 0x7FFFFFFF), 0)
            scores, ids = tl.full([K], -_INF, tl.float32), vocab_size + lanes
            tries = _MAX_TRIES
            for start in range(0, vocab_size, BLOCK):
                scores, ids, tries, _ = _offer_block(
                    logits, start, vocab_size, divisor, is_noisy, first_key, second_key, bound, bound_id,
                    scores, ids, tries, K, BLOCK,
                )  # fmt: skip
            is_settled &= tries > 0
            is_open &= tries > 0

    is_settled &= ~is_open
    is_before = scores[:, None] > scores[None, :]
    is_before |= (scores[:, None] == scores[None, :]) & (ids[:, None] < ids[None, :])
    ranks = tl.sum(is_before.to(tl.int32), 0)
    tl.store(scores_out + row * K + ranks, scores)
    tl.store(ids_out + row * K + ranks, tl.where(is_settled, ids, _UNSETTLED))


def best_tokens(logits: Tensor, rows: Tensor, k: int) -> Tensor:
    """Find the k best tokens of every row that its filters allow, and their scores.

    Args:
        logits: float32 [rows, vocab], contiguous in a row.
        rows: int32 [rows, ROW_WORDS].
        k: 1 or `MAX_NUM_BEST`.

    Returns:
        int32 [2, rows, k]: token ids, and the bits of float32 scores, the best first, equals by the lower id. Where
        fewer tokens are allowed, ids beyond the vocabulary with minus infinity follow. The ids of rows that the host
        has to draw are `UNSETTLED`.
    """
    num_rows, vocab_size = logits.shape
    offering = OFFERING if k == 1 else OFFERING_SEVERAL
    num_splits = triton.cdiv(vocab_size, offering["BLOCK"] * offering["NUM_BLOCKS"])
    split_scores, peaks = logits.new_empty(num_rows, num_splits, k), logits.new_empty(num_rows, num_splits)
    split_ids, found = rows.new_empty(num_rows, num_splits, k), rows.new_empty(2, num_rows, k)
    # If k is 1, nothing is written there.
    slots = split_ids if k == 1 else rows.new_empty(num_rows, num_splits, _NUM_SLOTS.value)
    common = logits, logits.stride(0), vocab_size, rows, rows.view(torch.float32)
    _offer_splits[num_rows, num_splits](
        *common, slots, split_scores, split_ids, peaks, K=k, ROW_WORDS=ROW_WORDS, **offering
    )  # fmt: skip
    _settle[num_rows,](
        *common, rows.view(torch.float64), split_scores, split_ids, peaks, num_splits,
        found[0], found[1].view(torch.float32),
        K=k, SPLITS=triton.next_power_of_2(num_splits), ROW_WORDS=ROW_WORDS, **SETTLING,
    )  # fmt: skip
    return found
