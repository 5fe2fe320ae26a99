"""Drawing tokens under the match rule: the best token of `logits / temperature + noise`, among those allowed.

The order of the filters is temperature, top_k, top_p (on what top_k left, renormalised), min_p (relative to the
most probable token). Each keeps a set of the most probable tokens, so together they keep the smallest of the sets.
The most probable token always stays. Among equally probable tokens the lower id comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.growth import Candidate
from outrider.core.noise import gumbel, row_key
from outrider.core.params import SamplingParams
from outrider.models.cpu.contenders import Best, Contenders
from outrider.models.host_copy import HostCopy
from outrider.models.torch.noise import NoiseRows

if TYPE_CHECKING:
    from outrider.models.cuda.device_draws import DeviceDraws

Logits: TypeAlias = Tensor
"""float32 [rows, vocab]: a name for signatures outside of this package, where torch is not at home."""

NUM_NORMALISED = 8
"""Best perturbed scores over which the log-probabilities of drafted candidates are normalised."""
# A draft model may be surer of the target's draw than its own probabilities say, because both share the noise and,
# mostly, the order of the best tokens. Its log-probabilities are multiplied by these. Fitted by log-loss on 960
# positions of held-out code, demo pair: best at 3 for temperature 0 (mean probability .95, agreement .95; without:
# .79), 1.5 to 2 for 0.7 and 1 (.82 and .70; agreement .81 and .71; without: .71 and .54). They decide where chains end,
# never what is accepted.
GREEDY_SHARPNESS = 3.0
SAMPLED_SHARPNESS = 1.7
LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 1e-30, 1e38
"""Temperatures beyond count as these: the best token has all the probability, or all have the same, long before, and
float32 is infinite or not a number soon after."""
LAZY_VOCAB_SIZE = 32_000
"""From this vocabulary size on, a CPU computes noise only for tokens that can win (`Contenders`). A row alone takes as
long either way at this size, several rows a third. With fewer tokens, blocks of noise serve several output indices."""
NUM_PRESORTED = 256
"""Best tokens of a row that are sorted first. Only if top_p needs more of them is the whole vocabulary sorted."""
MANY_TOKENS = 8192
"""Tokens: where filters leave more than these, only those that can win get noise again."""
FOLDS = 32
"""Values of which one is compared at first, where only the largest are looked for. More make fewer comparisons, and of
them a rougher choice."""


class DrawnTokens:
    """Holds the tokens that were drawn, one for each row. A device may still be at it."""

    def __init__(self, on_device: Tensor, redraw: Callable[[Sequence[int]], Sequence[int]] | None = None) -> None:
        """
        Args:
            on_device: Whole numbers [rows], on the device that draws. Below 0 where it leaves a row to the host.
            redraw: Draws for these rows on the host. None means that none is left to it.
        """
        self.on_device = on_device
        """Whole numbers [rows]: the tokens where they were drawn, but for `unsettled`, which are below 0."""
        self.unsettled: Sequence[int] = ()
        """Rows that the host had to draw for. To be asked for behind `wait`."""
        self._copy, self._redraw = HostCopy(on_device), redraw

    def wait(self) -> list[int]:
        """Returns a token id for each row when they are there."""
        token_ids: list[int] = self._copy.wait().tolist()
        if self._redraw is not None and min(token_ids, default=0) < 0:
            self.unsettled = [row for row, token_id in enumerate(token_ids) if token_id < 0]
            for row, token_id in zip(self.unsettled, self._redraw(self.unsettled), strict=True):
                token_ids[row] = token_id
        return token_ids


class Sampler:
    """Draws for every row of a packed forward. A draw is a pure function; the only state is noise that is kept."""

    def __init__(self) -> None:
        self._noise: NoiseRows | None = None
        self._noise_key: tuple[int, torch.device] | None = None
        self._contenders: Contenders | None = None
        self._device_draws: DeviceDraws | None = None

    def draw(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        rows: Tensor | None = None,
    ) -> list[int]:
        """Draws the target's token for every row.

        Args:
            logits: float32 [rows, vocab].
            params: One for each row.
            output_indices: For each row, how many tokens the generation put out before the one drawn here.
            rows: The same for the kernels of a GPU, where a forward has brought it there (`RowDraws.on_device`).

        Returns:
            A token id for each row.
        """
        return self.begin(logits, params, output_indices, rows).wait()

    @torch.inference_mode()
    def begin(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        rows: Tensor | None = None,
    ) -> DrawnTokens:
        """Begins to draw the target's token for every row, see `draw`. A GPU is told of it, and not waited for."""
        is_greedy = all(p.is_greedy for p in params)
        if is_greedy and logits.device.type != "cpu":
            return DrawnTokens(logits.argmax(-1))
        if not is_greedy and has_kernels(logits):
            best = self._kernels().begin(logits, params, output_indices, 1, rows)
            return DrawnTokens(best[0, :, 0], partial(self._redrawn, logits, params, output_indices))
        if is_greedy:
            token_ids = _argmax(logits)
        elif _is_lazy(logits):
            token_ids = [token_ids[0] for token_ids, _ in self._lazy_best(logits, params, output_indices, 1)]
        else:
            token_ids = _argmax(self._perturbed(logits, params, output_indices))
        return DrawnTokens(torch.tensor(token_ids, dtype=torch.long))

    @torch.inference_mode()
    def candidates(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        is_raw: Sequence[bool] = (),
        rows: Tensor | None = None,
    ) -> list[list[Candidate]]:
        """Guesses from a draft model's logits which tokens the target will most probably draw.

        Args:
            logits: float32 [rows, vocab].
            params: One for each row.
            output_indices: For each row, how many tokens the generation put out before the one drawn here.
            k: Most candidates of a row.
            is_raw: True for rows whose candidates are scored by the model's own probabilities, without temperature.
                Empty means that no row is.
            rows: See `draw`.

        Returns:
            For each row at most k candidates, best first. The log-probability is that of the
            target drawing the same: the log-softmax over the best 8 of the perturbed scores (at temperature 0, of the
            logits) times `SAMPLED_SHARPNESS` (`GREEDY_SHARPNESS`). A row has fewer if fewer tokens are allowed.
        """
        is_greedy = [p.is_greedy for p in params]
        # At least as many as `_ranked` normalises over, even where fewer are wanted.
        count = min(max(k, NUM_NORMALISED), logits.shape[-1])
        if count <= NUM_NORMALISED and has_kernels(logits):
            best = self._device_best(logits, params, output_indices, count, rows)
        elif all(is_greedy):
            best = _topk(logits, count)
        elif _is_lazy(logits):
            best = self._lazy_best(logits, params, output_indices, count)
        else:
            best = _topk(self._perturbed(logits, params, output_indices), count)
        found = [ranked(of_row, k, is_greedy=greedy) for of_row, greedy in zip(best, is_greedy, strict=True)]
        if any(is_raw):
            own = logits.log_softmax(-1)
            found = [_rescored(each, row) if raw else each for each, row, raw in zip(found, own, is_raw, strict=True)]
        return found

    @torch.inference_mode()
    def draw_among(
        self, logits: Tensor, token_ids: npt.NDArray[np.intp], params: SamplingParams, output_index: int
    ) -> int:
        """Draws from a few tokens of a row, as `draw` does where all others have a logit of minus infinity.

        Args:
            logits: float32 [1, vocab].
            token_ids: Tokens that may be drawn, rising. Where all have minus infinity, they count as equal.
            params: Of the row.
            output_index: How many tokens the generation put out before.
        """
        few = logits[:, torch.from_numpy(token_ids).to(logits.device)].cpu()
        if not bool(few.amax() > -math.inf):
            few = torch.zeros_like(few)
        if params.is_greedy:
            return int(token_ids[_argmax(few)[0]])
        scores = tempered_and_filtered(few, [params])
        scores += torch.from_numpy(gumbel(params.seed, output_index, token_ids))
        return int(token_ids[_argmax(scores)[0]])

    def _lazy_best(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], k: int
    ) -> list[Best]:
        """Finds the best tokens of every row, and their scores, by noise for few: the best of `_perturbed`, at most k.

        For CPUs. Equal scores go by the lower id.
        """
        if self._contenders is None or self._contenders.vocab_size != logits.shape[-1]:
            self._contenders = Contenders(logits.shape[-1])
        plain = [row for row, p in enumerate(params) if not p.is_greedy and not p.has_filters]
        found: dict[int, Best] = {}
        if plain:
            rows = logits if len(plain) == len(params) else logits[plain]
            of_rows = [params[row] for row in plain], [output_indices[row] for row in plain]
            best = _of_contenders(self._contenders, rows.numpy(), *of_rows, k)
            found = {row: of_row for row, of_row in zip(plain, best, strict=True) if of_row is not None}
        return [
            found[row] if row in found else _best(self._contenders, logits[row : row + 1], p, index, k)
            for row, (p, index) in enumerate(zip(params, output_indices, strict=True))
        ]

    def _kernels(self) -> DeviceDraws:
        if self._device_draws is None:
            # Here, because only an installation for CUDA has Triton.
            from outrider.models.cuda import draws
            from outrider.models.cuda.device_draws import DeviceDraws

            self._device_draws = DeviceDraws(draws.best_tokens)
        return self._device_draws

    def _device_best(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        rows: Tensor | None,
    ) -> list[Best]:
        """Finds the best tokens of every row, and their scores, by kernels: the best of `_perturbed`, at most k."""
        found = self._kernels().best(logits, params, output_indices, k, rows)
        left = [row for row, of_row in enumerate(found) if of_row is None]
        if not left:
            return [of_row for of_row in found if of_row is not None]
        of_left = dict(zip(left, _topk(self._scores_of(left, logits, params, output_indices), k), strict=True))
        return [of_left[row] if of_row is None else of_row for row, of_row in enumerate(found)]

    @torch.inference_mode()
    def _redrawn(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], rows: Sequence[int]
    ) -> list[int]:
        """Draws for some rows without kernels."""
        # `argmax` promises the first of equals, `topk` does not.
        return _argmax(self._scores_of(rows, logits, params, output_indices))

    def _scores_of(
        self, rows: Sequence[int], logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
    ) -> Tensor:
        """Returns the perturbed scores of some rows."""
        return self._perturbed(logits[rows], [params[row] for row in rows], [output_indices[row] for row in rows])

    def _perturbed(self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> Tensor:
        """Returns logits / temperature + noise, minus infinity where not allowed; greedy rows as they are."""
        noise = self._noise_rows(logits)
        scores = _tempered(logits, params)
        # Before the noise is added: filters look at probabilities, not at one draw.
        allowed = _allowed(scores, params)
        if len(params) == 1:
            scores += noise.row(params[0].seed, output_indices[0])
        elif not any(p.is_greedy for p in params):
            scores += torch.stack([noise.row(p.seed, i) for p, i in zip(params, output_indices, strict=True)])
        else:
            # Iterating over a tensor yields views of it, so `+=` writes into `scores`.
            for row, p, i in zip(scores, params, output_indices, strict=True):
                if not p.is_greedy:
                    row += noise.row(p.seed, i)
        return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)

    def _noise_rows(self, logits: Tensor) -> NoiseRows:
        key = (logits.shape[-1], logits.device)
        if self._noise is None or self._noise_key != key:
            self._noise, self._noise_key = NoiseRows(*key), key
        return self._noise


