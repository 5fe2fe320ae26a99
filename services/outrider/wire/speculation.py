"""`SpeculationParams`, on the wire and in the domain.

A value outside its range, and a field that is set where it has no meaning, raise InvalidParameter with the name that
the wire gives it; nothing is clipped and nothing is ignored. `allow_fallback` is not among the resolved parameters: it
says what may be done where they cannot be served, which is for `outrider.verifier.admission` to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.core.params import (
    MAX_BEAM_WIDTH,
    MAX_BUDGET,
    MAX_ROWS,
    SOURCES,
    TIERS,
    AcceptanceRule,
    BestFirstParams,
    CardParams,
    DoubleParams,
    Fallback,
    FanOut,
    Method,
    OptTreeParams,
    RetrievalScope,
    Rows,
    SaguaroParams,
    SequoiaParams,
    Source,
    SpacelikeParams,
    SpeculationParams,
    check,
)
from outrider.v1 import types_pb2


def scalars_from_proto(message: Message, kind: type[Any]) -> dict[str, Any]:
    """Returns the plain fields of a message that are set, as keyword arguments of a dataclass.

    A field is plain if it is `optional`, neither an enum nor a message, and the dataclass has a field of the same name:
    one that is unset then has the default of the dataclass, and its range is checked there. So a new parameter needs no
    code here.
    """
    names = {field.name for field in fields(kind)}
    # ListFields leaves out what is unset; an optional field that is set to 0 or false is listed.
    return {field.name: value for field, value in message.ListFields() if _is_plain(field) and field.name in names}


def scalars_to_proto(params: Any, message: Message) -> None:
    """Sets all plain fields of a message, see `scalars_from_proto`, from a dataclass."""
    names = {field.name for field in fields(params)}
    for field in message.DESCRIPTOR.fields:
        if _is_plain(field) and field.name in names:
            setattr(message, field.name, getattr(params, field.name))


def _is_plain(field: Any) -> bool:
    # Repeated fields have no presence; messages have, without being optional.
    return field.has_presence and field.type not in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_ENUM)


# Matched by name: the values of `Method` are strings, where other enums have the numbers of the wire.
METHODS = {cast(types_pb2.Method, types_pb2.Method.Value(f"METHOD_{method.name}")): method for method in Method}
METHODS_TO_PROTO = {method: value for value, method in METHODS.items()}

_AS_PAY = (Method.BEST_FIRST, Method.AUTO)
"""Methods that take as many rows as pay, so that only the limit bounds a path."""
_OWN_ROWS = dict.fromkeys((*_AS_PAY, Method.OPT_TREE, Method.SEQUOIA), Rows.TREE)
"""The rows of a method where the request does not say; all other methods have one chain."""


def method_from_proto(value: int, default: Method) -> Method:
    """Returns the method; unset means the default. A number that this server does not know is invalid."""
    if value == types_pb2.METHOD_UNSPECIFIED:
        return default
    known = ", ".join(types_pb2.Method.Name(number) for number in METHODS)
    check(value in METHODS, "speculation.method", f"one of {known}", value)
    return METHODS[cast(types_pb2.Method, value)]


def speculation_from_proto(
    message: types_pb2.SpeculationParams, defaults: SpeculationParams, limits: SpeculationLimits
) -> SpeculationParams:
    """Returns how drafts are made. Unset fields have the server's defaults, or those that the proto states."""
    method = method_from_proto(message.method, defaults.method)
    max_gamma = limits.max_num_speculative_tokens
    own_gamma = max_gamma if method in _AS_PAY else defaults.num_speculative_tokens
    gamma = limited(message, "num_speculative_tokens", "speculation", own_gamma, max_gamma)
    retrieves = _retrieves_from_proto(message, method)
    scope, contribute = _sharing_from_proto(message, method, retrieves, defaults, limits)
    rule = enum_from_proto(
        message.acceptance_rule,
        AcceptanceRule,
        types_pb2.AcceptanceRule,
        "speculation.acceptance_rule",
        AcceptanceRule.MATCH,
    )
    is_ratio = rule is AcceptanceRule.RATIO
    own_rows = _OWN_ROWS.get(method, Rows.CHAIN)
    rows = enum_from_proto(message.rows, Rows, types_pb2.Rows, "speculation.rows", own_rows)
    resolved: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": gamma,
        # A default below gamma would be refused by SpeculationParams: a full chain must fit into the tree.
        "lookahead": _lookahead_from_proto(message, method, max(defaults.lookahead, gamma), limits),
        "min_path_probability": _min_path_probability_from_proto(message, method, rows, defaults.min_path_probability),
        "rows": rows,
        "max_rows": _max_rows_from_proto(message, rows, limits),
        "acceptance_rule": rule,
        "shared_noise": _shared_noise_from_proto(message, method, is_ratio),
        "retrieval": retrieves,
        "retrieval_scope": scope,
        "contribute": contribute,
        "sources": _sources_from_proto(message.retrieval_params),
    }
    if method in (Method.OFF, Method.AUTO):
        without = "unset with method off or auto, which chooses by calibrated scores"
        _check_unset(message, "calibration", "speculation", without)
    own = method_params_from_proto(message, method, gamma, is_ratio, limits)
    # `resolved` replaces plain fields of the same names: it knows the limits and the method's own defaults.
    params = SpeculationParams(**scalars_from_proto(message, SpeculationParams) | resolved | own)
    check(
        retrieves or params.saguaro.fallback is not Fallback.RETRIEVAL,
        "speculation.saguaro.fallback",
        "another than FALLBACK_RETRIEVAL where retrieval is unset",
        "FALLBACK_RETRIEVAL",
    )
    return params


