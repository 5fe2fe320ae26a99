"""`outrider bench`: a subcommand for each suite, with exactly its own flags; checks them, and runs the suite."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from outrider.core.methods import METHODS as core_methods
from outrider_bench.config import (
    BASELINES,
    DEFAULT_PROMPTS,
    DTYPE_ALIASES,
    GPU_PARTS,
    METHODS,
    PAIR_MODELS,
    BenchConfig,
    GpuConfig,
    PairConfig,
    PapersConfig,
    ServeConfig,
    parse_cores,
    parse_counts,
    parse_list,
    parse_names,
    parse_numbers,
    read_prompts,
)
from outrider_bench.output import RUN, Output, with_output
from outrider_bench.suite_group import SuiteGroup, checked
from outrider_cli.help import BriefCommand
from outrider_cli.options import secured
from outrider_cli.prompts import PROMPT_SETS
from outrider_client.channel import ChannelSecurity, SecurityOptions

_GENERATE, _PAIR, _GPU = BenchConfig(), PairConfig(), GpuConfig()
_MODELS = "Models"
"""Help panel of the flags that name them."""

Target = Annotated[
    str,
    typer.Option(
        help="Target model: a demo model, a folder or a name on the Hugging Face hub.", rich_help_panel=_MODELS
    ),
]
Draft = Annotated[str, typer.Option(help="Draft model, likewise.", rich_help_panel=_MODELS)]
DraftDtype = Annotated[str, typer.Option(help="Type the draft model computes in.", rich_help_panel=_MODELS)]
Repeats = Annotated[int, typer.Option(help="How often everything is measured.", rich_help_panel=RUN)]
Seed = Annotated[
    int, typer.Option(help="Keys what is random: the sampling, token streams, faults.", rich_help_panel=RUN)
]
Cores = Annotated[
    str,
    typer.Option(help="Cores of the target and of everything else, like 0,1; or auto; or none.", rich_help_panel=RUN),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Small sizes: shows that everything works, not how fast it is.", rich_help_panel=RUN),
]
Prompts = Annotated[
    str,
    typer.Option(
        help=f'{", ".join(PROMPT_SETS)}, or a file of JSONL: lines like {{"prompt": ...}} or {{"messages": [...]}}, or '
        "those of HumanEval, GSM8K or MT-Bench."
    ),
]
HeldOut = Annotated[
    bool,
    typer.Option("--held-out", help="The prompts that nothing may be tuned on; without it, the others alone."),
]
Categories = Annotated[str, typer.Option(help="Categories of prompts to use. Default: all.")]
LlamaServer = Annotated[
    str, typer.Option(help="Path of llama.cpp's llama-server, which takes part then: same weights, prompts and cores.")
]


app = typer.Typer(
    cls=SuiteGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
command = partial(app.command, cls=BriefCommand)


@app.callback()
def bench() -> None:
    """Measures Outrider: methods, a load, a GPU, a pair of models, and what the papers claim."""


@command()
@with_output
@secured
def generate(
    *,
    target: Target = _GENERATE.target,
    draft: Draft = _GENERATE.draft,
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            "--target-dtype",
            help="What the target computes in: bfloat16, float32 or auto (demo: bfloat16, if the CPU has it).",
            rich_help_panel=_MODELS,
        ),
    ] = _GENERATE.dtype,
    draft_dtype: DraftDtype = _GENERATE.draft_dtype,
    methods: Annotated[str, typer.Option(help=f"Of {', '.join(METHODS)}; off always takes part.")] = ",".join(
        _GENERATE.methods
    ),
    baselines: Annotated[
        str, typer.Option(help="hf: transformers' generate, assisted generation and prompt lookup; bare: no services.")
    ] = "",
    llama_server: LlamaServer = "",
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; 0 = greedy.")] = "0,0.7,1",
    num_speculative_tokens: Annotated[
        str, typer.Option(help="Most drafted tokens a round; several = a row for each. Default: the server's.")
    ] = "",
    lookahead: Annotated[int | None, typer.Option(help="How far pearl drafts ahead. Default: the server's.")] = None,
    min_path_probability: Annotated[
        float | None, typer.Option(help="Where a chain ends. Default: the server's.")
    ] = None,
    prompts: Prompts = DEFAULT_PROMPTS,
    held_out: HeldOut = False,
    categories: Categories = "",
    num_prompts: Annotated[int | None, typer.Option(help="Prompts to use, the categories taking turns.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = _GENERATE.max_tokens,
    concurrency: Annotated[str, typer.Option(help="Generations at once; several = a row for each.")] = "1",
    rtt_ms: Annotated[
        str, typer.Option(help="Round-trip times added between verifier and speculator; several = a row for each.")
    ] = "0",
    address: Annotated[
        str | None, typer.Option(help="Measure a verifier that runs already, instead of a stack of our own.")
    ] = None,
    repeats: Repeats = _GENERATE.repeats,
    seed: Seed = _GENERATE.seed,
    cores: Cores = "auto",
    output: Output,
    security: SecurityOptions,
) -> None:
    """Measures how fast each method is on this machine, beside what the machine could do."""
    with checked():
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
            # A server that already runs is not ours to pin, and may be on another machine.
            cores=_cores(cores) if address is None else (),
            prompts=read_prompts(prompts, categories, num_prompts, held_out=held_out),
            prompt_set=prompts,
            llama_server=llama_server,
        )
        channel_security = ChannelSecurity(**security)
        if address is not None:
            channel_security.credentials_for(address)  # only for its errors, which are wrong usage here
    _run("generate", config, output, channel_security)


@command()
@with_output
def papers(
    *,
    papers: Annotated[str, typer.Option(help="Papers, with commas between. Default: all.")] = "",
    seed: Seed = 0,
    cores: Cores = "auto",
    quick: Quick = False,
    output: Output,
) -> None:
    """Measures what the papers claim of their methods, on the demo pair in simulated time."""
    from outrider_bench.papers.claims import PAPERS

    with checked():
        config = PapersConfig(parse_names("--papers", papers, PAPERS) if papers else PAPERS, seed, _cores(cores), quick)
    _run("papers", config, output)


@command()
@with_output
@secured
def pair(
    *,
    target: Target = _PAIR.target,
    draft: Draft = _PAIR.draft,
    dtype: Annotated[
        str, typer.Option(help="Type the target computes in: bfloat16, float32 or auto.", rich_help_panel=_MODELS)
    ] = _PAIR.dtype,
    draft_dtype: DraftDtype = _PAIR.draft_dtype,
    temperatures: Annotated[
        str, typer.Option(help="Sampling temperatures; 0 = greedy. Default: 0,0.7,1; with --family or --quick 0.7.")
    ] = "",
    num_speculative_tokens: Annotated[
        str,
        typer.Option(
            help="Lengths of chains to predict. Default: 1 to 8 and 12; with --family 2,4,8, with --quick 2,8, with "
            "--address 6."
        ),
    ] = "",
    prompts: Prompts = DEFAULT_PROMPTS,
    held_out: HeldOut = False,
    categories: Categories = "",
    num_prompts: Annotated[
        int | None,
        typer.Option(help="Prompts to use, the categories taking turns. Default: 4; with --family 12, with --quick 2."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate for each prompt. Default: 40; with --quick 24.")
    ] = None,
    family: Annotated[
        bool, typer.Option("--family", help="Checks the predictions on six pairs made of the demo models instead.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Measure a verifier that runs already; predictions need the two models, and are left out."),
    ] = None,
    repeats: Repeats = _PAIR.repeats,
    seed: Seed = _PAIR.seed,
    cores: Cores = "auto",
    quick: Quick = False,
    output: Output,
    security: SecurityOptions,
) -> None:
    """Measures whether a draft model is worth it for a target: with which method, and which settings to type."""
    with checked():
        usual_temperatures = "0.7" if family or quick else "0,0.7,1"
        usual_counts = "6" if address else "2,8" if quick else "2,4,8" if family else "1,2,3,4,5,6,7,8,12"
        # The family exists for its claims, which are decided by intervals over prompts.
        usual_prompts, usual_tokens = (2, 24) if quick else (12 if family else 4, _PAIR.max_tokens)
        config = PairConfig(
            repeats,
            seed,
            # A server that already runs is not ours to pin, and may be on another machine.
            _cores(cores) if address is None else (),
            quick,
            target,
            draft,
            DTYPE_ALIASES.get(dtype, dtype),
            DTYPE_ALIASES.get(draft_dtype, draft_dtype),
            parse_numbers(
                "--temperatures", temperatures or usual_temperatures, "a number >= 0", lambda value: value >= 0
            ),
            parse_counts("--num-speculative-tokens", num_speculative_tokens or usual_counts),
            usual_tokens if max_tokens is None else max_tokens,
            read_prompts(prompts, categories, usual_prompts if num_prompts is None else num_prompts, held_out=held_out),
            prompts,
            family,
            address,
        )
        channel_security = ChannelSecurity(**security)
        if address is not None:
            channel_security.credentials_for(address)  # only for its errors, which are wrong usage here
    _run("pair", config, output, channel_security)


@command()
@with_output
def serve(
    *,
    url: Annotated[
        str | None,
        typer.Option(
            help="A gateway that runs already, http://HOST:PORT. Default: services of our own on this machine."
        ),
    ] = None,
    guidellm: Annotated[str, typer.Option(help="Path of GuideLLM, which makes the load.")] = "guidellm",
    methods: Annotated[str, typer.Option(help="Methods, with commas between; a run for each.")] = "off,auto",
    request_rate: Annotated[
        str, typer.Option(help="Requests a second, as a Poisson process; several = a run for each; inf = all at once.")
    ] = "inf",
    num_prompts: Annotated[
        int | None, typer.Option(help="Requests of each run; prompts come again. Default: each prompt once.")
    ] = None,
    prompts: Prompts = DEFAULT_PROMPTS,
    categories: Categories = "",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 = greedy.")] = 0.7,
    seed: Seed = 0,
    target: Target = PAIR_MODELS[0],
    draft: Draft = PAIR_MODELS[1],
    cores: Cores = "auto",
    output: Output,
) -> None:
    """Measures a gateway under load: GuideLLM sends requests at a rate, whatever the server makes of them."""
    with checked():
        chosen = read_prompts(prompts, categories, None)
        config = ServeConfig(
            url=url,
            guidellm=guidellm,
            methods=parse_names("--methods", methods, tuple(core_methods)),
            request_rates=parse_list(
                "--request-rate", request_rate, float, "a number > 0, or inf", lambda rate: rate > 0
            ),
            num_prompts=len(chosen) if num_prompts is None else num_prompts,
            prompts=chosen,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            target=target,
            draft=draft,
            # A server that already runs is not ours to pin, and may be on another machine.
            cores=_cores(cores) if url is None else (),
        )
    _run("serve", config, output)


@command()
@with_output
def gpu(
    *,
    device: Annotated[str, typer.Option(help="Device of both models, like cuda:0.")] = _GPU.device,
    size: Annotated[
        str, typer.Option(help="Sizes of the pair: 8b (those of Qwen3-8B and Qwen3-0.6B), or tiny, for a CPU.")
    ] = _GPU.size,
    weights: Annotated[
        str, typer.Option(help="widened (what the demo pair says, at that cost) or random (the cost alone).")
    ] = _GPU.weights,
    drafter: Annotated[
        str, typer.Option(help="Process of the draft model: speculator (its own) or in-process (the verifier's).")
    ] = _GPU.drafter,
    parts: Annotated[str, typer.Option(help="Parts of the run, with commas between.")] = ",".join(GPU_PARTS),
    methods: Annotated[str, typer.Option(help="Methods, with commas between.")] = ",".join(_GPU.methods),
    sessions: Annotated[
        str, typer.Option(help="Numbers of generations at once. Default: 1,8,32; with --size tiny 1,4.")
    ] = "",
    temperatures: Annotated[str, typer.Option(help="Sampling temperatures; 0 = greedy.")] = "0,0.7",
    contexts: Annotated[str, typer.Option(help="Tokens of a prompt. Default: 1024,8192; with --size tiny 96.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens to generate for each prompt. Default: 128; with --size tiny 16.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="How often everything is measured. Default: 2; with --size tiny 1.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Budget; what does not fit in it is left out, and named.")
    ] = _GPU.minutes,
    models: Annotated[
        Path | None, typer.Option(help="Folder that keeps the models, 19 GB. Default: in the user's cache.")
    ] = None,
    seed: Seed = _GPU.seed,
    output: Output,
) -> None:
    """Measures a GPU: our services with every method, other programs with the same weights, and single parts.

    Every result is kept at once: with the folder of an earlier run as --out it goes on with what is missing. Without a
    GPU, --device cpu --size tiny shows that all of it works.
    """
    with checked():
        is_tiny = size == "tiny"
        config = GpuConfig(
            device,
            size,
            weights,
            drafter,
            parse_names("--parts", parts, GPU_PARTS),
            parse_names("--methods", methods, METHODS),
            parse_counts("--sessions", sessions or ("1,4" if is_tiny else "1,8,32")),
            parse_numbers("--temperatures", temperatures, "a number >= 0", lambda value: value >= 0),
            parse_counts("--contexts", contexts or ("96" if is_tiny else "1024,8192")),
            max_tokens if max_tokens is not None else (16 if is_tiny else _GPU.max_tokens),
            repeats if repeats is not None else (1 if is_tiny else _GPU.repeats),
            minutes,
            seed,
            models or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider" / "bench-models",
            output.folder and output.folder / "cells",
        )
    _run("gpu", config, output)


def _run(suite: str, config: object, output: Output, *more: object) -> None:
    """Runs a suite; ends the command with its exit status."""
    with checked():
        output.check()
    # Imported only here: --help and wrong flags need none of it, and each suite needs only its own.
    module = import_module(f"outrider_bench.{suite}.suite")
    if status := output.of(getattr(module, f"{suite.title()}Suite")(config, *more)):
        sys.exit(status)


def _cores(text: str) -> tuple[int, ...]:
    """Returns the cores that --cores chooses. If the system cannot list its cores, none can be chosen."""
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return parse_cores(text, available)
