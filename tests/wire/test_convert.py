"""Wire and domain: what is converted to the wire and back is unchanged."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.methods import BEST_FIRST, OFF, PEARL
from outrider.core.params import Source
from outrider.core.statistics import COUNTS, DraftTime, RoundTime, Statistics, Traffic
from outrider.core.tree import Draft
from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.convert import (
    COST_PER_NAT,
    MAX_COST,
    MAX_DRAFT_COUNT,
    MAX_TIME_US,
    draft_from_proto,
    draft_to_proto,
    summary_to_proto,
)


@given(data=st.data(), size=st.integers(0, 20), source=st.sampled_from(Source))
def test_a_draft_survives_the_wire_up_to_the_resolution_of_its_scores(
    data: st.DataObject, size: int, source: Source
) -> None:
    def lists(elements: st.SearchStrategy[int]) -> list[int]:
        return data.draw(st.lists(elements, min_size=size, max_size=size))

    logprobs = [-cost / 10 for cost in lists(st.integers(0, 300))]
    draft = Draft(7, 3, lists(st.integers(0, 9)), lists(st.integers(0, 2047)), logprobs, source)
    back = draft_from_proto(draft_to_proto(draft))
    assert (back.base_len, back.first_node_id, back.source) == (7, 3, source)
    assert (list(back.parent_offsets), list(back.token_ids)) == (draft.parent_offsets, draft.token_ids)
    assert all(abs(a - b) <= 0.5 / COST_PER_NAT + 1e-9 for a, b in zip(back.logprobs, logprobs, strict=True))


def test_a_node_costs_about_six_bytes() -> None:
    draft = Draft(1000, 5000, [1] * 64, list(range(1000, 1064)), [-0.4] * 64, Source.DRAFT)
    assert draft_to_proto(draft).ByteSize() <= 6 * 64


def test_an_impossible_node_has_a_finite_cost() -> None:
    draft = Draft(1, 1, [0], [5], [-math.inf], Source.DRAFT)
    assert draft_from_proto(draft_to_proto(draft)).logprobs[0] < -30


@pytest.mark.parametrize(("weights", "is_kept"), [([2**31 - 2, 1], True), ([2**31 - 1, 1], False)])
def test_a_row_whose_weights_come_to_more_than_the_contract_allows_is_dropped(
    weights: list[int], is_kept: bool
) -> None:
    message = types_pb2.Draft(token_ids=[5], q_rows=[types_pb2.SparseRow(token_ids=[5, 6], weights=weights)])
    [row] = draft_from_proto(message).q_rows
    assert (row is not None) == is_kept


def test_counts_and_times_of_a_drafter_are_cut_to_what_can_be() -> None:
    counts = ("num_forwards", "num_phrase_tokens", "num_rows", "num_withheld_nodes")
    message = types_pb2.Draft(token_ids=[5], costs=[2**32 - 1], **dict.fromkeys(counts, 2**32 - 1))
    draft = draft_from_proto(message, forward_us=2**32 - 1, retrieval_us=2**32 - 1)
    assert all(getattr(draft, name) == MAX_DRAFT_COUNT for name in counts)
    assert (draft.forward_us, draft.retrieval_us) == (MAX_TIME_US, MAX_TIME_US)
    assert draft.logprobs == [-MAX_COST / COST_PER_NAT]


def test_a_text_that_has_counted_more_than_a_summary_holds_has_a_summary() -> None:
    statistics = Statistics()
    statistics.add(**dict.fromkeys(COUNTS, 2**31))
    summary = summary_to_proto(PEARL, statistics)
    assert all(getattr(summary, name) == 2**31 - 1 for name in COUNTS)


def test_a_summary_says_what_was_asked_for_only_where_it_was_replaced() -> None:
    assert summary_to_proto(PEARL, Statistics()).requested_method == types_pb2.METHOD_UNSPECIFIED
    summary = summary_to_proto(OFF, Statistics(), BEST_FIRST)
    assert (summary.method, summary.requested_method) == (types_pb2.METHOD_OFF, types_pb2.METHOD_BEST_FIRST)


def test_every_count_of_the_summary_has_its_counterpart() -> None:
    integers = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    declared = verifier_pb2.SpeculationSummary.DESCRIPTOR.fields
    numbers = {field.name for field in declared if field.cpp_type in integers}
    assert numbers == COUNTS.keys() | {field.name for field in fields(Traffic)}


def test_a_summary_has_every_count_and_every_time() -> None:
    statistics = Statistics(round_times=[RoundTime(10.0, 6.0, 3.0, 0.5)], draft_times=[DraftTime(4.0, 2.0, 0.25)])
    statistics.add(**{name: value for value, name in enumerate(COUNTS, start=1)})
    summary = summary_to_proto(PEARL, statistics, traffic=Traffic(70, 80))
    assert [getattr(summary, name) for name in COUNTS] == list(range(1, len(COUNTS) + 1))
    assert (summary.num_bytes_sent, summary.num_bytes_received) == (70, 80)
    times = summary.times_p50
    assert (times.round_ms, times.forward_ms, times.wait_ms, times.overhead_ms) == (10.0, 6.0, 3.0, 1.0)
    assert (times.draft_latency_ms, times.draft_forward_ms) == (4.0, 2.0)
    assert (times.retrieval_ms, times.draft_retrieval_ms) == (0.5, 0.25)
