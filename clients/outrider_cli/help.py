"""The text of --help: the flags that most users need, in 80 columns. --help-all has the others, too."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from outrider_cli.failures import in_plain_words

FIRST_FLAGS = frozenset(
    {"temperature", "top_p", "top_k", "seed", "max_tokens", "stop", "json_schema", "regex", "n", "method", "retrieval"}
)
"""Flags of a generation that --help shows; the others are for experts."""
EXPERT_GROUPS = ("Sampling", "Reports", "Speculation", "Security", "Over HTTP")
"""Prefixes of names of groups of which --help shows only FIRST_FLAGS."""
ALL = "--help-all"
REST = "\f"
"""Stands in an epilog before what --help-all alone shows."""
WIDTH = 80
FLAG_WIDTH = 30
"""Most columns of the names of a flag; its description begins next to them, or below."""

# As click writes it; a bound of 2**64 - 1 is that of the wire, and says nothing to a reader.
_RANGE = re.compile(r"(?:(?P<least>-?[\d.]+)<=)?\bx(?:>=(?P<from>-?[\d.]+))?(?:<=(?P<most>-?[\d.]+))?(?=\])")
_TYPES = {" N": r" <(list\[)?(int|float)\b[^>|]*>", " TEXT": r" <(list\[)?str\]?>", " PATH": r" <(file|dir|path)>"}
_WIRE_BOUND = str(2**64 - 1)


class CommandGroup(TyperGroup):
    """A group whose --help tells what each command does, not cut short."""

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Writes the commands, each with the first paragraph of its help."""
        with formatter.section("Commands"):
            rows = [(name, (command.help or "").partition("\n\n")[0]) for name, command in self.commands.items()]
            formatter.write_dl(rows)

    def invoke(self, context: Any) -> Any:
        """Runs the command that the line names. Reports a value that its flag does not take in plain words."""
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            error.message = in_plain_words(error.message)
            raise


class BriefCommand(TyperCommand):
    """A command whose --help leaves out what few need."""

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Returns the names of the flags that show the help."""
        return [*super().get_help_option_names(ctx), ALL]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line, and notes how much help is asked for."""
        ctx.meta[__name__] = ALL in args
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the text, no wider than 80 columns."""
        formatter.width = min(formatter.width, WIDTH)
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the flags group by group: their names, and next to them what they do."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            is_flag = param.param_type_name == "option"
            group = getattr(param, "rich_help_panel", None) or ("Options" if is_flag else "Arguments")
            record = param.get_help_record(ctx)
            if record is not None and (_is_whole(ctx) or not is_for_experts(param.name or "", group)):
                text = f"Shows this; {ALL} has every flag." if ALL in record[0] else in_words(record[1])
                groups.setdefault(group, []).append((_without_type(record[0]), text))
        for group, rows in groups.items():
            with formatter.section(group):
                formatter.write_dl(rows, col_max=FLAG_WIDTH)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Writes what stands below the flags."""
        first, _, rest = (self.epilog or "").partition(REST)
        shown = first + rest if _is_whole(ctx) else first
        for paragraph in filter(None, shown.split("\n\n")):
            formatter.write_paragraph()
            formatter.write_text(paragraph)


def is_for_experts(name: str, group: str) -> bool:
    """Returns True if --help leaves a flag of a group out."""
    return group.startswith(EXPERT_GROUPS) and name not in FIRST_FLAGS


def in_words(text: str) -> str:
    """Returns the description of a flag with its range in words: `[0<=x<=1]` is `[0 to 1]`."""
    return _RANGE.sub(_range_in_words, text)


def _range_in_words(found: re.Match[str]) -> str:
    least, most = found["least"] or found["from"], found["most"]
    if most is None or most == _WIRE_BOUND:
        return f"{least} or more"
    return f"{least} to {most}" if least is not None else f"at most {most}"


def _without_type(names: str) -> str:
    """Returns the names of a flag with a letter or a word in place of the type of its value."""
    for word, kind in _TYPES.items():
        names = re.sub(kind, word, names)
    return names


def examples(*commands: str) -> str:
    """Returns the end of a --help: lines that can be typed as they are."""
    # \b keeps the lines apart.
    return "\n".join(["\b", "Examples:", *(f"  {command}" for command in commands)])


def _is_whole(ctx: Any) -> bool:
    return bool(ctx.meta.get(__name__))
