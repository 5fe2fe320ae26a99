"""Parameters of one method, on the wire and in the domain: one pair of functions for each message of
`SpeculationParams.method_params`.

As everywhere at this edge: a value outside its range, and a field that is set where it has no meaning, raise
InvalidParameter with the name that the wire gives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, Protocol, TypeVar

from outrider.core.params import Method, check
from outrider.core.speculation import (
    TIERS,
    BestFirstParams,
    CardParams,
    DoubleParams,
    Fallback,
    FanOut,
    SaguaroParams,
    SpacelikeParams,
    SpeculationParams,
)
from outrider.rpc.limits import SpeculationLimits
from outrider.v1 import types_pb2

PARAMS_FIELDS = {
    Method.CARD: "card",
    Method.SAGUARO: "saguaro",
    Method.DOUBLE: "double",
    Method.SPACELIKE: "spacelike",
    Method.BEST_FIRST: "best_first",
}
"""Where a method's own parameters stand, on the wire and in `SpeculationParams`."""

_E = TypeVar("_E", bound=Enum)


class _Names(Protocol):
    """A generated enum."""

    def Name(self, number: Any) -> str: ...


def enum_from_proto(number: int, kind: type[_E], names: _Names, field: str, default: _E) -> _E:
    """A member of an enum whose values are those of the wire; 0 = the default."""
    if number == 0:
        return default
    known = {member.value: member for member in kind}
    check(number in known, field, f"one of {_names_of(names, known)}", number)
    return known[number]


def _names_of(names: _Names, numbers: Iterable[int]) -> str:
    return ", ".join(names.Name(number) for number in numbers)


def limited(message: Any, name: str, prefix: str, default: int, limit: int) -> int:
    """A number from 1 to the server's limit; unset = the default, or the limit if that is less."""
    if not message.HasField(name):
        return min(default, limit)
    value: int = getattr(message, name)
    check(1 <= value <= limit, f"{prefix}.{name}", f"in [1, {limit}], this server's limit", value)
    return value


def _check_unset(message: Any, name: str, prefix: str, rule: str) -> None:
    check(not message.HasField(name), f"{prefix}.{name}", rule, getattr(message, name))


def _given(message: Any, *names: str) -> dict[str, Any]:
    """The fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def method_params_from_proto(
    message: types_pb2.SpeculationParams, method: Method, gamma: int, is_ratio: bool, limits: SpeculationLimits
) -> dict[str, Any]:
    """The method's own parameters as keyword arguments of `SpeculationParams`. Those of another method are invalid."""
    given, own = message.WhichOneof("method_params"), PARAMS_FIELDS.get(method)
    check(given is None or given == own, f"speculation.{given}", f"unset for method {method.value}", "a message")
    match method:
        case Method.CARD:
            return {"card": _card_from_proto(message.card, limits)}
        case Method.SAGUARO:
            return {"saguaro": _saguaro_from_proto(message.saguaro, gamma, is_ratio, limits)}
        case Method.DOUBLE:
            return {"double": _double_from_proto(message.double)}
        case Method.SPACELIKE:
            return {"spacelike": SpacelikeParams(**_given(message.spacelike, "max_match_len"))}
        case Method.BEST_FIRST:
            return {"best_first": BestFirstParams(**_given(message.best_first, "num_expanded", "num_children"))}
    return {}


def _card_from_proto(message: types_pb2.CardParams, limits: SpeculationLimits) -> CardParams:
    width = limited(message, "beam_width", "speculation.card", CardParams().beam_width, limits.max_beam_width)
    return CardParams(beam_width=width, **_given(message, "num_children", "correction"))


