"""Good messages of every RPC, from which the mutations start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.v1 import datastore_pb2 as data
from outrider.v1 import speculator_pb2 as spec
from outrider.v1 import types_pb2 as types
from outrider.v1 import verifier_pb2 as verify
from outrider.wire.convert import PROTOCOL_VERSION

DRAFTED = (types.METHOD_SPECULATIVE, types.METHOD_PEARL, types.METHOD_CARD, types.METHOD_SAGUARO, types.METHOD_DOUBLE)
METHODS = (*DRAFTED, types.METHOD_BEST_FIRST, types.METHOD_OPT_TREE, types.METHOD_SEQUOIA)
NUM_PROMPT_TOKENS = 10
MAX_TOKENS = 6
"""Maximum tokens of a generation: generating is not what is tested here."""


@dataclass(frozen=True, slots=True)
class Rpc:
    """An RPC, and how to call it."""

    name: str
    method: str
    kind: str
    """gRPC's name of its kind: unary_unary, unary_stream, ..."""
    servers: tuple[str, ...]
    """Names of the services that serve it."""
    first: Callable[[Random], Message]
    """A good request, or the first of a stream."""
    later: Callable[[Random, int], Message] | None = None
    """A good further request of a stream, by its number from 1 on."""
    is_endless: bool = False
    """True if a good call may never end by itself."""
    deadline_s: float = 20.0
    num_at_a_time: int = 12
    needs: str | None = None
    """The name of the RPC that creates what a good call of this one needs."""

    @property
    def is_stream(self) -> bool:
        """True if a call has several requests."""
        return self.kind.startswith("stream")


def rpcs(model: types.ModelInfo) -> dict[str, Rpc]:
    """Every RPC by name. `model` is the target, as the verifier describes it."""
    found = (*_verifier(model), *_speculator(model), *_datastore(model), *_common())
    return {rpc.name: rpc for rpc in found}


def tamed(message: Any) -> bool:
    """Shortens a generation that would be long. Returns True if it did."""
    request = message.open.request if isinstance(message, verify.CollaborateRequest) else message
    if not isinstance(request, verify.GenerateRequest):
        return False
    is_opening = message is request or message.WhichOneof("event") == "open"
    if not is_opening or (request.sampling.HasField("max_tokens") and request.sampling.max_tokens <= MAX_TOKENS):
        return False
    request.sampling.max_tokens = MAX_TOKENS
    return True


# The verifier.


def _verifier(model: types.ModelInfo) -> Iterator[Rpc]:
    def rpc(name: str, kind: str, first: Callable[[Random], Message], **rest: Any) -> Rpc:
        method = f"/outrider.v1.VerifierService/{name}"
        return Rpc(f"verifier/{name}", method, kind, ("verifier",), first, **rest)

    def opening(random: Random) -> Message:
        request = _generation(random, METHODS)
        return verify.CollaborateRequest(open={"handshake": _handshake(model), "request": request})

    def draft(random: Random, number: int) -> Message:
        return verify.CollaborateRequest(draft=_draft(random, number))

    yield rpc("Generate", "unary_stream", lambda r: _generation(r, range(11)), is_endless=True, deadline_s=2.0)
    yield rpc("Collaborate", "stream_stream", opening, later=draft, is_endless=True, deadline_s=2.0)
    yield rpc("Tokenize", "unary_unary", lambda r: verify.TokenizeRequest(prompt=_prompt(r)))
    yield rpc(
        "Detokenize",
        "unary_unary",
        lambda r: verify.DetokenizeRequest(token_ids=_tokens(r, 12), wants_token_bytes=True),
    )
    yield rpc("GetInfo", "unary_unary", lambda r: verify.GetInfoRequest())


