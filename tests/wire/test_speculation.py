"""Parameters of the speculation on the wire: they survive a round trip, and meaningless ones are refused by name."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import Any, cast

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from outrider.core.methods import (
    AUTO,
    BEST_FIRST,
    CARD,
    DOUBLE,
    METHODS,
    OFF,
    OPT_TREE,
    PEARL,
    RETRIEVAL,
    SAGUARO,
    SEQUOIA,
    SPACELIKE,
    SPECULATIVE,
)
from outrider.core.methods.card import CardParams
from outrider.core.methods.saguaro import FanOut, SaguaroParams
from outrider.core.params import (
    SOURCES,
    TIERS,
    AcceptanceRule,
    InvalidParameter,
    RetrievalScope,
    Rows,
    Source,
)
from outrider.core.speculation import Fallback, Method, MethodParams, SpeculationLimits, SpeculationParams, Waiting
from outrider.v1 import types_pb2
from outrider.wire.speculation import (
    METHODS_TO_PROTO,
    speculation_from_proto,
    speculation_to_proto,
)

DEFAULTS = SpeculationParams(lookahead=32)
LIMITS = SpeculationLimits(max_num_speculative_tokens=32, max_num_rows=24, max_beam_width=100, max_budget=40)


def resolved(
    defaults: SpeculationParams = DEFAULTS, limits: SpeculationLimits = LIMITS, **fields: Any
) -> SpeculationParams:
    """A server's reading of a request with these fields set."""
    if isinstance(method := fields.get("method"), Method):
        fields["method"] = METHODS_TO_PROTO[method]
    return speculation_from_proto(types_pb2.SpeculationParams(**fields), defaults, limits)


# Fields of methods' own parameters that do not accept every value of their type: bounds, by the limits above.
RANGES: dict[str, tuple[float, float]] = {
    "beam_width": (1, 100),
    "num_children": (1, 8),
    "budget": (1, 40),
    "exponent": (0, 10),
    "bias": (0, 1),
    "num_biased": (0, 64),
    "max_match_len": (1, 10),
    "max_phrase_len": (1, 16),
    "num_expanded": (0, 64),
    "num_nodes": (1, 64),
    "min_gain": (0, 1),
}


def own_values(kind: type[MethodParams]) -> st.SearchStrategy[dict[str, Any]]:
    """Values of every field of a method's own parameters, by the types of the defaults alone."""
    values: dict[str, st.SearchStrategy[Any]] = {}
    for name, default in ((field.name, getattr(kind(), field.name)) for field in fields(cast(Any, kind))):
        if isinstance(default, bool):
            values[name] = st.booleans()
        elif isinstance(default, int):
            values[name] = st.integers(*map(int, RANGES[name]))
        elif isinstance(default, float):
            values[name] = st.floats(*RANGES[name])
        elif isinstance(default, Enum):
            values[name] = st.sampled_from(type(default))
        elif default:
            values[name] = st.lists(st.sampled_from(default), min_size=1, unique=True).map(tuple)
        else:
            values[name] = st.lists(st.integers(0, 1), max_size=2).map(tuple)
    return st.fixed_dictionaries(values)


@st.composite
def own_params(draw: st.DrawFn, kind: type[MethodParams], is_ratio: bool) -> MethodParams:
    """A method's own parameters: those that have a meaning are drawn, the others are the defaults."""
    values = draw(own_values(kind))
    try:
        own = kind(**values)
    except InvalidParameter:
        reject()
    meaningless = {name for name, _ in own.meaningless(values.keys(), is_ratio=is_ratio)}
    return kind(**{name: value for name, value in values.items() if name not in meaningless})


