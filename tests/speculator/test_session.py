"""A drafting session: after any commits and prunings, the draft model sees exactly each node's own path."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.calibration import DraftCalibration, DraftKey
from outrider.core.growth import Candidate
from outrider.core.methods import BEST_FIRST, CARD, OFF, OPT_TREE, PEARL, SAGUARO, SEQUOIA, SPECULATIVE
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import Rows, SamplingParams
from outrider.core.retrieval.prior import PriorTable
from outrider.core.speculation import Method, SpeculationParams, Steering
from outrider.core.tree import DraftTree, Node, StreamNodes
from outrider.models.backend import CPU
from outrider.models.runner import Runner, Segment
from outrider.models.sampling import Sampler
from outrider.speculator.session import DraftSession, DraftSessionSpec
from tests.support.tiny_models import VOCAB_SIZE, build

SAMPLING = SamplingParams(seed=3, temperature=0.7)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return CPU.make_runner(build("llama"))


def reference_logits(runner: Runner, token_ids: Sequence[int]) -> torch.Tensor:
    """The logits after a path that was never drafted, by one fresh forward."""
    return runner.forward([Segment(runner.new_cache(), list(token_ids), 1)])[0]


def path_to(tree: DraftTree, node: Node) -> list[int]:
    path: list[int] = []
    while node is not tree.root and node.parent is not None:
        path.append(node.token_id)
        node = node.parent
    return [*tree.committed, *reversed(path)]


def grow_once(drafting: DraftSession, runner: Runner, max_rows: int = 64) -> bool:
    """One forward of a session, checked row by row against fresh forwards. False = nothing to grow."""
    expansion = drafting.next_expansion()
    if expansion is None:
        return False
    expansion = drafting.with_phrase(expansion)
    segment = drafting.segment(expansion, max_rows)
    logits = runner.forward([segment])
    if segment.num_logits:
        paths = [path_to(drafting.tree, node) for node in expansion.nodes]
        paths += [[*paths[-1], *expansion.phrase[: count + 1]] for count in range(len(expansion.phrase))]
        for path, row in zip(paths, logits, strict=True):
            torch.testing.assert_close(row, reference_logits(runner, path), rtol=1e-4, atol=1e-4)
        indices = drafting.output_indices(expansion)
        assert indices == [len(path) - drafting.spec.num_prompt_tokens for path in paths]
        found = Sampler().candidates(logits, [SAMPLING] * len(logits), indices, expansion.num_children)
        drafting.grow(expansion, found, 1.0)
    return True


METHODS = [PEARL, CARD, SAGUARO, BEST_FIRST, OPT_TREE, SEQUOIA]


def make_drafting(runner: Runner, method: Method = PEARL) -> DraftSession:
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, SpeculationParams(method, 3, 6), VOCAB_SIZE)
    return DraftSession(spec, runner.new_cache(), runner.max_context_len)


def test_what_grows_next_is_asked_anew_when_the_caller_steers(runner: Runner) -> None:
    drafting = make_drafting(runner)
    assert drafting.next_expansion() is not None
    drafting.steer(Steering(SpeculationParams(OFF)))
    assert drafting.next_expansion() is None
    drafting.steer(Steering(SpeculationParams(PEARL, 3, 6)))
    assert drafting.next_expansion() is not None


def in_turns(runner: Runner, num_at_once: int = 1) -> DraftSession:
    own_params = BestFirstParams(serial=True)
    params = SpeculationParams(BEST_FIRST, 8, 8, rows=Rows.TREE, own=(own_params,))
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, params, VOCAB_SIZE)
    return DraftSession(spec, runner.new_cache(), runner.max_context_len, num_at_once=num_at_once)


def candidates(*probabilities: float) -> list[list[Candidate]]:
    return [[Candidate(5 + rank, math.log(probability)) for rank, probability in enumerate(probabilities)]]


def grow_as(drafting: DraftSession, runner: Runner, *probabilities: float) -> None:
    """Runs one forward, and pretends that it finds candidates of these probabilities."""
    expansion = drafting.next_expansion()
    assert expansion is not None
    runner.forward([drafting.segment(expansion, 64)])
    drafting.grow(expansion, candidates(*probabilities), 1.0)


def test_a_draft_in_turns_says_what_it_is_worth_and_what_a_forward_would_add(runner: Runner) -> None:
    drafting = in_turns(runner)
    drafting.steer(Steering(forward_us=5000, round_trip_us=700))
    assert drafting.awaited_draft() is None, "the target waits for one forward at least"
    grow_as(drafting, runner, 0.8, 0.1)
    draft = drafting.awaited_draft()
    assert draft is not None
    # The target's own token, and two nodes of .8 and .1; the next token is kept at the usual rate.
    assert draft == pytest.approx((1.9, 0.8 * 0.7, 1, 5700))
    grow_as(drafting, runner, 0.5)
    second = drafting.awaited_draft()
    assert second is not None
    assert second == pytest.approx((2.3, 0.4 * 0.7, 2, 5700))
    drafting.end_draft()
    ended = drafting.awaited_draft()
    assert ended is not None
    assert (ended.num_gained, drafting.next_expansion()) == (0.0, None)
    drafting.commit([5])
    assert drafting.awaited_draft() is None
    assert drafting.next_expansion() is not None


def test_of_forwards_that_are_made_at_once_the_mean_counts(runner: Runner) -> None:
    drafting = in_turns(runner, num_at_once=4)
    grow_as(drafting, runner, 0.8)
    draft = drafting.awaited_draft()
    assert draft is not None
    assert draft.num_gained == pytest.approx(0.8 * 0.7**2.5)
    # No more tokens than the target can use.
    drafting.steer(Steering(max_num_nodes=2))
    shorter = drafting.awaited_draft()
    assert shorter is not None
    assert shorter.num_gained == pytest.approx(0.8 * 0.7)


def test_only_nodes_that_a_round_can_verify_are_worth_anything(runner: Runner) -> None:
    drafting = in_turns(runner)
    drafting.steer(Steering(max_num_nodes=2))
    grow_as(drafting, runner, 0.6, 0.3, 0.1)
    draft = drafting.awaited_draft()
    assert draft is not None
    assert draft.num_kept == pytest.approx(1.9)


def test_candidates_that_the_draft_model_finds_too_improbable_are_not_grown(runner: Runner) -> None:
    drafting = in_turns(runner)
    grow_as(drafting, runner, 0.9, 0.06, 0.02, 0.001)
    assert [round(math.exp(node.logprob), 3) for node in drafting.tree.live_nodes()] == [0.9, 0.06]


@pytest.mark.parametrize("method", [SPECULATIVE, OPT_TREE, SEQUOIA, PEARL])
def test_where_the_target_waits_nothing_deeper_grows_than_it_can_verify(runner: Runner, method: Method) -> None:
    depths = []
    for most in (0, 2, 9):
        drafting = make_drafting(runner, method)
        drafting.steer(Steering(max_num_nodes=most))
        # A later steering without a number keeps the earlier one.
        drafting.steer(Steering(forward_us=1000))
        while (expansion := drafting.next_expansion()) is not None:
            assert expansion.max_len <= (6 if method is PEARL else most or 3)
            grow_once(drafting, runner)
        drafting.commit([*path_to(drafting.tree, drafting.tree.root)[:1]])
        while grow_once(drafting, runner):
            pass
        depths.append(max(node.position for node in drafting.tree.live_nodes()) - drafting.tree.root.position)
    assert depths == ([6, 6, 6] if method is PEARL else [3, 2, 3])


@settings(deadline=None, max_examples=60)
@given(data=st.data(), method=st.sampled_from(METHODS))
def test_every_row_sees_its_own_path_whatever_was_committed_before(
    runner: Runner, data: st.DataObject, method: Method
) -> None:
    drafting = make_drafting(runner, method)
    for _ in range(data.draw(st.integers(1, 5))):
        for _ in range(data.draw(st.integers(0, 4))):
            grow_once(drafting, runner)
        live = list(drafting.tree.live_nodes())
        followed = data.draw(st.sampled_from(live)) if live and data.draw(st.booleans()) else None
        tokens = path_to(drafting.tree, followed)[len(drafting.tree.committed) :] if followed else []
        tokens += data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=0 if tokens else 1, max_size=2))
        drafting.commit(tokens)
    assert grow_once(drafting, runner)


def test_a_long_prompt_goes_through_in_pieces(runner: Runner) -> None:
    spec = DraftSessionSpec("s", tuple(range(1, 24)), 23, SAMPLING, SpeculationParams(PEARL, 3, 6), VOCAB_SIZE)
    drafting = DraftSession(spec, runner.new_cache(), runner.max_context_len)
    for _ in range(3):
        grow_once(drafting, runner, max_rows=8)
    assert drafting.tree.num_nodes == 1


@pytest.mark.parametrize("method", [PEARL, OPT_TREE])
def test_what_is_sent_builds_the_same_tree_at_the_other_end(runner: Runner, method: Method) -> None:
    drafting = make_drafting(runner, method)
    mirror = DraftTree(drafting.tree.committed, VOCAB_SIZE)
    nodes = StreamNodes(mirror)

    def tokens(node: Node) -> dict[int, object]:
        return {child.token_id: tokens(child) for child in node.children.values()}

    for step in range(4):
        while grow_once(drafting, runner):
            message = drafting.take_message(is_idle=step % 2 == 0)
            if message is not None:
                nodes.add(message)
        chain = drafting.tree.best_chain(2)
        commit = [node.token_id for node in chain] + ([5] if step == 2 else [])
        drafting.commit(commit)
        mirror.commit(commit)
    while grow_once(drafting, runner):
        pass
    message = drafting.take_message(is_idle=True)
    if message is not None:
        nodes.add(message)
    assert tokens(mirror.root) == tokens(drafting.tree.root)
    assert mirror.num_nodes > 0


def test_growth_ends_at_the_end_of_the_draft_models_context(runner: Runner) -> None:
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, SpeculationParams(PEARL, 3, 6), VOCAB_SIZE)
    drafting = DraftSession(spec, runner.new_cache(), max_context_len=6)
    while grow_once(drafting, runner):
        pass
    assert max(node.position for node in drafting.tree.live_nodes()) == 5


@dataclass
class Tiers:
    """Copies of a datastore's tiers."""

    prior: PriorTable | None
    shared: None = None


