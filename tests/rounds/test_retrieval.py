"""What the datastore is asked, when, and how long its answer is awaited."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.methods import AUTO, RETRIEVAL, SPACELIKE
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.retriever import NO_COPIES
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import Node
from outrider.rounds.retrieval import MAX_PAUSE, Question, SessionRetrieval
from outrider.rounds.timings import EngineTimings

GAMMA = 4
PROMPT = (1, 2, 3)
FORWARD_MS = 10.0


class Generation:
    """A target whose draws and retrieved continuations the test sets."""

    def __init__(
        self,
        method: Method = SPACELIKE,
        *,
        latency_ms: float = 1.0,
        timings: EngineTimings | None = None,
        **fields: object,
    ) -> None:
        params = SpeculationParams(method, GAMMA, **fields)  # type: ignore[arg-type]
        sampling = SamplingParams(temperature=0.0)
        self.session = Session(SessionSpec("s", PROMPT, sampling, params, vocab_size=1000, max_tokens=1000))
        self.timings = timings or EngineTimings(ForwardTimes({1: FORWARD_MS}))
        self.timings.datastore_ms.add(latency_ms)
        plan = target_plan(params)
        assert plan is not None
        self.retrieval = SessionRetrieval(self.session, plan, self.timings, NO_COPIES)

    def chain(self) -> list[Node]:
        chain = self.session.next_chain()
        missing = self.session.max_chain_len - len(chain)
        return self.session.next_chain() if self.retrieval.extend(chain, missing) else chain

    def say(self, *draws: int, verifies: bool = True) -> Question | None:
        """Runs a round; returns the next question to the datastore."""
        chain = self.chain()[: len(draws) - 1] if verifies else []
        verdict = self.session.apply(chain, draws)
        judged = chain[: verdict.num_accepted + 1]
        self.retrieval.learn(judged, verdict)
        self.retrieval.begin_round()
        was_known = bool(self.session.tree.root.children)
        self.chain()
        self.retrieval.ask(was_known=was_known)
        return self.retrieval.take_question()

    def say_plainly(self, *token_ids: int) -> None:
        """Plain rounds of one token each, with a strategy that looks nothing up."""
        for token_id in token_ids:
            verdict = self.session.apply([], [token_id])
            self.retrieval.learn([], verdict, looks_up=False)
            self.retrieval.begin_round()

    def answer(self, *token_ids: int, ahead: int = 0, match_len: int = 6) -> Question | None:
        """The datastore answers for the committed tokens and `ahead` more; returns the question that follows."""
        base_len = len(self.session.committed) + ahead
        return self.answer_at(base_len, token_ids, match_len)

    def answer_at(self, base_len: int, token_ids: Sequence[int], match_len: int = 6) -> Question | None:
        self.retrieval.add(base_len, ring(token_ids, match_len))
        return self.retrieval.take_question()

    @property
    def path(self) -> list[int]:
        return [node.token_id for node in self.session.tree.best_chain(100)]


def ring(token_ids: Sequence[int], match_len: int = 6) -> Continuation:
    if not token_ids:
        return NOTHING
    offsets = (0, *[1] * (len(token_ids) - 1))
    return Continuation(match_len, Source.RING, offsets, tuple(token_ids), (1,) * len(token_ids))


def test_spacelike_asks_again_when_a_commit_leaves_nothing_and_not_before() -> None:
    generation = Generation()
    assert generation.answer(*range(10, 30)) is None, "more than two chains: enough for now"
    assert generation.say(10, 11, 12, 13, 14) is None, "fifteen tokens are left"
    assert generation.say(15, 16, 99) == (), "the target has gone another way"
    assert generation.path == []


def test_what_comes_behind_a_continuation_is_asked_while_it_lasts() -> None:
    generation = Generation()
    assert generation.answer(10, 11, 12, 13, 14) == (10, 11, 12, 13, 14)
    assert generation.say(10, 11, 12) is None, "the question is on its way"
    generation.answer(15, 16, 17, 18, 19, ahead=2)
    assert generation.path == [13, 14, 15, 16, 17, 18, 19]
    assert generation.session.statistics.num_rounds == 1


def test_an_answer_that_goes_on_is_asked_on_until_two_chains_are_there() -> None:
    generation = Generation()
    assert generation.answer(10, 11, 12) == (10, 11, 12)
    assert generation.answer(13, 14, ahead=3) == (10, 11, 12, 13, 14)
    assert generation.answer(15, 16, 17, ahead=5) is None
    assert generation.path == list(range(10, 18))


def test_where_a_document_ends_nothing_is_asked_twice() -> None:
    generation = Generation()
    assert generation.answer(10, 11, 12) == (10, 11, 12)
    assert generation.answer(ahead=3) is None
    assert generation.say(10, verifies=False) is None
    assert generation.path == [11, 12]


def test_an_answer_about_tokens_that_were_not_said_changes_nothing() -> None:
    generation = Generation()
    assert generation.answer(10, 11, 12) == (10, 11, 12)
    generation.say(10, 99)
    generation.answer_at(len(PROMPT) + 3, [13, 14])
    assert generation.path == []


def test_an_answer_that_comes_too_late_is_worth_what_was_not_contradicted() -> None:
    generation = Generation()
    asked_at = len(generation.session.committed)
    generation.say(10)
    generation.say(11)
    generation.answer_at(asked_at, [10, 11, 12, 13])
    assert generation.path == [12, 13]


def test_what_is_improbable_is_not_looked_beyond() -> None:
    generation = Generation()
    assert generation.answer(10, 11, 12, 13, match_len=1) is None


def test_other_methods_ask_only_for_what_is_not_known_in_process() -> None:
    generation = Generation(RETRIEVAL)
    assert generation.say(4, verifies=False) == ()
    assert generation.answer(1) is None, "and never ahead"
    assert generation.say(1, verifies=False) == (), "a match of one token is a weak guess"
    assert generation.say(2, verifies=False) is None
    assert generation.path[:2] == [3, 4]


def test_the_first_answers_are_waited_for_and_worthless_ones_are_not_any_more() -> None:
    generation = Generation()
    assert generation.retrieval.patience_ms() > 1.0, "the prompt has been asked about"
    generation.answer()
    assert generation.retrieval.patience_ms() == 0.0, "it is here"
    generation.say(10)
    generation.say(11)
    assert generation.retrieval.patience_ms() == 0.0


def test_an_answer_that_the_target_contradicts_is_worth_nothing() -> None:
    generation = Generation()
    generation.answer(50, 51, 52, 53)
    assert generation.say(10) is None, "an answer that is worth nothing makes a pause"
    assert generation.say(11) == ()
    assert generation.retrieval.patience_ms() == 0.0


def test_an_empty_datastore_is_asked_less_and_less() -> None:
    generation = Generation()
    generation.answer()
    rounds = []
    for number in range(100):
        if generation.say(10) is not None:
            rounds.append(number)
            generation.answer()
    pauses = [later - sooner - 1 for sooner, later in pairwise(rounds)]
    assert pauses[:4] == [3, 7, 15, MAX_PAUSE]
    assert set(pauses[4:]) == {MAX_PAUSE}


def test_a_remote_session_asks_in_each_round_and_learns_nothing_in_process() -> None:
    generation = Generation(RETRIEVAL, remote=True)
    generation.answer()
    for _ in range(20):
        assert generation.say(10) == (), "ten follows ten, and no answer was worth anything"
        assert generation.path == []
        generation.answer()


def test_a_good_answer_ends_the_pause_even_if_it_comes_late() -> None:
    generation = Generation()
    generation.answer()
    num_silent = 0
    while (question := generation.say(10)) is None or num_silent < 7:
        num_silent = num_silent + 1 if question is None else 0
        if question is not None:
            generation.answer()
    asked_at = len(generation.session.committed)
    generation.say(20)
    generation.answer_at(asked_at, [20, 21, 22, 23])
    assert generation.say(21, 22, 23, 99) == ()
    assert generation.retrieval.patience_ms() > 0.0


def test_what_one_session_has_seen_of_the_datastore_the_next_one_knows() -> None:
    first = Generation()
    first.answer()
    first.say(10)
    second = Generation(timings=first.timings)
    assert second.retrieval.patience_ms() == 0.0


@pytest.mark.parametrize(("latency_ms", "is_worth"), [(2.0, True), (40.0, False)])
def test_an_answer_is_waited_for_as_it_is_worth(latency_ms: float, is_worth: bool) -> None:
    generation = Generation(latency_ms=latency_ms)
    generation.answer(10, 11, 12)
    generation.say(10, 11, 99)
    assert (generation.retrieval.patience_ms() > 0) == is_worth, "two tokens of ten milliseconds"


def test_nobody_waits_for_a_datastore_that_is_gone_or_never_answers() -> None:
    generation = Generation()
    for _ in range(3):
        generation.retrieval.time_out()
    assert generation.retrieval.patience_ms() == 0.0
    generation = Generation()
    generation.retrieval.lose()
    assert generation.retrieval.patience_ms() == 0.0


def test_who_was_asked_nothing_has_not_failed_to_answer() -> None:
    generation = Generation()
    generation.answer(10, 11, 12)
    for _ in range(3):
        generation.retrieval.time_out()  # the round has waited for a draft model that was lost
    generation.say(10, 11, 99)
    assert generation.retrieval.patience_ms() > 0.0


def test_without_a_datastore_nothing_is_asked() -> None:
    session = Generation(RETRIEVAL).session
    alone = SessionRetrieval(session, RetrievalPlan(), EngineTimings(ForwardTimes({1: 1.0})), None)
    alone.ask(was_known=False)
    assert alone.take_question() is None
    assert alone.patience_ms() == 0.0


def test_a_tree_is_grown_once_for_each_commit_and_no_deeper_than_asked() -> None:
    generation = Generation(RETRIEVAL, rows=Rows.TREE, sources=(Source.DYNAMIC,))
    tree = generation.session.tree
    generation.retrieval.learn([], generation.session.apply([], [1]))
    generation.retrieval.branch(0)
    assert not tree.root.children, "the last token may not be drafted for"
    generation.retrieval.branch(2)
    assert generation.path == [2, 3]
    assert {node.source for node in tree.live_nodes()} == {Source.DYNAMIC}
    num_nodes = tree.num_nodes
    generation.retrieval.branch(4)
    assert tree.num_nodes == num_nodes


def test_the_target_s_rows_and_refused_drafts_are_learnt_from() -> None:
    generation = Generation(RETRIEVAL, rows=Rows.TREE, sources=(Source.RECYCLED, Source.POOL))
    retrieval, session = generation.retrieval, generation.session
    assert retrieval.wants_next_tokens
    chain, tip = [], session.tree.root
    for token_id in (7, 8, 9):
        node = session.tree.add(tip, token_id, -0.1, Source.POOL)
        assert node is not None
        chain, tip = [*chain, node], node
    draws = [3, 8, 9, 6]  # 7 is refused; the tokens after it would have been right
    retrieval.watch(chain, draws, [[(50, 3)], [(51, 2)], [(52, 1)], [(53, 1)]])
    retrieval.learn([], session.apply(chain, draws))
    retrieval.branch(4)
    assert generation.path[0] == 50, "what the target found probable after 3, refused rows included"
    retrieval.learn([], session.apply([], [7]))
    retrieval.begin_round()
    retrieval.branch(4)
    below = {tuple(path_to(node)): node.source for node in session.tree.live_nodes()}
    assert below[8, 9, 6] is Source.POOL
    assert below[51,] is Source.RECYCLED


def path_to(node: Node) -> list[int]:
    """Tokens below the root down to a node."""
    above = [] if node.parent is None or node.parent.parent is None else path_to(node.parent)
    return [*above, node.token_id]


def test_what_was_said_in_plain_rounds_is_known_when_a_strategy_looks_up_again() -> None:
    generation = Generation(AUTO)
    generation.say_plainly(11, 12, 13, 14, 15, 21, 11, 12, 13)
    assert [node.token_id for node in generation.chain()][:2] == [14, 15]


def test_what_was_said_in_plain_rounds_is_learnt_before_what_comes_behind_it() -> None:
    generation = Generation(AUTO)
    generation.say_plainly(11, 12, 13)
    generation.say(14, verifies=False)
    generation.say_plainly(21, 11, 12)
    generation.say(13, verifies=False)
    assert [node.token_id for node in generation.chain()][:1] == [14]
