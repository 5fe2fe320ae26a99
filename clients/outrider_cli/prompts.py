"""Prompts: a JSONL file with one `{"prompt": ..., "category": ...}` a line, or one of the standard sets.

HumanEval, GSM8K and MT-Bench are taken as they are published; a line says by its fields of which set it is.

The set that ships with the command has three categories of eight. `code` is held-out library code, what the demo pair
was trained for; `prose` is documentation in English, where a model of code guesses badly; `repetitive` is where looking
the continuation up is hard to beat. None of it is in the demo pair's training text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path

NO_CATEGORY = "none"
ALL_CATEGORIES = "all"
"""Name of the rows over all prompts; no category may have it."""

# `source` says where a prompt is from: it is not read here, but by the benchmark, which checks that it was held out.
_KEYS = frozenset({"prompt", "category", "source"})


@dataclass(frozen=True, slots=True)
class _StandardSet:
    """Names the fields by which the lines of a published set are known, and those of their prompt."""

    fields: frozenset[str]
    """A line that has them is of the set. It may have others, by its publisher."""
    prompt: str
    category: str


_STANDARD_SETS = (
    _StandardSet(frozenset({"task_id", "prompt"}), "prompt", "humaneval"),
    _StandardSet(frozenset({"question"}), "question", "gsm8k"),
    # Each question has a category of its own.
    _StandardSet(frozenset({"turns"}), "turns", "mt-bench"),
)
_KNOWN = (
    "prompt and maybe category and source; task_id and prompt (HumanEval), question (GSM8K), or turns (MT-Bench), with "
    "any others"
)


class PromptError(ValueError):
    """A prompt file breaks a rule. The message names the file, the line and the rule."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds a text to continue."""

    text: str
    category: str = NO_CATEGORY


def default_prompts() -> list[Prompt]:
    """Returns the 24 prompts that ship with the command."""
    name = "prompts.jsonl"
    return parse_prompts((resources.files(__package__) / name).read_text(encoding="utf-8"), name)


def load_prompts(path: Path) -> list[Prompt]:
    """Returns the prompts of a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{path}: must be UTF-8") from None
    return parse_prompts(text, str(path))


def parse_prompts(text: str, name: str) -> list[Prompt]:
    """Returns the prompts of a text in JSONL. Empty lines are skipped; everything else must be right."""
    # Not splitlines: JSON strings may hold U+2028 and other characters that it takes for the end of a line.
    lines = enumerate(text.split("\n"), start=1)
    prompts = [_parse_line(line, f"{name}, line {number}") for number, line in lines if line.strip()]
    if not prompts:
        raise PromptError(f"{name}: holds no prompts")
    return prompts


def _parse_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: must be JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where}: must be an object, like {{"prompt": ..., "category": ...}}')
    if "prompt" in entry and entry.keys() <= _KEYS:
        return _prompt_of(entry["prompt"], entry.get("category", NO_CATEGORY), "prompt", where)
    # `category` is a field of MT-Bench too, so alone it says nothing.
    sets = [one for one in _STANDARD_SETS if one.fields <= entry.keys()]
    if len(sets) != 1:
        fields = ", ".join(sorted(entry)) or "none"
        raise PromptError(f"{where}: must have the fields of one known format ({_KNOWN}), has {fields}")
    [found] = sets
    text, name = entry[found.prompt], found.prompt
    if name == "turns":
        if not isinstance(text, list) or not text:
            raise PromptError(f"{where}: turns must be a list that is not empty")
        # The later turns follow on answers, which there are none of.
        text, name = text[0], "turns[0]"
    return _prompt_of(text, entry.get("category", found.category), name, where)


def _prompt_of(text: object, category: object, name: str, where: str) -> Prompt:
    if not isinstance(text, str) or not text:
        raise PromptError(f"{where}: {name} must be a string that is not empty")
    if not isinstance(category, str) or not category or category == ALL_CATEGORIES:
        raise PromptError(f"{where}: category must be a string, not empty and not {ALL_CATEGORIES!r}")
    return Prompt(text, category)


def categories_of(prompts: Iterable[Prompt]) -> list[str]:
    """Returns the categories, in order of appearance."""
    return list(dict.fromkeys(prompt.category for prompt in prompts))


def choose(prompts: Sequence[Prompt], categories: Sequence[str] = (), count: int | None = None) -> list[Prompt]:
    """Returns the first `count` prompts of these categories (empty means all); the categories take turns."""
    known = categories_of(prompts)
    if missing := [category for category in categories if category not in known]:
        raise PromptError(f"there is no category {missing[0]!r} (there are: {', '.join(known)})")
    groups = [[p for p in prompts if p.category == category] for category in (categories or known)]
    turns = chain.from_iterable(zip_longest(*groups))
    # None stands where a shorter category has no prompt left. A count of None cuts nothing off.
    return [prompt for prompt in turns if prompt is not None][:count]