def _lookahead_from_proto(
    message: types_pb2.SpeculationParams, method: Method, default: int, limits: SpeculationLimits
) -> int:
    if not message.HasField("lookahead"):
        return default
    field, lookahead = "speculation.lookahead", message.lookahead
    check(method.drafts_ahead, field, "unset for a method that does not draft ahead", lookahead)
    # DOUBLE on a single GPU: one after the other, retrieval-augmented drafting and verification (section D.8).
    for serial in (Method.DOUBLE, Method.BEST_FIRST):
        name = PARAMS_FIELDS[serial]
        rule = f"unset where draft and target take turns ({name}.serial)"
        check(method is not serial or not getattr(message, name).serial, field, rule, lookahead)
    limit = limits.max_lookahead
    check(lookahead <= limit, field, f"at most {limit}, this server's limit", lookahead)
    return lookahead


def _min_path_probability_from_proto(
    message: types_pb2.SpeculationParams, method: Method, rows: Rows, default: float
) -> float:
    value = message.min_path_probability  # an unset field of protobuf reads as 0
    if method is Method.BEST_FIRST and rows is Rows.TREE:
        rule = "unset or 0 for METHOD_BEST_FIRST with ROWS_TREE, which takes nodes as they pay"
        check(value == 0, "speculation.min_path_probability", rule, value)
        return 0.0
    return value if message.HasField("min_path_probability") else default


def _max_rows_from_proto(message: types_pb2.SpeculationParams, rows: Rows, limits: SpeculationLimits) -> int:
    """Returns the limit of rows; 0 means as many as pay."""
    if not message.HasField("max_rows"):
        return 0
    check(rows is Rows.TREE, "speculation.max_rows", "unset for rows other than ROWS_TREE", message.max_rows)
    return limited(message, "max_rows", "speculation", limits.max_num_rows, limits.max_num_rows)


def _shared_noise_from_proto(message: types_pb2.SpeculationParams, method: Method, is_ratio: bool) -> bool:
    field, is_given = "speculation.shared_noise", message.HasField("shared_noise")
    check(not is_given or method is not Method.OFF, field, "unset with method off", message.shared_noise)
    rule = "unset or false under ACCEPTANCE_RULE_RATIO: its drafts are independent of the target's noise"
    check(not (is_ratio and message.shared_noise), field, rule, message.shared_noise)
    return message.shared_noise if is_given else not is_ratio


def _retrieves_from_proto(message: types_pb2.SpeculationParams, method: Method) -> bool:
    """Returns whether continuations are looked up: on request, or as a part of the method."""
    if not method.always_retrieves:
        return message.retrieval
    is_refused = message.HasField("retrieval") and not message.retrieval
    rule = f"unset or true for method {method.value}, which always retrieves"
    check(not is_refused, "speculation.retrieval", rule, message.retrieval)
    return True


def _sharing_from_proto(
    message: types_pb2.SpeculationParams,
    method: Method,
    retrieves: bool,
    defaults: SpeculationParams,
    limits: SpeculationLimits,
) -> tuple[RetrievalScope, bool]:
    """Returns with whom retrieval shares, and whether the session contributes."""
    given, params = message.HasField("retrieval_params"), message.retrieval_params
    check(retrieves or not given, "speculation.retrieval_params", "unset where nothing is retrieved", "a message")
    # Spacelike drafts come from one buffer with the tokens of all finished requests (Takeoff's spacelike decoding).
    default = limits.spacelike_scope if method is Method.SPACELIKE else defaults.retrieval_scope
    field = "speculation.retrieval_params.scope"
    scope = enum_from_proto(params.scope, RetrievalScope, types_pb2.RetrievalScope, field, default)
    if not retrieves:
        return RetrievalScope.SESSION, False
    is_session = scope is RetrievalScope.SESSION
    rule = "RETRIEVAL_SCOPE_TENANT or RETRIEVAL_SCOPE_GLOBAL for method spacelike, which lives on what others said"
    check(method is not Method.SPACELIKE or not is_session, field, rule, "RETRIEVAL_SCOPE_SESSION")
    return scope, params.contribute if params.HasField("contribute") else not is_session


