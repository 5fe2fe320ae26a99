"""`outrider draft`: makes a draft model for a target, trains it on the target's answers, and judges it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider_cli.failures import INTERRUPTED, FlagError, complain, reported
from outrider_cli.help import BriefCommand, CommandGroup, examples
from outrider_draft.data import data

if TYPE_CHECKING:  # it imports torch
    from outrider_draft.train import Request

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The draft.", show_default=False)]
Target = Annotated[
    str, typer.Option(help="The target: a demo model, a folder or a name on the Hugging Face hub.", show_default=False)
]
DEFAULT_HOURS = 1.0


@app.callback()
def draft() -> None:
    """Makes a small draft for a target: new, data, train, judge, in this order; pack makes one file of it."""


@app.command(
    cls=BriefCommand,
    epilog=examples(
        "outrider draft new --target demo/target --out my-draft",
        "outrider draft new --target Qwen/Qwen3-8B --donor Qwen/Qwen3-0.6B --layers 12 --out my-draft",
    ),
)
def new(
    *,
    target: Target,
    out: Annotated[Path, typer.Option(help="Folder of the draft, which does not exist yet.", show_default=False)],
    layers: Annotated[int | None, typer.Option(help="Layers of the draft. Default: 4; with --donor all.")] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            help="Width of the draft. Default: an eighth of the target's cost, at most; with --donor the donor's."
        ),
    ] = None,
    donor: Annotated[
        str | None, typer.Option(help="Another model with the same tokenizer, whose weights are taken.")
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(help="Tokens that the draft can say, the most frequent of --data: its head is most of its cost."),
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Folder of answers, for --vocabulary; may be repeated.")
    ] = None,
) -> None:
    """Makes an untrained draft: a narrower model of the target's family, or its first layers."""
    with reported():
        from outrider_draft.new import make

        size = make(target, out, layers=layers, hidden=hidden, donor=donor, vocabulary=vocabulary, data=data or ())
        typer.echo(
            f"{out}: {size.num_parameters / 1e6:.1f} M parameters, {size.num_layers} layers, {size.hidden_size} wide; "
            f"a token costs about {size.share:.1%} of the target's (1 to {1 / size.share:.1f})"
        )


app.command(
    cls=BriefCommand,
    epilog=examples(
        "outrider draft data --out answers --hours 2",
        "outrider draft data --out answers --prompts chats --address verifier:50051",
    ),
)(data)