def most_probable(logits: Tensor, temperatures: Sequence[float | None], k: int) -> list[list[tuple[int, int]]]:
    """Finds the k most probable tokens of rows, without noise and filters. The logits stay as they are.

    Args:
        logits: float32 [rows, vocab].
        temperatures: Divisor of each row's logits; 0 counts as 1. None means that nothing is wanted of the row.
        k: Most tokens of a row.

    Returns:
        For each row token ids and weights, the most probable first: per mille of these tokens' probability, 1 at least.
        An empty list where nothing is wanted.
    """
    return begin_most_probable(logits, temperatures, k)()


@torch.inference_mode()
def begin_most_probable(
    logits: Tensor, temperatures: Sequence[float | None], k: int
) -> Callable[[], list[list[tuple[int, int]]]]:
    """Tells a device to find the most probable tokens, without waiting for it; returns what waits, and has the result
    of `most_probable`."""
    found: list[list[tuple[int, int]]] = [[] for _ in temperatures]
    wanted = {row: temperature or 1.0 for row, temperature in enumerate(temperatures) if temperature is not None}
    if not wanted:
        return lambda: found
    places = list(wanted)
    # Which rows are wanted a device would have to be told, and that be waited for.
    if logits.device.type == "cpu" and len(wanted) < len(found):
        logits, places = logits[places], list(range(len(places)))
    # What is left to do with so few goes without another copy to a device.
    copies = [HostCopy(leading) for leading in leading_values(logits, min(k, logits.shape[-1]))]

    def wait() -> list[list[tuple[int, int]]]:
        values, token_ids = (copy.wait()[places] for copy in copies)
        divisors = [[min(max(divisor, LEAST_TEMPERATURE), GREATEST_TEMPERATURE)] for divisor in wanted.values()]
        shares = (values.double() / torch.tensor(divisors, dtype=torch.double)).softmax(-1)
        # Of a row that is not a number the shares are none either: they count as 0.
        weights = (1000 * shares.nan_to_num(0.0)).round().clamp_min(1).long()
        for row, ids, of_row in zip(wanted, token_ids.tolist(), weights.tolist(), strict=True):
            found[row] = list(zip(ids, of_row, strict=True))
        return found

    return wait


