"""Shows a generation on the terminal: text coloured by where its tokens came from, the legend, the summary.

Only generated text goes to stdout, so that it can be piped; everything else goes to stderr.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import groupby
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from outrider.core.params import Source
from outrider.core.statistics import COUNTS
from outrider.v1 import types_pb2, verifier_pb2
from outrider_client.blocking import BlockingClient
from outrider_client.enums import method_name
from outrider_client.errors import OutriderError
from outrider_client.generation import Chunk, Result, Transcript
from outrider_client.requests import GenerateOptions, Prompt

STYLES: dict[Source, tuple[str, str]] = {
    Source.TARGET: ("target", "default"),
    Source.DRAFT: ("draft", "green"),
    Source.PRIOR: ("retrieval", "cyan"),
    Source.DYNAMIC: ("retrieval", "cyan"),
    Source.REJECTED: ("retrieval", "cyan"),
    Source.SHARED: ("retrieval", "cyan"),
    Source.RING: ("retrieval", "cyan"),
    Source.RECYCLED: ("retrieval", "cyan"),
    Source.POOL: ("retrieval", "cyan"),
    Source.PREDICTION: ("retrieval", "cyan"),
    Source.GRAMMAR: ("grammar", "magenta"),
}
"""Name in the legend and colour of a source. The target's own tokens look like ordinary text."""

NUM_CACHED_PIECES = 4096
"""Texts of token runs that are kept: a run that comes again takes no second call to the server."""

Detokenize = Callable[[tuple[int, ...]], str]


