"""`outrider demo`, which is `make demo`: the idea in a minute, on one machine, with the models that are included.

The nodes are processes on loopback. The target is the included demo model, made larger by layers that change only its
time, not its text: like any real target, it costs many times what the draft model costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outrider.telemetry.redaction import without_secrets
from outrider_cli.console import progress_on, show
from outrider_cli.failures import reported
from outrider_cli.json_lines import fields_of, json_lines
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LocalStack, StackConfig, termination_as_exit
from outrider_cli.options import DEFAULT_HTTP_PORT, TargetDtype
from outrider_client.blocking import BlockingClient
from outrider_client.errors import OutriderError
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

STREAMED_METHOD = "auto"
REFERENCE = "off"
METHODS = (REFERENCE, "speculative", "pearl", "saguaro", "best-first", "auto")
NEXT = f"next: outrider up, then open http://127.0.0.1:{DEFAULT_HTTP_PORT}"
TEMPERATURE = 0.7
SEED = 7
PROMPTS = (
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self, items=()):\n',
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file."""\n',
)


@dataclass(slots=True)
class Measured:
    """Holds the results of one method so far, and the time that they took."""

    method: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, client: BlockingClient, prompt: str, options: GenerateOptions) -> None:
        """Generates once more."""
        started = time.perf_counter()
        self.results.append(client.complete(prompt, **GenerateOptions(**options, method=self.method)))
        self.seconds += time.perf_counter() - started

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, the prompt's forward included."""
        return sum(len(result.token_ids) for result in self.results) / self.seconds

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per round, which is one forward of the target; 0 if there was no round."""
        rounds = sum(result.summary.num_rounds for result in self.results)
        accepted = sum(result.summary.num_accepted_tokens for result in self.results)
        return 1 + accepted / rounds if rounds else 0.0

    def num_same_tokens(self, reference: Measured) -> int:
        """Returns the number of tokens before the first difference from the reference, summed over all prompts."""
        pairs = zip(self.results, reference.results, strict=True)
        return sum(num_same(ours.token_ids, theirs.token_ids) for ours, theirs in pairs)


def num_same(token_ids: Sequence[int], reference: Sequence[int]) -> int:
    """Returns the number of tokens that two outputs have in common before the first difference."""
    pairs = enumerate(zip(token_ids, reference, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(token_ids), len(reference)))


def demo(
    *,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each generation.")] = 96,
    dtype: TargetDtype = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="The verifier, the generation and each method as JSON, an object a line.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="The services, and what speculation did for the generation.")
    ] = False,
) -> None:
    """Starts everything, streams one generation, compares the methods, and ends everything. About a minute."""
    if stats and as_json:
        raise typer.BadParameter("must be unset with --json, which has it all", param_hint="--stats")
    with reported(), termination_as_exit():
        _run(max_tokens, dtype, as_json=as_json, stats=stats)


def _run(max_tokens: int, target_dtype: str, *, as_json: bool, stats: bool) -> None:
    """Runs the demo. Raises ProcessFailed, and the errors of LocalStack; all that was started has ended then."""
    # The bars of a terminal are no JSON.
    out = Console(highlight=False, stderr=as_json)
    # `ignore_eos`: all texts are equally long, so that their times can be compared.
    options = GenerateOptions(temperature=TEMPERATURE, seed=SEED, max_tokens=max_tokens, ignore_eos=True)
    config = StackConfig(target_dtype=target_dtype, num_threads=None)
    with ExitStack() as exits:
        with progress_on(out) as progress:
            task = progress.add_task("starting", total=None)
            # In the outer stack: the services outlive the bar.
            stack = exits.enter_context(LocalStack(config, lambda step: progress.update(task, description=step)))
        try:
            with BlockingClient(stack.address) as client:
                if as_json:
                    for line in _json_lines(out, stack, client, options):
                        print(line, flush=True)
                    return
                if stats:
                    _introduce(out, stack, client)
                _stream_one(out, client, options, stats=stats)
                _compare(out, client, options, client.info().exact_off_reason)
                out.print(NEXT, soft_wrap=True)
        except OutriderError as error:
            # Here, inside the stack: its end deletes the folder with the logs.
            raise ProcessFailed(f"{error.message}; the end of the verifier's log:\n{stack.log_tail()}") from error


def _introduce(out: Console, stack: LocalStack, client: BlockingClient) -> None:
    info = client.info()
    forward = next((time.forward_ms for time in info.forward_times if time.num_rows == 1), None)
    cost = f", {forward:.0f} ms a forward" if forward else ""
    out.print(f"[bold]target-verifier[/]      {stack.address}  {info.model.model_id}{cost}")
    out.print(f"[bold]draft-speculator[/]     {info.speculator.address}  {stack.config.draft}")
    out.print(f"[bold]retrieval-datastore[/]  {info.datastore.address}  {without_secrets(stack.redis_url or '')}")


def _stream_one(out: Console, client: BlockingClient, options: GenerateOptions, *, stats: bool) -> None:
    out.print(f"\n[bold]One generation[/] (method {STREAMED_METHOD}, temperature {TEMPERATURE})\n")
    out.out(PROMPTS[0], style="dim", end="")
    show(client, PROMPTS[0], GenerateOptions(**options, method=STREAMED_METHOD), stats=stats)


def _json_lines(out: Console, stack: LocalStack, client: BlockingClient, options: GenerateOptions) -> Iterator[str]:
    """Yields what the verifier is, one generation, and each method as it was measured."""
    yield json.dumps({"info": {"address": stack.address, **fields_of(client.info())}})
    with client.generate(PROMPTS[0], **GenerateOptions(**options, method=STREAMED_METHOD)) as generation:
        yield from json_lines(generation)
    measured = _measure(out, client, options)
    for one in measured:
        yield json.dumps({"method": fields_of_method(one, measured[0])})


def fields_of_method(one: Measured, reference: Measured) -> dict[str, Any]:
    """Returns a row of the table of the methods, for programs."""
    return {
        "name": one.method,
        "tokens_per_s": one.tokens_per_s,
        "speed_up": one.tokens_per_s / reference.tokens_per_s,
        "tokens_per_forward": one.tokens_per_forward,
        "num_tokens": sum(len(result.token_ids) for result in one.results),
        "num_same_tokens": one.num_same_tokens(reference),
    }


def _compare(out: Console, client: BlockingClient, options: GenerateOptions, exact_off_reason: str) -> None:
    conditions = f"temperature {TEMPERATURE}, {len(PROMPTS)} prompts, {options['max_tokens']} tokens each"
    out.print(f"\n[bold]The methods[/] ({conditions}; {REFERENCE} is the target model alone)\n")
    measured = _measure(out, client, options)
    out.print(table_of(measured))
    out.print(conclusion_of(measured, exact_off_reason), soft_wrap=True)


def _measure(out: Console, client: BlockingClient, options: GenerateOptions) -> list[Measured]:
    measured = [Measured(method) for method in METHODS]
    with progress_on(out) as progress:
        task = progress.add_task("measuring", total=len(PROMPTS) * len(METHODS))
        # The methods take turns: other load on the machine affects all of them alike.
        for prompt in PROMPTS:
            for one in measured:
                progress.update(task, description=one.method)
                one.add(client, prompt, options)
                progress.advance(task)
    return measured


def table_of(measured: Sequence[Measured]) -> Table:
    """Returns a row for each method; the first one is the reference."""
    reference = measured[0]
    table = Table("method", box=None, pad_edge=False, header_style="bold")
    for column in ("tokens/s", "speed-up", "tokens per target forward"):
        table.add_column(column, justify="right")
    table.add_column(f"same text as {reference.method}")
    for one in measured:
        table.add_row(
            one.method,
            f"{one.tokens_per_s:.1f}",
            f"{one.tokens_per_s / reference.tokens_per_s:.2f}x",
            f"{one.tokens_per_forward:.2f}",
            "" if one is reference else _sameness(one, reference),
        )
    return table


def _sameness(one: Measured, reference: Measured) -> str:
    if _is_same(one, reference):
        return "yes"
    num_tokens = sum(len(result.token_ids) for result in reference.results)
    return f"{one.num_same_tokens(reference)} of {num_tokens} tokens"


def _is_same(one: Measured, reference: Measured) -> bool:
    pairs = zip(one.results, reference.results, strict=True)
    return all(ours.token_ids == theirs.token_ids for ours, theirs in pairs)


def conclusion_of(measured: Sequence[Measured], exact_off_reason: str) -> str:
    """Returns what the table shows, in a sentence. `exact_off_reason` is that of the verifier."""
    reference, *others = measured
    best = max(others, key=lambda one: one.tokens_per_s)
    speed_up = best.tokens_per_s / reference.tokens_per_s
    speed = f"{best.method} was {speed_up:.1f} times as fast as {reference.method}, the target model alone"
    if all(_is_same(one, reference) for one in others):
        return f"\nEvery method gave the target's own text, token for token; {speed}."
    reason = exact_off_reason or "the verifier says that it is exact; please report this"
    return f"\n{speed}. A text has parted, where two tokens were nearly equally likely: {escape(reason)}."
