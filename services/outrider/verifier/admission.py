"""Admission of a request: it becomes the spec of a session, and everything that a client can get wrong is named."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, replace

from outrider.core.blocks import PrefixScope
from outrider.core.params import TIERS, AcceptanceRule, Method, RetrievalScope, SpeculationParams, check
from outrider.core.session import SessionSpec
from outrider.core.tree import TokenId
from outrider.models.loading import LoadedModel
from outrider.models.text import ChatRefused, NoChatTemplate, NotInTemplate, TextCodec
from outrider.v1 import verifier_pb2
from outrider.verifier.chats import CHAT_FIELD, chat_from_proto, num_characters
from outrider.wire.convert import sampling_from_proto, token_ids_from_proto
from outrider.wire.errors import FailedPrecondition, InvalidArgument, OutOfRange
from outrider.wire.speculation import SpeculationLimits, speculation_from_proto

MAX_TOKEN_LEN = 256
"""Most characters of one token: the longest in use, runs of spaces, have half as many."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds the limits of requests, the defaults of unset fields, and the peers that the server is configured with."""

    defaults: SpeculationParams
    speculation: SpeculationLimits
    has_speculator: bool
    has_datastore: bool
    max_prompt_tokens: int = 0
    """Longest prompt; 0 means as many tokens as the context has room for."""
    prefix_scope: PrefixScope = PrefixScope.TENANT
    """Says who finds the keys and values of a generation's beginning again."""


def prompt_token_ids(prompt: verifier_pb2.Prompt, model: LoadedModel, codec: TextCodec) -> tuple[TokenId, ...]:
    """Converts the prompt to token ids.

    Raises:
        InvalidArgument: unset, empty, a chat with a wrong field, or one that its template refuses; InvalidParameter: a
            token id outside the vocabulary.
        FailedPrecondition: a chat for a tokenizer without a template, or with what its template does not know.
    """
    match prompt.WhichOneof("input"):
        case "text":
            token_ids = tuple(codec.encode(prompt.text))
        case "token_ids":
            token_ids = token_ids_from_proto(prompt.token_ids.token_ids, model.vocab_size, "prompt.token_ids")
        case "chat":
            chat = chat_from_proto(prompt.chat)
            try:
                token_ids = tuple(codec.encode_chat(chat))
            except NoChatTemplate as error:
                raise FailedPrecondition(f"{CHAT_FIELD}: {error}") from error
            except NotInTemplate as error:
                raise FailedPrecondition(f"{CHAT_FIELD}.{error.part}: {error}") from error
            except ChatRefused as error:
                problem = f"must be a chat that the tokenizer's template takes: {error}"
                raise InvalidArgument(f"{CHAT_FIELD}.messages", problem) from error
        case _:
            raise InvalidArgument("prompt.input", "must be set: text, token_ids or chat")
    if not token_ids:
        raise InvalidArgument("prompt", "must come to at least one token")
    return token_ids


def session_spec(
    request: verifier_pb2.GenerateRequest, model: LoadedModel, codec: TextCodec, limits: Limits, *, brings_drafts: bool
) -> SessionSpec:
    """Checks a request and resolves every field of it.

    Args:
        brings_drafts: True if the caller supplies the drafts itself (Collaborate).

    Raises:
        InvalidArgument, InvalidParameter: a field is missing or outside its range.
        OutOfRange: prompt or max_tokens exceed the context, or the prompt what this server takes.
        FailedPrecondition: the method needs a peer that is not configured, and the request does not allow another.
    """
    _check_length(request.prompt, model.max_context_len)
    prompt = prompt_token_ids(request.prompt, model, codec)
    if limits.max_prompt_tokens and len(prompt) > limits.max_prompt_tokens:
        raise OutOfRange(
            f"prompt must come to at most {limits.max_prompt_tokens} tokens, this server's limit, got {len(prompt)}"
        )
    # A caller that names no seed is told this one in `Started`, and can resume with it.
    sampling = sampling_from_proto(request.sampling, default_seed=secrets.randbits(64))
    requested = speculation_from_proto(request.speculation, limits.defaults, limits.speculation)
    speculation = _served(requested, limits, brings_drafts, request.speculation.allow_fallback)
    if sampling.is_greedy and speculation.is_ratio:
        # Without sampling both rules keep the same tokens, and the match rule needs no draft probabilities. It goes
        # together with a bias of 1: `SpeculationParams` refuses another one.
        saguaro = replace(speculation.saguaro, bias=1.0)
        speculation = replace(speculation, acceptance_rule=AcceptanceRule.MATCH, saguaro=saguaro)
    resumed = token_ids_from_proto(request.resume_token_ids, model.vocab_size, "resume_token_ids")
    if resumed and not (sampling.is_greedy or request.sampling.HasField("seed")):
        raise InvalidArgument("sampling.seed", "must be set to resume: the tokens so far were drawn with it")
    stops = token_ids_from_proto(request.sampling.stop_token_ids, model.vocab_size, "sampling.stop_token_ids")
    eos = () if request.sampling.ignore_eos else model.eos_token_ids
    stop_token_ids = frozenset((*stops, *eos))
    if resumed and resumed[-1] in stop_token_ids:
        resumed = resumed[:-1]  # a stop is not part of the output: the target draws it again, and that is the end
    return SessionSpec(
        session_id=uuid.uuid4().hex[:16],
        prompt_token_ids=prompt,
        sampling=sampling,
        speculation=speculation,
        vocab_size=model.vocab_size,
        max_tokens=_max_tokens(request, len(prompt), len(resumed), model),
        stop_token_ids=stop_token_ids,
        resume_token_ids=resumed,
        requested_method=None if speculation.method is requested.method else requested.method,
        skip_special_tokens=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
    )


