"""`outrider draft data`: a folder of a target's own answers, which a draft is trained on."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from outrider.core.reports import MAX_LOGPROBS
from outrider.v1 import verifier_pb2
from outrider_cli.console import progress_on
from outrider_cli.failures import FlagError, complain, reported
from outrider_cli.local.stack import termination_as_exit
from outrider_cli.options import DEFAULT_ADDRESS, Address, secured
from outrider_cli.prompts import PromptError
from outrider_client.channel import SecurityOptions
from outrider_client.client import Client
from outrider_client.errors import OutriderError
from outrider_draft.answers import AnswersWriter, BadAnswers, Header, read_prompts
from outrider_draft.prompts import chat_frames, prompts_to_answer
from outrider_draft.sampler import Plan, Progress, Sampler

DEFAULT_TOKENS = 2_000_000
SHOW_S, SAY_S = 0.5, 60.0
"""Seconds between two states of the bar, and between two lines where there is no terminal."""


@secured
def data(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the answers; goes on where it stands.", file_okay=False)],
    address: Address = DEFAULT_ADDRESS,
    num_tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            help=f"Ends with so many tokens of answers in the folder. [default: {DEFAULT_TOKENS}, or all of --prompts]",
            min=1,
        ),
    ] = None,
    hours: Annotated[float | None, typer.Option(help="Ends after this time instead.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Answers a set or a file of prompts, see `outrider bench generate --help`. Unset: the target writes "
            "the turns of users itself.",
        ),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="Of answers. Can be repeated. [default: 0, 0.7 and 1]", min=0)
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = Plan.max_tokens,
    num_top: Annotated[
        int, typer.Option(help="Log-probabilities to keep for each token.", min=1, max=MAX_LOGPROBS)
    ] = MAX_LOGPROBS,
    num_at_once: Annotated[int, typer.Option("--at-once", help="Conversations at a time.", min=1)] = Plan.num_at_once,
    seed: Annotated[int, typer.Option(help="Keys the sampling.", metavar="<int>", min=0)] = Plan.seed,
    security: SecurityOptions,
) -> None:
    """Collects a target's own answers, to train a draft on: token ids, and the target's best log-probabilities.

    A verifier that runs already writes them. Nothing leaves your machines: prompts go to that verifier, its answers to
    the folder.
    """
    progress = Progress()
    with reported(), termination_as_exit():
        if num_tokens is not None and hours is not None:
            raise ValueError("--tokens and --hours must not both be given: each says when to end")
        if hours is not None and not 0 < hours < math.inf:
            raise FlagError("--hours", "a number above 0", hours)
        temperatures = tuple(temperature or Plan.temperatures)
        if not all(map(math.isfinite, temperatures)):
            raise FlagError("--temperature", "a finite number", max(temperatures))
        plan = Plan(
            num_tokens=num_tokens or (DEFAULT_TOKENS if hours is None and prompts is None else None),
            seconds=None if hours is None else 3600 * hours,
            temperatures=temperatures,
            max_tokens=max_tokens,
            num_at_once=num_at_once,
            seed=seed,
        )
        try:
            given = None if prompts is None else prompts_to_answer(prompts)
            asyncio.run(sample(address, out, plan, num_top, given, progress, security))
        except PromptError as error:
            raise PromptError(f"--prompts: {error}") from None
        except BadAnswers as error:
            raise FlagError("--out", f"a folder of this target's answers, or a new one: {error}", out) from None
        except (KeyboardInterrupt, SystemExit, OutriderError, OSError):
            if progress.num_documents:
                complain(f"{_state(out, progress)}; this goes on: {shlex.join(['outrider', *sys.argv[1:]])}", kind="")
            raise
        typer.echo(f"{_state(out, progress)}; next: outrider draft train DRAFT --data {shlex.quote(str(out))}")


async def sample(
    address: str,
    out: Path,
    plan: Plan,
    num_top: int,
    given: Sequence[verifier_pb2.Prompt] | None,
    progress: Progress,
    security: SecurityOptions,
) -> None:
    """Samples until the plan is fulfilled. However it ends, all that was written is in the folder."""
    async with Client(address, **security) as client:
        info = await client.info()
        model, most_at_once = info.model, info.max_num_sessions or plan.num_at_once  # 0 is a server that does not say
        frames = await chat_frames(client) if given is None and info.chat_template else []
        if given is None and not frames:
            raise PromptError(
                f"must be given for {model.model_id}: it has no chat template that shows where a user's words begin, "
                'so it cannot write them itself. A line {"prompt": ...} is a text to continue'
            )
        if most_at_once < plan.num_at_once:
            complain(f"{most_at_once} at once: the verifier takes no more (its --max-num-sessions)", kind="")
            plan = replace(plan, num_at_once=most_at_once)
        prompts = [tuple(await client.tokenize(prompt)) for prompt in given or ()]
        context_len = min(model.max_context_len, info.kv_pool.num_tokens or model.max_context_len)
        header = Header(model.model_id, model.tokenizer_hash, model.vocab_size, min(num_top, model.vocab_size))
        writer = AnswersWriter(out, header)
        try:
            there = ((tuple(prompt.tolist()), num_tokens) for prompt, num_tokens in read_prompts(out))
            sampler = Sampler(client, header, context_len, writer, there, plan, progress)
            async with _shown(f"answers of {model.model_id}", plan, progress):
                await (sampler.converse(frames) if given is None else sampler.answer(prompts))
        finally:
            writer.close()


@asynccontextmanager
async def _shown(what: str, plan: Plan, progress: Progress) -> AsyncIterator[None]:
    """Shows the progress on stderr while the block runs: a bar on a terminal, a line now and then elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    async def show() -> None:
        with progress_on(console) as bar:
            task = bar.add_task(what)
            while True:
                share = _share(plan, progress)
                seconds = progress.seconds * (1 / share - 1) if share else 0.0
                left = f", {timedelta(seconds=round(seconds))} left" if seconds > 0 else ""
                text = f"{what}: {progress.num_tokens} tokens, {progress.speed:.0f} tokens/s{left}"
                bar.update(task, total=1.0, completed=share, description=text)
                if not console.is_terminal:
                    console.print(text, markup=False)
                await asyncio.sleep(SHOW_S if console.is_terminal else SAY_S)

    showing = asyncio.create_task(show())
    try:
        yield
    finally:
        showing.cancel()
        with suppress(asyncio.CancelledError):
            await showing


def _share(plan: Plan, progress: Progress) -> float:
    """Returns how much of this run is done: 0 to 1."""
    if plan.seconds is not None:
        return progress.seconds / plan.seconds
    if plan.num_tokens is not None:
        num_before = progress.num_tokens - progress.num_new_tokens
        return progress.num_new_tokens / max(1, plan.num_tokens - num_before)
    return progress.num_documents / progress.most_documents if progress.most_documents else 0.0


def _state(out: Path, progress: Progress) -> str:
    dropped = ", ".join(f"{number} {reason}" for reason, number in sorted(progress.dropped.items()) if number)
    return (
        f"{out}: {progress.num_documents} documents, {progress.num_tokens} tokens of answers"
        f" ({progress.num_new_tokens} new, {progress.speed:.0f} tokens/s"
        f"{f'; prompts dropped: {dropped}' if dropped else ''})"
    )
