"""The metrics of one run, by the names of the results of `vllm bench serve`.

Speculation brings several tokens in one chunk. So `itl`, the time between two arrivals on the stream, is that between
two chunks, and `tpot`, the time from the first chunk to the end by the tokens but one, says how fast text comes. What
vLLM counts by chunks as if each were a token (`max_output_tokens_per_s`) is counted by tokens here.

A latency of which there is no value is None; vLLM writes 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outrider_bench.config import ServeConfig
from outrider_bench.samples import GenerationSample
from outrider_bench.suites.serve.load import Load, Outcome

LATENESS_TAIL = 99.0
"""The percentile of the generator's lateness that is always known."""
Metrics = dict[str, Any]

_GOODPUT_VALUES: Mapping[str, Callable[[GenerationSample], float]] = {
    "ttft": lambda made: made.ttft_s,
    # A text of one token keeps every limit of it, as in vLLM.
    "tpot": lambda made: tpot_s(made) or 0.0,
    "e2el": lambda made: made.duration_s,
}


def tpot_s(made: GenerationSample) -> float | None:
    """Return the time per output token after the first, in seconds; None for fewer than two tokens."""
    return (made.duration_s - made.ttft_s) / (len(made.token_ids) - 1) if len(made.token_ids) > 1 else None


def run_of(load: Load, config: ServeConfig, model_id: str) -> Metrics:
    """Return everything about one run, as vLLM's results file of a run has it, and what is only known here."""
    run: Metrics = {
        "date": load.began_at.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "outrider",
        "backend": "outrider",
        "label": None,
        "model_id": model_id,
        "tokenizer_id": model_id,
        "num_prompts": config.num_prompts,
        # JSON has no infinity; these are vLLM's words for it.
        "request_rate": _finite(load.rate),
        "burstiness": _finite(config.burstiness),
        "max_concurrency": config.max_concurrency,
    }
    outcomes = sorted(load.outcomes, key=lambda outcome: outcome.index)
    run |= metrics_of(outcomes, load.duration_s, config.percentiles, config.goodput)
    if config.max_concurrency is not None:
        done = [(one.sent_s - one.arrived_s, one.generation) for one in outcomes if one.generation is not None]
        run |= statistics_of("client_queue_time", [wait_s for wait_s, _ in done], config.percentiles)
        whole = [wait_s + made.duration_s for wait_s, made in done]
        run |= statistics_of("e2el_including_client_queue", whole, config.percentiles)
    run |= {
        "unfinished": config.num_prompts - len(outcomes),
        "client_cpu_share": load.cpu_s / load.duration_s if load.duration_s else None,
    }
    return run | (details_of(outcomes) if config.save_detailed else {})


