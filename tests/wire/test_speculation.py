"""Parameters of the speculation on the wire: what goes out comes back, and what has no meaning is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import (
    PARAMS_OF,
    SOURCES,
    TIERS,
    AcceptanceRule,
    BestFirstParams,
    CardParams,
    DoubleParams,
    Fallback,
    FanOut,
    InvalidParameter,
    Method,
    OptTreeParams,
    RetrievalScope,
    Rows,
    SaguaroParams,
    SequoiaParams,
    Source,
    SpacelikeParams,
    SpeculationParams,
)
from outrider.v1 import types_pb2
from outrider.wire.speculation import (
    METHODS,
    METHODS_TO_PROTO,
    PARAMS_FIELDS,
    SpeculationLimits,
    speculation_from_proto,
    speculation_to_proto,
)

DEFAULTS = SpeculationParams(lookahead=32)
LIMITS = SpeculationLimits(max_num_speculative_tokens=32, max_num_rows=24, max_beam_width=100, max_budget=40)


def resolved(
    defaults: SpeculationParams = DEFAULTS, limits: SpeculationLimits = LIMITS, **fields: Any
) -> SpeculationParams:
    """What a server makes of a request with these fields set."""
    if isinstance(method := fields.get("method"), Method):
        fields["method"] = METHODS_TO_PROTO[method]
    return speculation_from_proto(types_pb2.SpeculationParams(**fields), defaults, limits)


@st.composite
def saguaro_params(draw: st.DrawFn, gamma: int, is_ratio: bool) -> SaguaroParams:
    fan_out = draw(st.sampled_from(FanOut))
    given_outs = st.lists(st.integers(0, 40 // (gamma + 1)), min_size=1, max_size=gamma + 1).map(tuple)
    return SaguaroParams(
        fan_out=fan_out,
        budget=16 if fan_out is FanOut.GIVEN else draw(st.integers(1, 40)),
        exponent=draw(st.floats(0, 10)) if fan_out is FanOut.GEOMETRIC else 0.0,
        fan_outs=draw(given_outs) if fan_out is FanOut.GIVEN else (),
        fallback=draw(st.sampled_from([Fallback.AUTO, Fallback.DRAFT, Fallback.PLAIN, Fallback.RANDOM])),
        bias=draw(st.floats(0, 1)) if is_ratio else 1.0,
        num_biased=draw(st.integers(0, 64)) if is_ratio else 0,
    )


@st.composite
def double_params(draw: st.DrawFn) -> DoubleParams:
    on_draft_side, on_target_side = draw(st.booleans()), draw(st.booleans())
    return DoubleParams(
        max_match_len=draw(st.integers(1, 10)),
        max_phrase_len=draw(st.integers(1, 16)) if on_draft_side or on_target_side else 10,
        draft_retrieval=on_draft_side,
        target_retrieval=on_target_side,
        tiers=tuple(draw(st.lists(st.sampled_from(TIERS), min_size=1, unique=True))),
        serial=draw(st.booleans()),
    )


@st.composite
def speculation_params(draw: st.DrawFn) -> SpeculationParams:
    """Every combination that has a meaning."""
    method, gamma = draw(st.sampled_from(Method)), draw(st.integers(1, 32))
    is_ratio = method.samples and draw(st.booleans())
    may_branch = (method.has_draft_model or method is Method.RETRIEVAL) and not is_ratio
    rows = draw(st.sampled_from(Rows)) if may_branch else Rows.CHAIN
    own: dict[str, Any] = {}
    if method is Method.CARD:
        own["card"] = CardParams(
            draw(st.integers(1, 100)), draw(st.integers(1, 256)), draw(st.booleans()), draw(st.booleans())
        )
    elif method is Method.SAGUARO:
        own["saguaro"] = draw(saguaro_params(gamma, is_ratio))
    elif method is Method.DOUBLE:
        own["double"] = draw(double_params())
    elif method is Method.SPACELIKE:
        own["spacelike"] = SpacelikeParams(draw(st.integers(1, 10)), draw(st.booleans()))
    elif method is Method.BEST_FIRST:
        serial = draw(st.booleans())
        own["best_first"] = BestFirstParams(0 if serial else draw(st.integers(0, 64)), draw(st.integers(1, 8)), serial)
    elif method is Method.OPT_TREE:
        own["opt_tree"] = OptTreeParams(draw(st.integers(1, 64)), draw(st.floats(0, 1)))
    elif method is Method.SEQUOIA:
        own["sequoia"] = SequoiaParams(draw(st.integers(1, 64)))
    takes_turns = any(own[name].serial for name in ("double", "best_first") if name in own)
    retrieves = method.always_retrieves or (method is not Method.OFF and draw(st.booleans()))
    takes_as_pays = method is Method.BEST_FIRST and rows is Rows.TREE
    scope = RetrievalScope.SESSION
    if retrieves:
        scopes = [RetrievalScope.TENANT, RetrievalScope.GLOBAL] if method is Method.SPACELIKE else RetrievalScope
        scope = draw(st.sampled_from(scopes))
        if method not in (Method.DOUBLE, Method.SPACELIKE):
            own["sources"] = tuple(draw(st.lists(st.sampled_from(SOURCES), min_size=1, unique=True)))
    return SpeculationParams(
        method=method,
        num_speculative_tokens=gamma,
        lookahead=draw(st.integers(gamma, 512)) if method.drafts_ahead and not takes_turns else 32,
        min_path_probability=0.0 if takes_as_pays else draw(st.floats(0, 1, exclude_max=True)),
        rows=rows,
        max_rows=draw(st.integers(0, 24)) if rows is Rows.TREE else 0,
        acceptance_rule=AcceptanceRule.RATIO if is_ratio else AcceptanceRule.MATCH,
        shared_noise=not is_ratio and (method is Method.OFF or draw(st.booleans())),
        calibration=method in (Method.OFF, Method.AUTO) or draw(st.booleans()),
        retrieval=retrieves,
        retrieval_scope=scope,
        contribute=scope is not RetrievalScope.SESSION and draw(st.booleans()),
        **own,
    )


@given(speculation_params())
def test_every_parameter_survives_the_wire(params: SpeculationParams) -> None:
    message = types_pb2.SpeculationParams.FromString(speculation_to_proto(params).SerializeToString())
    assert speculation_from_proto(message, DEFAULTS, LIMITS) == params


@given(speculation_params(), speculation_params())
def test_what_a_verifier_has_resolved_leaves_nothing_to_another_server_s_defaults(
    params: SpeculationParams, defaults: SpeculationParams
) -> None:
    message = speculation_to_proto(params)
    once = speculation_from_proto(message, DEFAULTS, SpeculationLimits())
    other = speculation_from_proto(message, defaults, SpeculationLimits())
    takes_turns = params.takes_turns(params.method)
    assert other.lookahead == once.lookahead or not params.method.drafts_ahead or takes_turns
    assert {f: getattr(other, f) for f in other.__slots__ if f != "lookahead"} == {
        f: getattr(once, f) for f in once.__slots__ if f != "lookahead"
    }


def test_a_bound_on_paths_is_refused_where_nodes_are_taken_as_they_pay() -> None:
    message = types_pb2.SpeculationParams(method=types_pb2.METHOD_BEST_FIRST, min_path_probability=0.3)
    with pytest.raises(InvalidParameter, match=r"min_path_probability must be unset or 0 for METHOD_BEST_FIRST"):
        speculation_from_proto(message, DEFAULTS, LIMITS)
    message.rows = types_pb2.ROWS_CHAIN
    assert speculation_from_proto(message, DEFAULTS, LIMITS).min_path_probability == 0.3


def test_the_wire_knows_every_method_and_every_parameter_of_one() -> None:
    assert set(METHODS.values()) == set(Method)
    assert set(METHODS) == set(types_pb2.Method.values()) - {types_pb2.METHOD_UNSPECIFIED}
    for method, number in METHODS_TO_PROTO.items():
        assert types_pb2.Method.Name(number) == f"METHOD_{method.name}"
    oneof = types_pb2.SpeculationParams.DESCRIPTOR.oneofs_by_name["method_params"]
    assert {field.name for field in oneof.fields} == set(PARAMS_FIELDS.values())
    for method, name in PARAMS_FIELDS.items():
        message = types_pb2.SpeculationParams.DESCRIPTOR.fields_by_name[name].message_type
        assert set(PARAMS_OF[method].__slots__) == {field.name for field in message.fields}


@pytest.mark.parametrize(
    "kind", [Rows, AcceptanceRule, FanOut, Fallback, RetrievalScope, Source], ids=lambda k: k.__name__
)
def test_an_enum_s_values_are_those_of_the_wire(kind: Any) -> None:
    wire = getattr(types_pb2, kind.__name__).DESCRIPTOR
    known = {value.name.split("_UNSPECIFIED")[0]: value.number for value in wire.values}
    prefix = next(name for name, number in known.items() if number == 0)
    assert {f"{prefix}_{member.name}": member.value for member in kind} == {n: v for n, v in known.items() if v}


@pytest.mark.parametrize("method", Method)
def test_rows_are_the_method_s_own_unless_the_request_says_otherwise(method: Method) -> None:
    assert (resolved(method=method).rows is Rows.TREE) == (
        method in (Method.BEST_FIRST, Method.OPT_TREE, Method.SEQUOIA, Method.AUTO)
    )
    assert resolved(method=method, rows=types_pb2.ROWS_CHAIN).rows is Rows.CHAIN
    assert resolved(method=method).max_rows == 0, "as many as pay"


def test_the_ratio_rule_s_drafts_do_not_know_the_target_s_noise() -> None:
    ratio = types_pb2.ACCEPTANCE_RULE_RATIO
    assert resolved(method=Method.PEARL).shared_noise
    assert not resolved(method=Method.PEARL, acceptance_rule=ratio).shared_noise
    assert not resolved(method=Method.PEARL, acceptance_rule=ratio, shared_noise=False).shared_noise
    assert not resolved(method=Method.PEARL, shared_noise=False).shared_noise


@pytest.mark.parametrize("default", RetrievalScope)
def test_who_shares_contributes_unless_it_says_otherwise(default: RetrievalScope) -> None:
    defaults = SpeculationParams(retrieval_scope=default)
    params = resolved(defaults, method=Method.RETRIEVAL)
    assert (params.retrieval_scope, params.contribute) == (default, default is not RetrievalScope.SESSION)
    assert not resolved(defaults, method=Method.RETRIEVAL, retrieval_params={"contribute": False}).contribute


def test_spacelike_shares_with_its_tenant_unless_the_request_or_the_server_says_otherwise() -> None:
    params = resolved(method=Method.SPACELIKE)
    assert (params.retrieval_scope, params.contribute, params.retrieves) == (RetrievalScope.TENANT, True, True)
    wider = SpeculationLimits(spacelike_scope=RetrievalScope.GLOBAL)
    assert resolved(limits=wider, method=Method.SPACELIKE).retrieval_scope is RetrievalScope.GLOBAL
    assert resolved(method=Method.RETRIEVAL).retrieval_scope is RetrievalScope.SESSION
    alone = SpeculationLimits(spacelike_scope=RetrievalScope.SESSION)
    with pytest.raises(InvalidParameter, match=r"retrieval_params.scope must be RETRIEVAL_SCOPE_TENANT or"):
        resolved(limits=alone, method=Method.SPACELIKE)
    scope = {"scope": types_pb2.RETRIEVAL_SCOPE_TENANT}
    assert resolved(limits=alone, method=Method.SPACELIKE, retrieval_params=scope).contribute


def test_a_default_beyond_the_server_s_limit_gives_way_to_it() -> None:
    small = SpeculationLimits(max_num_speculative_tokens=3, max_beam_width=2, max_budget=5)
    assert resolved(limits=small, method=Method.CARD).card.beam_width == 2
    assert resolved(limits=small, method=Method.SAGUARO).saguaro.budget == 5
    assert resolved(limits=small, method=Method.PEARL).num_speculative_tokens == 3


SAGUARO, GIVEN, RATIO = Method.SAGUARO, types_pb2.FAN_OUT_GIVEN, types_pb2.ACCEPTANCE_RULE_RATIO
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": 77}, "speculation.method must be one of METHOD_OFF, .*METHOD_SEQUOIA, METHOD_AUTO, got 77"),
    ({"num_speculative_tokens": 33}, r"num_speculative_tokens must be in \[1, 32\], this server's limit, got 33"),
    ({"method": Method.SPECULATIVE, "lookahead": 40}, "lookahead must be unset for a method that does not draft"),
    ({"method": Method.CARD, "lookahead": 513}, "lookahead must be at most 512, this server's limit, got 513"),
    ({"method": Method.CARD, "num_speculative_tokens": 9, "lookahead": 8}, "lookahead must be >= num_speculative"),
    ({"method": Method.DOUBLE, "lookahead": 40, "double": {"serial": True}}, "lookahead must be unset where draft and"),
    (
        {"method": Method.BEST_FIRST, "lookahead": 40, "best_first": {"serial": True}},
        r"lookahead must be unset where draft and target take turns \(best_first.serial\), got 40",
    ),
    (
        {"method": Method.BEST_FIRST, "best_first": {"serial": True, "num_expanded": 3}},
        r"best_first.num_expanded must be unset or 0 where .* take turns \(best_first.serial\), got 3",
    ),
    ({"method": Method.PEARL, "rows": 9}, "rows must be one of ROWS_CHAIN, ROWS_TREE, got 9"),
    ({"method": Method.SPACELIKE, "rows": types_pb2.ROWS_TREE}, "rows must be ROWS_CHAIN for a method without"),
    *(
        ({"method": Method.RETRIEVAL, "retrieval_params": {"sources": [9, number]}}, rf"sources\[1\] must be .*{rule}")
        for number, rule in (
            (types_pb2.SOURCE_UNSPECIFIED, "SOURCE_POOL, got 0"),
            (types_pb2.SOURCE_TARGET, "SOURCE_POOL, got 1"),
            (types_pb2.SOURCE_DRAFT, "SOURCE_POOL, got 2"),
            (types_pb2.SOURCE_RANDOM, "SOURCE_POOL, got 11"),
            (77, "SOURCE_POOL, got 77"),
            (types_pb2.SOURCE_RECYCLED, "each at most once, got SOURCE_RECYCLED"),
        )
    ),
    *(
        ({"method": method, "retrieval_params": {"sources": [9]}}, f"sources must be unset for method {method.value}")
        for method in (Method.DOUBLE, Method.SPACELIKE)
    ),
    ({"method": Method.PEARL, "retrieval_params": {"sources": [9]}}, "retrieval_params must be unset where nothing"),
    ({"method": Method.PEARL, "max_rows": 8}, "max_rows must be unset for rows other than ROWS_TREE, got 8"),
    ({"method": Method.AUTO, "rows": types_pb2.ROWS_CHAIN, "max_rows": 8}, "max_rows must be unset"),
    ({"method": Method.AUTO, "max_rows": 25}, r"max_rows must be in \[1, 24\], this server's limit, got 25"),
    ({"method": Method.AUTO, "max_rows": 0}, r"max_rows must be in \[1, 24\]"),
    ({"method": Method.PEARL, "acceptance_rule": 3}, "acceptance_rule must be one of ACCEPTANCE_RULE_MATCH, .*RATIO"),
    ({"method": Method.CARD, "acceptance_rule": RATIO}, "acceptance_rule must be ACCEPTANCE_RULE_MATCH for a method"),
    ({"method": Method.PEARL, "acceptance_rule": RATIO, "rows": types_pb2.ROWS_TREE}, "rows must be ROWS_CHAIN under"),
    ({"method": Method.PEARL, "acceptance_rule": RATIO, "shared_noise": True}, "shared_noise must be unset or false"),
    ({"method": Method.OFF, "shared_noise": False}, "shared_noise must be unset with method off"),
    ({"method": Method.OFF, "retrieval": True}, "retrieval must be false with method off"),
    *(
        ({"method": method, "retrieval": False}, f"retrieval must be unset or true for method {method.value}")
        for method in Method
        if method.always_retrieves
    ),
    ({"method": Method.PEARL, "retrieval_params": {}}, "retrieval_params must be unset where nothing is retrieved"),
    ({"method": Method.RETRIEVAL, "retrieval_params": {"scope": 9}}, "scope must be one of RETRIEVAL_SCOPE_SESSION"),
    ({"method": Method.SPACELIKE, "retrieval_params": {"scope": 1}}, "scope must be RETRIEVAL_SCOPE_TENANT or"),
    ({"method": Method.PEARL, "card": {}}, "speculation.card must be unset for method pearl"),
    ({"method": Method.CARD, "saguaro": {"budget": 4}}, "speculation.saguaro must be unset for method card"),
    ({"method": Method.CARD, "card": {"beam_width": 101}}, r"card.beam_width must be in \[1, 100\], this server's"),
    ({"method": Method.CARD, "card": {"num_children": 257}}, r"card.num_children must be in \[1, 256\], got 257"),
    ({"method": Method.OFF, "calibration": True}, "calibration must be unset with method off or auto"),
    ({"method": Method.AUTO, "calibration": False}, "calibration must be unset with method off or auto"),
    ({"method": SAGUARO, "saguaro": {"fan_out": 4}}, "saguaro.fan_out must be one of FAN_OUT_GEOMETRIC, "),
    ({"method": SAGUARO, "saguaro": {"fallback": 6}}, "saguaro.fallback must be one of FALLBACK_AUTO, "),
    ({"method": SAGUARO, "saguaro": {"fallback": 3}}, "saguaro.fallback must be another than FALLBACK_RETRIEVAL where"),
    ({"method": SAGUARO, "saguaro": {"budget": 41}}, r"saguaro.budget must be in \[1, 40\], this server's limit"),
    ({"method": SAGUARO, "saguaro": {"exponent": -1}}, r"saguaro.exponent must be in \[0, 10\]"),
    ({"method": SAGUARO, "saguaro": {"fan_out": 2, "exponent": 1}}, "saguaro.exponent must be unset for another"),
    ({"method": SAGUARO, "saguaro": {"fan_outs": [1]}}, "saguaro.fan_outs must be set for FAN_OUT_GIVEN and only"),
    ({"method": SAGUARO, "saguaro": {"fan_out": GIVEN}}, "saguaro.fan_outs must be set for FAN_OUT_GIVEN and only"),
    ({"method": SAGUARO, "saguaro": {"fan_out": GIVEN, "fan_outs": [1], "budget": 4}}, "saguaro.budget must be unset"),
    ({"method": SAGUARO, "saguaro": {"fan_out": GIVEN, "fan_outs": [-1]}}, r"saguaro.fan_outs\[0\] must be in \[0, "),
    ({"method": SAGUARO, "saguaro": {"fan_out": GIVEN, "fan_outs": [5]}}, "saguaro.fan_outs must be at most 40 in all"),
    ({"method": SAGUARO, "saguaro": {"fan_out": GIVEN, "fan_outs": [0] * 10}}, r"at most num_speculative_tokens \+ 1"),
    ({"method": SAGUARO, "saguaro": {"bias": 1}}, "saguaro.bias must be unset under ACCEPTANCE_RULE_MATCH"),
    ({"method": SAGUARO, "acceptance_rule": RATIO, "saguaro": {"bias": 1.5}}, r"saguaro.bias must be in \[0, 1\]"),
    ({"method": SAGUARO, "acceptance_rule": RATIO, "saguaro": {"num_biased": 3}}, "num_biased must be unset where"),
    ({"method": Method.DOUBLE, "double": {"max_match_len": 11}}, r"double.max_match_len must be in \[1, 10\], got 11"),
    ({"method": Method.DOUBLE, "double": {"tiers": [3, 1]}}, r"double.tiers\[1\] must be one of SOURCE_PRIOR, "),
    (
        {
            "method": Method.DOUBLE,
            "double": {"draft_retrieval": False, "target_retrieval": False, "max_phrase_len": 3},
        },
        "max_phrase_len must be un",
    ),
    ({"method": Method.SPACELIKE, "spacelike": {"max_match_len": 0}}, r"spacelike.max_match_len must be in \[1, 10\]"),
    ({"method": Method.OPT_TREE, "opt_tree": {"num_nodes": 65}}, r"opt_tree.num_nodes must be in \[1, 64\], got 65"),
    ({"method": Method.OPT_TREE, "opt_tree": {"min_gain": 1.5}}, r"opt_tree.min_gain must be in \[0, 1\], got 1.5"),
    ({"method": Method.OPT_TREE, "lookahead": 40}, "lookahead must be unset for a method that does not draft"),
    ({"method": Method.OPT_TREE, "sequoia": {}}, "speculation.sequoia must be unset for method opt-tree"),
    ({"method": Method.SEQUOIA, "sequoia": {"num_nodes": 0}}, r"sequoia.num_nodes must be in \[1, 64\], got 0"),
    ({"method": Method.SEQUOIA, "acceptance_rule": RATIO}, "acceptance_rule must be ACCEPTANCE_RULE_MATCH for a"),
    ({"method": Method.BEST_FIRST, "best_first": {"num_expanded": 65}}, r"best_first.num_expanded must be in \[0, 64"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_what_is_out_of_range_or_has_no_meaning_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        resolved(**fields)
    assert caught.value.field.startswith("speculation.")