def show(
    client: BlockingClient,
    prompt: Prompt,
    options: GenerateOptions,
    *,
    plain: bool = False,
    stats: bool = False,
    in_chat: bool = False,
) -> Transcript:
    """Streams a generation to stdout. Legend and summary go to stderr.

    Ctrl-C cancels it on all servers.

    Args:
        client: Generates, and detokenizes the pieces of one colour.
        prompt: Goes to the server; it is not shown.
        options: Options of the generation.
        plain: Shows the text alone.
        stats: Shows what speculation did, too.
        in_chat: Takes the text so far as the answer after Ctrl-C, instead of raising KeyboardInterrupt, and leaves the
            legend to the caller.
    """
    out, err = Console(soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    detokenize: Detokenize | None = None
    if not plain and out.is_terminal:
        detokenize = lru_cache(maxsize=NUM_CACHED_PIECES)(client.detokenize)
        if not in_chat:
            err.print(legend())
    started = time.perf_counter()
    with client.generate(prompt, **options) as generation:
        try:
            stream(generation, out, detokenize)
        except KeyboardInterrupt:
            print()
            # Either way `with` is left, which ends the work on all servers.
            if not in_chat:
                raise
            return generation
        except OutriderError as error:
            if not generation.token_ids:
                raise
            print()  # the message is no part of the text
            of_all = f" of {max_tokens}" if (max_tokens := options.get("max_tokens")) else ""
            error.message = f"the text ended after {len(generation.token_ids)}{of_all} tokens: {error.message}"
            raise
    seconds = time.perf_counter() - started
    print()
    if not plain:
        if stats:
            err.print(statistics(generation.result, seconds))
        err.print(summary(generation.result, seconds, is_seed_news=not in_chat and options.get("seed") is None))
    return generation


def is_toy(model_id: str) -> bool:
    """Returns True if a target model is one of those included."""
    return model_id.startswith("demo/")


def toy_note(model_id: str) -> str:
    """Returns what to expect of an included model, and the next step."""
    return (
        f"{model_id} is a toy of 5 M parameters, trained on Python's library\n"
        "next: outrider up --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B, for real text"
    )


def legend() -> Text:
    """Returns the names of the colours, each in its colour."""
    meanings = {
        "draft": "guessed by the draft model",
        "retrieval": "retrieved",
        "grammar": "forced by a grammar",
        "target": "the target's own",
    }
    line = Text()
    # A dict: the sources of one name share one entry.
    for name, style in dict(STYLES.values()).items():
        line.append(f"■ {name}", style).append(f" {meanings[name]}   ", "dim")
    return line


def pieces(chunk: Chunk, detokenize: Detokenize) -> Iterator[tuple[str, str]]:
    """Yields the chunk's text in pieces of one source each, with their styles. Joined, they are always the whole text.

    The server sends one text for a round. Where it ends inside a character, or the tokenizer treats the tokens of a
    piece differently alone, the rest of the chunk keeps the colour of that piece: colours may be off, the text is not.
    """
    runs = _runs(chunk)
    rest = chunk.text
    # The last run takes what is left, so a chunk of one colour needs no call to the server.
    for style, token_ids in runs[:-1]:
        text = detokenize(token_ids)
        text = text if rest.startswith(text) else f" {text}"  # some tokenizers drop a leading space
        # U+FFFD stands for bytes that form no character yet: the piece ends inside one.
        if not text.strip("\ufffd ") or not rest.startswith(text):
            yield style, rest
            return
        yield style, text
        rest = rest[len(text) :]
    if rest and runs:
        yield runs[-1][0], rest


def style_of(source: Source | None) -> str:
    """Returns the colour of a source; that of ordinary text for one that is not known here."""
    return STYLES[source][1] if source is not None else "default"


def stream(generation: Iterator[Chunk], console: Console, detokenize: Detokenize | None) -> None:
    """Shows the chunks as they come; in colours if `detokenize` can split them."""
    for chunk in generation:
        if detokenize is None:
            console.file.write(chunk.text)
        else:
            for style, text in pieces(chunk, detokenize):
                console.out(text, end="", style=style, highlight=False)
        # A pipe is buffered in blocks, and the text is to be seen while it is generated.
        console.file.flush()


def summary(result: Result, seconds: float, *, is_seed_news: bool) -> Text:
    """Returns a line for people: tokens, speed, tokens for each forward of the target. Troubles are a second line.

    Args:
        result: What has been generated.
        seconds: Time of the whole call, the prompt included.
        is_seed_news: True if the line should tell how to get this text again.
    """
    num_tokens, counts = len(result.token_ids), result.summary
    parts = [counted(num_tokens, "token"), f"{num_tokens / seconds:.0f} a second"]
    if counts.num_rounds:
        parts.append(f"{result.acceptance_length:.1f} a forward")
    # 0 is METHOD_UNSPECIFIED: no other method was asked for than the one that ran.
    if counts.requested_method:
        parts.append(f"by {method_name(counts.method)} in place of {method_name(counts.requested_method)}")
    again = f"; the same again: --seed {result.seed}" if is_seed_news else ""
    line = Text(f"{', '.join(parts)}{again}", "dim")
    if counts.degraded:
        troubles = ", ".join([*_phrases(counts, is_trouble=True), *result.missing_peers])
        # A peer that was not there yet, or slow at first, is no loss.
        kind = "degraded: " if counts.num_speculator_losses else ""
        line.append(f"\n{kind}{troubles}; the text is the same", "not dim yellow")
    return line


def statistics(result: Result, seconds: float) -> Text:
    """Returns what speculation did: the counts of the generation, and a line for each choice of method auto."""
    counts = result.summary
    parts = [f"{seconds:.2f} s", *_phrases(counts, is_trouble=False)]
    if counts.num_drafted_tokens:
        parts.append(f"acceptance length {result.acceptance_length:.2f}")
        parts.append(f"{result.acceptance_rate:.0%} of {counts.num_drafted_tokens} drafted tokens accepted")
        if result.bytes_per_accepted_token:
            parts.append(f"{result.bytes_per_accepted_token:.0f} bytes per accepted token")
    parts.append(f"ended by {result.finish_reason.value}")
    line = Text(f"{method_name(counts.method)}: ", "bold").append(" · ".join(parts), "not bold")
    for decision in counts.decisions:
        line.append(f"\n  {_decision(decision)}", "not bold")
    return line


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun, which gets an s where it is not 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _phrases(counts: verifier_pb2.SpeculationSummary, *, is_trouble: bool) -> list[str]:
    """Returns the counts that have a phrase; a trouble that did not occur is left out."""
    return [
        _phrase(info.phrase, getattr(counts, name))
        for name, info in COUNTS.items()
        if info.phrase and info.is_trouble is is_trouble and (getattr(counts, name) or not is_trouble)
    ]


def _phrase(phrase: str, number: int) -> str:
    text = phrase.format(number)
    return re.sub(r"\b1 (round|time)s\b", r"1 \1", text)


def _decision(decision: verifier_pb2.Decision) -> str:
    """Returns the rounds, tokens and speed of a strategy that METHOD_AUTO chose."""
    words = [method_name(decision.method)]
    if decision.rows == types_pb2.ROWS_TREE:
        words.append("tree")
    if decision.retrieval and decision.method != types_pb2.METHOD_RETRIEVAL:
        words.append("+ retrieval")
    length = decision.num_tokens / decision.num_rounds if decision.num_rounds else 0.0
    speed = f", {1e3 * decision.num_tokens / decision.time_ms:.0f} tokens/s" if decision.time_ms else ""
    return f"{' '.join(words)}: {counted(decision.num_rounds, 'round')}, {length:.2f} tokens a round{speed}"


def _runs(chunk: Chunk) -> list[tuple[str, tuple[int, ...]]]:
    """Returns runs of neighbouring tokens of one colour."""
    pairs = zip(map(style_of, chunk.sources), chunk.token_ids, strict=True)
    # Tuples: the cache of `detokenize` is keyed by them.
    return [(style, tuple(token_id for _, token_id in run)) for style, run in groupby(pairs, key=lambda pair: pair[0])]


def progress_on(console: Console) -> Progress:
    """Returns a bar that is shown on terminals only, and is gone when the work is done."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


class Steps:
    """Shows what a command that starts services waits for: a spinner on a terminal, a line for each step elsewhere.

    A context manager: its end stops the spinner.
    """

    def __init__(self, console: Console | None = None) -> None:
        """`console` is where to show them; None means stderr."""
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("starting")

    def show(self, step: str) -> None:
        """Shows what is waited for now."""
        if self._console.is_terminal:
            self._status.update(step)
        else:
            # A log or a pipe shows no spinner, and silence looks like a hang.
            self.say(step)

    def say(self, text: str) -> None:
        """Prints lines that stay, above the step that is shown."""
        self._console.print(text, markup=False)

    def result(self, text: str) -> None:
        """Prints lines to stdout, which may be the same terminal."""
        # The two streams know nothing of each other: output on stdout would land in the line of the spinner.
        self._status.stop()
        Console(highlight=False, soft_wrap=True).print(text, markup=False)
        self._status.start()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()