def leading_values(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Finds the `count` largest logits of each row, falling, and their token ids: [rows, count] each."""
    if not _is_lazy(logits):
        values, token_ids = logits.topk(count)
        return values, token_ids
    found = []
    for row in logits.numpy():
        leading = _leading(row, count)
        found.append(leading[np.argsort(-row[leading], kind="stable")[:count]])
    indices = torch.from_numpy(np.stack(found))
    return logits.gather(-1, indices), indices


def tempered_and_filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Computes what `Sampler.draw` adds the noise to, with minus infinity where not allowed: a new [rows, vocab].

    Their softmax is what tokens are drawn from.
    """
    scores = _tempered(logits, params)
    allowed = _allowed(scores, params)
    return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)


def _tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # A tensor, not a number: torch may multiply by a number's reciprocal, and then a draw would depend
    # on whether all rows share a temperature.
    column = np.array(temperatures(params), dtype=np.float32)
    return logits / torch.from_numpy(column).to(logits.device)


def temperatures(params: Sequence[SamplingParams]) -> list[list[float]]:
    """Returns what the logits of each row are divided by, as a column."""
    return [[1.0 if p.is_greedy else min(max(p.temperature, LEAST_TEMPERATURE), GREATEST_TEMPERATURE)] for p in params]


def _is_lazy(logits: Tensor) -> bool:
    return logits.device.type == "cpu" and logits.shape[-1] >= LAZY_VOCAB_SIZE