@st.composite
def speculation_params(draw: st.DrawFn) -> SpeculationParams:
    """Every meaningful combination."""
    method, gamma = draw(st.sampled_from(list(METHODS.values()))), draw(st.integers(1, 32))
    is_ratio = method.samples and draw(st.booleans())
    may_branch = method.may_branch and not is_ratio
    rows = draw(st.sampled_from(Rows)) if may_branch else Rows.CHAIN
    own = () if method.parameters is None else (draw(own_params(method.parameters, is_ratio)),)
    takes_turns = any(getattr(each, "serial", False) for each in own)
    retrieves = method.always_retrieves or (not method.is_off and draw(st.booleans()))
    scope, sources, remote = RetrievalScope.SESSION, TIERS, False
    if retrieves:
        scopes = [RetrievalScope.TENANT, RetrievalScope.GLOBAL] if method.needs_datastore else RetrievalScope
        scope = draw(st.sampled_from(scopes))
        if not method.plans:
            sources = tuple(draw(st.lists(st.sampled_from(SOURCES), min_size=1, unique=True)))
            remote = not set(sources).isdisjoint(TIERS) and draw(st.booleans())
    values: dict[str, Any] = {
        "method": method,
        "num_speculative_tokens": gamma,
        "lookahead": draw(st.integers(gamma, 512)) if method.drafts_ahead and not takes_turns else 32,
        "min_path_probability": draw(st.floats(0, 1, exclude_max=True)) if method.bounds_paths(rows) else 0.0,
        "rows": rows,
        "max_rows": draw(st.integers(0, 24)) if rows is Rows.TREE else 0,
        "acceptance_rule": AcceptanceRule.RATIO if is_ratio else AcceptanceRule.MATCH,
        "shared_noise": not is_ratio and (method.is_off or draw(st.booleans())),
        "calibration": method.is_off or method.is_auto or draw(st.booleans()),
        "retrieval": retrieves,
        "retrieval_scope": scope,
        "contribute": scope is not RetrievalScope.SESSION and draw(st.booleans()),
        "sources": sources,
        "remote": remote,
        "own": own,
    }
    try:
        return SpeculationParams(**values)
    except InvalidParameter:
        reject()


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
    takes_turns = params.method.waits(params) is Waiting.IN_TURNS
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
    assert {f"METHOD_{method.field.upper()}" for method in METHODS.values()} == set(types_pb2.Method.keys()) - {
        "METHOD_UNSPECIFIED"
    }
    messages = types_pb2.SpeculationParams.DESCRIPTOR.oneofs_by_name["method_params"].fields
    known = {method.field: method.parameters for method in METHODS.values() if method.parameters is not None}
    assert {message.name for message in messages} == set(known)
    for message in messages:
        parameters = fields(cast(Any, known[message.name]))
        assert {field.name for field in parameters} == {field.name for field in message.message_type.fields}
        plain = [field for field in message.message_type.fields if not field.is_repeated and field.enum_type is None]
        assert all(field.has_presence for field in plain), "unset and 0 must differ"


@pytest.mark.parametrize(
    "kind", [Rows, AcceptanceRule, FanOut, Fallback, RetrievalScope, Source], ids=lambda k: k.__name__
)
def test_an_enum_s_values_are_those_of_the_wire(kind: Any) -> None:
    wire = getattr(types_pb2, kind.__name__).DESCRIPTOR
    known = {value.name.split("_UNSPECIFIED")[0]: value.number for value in wire.values}
    prefix = next(name for name, number in known.items() if number == 0)
    assert {f"{prefix}_{member.name}": member.value for member in kind} == {n: v for n, v in known.items() if v}


@pytest.mark.parametrize("method", METHODS.values())
def test_rows_are_the_method_s_own_unless_the_request_says_otherwise(method: Method) -> None:
    assert resolved(method=method).rows is method.rows
    assert resolved(method=method, rows=types_pb2.ROWS_CHAIN).rows is Rows.CHAIN
    assert resolved(method=method).max_rows == 0, "as many as pay"


def test_the_ratio_rule_s_drafts_do_not_know_the_target_s_noise() -> None:
    ratio = types_pb2.ACCEPTANCE_RULE_RATIO
    assert resolved(method=PEARL).shared_noise
    assert not resolved(method=PEARL, acceptance_rule=ratio).shared_noise
    assert not resolved(method=PEARL, acceptance_rule=ratio, shared_noise=False).shared_noise
    assert not resolved(method=PEARL, shared_noise=False).shared_noise