def metrics_of(
    outcomes: Sequence[Outcome], duration_s: float, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> Metrics:
    """Return throughput, latencies, goodput, acceptance and failures of the requests that have ended.

    Args:
        outcomes: One for each request.
        duration_s: Time from the beginning of the run to the end of its last request.
        percentiles: Which of each latency to return, in (0, 100].
        goodput: Limits in milliseconds, by the names of _GOODPUT_VALUES; without any there is no goodput.
    """
    done = [outcome.generation for outcome in outcomes if outcome.generation is not None]
    num_input, num_output = sum(made.num_prompt_tokens for made in done), sum(len(made.token_ids) for made in done)
    num_good = sum(_is_good(made, goodput) for made in done)

    def per_second(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "failures": _failures(outcomes),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": per_second(len(done)),
        "request_goodput": per_second(num_good) if goodput else None,
        # Of all that have ended: one that failed has kept no limit.
        "goodput_share": num_good / len(outcomes) if goodput and outcomes else None,
        "output_throughput": per_second(num_output),
        "total_token_throughput": per_second(num_input + num_output),
        "max_output_tokens_per_s": _most_tokens_in_a_second(outcomes),
        "max_concurrent_requests": _most_at_once(outcomes),
        **_acceptance(outcomes),
        **statistics_of("ttft", [made.ttft_s for made in done if made.chunks], percentiles),
        **statistics_of("tpot", [value for made in done if (value := tpot_s(made)) is not None], percentiles),
        # Every gap counts once, whichever request it is of; of the others a request is one value.
        **statistics_of("itl", [gap for made in done for gap in made.gaps_s], percentiles),
        **statistics_of("e2el", [made.duration_s for made in done], percentiles),
        **statistics_of(
            "lateness",
            [outcome.arrived_s - outcome.due_s for outcome in outcomes],
            sorted({*percentiles, LATENESS_TAIL}),
        ),
    }


def statistics_of(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> Metrics:
    """Return mean, median, standard deviation and percentiles of a latency, in milliseconds: mean_ttft_ms, p99_ttft_ms.

    Each is None where there are no values.
    """
    values = 1000 * np.asarray(seconds, float)
    measures: dict[str, Callable[[Any], Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    found = {f"{measure}_{name}_ms": function(values) if seconds else None for measure, function in measures.items()}
    found |= {
        f"p{percentile:g}_{name}_ms": np.percentile(values, percentile) if seconds else None
        for percentile in percentiles
    }
    return {field: None if value is None else float(value) for field, value in found.items()}


def details_of(outcomes: Sequence[Outcome]) -> Metrics:
    """Return a value of each request, in the order of the arrivals, in seconds, as --save-detailed of vLLM does.

    A failed request has lengths and latencies of zero, as there; start_times begin with the run.
    """
    made = [outcome.generation for outcome in outcomes]
    return {
        "input_lens": [one.num_prompt_tokens if one else 0 for one in made],
        "output_lens": [len(one.token_ids) if one else 0 for one in made],
        "ttfts": [one.ttft_s if one else 0.0 for one in made],
        "itls": [one.gaps_s if one else [] for one in made],
        "latencies": [one.duration_s if one else 0.0 for one in made],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "queue_times": [outcome.sent_s - outcome.arrived_s for outcome in outcomes],
        "errors": [f"{outcome.error}: {outcome.message}" if outcome.error else "" for outcome in outcomes],
    }


def _is_good(made: GenerationSample, goodput: Mapping[str, float]) -> bool:
    return all(1000 * _GOODPUT_VALUES[name](made) <= limit_ms for name, limit_ms in goodput.items())


def _failures(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Count failures by kind, the most frequent first, each with the words of its first one."""
    kinds = Counter(outcome.error for outcome in outcomes if outcome.generation is None)
    words = {outcome.error: outcome.message for outcome in reversed(outcomes)}
    return {kind: {"count": count, "message": words[kind]} for kind, count in kinds.most_common()}


def _acceptance(outcomes: Sequence[Outcome]) -> Metrics:
    """Return what speculation did; nothing where nothing was drafted, as in vLLM.

    A draft is a round that had one; the rate is in percent.
    """
    rounds = [outcome.generation.rounds for outcome in outcomes if outcome.generation is not None]
    num_drafts = sum(one.num_rounds - (one.num_empty or 0) for one in rounds)
    num_drafted, num_accepted = sum(one.num_drafted for one in rounds), sum(one.num_accepted for one in rounds)
    if not (num_drafts and num_drafted):
        return {}
    kept = [count for outcome in outcomes if outcome.generation is not None for count in outcome.kept]
    return {
        "spec_decode_acceptance_rate": 100 * num_accepted / num_drafted,
        "spec_decode_acceptance_length": 1 + num_accepted / num_drafts,
        "spec_decode_num_drafts": num_drafts,
        "spec_decode_draft_tokens": num_drafted,
        "spec_decode_accepted_tokens": num_accepted,
        "spec_decode_per_position_acceptance_rates": [
            sum(count > position for count in kept) / len(kept) for position in range(max(kept, default=0))
        ],
    }


def _most_tokens_in_a_second(outcomes: Sequence[Outcome]) -> float:
    """Return the most output tokens that arrived within one second of the clock that starts with the first request."""
    done = [(outcome.sent_s, outcome.generation) for outcome in outcomes if outcome.generation is not None]
    first_s = min((sent_s for sent_s, _ in done), default=0.0)
    tokens: dict[int, int] = defaultdict(int)
    for sent_s, made in done:
        for chunk in made.chunks:
            tokens[int(sent_s + chunk.at_s - first_s)] += chunk.num_tokens
    return float(max(tokens.values(), default=0))


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Return the most completed requests that ran at the same moment."""
    done = [outcome for outcome in outcomes if outcome.generation is not None]
    # Where one ends when another is sent, -1 comes first: they were not there at the same time.
    changes = sorted(change for outcome in done for change in ((outcome.sent_s, 1), (outcome.ended_s, -1)))
    return int(max(np.cumsum([step for _, step in changes]), default=0))


def _finite(value: float) -> float | str:
    return "inf" if math.isinf(value) else value