def _sources_from_proto(message: types_pb2.RetrievalParams) -> tuple[Source, ...]:
    """Returns the sources that are looked up, in their order; none named means the tiers."""
    known = {source.value: source for source in SOURCES}
    for index, number in enumerate(message.sources):
        field = f"speculation.retrieval_params.sources[{index}]"
        check(number in known, field, f"one of {_names_of(types_pb2.Source, known)}", number)
    return tuple(known[number] for number in message.sources) or TIERS


def retrieval_scope_to_proto(scope: RetrievalScope) -> types_pb2.RetrievalScope:
    """Converts the scope in which retrieval shares; the numbers are those of the wire."""
    return cast(types_pb2.RetrievalScope, scope.value)


def speculation_to_proto(params: SpeculationParams) -> types_pb2.SpeculationParams:
    """Returns how drafts are made, with every field set that has a meaning for the method."""
    message = types_pb2.SpeculationParams(
        method=METHODS_TO_PROTO[params.method],
        rows=cast(types_pb2.Rows, params.rows.value),
        acceptance_rule=cast(types_pb2.AcceptanceRule, params.acceptance_rule.value),
    )
    # Set and then cleared: a field that is set to 0 or false has presence, and the other side would refuse it.
    scalars_to_proto(params, message)
    for name in _meaningless(params):
        message.ClearField(name)
    if params.retrieves:
        message.retrieval_params.scope = retrieval_scope_to_proto(params.retrieval_scope)
        message.retrieval_params.contribute = params.contribute
        # Left out where it is the default, which every server knows.
        if params.sources != TIERS:
            message.retrieval_params.sources.extend(cast(types_pb2.Source, source.value) for source in params.sources)
    method_params_to_proto(params, message)
    return message


def _meaningless(params: SpeculationParams) -> Iterator[str]:
    """Yields the plain fields that have no meaning here. The other side refuses a message that sets one of them."""
    method = params.method
    if method in (Method.OFF, Method.AUTO):
        yield "calibration"
    if method is Method.BEST_FIRST and params.rows is Rows.TREE:
        yield "min_path_probability"
    if not method.drafts_ahead or params.takes_turns(method):
        yield "lookahead"
    # As many rows as pay is 0 in the domain, and unset on the wire: there 0 is out of range.
    if params.rows is not Rows.TREE or not params.max_rows:
        yield "max_rows"
    if method is Method.OFF or params.is_ratio:
        yield "shared_noise"
    if not params.retrieval:
        yield "retrieval"


PARAMS_FIELDS = {
    Method.CARD: "card",
    Method.SAGUARO: "saguaro",
    Method.DOUBLE: "double",
    Method.SPACELIKE: "spacelike",
    Method.BEST_FIRST: "best_first",
    Method.OPT_TREE: "opt_tree",
    Method.SEQUOIA: "sequoia",
}
"""The field of a method's own parameters, on the wire and in `SpeculationParams`."""

_E = TypeVar("_E", bound=Enum)


class _Names(Protocol):
    """An enum that protoc generated, which names its numbers."""

    def Name(self, number: Any) -> str: ...


def enum_from_proto(number: int, kind: type[_E], names: _Names, field: str, default: _E) -> _E:
    """Returns a member of an enum whose values are those of the wire; 0 means the default."""
    # An enum field without `optional` has no presence: unset and UNSPECIFIED are the same.
    if number == 0:
        return default
    known = {member.value: member for member in kind}
    check(number in known, field, f"one of {_names_of(names, known)}", number)
    return known[number]


def _names_of(names: _Names, numbers: Iterable[int]) -> str:
    return ", ".join(names.Name(number) for number in numbers)


def limited(message: Any, name: str, prefix: str, default: int, limit: int) -> int:
    """Returns a number from 1 to the server's limit; unset means the default, or the limit if that is less."""
    if not message.HasField(name):
        return min(default, limit)
    value: int = getattr(message, name)
    check(1 <= value <= limit, f"{prefix}.{name}", f"in [1, {limit}], this server's limit", value)
    return value


def _check_unset(message: Any, name: str, prefix: str, rule: str) -> None:
    check(not message.HasField(name), f"{prefix}.{name}", rule, getattr(message, name))


