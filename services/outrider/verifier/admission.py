"""Admission of a request: turns it into the spec of a session, and names everything that a client can get wrong."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, replace

from outrider.core.blocks import PrefixScope
from outrider.core.methods import METHODS, OFF, RETRIEVAL
from outrider.core.noise import choice_seed
from outrider.core.params import TIERS, InvalidParameter, RetrievalScope, check
from outrider.core.retrieval.sides import target_plan
from outrider.core.session import SessionSpec
from outrider.core.speculation import Method, SpeculationLimits, SpeculationParams
from outrider.core.structure import Matcher, Structure, StructureBroken
from outrider.core.tree import TokenId
from outrider.models.loading import LoadedModel
from outrider.models.structure import BadStructure, Grammars
from outrider.models.text import ChatRefused, NoChatTemplate, NotInTemplate, TextCodec
from outrider.v1 import verifier_pb2
from outrider.verifier.chats import CHAT_FIELD, chat_from_proto, num_characters
from outrider.verifier.stop_text import StopText
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.errors import FailedPrecondition, InvalidArgument, OutOfRange
from outrider.wire.handshake import model_info
from outrider.wire.reports import report_from_proto
from outrider.wire.resumption import with_sampling
from outrider.wire.sampling import sampling_from_proto, stop_strings_from_proto, stop_token_ids_from_proto
from outrider.wire.speculation import given_names, speculation_from_proto
from outrider.wire.structure import FIELD, structure_from_proto

MAX_TOKEN_LEN = 256
"""Most characters of a text for each token of the context. The longest tokens in use, runs of spaces, have half as
many. No number is a strict bound: some tokenizers drop blanks, or make one token of all that they do not know."""


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
    """The generations that can reuse the keys and values of a generation's beginning."""
    max_num_choices: int = 16
    """Most texts of one request."""
    shares_gpu: bool = False
    """True if the server's draft model runs on the GPU of the target."""


def prompt_token_ids(prompt: verifier_pb2.Prompt, model: LoadedModel, codec: TextCodec) -> tuple[TokenId, ...]:
    """Converts the prompt to token ids.

    Raises:
        OutOfRange: a text or a chat has too many characters for the context, whatever its tokens; it is not tokenized.
        InvalidArgument: the prompt is unset or empty, or a chat has a wrong field or is refused by its template;
            InvalidParameter: a token id is outside the vocabulary.
        FailedPrecondition: a chat's tokenizer has no template, or the template does not know a part of the chat.
    """
    # At most one of the two is set. The other one reads as empty, and reading does not set it.
    _check_length("prompt", len(prompt.text) + num_characters(prompt.chat), model.max_context_len)
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
    # A tokenizer may have more tokens than the model.
    known = f"made of tokens that the model has, in [0, {model.vocab_size})"
    check(max(token_ids) < model.vocab_size, "prompt", known, max(token_ids))
    return token_ids


def session_specs(
    request: verifier_pb2.GenerateRequest,
    model: LoadedModel,
    codec: TextCodec,
    limits: Limits,
    grammars: Grammars,
    *,
    brings_drafts: bool,
) -> list[SessionSpec | None]:
    """Checks a request and resolves every field of it.

    Args:
        request: The request.
        model: The target.
        codec: Makes tokens of text, and text of tokens.
        limits: Limits and defaults of this server.
        grammars: Compiles structures.
        brings_drafts: True if the caller supplies the drafts itself (Collaborate).

    Returns:
        A spec for each text that is asked for; None for one that was finished before the request was resumed. If the
        caller brings drafts, just one is not None.

    Raises:
        InvalidArgument, InvalidParameter: a field is missing or outside its range.
        OutOfRange: prompt or max_tokens exceed the context, or the prompt exceeds this server's limit.
        FailedPrecondition: the method needs a peer that is not configured, and the request does not allow another.
    """
    request = with_sampling(request, model_info(model))
    n = request.n if request.HasField("n") else 1
    check(1 <= n <= limits.max_num_choices, "n", f"in [1, {limits.max_num_choices}], this server's limit", n)
    spec = _spec(request, model, codec, limits, brings_drafts=brings_drafts)
    field = "resume_choices"
    check(n > 1 or not request.resume_choices, field, "empty without n: resume_token_ids say it", "a list")
    check(n == 1 or not request.resume_token_ids, "resume_token_ids", f"empty where n is {n}: {field} say it", "a list")
    count = len(request.resume_choices)
    check(count in (0, n), field, f"empty, or one for each of the n ({n})", count)
    resumed = [verifier_pb2.ResumedChoice(token_ids=request.resume_token_ids)] * n
    resumed = list(request.resume_choices) or resumed
    num_left = sum(not choice.is_finished for choice in resumed)
    # Each text that the caller drafts for needs a call of its own.
    check(num_left == 1 or not brings_drafts, field, "all finished but one, for which this caller drafts", num_left)
    # Finished texts are checked too: others of these texts may be resumed in other calls.
    specs = [_choice(spec, index, choice, request, codec, grammars) for index, choice in enumerate(resumed)]
    return [None if choice.is_finished else spec for spec, choice in zip(specs, resumed, strict=True)]