class Untaught(DraftCalibration):
    """Lets every claim stand, so that two drafters can be compared whatever they have seen."""

    def add(self, claims: Sequence[tuple[DraftKey, float]], agreed: int) -> None:
        pass


def assert_same_chain(one: DraftSession, other: DraftSession) -> None:
    chain, expected = one.tree.best_chain(100), other.tree.best_chain(100)
    assert [node.token_id for node in chain] == [node.token_id for node in expected]
    assert [node.logprob for node in chain] == pytest.approx([node.logprob for node in expected], abs=1e-3)


def chain_of(drafting: DraftSession) -> list[int]:
    return [node.token_id for node in drafting.tree.best_chain(100)]


def retrieving(runner: Runner, *documents: list[int], lookahead: int = 16) -> DraftSession:
    params = SpeculationParams(PEARL, 3, lookahead, retrieval=True)
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, params, VOCAB_SIZE)
    tiers = Tiers(PriorTable.build(documents, 4))
    return DraftSession(spec, runner.new_cache(), runner.max_context_len, tiers=tiers, draft_calibration=Untaught())


def plain(runner: Runner, lookahead: int = 16) -> DraftSession:
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, SpeculationParams(PEARL, 3, lookahead), VOCAB_SIZE)
    return DraftSession(spec, runner.new_cache(), runner.max_context_len, draft_calibration=Untaught())


