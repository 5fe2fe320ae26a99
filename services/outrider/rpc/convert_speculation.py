"""`SpeculationParams`, on the wire and in the domain.

A value outside its range, and a field that is set where it has no meaning, raise InvalidParameter with the name that
the wire gives it; nothing is clipped and nothing is ignored. `allow_fallback` is not among the resolved parameters: it
says what may be done where they cannot be served, which is for `outrider.verifier.admission` to decide.
"""

from __future__ import annotations

from typing import cast

from outrider.core.params import AcceptanceRule, Method, RetrievalScope, Rows, check
from outrider.core.speculation import Fallback, SpeculationParams
from outrider.core.steering import Steering
from outrider.rpc.convert_methods import enum_from_proto, limited, method_params_from_proto, method_params_to_proto
from outrider.rpc.limits import SpeculationLimits
from outrider.v1 import speculator_pb2, types_pb2

METHODS = {
    types_pb2.METHOD_OFF: Method.OFF,
    types_pb2.METHOD_SPECULATIVE: Method.SPECULATIVE,
    types_pb2.METHOD_PEARL: Method.PEARL,
    types_pb2.METHOD_RETRIEVAL: Method.RETRIEVAL,
    types_pb2.METHOD_CARD: Method.CARD,
    types_pb2.METHOD_SAGUARO: Method.SAGUARO,
    types_pb2.METHOD_DOUBLE: Method.DOUBLE,
    types_pb2.METHOD_SPACELIKE: Method.SPACELIKE,
    types_pb2.METHOD_BEST_FIRST: Method.BEST_FIRST,
    types_pb2.METHOD_AUTO: Method.AUTO,
}
METHODS_TO_PROTO = {method: value for value, method in METHODS.items()}

_OWN_ROWS = {Method.BEST_FIRST: Rows.TREE, Method.AUTO: Rows.TREE}
"""What a method's rows are spent on where the request does not say; all others': one chain."""


def method_from_proto(value: int, default: Method) -> Method:
    """The method; unset = the default. A number this server does not know is invalid."""
    if value == types_pb2.METHOD_UNSPECIFIED:
        return default
    known = ", ".join(types_pb2.Method.Name(number) for number in METHODS)
    check(value in METHODS, "speculation.method", f"one of {known}", value)
    return METHODS[cast(types_pb2.Method, value)]


def speculation_from_proto(
    message: types_pb2.SpeculationParams, defaults: SpeculationParams, limits: SpeculationLimits
) -> SpeculationParams:
    """How drafts are made. Unset fields come from the server's defaults, or have those that the proto states."""
    method = method_from_proto(message.method, defaults.method)
    max_gamma = limits.max_num_speculative_tokens
    # Where rows are taken as they pay, only the limit bounds a path.
    own_gamma = max_gamma if method in _OWN_ROWS else defaults.num_speculative_tokens
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
    params = SpeculationParams(
        method=method,
        num_speculative_tokens=gamma,
        lookahead=_lookahead_from_proto(message, method, max(defaults.lookahead, gamma), limits),
        min_path_probability=_min_path_probability_from_proto(message, method, rows, defaults.min_path_probability),
        rows=rows,
        max_rows=_max_rows_from_proto(message, rows, limits),
        acceptance_rule=rule,
        shared_noise=_shared_noise_from_proto(message, method, is_ratio),
        retrieval=retrieves,
        retrieval_scope=scope,
        contribute=contribute,
        **method_params_from_proto(message, method, gamma, is_ratio, limits),
    )
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
    is_serial = method is Method.DOUBLE and message.double.serial
    check(not is_serial, field, "unset where draft and target take turns (double.serial)", lookahead)
    limit = limits.max_lookahead
    check(lookahead <= limit, field, f"at most {limit}, this server's limit", lookahead)
    return lookahead


def _min_path_probability_from_proto(
    message: types_pb2.SpeculationParams, method: Method, rows: Rows, default: float
) -> float:
    value = message.min_path_probability
    if method is Method.BEST_FIRST and rows is Rows.TREE:
        rule = "unset or 0 for METHOD_BEST_FIRST with ROWS_TREE, which takes nodes as they pay"
        check(value == 0, "speculation.min_path_probability", rule, value)
        return 0.0
    return value if message.HasField("min_path_probability") else default


def _max_rows_from_proto(message: types_pb2.SpeculationParams, rows: Rows, limits: SpeculationLimits) -> int:
    """0 = as many as pay."""
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
    """Whether continuations are looked up: asked for, or a part of the method."""
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
    """With whom retrieval shares, and whether the session contributes."""
    given, params = message.HasField("retrieval_params"), message.retrieval_params
    check(retrieves or not given, "speculation.retrieval_params", "unset where nothing is retrieved", "a message")
    default = limits.spacelike_scope if method is Method.SPACELIKE else defaults.retrieval_scope
    field = "speculation.retrieval_params.scope"
    scope = enum_from_proto(params.scope, RetrievalScope, types_pb2.RetrievalScope, field, default)
    if not retrieves:
        return RetrievalScope.SESSION, False
    is_session = scope is RetrievalScope.SESSION
    rule = "RETRIEVAL_SCOPE_TENANT or RETRIEVAL_SCOPE_GLOBAL for method spacelike, which lives on what others said"
    check(method is not Method.SPACELIKE or not is_session, field, rule, "RETRIEVAL_SCOPE_SESSION")
    return scope, params.contribute if params.HasField("contribute") else not is_session


def retrieval_scope_to_proto(scope: RetrievalScope) -> types_pb2.RetrievalScope:
    """With whom retrieval shares; the numbers are those of the wire."""
    return cast(types_pb2.RetrievalScope, scope.value)


def speculation_to_proto(params: SpeculationParams) -> types_pb2.SpeculationParams:
    """How drafts are made, every field set that has a meaning for the method."""
    method = params.method
    message = types_pb2.SpeculationParams(
        method=METHODS_TO_PROTO[method],
        num_speculative_tokens=params.num_speculative_tokens,
        rows=cast(types_pb2.Rows, params.rows.value),
        acceptance_rule=cast(types_pb2.AcceptanceRule, params.acceptance_rule.value),
    )
    if not (method is Method.BEST_FIRST and params.rows is Rows.TREE):
        message.min_path_probability = params.min_path_probability
    if method.drafts_ahead and not (method is Method.DOUBLE and params.double.serial):
        message.lookahead = params.lookahead
    if params.rows is Rows.TREE and params.max_rows:
        message.max_rows = params.max_rows
    if method is not Method.OFF and not params.is_ratio:
        message.shared_noise = params.shared_noise
    if params.retrieval:
        message.retrieval = True
    if params.retrieves:
        message.retrieval_params.scope = retrieval_scope_to_proto(params.retrieval_scope)
        message.retrieval_params.contribute = params.contribute
    method_params_to_proto(params, message)
    return message


def steering_to_proto(steering: Steering) -> speculator_pb2.Steering:
    """What is unset means: as before."""
    message = speculator_pb2.Steering(forward_us=steering.forward_us, round_trip_us=steering.round_trip_us)
    if steering.speculation is not None:
        message.speculation.CopyFrom(speculation_to_proto(steering.speculation))
    return message