def _spec(
    request: verifier_pb2.GenerateRequest, model: LoadedModel, codec: TextCodec, limits: Limits, *, brings_drafts: bool
) -> SessionSpec:
    """Returns what all texts of a request have in common."""
    prompt = _truncated(prompt_token_ids(request.prompt, model, codec), request)
    if limits.max_prompt_tokens and len(prompt) > limits.max_prompt_tokens:
        raise OutOfRange(
            f"prompt must come to at most {limits.max_prompt_tokens} tokens, this server's limit, got {len(prompt)}"
        )
    # A caller that names no seed is told this one in `Started`, and can resume with it.
    sampling = sampling_from_proto(
        request.sampling, secrets.randbits(64), model.vocab_size, model.eos_token_ids, codec.spellings
    )
    requested = speculation_from_proto(request.speculation, limits.defaults, limits.speculation)
    prediction = _prediction(request, requested, model, codec, limits)
    speculation = _served(
        requested, limits, brings_drafts, request.speculation.allow_fallback, has_prediction=bool(prediction)
    )
    if sampling.is_greedy and speculation.is_ratio:
        # Without sampling both rules keep the same tokens, and the match rule needs no draft probabilities.
        speculation = speculation.by_match()
    shares_gpu = limits.shares_gpu and not brings_drafts
    if shares_gpu and speculation.method.on_shared_gpu is not None:
        speculation = speculation.method.on_shared_gpu(speculation, given_names(request.speculation))
    max_tokens = _max_tokens(request, len(prompt), model)
    # If max_tokens is clamped, so is min_tokens: a text that runs out of room ends by its length.
    most = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else max_tokens
    rule = f"at most max_tokens ({most})"
    check(sampling.min_tokens <= most, "sampling.min_tokens", rule, sampling.min_tokens)
    return SessionSpec(
        session_id=uuid.uuid4().hex[:16],
        prompt_token_ids=prompt,
        sampling=sampling,
        speculation=speculation,
        vocab_size=model.vocab_size,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids_from_proto(request.sampling, model.vocab_size, model.eos_token_ids)),
        requested_method=None if speculation.method is requested.method else requested.method,
        stop=stop_strings_from_proto(request.sampling),
        includes_stop=request.sampling.include_stop_str_in_output,
        report=report_from_proto(request.report),
        prediction_token_ids=prediction,
        shares_gpu=shares_gpu,
        skip_special_tokens=request.skip_special_tokens or not request.HasField("skip_special_tokens"),
    )


def _choice(
    spec: SessionSpec,
    index: int,
    choice: verifier_pb2.ResumedChoice,
    request: verifier_pb2.GenerateRequest,
    codec: TextCodec,
    grammars: Grammars,
) -> SessionSpec:
    """Returns the spec of one of the texts, which continues after its resumed tokens."""
    field = "resume_token_ids" if request.resume_token_ids else f"resume_choices[{index}].token_ids"
    resumed = token_ids_from_proto(choice.token_ids, spec.vocab_size, field)
    if resumed and not (spec.sampling.is_greedy or request.sampling.HasField("seed")):
        raise InvalidArgument("sampling.seed", "must be set to resume: the tokens so far were drawn with it")
    if resumed and resumed[-1] in spec.stop_token_ids:
        resumed = resumed[:-1]  # a stop token is not part of the output: the target draws it again, and ends there
    check(len(resumed) <= spec.max_tokens, field, f"no longer than max_tokens ({spec.max_tokens})", len(resumed))
    spec = replace(spec, resume_token_ids=resumed)
    if index:
        spec = replace(
            spec,
            session_id=f"{spec.session_id}-{index}",
            sampling=replace(spec.sampling, seed=choice_seed(spec.sampling.seed, index)),
            # Told once, with the first of them.
            report=replace(spec.report, prompt_logprobs=None, echo=False),
        )
    if request.HasField("structured_outputs"):
        spec = _structured(spec, request, grammars, field)
    if resumed and spec.stop and (found := StopText(spec, codec).found):
        # The text was complete just before the resumed call broke.
        spec = replace(spec, is_complete=True, resumed_stop=found)
    return spec