@pytest.mark.parametrize("default", RetrievalScope)
def test_who_shares_contributes_unless_it_says_otherwise(default: RetrievalScope) -> None:
    defaults = SpeculationParams(retrieval_scope=default)
    params = resolved(defaults, method=RETRIEVAL)
    assert (params.retrieval_scope, params.contribute) == (default, default is not RetrievalScope.SESSION)
    assert not resolved(defaults, method=RETRIEVAL, retrieval_params={"contribute": False}).contribute


def test_spacelike_shares_with_its_tenant_unless_the_request_or_the_server_says_otherwise() -> None:
    params = resolved(method=SPACELIKE)
    assert (params.retrieval_scope, params.contribute, params.retrieves) == (RetrievalScope.TENANT, True, True)
    wider = SpeculationLimits(spacelike_scope=RetrievalScope.GLOBAL)
    assert resolved(limits=wider, method=SPACELIKE).retrieval_scope is RetrievalScope.GLOBAL
    assert resolved(method=RETRIEVAL).retrieval_scope is RetrievalScope.SESSION
    alone = SpeculationLimits(spacelike_scope=RetrievalScope.SESSION)
    with pytest.raises(InvalidParameter, match=r"retrieval_params.scope must be RETRIEVAL_SCOPE_TENANT or"):
        resolved(limits=alone, method=SPACELIKE)
    scope = {"scope": types_pb2.RETRIEVAL_SCOPE_TENANT}
    assert resolved(limits=alone, method=SPACELIKE, retrieval_params=scope).contribute


def test_a_default_beyond_the_server_s_limit_gives_way_to_it() -> None:
    small = SpeculationLimits(max_num_speculative_tokens=3, max_beam_width=2, max_budget=5)
    assert resolved(limits=small, method=CARD).of(CardParams).beam_width == 2
    assert resolved(limits=small, method=SAGUARO).of(SaguaroParams).budget == 5
    assert resolved(limits=small, method=PEARL).num_speculative_tokens == 3


