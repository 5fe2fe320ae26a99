"""Sessions are told apart by their tokens alone, whatever vLLM does with the rows."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from outrider.vllm.rows import MAX_ABSENT_STEPS, RowTracker, Sighting

COLUMNS = 512
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=4)


class Request:
    """One request as vLLM knows it."""

    def __init__(self, prompt: list[int]) -> None:
        self.token_ids = prompt
        self.number: int | None = None
        """The session that it was taken for."""
        self.seen_at = 0


class Batches(RuleBasedStateMachine):
    """A vLLM whose requests come, move, are preempted, come back and end."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = RowTracker()
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.texts: dict[int, list[int]] = {}
        """Texts by session, from what the tracker has told alone."""
        self.num_steps = 0

    @rule(prompt=TOKENS)
    def begin(self, prompt: list[int]) -> None:
        if len(self.running) < 6:
            self.running.append(Request(list(prompt)))

    @rule(order=st.randoms(use_true_random=False))
    def move(self, order: object) -> None:
        order.shuffle(self.running)  # type: ignore[attr-defined]

    @rule(row=st.integers(0, 5))
    def end(self, row: int) -> None:
        if row < len(self.running):
            del self.running[row]

    @rule(row=st.integers(0, 5))
    def preempt(self, row: int) -> None:
        if row < len(self.running):
            self.preempted.append(self.running.pop(row))

    @rule()
    def revive(self) -> None:
        self.running += self.preempted
        self.preempted = []

    @rule(data=st.data(), is_seen=st.booleans())
    def step(self, data: st.DataObject, is_seen: bool) -> None:
        """A step of the model; vLLM does not ask for drafts after every one."""
        before = [list(request.token_ids) for request in (*self.running, *self.preempted)]
        sampled = [data.draw(TOKENS | st.just([])) for _ in self.running]
        for request, drawn in zip(self.running, sampled, strict=True):
            request.token_ids += drawn
        if is_seen:
            self.see(sampled, before)

    def see(self, sampled: list[list[int]], before: list[list[int]]) -> None:
        token_ids = np.full((8, COLUMNS), 7, np.int32)
        lengths = np.zeros(8, np.int32)
        for row, request in enumerate(self.running):
            lengths[row] = len(request.token_ids)
            token_ids[row, : lengths[row]] = request.token_ids
        sightings, ended = self.tracker.observe(sampled, lengths, token_ids)
        self.num_steps += 1
        assert len(sightings) == len(self.running)
        assert len({each.number for each in sightings}) == len(sightings)
        for request, sighting, text in zip(self.running, sightings, before, strict=False):
            self.check(request, sighting, is_unique=before.count(text) == 1, drawn=len(request.token_ids) - len(text))
        for number in ended:
            del self.texts[number]

    def check(self, request: Request, sighting: Sighting, *, is_unique: bool, drawn: int) -> None:
        text = self.texts.setdefault(sighting.number, [])
        assert len(text) == sighting.base_len
        text += sighting.token_ids
        assert text == request.token_ids
        if self.num_steps == request.seen_at + 1 and sighting.base_len == len(request.token_ids) - drawn and is_unique:
            # In the batch at the step before: an equal text elsewhere is all that could be taken for it.
            others = [other for other in self.texts if other != sighting.number]
            assert request.number == sighting.number or any(
                self.texts[other][: sighting.base_len] == text[: sighting.base_len] for other in others
            )
        request.number, request.seen_at = sighting.number, self.num_steps


def test_sessions_follow_their_texts() -> None:
    run_state_machine_as_test(Batches, settings=settings(max_examples=60, stateful_step_count=40, deadline=None))


def seen(tracker: RowTracker, *texts: list[int], num_sampled: int = 1) -> tuple[list[Sighting], list[int]]:
    """A step that has drawn the last tokens of each row."""
    token_ids = np.zeros((len(texts) + 1, COLUMNS), np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return tracker.observe(
        [text[len(text) - num_sampled :] for text in texts], [len(text) for text in texts], token_ids
    )


def test_a_row_that_moves_keeps_its_session() -> None:
    tracker = RowTracker()
    (first, second), _ = seen(tracker, [1, 2, 3], [4, 5, 6])
    (moved,), _ = seen(tracker, [4, 5, 6, 7])
    assert moved == Sighting(second.number, 3, [7])
    (back, also), _ = seen(tracker, [4, 5, 6, 7, 8], [1, 2, 3, 9])
    assert (back.number, also.number) == (second.number, first.number)
    assert also.token_ids == [9]


def test_rows_with_equal_texts_are_sessions_of_their_own() -> None:
    tracker = RowTracker()
    (first, second), _ = seen(tracker, [1, 2, 3], [1, 2, 3])
    assert first.number != second.number
    again, _ = seen(tracker, [1, 2, 3, 4], [1, 2, 3, 4])
    assert {each.number for each in again} == {first.number, second.number}


def test_a_prompt_that_is_read_in_pieces_begins_once() -> None:
    tracker = RowTracker()
    (piece,), _ = seen(tracker, [1, 2, 3], num_sampled=0)
    (whole,), _ = seen(tracker, [1, 2, 3, 4])
    assert whole == Sighting(piece.number, 3, [4])


def test_a_session_ends_when_its_row_stays_away() -> None:
    tracker = RowTracker()
    (gone, _), _ = seen(tracker, [1, 2], [3, 4])
    text, ended = [3, 4], []
    for _ in range(MAX_ABSENT_STEPS + 1):
        assert not ended
        text.append(5)
        _, ended = seen(tracker, text)
    assert ended == [gone.number]


def test_no_number_is_given_twice() -> None:
    tracker = RowTracker()
    (before,), _ = seen(tracker, [1, 2, 3])
    assert tracker.clear() == [before.number]
    (after,), _ = seen(tracker, [1, 2, 3, 4])
    assert after.base_len == 0
    assert after.number != before.number
