"""Has a target answer prompts through its verifier, many at a time, and keeps every token that it writes.

The log-probabilities are the model's own, at temperature 1 and before all filters, whatever the answer's temperature.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from outrider_cli.prompts import PromptError
from outrider_client.client import Client, Generation
from outrider_client.errors import ResourceExhausted
from outrider_client.generation import Chunk, FinishReason
from outrider_client.requests import GenerateOptions
from outrider_draft.answers import AnswersWriter, Document, Header
from outrider_draft.prompts import ChatFrame, TokenIds

TURN_MIN_P = 0.05
"""Filter of users' turns: at temperature 1 they are varied, and without the tail a small model stays with sense."""
MAX_TURN_TOKENS = 384
"""Longest user's turn. What goes on for longer has mostly lost its thread."""
NEXT_TURNS = 0.25
"""Share of the answered turns that a user's next turn follows."""
MOST_PERIOD, LOOP_TOKENS = 32, 96
"""A text loops if so many tokens at its end repeat with no longer a period. At low temperatures small models get stuck
so, and all that follows would teach a draft nothing."""
MOST_BAD_TURNS = 256
"""So many users' turns in a row without a usable one: the target cannot write them."""
LEAST_ROOM = 64
"""A prompt that leaves less of the context for its answer is dropped."""


@dataclass(frozen=True)
class Plan:
    """Says how much is sampled, and how."""

    num_tokens: int | None
    """Tokens of answers in the folder at the end; None: no limit."""
    seconds: float | None
    """Longest time; None: no limit."""
    # A draft is asked after all three kinds of text: greedy ones are the plainest, those at temperature 1 go where a
    # draft's mistakes are, and a user's are mostly between.
    temperatures: Sequence[float] = (0.0, 0.7, 1.0)
    max_tokens: int = 512
    """Longest answer."""
    num_at_once: int = 64
    seed: int = 0


@dataclass
class Progress:
    """Counts what is there; read while the sampling goes on."""

    num_documents: int = 0
    most_documents: int | None = None
    """Documents when all prompts of a file are answered."""
    num_tokens: int = 0
    """Tokens of answers in the folder."""
    num_new_tokens: int = 0
    """Those that this run has added."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Prompts that were not answered, by the reason."""
    began: float | None = None
    ended: float | None = None

    @property
    def seconds(self) -> float:
        """Time of the sampling so far."""
        return 0.0 if self.began is None else (self.ended or time.perf_counter()) - self.began

    @property
    def speed(self) -> float:
        """New tokens of answers a second, all of that time counted."""
        return self.num_new_tokens / self.seconds if self.seconds else 0.0


class _Enough(Exception):
    """All tokens are there."""


@dataclass(slots=True)
class _Answer:
    """What a target has written after a prompt so far."""

    token_ids: list[int] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    is_whole: bool = False
    """True if the target has ended it."""