def _generation(random: Random, methods: Any) -> verify.GenerateRequest:
    request = verify.GenerateRequest(
        prompt=_prompt(random), sampling=_sampling(random), speculation=_speculation(random, random.choice(methods))
    )
    request.sampling.max_tokens = random.randint(1, MAX_TOKENS)
    if random.random() < 0.3:
        request.structured_outputs.CopyFrom(types.StructuredOutputs(**random.choice(STRUCTURES)))
    if random.random() < 0.3:
        request.sampling.stop.extend(("\n\n", "self"))
        request.sampling.bad_words.append("return")
    if random.random() < 0.3:
        request.report.CopyFrom(
            verify.ReportParams(logprobs=2, prompt_logprobs=0, echo=True, rounds=True, text_ends=True, trees=True)
        )
    if request.speculation.retrieval or request.speculation.method == types.METHOD_RETRIEVAL:
        request.prediction = random.choice(("", "def sub(a, b):\n    return a - b\n"))
    if random.random() < 0.1:
        request.clamp_max_tokens = True
    if random.random() < 0.1:
        request.truncate_prompt_tokens = random.randint(1, 20)
    return request


def _prompt(random: Random) -> verify.Prompt:
    match random.randrange(4):
        case 0:
            return verify.Prompt(text="def add(a, b):\n    return ")
        case 1:
            call = {"id": "c1", "name": "docs", "arguments": '{"of": "list"}'}
            messages = [
                {"role": "user", "content": "What is a list?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "content": "A sequence.", "tool_call_id": "c1"},
                {"role": "assistant", "content": "It is"},
            ]
            return verify.Prompt(chat={"messages": messages, "continue_final_message": random.random() < 0.5})
    return verify.Prompt(token_ids={"token_ids": _tokens(random, NUM_PROMPT_TOKENS)})


def _tokens(random: Random, length: int) -> list[int]:
    return [random.randrange(2048) for _ in range(length)]


def _sampling(random: Random) -> types.SamplingParams:
    sampling = types.SamplingParams(seed=random.randrange(2**64), temperature=random.choice((0.0, 0.7, 1.0)))
    if random.random() < 0.3:
        sampling.top_k, sampling.top_p = random.choice((0, 1, 40)), random.choice((0.5, 0.9, 1.0))
        sampling.min_p = random.choice((0.0, 0.1))
    if random.random() < 0.3:
        sampling.repetition_penalty, sampling.presence_penalty = random.uniform(0.5, 2), random.uniform(-2, 2)
        sampling.frequency_penalty, sampling.min_tokens = random.uniform(-2, 2), random.randint(0, 1)
        sampling.logit_bias.update({token_id: random.uniform(-100, 100) for token_id in _tokens(random, 3)})
        sampling.bad_words_token_ids.add(token_ids=_tokens(random, 2))
    return sampling


STRUCTURES: tuple[dict[str, Any], ...] = (
    {"json": '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'},
    {"json_object": True},
    {"regex": "[a-z]+( [0-9]{2})*"},
    {"grammar": 'start: "x" ("," start)?'},
    {"choice": {"choices": ["yes", "no", "perhaps"]}},
)


def _speculation(random: Random, method: int) -> types.SpeculationParams:
    params = types.SpeculationParams(method=method)  # type: ignore[arg-type]  # a number is a member
    if random.random() < 0.5:
        params.num_speculative_tokens = random.randint(1, 12)
    if method == types.METHOD_CARD:
        params.card.beam_width, params.card.num_children = random.randint(1, 32), random.randint(1, 8)
    elif method == types.METHOD_SAGUARO:
        params.saguaro.budget, params.saguaro.fan_out = random.randint(1, 32), random.randint(0, 2)  # type: ignore[assignment]
    elif method == types.METHOD_DOUBLE:
        params.double.max_phrase_len = random.randint(1, 16)
    elif method == types.METHOD_BEST_FIRST:
        params.best_first.num_expanded = random.randint(0, 16)
    elif method == types.METHOD_OPT_TREE:
        params.opt_tree.num_nodes, params.opt_tree.min_gain = random.randint(1, 64), random.random()
    elif method == types.METHOD_SEQUOIA:
        params.sequoia.num_nodes = random.randint(1, 64)
    if method in (*DRAFTED[:2], *DRAFTED[3:]) and random.random() < 0.4:
        params.acceptance_rule = types.ACCEPTANCE_RULE_RATIO
    return params


def _handshake(model: types.ModelInfo) -> types.Handshake:
    return types.Handshake(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_hash=model.tokenizer_hash,
        vocab_size=model.vocab_size,
        model_id="mutated",
    )


def _draft(random: Random, number: int) -> types.Draft:
    num_nodes = random.randint(1, 12)
    draft = types.Draft(
        base_len=NUM_PROMPT_TOKENS + random.randrange(MAX_TOKENS),
        first_node_id=20 * number,
        parent_offsets=[random.randrange(min(index, 3) + 1) for index in range(num_nodes)],
        token_ids=_tokens(random, num_nodes),
        costs=[random.randrange(200) for _ in range(num_nodes)],
        source=types.SOURCE_DRAFT,
    )
    for token_id in draft.token_ids if random.random() < 0.4 else ():
        draft.q_rows.add(token_ids=[token_id, (token_id + 1) % 2048], weights=[1 + random.randrange(1000), 1])
    return draft


# The speculator.


def _speculator(model: types.ModelInfo) -> Iterator[Rpc]:
    def opening(random: Random, number: int) -> spec.SessionRequest:
        return spec.SessionRequest(
            number=number,
            open=spec.SpeculateOpen(
                handshake=_handshake(model),
                session_id="mutated",
                committed_token_ids=_tokens(random, NUM_PROMPT_TOKENS),
                num_prompt_tokens=NUM_PROMPT_TOKENS,
                sampling=_sampling(random),
                speculation=_speculation(random, random.choice(METHODS)),
                structured_outputs=(
                    types.StructuredOutputs(**random.choice(STRUCTURES)) if random.random() < 0.2 else None
                ),
            ),
        )

    def event(random: Random, session: int, number: int) -> spec.SessionRequest:
        if random.random() < 0.25:
            steering = types.Steering(forward_us=random.randrange(10_000), round_trip_us=random.randrange(10_000))
            if random.random() < 0.5:
                steering.speculation.CopyFrom(_speculation(random, random.choice((types.METHOD_OFF, *METHODS))))
            return spec.SessionRequest(number=session, steering=steering)
        # Always the same tokens: a commit repeats the tokens before it, and continues.
        skipped = random.randrange(2)
        said = [37 * position % 2048 for position in range(skipped, number + 1)]
        commit = types.Commit(base_len=NUM_PROMPT_TOKENS + skipped, token_ids=said)
        return spec.SessionRequest(number=session, commit=commit)

    def first(random: Random) -> Message:
        return spec.SpeculateRequest(sessions=[opening(random, number) for number in (1, 2)])

    def next_(random: Random, number: int) -> Message:
        message = spec.SpeculateRequest(sessions=[event(random, session, number) for session in (1, 2)])
        if random.random() < 0.1:
            message.sessions.add(number=random.randrange(4)).close.SetInParent()
        return message

    service = "outrider.v1.SpeculatorService"
    servers = ("speculator",)
    yield Rpc("speculator/Speculate", f"/{service}/Speculate", "stream_stream", servers, first, next_, True, 2.0)
    yield Rpc(
        "speculator/GetInfo",
        f"/{service}/GetInfo",
        "unary_unary",
        servers,
        lambda r: spec.SpeculatorServiceGetInfoRequest(),
    )


# The datastore.


def _datastore(model: types.ModelInfo) -> Iterator[Rpc]:
    def rpc(name: str, kind: str, first: Callable[[Random], Message], **rest: Any) -> Rpc:
        method = f"/outrider.v1.DatastoreService/{name}"
        return Rpc(f"datastore/{name}", method, kind, ("datastore",), first, **rest)

    def scope(random: Random, session: bool = True, **fields: Any) -> data.Scope:
        wider = random.choice((types.RETRIEVAL_SCOPE_UNSPECIFIED, types.RETRIEVAL_SCOPE_TENANT))
        return data.Scope(
            tokenizer_hash=model.tokenizer_hash,
            session_id=f"session {random.randrange(20)}" if session else "",
            retrieval_scope=wider,
            vocab_size=2048,
            **fields,
        )

    def lookup(random: Random, number: int = 0) -> Message:
        queries = [
            data.Query(query_id=number, base_len=random.randrange(99), context_token_ids=_tokens(random, 6))
            for _ in range(random.randint(1, 3))
        ]
        return data.LookupRequest(scope=scope(random), queries=queries, max_match_len=random.randrange(5))

    def record(random: Random, number: int = 0) -> Message:
        rejection = data.Rejection(context_token_ids=_tokens(random, 3), rejected_token_ids=_tokens(random, 2))
        return data.RecordRequest(
            scope=scope(random) if number == 0 or random.random() < 0.3 else None,
            base_len=4 * number,
            accepted_token_ids=_tokens(random, 4),
            rejections=[rejection] if random.random() < 0.3 else [],
            end_session=random.random() < 0.1,
            accepted_by_tier=[{"source": types.SOURCE_RING, "num_tokens": 2}],
        )

    def prior(random: Random, number: int = 0) -> Message:
        documents = [data.TokenSequence(token_ids=_tokens(random, 8)) for _ in range(2)]
        named = scope(random, session=False, corpus=f"corpus {random.randrange(4)}") if number == 0 else None
        return data.LoadPriorRequest(scope=named, documents=documents)

    def deletion(random: Random) -> Message:
        return data.DeleteCorpusRequest(scope=scope(random, session=False, corpus=f"corpus {random.randrange(4)}"))

    yield rpc("Lookup", "stream_stream", lookup, later=lookup)
    yield rpc("Record", "stream_stream", record, later=record)
    watch = data.WatchRequest
    yield rpc("Watch", "unary_stream", lambda r: watch(scope=scope(r, session=False)), is_endless=True, deadline_s=0.1)
    # As many at a time as the server takes.
    yield rpc("LoadPrior", "stream_stream", prior, later=prior, num_at_a_time=2)
    hashes = ("", model.tokenizer_hash)
    yield rpc("ListCorpora", "unary_unary", lambda r: data.ListCorporaRequest(tokenizer_hash=r.choice(hashes)))
    yield rpc("DeleteCorpus", "unary_unary", deletion, needs="datastore/LoadPrior")
    yield rpc("GetInfo", "unary_unary", lambda r: data.DatastoreServiceGetInfoRequest())


# RPCs of every server.


def _common() -> Iterator[Rpc]:
    everybody = ("verifier", "speculator", "datastore")
    names = ("", "outrider.v1.VerifierService", "nobody")

    def asked(random: Random) -> Any:
        return health_pb2.HealthCheckRequest(service=random.choice(names))

    def reflected(random: Random, number: int = 0) -> Any:
        fields: Mapping[str, Any] = random.choice(
            (
                {"list_services": ""},
                {"file_by_filename": "outrider/v1/types.proto"},
                {"file_containing_symbol": "outrider.v1.Draft"},
                {"file_containing_extension": {"containing_type": "outrider.v1.Draft", "extension_number": 7}},
                {"all_extension_numbers_of_type": "google.protobuf.FieldOptions"},
            )
        )
        return reflection_pb2.ServerReflectionRequest(**fields)

    health, reflection = "/grpc.health.v1.Health", "/grpc.reflection.v1alpha.ServerReflection"
    yield Rpc("health/Check", f"{health}/Check", "unary_unary", everybody, asked)
    yield Rpc("health/Watch", f"{health}/Watch", "unary_stream", everybody, asked, is_endless=True, deadline_s=0.05)
    yield Rpc(
        "reflection/ServerReflectionInfo",
        f"{reflection}/ServerReflectionInfo",
        "stream_stream",
        everybody,
        reflected,
        later=reflected,
    )