def grow_all(drafting: DraftSession, runner: Runner) -> int:
    """Grows to the end; returns the number of forwards."""
    num_forwards = 0
    while grow_once(drafting, runner):
        num_forwards += 1
    return num_forwards


@pytest.mark.parametrize("num_right", [0, 1, 3, 6, 15])
def test_phrases_change_the_number_of_forwards_but_not_the_chain(runner: Runner, num_right: int) -> None:
    alone = plain(runner)
    grow_all(alone, runner)
    chain = chain_of(alone)
    wrong = [(token_id + 1) % VOCAB_SIZE for token_id in chain]
    drafting = retrieving(runner, [1, 2, 3, 4, *chain[:num_right], *wrong[num_right:]])
    num_forwards = grow_all(drafting, runner)
    assert_same_chain(drafting, alone)
    assert num_forwards <= 16 - num_right + (num_right > 0) or num_right == 0
    if num_right == 15:
        assert num_forwards <= 4, "ten tokens of a phrase and one more, in one forward"


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_after_any_commit_a_retrieving_drafter_has_the_chain_of_one_that_never_retrieves(
    runner: Runner, data: st.DataObject
) -> None:
    alone = plain(runner, lookahead=8)
    documents = [
        data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=30)) for _ in range(data.draw(st.integers(1, 3)))
    ]
    drafting = retrieving(runner, *documents, lookahead=8)
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 8))):
            grow_once(alone, runner)
        for _ in range(data.draw(st.integers(0, 4))):
            grow_once(drafting, runner)
        chain = chain_of(alone)
        commit = chain[: data.draw(st.integers(0, len(chain)))]
        commit += data.draw(st.lists(st.integers(0, 5), min_size=not commit, max_size=2))
        alone.commit(commit)
        drafting.commit(commit)
    grow_all(alone, runner)
    grow_all(drafting, runner)
    assert_same_chain(drafting, alone)


def test_no_phrase_goes_beyond_the_lookahead_or_the_context(runner: Runner) -> None:
    alone = plain(runner)
    grow_all(alone, runner)
    document = [1, 2, 3, 4, *chain_of(alone)]
    drafting = retrieving(runner, document, lookahead=6)
    grow_all(drafting, runner)
    assert len(drafting.tree.best_chain(100)) == 6
    params = SpeculationParams(PEARL, 3, 16, retrieval=True)
    spec = DraftSessionSpec("s", (1, 2, 3, 4), 4, SAMPLING, params, VOCAB_SIZE)
    short = DraftSession(spec, runner.new_cache(), 9, tiers=Tiers(PriorTable.build([document], 4)))
    grow_all(short, runner)
    assert max(node.position for node in short.tree.live_nodes()) == 8


def test_what_the_target_said_in_place_of_a_draft_is_guessed_next_time(runner: Runner) -> None:
    drafting = retrieving(runner, [9, 9])
    grow_once(drafting, runner)
    drafted = drafting.tree.best_chain(1)[0].token_id
    said = (drafted + 1) % VOCAB_SIZE
    drafting.commit([said, 1, 2, 3, 4])
    expansion = drafting.next_expansion()
    assert expansion is not None
    assert drafting.with_phrase(expansion).phrase[0] == said
