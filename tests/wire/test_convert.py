"""Wire and domain: what goes out comes back."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import Method, SamplingParams, Source
from outrider.core.statistics import Statistics
from outrider.core.tree import Draft
from outrider.v1 import types_pb2
from outrider.wire.convert import (
    COST_PER_NAT,
    draft_from_proto,
    draft_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    summary_to_proto,
)

UNIT = st.floats(0, 1, exclude_min=True)


@given(
    params=st.builds(
        SamplingParams,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.floats(0, 10),
        top_k=st.integers(0, 1000),
        top_p=UNIT,
        min_p=UNIT,
    )
)
def test_sampling_parameters_survive_the_wire_bit_by_bit(params: SamplingParams) -> None:
    message = types_pb2.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message, default_seed=0) == params


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


def test_a_summary_says_what_was_asked_for_only_where_it_was_replaced() -> None:
    assert summary_to_proto(Method.PEARL, Statistics()).requested_method == types_pb2.METHOD_UNSPECIFIED
    summary = summary_to_proto(Method.OFF, Statistics(), Method.BEST_FIRST)
    assert (summary.method, summary.requested_method) == (types_pb2.METHOD_OFF, types_pb2.METHOD_BEST_FIRST)
