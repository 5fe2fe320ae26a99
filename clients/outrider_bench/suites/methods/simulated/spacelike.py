"""Spacelike decoding in simulated time: a service that is used, with fewer and with more near-repeats.

Doubleword, "Using caching for fast speculative decoding" (Takeoff). A draft costs a lookup and no forward, so that a
round takes hardly longer than one without: the speed-up should be the tokens of a round, and these follow from how many
are proposed, and accepted, as in any speculative decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from outrider_bench.costs import GPU, GPU_NOTE
from outrider_bench.experiment import AS_PUBLISHED, PLAIN, Experiment, as_published, contender
from outrider_bench.measured import Measured
from outrider_bench.plotting import BLUE, ORANGE, draw_level, draw_line, finish, new_figure, rows_by_label
from outrider_bench.prediction import expected_tokens
from outrider_bench.result import Measurement, at_least, at_most, reported, share_of
from outrider_bench.suites.methods import papers
from outrider_bench.suites.methods.replay import NEAR, NEAR_SHARE, replay_requests
from outrider_bench.suites.methods.simulated.sizes import SimulatedSizes

PART = "simulated-spacelike"
TITLE = "Spacelike decoding in simulated time"
TEMPERATURES = (0.0, 0.7)
MOST_NEAR_TEMPERATURES = (*TEMPERATURES, 1.0)
"""Those of the replay with the most near-repeats, where ours stands beside the method as published."""
BATCH = 8
"""Requests at once in that replay, beside one after the other."""
BY_TOKEN = "token by token"
RUNS = (BY_TOKEN, AS_PUBLISHED)
"""Ways to choose a continuation: ours, and the article's, which proposes what followed most often as a whole."""
NEAR_BY_OFF, LATER_BY_OFF = 3.0, 1.6
"""Asked of near-repeats, and of all requests where two fifths of them are such, greedily."""
MAX_ERROR = 0.2
"""Share by which a prediction may miss."""
_COLOURS = dict(zip(RUNS, (BLUE, ORANGE), strict=True))


def name_of(share: float) -> str:
    """Name the experiment with this share of near-repeats."""
    return f"{PART}-{100 * share:.0f}"


def experiments(sizes: SimulatedSizes) -> list[Experiment]:
    """List the experiments of this part."""
    sharing = {"scope": "RETRIEVAL_SCOPE_TENANT", "contribute": True}
    everyone = (
        PLAIN,
        contender("spacelike", BY_TOKEN, retrieval_params=sharing),
        as_published("spacelike", retrieval_params=sharing),
    )
    most = max(sizes.near_shares)
    return [
        Experiment(
            name_of(share),
            PART,
            f"A service that is used, {share:.0%} near-repeats",
            everyone,
            MOST_NEAR_TEMPERATURES if share == most else TEMPERATURES,
            replay_requests(sizes.replay_requests, sizes.replay_cold, share),
            sizes.replay_tokens,
            repeats=1,
            concurrencies=(1, BATCH) if share == most else (1,),
            costs=GPU,
            note=GPU_NOTE,
        )
        for share in sizes.near_shares
    ]


def claims(measured: Measured, sizes: SimulatedSizes) -> list[Measurement]:
    """Return the claims of this part, each beside the paper's figure."""
    of_replays = [
        each
        for share in sizes.near_shares
        for t in TEMPERATURES
        for run in RUNS
        for each in _of_replay(measured, share, t, run)
    ]
    name, ours, theirs = name_of(max(sizes.near_shares)), f"spacelike {BY_TOKEN}", f"spacelike {AS_PUBLISHED}"
    beside = [
        at_least(PART, f"T = {t:g}{many}: ours by as published", ratio, 1.0)
        for t in MOST_NEAR_TEMPERATURES
        for many, ratio in (
            ("", measured.ratio(name, ours, theirs, t)),
            (f", {BATCH} at once", measured.batch_ratio(name, ours, theirs, t, BATCH)),
        )
    ]
    return of_replays + beside


