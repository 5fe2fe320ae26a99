"""`outrider prior build`: a target continues prompts, and its texts become a prior file.

DOUBLE, section 4.3: the datastore is filled beforehand from limited inference on generic corpora, ten rounds of it.
Prompts that are measured afterwards must not be among them: the datastore would know the answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Unpack

import typer
from rich.console import Console

from outrider_cli import options
from outrider_cli.console import progress_on
from outrider_cli.failures import FlagError, reported
from outrider_cli.local.stack import LocalStack, StackConfig, termination_as_exit
from outrider_cli.models import check_models, draft_for
from outrider_cli.options import refuse_given, secured
from outrider_cli.prior_file import MAX_NUM_DOCUMENTS, PriorHeader, check_destination, write_prior
from outrider_cli.prompts import PROMPT_SETS, Input, Prompt, PromptError, choose, load_prompts
from outrider_client.channel import SecurityOptions
from outrider_client.client import Client
from outrider_client.errors import OutOfRange, OutriderError, ResourceExhausted, Unavailable
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

CONTEXT_LEN = 4
"""Tokens of the prompt that stand before the output of a later round: as far as n-grams reach. The whole prompt would
be counted again in every round."""
MAX_ROUNDS = 100
MAX_NUM_WAITS = 60
"""Waits of a generation for a verifier that has all its sessions in use, before that counts as a failure."""
END_TIMEOUT_S = 1.0
"""Seconds to wait for the end of a process: its connections close a moment before it is gone."""
_STACK_FLAGS = ("target", "target_dtype", "draft", "draft_dtype", "speculator", "device", "num_threads")

From = Annotated[
    str,
    typer.Option(
        "--from", help=f'{", ".join(PROMPT_SETS)}, or JSONL: {{"prompt": ...}}, or HumanEval, GSM8K or MT-Bench.'
    ),
]
OnOutput = Callable[[int], None]
"""Called with the number of tokens of every output."""
Display = tuple[Callable[[str], None], OnOutput]


@dataclass(frozen=True)
class BuildPlan:
    """Holds the prompts to continue, and the settings of their generations."""

    prompts: tuple[Input, ...]
    rounds: int = 10  # DOUBLE, section 5.3 and Table 3: beyond ten rounds the gain saturates
    max_tokens: int = 128
    concurrency: int = 8
    temperature: float = 0.7
    seed: int = 0

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise FlagError("--temperature", "a finite number", self.temperature)
        if self.rounds > 1 and self.temperature == 0:
            raise FlagError("--temperature", "above 0 for more than one round: all would be the same", self.temperature)
        if self.rounds * len(self.prompts) > MAX_NUM_DOCUMENTS:
            rule = f"at most {MAX_NUM_DOCUMENTS // len(self.prompts)} for {len(self.prompts)} prompts"
            raise FlagError("--rounds", rule, self.rounds)

    def sampling(self, round_number: int) -> GenerateOptions:
        """Returns the sampling of a round: the first one, numbered 1, is greedy."""
        if round_number == 1:
            return GenerateOptions(temperature=0)
        return GenerateOptions(temperature=self.temperature, seed=self.seed + round_number)


@secured
def build(
    context: typer.Context,
    *,
    prompts: From,
    out: Annotated[Path, typer.Option(help="The prior file to write.")],
    rounds: Annotated[
        int,
        typer.Option(help="How often each prompt is continued: once greedily, then sampled.", min=1, max=MAX_ROUNDS),
    ] = BuildPlan.rounds,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a continuation.", min=1)] = BuildPlan.max_tokens,
    num_prompts: Annotated[
        int | None, typer.Option(help="Prompts to use, the categories taking turns. Default: all.", min=1)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Generations at a time.", min=1)] = BuildPlan.concurrency,
    temperature: Annotated[
        float, typer.Option(help="Divides the logits, from round 2 on.", min=0)
    ] = BuildPlan.temperature,
    seed: Annotated[
        int, typer.Option(help="Keys the sampling, with the round.", metavar="<int>", min=0, max=2**63)
    ] = BuildPlan.seed,
    address: Annotated[
        str | None, typer.Option(help="A verifier that runs already, HOST:PORT, instead of services of our own.")
    ] = None,
    target: options.Target = StackConfig.target,
    target_dtype: options.TargetDtype = "auto",
    draft: options.Draft = None,
    draft_dtype: options.DraftDtype = None,
    speculator: Annotated[bool, typer.Option(help="Starts a speculator.", show_default=False)] = True,
    device: options.Device = StackConfig.device,
    num_threads: options.NumThreads = StackConfig.num_threads,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as a JSON object.")] = False,
    security: SecurityOptions,
) -> None:
    """Makes a prior file: the target continues prompts, and its texts are kept."""
    config = StackConfig(
        target=target,
        target_dtype=target_dtype,
        draft=draft_for(target, draft) if speculator else None,
        draft_dtype=draft_dtype,
        datastore=False,
        device=device,
        num_threads=num_threads,
    )
    with reported():
        _check_address(context, address)
        check_destination(out)
        if address is None:
            check_models(config.target, config.draft, device)
        chosen = tuple(prompt.input for prompt in choose(_load(prompts), count=num_prompts))
        plan = BuildPlan(chosen, rounds, max_tokens, concurrency, temperature, seed)
        with _display(plan) as display:
            header, documents = _run(plan, address, config, display, security)
        size = write_prior(out, header, documents)
    num_tokens = sum(map(len, documents))
    if as_json:
        told = {"file": str(out), "num_bytes": size, "num_documents": len(documents), "num_tokens": num_tokens}
        typer.echo(json.dumps({**told, "model_id": header.model_id, "tokenizer_hash": header.tokenizer_hash}))
        return
    Console(highlight=False, soft_wrap=True).print(
        f"{out}: {len(documents)} documents, {num_tokens} tokens of {header.model_id} (tokenizer "
        f"{header.tokenizer_hash[:12]}); {_readable(size)}, {size / num_tokens:.2f} bytes a token",
        markup=False,
    )


async def continue_prompts(
    address: str, plan: BuildPlan, on_output: OnOutput = lambda _: None, **security: Unpack[SecurityOptions]
) -> tuple[PriorHeader, list[list[int]]]:
    """Makes a prior of a verifier's continuations of the prompts: round by round, as many at a time as it allows.

    The documents of a prompt stand together, in the order of the rounds: whole in the first, with the end of the prompt
    in the others. The result depends on the plan and the model alone.

    Raises:
        OutOfRange: a prompt is too long for max_tokens; nothing has been generated then.
        OutriderError: the verifier failed a generation; the others have been cancelled.
    """
    async with Client(address, **security) as client:
        info = await client.info()
        model = info.model
        header = PriorHeader(model.tokenizer_hash, model.vocab_size, model.model_id, plan.rounds)
        prompts = [await client.tokenize(each) for each in plan.prompts]
        for asked, prompt in zip(plan.prompts, prompts, strict=True):
            if len(prompt) + plan.max_tokens > model.max_context_len:
                raise OutOfRange(
                    f"the prompt {_beginning(asked)} has {len(prompt)} tokens: with --max-tokens {plan.max_tokens} it "
                    f"is longer than the context of {model.max_context_len}"
                )
        # 0 is a server that does not say.
        concurrency = min(plan.concurrency, info.max_num_sessions or plan.concurrency)
        outputs = await _outputs(client, plan, prompts, concurrency, on_output)
    return header, list(documents_of(prompts, outputs))


def documents_of(prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[Sequence[int]]]) -> Iterator[list[int]]:
    """Yields the documents: `outputs` has the output of each prompt in each round. Those of one token are left out."""
    for prompt, (first, *others) in zip(prompts, outputs, strict=True):
        # Without its output, a later round would only count the end of the prompt once more.
        documents = [[*prompt, *first], *([*prompt[-CONTEXT_LEN:], *output] for output in others if output)]
        yield from (document for document in documents if len(document) > 1)


async def _outputs(
    client: Client, plan: BuildPlan, prompts: Sequence[Sequence[int]], concurrency: int, on_output: OnOutput
) -> list[list[tuple[int, ...]]]:
    """Returns, for each prompt, its output in each round."""
    outputs: list[list[tuple[int, ...]]] = [[()] * plan.rounds for _ in prompts]
    turns = ((number, index) for number in range(1, plan.rounds + 1) for index in range(len(prompts)))

    async def work() -> None:
        for number, index in turns:  # all workers take from the same turns
            sampling = GenerateOptions(**plan.sampling(number), max_tokens=plan.max_tokens)
            try:
                result = await _complete(client, prompts[index], sampling)
            except OutriderError as error:
                what = f"round {number} of the prompt {_beginning(plan.prompts[index])}: {error.message}"
                raise type(error)(what, error.details, code=error.code) from error
            outputs[index][number - 1] = result.token_ids  # by place: workers finish in any order
            on_output(len(result.token_ids))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as failures:  # the first one; those after it are mostly the same
        raise failures.exceptions[0] from None
    return outputs


async def _complete(client: Client, prompt: Sequence[int], sampling: GenerateOptions) -> Result:
    """Generates to the end. A call that finds all sessions in use is repeated when the verifier says."""
    for _ in range(MAX_NUM_WAITS):
        try:
            return await client.complete(prompt, **sampling)
        except ResourceExhausted as error:
            if error.retry_after_s is None:
                raise
            await asyncio.sleep(error.retry_after_s)
    # Outside the `try`: the last attempt raises what it gets.
    return await client.complete(prompt, **sampling)


def _run(
    plan: BuildPlan, address: str | None, config: StackConfig, display: Display, security: SecurityOptions
) -> tuple[PriorHeader, list[list[int]]]:
    """Has the prompts continued, by services that are started and ended here if there is no address."""
    say, on_output = display
    if address is not None:
        say("generating")
        return asyncio.run(continue_prompts(address, plan, on_output, **security))
    with ExitStack() as exits:
        exits.enter_context(termination_as_exit())
        stack = exits.enter_context(LocalStack(config, say))
        say("generating")
        try:
            # Without `security`: these services are our own, on loopback, in plaintext.
            return asyncio.run(continue_prompts(stack.address, plan, on_output))
        except Unavailable:
            _check_running(stack)
            raise


def _check_running(stack: LocalStack) -> None:
    """Raises ProcessFailed if the verifier has ended: the end of its log says more than Unavailable does."""
    if (verifier := stack.verifier) is not None:
        try:
            verifier.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return
        raise verifier.failure("ended")


@contextmanager
def _display(plan: BuildPlan) -> Iterator[Display]:
    """Shows the progress on stderr: a bar on a terminal, a line for each round elsewhere."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    num_done, num_tokens, started = 0, 0, 0.0
    with progress_on(console) as progress:
        task = progress.add_task("starting", total=plan.rounds * len(plan.prompts))

        def say(text: str) -> None:
            nonlocal started
            # Set anew by each step, so that the speed does not count the start of the services.
            started = time.perf_counter()
            progress.update(task, description=text)

        def on_output(num_output_tokens: int) -> None:
            nonlocal num_done, num_tokens
            num_done += 1
            num_tokens += num_output_tokens
            # By count: where rounds meet, outputs of both come at the same time.
            number, num_in_round = divmod(num_done - 1, len(plan.prompts))
            speed = num_tokens / (time.perf_counter() - started)
            text = f"round {number + 1} of {plan.rounds}, {num_tokens} tokens, {speed:.0f} tokens/s"
            progress.update(task, advance=1, description=text)
            if num_in_round == len(plan.prompts) - 1 and not console.is_terminal:
                console.print(text, markup=False)

        yield say, on_output


def _load(source: str) -> list[Prompt]:
    try:
        return load_prompts(source)
    except PromptError as error:
        raise PromptError(f"--from: {error}") from None


def _check_address(context: typer.Context, address: str | None) -> None:
    """Raises FlagError for flags of services that are not started. Unset ones have their defaults all the same."""
    if address is not None:
        refuse_given(context, _STACK_FLAGS, "unset with --address")


def _beginning(prompt: Input) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return f"{text[:40]!r}..." if len(text) > 40 else repr(text)


def _readable(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