def has_kernels(logits: Tensor) -> bool:
    """Returns True if logits lie where kernels can draw from them."""
    return logits.device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _argmax(scores: Tensor) -> list[int]:
    """Finds the best token of every row. `argmax` promises the first of equals, which is the lowest id."""
    if scores.device.type == "cpu":
        # numpy's takes a twentieth of the time of torch's: 20 us, not 400, for 150 000 tokens.
        token_ids: list[int] = scores.numpy().argmax(-1).tolist()
    else:
        token_ids = scores.argmax(-1).tolist()
    return token_ids


def _topk(scores: Tensor, k: int) -> list[Best]:
    """Finds the k best tokens of every row, in no certain order among equals, and their scores."""
    values, ids = scores.topk(k)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _of_contenders(
    contenders: Contenders,
    logits: npt.NDArray[np.float32],
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    k: int,
) -> list[Best | None]:
    """Asks for the k best tokens of rows as if they had no filters."""
    keys = [row_key(p.seed, index) for p, index in zip(params, output_indices, strict=True)]
    column = np.array(temperatures(params), dtype=np.float32)
    return contenders.best(logits, column, np.array(keys, dtype=np.uint32), k)


def _best(contenders: Contenders, logits: Tensor, params: SamplingParams, output_index: int, k: int) -> Best:
    """Finds the best tokens of one row [1, vocab] and their scores, by noise for those that its filters leave."""
    if params.is_greedy:
        return (_argmax(logits), []) if k == 1 else _topk(logits, k)[0]
    tempered = _tempered(logits, [params]).numpy()[0]
    # With top_k nothing depends on the rest of the vocabulary.
    token_ids = _leading(tempered, params.top_k or len(tempered))
    if not params.has_filters:
        # Mostly a row of which few tokens are left, as of a residual or under a structure.
        possible = np.flatnonzero(tempered != -np.inf)
        token_ids = possible if len(possible) >= k else token_ids
    allowed = _allowed(torch.from_numpy(tempered[token_ids])[None], [params])
    # Of a row that is not a number filters may leave nothing. It still gets a token.
    if allowed is not None and bool(allowed.any()):
        token_ids = token_ids[allowed.numpy()[0]]
        if len(token_ids) > MANY_TOKENS:
            masked = np.full((1, len(tempered)), -np.inf, dtype=np.float32)
            masked[0, token_ids] = logits.numpy()[0, token_ids]
            (best,) = _of_contenders(contenders, masked, [params], [output_index], k)
            if best is not None:
                return best
    scores = tempered[token_ids] + gumbel(params.seed, output_index, token_ids)
    leading = _leading(scores, k)
    # Stable, so that the lower of equals stays first.
    order = leading[np.argsort(-scores[leading], kind="stable")[:k]]
    return token_ids[order].tolist(), scores[order].tolist()