def _structured(
    spec: SessionSpec, request: verifier_pb2.GenerateRequest, grammars: Grammars, resume_field: str
) -> SessionSpec:
    """Returns a spec with the structure that the output must have."""
    rule = "unset or false with structured_outputs: the grammar says where the text may end"
    check(not request.sampling.ignore_eos, "sampling.ignore_eos", rule, request.sampling.ignore_eos)
    structure = structure_from_proto(request.structured_outputs)
    if structure.special_tokens_as_text:
        as_text, rule = f"{FIELD}.special_tokens_as_text", "unset or false unless skip_special_tokens is false"
        check(not spec.skip_special_tokens, as_text, rule, True)
    field = f"{FIELD}.{structure.kind.value}"
    matcher, trial = check_structure(structure, grammars), check_structure(structure, grammars)
    resumed = spec.resume_token_ids
    is_allowed = all(trial.consume(token_id) for token_id in resumed)
    check(is_allowed, resume_field, f"a beginning that {field} allows", "another one")
    return replace(spec, structure=structure, matcher=matcher, is_complete=bool(resumed) and trial.is_over)


def check_structure(structure: Structure, grammars: Grammars) -> Matcher:
    """Returns a matcher at the beginning of a text. Raises InvalidArgument if the description is invalid."""
    try:
        return grammars.matcher(structure)
    except (BadStructure, StructureBroken) as error:
        raise InvalidArgument(f"{FIELD}.{structure.kind.value}", str(error)) from error


def _truncated(prompt: tuple[TokenId, ...], request: verifier_pb2.GenerateRequest) -> tuple[TokenId, ...]:
    """Returns the prompt, or its last tokens if the request truncates it."""
    if not request.HasField("truncate_prompt_tokens"):
        return prompt
    check(request.truncate_prompt_tokens >= 1, "truncate_prompt_tokens", ">= 1", request.truncate_prompt_tokens)
    return prompt[-request.truncate_prompt_tokens :]


def _prediction(
    request: verifier_pb2.GenerateRequest,
    params: SpeculationParams,
    model: LoadedModel,
    codec: TextCodec,
    limits: Limits,
) -> tuple[TokenId, ...]:
    """Returns the tokens of the predicted text; empty if there is none.

    Raises InvalidParameter if the request looks nothing up in process, OutOfRange for a text that is too long.
    """
    if not request.prediction:
        return ()
    plan = target_plan(params)
    if plan is None or not plan.is_in_process:
        raise InvalidParameter("prediction", _prediction_rule(params), f"{len(request.prediction)} characters")
    _check_length("prediction", len(request.prediction), model.max_context_len)
    token_ids = tuple(codec.encode(request.prediction, add_special_tokens=False))
    longest = limits.max_prompt_tokens or model.max_context_len
    if len(token_ids) > longest:
        raise OutOfRange(f"prediction must come to at most {longest} tokens, like a prompt, got {len(token_ids)}")
    return token_ids


def _prediction_rule(params: SpeculationParams) -> str:
    """Returns the rule that a request breaks which has a prediction but looks nothing up in process."""
    method = params.method
    if method.is_off:
        return "empty with method off, which looks nothing up"
    if not params.retrieves:
        return f"empty with method {method.name} unless speculation.retrieval is true"
    if method.no_prediction:
        return f"empty with method {method.name}{method.no_prediction}"
    return "empty unless speculation.retrieval_params.sources name more than SOURCE_RING"


def _check_length(field: str, length: int, max_context_len: int) -> None:
    """Refuses a text with too many characters to fit, before seconds are spent on tokenizing it."""
    if length > MAX_TOKEN_LEN * max_context_len:
        raise OutOfRange(
            f"{field} must be shorter than the context of {max_context_len} tokens, got {length} characters: at most "
            f"{MAX_TOKEN_LEN} a token are read"
        )


