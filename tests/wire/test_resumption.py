"""A text resumes elsewhere only if it continues as it began; and whatever happens to its calls, each token of it
arrives once."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outrider.v1.types_pb2 import ModelInfo, SamplingParams
from outrider.v1.verifier_pb2 import (
    Chunk,
    Finished,
    GenerateRequest,
    GenerateResponse,
    Reading,
    ResumedChoice,
    Started,
    Waiting,
)
from outrider.wire.attempts import LAST_PAUSE_S, NUM_ROUNDS, REFUSALS, Replicas
from outrider.wire.details import FAILS_AGAIN
from outrider.wire.resumption import (
    BROKEN,
    LAST_CHANCE_S,
    MAX_FRUITLESS,
    Lost,
    Phase,
    ResumableGeneration,
    Taken,
    difference,
    with_sampling,
)

BEGUN = {"model_id": "m", "tokenizer_hash": "t", "dtype": "bfloat16", "numerics_id": "a"}


def info(**changes: str) -> ModelInfo:
    return ModelInfo(**{**BEGUN, **changes})


@pytest.mark.parametrize(
    ("here", "problem"),
    [
        (info(), ""),
        (info(dtype="float32"), "serves m in float32; the generation was begun by m in bfloat16"),
        (info(model_id="n"), "serves n in bfloat16; the generation was begun by m in bfloat16"),
        (info(numerics_id="b"), "computes m with other weights, libraries or threads, or on another processor"),
        (info(numerics_id=""), "computes m with other weights, libraries or threads, or on another processor"),
    ],
)
def test_what_would_change_a_text_is_named(here: ModelInfo, problem: str) -> None:
    assert difference(info(), here) == problem


def test_who_has_promised_no_bits_is_continued_anywhere() -> None:
    assert difference(info(numerics_id=""), info()) == ""


@pytest.mark.parametrize(
    ("given", "max_tokens", "is_wish"),
    [({}, 40, True), ({"min_tokens": 60}, 60, True), ({"max_tokens": 50}, 50, False)],
)
def test_a_requests_own_values_come_before_the_models(given: dict[str, int], max_tokens: int, is_wish: bool) -> None:
    model = ModelInfo(default_sampling=SamplingParams(temperature=0, top_p=0.9, max_tokens=40))
    request = GenerateRequest(sampling=SamplingParams(**given, top_p=1, stop=["a"]))
    whole = with_sampling(request, model)
    drawn = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert whole.sampling == SamplingParams(**{**drawn, **given, "max_tokens": max_tokens}, stop=["a"])
    assert whole.clamp_max_tokens == is_wish
    assert with_sampling(whole, model) == whole


Code = grpc.StatusCode
SEED = 7
NUM_TOKENS = 6
"""Tokens of each text. After them comes a rest of one character, which no token decides."""
RESUME_TIMEOUT_S, STALL_TIMEOUT_S = 20.0, 10.0


def text_of(index: int) -> list[int]:
    """The tokens of a text; each is two characters long."""
    return [100 * index + number for number in range(NUM_TOKENS)]


class AnyCourse(RuleBasedStateMachine):
    """A generation whose servers begin, read, generate, fall silent and break in any order. Their texts are right: they
    continue after what the request says has arrived."""

    @initialize(
        num_texts=st.integers(1, 3),
        num_resumed=st.integers(0, 2),
        num_replicas=st.integers(1, 3),
        resumes=st.sampled_from([True] * 5 + [False]),
        timeout_s=st.sampled_from([None, 60.0]),
        waits=st.booleans(),
    )
    def begin(
        self, num_texts: int, num_resumed: int, num_replicas: int, resumes: bool, timeout_s: float | None, waits: bool
    ) -> None:
        request = GenerateRequest(n=num_texts)
        if num_texts == 1:
            request.resume_token_ids.extend(text_of(0)[:num_resumed])
        elif num_resumed:
            choices = [ResumedChoice(token_ids=text_of(index)[:num_resumed]) for index in range(num_texts)]
            request.resume_choices.extend(choices)
        self.now, self.deadline = 50.0, 50.0 + (timeout_s or 1e9)
        self.num_replicas, self.resumes, self.waits = num_replicas, resumes, waits
        self.generation = ResumableGeneration(
            request,
            Replicas([f"host:{number}" for number in range(num_replicas)]),
            self.now,
            timeout_s=timeout_s,
            resumes=resumes,
            resume_timeout_s=RESUME_TIMEOUT_S,
            stall_timeout_s=STALL_TIMEOUT_S,
            wait_s=RESUME_TIMEOUT_S if waits else 0.0,
        )
        self.token_ids = [text_of(index)[:num_resumed] for index in range(num_texts)]
        self.characters = [0] * num_texts
        self.has_finished = [False] * num_texts
        self.num_failures = [0] * num_replicas
        self.model = ""
        """The model that began the texts; empty before one has."""
        self.broken_at: float | None = None
        self.num_fruitless = 0
        self.is_over = False
        self.open_call()

    def open_call(self, *, again: bool = False) -> None:
        self.generation.begin(self.now, self.generation.replica if again else None)
        request = self.generation.request()
        several = len(self.token_ids) > 1
        self.told = [list(choice.token_ids) for choice in request.resume_choices] or [list(request.resume_token_ids)]
        # Everything that has arrived is in the request, and nothing else is.
        assert self.told == self.token_ids or (several and not any(self.told) and not any(self.token_ids))
        self.told = [list(token_ids) for token_ids in self.token_ids]
        assert [choice.is_finished for choice in request.resume_choices] in ([], self.has_finished)
        assert request.sampling.seed == (SEED if self.model else 0)
        self.num_told = [len(token_ids) for token_ids in self.told]
        self.has_started, self.has_sent_rest = set[int](), set[int]()
        self.has_spoken = self.is_taken = self.has_read = self.has_progress = self.was_slow = False

    def say(self, response: GenerateResponse) -> Taken | Lost:
        taken = self.generation.on_message(self.now, response)
        if not isinstance(taken, Lost):
            self.has_spoken = True
            self.is_taken = self.is_taken or not response.HasField("waiting")
        return taken

    goes_on = precondition(lambda self: not self.is_over)
    is_taken_here = precondition(lambda self: not self.is_over and self.has_started)

    @rule(seconds=st.sampled_from([0.01, 1.0, 15.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @goes_on
    @rule()
    def wait_in_line(self) -> None:
        assert self.say(GenerateResponse(waiting=Waiting(num_waiting=1))) is Taken.EMIT

    @goes_on
    @rule()
    def call_again(self) -> None:
        """The reader makes another call there: nobody knows how the last one ended."""
        self.open_call(again=True)

    @goes_on
    @rule(index=st.integers(0, 2), model=st.sampled_from(["m", "m", "m", "m", "m", "n"]))
    def start(self, index: int, model: str) -> None:
        if index >= len(self.token_ids) or index in self.has_started or self.has_finished[index]:
            return
        # The seeds of the others are derived from that of the first.
        started = Started(seed=SEED if index == 0 else 1000 + index, model=info(model_id=model))
        if 0 not in self.has_started and index and not self.model:
            return
        taken = self.say(GenerateResponse(index=index, started=started))
        assert isinstance(taken, Lost) is (self.model not in ("", model))
        if isinstance(taken, Lost):
            self.fail(Code.UNAVAILABLE, is_of_request=False)
            return
        self.model = model
        self.has_started.add(index)

    @is_taken_here
    @rule()
    def read(self) -> None:
        assert self.say(GenerateResponse(reading=Reading(num_read_tokens=1, num_tokens=2))) is Taken.EMIT
        self.has_read, self.broken_at = True, None

    @is_taken_here
    @rule(index=st.integers(0, 2), count=st.integers(1, 3))
    def speak(self, index: int, count: int) -> None:
        if index not in self.has_started or self.has_finished[index]:
            return
        told = self.told[index]
        token_ids = text_of(index)[len(told) : len(told) + count]
        had_rest, is_rest = self.characters[index] % 2, not token_ids
        if is_rest and index in self.has_sent_rest:
            return
        told.extend(token_ids)
        # As the server counts them: in the text of this call.
        ends = [2 * (position - self.num_told[index] + 1) for position in range(len(told) - len(token_ids), len(told))]
        chunk = Chunk(token_ids=token_ids, text="xx" * len(token_ids) or "r", text_ends=ends)
        response = GenerateResponse(index=index, chunk=chunk)
        taken = self.say(response)
        assert taken is (Taken.SKIP if is_rest and had_rest else Taken.EMIT)
        if taken is Taken.EMIT:
            self.token_ids[index] += chunk.token_ids
            self.characters[index] += len(chunk.text)
            if not is_rest:
                assert response.chunk.text_ends[-1] == self.characters[index]
        if is_rest:
            self.has_sent_rest.add(index)
        self.has_progress, self.broken_at, self.num_fruitless = True, None, 0

    @is_taken_here
    @rule(index=st.integers(0, 2))
    def finish(self, index: int) -> None:
        if index not in self.has_sent_rest or self.has_finished[index]:
            return
        assert self.say(GenerateResponse(index=index, finished=Finished())) is Taken.EMIT
        self.has_finished[index] = True
        self.is_over = all(self.has_finished)

    @goes_on
    @rule(num_rounds=st.sampled_from([0, 1, 3, NUM_TOKENS + 1, NUM_TOKENS + 2]))
    def serve(self, num_rounds: int) -> None:
        """A server works for some rounds of all texts."""
        for index in range(len(self.token_ids)):
            if not self.is_over:
                self.start(index, self.model or "m")
        for _ in range(num_rounds):
            for index in range(len(self.token_ids)):
                self.finish(index)
                if not self.is_over:
                    self.speak(index, 1)

    @goes_on
    @rule(count=st.integers(1, MAX_FRUITLESS + 1), seconds=st.sampled_from([0.0, 6.0]))
    def break_servers(self, count: int, seconds: float) -> None:
        """Servers accept it, one after another, and break without a token."""
        for _ in range(count):
            self.serve(0)
            self.now += seconds
            if not self.is_over:
                self.fail(Code.UNAVAILABLE, is_of_request=False)

    @goes_on
    @rule()
    def fall_silent(self) -> None:
        limit_s = self.generation.await_message(self.now)
        assert limit_s is not None
        left_s = RESUME_TIMEOUT_S if self.broken_at is None else self.broken_at + RESUME_TIMEOUT_S - self.now
        assert limit_s == (STALL_TIMEOUT_S if self.has_spoken else min(STALL_TIMEOUT_S, max(LAST_CHANCE_S, left_s)))
        self.now += limit_s
        assert isinstance(self.generation.on_silence(self.now), Lost)
        self.has_progress, self.was_slow = False, not self.has_read
        self.fail(Code.UNAVAILABLE, is_of_request=False)

    @goes_on
    @rule(code=st.sampled_from([*2 * sorted(BROKEN, key=str), Code.DATA_LOSS]), is_of_request=st.booleans())
    def fail(self, code: grpc.StatusCode, is_of_request: bool) -> None:
        is_of_request = is_of_request and code is Code.INTERNAL
        was_taken = bool(self.model) or self.is_taken
        if was_taken and self.broken_at is None:
            self.broken_at = self.now
        says_nothing = self.has_progress or self.was_slow or (not self.is_taken and code in REFUSALS)
        self.num_fruitless += was_taken and not says_nothing
        self.num_failures[self.generation.replica] += 1
        pause_s = self.generation.on_error(self.now, code, [FAILS_AGAIN] if is_of_request else [])
        is_wrong = code not in BROKEN or is_of_request
        may_not = not self.resumes and (was_taken or code not in REFUSALS)
        is_final = is_wrong or may_not or self.now >= self.deadline
        if was_taken and not is_final:
            assert self.broken_at is not None
            is_final = self.now - self.broken_at >= RESUME_TIMEOUT_S or self.num_fruitless > MAX_FRUITLESS
        elif not is_final:
            # No server has accepted it: each is asked at least once, and not forever.
            is_final = pause_s is None
            is_alone_and_full = code is Code.RESOURCE_EXHAUSTED and self.num_replicas == 1
            assert not is_final or min(self.num_failures) or is_alone_and_full
            assert is_final or min(self.num_failures) < NUM_ROUNDS or (self.resumes and self.waits)
            assert is_final or not min(self.num_failures) or self.waits
        assert (pause_s is None) is is_final
        if pause_s is not None:
            assert 0 <= pause_s <= 1.2 * LAST_PAUSE_S
            self.now += pause_s
            assert self.now <= self.deadline
            self.open_call()
        self.is_over = is_final

    @invariant()
    def each_token_has_arrived_once_and_in_its_place(self) -> None:
        for index, token_ids in enumerate(getattr(self, "token_ids", ())):
            assert token_ids == text_of(index)[: len(token_ids)]
            assert not self.has_finished[index] or len(token_ids) == NUM_TOKENS

    @invariant()
    def the_phase_says_where_it_is(self) -> None:
        if not hasattr(self, "generation"):
            return
        phase = self.generation.phase
        assert (phase is Phase.FINISHED) is all(self.has_finished)
        assert self.is_over is (phase in (Phase.FINISHED, Phase.FAILED))
        if not self.is_over:
            taken = Phase.RUNNING if self.is_taken else Phase.BROKEN
            assert phase is (taken if self.model or self.is_taken else Phase.ASKING)


TestAnyCourse = AnyCourse.TestCase
TestAnyCourse.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def course(**options: float) -> ResumableGeneration:
    """A generation of one text, with one replica, at second 0."""
    timeouts = {"resume_timeout_s": RESUME_TIMEOUT_S, "stall_timeout_s": STALL_TIMEOUT_S, "wait_s": RESUME_TIMEOUT_S}
    generation = ResumableGeneration(GenerateRequest(), Replicas(["host:1"]), 0.0, **(timeouts | options))
    generation.begin(0.0)
    return generation


def broken(**options: float) -> ResumableGeneration:
    """A generation whose first call has broken at once, and whose second begins."""
    generation = course(**options)
    generation.on_message(0.0, GenerateResponse(started=Started(model=info())))
    assert generation.on_error(0.0, Code.UNAVAILABLE) is not None
    generation.begin(0.0)
    return generation


READING = GenerateResponse(reading=Reading(num_read_tokens=1, num_tokens=2))


def test_a_server_that_reads_has_taken_the_text_over_and_may_take_its_time() -> None:
    silent, reading = broken(), broken()
    reading.on_message(1.0, READING)
    assert silent.on_error(RESUME_TIMEOUT_S, Code.UNAVAILABLE) is None
    assert reading.on_error(10 * RESUME_TIMEOUT_S, Code.UNAVAILABLE) is not None


@pytest.mark.parametrize("reads", [False, True])
def test_silence_is_no_reason_to_suspect_the_request_unless_it_comes_after_the_reading_was_told_of(reads: bool) -> None:
    generation = course(resume_timeout_s=1e6)
    for _ in range(MAX_FRUITLESS + 1):
        generation.on_message(0.0, GenerateResponse(started=Started()))
        if reads:
            generation.on_message(0.0, READING)
        generation.on_silence(STALL_TIMEOUT_S)
        pause_s = generation.on_error(STALL_TIMEOUT_S, Code.UNAVAILABLE)
        generation.begin(STALL_TIMEOUT_S)
    assert (pause_s is None) is reads


def test_another_model_may_begin_a_text_that_none_has_begun() -> None:
    generation = course()
    for model_id in ("m", "n"):
        assert generation.check_model(info(model_id=model_id)) is None
    generation.on_message(0.0, GenerateResponse(started=Started(model=info(model_id="n"))))
    lost = generation.check_model(info(model_id="m"))
    assert lost == Lost("host:1 serves m in bfloat16; the generation was begun by n in bfloat16")


def test_a_server_has_a_chance_to_answer_also_when_the_time_is_nearly_over() -> None:
    generation = broken()
    generation.begin(RESUME_TIMEOUT_S - 0.1)
    assert generation.await_message(RESUME_TIMEOUT_S - 0.1) == LAST_CHANCE_S


def test_a_pause_ends_with_the_time_of_the_call() -> None:
    generation = broken(timeout_s=0.01)
    assert 0 < (generation.on_error(0.0, Code.UNAVAILABLE) or 0) <= 0.01