def _leading(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.intp]:
    """Finds where the `count` largest values are, all equals of the last one, and mostly few others: in order."""
    num_columns = len(values) // FOLDS
    if count > num_columns:
        return np.arange(len(values))
    # Of the values folded into columns: as many as asked for have one that is no less than this.
    peaks = values[: FOLDS * num_columns].reshape(FOLDS, num_columns).max(0)
    floor = np.partition(peaks, num_columns - count)[num_columns - count]
    # Not `>=`, which would find nothing if the floor is not a number.
    return np.flatnonzero(~(values < floor))


def ranked(best: Best, k: int, *, is_greedy: bool, least_logprob: float = -math.inf) -> list[Candidate]:
    """Ranks the best tokens of a row as `Sampler.candidates` does: at most k candidates, best first.

    Args:
        best: At least `NUM_NORMALISED` tokens, or all that filters leave, and their scores, which fall. A filtered
            token has minus infinity, and is left out.
        k: Most candidates.
        is_greedy: True at temperature 0.
        least_logprob: Candidates that are less probable are left out, but for the best one and its equals.
    """
    token_ids, scores = best
    sharpness = GREEDY_SHARPNESS if is_greedy else SAMPLED_SHARPNESS
    # Python numbers: for eight of them, a tensor operator costs more than the arithmetic. The best score is taken off
    # because `exp` must not overflow.
    sharp = [sharpness * (score - scores[0]) for score in scores]
    total = math.log(sum(map(math.exp, sharp[:NUM_NORMALISED])))
    # Of a row with filters there may be one token alone.
    if len(scores) > 1 and scores[1] < scores[0] and (k == 1 or sharp[1] - total < least_logprob):
        return [Candidate(token_ids[0], -total)]
    likely = sharp
    if least_logprob > -math.inf:
        # What is not a number stays, too: a row always has candidates.
        likely = [score for score in sharp if not score - total < least_logprob or score == 0.0]
    # `topk` promises no order between equals.
    order = sorted(zip([-score for score in likely], token_ids, strict=False))[:k]
    return [Candidate(token_id, -score - total) for score, token_id in order if score != math.inf]


def _rescored(candidates: Sequence[Candidate], logprobs: Tensor) -> list[Candidate]:
    """Returns candidates in their order with the log-probabilities of a row: float32 [vocab]."""
    own = logprobs[[candidate.token_id for candidate in candidates]].tolist()
    return [Candidate(each.token_id, logprob) for each, logprob in zip(candidates, own, strict=True)]


