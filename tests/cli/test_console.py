"""Text coloured by source: without colours the text is the same."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from outrider.core.params import Source
from outrider.v1 import types_pb2, verifier_pb2
from outrider_cli.console import Steps, pieces, statistics, summary
from outrider_client.generation import Chunk, FinishReason, Result

DRAFT, RETRIEVED, PLAIN = "green", "cyan", "default"


def bytes_to_text(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


def chunk_of(text: str, *sources: Source | None) -> Chunk:
    token_ids = tuple(text.encode())
    assert len(token_ids) == len(sources)
    return Chunk(token_ids, sources, text, 0)


def test_a_chunk_is_split_where_the_source_changes() -> None:
    chunk = chunk_of("abcd", Source.DRAFT, Source.DRAFT, Source.PRIOR, Source.TARGET)
    assert list(pieces(chunk, bytes_to_text)) == [(DRAFT, "ab"), (RETRIEVED, "c"), (PLAIN, "d")]


def test_all_tiers_are_one_colour() -> None:
    chunk = chunk_of("abcd", Source.PRIOR, Source.DYNAMIC, Source.REJECTED, Source.RING)
    assert list(pieces(chunk, bytes_to_text)) == [(RETRIEVED, "abcd")]


def test_a_chunk_of_one_source_needs_no_tokenizer() -> None:
    def never(token_ids: Sequence[int]) -> str:
        raise AssertionError("asked for text that was known")

    assert list(pieces(chunk_of("a", Source.TARGET), never)) == [(PLAIN, "a")]


def test_a_source_of_a_newer_server_has_no_colour() -> None:
    assert list(pieces(chunk_of("ab", None, Source.DRAFT), bytes_to_text)) == [(PLAIN, "a"), (DRAFT, "b")]


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(chunk_of("é", Source.DRAFT, Source.TARGET), id="the source changes inside a character"),
        pytest.param(Chunk((195, 97), (Source.DRAFT, Source.TARGET), "", 0), id="nothing is decided yet"),
        pytest.param(Chunk((169, 97), (Source.DRAFT, Source.TARGET), "éa", 0), id="a character began earlier"),
        pytest.param(Chunk((97, 98), (Source.DRAFT, Source.TARGET), " ab", 0), id="a leading space is dropped"),
    ],
)
def test_joined_pieces_are_the_text_of_the_chunk(chunk: Chunk) -> None:
    assert "".join(text for _, text in pieces(chunk, bytes_to_text)) == chunk.text


def result_of(**fields: Any) -> Result:
    counts = verifier_pb2.SpeculationSummary(num_rounds=2, **fields)
    return Result("ab", (1, 2), FinishReason.LENGTH, None, 7, 3, 2, counts)


def summary_of(**fields: Any) -> str:
    return summary(result_of(**fields), 0.5, is_seed_news=False).plain


def test_the_summary_is_one_line_and_says_how_to_get_the_text_again() -> None:
    drafted = result_of(num_drafted_tokens=9, num_accepted_tokens=4)
    assert summary(drafted, 0.5, is_seed_news=True).plain == (
        "2 tokens, 4 a second, 3.0 a forward; the same again: --seed 7"
    )
    counts = verifier_pb2.SpeculationSummary(num_rounds=1)
    one = Result("a", (1,), FinishReason.LENGTH, None, 7, 3, 1, counts)
    assert summary(one, 0.5, is_seed_news=False).plain == "1 token, 2 a second, 1.0 a forward"
    assert statistics(one, 0.5).plain == "unspecified: 0.50 s · 1 round · ended by length"


def test_the_summary_says_which_method_was_replaced() -> None:
    pearl, best_first = types_pb2.METHOD_PEARL, types_pb2.METHOD_BEST_FIRST
    assert "pearl" not in summary_of(method=pearl)
    replaced = summary_of(method=types_pb2.METHOD_OFF, requested_method=best_first)
    assert replaced.endswith("by off in place of best-first")


def missing(peer: str, absence: str, num_rounds: int) -> verifier_pb2.MissingPeer:
    return verifier_pb2.MissingPeer(peer=f"PEER_{peer}", absence=f"ABSENCE_{absence}", num_rounds=num_rounds)


def test_the_summary_says_which_service_was_missing_and_why() -> None:
    loading, slow = missing("SPECULATOR", "STARTING", 2), missing("DATASTORE", "SLOW", 0)
    line = summary_of(degraded=True, missing_peers=[loading, slow]).splitlines()[1]
    speculator = "the speculator was still starting, or shutting down, for 2 of 2 rounds"
    assert line == f"{speculator}, the datastore was too slow for a moment; the text is the same"
    refused = missing("SPECULATOR", "UNUSABLE", 2)
    refused.reason = "its tokenizer is another one"
    line = summary_of(degraded=True, missing_peers=[refused]).splitlines()[1]
    assert line == (
        "the speculator could not be used for 2 of 2 rounds (its tokenizer is another one); the text is the same"
    )
    unknown = verifier_pb2.MissingPeer(peer=99, absence=99, num_rounds=1)  # type: ignore[arg-type]  # of a newer server
    line = summary_of(degraded=True, missing_peers=[unknown]).splitlines()[1]
    assert line == "a peer was missing for 1 of 2 rounds; the text is the same"


def test_without_a_terminal_each_step_is_a_line() -> None:
    shown = StringIO()
    with Steps(Console(file=shown)) as steps:
        steps.show("loading the verifier")
        steps.say("redis: not reachable [refused]")
    assert shown.getvalue() == "loading the verifier\nredis: not reachable [refused]\n"


def test_a_result_is_on_stdout_and_never_in_the_line_of_the_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    shown = StringIO()
    with Steps(Console(file=shown, force_terminal=True, width=80)) as steps:
        steps.show("loading the verifier")
        before = len(shown.getvalue())
        steps.result("verifier   127.0.0.1:50051")
        # The spinner's line is erased first, and redrawn afterwards: \x1b[2K is "erase the line".
        assert "\x1b[2K" in shown.getvalue()[before:]
    assert capsys.readouterr().out == "verifier   127.0.0.1:50051\n"
    assert "50051" not in shown.getvalue()
