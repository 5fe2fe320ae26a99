"""Drawing tokens under the match rule: the best token of `logits / temperature + noise`, among those allowed
(`outrider.models.filters`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.growth import Candidate
from outrider.core.noise import gumbel
from outrider.core.params import SamplingParams
from outrider.models.backend import backend_of
from outrider.models.chains import Chain
from outrider.models.draws import Best, DrawnTokens, Draws, HostCopy, RowDraws
from outrider.models.filters import GREATEST_TEMPERATURE, LEAST_TEMPERATURE, tempered_and_filtered
from outrider.models.largest import argmax, largest, wanted_rows

Logits: TypeAlias = Tensor
"""float32 [rows, vocab]: a name for signatures outside of this package, which do not import torch."""

NUM_NORMALISED = 8
"""Best perturbed scores over which the log-probabilities of drafted candidates are normalised."""
# A draft model predicts the target's draw with more certainty than its own probabilities say, because both share the
# noise and, mostly, the order of the best tokens. So its log-probabilities are multiplied by these. Fitted by log-loss
# on 960 positions of held-out code, demo pair: best at 3 for temperature 0 (mean probability .95, agreement .95;
# without: .79), 1.5 to 2 for 0.7 and 1 (.82 and .70; agreement .81 and .71; without: .71 and .54). They decide where
# chains end, never what is accepted.
GREEDY_SHARPNESS = 3.0
SAMPLED_SHARPNESS = 1.7


class Sampler:
    """Draws for every row of a packed forward. A draw is a pure function; the only state is cached noise."""

    def __init__(self, draws: Draws | None = None) -> None:
        """
        Args:
            draws: Finds the best tokens. None chooses by the device of the logits.
        """
        self._draws = draws

    def _draws_for(self, logits: Tensor) -> Draws:
        if self._draws is None:
            self._draws = backend_of(logits.device).make_draws()
        return self._draws

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
            output_indices: For each row, how many tokens the generation put out before the one that is drawn here.
            rows: `RowDraws.on_device`, if a forward has brought that to its device.

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
        """Begins to draw the target's token for every row, see `draw`. A GPU is asked for it without waiting."""
        return self._draws_for(logits).begin(logits, RowDraws(params, output_indices, rows))

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
            output_indices: For each row, how many tokens the generation put out before the one that is drawn here.
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
        # At least as many as `ranked` normalises over, even if fewer are wanted.
        count = min(max(k, NUM_NORMALISED), logits.shape[-1])
        best = self._draws_for(logits).best(logits, RowDraws(params, output_indices, rows), count)
        found = [ranked(of_row, k, is_greedy=greedy) for of_row, greedy in zip(best, is_greedy, strict=True)]
        if any(is_raw):
            own = logits.log_softmax(-1)
            found = [_rescored(each, row) if raw else each for each, row, raw in zip(found, own, is_raw, strict=True)]
        return found

    @torch.inference_mode()
    def draw_among(
        self, logits: Tensor, token_ids: npt.NDArray[np.intp], params: SamplingParams, output_index: int
    ) -> int:
        """Draws from a few tokens of a row, as `draw` does if all other tokens have a logit of minus infinity.

        Args:
            logits: float32 [1, vocab].
            token_ids: Tokens that may be drawn, ascending. If all have minus infinity, they count as equal.
            params: Parameters of the row.
            output_index: How many tokens the generation put out before.
        """
        few = logits[:, torch.from_numpy(token_ids).to(logits.device)].cpu()
        if not bool(few.amax() > -math.inf):
            few = torch.zeros_like(few)
        if params.is_greedy:
            return int(token_ids[argmax(few)[0]])
        scores = tempered_and_filtered(few, [params])
        scores += torch.from_numpy(gumbel(params.seed, output_index, token_ids))
        return int(token_ids[argmax(scores)[0]])

    @torch.inference_mode()
    def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
        """Has the device begin to judge chains, see `Draws.judge`."""
        return self._draws_for(logits).judge(logits, chains)


