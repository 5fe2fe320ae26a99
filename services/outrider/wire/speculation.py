"""`SpeculationParams`, on the wire and in the domain.

A value outside its range, and a field that is set without having a meaning, raise InvalidParameter with its name on the
wire; nothing is clipped and nothing is ignored. `allow_fallback` is not among the resolved parameters: it says what may
be done if they cannot be served, which `outrider.verifier.admission` decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from outrider.core.methods import METHODS
from outrider.core.params import SOURCES, TIERS, AcceptanceRule, RetrievalScope, Rows, Source, check
from outrider.core.speculation import Method, MethodParams, SpeculationLimits, SpeculationParams, Waiting
from outrider.v1 import types_pb2


def scalars_from_proto(message: Message, kind: type[Any]) -> dict[str, Any]:
    """Returns the plain fields of a message that are set, as keyword arguments of a dataclass.

    A field is plain if it is `optional`, neither an enum nor a message, and the dataclass has a field of the same name:
    one that is unset then has the default of the dataclass, which also checks its range. A new parameter therefore
    needs no code here.
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


METHODS_FROM_PROTO = {
    cast(types_pb2.Method, types_pb2.Method.Value(f"METHOD_{method.field.upper()}")): method
    for method in METHODS.values()
}
METHODS_TO_PROTO = {method: value for value, method in METHODS_FROM_PROTO.items()}


def method_from_proto(value: int, default: Method) -> Method:
    """Returns the method; unset means the default. A number that this server does not know is invalid."""
    if value == types_pb2.METHOD_UNSPECIFIED:
        return default
    known = ", ".join(types_pb2.Method.Name(number) for number in METHODS_FROM_PROTO)
    check(value in METHODS_FROM_PROTO, "speculation.method", f"one of {known}", value)
    return METHODS_FROM_PROTO[cast(types_pb2.Method, value)]


def speculation_from_proto(
    message: types_pb2.SpeculationParams, defaults: SpeculationParams, limits: SpeculationLimits
) -> SpeculationParams:
    """Returns how drafts are made. Unset fields have the server's defaults, or those that the proto states."""
    method = method_from_proto(message.method, defaults.method)
    max_gamma = limits.max_num_speculative_tokens
    own_gamma = max_gamma if method.takes_as_pay else defaults.num_speculative_tokens
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
    sampled = ", ".join(known.name for known in METHODS.values() if known.samples)
    without = f"ACCEPTANCE_RULE_MATCH for a method other than {sampled}"
    check(method.samples or not is_ratio, "speculation.acceptance_rule", without, "ACCEPTANCE_RULE_RATIO")
    rows = enum_from_proto(message.rows, Rows, types_pb2.Rows, "speculation.rows", method.rows)
    own = _own_from_proto(message, method, is_ratio, limits)
    resolved: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": gamma,
        # A default below gamma would be refused by SpeculationParams: a full chain must fit into the tree.
        "lookahead": _lookahead_from_proto(message, method, own, max(defaults.lookahead, gamma), limits),
        "min_path_probability": _min_path_probability_from_proto(message, method, rows, defaults.min_path_probability),
        "rows": rows,
        "max_rows": _max_rows_from_proto(message, rows, limits),
        "acceptance_rule": rule,
        "shared_noise": _shared_noise_from_proto(message, method, is_ratio),
        "retrieval": retrieves,
        "retrieval_scope": scope,
        "contribute": contribute,
        "sources": _sources_from_proto(message.retrieval_params),
        "remote": message.retrieval_params.remote,
        "own": () if own is None else (own,),
    }
    if method.is_off or method.is_auto:
        without = "unset with method off or auto, which chooses by calibrated scores"
        _check_unset(message, "calibration", "speculation", without)
    # `resolved` replaces plain fields of the same names: it knows the limits and the method's own defaults.
    params = SpeculationParams(**scalars_from_proto(message, SpeculationParams) | resolved)
    if own is not None:
        own.check(params, limits)
    return params