def _check_length(prompt: verifier_pb2.Prompt, max_context_len: int) -> None:
    """Refuses what cannot fit, before seconds are spent on tokenizing it."""
    # At most one of the two is set. The other one, read all the same, is empty, and reading does not set it.
    length = len(prompt.text) + num_characters(prompt.chat)
    if length > MAX_TOKEN_LEN * max_context_len:
        raise OutOfRange(
            f"prompt must be shorter than the context of {max_context_len} tokens, got {length} characters"
        )


def missing_peer(method: Method, limits: Limits) -> str | None:
    """Returns the peer that a method cannot do without and that this server lacks; None means that it lacks none."""
    if method.needs_draft_model and not limits.has_speculator:
        return "speculator"
    if method.needs_datastore and not limits.has_datastore:
        return "datastore"
    return None


def _served(params: SpeculationParams, limits: Limits, brings_drafts: bool, allow_fallback: bool) -> SpeculationParams:
    """Returns the parameters, or those that replace them where a peer is missing.

    Raises InvalidParameter for a method that a caller cannot draft for, FailedPrecondition for a missing peer.
    """
    method = params.method
    if brings_drafts:
        names = ", ".join(m.value for m in Method if m.has_draft_model)
        check(method.has_draft_model, "speculation.method", f"one with a draft model ({names})", method.value)
        return params
    missing = missing_peer(method, limits)
    if missing is None:
        return params
    if not allow_fallback:
        raise FailedPrecondition(f"speculation.method {method.value} needs a {missing}, and this server has none")
    return _fallback(params, limits)


def _fallback(params: SpeculationParams, limits: Limits) -> SpeculationParams:
    """Returns parameters of the method for which this server has all peers: retrieval, otherwise no speculation."""
    method = Method.RETRIEVAL if limits.has_datastore else Method.OFF
    scope = params.retrieval_scope if params.retrieves else limits.defaults.retrieval_scope
    shares = params.contribute if params.retrieves else scope is not RetrievalScope.SESSION
    retrieves = method is Method.RETRIEVAL
    return SpeculationParams(
        method=method,
        num_speculative_tokens=params.num_speculative_tokens,
        lookahead=params.lookahead,
        min_path_probability=params.min_path_probability,
        # The ratio rule goes without it; what is left here goes by the match rule, where it is the default.
        shared_noise=params.shared_noise or params.is_ratio,
        retrieval=retrieves,
        retrieval_scope=scope if retrieves else RetrievalScope.SESSION,
        contribute=shares and retrieves,
        sources=params.sources if retrieves else TIERS,
    )


def _max_tokens(request: verifier_pb2.GenerateRequest, num_prompt: int, num_resumed: int, model: LoadedModel) -> int:
    max_context_len, num_pool_tokens = model.max_context_len, model.runner.pool.num_slots
    # Alone it must fit, or it would lose its room for ever.
    if num_prompt >= num_pool_tokens:
        raise OutOfRange(
            f"prompt must be shorter than this server's pool of keys and values, {num_pool_tokens} tokens, got "
            f"{num_prompt} tokens"
        )
    room = min(max_context_len, num_pool_tokens) - num_prompt
    if room < 1:
        raise OutOfRange(
            f"prompt must be shorter than the context of {max_context_len} tokens, got {num_prompt} tokens"
        )
    if not request.sampling.HasField("max_tokens"):
        wanted = room
    else:
        wanted = request.sampling.max_tokens
        check(wanted >= 1, "sampling.max_tokens", ">= 1", wanted)
        if wanted > room:
            raise OutOfRange(
                f"sampling.max_tokens must be at most {room}, got {wanted}: the prompt has {num_prompt} tokens, the "
                f"context {max_context_len}, the pool of keys and values {num_pool_tokens}"
            )
    check(num_resumed <= wanted, "resume_token_ids", f"no longer than max_tokens ({wanted})", num_resumed)
    return wanted