def most_probable(logits: Tensor, temperatures: Sequence[float | None], k: int) -> list[list[tuple[int, int]]]:
    """Finds the k most probable tokens of rows, without noise and filters. The logits stay as they are.

    Args:
        logits: float32 [rows, vocab].
        temperatures: Divisor of each row's logits; 0 counts as 1. None means that nothing is wanted of the row.
        k: Most tokens of a row.

    Returns:
        For each row token ids and weights, the most probable first: per mille of these tokens' total probability, at
        least 1. An empty list if nothing is wanted of the row.
    """
    return begin_most_probable(logits, temperatures, k)()


@torch.inference_mode()
def begin_most_probable(
    logits: Tensor, temperatures: Sequence[float | None], k: int
) -> Callable[[], list[list[tuple[int, int]]]]:
    """Tells a device to find the most probable tokens, without waiting for it. Returns a function that waits and
    returns what `most_probable` does."""
    found: list[list[tuple[int, int]]] = [[] for _ in temperatures]
    wanted = {row: temperature or 1.0 for row, temperature in enumerate(temperatures) if temperature is not None}
    if not wanted:
        return lambda: found
    logits, places = wanted_rows(logits, list(wanted))
    # The rest, with so few tokens, is done without another copy to the device.
    copies = [HostCopy(leading) for leading in largest(logits, min(k, logits.shape[-1]))]

    def wait() -> list[list[tuple[int, int]]]:
        values, token_ids = (copy.wait()[list(places)] for copy in copies)
        divisors = [[min(max(divisor, LEAST_TEMPERATURE), GREATEST_TEMPERATURE)] for divisor in wanted.values()]
        shares = (values.double() / torch.tensor(divisors, dtype=torch.double)).softmax(-1)
        # The shares of a row of NaN are NaN, too: they count as 0.
        weights = (1000 * shares.nan_to_num(0.0)).round().clamp_min(1).long()
        for row, ids, of_row in zip(wanted, token_ids.tolist(), weights.tolist(), strict=True):
            found[row] = list(zip(ids, of_row, strict=True))
        return found

    return wait


def ranked(best: Best, k: int, *, is_greedy: bool, least_logprob: float = -math.inf) -> list[Candidate]:
    """Ranks the best tokens of a row as `Sampler.candidates` does: at most k candidates, best first.

    Args:
        best: At least `NUM_NORMALISED` tokens, or all that filters leave, and their scores, in falling order. A
            filtered token has minus infinity, and is left out.
        k: Most candidates.
        is_greedy: True at temperature 0.
        least_logprob: Less probable candidates are left out, except for the best one and its equals.
    """
    token_ids, scores = best
    sharpness = GREEDY_SHARPNESS if is_greedy else SAMPLED_SHARPNESS
    # Python numbers: for eight of them, a tensor operator costs more than the arithmetic. The best score is subtracted
    # because `exp` must not overflow.
    sharp = [sharpness * (score - scores[0]) for score in scores]
    total = math.log(sum(map(math.exp, sharp[:NUM_NORMALISED])))
    # A row with filters may have a single token.
    if len(scores) > 1 and scores[1] < scores[0] and (k == 1 or sharp[1] - total < least_logprob):
        return [Candidate(token_ids[0], -total)]
    likely = sharp
    if least_logprob > -math.inf:
        # NaN stays, too: a row always has candidates.
        likely = [score for score in sharp if not score - total < least_logprob or score == 0.0]
    # `topk` promises no order between equals.
    order = sorted(zip([-score for score in likely], token_ids, strict=False))[:k]
    return [Candidate(token_id, -score - total) for score, token_id in order if score != math.inf]


def _rescored(candidates: Sequence[Candidate], logprobs: Tensor) -> list[Candidate]:
    """Returns the candidates in the same order with log-probabilities from those of a row: float32 [vocab]."""
    own = logprobs[[candidate.token_id for candidate in candidates]].tolist()
    return [Candidate(each.token_id, logprob) for each, logprob in zip(candidates, own, strict=True)]