def _of_replay(measured: Measured, share: float, t: float, run: str) -> Iterator[Measurement]:
    name, label, what = name_of(share), f"spacelike {run}", f"T = {t:g}, {share:.0%} near-repeats, {run}"
    tokens, predicted = measured.tokens_per_forward(name, label, t), predicted_tokens(measured, name, label, t)
    speed = measured.speedup(name, label, t)
    ratio = share_of(tokens, predicted)
    error = None if ratio is None else abs(ratio - 1)
    remark = "" if tokens is None or predicted is None else f"predicted: {predicted:.2f}, measured: {tokens:.2f}"
    yield at_most(PART, f"{what}: tokens of a round by the prediction, error", error, MAX_ERROR, remark)
    ratio = share_of(speed, predicted)
    error = None if ratio is None else abs(ratio - 1)
    remark = "" if speed is None or predicted is None else f"predicted: {predicted:.2f}, measured: {speed:.2f}"
    yield at_most(PART, f"{what}: speed-up by the predicted tokens, error", error, MAX_ERROR, remark)
    everything = f"{what}: all requests by off"
    if share >= NEAR_SHARE and t == 0:
        yield at_least(PART, everything, speed, LATER_BY_OFF, paper=papers.TAKEOFF_LATER)
    else:
        yield reported(PART, everything, speed, paper=papers.TAKEOFF_LATER)
    if share:
        near = measured.speedup(name, label, t, NEAR)
        named = f"{what}: near-repeats by off"
        if t == 0:
            yield at_least(PART, named, near, NEAR_BY_OFF, paper=papers.TAKEOFF_NEAR)
        else:
            yield reported(PART, named, near, paper=papers.TAKEOFF_NEAR)


def predicted_tokens(measured: Measured, experiment: str, label: str, temperature: float) -> float | None:
    """Predict the tokens of a round: one where nothing was proposed, else those of a chain of the usual length.

    The length is the mean number of proposed tokens of the rounds that had any, and its tokens are accepted
    independently of each other, at the rate that was seen (Leviathan et al. 2023, equation 1).
    """
    rate = measured.acceptance(experiment, label, temperature)
    counts = [
        measured.per_token(experiment, label, temperature, count)
        for count in ("num_rounds", "num_empty", "num_drafted")
    ]
    rounds, empty, drafted = (0.0 if count is None else count for count in counts)
    if rate is None or rounds <= empty:
        return None
    length = drafted / (rounds - empty)
    # Between two whole lengths, as far between their values.
    below = int(length)
    low, high = expected_tokens(rate, below), expected_tokens(rate, below + 1)
    share = empty / rounds
    return share + (1 - share) * (low + (length - below) * (high - low))


def draw(found: Mapping[str, Mapping[str, Any]], _: Mapping[str, Any]) -> Figure | None:
    """Draw the speed-up by the share of near-repeats, a panel for each temperature."""
    shares = {name: int(name.removeprefix(f"{PART}-")) for name in found if name.startswith(f"{PART}-")}
    if not shares:
        return None
    figure, panels = new_figure(len(TEMPERATURES))
    for axes, t in zip(panels, TEMPERATURES, strict=True):
        for run, colour in _COLOURS.items():
            points = [
                (share, row["speedup_over_off"])
                for name, share in shares.items()
                if (row := rows_by_label(found[name], t).get(f"spacelike {run}")) and row["speedup_over_off"]
            ]
            if points:
                draw_line(axes, sorted(points), run, colour)
        draw_level(axes)
        axes.set_xlabel("% near-repeats among the requests")
        axes.set_ylabel("speed-up over off")
        axes.set_ylim(bottom=0)
        axes.set_title(f"A service that is used, T = {t:g}")
        finish(axes)
        axes.legend(frameon=False, fontsize=8)
    return figure
