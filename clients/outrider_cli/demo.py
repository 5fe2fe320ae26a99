"""`outrider demo`, which is `make demo`: the idea in half a minute, on one machine, with the models that are included.

The nodes are processes on loopback, one core each. The target is the included demo model made larger by layers that
change nothing in its text, only its time: like any real target, it costs many times what the draft model costs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.telemetry.redaction import without_secrets
from outrider_cli.local.process import ProcessFailed
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.talk import show
from outrider_client.blocking import BlockingClient
from outrider_client.errors import OutriderError
from outrider_client.generation import Result
from outrider_client.requests import GenerateOptions

METHODS = ("off", "speculative", "pearl", "saguaro", "best-first", "auto")
TEMPERATURE = 0.7
SEED = 7
PROMPTS = (
    'class Stack:\n    """A last-in, first-out collection."""\n\n    def __init__(self, items=()):\n',
    'def read_lines(path, encoding=\'utf-8\'):\n    """Return the lines of a file."""\n',
)


@dataclass(slots=True)
class Measured:
    """What one method did so far."""

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
    def acceptance_length(self) -> float:
        """Tokens per round, over all prompts."""
        rounds = sum(result.summary.num_rounds for result in self.results)
        accepted = sum(result.summary.num_accepted_tokens for result in self.results)
        return 1 + accepted / rounds if rounds else 0.0


def run(*, max_tokens: int, target_dtype: str) -> None:
    """Runs the demo. Raises what LocalStack raises, and ProcessFailed; whatever was started has ended then."""
    out = Console(highlight=False)
    options = GenerateOptions(temperature=TEMPERATURE, seed=SEED, max_tokens=max_tokens, ignore_eos=True)
    with ExitStack() as exits:
        with _progress(out) as progress:
            task = progress.add_task("starting", total=None)
            on_step = partial(_describe, progress, task)
            stack = exits.enter_context(LocalStack(StackConfig(target_dtype=target_dtype), on_step))
        try:
            with BlockingClient(stack.address) as client:
                _introduce(out, stack, client)
                _stream_one(out, client, options)
                _compare(out, client, options)
        except OutriderError as error:
            raise ProcessFailed(f"{error.message}; the end of the verifier's log:\n{stack.log_tail()}") from error


def _stream_one(out: Console, client: BlockingClient, options: GenerateOptions) -> None:
    out.print(f"\n[bold]One generation[/] (pearl, temperature {TEMPERATURE})\n")
    out.out(PROMPTS[0], style="dim", end="")
    show(client, PROMPTS[0], GenerateOptions(**options, method="auto"))


def _compare(out: Console, client: BlockingClient, options: GenerateOptions) -> None:
    conditions = f"temperature {TEMPERATURE}, {len(PROMPTS)} prompts, {options['max_tokens']} tokens each"
    out.print(f"\n[bold]The methods[/] ({conditions})\n")
    measured = [Measured(method) for method in METHODS]
    with _progress(out) as progress:
        task = progress.add_task("measuring", total=len(PROMPTS) * len(METHODS))
        # The methods take turns: what else the machine does meets all of them.
        for prompt in PROMPTS:
            for one in measured:
                progress.update(task, description=one.method)
                one.add(client, prompt, options)
                progress.advance(task)
    out.print(_table(measured))
    out.print(_conclusion(measured))


def parting(text: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ; None if they are identical."""
    if tuple(text) == tuple(reference):
        return None
    pairs = enumerate(zip(text, reference, strict=False))
    return next((index for index, (ours, theirs) in pairs if ours != theirs), min(len(text), len(reference)))


def _introduce(out: Console, stack: LocalStack, client: BlockingClient) -> None:
    info = client.info()
    forward = next((time.forward_ms for time in info.forward_times if time.num_rows == 1), None)
    cost = f", {forward:.0f} ms a forward" if forward else ""
    out.print(f"[bold]target-verifier[/]      {stack.address}  {info.model.model_id}{cost}")
    out.print(f"[bold]draft-speculator[/]     {info.speculator.address}  {stack.config.draft}")
    out.print(f"[bold]retrieval-datastore[/]  {info.datastore.address}  {without_secrets(stack.redis_url or '')}")


def _table(measured: Sequence[Measured]) -> Table:
    off = measured[0]
    table = Table("method", box=None, pad_edge=False, header_style="bold")
    for column in ("tokens/s", "speed-up", "acceptance length"):
        table.add_column(column, justify="right")
    table.add_column("same text as off")
    for one in measured:
        table.add_row(
            one.method,
            f"{one.tokens_per_s:.1f}",
            f"{one.tokens_per_s / off.tokens_per_s:.2f}x",
            f"{one.acceptance_length:.2f}",
            "" if one is off else "; ".join(dict.fromkeys(_verdicts(one, off))),
        )
    return table


def _verdicts(one: Measured, off: Measured) -> Iterator[str]:
    for result, reference in zip(one.results, off.results, strict=True):
        index = parting(result.token_ids, reference.token_ids)
        yield "yes" if index is None else f"no, from token {index}"


def _conclusion(measured: Sequence[Measured]) -> str:
    off, *others = measured
    if all(verdict == "yes" for one in others for verdict in _verdicts(one, off)):
        return "\n[dim]Every method gave the target's own text, token for token.[/]"
    return (
        "\n[dim]A text may part from off where two tokens are nearly equally likely: in bfloat16 a row\n"
        "that is computed among others differs in its last bits. With --dtype float32 they never part.[/]"
    )


def _describe(progress: Progress, task: TaskID, step: str) -> None:
    progress.update(task, description=step)


@contextmanager
def _progress(out: Console) -> Iterator[Progress]:
    """A bar that is gone when the work is done. Shown on terminals only."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as progress:
        yield progress
