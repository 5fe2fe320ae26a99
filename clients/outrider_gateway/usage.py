"""Usage of a request: its tokens, and statistics of speculation, under OpenAI's, vLLM's and llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.params import Source
from outrider.v1 import types_pb2, verifier_pb2
from outrider_client.enums import enum_name, method_name
from outrider_client.generation import Result


def usage(results: Sequence[Result], n: int, num_predicted: int | None = None) -> dict[str, Any]:
    """Returns the tokens of a request.

    Args:
        results: The results of all its texts, grouped by prompt.
        n: Texts of each prompt. A prompt is counted once.
        num_predicted: Tokens of the predicted output; None if none was given.
    """
    told = token_counts(
        sum(result.num_prompt_tokens for result in results[::n]), sum(result.num_output_tokens for result in results)
    )
    told["prompt_tokens_details"] = {"cached_tokens": sum(each.num_cached_prompt_tokens for each in results[::n])}
    if num_predicted is not None:
        told["completion_tokens_details"] = prediction_counts(results, num_predicted)
    return told


def prediction_counts(results: Sequence[Result], num_predicted: int | None) -> dict[str, int]:
    """Returns the accepted and rejected tokens of a predicted output; empty if none was given."""
    if num_predicted is None:
        return {}
    accepted = sum(_accepted(result, types_pb2.SOURCE_PREDICTION) for result in results)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": max(0, num_predicted * len(results) - accepted),
    }


def token_counts(num_prompt: int, num_output: int) -> dict[str, Any]:
    """Returns counts of tokens in OpenAI's shape."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}


def _accepted(result: Result, source: int) -> int:
    return sum(each.num_tokens for each in result.summary.accepted_by_source if each.source == source)


def metrics(results: Sequence[Result]) -> dict[str, Any]:
    """Returns statistics of speculation in vLLM's shape: `metrics.speculative_decoding`."""
    each = [result.summary.speculative_decoding for result in results]
    steps = sum(one.num_spec_steps for one in each)
    drafted = sum(one.num_draft_tokens for one in each)
    accepted = sum(one.num_accepted_draft_tokens for one in each)
    longest = max((len(one.acceptance_histogram) for one in each), default=0)
    histogram = [
        sum(one.acceptance_histogram[kept] for one in each if kept < len(one.acceptance_histogram))
        for kept in range(longest)
    ]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 0.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": histogram,
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": max((one.num_spec_tokens for one in each), default=0),
        }
    }


def timings(results: Sequence[Result]) -> dict[str, Any]:
    """Returns counts and times under llama.cpp's names. The times of texts that ran concurrently are added up."""
    rounds = [(result.summary.num_rounds, result.summary.times_p50.round_ms) for result in results]
    predicted, predicted_ms = sum(result.num_output_tokens for result in results), sum(n * ms for n, ms in rounds)
    return {
        "prompt_n": results[0].num_prompt_tokens - results[0].num_cached_prompt_tokens,
        "cache_n": results[0].num_cached_prompt_tokens,
        "predicted_n": predicted,
        # The number of rounds times the median duration.
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1000 * predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(result.summary.num_drafted_tokens for result in results),
        "draft_n_accepted": sum(result.summary.num_accepted_tokens for result in results),
    }


def speculation(results: Sequence[Result]) -> dict[str, Any]:
    """Returns statistics of speculation in a request: counts over all its texts, everything else of the first."""
    first = results[0].summary
    by_source: dict[str, int] = {}
    for result in results:
        for count in result.summary.accepted_by_source:
            name = source_name(count.source) or ""
            by_source[name] = by_source.get(name, 0) + count.num_tokens
    return {
        "method": method_name(first.method),
        "requested_method": method_name(first.requested_method) if first.requested_method else None,
        **{
            name: sum(getattr(result.summary, name) for result in results)
            for name in ("num_rounds", "num_drafted_tokens", "num_accepted_tokens", "num_empty_rounds", "num_hits")
        },
        "accepted_by_source": by_source,
        "decisions": [_decision(decision) for decision in first.decisions],
        "degraded": any(result.summary.degraded for result in results),
        "missing_peers": list(dict.fromkeys(words for result in results for words in result.missing_peers)),
        "num_speculator_losses": sum(result.summary.num_speculator_losses for result in results),
        "num_resumes": results[0].num_resumes,
        "times_p50": round_times(first.times_p50),
        "seed": results[0].seed,
    }


def _decision(decision: verifier_pb2.Decision) -> dict[str, Any]:
    return {
        "method": method_name(decision.method),
        "rows": enum_name(types_pb2.Rows.DESCRIPTOR, decision.rows),
        "retrieval": decision.retrieval,
        "num_rounds": decision.num_rounds,
        "num_tokens": decision.num_tokens,
        "time_ms": decision.time_ms,
    }


def round_times(times: verifier_pb2.RoundTimes) -> Mapping[str, float]:
    """Returns the times of a round by name, in milliseconds."""
    return {name: getattr(times, name) for name in _TIMES}


_TIMES = tuple(field.name for field in verifier_pb2.RoundTimes.DESCRIPTOR.fields)


def source_name(source: int | Source | None) -> str | None:
    """Returns the name of a source in lower case; None for one that this version does not know."""
    number = source.value if isinstance(source, Source) else source
    return None if number is None else enum_name(types_pb2.Source.DESCRIPTOR, number)
