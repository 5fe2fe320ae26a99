"""Presets: each method as its paper has it, without what Outrider adds (`GenerateOptions.as_published`).

What Outrider adds to all methods is switched off: the noise that draft and target share, scores by how often the target
has agreed, drafts no longer than they pay. A preset fixes what makes the method the paper's; what the paper tunes, such
as the length of a chain or the width of a beam, has the paper's value as its default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.v1 import types_pb2
from outrider.v1.types_pb2 import SpeculationParams
from outrider_client.enums import enum_name, method_name


@dataclass(frozen=True, slots=True)
class Preset:
    """A method as its paper has it."""

    paper: str
    fixed: SpeculationParams
    """Parameters without which it would be another method: another value is refused."""
    tunable: SpeculationParams
    """Parameters that the paper tunes to models and hardware: defaults."""


_SAMPLED: dict[str, Any] = {
    "acceptance_rule": types_pb2.ACCEPTANCE_RULE_RATIO,
    "min_path_probability": 0.0,
    "calibration": False,
}
"""Drafts are samples, and kept by the ratio rule, which is the greedy one at temperature 0."""
_PICKED: dict[str, Any] = {
    "acceptance_rule": types_pb2.ACCEPTANCE_RULE_MATCH,
    "min_path_probability": 0.0,
    "shared_noise": False,
    "calibration": False,
}
"""Drafts are the draft model's most probable tokens, and kept where the target says the same."""
_TREE: dict[str, Any] = {**_PICKED, "rows": types_pb2.ROWS_TREE}

PRESETS: Mapping[str, Preset] = {
    "speculative": Preset(
        "Leviathan et al. 2023",
        SpeculationParams(**_SAMPLED, retrieval=False, rows=types_pb2.ROWS_CHAIN),
        SpeculationParams(num_speculative_tokens=5),
    ),
    "card": Preset(
        "CARD, Zhou et al.",
        SpeculationParams(
            **_PICKED,
            retrieval=False,
            rows=types_pb2.ROWS_CHAIN,
            card=types_pb2.CardParams(correction=True, refill=False),
        ),
        # Sections 3.1 and 3.4: a ratio of 7 between the models' forwards, K = 50; eq. 2 takes K children of each.
        SpeculationParams(num_speculative_tokens=7, card=types_pb2.CardParams(beam_width=50, num_children=50)),
    ),
    "saguaro": Preset(
        "Speculative Speculative Decoding, Kumar, Dao and May",
        SpeculationParams(
            **_SAMPLED,
            retrieval=False,
            rows=types_pb2.ROWS_CHAIN,
            saguaro=types_pb2.SaguaroParams(
                fan_out=types_pb2.FAN_OUT_GEOMETRIC, fallback=types_pb2.FALLBACK_AUTO, exponent=0.0
            ),
        ),
        SpeculationParams(num_speculative_tokens=5, saguaro=types_pb2.SaguaroParams(budget=16)),
    ),
    "double": Preset(
        "Double Retrieval Speculative Parallelism",
        SpeculationParams(
            **_SAMPLED,
            rows=types_pb2.ROWS_CHAIN,
            retrieval_params=types_pb2.RetrievalParams(scope=types_pb2.RETRIEVAL_SCOPE_SESSION),
            double=types_pb2.DoubleParams(
                draft_retrieval=True,
                target_retrieval=True,
                tiers=(types_pb2.SOURCE_PRIOR, types_pb2.SOURCE_DYNAMIC, types_pb2.SOURCE_REJECTED),
            ),
        ),
        # Appendix D: gamma is the speed ratio of the models, about 5, d = 10, n = 3.
        SpeculationParams(num_speculative_tokens=5, double=types_pb2.DoubleParams(max_match_len=3, max_phrase_len=10)),
    ),
    "spacelike": Preset(
        "Takeoff's spacelike decoding, Doubleword",
        SpeculationParams(calibration=False, spacelike=types_pb2.SpacelikeParams(whole_runs=True)),
        SpeculationParams(num_speculative_tokens=10, spacelike=types_pb2.SpacelikeParams(max_match_len=10)),
    ),
    "opt-tree": Preset(
        "OPT-Tree, Wang et al. 2024",
        SpeculationParams(**_TREE, retrieval=False),
        SpeculationParams(num_speculative_tokens=10, max_rows=50, opt_tree=types_pb2.OptTreeParams(num_nodes=50)),
    ),
    "sequoia": Preset(
        "Sequoia, Chen et al. 2024",
        SpeculationParams(**_TREE, retrieval=False),
        SpeculationParams(num_speculative_tokens=10, max_rows=64, sequoia=types_pb2.SequoiaParams(num_nodes=64)),
    ),
}
"""Presets by method."""


def published(given: SpeculationParams) -> SpeculationParams:
    """Returns parameters with those of the method's preset.

    Raises:
        ValueError: The method has no preset, or a parameter contradicts it; the message names both.
    """
    name = method_name(given.method) if given.method else "none"
    if name not in PRESETS:
        raise ValueError(f"as_published must come with one of the methods {', '.join(PRESETS)}, got {name}")
    completed = SpeculationParams()
    completed.CopyFrom(given)
    preset = PRESETS[name]
    _complete(completed, preset.fixed, f"method {name} as published has", "")
    _complete(completed, preset.tunable, None, "")
    return completed


def _complete(message: Any, preset: Message, what: str | None, path: str) -> None:
    """Sets what is unset in a message to what the preset has.

    Args:
        message: The message.
        preset: Values of its fields.
        what: Begins the error about a field that has another value. None means that this is no error.
        path: Names the message's place, for the error.
    """
    for field, value in preset.ListFields():
        name = f"{path}{field.name}"
        if field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _complete(getattr(message, field.name), value, what, f"{name}.")
        elif not _is_set(message, field):
            message.MergeFrom(type(message)(**{field.name: value}))
        elif what is not None and getattr(message, field.name) != value:
            given = _shown(field, getattr(message, field.name))
            raise ValueError(f"{what} {name} {_shown(field, value)}, which as_published and {name} {given} contradict")


def _is_set(message: Message, field: FieldDescriptor) -> bool:
    if field.has_presence:
        return message.HasField(field.name)
    # Lists, and enums, whose 0 stands for unset.
    return bool(getattr(message, field.name))


def _shown(field: FieldDescriptor, value: Any) -> str:
    """Returns a value as the options name it."""
    if field.is_repeated:
        return ", ".join(_name(field, each) for each in value)
    return _name(field, value)


def _name(field: FieldDescriptor, value: Any) -> str:
    return str(value).lower() if field.enum_type is None else enum_name(field.enum_type, value)