def check_num_tokens(field: str, number: int, most: int) -> None:
    """Raises OutOfRange if a list has more tokens than the server processes."""
    if number > most:
        raise OutOfRange(f"{field} must have at most {most} tokens, got {number}")


def missing_peer(method: Method, limits: Limits) -> str | None:
    """Returns the peer that a method requires and this server lacks; None means that it lacks none."""
    if method.needs_draft_model and not limits.has_speculator:
        return "speculator"
    if method.needs_datastore and not limits.has_datastore:
        return "datastore"
    return None


def _served(
    params: SpeculationParams, limits: Limits, brings_drafts: bool, allow_fallback: bool, *, has_prediction: bool
) -> SpeculationParams:
    """Returns the parameters, or their replacement if a peer is missing.

    Raises InvalidParameter for a method that a caller cannot draft for, FailedPrecondition for a missing peer.
    """
    method = params.method
    if params.remote and not limits.has_datastore:
        raise FailedPrecondition("speculation.retrieval_params.remote needs a datastore, and this server has none")
    if brings_drafts:
        names = ", ".join(m.name for m in METHODS.values() if m.has_draft_model)
        check(method.has_draft_model, "speculation.method", f"one with a draft model ({names})", method.name)
        return params
    missing = missing_peer(method, limits)
    if missing is None:
        return params
    if not allow_fallback:
        raise FailedPrecondition(f"speculation.method {method.name} needs a {missing}, and this server has none")
    return _fallback(params, limits, has_prediction=has_prediction)


def _fallback(params: SpeculationParams, limits: Limits, *, has_prediction: bool) -> SpeculationParams:
    """Returns parameters of the method for which this server has all peers: retrieval, otherwise no speculation."""
    # A prediction is looked up in process, without any peer.
    method = RETRIEVAL if limits.has_datastore or has_prediction else OFF
    scope = params.retrieval_scope if params.retrieves else limits.defaults.retrieval_scope
    shares = params.contribute if params.retrieves else scope is not RetrievalScope.SESSION
    retrieves = method.always_retrieves
    return SpeculationParams(
        method=method,
        num_speculative_tokens=params.num_speculative_tokens,
        lookahead=params.lookahead,
        min_path_probability=params.min_path_probability,
        # The ratio rule does without shared noise; the fallback uses the match rule, whose default it is.
        shared_noise=params.shared_noise or params.is_ratio,
        retrieval=retrieves,
        retrieval_scope=scope if retrieves else RetrievalScope.SESSION,
        contribute=shares and retrieves,
        sources=params.sources if retrieves else TIERS,
        remote=params.remote and retrieves,
    )


def _max_tokens(request: verifier_pb2.GenerateRequest, num_prompt: int, model: LoadedModel) -> int:
    """Returns the most tokens of each text. Raises OutOfRange if there is no room for them; if max_tokens may be
    clamped, only if there is no room for any."""
    max_context_len, num_pool_tokens = model.max_context_len, model.runner.pool.num_slots
    # It must fit into the pool alone, or it would be preempted for ever.
    if num_prompt >= num_pool_tokens:
        raise OutOfRange(
            f"prompt must be shorter than this server's pool of keys and values, {num_pool_tokens} tokens, got "
            f"{num_prompt} tokens"
        )
    n = max(1, request.n)
    room = min(max_context_len - num_prompt, (num_pool_tokens - num_prompt) // n)
    if room < 1:
        raise OutOfRange(
            f"prompt must be shorter than the context of {max_context_len} tokens, got {num_prompt} tokens"
        )
    if not request.sampling.HasField("max_tokens"):
        return room
    wanted = request.sampling.max_tokens
    check(wanted >= 1, "sampling.max_tokens", ">= 1", wanted)
    if request.clamp_max_tokens:
        return min(wanted, room)
    if wanted > room:
        each = f" for each of the n ({n}) texts" if n > 1 else ""
        raise OutOfRange(
            f"sampling.max_tokens must be at most {room}{each}, got {wanted}: the prompt has {num_prompt} tokens, the "
            f"context {max_context_len}, the pool of keys and values {num_pool_tokens}"
        )
    return wanted
