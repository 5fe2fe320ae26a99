"""`outrider bench`: reads the flags, runs the benchmark, prints and writes the report."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from outrider_bench.config import (
    BASELINES,
    DTYPE_ALIASES,
    METHODS,
    NETWORK_PARTS,
    PARTS,
    SUITES,
    BenchConfig,
    DatastoreConfig,
    FaultsConfig,
    MethodsConfig,
    NetworkConfig,
    ObservabilityConfig,
    check_suite,
    parse_cores,
    parse_counts,
    parse_names,
    parse_numbers,
    read_prompts,
)
from outrider_bench.suites.generation.benchmark import Benchmark
from outrider_bench.suites.generation.suite import run_and_report
from outrider_cli.failures import WRONG_USAGE, FlagError
from outrider_cli.options import secured
from outrider_cli.prompts import PromptError
from outrider_client.channel import ChannelSecurity, SecurityOptions

_DEFAULTS = BenchConfig()
_FAULTS = FaultsConfig()
_WIDTH = 118


@secured
def bench(
    context: typer.Context,
    *,
    suite: Annotated[str, typer.Option(help=f"What to measure: {' or '.join(SUITES)}.")] = SUITES[0],
    target: Annotated[
        str, typer.Option(help="Target model: a demo model, a folder or a name on the Hugging Face hub.")
    ] = _DEFAULTS.target,
    draft: Annotated[str, typer.Option(help="Draft model, likewise.")] = _DEFAULTS.draft,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--target-dtype",
            help="What the target computes in: bfloat16, float32 or auto (demo: bfloat16, if the CPU has it).",
        ),
    ] = _DEFAULTS.dtype,
    draft_dtype: Annotated[str, typer.Option(help="Type the draft model computes in.")] = _DEFAULTS.draft_dtype,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; off always takes part.")] = ",".join(
        _DEFAULTS.methods
    ),
    baselines: Annotated[
        str, typer.Option(help="hf: transformers' generate, assisted generation and prompt lookup; bare: no services.")
    ] = "",
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; 0 = greedy.")] = "0,0.7,1",
    num_speculative_tokens: Annotated[
        str, typer.Option(help="Most drafted tokens a round; several = a row for each. Default: the server's.")
    ] = "",
    lookahead: Annotated[int | None, typer.Option(help="How far pearl drafts ahead. Default: the server's.")] = None,
    min_path_probability: Annotated[
        float | None, typer.Option(help="Where a chain ends. Default: the server's.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": ..., "category": ...}. Default: 24 prompts of our own.')
    ] = None,
    categories: Annotated[str, typer.Option(help="Categories of prompts to use. Default: all.")] = "",
    num_prompts: Annotated[int | None, typer.Option(help="Prompts to use, the categories taking turns.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = _DEFAULTS.max_tokens,
    repeats: Annotated[int, typer.Option(help="How often everything is measured.")] = _DEFAULTS.repeats,
    seed: Annotated[int, typer.Option(help="Keys the sampling.")] = _DEFAULTS.seed,
    concurrency: Annotated[str, typer.Option(help="Generations at once; several = a row for each.")] = "1",
    rtt_ms: Annotated[
        str, typer.Option(help="Round-trip times added between verifier and speculator; several = a row for each.")
    ] = "0",
    cores: Annotated[
        str, typer.Option(help="Cores of the target and of everything else, like 0,1; or auto; or none.")
    ] = "auto",
    address: Annotated[
        str | None, typer.Option(help="Measure a verifier that runs already, instead of a stack of our own.")
    ] = None,
    parts: Annotated[
        str | None,
        typer.Option(
            help=f"Parts of the methods' suite, of {', '.join(PARTS)}; or of the network's, of "
            f"{', '.join(NETWORK_PARTS)}. Default: all."
        ),
    ] = None,
    minutes: Annotated[float, typer.Option(help="How long the faults' suite hurts.")] = _FAULTS.minutes,
    faults: Annotated[int, typer.Option(help="How many faults it has.")] = _FAULTS.num_faults,
    sessions: Annotated[int, typer.Option(help="How many clients generate meanwhile.")] = _FAULTS.num_sessions,
    quick: Annotated[
        bool, typer.Option("--quick", help="One of the other suites in small sizes: whether it works, not how fast.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for results.json, a report and pictures.")] = None,
    security: SecurityOptions,
) -> None:
    """Measures how fast each method is on this machine, beside what the machine could do.

    With --suite datastore: how fast the retrieval-datastore is, and what it loses when something fails, beside its
    targets. Uses --repeats, --seed, --cores, --quick and --out.

    With --suite methods: all methods, and what each paper claims for its own, measured on the demo pair. Uses --parts
    and the same flags.

    With --suite network: the methods over longer and longer ways, the bytes on them, and a lossy network, if this user
    may make one. Uses --parts and the same flags.

    With --suite faults: what callers notice while Redis, datastore, speculator and verifiers are killed, stopped,
    restarted and cut off. Uses --minutes, --faults, --sessions, --seed, --quick and --out.

    With --suite observability: what reading metrics and recording traces cost, in turns with neither. Uses --repeats,
    --seed, --cores, --quick and --out.
    """
    try:
        check_suite(suite, _given(context))
        config: BenchConfig | DatastoreConfig | MethodsConfig | NetworkConfig | FaultsConfig | ObservabilityConfig
        if suite == "datastore":
            config = DatastoreConfig(repeats, seed, parse_cores(cores, _available_cores()), quick)
        elif suite == "faults":
            config = FaultsConfig(minutes, faults, sessions, seed, quick)
        elif suite == "observability":
            config = ObservabilityConfig(repeats, seed, parse_cores(cores, _available_cores()), quick)
        elif suite == "methods":
            chosen = parse_names("--parts", parts, PARTS) if parts is not None else PARTS
            config = MethodsConfig(repeats, seed, parse_cores(cores, _available_cores()), quick, chosen)
        elif suite == "network":
            chosen = parse_names("--parts", parts, NETWORK_PARTS) if parts is not None else NETWORK_PARTS
            config = NetworkConfig(repeats, seed, parse_cores(cores, _available_cores()), quick, chosen)
        else:
            config = BenchConfig(
                target=target,
                draft=draft,
                dtype=DTYPE_ALIASES.get(dtype, dtype),
                draft_dtype=DTYPE_ALIASES.get(draft_dtype, draft_dtype),
                methods=parse_names("--methods", methods, METHODS),
                baselines=parse_names("--baselines", baselines, BASELINES),
                temperatures=parse_numbers("--temperatures", temperatures, "a number >= 0", lambda value: value >= 0),
                concurrencies=parse_counts("--concurrency", concurrency),
                rtts_ms=parse_numbers("--rtt-ms", rtt_ms, "a number >= 0", lambda value: value >= 0),
                num_speculative_tokens=parse_counts("--num-speculative-tokens", num_speculative_tokens)
                if num_speculative_tokens
                else (),
                lookahead=lookahead,
                min_path_probability=min_path_probability,
                max_tokens=max_tokens,
                repeats=repeats,
                seed=seed,
                address=address,
                cores=parse_cores(cores, _available_cores()) if address is None else (),
                prompts=read_prompts(prompts, categories, num_prompts),
            )
        _check_folder(out)
        secured_by = _secured_by(security, address)
    except (FlagError, PromptError) as error:
        _fail(error, WRONG_USAGE)
    # Tables wrap badly; what is not a terminal has no width of its own, so it gets enough.
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    if isinstance(config, BenchConfig):
        status = run_and_report(Benchmark(config, secured_by), out, console)
    else:
        # Imported only here: the other suites start faster without it.
        status = import_module(f"outrider_bench.suites.{suite}.suite").run_and_report(config, out, console)
    if status:
        sys.exit(status)


def _secured_by(security: SecurityOptions, address: str | None) -> ChannelSecurity:
    """What the flags of security come to. Ends the command where they come to nothing for the address."""
    try:
        secured_by = ChannelSecurity(**security)
        if address is not None:
            secured_by.credentials_for(address)
    except (ValueError, OSError) as error:
        _fail(error, WRONG_USAGE)
    return secured_by


def _given(context: typer.Context) -> dict[str, object]:
    """The flags of the command line; those that were left out have their defaults all the same."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name: context.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


def _available_cores() -> list[int]:
    """Cores this process may use; where that cannot be asked, none can be chosen either."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _check_folder(out: Path | None) -> None:
    """An hour of measuring should not end at a folder that cannot be written to."""
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlagError("--out", f"a folder that can be written to ({error.strerror})", out) from None
    if not os.access(out, os.W_OK):
        raise FlagError("--out", "a folder that can be written to", out)


def _fail(error: Exception, status: int) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(status)