def method_params_from_proto(
    message: types_pb2.SpeculationParams, method: Method, gamma: int, is_ratio: bool, limits: SpeculationLimits
) -> dict[str, Any]:
    """Returns the method's own parameters as keyword arguments of `SpeculationParams`. Those of another method are
    invalid."""
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
            return {"spacelike": SpacelikeParams(**scalars_from_proto(message.spacelike, SpacelikeParams))}
        case Method.BEST_FIRST:
            return {"best_first": BestFirstParams(**scalars_from_proto(message.best_first, BestFirstParams))}
        case Method.OPT_TREE:
            return {"opt_tree": OptTreeParams(**scalars_from_proto(message.opt_tree, OptTreeParams))}
        case Method.SEQUOIA:
            return {"sequoia": SequoiaParams(**scalars_from_proto(message.sequoia, SequoiaParams))}
    return {}


def _card_from_proto(message: types_pb2.CardParams, limits: SpeculationLimits) -> CardParams:
    width = limited(message, "beam_width", "speculation.card", CardParams().beam_width, limits.max_beam_width)
    return CardParams(**scalars_from_proto(message, CardParams) | {"beam_width": width})


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
    # The factor C in [0, 1] of SAGUARO sampling, and its number F of top tokens. The match rule samples no drafts.
    if not is_ratio:
        _check_unset(message, "bias", prefix, "unset under ACCEPTANCE_RULE_MATCH: the bias is of sampled tokens")
    if not message.HasField("bias"):
        _check_unset(message, "num_biased", prefix, "unset where bias is unset")
    resolved: dict[str, Any] = {
        "fan_out": fan_out,
        "budget": limited(message, "budget", prefix, defaults.budget, limits.max_budget),
        "fan_outs": tuple(message.fan_outs),
        "fallback": enum_from_proto(
            message.fallback, Fallback, types_pb2.Fallback, f"{prefix}.fallback", defaults.fallback
        ),
    }
    return SaguaroParams(**scalars_from_proto(message, SaguaroParams) | resolved)


def _check_fan_outs(fan_outs: Iterable[int], gamma: int, max_budget: int) -> None:
    """Checks fan-outs: each stands for a position of the chain or behind it, the last one for all further positions."""
    # SAGUARO, Theorem 12, has fan-outs F_k at the positions k = 0 to K, one more than a chain has tokens, under a
    # budget B: here the sum of all F_k.
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
    sides = ("draft_retrieval", "target_retrieval")
    if all(message.HasField(side) and not getattr(message, side) for side in sides):
        _check_unset(message, "max_phrase_len", prefix, "unset where draft_retrieval and target_retrieval are false")
    # Each tier once, however often the message names it.
    requested_tiers = tuple(dict.fromkeys(tiers[number] for number in message.tiers))
    return DoubleParams(**scalars_from_proto(message, DoubleParams) | {"tiers": requested_tiers or TIERS})


def method_params_to_proto(params: SpeculationParams, message: types_pb2.SpeculationParams) -> None:
    """Sets the method's own parameters, every field that has a meaning."""
    name = PARAMS_FIELDS.get(params.method)
    if name is None:
        return
    own = getattr(message, name)
    # A message that has only unset fields is itself unset until it is marked.
    own.SetInParent()
    scalars_to_proto(getattr(params, name), own)
    if params.method is Method.SAGUARO:
        _saguaro_to_proto(params.saguaro, own, params.is_ratio)
    elif params.method is Method.DOUBLE:
        own.tiers.extend(tier.value for tier in params.double.tiers)
        if not (params.double.draft_retrieval or params.double.target_retrieval):
            own.ClearField("max_phrase_len")


def _saguaro_to_proto(params: SaguaroParams, message: types_pb2.SaguaroParams, is_ratio: bool) -> None:
    message.fan_out = params.fan_out.value  # type: ignore[assignment]  # the values are those of the wire
    message.fallback = params.fallback.value  # type: ignore[assignment]
    message.fan_outs.extend(params.fan_outs)
    if params.fan_out is FanOut.GIVEN:
        message.ClearField("budget")
    if params.fan_out is not FanOut.GEOMETRIC:
        message.ClearField("exponent")
    if not is_ratio:
        message.ClearField("bias")
        message.ClearField("num_biased")


@dataclass(frozen=True, slots=True)
class SpeculationLimits:
    """Limits of a request's parameters: a value beyond is refused, and the message states the limit."""

    max_num_speculative_tokens: int = 64
    max_num_rows: int = MAX_ROWS
    """Limit of `max_rows`."""
    max_beam_width: int = MAX_BEAM_WIDTH
    max_budget: int = MAX_BUDGET
    """Limit of the outcomes that SAGUARO drafts for at a time."""
    spacelike_scope: RetrievalScope = RetrievalScope.TENANT
    """Scope of METHOD_SPACELIKE where the request does not say: alone with itself, a session has nothing to look up."""

    @property
    def max_lookahead(self) -> int:
        """Limit of `lookahead`: sixteen full chains in flight hide any round trip that is worth hiding."""
        return 16 * self.max_num_speculative_tokens