def _lookahead_from_proto(
    message: types_pb2.SpeculationParams,
    method: Method,
    own: MethodParams | None,
    default: int,
    limits: SpeculationLimits,
) -> int:
    if not message.HasField("lookahead"):
        return default
    field, lookahead = "speculation.lookahead", message.lookahead
    check(method.drafts_ahead, field, "unset for a method that does not draft ahead", lookahead)
    rule = f"unset where draft and target take turns ({method.field}.serial)"
    check(not getattr(own, "serial", False), field, rule, lookahead)
    limit = limits.max_lookahead
    check(lookahead <= limit, field, f"at most {limit}, this server's limit", lookahead)
    return lookahead


def _min_path_probability_from_proto(
    message: types_pb2.SpeculationParams, method: Method, rows: Rows, default: float
) -> float:
    value = message.min_path_probability  # an unset field of protobuf reads as 0
    if not method.bounds_paths(rows):
        rule = "unset or 0 for METHOD_BEST_FIRST with ROWS_TREE, which takes nodes as they pay"
        check(value == 0, "speculation.min_path_probability", rule, value)
        return 0.0
    return value if message.HasField("min_path_probability") else default


def _max_rows_from_proto(message: types_pb2.SpeculationParams, rows: Rows, limits: SpeculationLimits) -> int:
    """Returns the most rows; 0 means as many as pay."""
    if not message.HasField("max_rows"):
        return 0
    check(rows is Rows.TREE, "speculation.max_rows", "unset for rows other than ROWS_TREE", message.max_rows)
    return limited(message, "max_rows", "speculation", limits.max_num_rows, limits.max_num_rows)


def _shared_noise_from_proto(message: types_pb2.SpeculationParams, method: Method, is_ratio: bool) -> bool:
    field, is_given = "speculation.shared_noise", message.HasField("shared_noise")
    check(not (is_given and method.is_off), field, "unset with method off", message.shared_noise)
    rule = "unset or false under ACCEPTANCE_RULE_RATIO: its drafts are independent of the target's noise"
    check(not (is_ratio and message.shared_noise), field, rule, message.shared_noise)
    return message.shared_noise if is_given else not is_ratio


def _retrieves_from_proto(message: types_pb2.SpeculationParams, method: Method) -> bool:
    """Returns whether continuations are looked up: on request, or as a part of the method."""
    if not method.always_retrieves:
        return message.retrieval
    is_refused = message.HasField("retrieval") and not message.retrieval
    rule = f"unset or true for method {method.name}, which always retrieves"
    check(not is_refused, "speculation.retrieval", rule, message.retrieval)
    return True


def _sharing_from_proto(
    message: types_pb2.SpeculationParams,
    method: Method,
    retrieves: bool,
    defaults: SpeculationParams,
    limits: SpeculationLimits,
) -> tuple[RetrievalScope, bool]:
    """Returns the scope in which retrieval shares, and True if the session contributes."""
    given, params = message.HasField("retrieval_params"), message.retrieval_params
    check(retrieves or not given, "speculation.retrieval_params", "unset where nothing is retrieved", "a message")
    default = limits.spacelike_scope if method.needs_datastore else defaults.retrieval_scope
    field = "speculation.retrieval_params.scope"
    scope = enum_from_proto(params.scope, RetrievalScope, types_pb2.RetrievalScope, field, default)
    if not retrieves:
        return RetrievalScope.SESSION, False
    is_session = scope is RetrievalScope.SESSION
    rule = f"RETRIEVAL_SCOPE_TENANT or RETRIEVAL_SCOPE_GLOBAL for method {method.name}, which lives on what others said"
    check(not (method.needs_datastore and is_session), field, rule, "RETRIEVAL_SCOPE_SESSION")
    return scope, params.contribute if params.HasField("contribute") else not is_session


def _sources_from_proto(message: types_pb2.RetrievalParams) -> tuple[Source, ...]:
    """Returns the sources that are looked up, in order; if none is named, the tiers."""
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
        # Left out if it is the default, which every server knows.
        if params.sources != TIERS:
            message.retrieval_params.sources.extend(cast(types_pb2.Source, source.value) for source in params.sources)
        if params.remote:
            message.retrieval_params.remote = True
    _own_to_proto(params, message)
    return message