def _allowed(tempered: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Marks the tokens that each row may draw: bool [rows, vocab], or None where no row has a filter."""
    rows_of: dict[tuple[int, float, float], list[int]] = {}
    for row, p in enumerate(params):
        if not p.is_greedy and p.has_filters:
            rows_of.setdefault((p.top_k, p.top_p, p.min_p), []).append(row)
    if not rows_of:
        return None
    if len(rows_of) == 1 and len(params) == len(next(iter(rows_of.values()))):
        return _filter(tempered, *next(iter(rows_of)))
    allowed = torch.ones_like(tempered, dtype=torch.bool)
    for filters, rows in rows_of.items():
        allowed[rows] = _filter(tempered[rows], *filters)
    return allowed


def _filter(tempered: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Marks the tokens that the filters keep: bool [rows, vocab], of tempered logits of the same shape."""
    vocab_size = tempered.shape[-1]
    best = tempered.amax(-1, keepdim=True)
    # Logits differ by what their log-probabilities differ by, so a filter relative to the best needs no softmax.
    floor = best + math.log(min_p) if min_p > 0 else None
    if not 0 < top_k < vocab_size and top_p == 1:
        assert floor is not None or top_k >= vocab_size
        return tempered >= floor if floor is not None else torch.ones_like(tempered, dtype=torch.bool)
    num_sorted = min(vocab_size, top_k or NUM_PRESORTED)
    kept = _count_kept(tempered, best, num_sorted, top_k, top_p)
    if kept is None:
        kept = _count_kept(tempered, best, vocab_size, top_k, top_p)
        assert kept is not None
    counts, lowest = kept
    # By value, not by the indices of `topk`, which are in no certain order among equals; too many of them go by id.
    allowed = tempered >= lowest
    surplus = allowed.sum(-1, keepdim=True) - counts
    if bool((surplus > 0).any()):
        allowed &= ~_last_of_equals(tempered == lowest, surplus)
    return allowed if floor is None else allowed & (tempered >= floor)


def _count_kept(
    tempered: Tensor, best: Tensor, num_sorted: int, top_k: int, top_p: float
) -> tuple[Tensor, Tensor] | None:
    """Counts the tokens that top_k and top_p keep, and finds the last one's value: int64, float32 [rows, 1] each.

    None if more than `num_sorted` tokens must be known to tell.
    """
    values = _largest(tempered, num_sorted)
    if top_p == 1:
        return torch.full_like(best, num_sorted, dtype=torch.long), values[:, -1:]
    # float64: the sum of a large vocabulary in float32 is off by more than a rare token's share.
    shares = (values - best).double().exp()
    reached = shares.cumsum(-1)
    # top_p is a share of what top_k has left or, without that, of the whole vocabulary.
    total = reached[:, -1:] if top_k else (tempered - best).double().exp().sum(-1, keepdim=True)
    needed = top_p * total
    if num_sorted < (top_k or tempered.shape[-1]) and bool((reached[:, -1:] < needed).any()):
        return None
    # A token stays if those before it do not reach top_p yet; so the first always does. Of a row that is not a number
    # none would.
    counts = ((reached - shares) < needed).sum(-1, keepdim=True).clamp_min_(1)
    return counts, values.gather(-1, counts - 1)


def _largest(tempered: Tensor, count: int) -> Tensor:
    """Finds the `count` largest values of each row, falling: float32 [rows, count]."""
    if not _is_lazy(tempered):
        return tempered.topk(count).values
    # numpy sorts a large vocabulary in a tenth of torch's time, and mostly need not sort it.
    rows = [np.sort(row[_leading(row, count)])[::-1][:count] for row in tempered.numpy()]
    return torch.from_numpy(np.stack(rows))


def _last_of_equals(equal: Tensor, surplus: Tensor) -> Tensor:
    """Marks the last `surplus` [rows, 1] true entries of each row of `equal` [rows, vocab]: the highest ids."""
    from_the_end = equal.flip(-1).cumsum(-1).flip(-1)
    return equal & (from_the_end <= surplus)
