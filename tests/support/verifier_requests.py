"""Good and bad requests to a verifier, and their outcomes."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2
from outrider.wire.convert import PROTOCOL_VERSION
from tests.support.services import RunningVerifier

PROMPT = verifier_pb2.Prompt(text="def add(a, b):\n")
Code = grpc.StatusCode


def request(prompt: verifier_pb2.Prompt | None = PROMPT, **fields: Any) -> verifier_pb2.GenerateRequest:
    sampling: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
    sampling |= {k: v for k, v in fields.items() if k in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    speculation = {k: v for k, v in fields.items() if k in types_pb2.SpeculationParams.DESCRIPTOR.fields_by_name}
    return verifier_pb2.GenerateRequest(
        prompt=prompt,
        sampling=types_pb2.SamplingParams(**sampling),
        speculation=types_pb2.SpeculationParams(**speculation),
        resume_token_ids=fields.get("resume_token_ids", ()),
        report=verifier_pb2.ReportParams(**fields.get("report", {})),
        truncate_prompt_tokens=fields.get("truncate_prompt_tokens"),
        clamp_max_tokens=fields.get("clamp_max_tokens"),
        prediction=fields.get("prediction"),
    )


def tokens(*token_ids: int) -> verifier_pb2.Prompt:
    return verifier_pb2.Prompt(token_ids=types_pb2.TokenIds(token_ids=token_ids))


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def generate(stub: Any) -> list[int]:
    token_ids: list[int] = []
    async for response in stub.Generate(request()):
        token_ids += response.chunk.token_ids
    return token_ids


def handshake(verifier: RunningVerifier, **changes: Any) -> types_pb2.Handshake:
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "tokenizer_hash": verifier.model.tokenizer_hash,
        "vocab_size": verifier.model.vocab_size,
        "model_id": "edge",
    }
    return types_pb2.Handshake(**(fields | changes))


def opening(
    verifier: RunningVerifier, method: int = types_pb2.METHOD_PEARL, **changes: Any
) -> verifier_pb2.CollaborateRequest:
    return verifier_pb2.CollaborateRequest(
        open=verifier_pb2.CollaborateOpen(handshake=handshake(verifier, **changes), request=request(method=method))
    )


BAD_REQUESTS = {
    "no prompt": (request(None), Code.INVALID_ARGUMENT, "prompt.input must be set"),
    "unset oneof": (request(verifier_pb2.Prompt()), Code.INVALID_ARGUMENT, "prompt.input must be set"),
    "empty text": (
        request(verifier_pb2.Prompt(text="")),
        Code.INVALID_ARGUMENT,
        "prompt must come to at least one token",
    ),
    "no token ids": (request(tokens()), Code.INVALID_ARGUMENT, "prompt must come to at least one token"),
    "empty chat": (
        request(verifier_pb2.Prompt(chat=verifier_pb2.ChatMessages())),
        Code.INVALID_ARGUMENT,
        "prompt.chat.messages must hold",
    ),
    "negative id": (request(tokens(1, -1)), Code.INVALID_ARGUMENT, "prompt.token_ids[1] must be in [0, 2048)"),
    "id beyond the vocabulary": (request(tokens(2048)), Code.INVALID_ARGUMENT, "prompt.token_ids[0] must be in"),
    "prompt over the context": (request(tokens(*[5] * 2048)), Code.OUT_OF_RANGE, "prompt must be shorter than"),
    "max_tokens over the context": (request(max_tokens=2048), Code.OUT_OF_RANGE, "sampling.max_tokens must be at most"),
    "max_tokens 0": (request(max_tokens=0), Code.INVALID_ARGUMENT, "sampling.max_tokens must be >= 1"),
    "negative temperature": (request(temperature=-1.0), Code.INVALID_ARGUMENT, "sampling.temperature must be finite"),
    "temperature NaN": (request(temperature=math.nan), Code.INVALID_ARGUMENT, "sampling.temperature must be finite"),
    "top_p 0": (request(top_p=0.0), Code.INVALID_ARGUMENT, "sampling.top_p must be in (0, 1]"),
    "top_p 1.5": (request(top_p=1.5), Code.INVALID_ARGUMENT, "sampling.top_p must be in (0, 1]"),
    "top_k -1": (request(top_k=-1), Code.INVALID_ARGUMENT, "sampling.top_k must be >= 0"),
    "min_p 2": (request(min_p=2.0), Code.INVALID_ARGUMENT, "sampling.min_p must be in [0, 1]"),
    "penalty NaN": (
        request(repetition_penalty=math.nan),
        Code.INVALID_ARGUMENT,
        "sampling.repetition_penalty must be finite and > 0",
    ),
    "presence beyond its range": (
        request(presence_penalty=-2.5),
        Code.INVALID_ARGUMENT,
        "sampling.presence_penalty must be in [-2, 2], got -2.5",
    ),
    "bias of no token": (
        request(logit_bias={2048: 1.0}),
        Code.INVALID_ARGUMENT,
        "sampling.logit_bias[2048]",
    ),
    "more biases than may be": (
        request(logit_bias=dict.fromkeys(range(2048), 1.0)),
        Code.INVALID_ARGUMENT,
        "sampling.logit_bias must be of at most 1024 tokens, got 2048",
    ),
    "min_tokens over max_tokens": (
        request(min_tokens=5),
        Code.INVALID_ARGUMENT,
        "sampling.min_tokens must be at most max_tokens (4), got 5",
    ),
    "empty stop string": (request(stop=["a", ""]), Code.INVALID_ARGUMENT, "sampling.stop[1] must be 1 to 256 bytes"),
    "a stop string of a megabyte": (
        request(stop=["x" * 1_000_000]),
        Code.INVALID_ARGUMENT,
        "sampling.stop[0] must be 1 to 256 bytes long, got 1000000",
    ),
    "many stop strings": (request(stop=["a"] * 17), Code.INVALID_ARGUMENT, "sampling.stop must be at most 16 strings"),
    "a stop to include, and none": (
        request(include_stop_str_in_output=True),
        Code.INVALID_ARGUMENT,
        "sampling.include_stop_str_in_output must be unset without stop strings",
    ),
    "empty bad word": (request(bad_words=[""]), Code.INVALID_ARGUMENT, "sampling.bad_words[0] must be 1 to 256 bytes"),
    "a long bad word": (
        request(bad_words=["é" * 120]),
        Code.INVALID_ARGUMENT,
        "sampling.bad_words[0] must be of",
    ),
    "bad word of no token": (
        request(bad_words_token_ids=[{"token_ids": [4, 2048]}]),
        Code.INVALID_ARGUMENT,
        "sampling.bad_words_token_ids[0].token_ids[1] must be in",
    ),
    "21 logprobs": (
        request(report={"logprobs": 21}),
        Code.INVALID_ARGUMENT,
        "report.logprobs must be in [0, 20]",
    ),
    "logprobs_mode for nothing": (
        request(report={"logprobs_mode": 1}),
        Code.INVALID_ARGUMENT,
        "report.logprobs_mode must be unset where no log-probabilities are asked for",
    ),
    "unknown logprobs_mode": (
        request(report={"logprobs": 0, "logprobs_mode": 9}),
        Code.INVALID_ARGUMENT,
        "report.logprobs_mode must be one of LOGPROBS_MODE_RAW_LOGPROBS",
    ),
    "truncated to nothing": (
        request(truncate_prompt_tokens=0),
        Code.INVALID_ARGUMENT,
        "truncate_prompt_tokens must be >= 1, got 0",
    ),
    "a prediction for nobody": (
        request(method=types_pb2.METHOD_OFF, prediction="a"),
        Code.INVALID_ARGUMENT,
        "prediction must be empty with method off, which looks nothing up, got 1 characters",
    ),
    "a prediction for a method that looks into what was generated before": (
        request(method=types_pb2.METHOD_SPACELIKE, retrieval=True, prediction="a"),
        Code.INVALID_ARGUMENT,
        "prediction must be empty with method spacelike, which looks into what was generated before and nowhere else",
    ),
    "a prediction for a draft model alone": (
        request(method=types_pb2.METHOD_PEARL, prediction="a"),
        Code.INVALID_ARGUMENT,
        "prediction must be empty with method pearl unless speculation.retrieval is true",
    ),
    "a prediction for the draft model's own retrieval": (
        request(method=types_pb2.METHOD_DOUBLE, prediction="a", double={"target_retrieval": False}),
        Code.INVALID_ARGUMENT,
        "prediction must be empty with method double unless speculation.double.target_retrieval is true",
    ),
    "a prediction beside the ring alone": (
        request(
            method=types_pb2.METHOD_RETRIEVAL, prediction="a", retrieval_params={"sources": [types_pb2.SOURCE_RING]}
        ),
        Code.INVALID_ARGUMENT,
        "prediction must be empty unless speculation.retrieval_params.sources name more than SOURCE_RING",
    ),
    "a prediction over the context": (
        request(method=types_pb2.METHOD_RETRIEVAL, prediction="word " * 5000),
        Code.OUT_OF_RANGE,
        "prediction must come to at most 2048 tokens, like a prompt",
    ),
    "a prediction of a megabyte": (
        request(method=types_pb2.METHOD_RETRIEVAL, prediction="x" * 1_000_000),
        Code.OUT_OF_RANGE,
        "prediction must be shorter than the context",
    ),
    "no room, whatever the wish": (
        request(tokens(*[5] * 2048), clamp_max_tokens=True),
        Code.OUT_OF_RANGE,
        "prompt must be shorter than",
    ),
    "unknown stop": (request(stop_token_ids=[9999]), Code.INVALID_ARGUMENT, "sampling.stop_token_ids[0] must be in"),
    "unknown method": (request(method=77), Code.INVALID_ARGUMENT, "speculation.method must be one of"),
    "gamma 0": (request(num_speculative_tokens=0), Code.INVALID_ARGUMENT, "speculation.num_speculative_tokens must be"),
    "gamma 1000": (request(num_speculative_tokens=1000), Code.INVALID_ARGUMENT, "in [1, 32], this server's limit"),
    "lookahead for off": (
        request(method=types_pb2.METHOD_OFF, lookahead=9),
        Code.INVALID_ARGUMENT,
        "speculation.lookahead must be unset",
    ),
    "retrieval with off": (
        request(method=types_pb2.METHOD_OFF, retrieval=True),
        Code.INVALID_ARGUMENT,
        "speculation.retrieval must be false",
    ),
    "a scope for nothing": (
        request(retrieval_params=types_pb2.RetrievalParams(scope=types_pb2.RETRIEVAL_SCOPE_TENANT)),
        Code.INVALID_ARGUMENT,
        "speculation.retrieval_params must be unset where nothing is retrieved",
    ),
    "unknown scope": (
        request(method=types_pb2.METHOD_RETRIEVAL, retrieval_params={"scope": 9}),
        Code.INVALID_ARGUMENT,
        "speculation.retrieval_params.scope must be one of RETRIEVAL_SCOPE_SESSION",
    ),
    "contributing to nobody": (
        request(method=types_pb2.METHOD_RETRIEVAL, retrieval_params={"contribute": True}),
        Code.INVALID_ARGUMENT,
        "speculation.retrieval_params.contribute must be unset or false",
    ),
    "rows beyond the limit": (
        request(method=types_pb2.METHOD_AUTO, max_rows=33),
        Code.INVALID_ARGUMENT,
        "speculation.max_rows must be in [1, 32], this server's limit, got 33",
    ),
    "another method's parameters": (
        request(method=types_pb2.METHOD_RETRIEVAL, card={"beam_width": 4}),
        Code.INVALID_ARGUMENT,
        "speculation.card must be unset for method retrieval",
    ),
    "no speculator": (
        request(method=types_pb2.METHOD_BEST_FIRST),
        Code.FAILED_PRECONDITION,
        "speculation.method best-first needs a speculator, and this server has none",
    ),
    "no datastore": (
        request(method=types_pb2.METHOD_SPACELIKE),
        Code.FAILED_PRECONDITION,
        "speculation.method spacelike needs a datastore, and this server has none",
    ),
    "no datastore to ask for every tier": (
        request(method=types_pb2.METHOD_AUTO, retrieval_params={"remote": True}, allow_fallback=True),
        Code.FAILED_PRECONDITION,
        "speculation.retrieval_params.remote needs a datastore, and this server has none",
    ),
    "wrong, whatever the fallback": (
        request(method=types_pb2.METHOD_CARD, card={"beam_width": 0}, allow_fallback=True),
        Code.INVALID_ARGUMENT,
        "speculation.card.beam_width must be in",
    ),
    "resume without seed": (
        request(temperature=1.0, resume_token_ids=[5]),
        Code.INVALID_ARGUMENT,
        "sampling.seed must be set to resume",
    ),
    "resume without seed or temperature": (
        request(temperature=None, resume_token_ids=[5]),
        Code.INVALID_ARGUMENT,
        "sampling.seed must be set to resume",
    ),
    "resume beyond max_tokens": (
        request(resume_token_ids=[5, 5, 5, 5, 5]),
        Code.INVALID_ARGUMENT,
        "resume_token_ids must be no longer than max_tokens",
    ),
}
"""Name -> a request that a server without peers refuses, the code, and words of the details."""
