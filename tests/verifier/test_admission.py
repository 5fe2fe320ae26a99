"""From a request to a session's spec: which method serves it if a peer is missing."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError

from outrider.core.auto.strategies import opening_params, params_of, strategies_of
from outrider.core.methods import (
    AUTO,
    BEST_FIRST,
    DOUBLE,
    METHODS,
    OFF,
    PEARL,
    RETRIEVAL,
    SAGUARO,
    SPACELIKE,
    growth_policy,
)
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.methods.double import DoubleParams
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.params import TIERS, AcceptanceRule, InvalidParameter, RetrievalScope, Rows, Source
from outrider.core.retrieval.sides import draft_plan
from outrider.core.session import SessionSpec
from outrider.core.speculation import Method, SpeculationLimits, SpeculationParams, Waiting
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.v1 import types_pb2, verifier_pb2
from outrider.verifier.admission import Limits, prompt_token_ids, session_specs
from outrider.verifier.service import limits_of
from outrider.verifier.settings import VerifierSettings
from outrider.wire.errors import FailedPrecondition, InvalidArgument, OutOfRange
from outrider.wire.speculation import METHODS_TO_PROTO, speculation_from_proto, speculation_to_proto
from tests.support.services import target_model

SHARING = SpeculationParams(retrieval_scope=RetrievalScope.TENANT)


def admitted(
    method: Method,
    *,
    defaults: SpeculationParams = SHARING,
    has_speculator: bool = False,
    has_datastore: bool = False,
    brings_drafts: bool = False,
    shares_gpu: bool = False,
    temperature: float = 1.0,
    **fields: Any,
) -> SessionSpec:
    request = verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text="a"),
        sampling=types_pb2.SamplingParams(temperature=temperature),
        speculation=types_pb2.SpeculationParams(method=METHODS_TO_PROTO[method], **fields),
    )
    model = target_model()
    limits = Limits(defaults, SpeculationLimits(), has_speculator, has_datastore, shares_gpu=shares_gpu)
    codec, grammars = TextCodec(model.tokenizer), Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    (spec,) = session_specs(request, model, codec, limits, grammars, brings_drafts=brings_drafts)
    assert spec is not None
    return spec


@pytest.mark.parametrize("has_speculator", [False, True])
@pytest.mark.parametrize("has_datastore", [False, True])
@pytest.mark.parametrize("method", METHODS.values())
def test_a_method_is_served_or_its_missing_peer_is_named(
    method: Method, has_speculator: bool, has_datastore: bool
) -> None:
    peers = {"has_speculator": has_speculator, "has_datastore": has_datastore}
    if method.needs_draft_model and not has_speculator:
        with pytest.raises(FailedPrecondition, match=f"method {method.name} needs a speculator"):
            admitted(method, **peers)
    elif method is SPACELIKE and not has_datastore:
        with pytest.raises(FailedPrecondition, match="method spacelike needs a datastore"):
            admitted(method, **peers)
    else:
        spec = admitted(method, **peers)
        assert (spec.speculation.method, spec.requested_method) == (method, None)


@pytest.mark.parametrize("method", [method for method in METHODS.values() if method.needs_draft_model])
def test_who_brings_the_drafts_needs_no_speculator(method: Method) -> None:
    spec = admitted(method, brings_drafts=True)
    assert (spec.speculation.method, spec.requested_method) == (method, None)


def test_a_fallback_shares_as_the_request_says_or_else_as_the_server_does() -> None:
    spec = admitted(PEARL, has_datastore=True, allow_fallback=True, num_speculative_tokens=5)
    params = spec.speculation
    assert (params.method, spec.requested_method) == (RETRIEVAL, PEARL)
    assert (params.retrieval_scope, params.contribute) == (RetrievalScope.TENANT, True)
    assert params.num_speculative_tokens == 5
    said = {"scope": types_pb2.RETRIEVAL_SCOPE_GLOBAL, "contribute": False}
    spec = admitted(DOUBLE, has_datastore=True, allow_fallback=True, retrieval_params=said)
    assert (spec.speculation.retrieval_scope, spec.speculation.contribute) == (RetrievalScope.GLOBAL, False)


def test_a_fallback_looks_where_the_request_says() -> None:
    asked = {"sources": [types_pb2.SOURCE_POOL, types_pb2.SOURCE_PRIOR]}
    spec = admitted(PEARL, has_datastore=True, allow_fallback=True, retrieval=True, retrieval_params=asked)
    assert spec.speculation.sources == (Source.POOL, Source.PRIOR)
    assert admitted(PEARL, allow_fallback=True, retrieval=True, retrieval_params=asked).speculation.sources == TIERS
    remote = admitted(PEARL, has_datastore=True, allow_fallback=True, retrieval=True, retrieval_params={"remote": True})
    assert (remote.speculation.method, remote.speculation.remote) == (RETRIEVAL, True)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("sources", [(Source.POOL, Source.RECYCLED), (Source.RECYCLED, Source.RING, Source.PRIOR)])
def test_what_auto_asks_a_speculator_for_names_the_tiers_alone(sources: tuple[Source, ...], is_remote: bool) -> None:
    tiers = tuple(source for source in sources if source in TIERS)
    is_remote = is_remote and bool(tiers)
    asked = {"sources": [source.value for source in sources], "remote": is_remote}
    spec = admitted(AUTO, has_speculator=True, has_datastore=True, retrieval_params=asked)
    assert (spec.speculation.sources, spec.speculation.remote) == (sources, is_remote)
    for way in strategies_of(spec.speculation):
        if way.method.has_draft_model:
            params = params_of(way, spec.speculation)
            message = speculation_to_proto(params)
            told = speculation_from_proto(message, SpeculationParams(), SpeculationLimits())
            plan = draft_plan(told)
            assert told.method is way.method
            assert plan == draft_plan(params)
            assert (plan is not None) == (bool(tiers) and way.retrieval and not is_remote)
            assert plan is None or set(plan.sources) == set(tiers)


def test_a_fallback_has_neither_rows_nor_rule_of_the_method_it_replaces() -> None:
    params = admitted(BEST_FIRST, allow_fallback=True, max_rows=7, shared_noise=False).speculation
    assert (params.method, params.rows, params.retrieves) == (OFF, Rows.CHAIN, False)
    ratio = types_pb2.ACCEPTANCE_RULE_RATIO
    params = admitted(PEARL, has_datastore=True, allow_fallback=True, acceptance_rule=ratio).speculation
    assert (params.acceptance_rule, params.shared_noise) == (AcceptanceRule.MATCH, True)


@pytest.mark.parametrize(("temperature", "rule"), [(0.0, AcceptanceRule.MATCH), (0.5, AcceptanceRule.RATIO)])
def test_where_nothing_is_drawn_the_match_rule_stands_in_for_the_ratio_rule(
    temperature: float, rule: AcceptanceRule
) -> None:
    biased = types_pb2.SaguaroParams(bias=0.5)
    ratio = types_pb2.ACCEPTANCE_RULE_RATIO
    spec = admitted(SAGUARO, has_speculator=True, temperature=temperature, acceptance_rule=ratio, saguaro=biased)
    assert spec.speculation.acceptance_rule is rule
    assert spec.speculation.of(SaguaroParams).bias == (0.5 if rule is AcceptanceRule.RATIO else 1.0)


def test_the_server_s_settings_become_its_limits_and_defaults() -> None:
    limits = limits_of(VerifierSettings(speculator="127.0.0.1:1", max_num_rows=9, max_beam_width=8, max_budget=7))
    assert (limits.has_speculator, limits.has_datastore) == (True, False)
    allowed = limits.speculation
    assert (allowed.max_num_rows, allowed.max_beam_width, allowed.max_budget) == (9, 8, 7)
    assert limits.defaults.retrieval_scope is RetrievalScope.SESSION
    assert allowed.spacelike_scope is RetrievalScope.TENANT
    said = limits_of(VerifierSettings(retrieval_scope="session", default_method="best-first"))
    assert said.speculation.spacelike_scope is RetrievalScope.SESSION, "who says so shares with nobody"
    assert said.defaults.method is BEST_FIRST


@pytest.mark.parametrize(
    ("drafter", "device", "draft_device", "shares_gpu"),
    [
        ("in-process", "cuda:0", "cuda:0", True),
        ("in-process", "cuda", "cuda:0", True),
        ("in-process", "cuda:0", "cuda:1", False),
        ("in-process", "cpu", "cpu", False),
        ("speculator", "cuda:0", "", False),
    ],
)
def test_a_draft_model_in_the_verifier_s_process_may_share_its_gpu(
    drafter: str, device: str, draft_device: str, *, shares_gpu: bool
) -> None:
    draft = {"draft_device": draft_device, "draft_model": "demo/draft"} if drafter == "in-process" else {}
    settings = VerifierSettings.model_validate({"drafter": drafter, "device": device, **draft})
    assert limits_of(settings).shares_gpu == shares_gpu


def test_where_both_models_share_a_gpu_all_that_auto_drafts_is_waited_for() -> None:
    spec = admitted(AUTO, has_speculator=True, shares_gpu=True)
    methods = [strategy.method for strategy in strategies_of(spec.speculation, shares_gpu=spec.shares_gpu)]
    assert methods == [BEST_FIRST, DOUBLE, RETRIEVAL, OFF]
    drafted = [params_of(strategy, spec.speculation) for strategy in strategies_of(spec.speculation, shares_gpu=True)]
    waiting = [params.method.waits(params) for params in drafted if params.method.has_draft_model]
    waiting += [method.waits(spec.speculation) for method in methods[:2]]
    assert set(waiting) == {Waiting.IN_TURNS}
    assert all(growth_policy(params) for params in drafted if params.method.has_draft_model)
    assert opening_params(spec.speculation, shares_gpu=True).of(BestFirstParams).serial
    elsewhere = admitted(AUTO, has_speculator=True, shares_gpu=True, brings_drafts=True)
    assert (elsewhere.shares_gpu, elsewhere.speculation.of(DoubleParams).serial) == (False, False)
    assert not elsewhere.speculation.of(BestFirstParams).serial


@pytest.mark.parametrize(
    ("asked", "serial"),
    [
        ({}, True),
        ({"best_first": {"num_children": 3}}, True),
        ({"best_first": {"serial": True}}, True),
        # Only a tree that grows while the target works has these.
        ({"best_first": {"serial": False}}, False),
        ({"best_first": {"num_expanded": 4}}, False),
        ({"lookahead": 80}, False),
    ],
)
def test_on_a_gpu_that_both_models_share_best_first_takes_turns_unless_the_request_says_otherwise(
    asked: dict[str, Any], *, serial: bool
) -> None:
    own = admitted(BEST_FIRST, has_speculator=True, shares_gpu=True, **asked).speculation.of(BestFirstParams)
    assert own.serial == serial
    assert own.num_children == asked.get("best_first", {}).get("num_children", 8)
    elsewhere = admitted(BEST_FIRST, has_speculator=True, **asked).speculation.of(BestFirstParams)
    assert elsewhere.serial == (asked.get("best_first", {}).get("serial", False))


@pytest.mark.parametrize("min_path_probability", [0.0, 0.2])
def test_what_auto_opens_a_speculator_with_is_accepted_on_the_wire(min_path_probability: float) -> None:
    defaults = SpeculationParams(min_path_probability=min_path_probability)
    spec = admitted(AUTO, defaults=defaults, has_speculator=True)
    for way in strategies_of(spec.speculation):
        if way.method.has_draft_model:
            message = speculation_to_proto(params_of(way, spec.speculation))
            assert speculation_from_proto(message, SpeculationParams(), SpeculationLimits()).method is way.method


def test_a_chat_that_its_template_refuses_is_invalid() -> None:
    class Refusing:
        chat_template = "{{ raise_exception('roles must alternate') }}"
        backend_tokenizer = target_model().tokenizer.backend_tokenizer

        def get_chat_template(self, **_: Any) -> str:
            return self.chat_template

        def apply_chat_template(self, *_: Any, **__: Any) -> str:
            raise TemplateError("roles must alternate")

    prompt = verifier_pb2.Prompt(chat={"messages": [{"role": "nobody", "content": "?"}]})
    with pytest.raises(InvalidArgument, match=r"prompt\.chat\.messages must be a chat .*: roles must alternate"):
        prompt_token_ids(prompt, target_model(), TextCodec(Refusing()))


def specs_of(**fields: Any) -> list[SessionSpec | None]:
    model, limits = target_model(), Limits(SHARING, SpeculationLimits(), False, False)
    codec, grammars = TextCodec(model.tokenizer), Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    request = verifier_pb2.GenerateRequest(prompt=verifier_pb2.Prompt(text="a"), **fields)
    return session_specs(request, model, codec, limits, grammars, brings_drafts=False)


@pytest.mark.parametrize("n", [1, 3])
def test_a_wish_for_more_tokens_than_there_is_room_for_is_clamped_to_the_room(n: int) -> None:
    room = specs_of(n=n)[0]
    wish = types_pb2.SamplingParams(max_tokens=10**6, min_tokens=10**5)
    with pytest.raises(OutOfRange, match=r"sampling.max_tokens must be at most"):
        specs_of(n=n, sampling=wish)
    specs = specs_of(n=n, sampling=wish, clamp_max_tokens=True)
    assert room is not None
    assert [spec.max_tokens for spec in specs if spec is not None] == [room.max_tokens] * n
    (small,) = specs_of(sampling=types_pb2.SamplingParams(max_tokens=7), clamp_max_tokens=True)
    assert small is not None
    assert small.max_tokens == 7


def test_a_prompt_that_leaves_no_room_is_refused_where_max_tokens_is_a_wish_too() -> None:
    long = verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=[1] * target_model().max_context_len))
    with pytest.raises(OutOfRange, match="prompt must be shorter"):
        specs_of_prompt(long)
    with pytest.raises(InvalidParameter, match=r"sampling.max_tokens must be >= 1"):
        specs_of(sampling=types_pb2.SamplingParams(max_tokens=0), clamp_max_tokens=True)


def specs_of_prompt(prompt: verifier_pb2.Prompt) -> None:
    model, limits = target_model(), Limits(SHARING, SpeculationLimits(), False, False)
    codec, grammars = TextCodec(model.tokenizer), Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    request = verifier_pb2.GenerateRequest(prompt=prompt, clamp_max_tokens=True)
    session_specs(request, model, codec, limits, grammars, brings_drafts=False)
