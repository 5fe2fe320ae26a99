"""Bytes are bounded by round and in flight, and what has to wait goes out later."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outrider.core.methods import CARD
from outrider.core.methods.card import CardParams
from outrider.core.params import SamplingParams, Source
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.tree import Draft, DraftTree, Node, SparseRow
from outrider.models.acceptance import candidates
from outrider.models.sampling import Sampler
from outrider.speculator.send_budget import (
    MAX_BYTES_PER_ROUND,
    MAX_NEAR_BYTES_PER_ROUND,
    MESSAGE_BYTES,
    NODE_BYTES,
    SendBudget,
)
from outrider.speculator.session import DraftSession, DraftSessionSpec
from outrider.wire.convert import draft_to_proto
from tests.support.services import draft_model

PER_ROUND = (MAX_BYTES_PER_ROUND - MESSAGE_BYTES) // NODE_BYTES


def nodes(count: int, row_len: int = 0) -> list[Node]:
    tree = DraftTree([1], 4096)
    found = []
    for token_id in range(count):
        node = tree.add(tree.root, token_id, -1.0, Source.DRAFT)
        assert node is not None
        node.q = SparseRow(range(row_len), [1] * row_len) if row_len else None
        found.append(node)
    return found


def test_a_round_has_so_many_bytes_and_the_next_one_as_many_again() -> None:
    allowance, many = SendBudget(), nodes(4000)
    assert allowance.num_affordable(many) == PER_ROUND
    allowance.spend(many[:PER_ROUND], PER_ROUND)
    assert allowance.num_affordable(many) == 0
    allowance.begin_round(0)
    assert allowance.num_affordable(many) == PER_ROUND


def in_messages(allowance: SendBudget, many: list[Node], last_id: int, num_messages: int) -> int:
    """Sends what is allowed, in so many messages; returns the id of the last node."""
    for left in range(num_messages, 0, -1):
        count = allowance.num_affordable(many) // left
        allowance.spend(many[:count], last_id := last_id + count)
    allowance.num_affordable(many)  # more nodes are there, and must wait
    return last_id


def test_on_a_near_line_where_nodes_had_to_wait_the_next_round_has_twice_the_bytes() -> None:
    allowance, many, last_id = SendBudget(), nodes(4000), 0
    allowed = []
    for _ in range(6):
        allowed.append(allowance.num_affordable(many))
        last_id = in_messages(allowance, many, last_id, 4)
        allowance.begin_round(last_id)
    assert allowed[0] == PER_ROUND
    assert [round(count / PER_ROUND) for count in allowed[:3]] == [1, 2, 4]
    assert allowed[3:] == [4000] * 3


def test_nodes_with_rows_have_a_few_kilobytes_a_round_on_every_line() -> None:
    allowance, many, last_id = SendBudget(), nodes(1000, row_len=64), 0
    first = allowance.num_affordable(many)
    for _ in range(4):
        last_id = in_messages(allowance, many, last_id, 1)
        allowance.begin_round(last_id)
    assert allowance.num_affordable(many) == first


def test_what_suffices_is_not_doubled() -> None:
    allowance, many = SendBudget(), nodes(4000)
    for number in range(1, 6):
        assert allowance.num_affordable(many[:10]) == 10
        allowance.spend(many[:10], 10 * number)
        allowance.begin_round(10 * number)
    assert allowance.num_affordable(many) == PER_ROUND


def test_a_line_on_which_commits_find_two_messages_is_not_near_and_stays_so() -> None:
    allowance, many, last_id = SendBudget(), nodes(4000), 0
    for _ in range(3):
        last_id = in_messages(allowance, many, last_id, 4)
        allowance.begin_round(last_id)
    assert allowance.num_affordable(many) > 2 * PER_ROUND
    for _ in range(6):
        first_id = last_id
        last_id = in_messages(allowance, many, last_id, 4)
        allowance.begin_round(first_id + 1)  # all four are on their way
    assert allowance.num_affordable(many) <= PER_ROUND
    # Nothing was in flight because nothing could go out; that is no sign of a fast connection.
    allowance.begin_round(last_id)
    assert allowance.num_affordable(many) == PER_ROUND


def test_what_was_not_used_in_a_round_is_not_saved_up() -> None:
    allowance = SendBudget()
    for _ in range(5):
        allowance.begin_round(0)
    assert allowance.num_affordable(nodes(4000)) == PER_ROUND


def test_nodes_with_rows_cost_their_rows() -> None:
    few = SendBudget().num_affordable(nodes(1000, row_len=64))
    assert 8 <= few <= PER_ROUND // 20


def test_what_does_not_arrive_stops_what_would_follow_until_it_is_acknowledged() -> None:
    allowance, many = SendBudget(), nodes(4000)
    allowance.measure(forward_us=20_000, round_trip_us=20_000)  # three rounds' bytes may be on their way
    for round_number in range(1, 4):
        allowance.spend(many[:PER_ROUND], round_number * PER_ROUND)
        allowance.begin_round(1)
    assert allowance.num_affordable(many) == 0
    allowance.begin_round(PER_ROUND)
    assert allowance.num_affordable(many) > PER_ROUND - 10


def test_a_queue_that_lengthens_the_round_trip_allows_no_more_on_its_way() -> None:
    allowance, many = SendBudget(), nodes(4000)
    allowance.measure(20_000, 20_000)
    allowance.measure(20_000, 2_000_000)
    for round_number in range(1, 4):
        allowance.spend(many[:PER_ROUND], round_number * PER_ROUND)
        allowance.begin_round(1)
    assert allowance.num_affordable(many) == 0


def test_a_caller_that_acknowledges_nothing_is_held_to_the_round_alone() -> None:
    allowance, many = SendBudget(), nodes(4000)
    for round_number in range(1, 20):
        assert allowance.num_affordable(many) == PER_ROUND
        allowance.spend(many[:PER_ROUND], round_number * PER_ROUND)
        allowance.begin_round(0)


@given(st.lists(st.tuples(st.integers(0, 700), st.booleans(), st.integers(0, 3))))
def test_never_more_goes_out_than_is_allowed(steps: list[tuple[int, bool, int]]) -> None:
    allowance, many = SendBudget(), nodes(700)
    last_id = in_round = 0
    on_way: list[tuple[int, int]] = []
    for wanted, is_commit, lag in steps:
        if is_commit:
            acknowledged = on_way[-1 - lag][0] if len(on_way) > lag else 0
            if acknowledged:
                on_way = [each for each in on_way if each[0] > acknowledged]
            allowance.begin_round(acknowledged)
            if not acknowledged:
                on_way = []
            in_round = 0
        count = allowance.num_affordable(many[:wanted])
        assert count <= wanted
        if count:
            last_id += count
            allowance.spend(many[:count], last_id)
            in_round += MESSAGE_BYTES + count * NODE_BYTES
            on_way.append((last_id, MESSAGE_BYTES + count * NODE_BYTES))
        assert in_round <= MAX_NEAR_BYTES_PER_ROUND
        assert sum(size for _, size in on_way) <= MAX_NEAR_BYTES_PER_ROUND


def grown(drafting: DraftSession) -> list[Draft]:
    """The messages until nothing grows or goes out any more, within 200 forwards."""
    model, messages = draft_model(), []
    for _ in range(200):
        expansion = drafting.next_expansion()
        if expansion is None:
            break
        logits = model.runner.forward([drafting.segment(expansion, 4096)])
        indices, draws = drafting.output_indices(expansion), drafting.draws(expansion)
        params = [drafting.ranking] * len(indices)
        found = candidates(Sampler(), logits, params, indices, draws, expansion.num_children)
        drafting.grow(expansion, found, 1.0)
        message = drafting.take_message(is_idle=drafting.next_expansion() is None)
        if message is not None:
            messages.append(message)
    return messages


def wide_drafting(**fields: object) -> DraftSession:
    model = draft_model()
    prompt = tuple(model.tokenizer.encode("def read(self, size):\n    ", add_special_tokens=False))
    speculation = SpeculationParams(CARD, 12, 64, 0.2, own=(CardParams(beam_width=200),))
    spec = DraftSessionSpec("s", prompt, len(prompt), SamplingParams(seed=3), speculation, model.vocab_size)
    return DraftSession(replace(spec, **fields), model.runner.new_cache(), model.max_context_len)  # type: ignore[arg-type]


def test_a_wide_beam_sends_what_a_round_allows_and_the_rest_that_is_still_of_use_after_it() -> None:
    drafting = wide_drafting()
    messages = grown(drafting)
    num_bytes = sum(len(draft_to_proto(message).SerializeToString()) for message in messages)
    assert MAX_BYTES_PER_ROUND / 2 < num_bytes < 4096
    sent = sum(len(message.token_ids) for message in messages)
    assert drafting.tree.num_nodes > 2 * sent
    best = drafting.tree.best_chain(1)[0]
    drafting.steer(Steering(forward_us=20_000, round_trip_us=1000))
    drafting.commit([best.token_id], acknowledged_node_id=sent)
    more = drafting.take_message(is_idle=True)
    assert more is not None
    assert more.first_node_id == sent + 1


def test_rows_of_the_forwards_and_nodes_that_had_to_wait_are_told_once() -> None:
    drafting = wide_drafting()
    messages = grown(drafting)
    sent = sum(len(message.token_ids) for message in messages)
    # The first forward reads the prompt and expands its last token; the others expand layers of at most 200.
    assert messages[0].num_rows >= 1
    assert sum(message.num_forwards for message in messages) <= sum(message.num_rows for message in messages)
    assert sum(message.num_withheld_nodes for message in messages) <= drafting.tree.num_nodes - sent
    waiting = drafting.tree.num_nodes - sent
    drafting.commit([drafting.tree.best_chain(1)[0].token_id], acknowledged_node_id=sent)
    more = drafting.take_message(is_idle=True)
    assert more is not None
    told = sum(message.num_withheld_nodes for message in [*messages, more])
    assert waiting <= told <= waiting + 200  # a layer may have grown after the commit
