"""Leniency (`--lenient`): parameters that clients send to every server, and that have no effect here, are ignored.

Such parameters ask for more effort or another way, but not for another answer: how hard to think, how to cache. Unknown
fields are ignored too, unless they resemble a known one. A parameter that would change the answer stays an error, as
without leniency. Ignored parameters are logged, counted, and named in a header of the answer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import structlog

from outrider.core.chat_templates import reads_variable
from outrider_gateway.parameters import Parameters, is_foreign, is_taken

log = structlog.get_logger(__name__)

HEADER = "x-outrider-left-aside"
"""Header of an answer that names the ignored parameters of its request."""
LOG_PERIOD_S = 60.0
"""Shortest time between two lines of the log about one parameter, in seconds."""
MOST = 2**31 - 1
"""The max_tokens of a text that may fill all the room."""
OTHERS = "other"
"""Stands for all unknown parameters: clients make their names up."""

_OF_NO_EFFECT = frozenset(
    {
        "reasoning", "reasoning_effort", "thinking", "verbosity", "priority", "cache_salt", "cache_prompt",
        "context_management", "betas", "speed",
    }
)  # fmt: skip
"""Fields that have no effect here, whatever their value."""
_UNLIMITED = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens"})
"""Fields for which -1 means no limit."""
_PARTS = (("text", "verbosity"), ("output_config", "effort"))
"""Nested fields that have no effect here."""
_OF_MESSAGES = frozenset({"reasoning_content", "reasoning", "reasoning_details", "annotations", "refusal"})
"""Fields of messages in answers of other servers, which are not passed to the chat template."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def without_effect(
    kind: type[Parameters], values: Mapping[str, Any], chat_template: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns a request without its ignored parameters, and the names of these.

    Args:
        kind: The type of the request.
        values: The fields of the request.
        chat_template: The chat template of the model.
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
    """Counts ignored parameters, and logs each of them now and then. Lives on the event loop; another thread may read
    the counts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[str, float] = {}
        self.counts: Counter[str] = Counter()
        """Number of requests by ignored parameter."""

    def add(self, names: Collection[str]) -> None:
        """Records the ignored parameters of one request."""
        now = self._clock()
        for name in names:
            label = _label(name)
            self.counts[label] += 1
            if now >= self._due.get(label, 0.0):
                self._due[label] = now + LOG_PERIOD_S
                log.warning("gateway.left_aside", parameter=name[:64], num_requests=self.counts[label])


def header(names: Collection[str]) -> dict[str, str]:
    """Returns the header of an answer that names the ignored parameters; empty if there are none."""
    shown = [name if _NAME.fullmatch(name) else OTHERS for name in names]
    return {HEADER: ", ".join(dict.fromkeys(shown))} if shown else {}


def _label(name: str) -> str:
    # Clients make the names of variables up, too.
    first, _, part = name.partition(".")
    if first == "chat_template_kwargs":
        return first
    return name if part or first in _OF_NO_EFFECT or first == "seed" else OTHERS