def _meaningless(params: SpeculationParams) -> Iterator[str]:
    """Yields the plain fields that have no meaning here. The other side refuses a message that sets one of them."""
    method = params.method
    if method.is_off or method.is_auto:
        yield "calibration"
    if not method.bounds_paths(params.rows):
        yield "min_path_probability"
    if not method.has_draft_model or method.waits(params) is Waiting.IN_TURNS:
        yield "lookahead"
    # As many rows as pay is 0 in the domain, and unset on the wire: there 0 is out of range.
    if params.rows is not Rows.TREE or not params.max_rows:
        yield "max_rows"
    if method.is_off or params.is_ratio:
        yield "shared_noise"
    if not params.retrieval:
        yield "retrieval"


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


def given_names(message: types_pb2.SpeculationParams) -> set[str]:
    """Returns the names of the fields that are set, those of the method's own parameters included."""
    own = message.WhichOneof("method_params")
    parts: list[Message] = [message] if own is None else [message, getattr(message, own)]
    return {field.name for part in parts for field, _ in part.ListFields()}


def _own_from_proto(
    message: types_pb2.SpeculationParams, method: Method, is_ratio: bool, limits: SpeculationLimits
) -> MethodParams | None:
    """Returns the method's own parameters, if it has some. Those of another method are invalid."""
    given, kind = message.WhichOneof("method_params"), method.parameters
    is_own = given is None or (kind is not None and given == method.field)
    check(is_own, f"speculation.{given}", f"unset for method {method.name}", "a message")
    if kind is None:
        return None
    sent, prefix, defaults = getattr(message, method.field), f"speculation.{method.field}", kind()
    resolved: dict[str, Any] = {}
    for known in fields(cast(Any, kind)):
        name, default = known.name, getattr(defaults, known.name)
        wire, limit = sent.DESCRIPTOR.fields_by_name[name], getattr(limits, f"max_{name}", None)
        if wire.is_repeated and wire.enum_type is not None:
            resolved[name] = (
                _members_from_proto(getattr(sent, name), known.metadata["choices"], wire, prefix) or default
            )
        elif wire.is_repeated:
            resolved[name] = tuple(getattr(sent, name)) or default
        elif wire.enum_type is not None:
            names = getattr(types_pb2, wire.enum_type.name)
            resolved[name] = enum_from_proto(getattr(sent, name), type(default), names, f"{prefix}.{name}", default)
        elif limit is not None:
            resolved[name] = limited(sent, name, prefix, default, limit)
    own = kind(**scalars_from_proto(sent, kind) | resolved)
    is_set = {field.name for field, _ in sent.ListFields()}
    for name, rule in own.meaningless(is_set, is_ratio=is_ratio):
        check(name not in is_set, f"{prefix}.{name}", rule, getattr(sent, name))
    return own


def _members_from_proto(
    numbers: Iterable[int], choices: Iterable[Enum], field: FieldDescriptor, prefix: str
) -> tuple[Enum, ...]:
    """Returns members of an enum, each once, however often the message names it."""
    known, names = {member.value: member for member in choices}, getattr(types_pb2, cast(Any, field.enum_type).name)
    for index, number in enumerate(numbers):
        check(number in known, f"{prefix}.{field.name}[{index}]", f"one of {_names_of(names, known)}", number)
    return tuple(dict.fromkeys(known[number] for number in numbers))


def _own_to_proto(params: SpeculationParams, message: types_pb2.SpeculationParams) -> None:
    """Sets the method's own parameters, every field that has a meaning."""
    method = params.method
    if method.parameters is None:
        return
    own, sent = params.of(method.parameters), getattr(message, method.field)
    # A message that has only unset fields is itself unset until it is marked.
    sent.SetInParent()
    scalars_to_proto(own, sent)
    names = [field.name for field in sent.DESCRIPTOR.fields]
    for name in names:
        value = getattr(own, name)
        if isinstance(value, tuple):
            getattr(sent, name).extend(each.value if isinstance(each, Enum) else each for each in value)
        elif isinstance(value, Enum):
            setattr(sent, name, value.value)
    for name, _ in own.meaningless(names, is_ratio=params.is_ratio):
        sent.ClearField(name)