GIVEN, RATIO = types_pb2.FAN_OUT_GIVEN, types_pb2.ACCEPTANCE_RULE_RATIO
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": 77}, "speculation.method must be one of METHOD_OFF, .*METHOD_AUTO, got 77"),
    ({"num_speculative_tokens": 33}, r"num_speculative_tokens must be in \[1, 32\], this server's limit, got 33"),
    ({"method": SPECULATIVE, "lookahead": 40}, "lookahead must be unset for a method that does not draft"),
    ({"method": CARD, "lookahead": 513}, "lookahead must be at most 512, this server's limit, got 513"),
    ({"method": CARD, "num_speculative_tokens": 9, "lookahead": 8}, "lookahead must be >= num_speculative"),
    ({"method": DOUBLE, "lookahead": 40, "double": {"serial": True}}, "lookahead must be unset where draft and"),
    (
        {"method": BEST_FIRST, "lookahead": 40, "best_first": {"serial": True}},
        r"lookahead must be unset where draft and target take turns \(best_first.serial\), got 40",
    ),
    (
        {"method": BEST_FIRST, "best_first": {"serial": True, "num_expanded": 3}},
        r"best_first.num_expanded must be unset or 0 where .* take turns \(best_first.serial\), got 3",
    ),
    ({"method": PEARL, "rows": 9}, "rows must be one of ROWS_CHAIN, ROWS_TREE, got 9"),
    ({"method": SPACELIKE, "rows": types_pb2.ROWS_TREE}, "rows must be ROWS_CHAIN for a method without"),
    *(
        ({"method": RETRIEVAL, "retrieval_params": {"sources": [9, number]}}, rf"sources\[1\] must be .*{rule}")
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
        ({"method": method, "retrieval_params": {"sources": [9]}}, f"sources must be unset for method {method.name}")
        for method in (DOUBLE, SPACELIKE)
    ),
    ({"method": PEARL, "retrieval_params": {"sources": [9]}}, "retrieval_params must be unset where nothing"),
    ({"method": OFF, "retrieval_params": {"remote": True}}, "retrieval_params must be unset where nothing"),
    ({"method": DOUBLE, "retrieval_params": {"remote": True}}, "remote must be unset or false for method double"),
    ({"method": PEARL, "max_rows": 8}, "max_rows must be unset for rows other than ROWS_TREE, got 8"),
    ({"method": AUTO, "rows": types_pb2.ROWS_CHAIN, "max_rows": 8}, "max_rows must be unset"),
    ({"method": AUTO, "max_rows": 25}, r"max_rows must be in \[1, 24\], this server's limit, got 25"),
    ({"method": AUTO, "max_rows": 0}, r"max_rows must be in \[1, 24\]"),
    ({"method": PEARL, "acceptance_rule": 3}, "acceptance_rule must be one of ACCEPTANCE_RULE_MATCH, .*RATIO"),
    ({"method": CARD, "acceptance_rule": RATIO}, "acceptance_rule must be ACCEPTANCE_RULE_MATCH for a method"),
    ({"method": PEARL, "acceptance_rule": RATIO, "rows": types_pb2.ROWS_TREE}, "rows must be ROWS_CHAIN under"),
    ({"method": PEARL, "acceptance_rule": RATIO, "shared_noise": True}, "shared_noise must be unset or false"),
    ({"method": OFF, "shared_noise": False}, "shared_noise must be unset with method off"),
    ({"method": OFF, "retrieval": True}, "retrieval must be false with method off"),
    *(
        ({"method": method, "retrieval": False}, f"retrieval must be unset or true for method {method.name}")
        for method in METHODS.values()
        if method.always_retrieves
    ),
    ({"method": PEARL, "retrieval_params": {}}, "retrieval_params must be unset where nothing is retrieved"),
    ({"method": RETRIEVAL, "retrieval_params": {"scope": 9}}, "scope must be one of RETRIEVAL_SCOPE_SESSION"),
    ({"method": SPACELIKE, "retrieval_params": {"scope": 1}}, "scope must be RETRIEVAL_SCOPE_TENANT or"),
    ({"method": PEARL, "card": {}}, "speculation.card must be unset for method pearl"),
    ({"method": CARD, "saguaro": {"budget": 4}}, "speculation.saguaro must be unset for method card"),
    ({"method": CARD, "card": {"beam_width": 101}}, r"card.beam_width must be in \[1, 100\], this server's"),
    ({"method": CARD, "card": {"num_children": 257}}, r"card.num_children must be in \[1, 256\], got 257"),
    ({"method": OFF, "calibration": True}, "calibration must be unset with method off or auto"),
    ({"method": AUTO, "calibration": False}, "calibration must be unset with method off or auto"),
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
    ({"method": DOUBLE, "double": {"max_match_len": 11}}, r"double.max_match_len must be in \[1, 10\], got 11"),
    ({"method": DOUBLE, "double": {"tiers": [3, 1]}}, r"double.tiers\[1\] must be one of SOURCE_PRIOR, "),
    (
        {
            "method": DOUBLE,
            "double": {"draft_retrieval": False, "target_retrieval": False, "max_phrase_len": 3},
        },
        "max_phrase_len must be un",
    ),
    ({"method": SPACELIKE, "spacelike": {"max_match_len": 0}}, r"spacelike.max_match_len must be in \[1, 10\]"),
    ({"method": OPT_TREE, "opt_tree": {"num_nodes": 65}}, r"opt_tree.num_nodes must be in \[1, 64\], got 65"),
    ({"method": OPT_TREE, "opt_tree": {"min_gain": 1.5}}, r"opt_tree.min_gain must be in \[0, 1\], got 1.5"),
    ({"method": OPT_TREE, "lookahead": 40}, "lookahead must be unset for a method that does not draft"),
    ({"method": OPT_TREE, "sequoia": {}}, "speculation.sequoia must be unset for method opt-tree"),
    ({"method": SEQUOIA, "sequoia": {"num_nodes": 0}}, r"sequoia.num_nodes must be in \[1, 64\], got 0"),
    ({"method": SEQUOIA, "acceptance_rule": RATIO}, "acceptance_rule must be ACCEPTANCE_RULE_MATCH for a"),
    ({"method": BEST_FIRST, "best_first": {"num_expanded": 65}}, r"best_first.num_expanded must be in \[0, 64"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_what_is_out_of_range_or_has_no_meaning_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        resolved(**fields)
    assert caught.value.field.startswith("speculation.")