def _saguaro_from_proto(
    message: types_pb2.SaguaroParams, gamma: int, is_ratio: bool, limits: SpeculationLimits
) -> SaguaroParams:
    prefix, defaults = "speculation.saguaro", SaguaroParams()
    fan_out = enum_from_proto(message.fan_out, FanOut, types_pb2.FanOut, f"{prefix}.fan_out", defaults.fan_out)
    if fan_out is FanOut.GIVEN:
        _check_unset(message, "budget", prefix, "unset for FAN_OUT_GIVEN: fan_outs say it")
        _check_fan_outs(message.fan_outs, gamma, limits.max_budget)
    if fan_out is not FanOut.GEOMETRIC:
        _check_unset(message, "exponent", prefix, "unset for another fan-out than FAN_OUT_GEOMETRIC")
    if not is_ratio:
        _check_unset(message, "bias", prefix, "unset under ACCEPTANCE_RULE_MATCH: the bias is of sampled tokens")
    if not message.HasField("bias"):
        _check_unset(message, "num_biased", prefix, "unset where bias is unset")
    return SaguaroParams(
        fan_out=fan_out,
        budget=limited(message, "budget", prefix, defaults.budget, limits.max_budget),
        fan_outs=tuple(message.fan_outs),
        fallback=enum_from_proto(
            message.fallback, Fallback, types_pb2.Fallback, f"{prefix}.fallback", defaults.fallback
        ),
        **_given(message, "exponent", "bias", "num_biased"),
    )


def _check_fan_outs(fan_outs: Iterable[int], gamma: int, max_budget: int) -> None:
    """Each stands for a position of the chain or behind it, the last one for all further positions."""
    counts, num_positions = list(fan_outs), gamma + 1
    field = "speculation.saguaro.fan_outs"
    check(len(counts) <= num_positions, field, f"at most num_speculative_tokens + 1 ({num_positions})", len(counts))
    budget = sum(counts) + (num_positions - len(counts)) * (counts[-1] if counts else 0)
    rule = f"at most {max_budget} in all, this server's limit, over {num_positions} positions"
    check(budget <= max_budget, field, rule, budget)


def _double_from_proto(message: types_pb2.DoubleParams) -> DoubleParams:
    prefix, tiers = "speculation.double", {tier.value: tier for tier in TIERS}
    for index, number in enumerate(message.tiers):
        check(number in tiers, f"{prefix}.tiers[{index}]", f"one of {_names_of(types_pb2.Source, tiers)}", number)
    if message.HasField("draft_retrieval") and not message.draft_retrieval:
        _check_unset(message, "max_phrase_len", prefix, "unset where draft_retrieval is false")
    asked = tuple(dict.fromkeys(tiers[number] for number in message.tiers))
    return DoubleParams(
        tiers=asked or TIERS,
        **_given(message, "max_match_len", "max_phrase_len", "draft_retrieval", "target_retrieval", "serial"),
    )


def method_params_to_proto(params: SpeculationParams, message: types_pb2.SpeculationParams) -> None:
    """Sets the method's own parameters, every field that has a meaning."""
    match params.method:
        case Method.CARD:
            card = params.card
            message.card.beam_width, message.card.num_children = card.beam_width, card.num_children
            message.card.correction = card.correction
        case Method.SAGUARO:
            _saguaro_to_proto(params.saguaro, message.saguaro, params.is_ratio)
        case Method.DOUBLE:
            _double_to_proto(params.double, message.double)
        case Method.SPACELIKE:
            message.spacelike.max_match_len = params.spacelike.max_match_len
        case Method.BEST_FIRST:
            message.best_first.num_expanded = params.best_first.num_expanded
            message.best_first.num_children = params.best_first.num_children


def _saguaro_to_proto(params: SaguaroParams, message: types_pb2.SaguaroParams, is_ratio: bool) -> None:
    message.fan_out = params.fan_out.value  # type: ignore[assignment]  # the values are those of the wire
    message.fallback = params.fallback.value  # type: ignore[assignment]
    if params.fan_out is FanOut.GIVEN:
        message.fan_outs.extend(params.fan_outs)
    else:
        message.budget = params.budget
    if params.fan_out is FanOut.GEOMETRIC:
        message.exponent = params.exponent
    if is_ratio:
        message.bias, message.num_biased = params.bias, params.num_biased


def _double_to_proto(params: DoubleParams, message: types_pb2.DoubleParams) -> None:
    message.max_match_len = params.max_match_len
    message.draft_retrieval, message.target_retrieval = params.draft_retrieval, params.target_retrieval
    if params.draft_retrieval:
        message.max_phrase_len = params.max_phrase_len
    message.tiers.extend(tier.value for tier in params.tiers)  # type: ignore[misc]
    message.serial = params.serial
