"""`outrider generate` and `outrider chat`: a prompt or a conversation, streamed to the terminal."""

from __future__ import annotations

import sys
import time
from functools import lru_cache
from typing import Annotated

import typer
from rich.console import Console

from outrider_cli import console, options
from outrider_cli.failures import WRONG_USAGE, reported
from outrider_cli.options import secured
from outrider_client.blocking import BlockingClient
from outrider_client.channel import SecurityOptions
from outrider_client.generation import Transcript
from outrider_client.requests import ChatMessage, GenerateOptions, Prompt

FROM_STDIN = "-"


@secured
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue; - reads it from stdin.")] = FROM_STDIN,
    *,
    address: options.Address = options.DEFAULT_ADDRESS,
    plain: options.Plain = False,
    timeout_s: options.TimeoutS = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    method: options.MethodOption = None,
    num_speculative_tokens: options.NumSpeculativeTokens = None,
    lookahead: options.Lookahead = None,
    min_path_probability: options.MinPathProbability = None,
    retrieval: options.Retrieval = None,
    retrieval_scope: options.RetrievalScope = None,
    contribute: options.Contribute = None,
    rows: options.RowsOption = None,
    max_rows: options.MaxRows = None,
    acceptance_rule: options.AcceptanceRuleOption = None,
    shared_noise: options.SharedNoise = None,
    allow_fallback: options.AllowFallback = False,
    method_param: options.MethodParam = None,
    security: SecurityOptions,
) -> None:
    """Continues a prompt, coloured by where each token came from."""
    given = GenerateOptions(
        timeout_s=timeout_s,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos or None,
        method=method,
        num_speculative_tokens=num_speculative_tokens,
        lookahead=lookahead,
        min_path_probability=min_path_probability,
        retrieval=retrieval,
        retrieval_scope=retrieval_scope,
        contribute=contribute,
        rows=rows,
        max_rows=max_rows,
        acceptance_rule=acceptance_rule,
        shared_noise=shared_noise,
        allow_fallback=allow_fallback or None,
        **options.method_params(method, method_param),  # type: ignore[typeddict-item]  # keys of GenerateOptions
    )
    with reported(address), BlockingClient(address, **security) as client:
        show(client, _read_prompt(prompt), given, plain=plain)


@secured
def chat(
    *,
    address: options.Address = options.DEFAULT_ADDRESS,
    plain: options.Plain = False,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = 512,
    method: options.MethodOption = None,
    retrieval: options.Retrieval = None,
    retrieval_scope: options.RetrievalScope = None,
    contribute: options.Contribute = None,
    rows: options.RowsOption = None,
    max_rows: options.MaxRows = None,
    acceptance_rule: options.AcceptanceRuleOption = None,
    shared_noise: options.SharedNoise = None,
    allow_fallback: options.AllowFallback = False,
    method_param: options.MethodParam = None,
    security: SecurityOptions,
) -> None:
    """Talks with the model. /reset forgets, /exit or Ctrl-D ends, Ctrl-C stops an answer."""
    given = GenerateOptions(
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        method=method,
        retrieval=retrieval,
        retrieval_scope=retrieval_scope,
        contribute=contribute,
        rows=rows,
        max_rows=max_rows,
        acceptance_rule=acceptance_rule,
        shared_noise=shared_noise,
        allow_fallback=allow_fallback or None,
        **options.method_params(method, method_param),  # type: ignore[typeddict-item]  # keys of GenerateOptions
    )
    beginning = [ChatMessage(role="system", content=system)] if system else []
    messages = list(beginning)
    with reported(address), BlockingClient(address, **security) as client:
        client.info()  # says at once if nobody is there, not after the first line was typed
        while (line := _read_line()) is not None:
            if line == "/reset":
                messages = list(beginning)
            elif line:
                messages.append(ChatMessage(role="user", content=line))
                answer = show(client, messages, given, plain=plain, stoppable=True)
                messages.append(ChatMessage(role="assistant", content=answer.text))


def show(
    client: BlockingClient, prompt: Prompt, given: GenerateOptions, *, plain: bool = False, stoppable: bool = False
) -> Transcript:
    """Streams a generation to stdout; legend and summary go to stderr.

    Ctrl-C cancels it on all servers; if it is stoppable, what has come so far is an answer too.
    """
    out, notes = Console(soft_wrap=True), Console(stderr=True, highlight=False)
    detokenize = lru_cache(maxsize=4096)(lambda ids: client.detokenize(ids))
    is_coloured = not plain and out.is_terminal
    if is_coloured:
        notes.print(console.legend())
    started = time.perf_counter()
    with client.generate(prompt, **given) as generation:
        try:
            console.stream(generation, out, (lambda ids: detokenize(tuple(ids))) if is_coloured else None)
        except KeyboardInterrupt:
            print()
            if not stoppable:
                raise
            return generation
    seconds = time.perf_counter() - started
    print()
    if not plain:
        notes.print(console.summary(generation.result, seconds))
    return generation


def _read_prompt(prompt: str) -> str:
    if prompt != FROM_STDIN:
        return prompt
    if sys.stdin.isatty():
        Console(stderr=True).print("error: no prompt: give one, or pipe one to `outrider generate -`", markup=False)
        raise typer.Exit(WRONG_USAGE)
    return sys.stdin.read()


def _read_line() -> str | None:
    """A line of the user's; None at the end."""
    try:
        line = Console(stderr=True).input("[bold]you>[/] ").strip()
    except EOFError:
        return None
    return None if line == "/exit" else line
