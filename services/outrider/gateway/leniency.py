"""Leniency (`--lenient`): what clients send to every server, and what has no effect here, is left aside.

Left aside is what asks for more, or for another way, but not for another answer: how hard to think, how to cache. So
are fields that nobody here knows, unless they look like a field that is known. What would change the answer stays an
error, as it is without leniency. What is left aside is logged, counted, and named in a header of the answer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from outrider.core.chat_templates import reads_variable
from outrider.gateway.parameters import Parameters, is_foreign, is_taken

log = structlog.get_logger(__name__)

HEADER = "x-outrider-left-aside"
"""Header of an answer that names what was left aside of its request."""
LOG_PERIOD_S = 60.0
"""Shortest time between two lines of the log about one parameter, in seconds."""
MOST = 2**31 - 1
"""The max_tokens of a text that may be as long as there is room for."""
OTHERS = "other"
"""Stands for all parameters that nobody here knows: their names are what clients make up."""

_OF_NO_EFFECT = frozenset(
    {
        "reasoning", "reasoning_effort", "thinking", "verbosity", "priority", "cache_salt", "cache_prompt",
        "context_management", "betas", "speed",
    }
)  # fmt: skip
"""Fields that ask for nothing that could be had here, whatever their value."""
_UNLIMITED = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""Fields of which -1 means that there is no limit."""
_PARTS = (("text", "verbosity"), ("output_config", "effort"))
"""Fields of fields that ask for nothing that could be had here."""
_OF_MESSAGES = frozenset({"reasoning_content", "reasoning", "reasoning_details", "annotations", "refusal"})
"""Fields of messages that an answer of another server has, and that no chat template is given."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def without_effect(
    kind: type[Parameters], values: Mapping[str, Any], chat_template: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns a request without what is left aside of it, and the names of that.

    Args:
        kind: What the request is to be.
        values: Its fields.
        chat_template: The model's.
    """
    kept, names = {}, []
    for name, value in values.items():
        if name in _UNLIMITED and name in kind.model_fields and value == -1:
            kept[name] = MOST
        elif (name == "seed" and value == -1) or _is_left_aside(kind, values, name):
            names.append(name)
        else:
            kept[name] = value
    for name, part in _PARTS:
        if isinstance(fields := kept.get(name), dict) and fields.get(part) is not None:
            kept[name] = {each: value for each, value in fields.items() if each != part}
            names.append(f"{name}.{part}")
    if isinstance(variables := kept.get("chat_template_kwargs"), dict):
        unread = [each for each in variables if not reads_variable(chat_template, each)]
        kept["chat_template_kwargs"] = {each: value for each, value in variables.items() if each not in unread}
        names += [f"chat_template_kwargs.{each}" for each in unread]
    if isinstance(messages := kept.get("messages"), list):
        noted = {note for each in messages if isinstance(each, dict) for note in each.keys() & _OF_MESSAGES}
        kept["messages"] = [_without(each, noted) for each in messages]
        names += [f"messages.{note}" for note in sorted(noted)]
    return kept, names


def _is_left_aside(kind: type[Parameters], values: Mapping[str, Any], name: str) -> bool:
    if is_taken(kind, values, name):
        return False
    return name in _OF_NO_EFFECT or is_foreign(kind, name)


def _without(item: object, names: Collection[str]) -> object:
    return {name: value for name, value in item.items() if name not in names} if isinstance(item, dict) else item


class LeftAside:
    """Counts what was left aside, and logs it, each parameter once in a while. Lives on the event loop; another thread
    may read the counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """Requests by the parameter that was left aside of them."""

    def add(self, names: Collection[str]) -> None:
        """Takes in what was left aside of one request."""
        now = self._clock()
        for name in names:
            label = _label(name)
            self.counts[label] += 1
            if now >= self._due.get(label, 0.0):
                self._due[label] = now + LOG_PERIOD_S
                log.warning("gateway.left_aside", parameter=name[:64], num_requests=self.counts[label])


def header(names: Collection[str]) -> dict[str, str]:
    """Returns the header of an answer that names what was left aside; none if nothing was."""
    shown = [name if _NAME.fullmatch(name) else OTHERS for name in names]
    return {HEADER: ", ".join(dict.fromkeys(shown))} if shown else {}


def _label(name: str) -> str:
    # Names of variables are what clients make up, too.
    first, _, part = name.partition(".")
    if first == "chat_template_kwargs":
        return first
    return name if part or first in _OF_NO_EFFECT or first == "seed" else OTHERS