@app.command(
    cls=BriefCommand,
    epilog=examples(
        "outrider draft train my-draft --data answers --hours 4",
        "outrider draft train my-draft --data answers --data more-answers --tokens 2000000",
    ),
)
def train(
    folder: Folder,
    *,
    data: Annotated[list[Path], typer.Option(help="Folder of answers, as `data` makes it; may be repeated.")],
    hours: Annotated[
        float | None, typer.Option(help=f"How long to train in all. Default: {DEFAULT_HOURS:g}, or --tokens.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of the target to learn from, instead of --hours.")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the answers to measure on instead.")] = 0.02,
    device: Annotated[str, typer.Option(help="cpu, or a GPU like cuda:0.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0 = one for each core.")] = 0,
    batch_tokens: Annotated[int, typer.Option(help="Most tokens of a step; a GPU takes more at a time.")] = 4096,
    seed: Annotated[int, typer.Option(help="Keys the order of the answers.")] = 0,
) -> None:
    """Trains a draft on answers of its target. Interrupted, it goes on when it is started again.

    The folder is a draft to serve at any time: its weights are the best so far.
    """
    with reported():
        _check(hours is None or tokens is None, "--tokens", "unset with --hours", tokens)
        _check(hours is None or hours > 0, "--hours", "> 0", hours)
        _check(tokens is None or tokens >= 1, "--tokens", ">= 1", tokens)
        _check(0 < held_out < 0.5, "--held-out", "in (0, 0.5)", held_out)
        _check(threads >= 0, "--threads", ">= 0", threads)
        _check(batch_tokens >= 16, "--batch-tokens", ">= 16", batch_tokens)
        _check(0 <= seed < 2**32, "--seed", "in [0, 2**32)", seed)
        from outrider.models.loading import CannotLoadModel, check_device, set_num_threads
        from outrider_draft.display import Display
        from outrider_draft.train import Request, Training

        try:
            check_device(device)
        except (CannotLoadModel, RuntimeError) as error:
            raise FlagError("--device", f"a device of this machine ({error})", device) from None
        set_num_threads(threads)
        if hours is None and tokens is None:
            hours = DEFAULT_HOURS
        display = Display()
        request = Request(folder, data, hours, tokens, held_out, device, batch_tokens, seed)
        training = Training(request, display)
        again = _command(request, threads)
        try:
            is_complete = training.run()
        except KeyboardInterrupt:
            complain(f"interrupted at once; it goes on from the last checkpoint with: {again}", kind="")
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            raise OSError(f"{error}; it goes on from the last checkpoint with: {again}") from None
        if not is_complete:
            complain(f"interrupted; it goes on with: {again}", kind="")
            raise typer.Exit(INTERRUPTED)
        judged_by = shlex.join(["outrider", "draft", "judge", str(folder), "--target", training.target])
        typer.echo(f"{folder} has learnt from {training.position.tokens} tokens; next: {judged_by}")


@app.command(
    cls=BriefCommand,
    epilog=examples(
        "outrider draft judge my-draft --target demo/target-100m",
        "outrider draft judge my-draft --target Qwen/Qwen3-8B --than Qwen/Qwen3-0.6B",
    ),
)
def judge(
    folder: Folder,
    *,
    target: Target,
    than: Annotated[str | None, typer.Option(help="Another draft to compare it with.")] = None,
    prompts: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="As of `outrider bench generate`; of chats those that are held out."),
    ] = "chats",
    num_prompts: Annotated[int, typer.Option(help="Prompts to use, the categories taking turns.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 40,
    quick: Annotated[bool, typer.Option("--quick", help="Shows that it works, not how good the draft is.")] = False,
) -> None:
    """Measures what a draft is worth, as `outrider bench pair` does, and notes it in training.json."""
    with reported():
        from rich.console import Console

        from outrider_bench.config import PairConfig, parse_cores, read_prompts
        from outrider_cli.prompts import PromptError
        from outrider_draft import judge as judging

        usual = PairConfig()
        available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        try:
            # Nobody has answered these to train on: `data` takes the others.
            is_held_out, count = prompts == "chats", min(num_prompts, 2) if quick else num_prompts
            chosen = read_prompts(prompts, "", count, held_out=is_held_out)
        except PromptError as error:
            raise ValueError(str(error)) from None
        config = PairConfig(
            repeats=1 if quick else usual.repeats,
            cores=parse_cores("auto", available),
            is_quick=quick,
            target=target,
            draft=str(folder),
            temperatures=(0.7,) if quick else usual.temperatures,
            num_speculative_tokens=(2, 8) if quick else usual.num_speculative_tokens,
            max_tokens=24 if quick else max_tokens,
            prompts=chosen,
            prompt_set=prompts,
        )
        status, verdict = judging.judge(folder, config, than, Console())
        if status:
            raise typer.Exit(status)
        typer.echo(verdict)


@app.command(
    cls=BriefCommand,
    epilog=examples("outrider draft pack my-draft --out my-draft.gguf"),
)
def pack(
    folder: Folder,
    *,
    out: Annotated[Path, typer.Option(help="The file, a .gguf.", dir_okay=False, show_default=False)],
    layers_only: Annotated[
        bool,
        typer.Option("--layers-only", help="Leaves what the draft shares with a target of short name to its file."),
    ] = False,
) -> None:
    """Packs a draft into one GGUF file of half its size, which llama.cpp reads too."""
    with reported():
        from outrider_draft import pack as packing

        num_bytes = packing.pack(folder, out, layers_only=layers_only)
        typer.echo(f"{out}: {num_bytes / 1e6:.1f} MB, Q8_0; it is a draft as its folder is: --draft {out}")


def _command(request: Request, threads: int) -> str:
    """Returns the command that goes on with a training."""
    flags = {
        "--hours": request.hours,
        "--tokens": request.tokens,
        "--held-out": request.held_out,
        "--device": request.device,
        "--threads": threads,
        "--batch-tokens": request.batch_tokens,
        "--seed": request.seed,
    }
    words = ["outrider", "draft", "train", str(request.folder)]
    words += [word for path in request.data for word in ("--data", str(path))]
    return shlex.join(words + [f"{flag}={value}" for flag, value in flags.items() if value is not None])


def _check(is_right: bool, flag: str, rule: str, value: object) -> None:
    if not is_right:
        raise FlagError(flag, rule, value)