class Sampler:
    """Answers prompts of one kind, and adds the answers to a folder."""

    def __init__(
        self,
        client: Client,
        header: Header,
        context_len: int,
        writer: AnswersWriter,
        there: Iterable[tuple[TokenIds, int]],
        plan: Plan,
        progress: Progress,
    ) -> None:
        """
        Args:
            client: Reaches the verifier.
            header: Says whose answers these are.
            context_len: Longest text that it takes, in tokens.
            writer: Takes the answers.
            there: Prompts in the folder, and the lengths of their answers.
            plan: How much to sample.
            progress: Counts what is there.
        """
        self._client, self._header, self._context_len = client, header, context_len
        self._writer, self._plan, self.progress = writer, plan, progress
        self._num_bad_turns = 0
        self._answered: Counter[TokenIds] = Counter()
        for prompt, num_tokens in there:
            self._answered[prompt] += 1
            self.progress.num_documents += 1
            self.progress.num_tokens += num_tokens
        # Else a run that goes on would draw the same turns again.
        self._seed = f"{plan.seed} {self.progress.num_documents}"

    async def converse(self, frames: Sequence[ChatFrame]) -> None:
        """Has the target write users' turns and answer them. Ends as the plan says."""

        async def hold(index: int) -> None:
            random = Random(f"{self._seed} {index}")
            frame = random.choice(frames)
            history = frame.opening
            while True:
                prompt = await self._next_prompt(history, frame, random)
                if prompt is None or not self._takes(prompt):
                    return
                temperature = random.choice(self._plan.temperatures)
                answer = await self._answer(prompt, temperature, random.getrandbits(63))
                if not answer.is_whole or not frame.to_next_turn or random.random() >= NEXT_TURNS:
                    return
                history = prompt + tuple(answer.token_ids) + frame.to_next_turn

        await self._hold_all(itertools.count(), hold)

    async def answer(self, prompts: Sequence[TokenIds]) -> None:
        """Has the target answer each prompt once at each temperature. Ends as the plan says, or with the prompts."""
        temperatures, answered = self._plan.temperatures, self._answered.copy()
        distinct = list(dict.fromkeys(prompts))
        self.progress.dropped["duplicate"] += len(prompts) - len(distinct)
        # Dropped once, not once at each temperature.
        distinct = list(filter(self._takes, distinct))
        self.progress.most_documents = len(distinct) * len(temperatures)

        async def hold(index: int) -> None:
            number, place = divmod(index, len(distinct))
            prompt, temperature = distinct[place], temperatures[(number + place) % len(temperatures)]
            if number >= answered[prompt]:
                await self._answer(prompt, temperature, Random(f"{self._seed} {index}").getrandbits(63))

        await self._hold_all(range(self.progress.most_documents), hold)

    async def _hold_all(self, indices: Iterable[int], hold: Callable[[int], Awaitable[None]]) -> None:
        """Holds the conversations of these numbers, some at a time."""
        turns = iter(indices)
        self.progress.began = time.perf_counter()

        async def work() -> None:
            for index in turns:  # all workers take from the same turns
                self._check_enough()
                await hold(index)

        try:
            async with asyncio.timeout(self._plan.seconds), asyncio.TaskGroup() as group:
                for _ in range(self._plan.num_at_once):
                    group.create_task(work())
        except TimeoutError:
            pass  # the plan's end; answers that were cut off are kept
        except BaseExceptionGroup as failures:
            # The first one; those after it are mostly the same.
            if others := failures.split(_Enough)[1]:
                raise others.exceptions[0] from None
        finally:
            self.progress.ended = time.perf_counter()

    def _takes(self, prompt: TokenIds) -> bool:
        return not self._is_dropped(len(prompt) + LEAST_ROOM > self._context_len, "too long")

    def _is_dropped(self, is_bad: bool, reason: str) -> bool:
        self.progress.dropped[reason] += is_bad
        return is_bad

    async def _next_prompt(self, history: TokenIds, frame: ChatFrame, random: Random) -> TokenIds | None:
        """Returns a conversation with what a user says next, ready to be answered; None if that is of no use. Raises
        PromptError if the target cannot write users' turns."""
        turn: list[int] = []
        generation = await self._generate(
            history,
            lambda chunk: turn.extend(chunk.token_ids),
            GenerateOptions(
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_p=TURN_MIN_P,
                max_tokens=MAX_TURN_TOKENS,
                stop_token_ids=frame.to_answer[:1],
                seed=random.getrandbits(63),
            ),
        )
        prompt = (*history, *turn, *frame.to_answer)
        is_bad = (
            self._is_dropped(not generation.text.strip(), "empty")
            or self._is_dropped(_loops(turn), "looping")
            or self._is_dropped(generation.result.finish_reason is FinishReason.LENGTH, "too long")
            or self._is_dropped(prompt in self._answered, "duplicate")
        )
        self._num_bad_turns = self._num_bad_turns + 1 if is_bad else 0
        if self._num_bad_turns >= MOST_BAD_TURNS:
            told = ", ".join(f"{number} {reason}" for reason, number in self.progress.dropped.items() if number)
            raise PromptError(f"must be given: {self._header.model} does not write users' turns of use ({told})")
        return None if is_bad else prompt

    async def _answer(self, prompt: TokenIds, temperature: float, seed: int) -> _Answer:
        """Has the target answer a prompt. What it has written is kept, however the answer ends."""
        self._answered[prompt] += 1
        answer = _Answer()

        def take(chunk: Chunk) -> bool:
            answer.token_ids.extend(chunk.token_ids)
            answer.top.extend(each.top for each in chunk.logprobs)
            self.progress.num_tokens += len(chunk.token_ids)
            self.progress.num_new_tokens += len(chunk.token_ids)
            self._check_enough()
            return len(answer.token_ids) % MOST_PERIOD == 0 and _loops(answer.token_ids)

        try:
            # All else is the server's default: these are the texts that its users get.
            generation = await self._generate(
                prompt,
                take,
                GenerateOptions(
                    temperature=temperature,
                    max_tokens=self._plan.max_tokens,
                    seed=seed,
                    logprobs=self._header.num_top,
                    logprobs_mode="raw-logprobs",
                ),
            )
            answer.is_whole = any(each and each.finish_reason is FinishReason.STOP for each in generation.results)
        finally:
            self._keep(prompt, answer)
        return answer

    def _keep(self, prompt: TokenIds, answer: _Answer) -> None:
        if not answer.token_ids:
            return
        top = np.array(answer.top, np.float64)  # holds token ids exactly
        token_ids = np.array((*prompt, *answer.token_ids), np.int32)
        document = Document(token_ids, len(prompt), top[..., 0].astype(np.int32), top[..., 1].astype(np.float16))
        self.progress.num_documents += 1
        self._writer.add(document)

    async def _generate(
        self, prompt: TokenIds, take: Callable[[Chunk], bool | None], options: GenerateOptions
    ) -> Generation:
        """Generates until `take` says that it is enough. A call that finds all sessions in use is repeated when the
        verifier says."""
        # `off`: so many at once fill the rows of a forward, and leave none for drafts.
        options |= {"method": "off", "clamp_max_tokens": True}
        while True:
            generation = self._client.generate(prompt, **options)
            try:
                async with generation:
                    async for chunk in generation:
                        if take(chunk):
                            break
            except ResourceExhausted as error:
                if error.retry_after_s is None or generation.token_ids:
                    raise
                await asyncio.sleep(error.retry_after_s)
            else:
                return generation

    def _check_enough(self) -> None:
        if self._plan.num_tokens is not None and self.progress.num_tokens >= self._plan.num_tokens:
            raise _Enough


def _loops(token_ids: Sequence[int]) -> bool:
    """Returns True if the end of a text repeats."""
    end = token_ids[-LOOP_TOKENS:]
    periods = range(1, MOST_PERIOD + 1)
    return len(end) == LOOP_TOKENS and any(end[period:] == end[:-period] for period in periods)
