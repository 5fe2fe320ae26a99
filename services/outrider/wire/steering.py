"""`Steering`, on the wire and in the domain: it changes how a drafter goes on in the middle of a generation.

A drafter is a speculator that the verifier dials, or one at the edge that dials the verifier; this module decides what
both accept.
"""

from __future__ import annotations

from outrider.core.methods import METHODS
from outrider.core.params import check
from outrider.core.speculation import Method, SpeculationLimits, SpeculationParams, Steering
from outrider.v1 import types_pb2
from outrider.wire.errors import Unimplemented
from outrider.wire.speculation import method_from_proto, speculation_from_proto, speculation_to_proto

DRAFTED = tuple(method for method in METHODS.values() if method.needs_draft_model)
"""The methods that have a growth policy. METHOD_AUTO has none: the verifier chooses a method, and sends that one."""


def steering_to_proto(steering: Steering) -> types_pb2.Steering:
    """Converts a steering; an unset field means that the drafter goes on as before."""
    message = types_pb2.Steering(
        forward_us=steering.forward_us, round_trip_us=steering.round_trip_us, max_num_nodes=steering.max_num_nodes
    )
    if steering.speculation is not None:
        message.speculation.CopyFrom(speculation_to_proto(steering.speculation))
    return message


def steering_from_proto(message: types_pb2.Steering, opened: SpeculationParams, limits: SpeculationLimits) -> Steering:
    """Returns how to go on; method off means pause. Unset fields are as in `opened`.

    Args:
        message: The steering.
        opened: The parameters that the drafting began with.
        limits: The limits of this drafter.

    Raises:
        InvalidParameter: a field is outside its range, or changes what must stay as opened.
        Unimplemented: the method has no growth policy.
    """
    return Steering(
        _speculation(message, opened, limits), message.forward_us, message.round_trip_us, message.max_num_nodes
    )


def _speculation(
    steering: types_pb2.Steering, opened: SpeculationParams, limits: SpeculationLimits
) -> SpeculationParams | None:
    if not steering.HasField("speculation"):
        return None
    # A copy, as the defaults are written into it: the steering is the caller's.
    message = types_pb2.SpeculationParams()
    message.CopyFrom(steering.speculation)
    # A pause has no acceptance rule, and method off refuses shared noise. Otherwise the rule is written in, since unset
    # means the match rule. Under the ratio rule shared noise stays unset, which is false there.
    if not method_from_proto(message.method, opened.method).is_off:
        rule, known = message.acceptance_rule, opened.acceptance_rule
        _check_as_opened("acceptance_rule", rule or known.value, known.value)
        message.acceptance_rule = known.value  # type: ignore[assignment]  # the values are those of the wire
        if not opened.is_ratio and not message.HasField("shared_noise"):
            message.shared_noise = opened.shared_noise
    speculation = speculation_from_proto(message, opened, limits)
    if not speculation.method.is_off:
        check_drafted(speculation.method)
        _check_as_opened("shared_noise", speculation.shared_noise, opened.shared_noise)
    return speculation


def check_drafted(method: Method) -> None:
    """Raises Unimplemented unless there is a growth policy for the method."""
    if method.is_auto:
        raise Unimplemented("speculation.method auto: the verifier chooses, and says what it has chosen")
    if method not in DRAFTED:
        raise Unimplemented(f"speculation.method {method.name} needs no speculator")


def _check_as_opened(field: str, value: object, opened: object) -> None:
    check(value == opened, f"speculation.{field}", f"{opened}, as the stream was opened", value)
