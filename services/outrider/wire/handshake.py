"""The handshake: names the peer and its tokenizer. It comes first on every stream between services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from outrider.core.params import check
from outrider.v1 import types_pb2
from outrider.wire.convert import PROTOCOL_VERSION
from outrider.wire.errors import FailedPrecondition, InvalidArgument


class Model(Protocol):
    """The properties of a model that messages carry."""

    @property
    def model_id(self) -> str: ...
    @property
    def tokenizer_hash(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def numerics_id(self) -> str: ...
    @property
    def default_sampling(self) -> Mapping[str, float]: ...


def model_info(model: Model) -> types_pb2.ModelInfo:
    """Describes a model for the wire."""
    return types_pb2.ModelInfo(
        model_id=model.model_id,
        tokenizer_hash=model.tokenizer_hash,
        vocab_size=model.vocab_size,
        max_context_len=model.max_context_len,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        numerics_id=model.numerics_id,
        default_sampling=types_pb2.SamplingParams(**model.default_sampling),  # type: ignore[arg-type]
    )


def handshake(model: Model) -> types_pb2.Handshake:
    """Returns the handshake of a caller that uses the tokens of `model`."""
    return types_pb2.Handshake(
        protocol_version=PROTOCOL_VERSION,
        tokenizer_hash=model.tokenizer_hash,
        vocab_size=model.vocab_size,
        model_id=model.model_id,
    )


def check_handshake(message: types_pb2.Handshake, model: Model) -> None:
    """Refuses a caller whose protocol or tokens differ from this server's.

    Vocabulary sizes may differ (padding); the hash decides whether ids mean the same.

    Raises:
        FailedPrecondition: protocol version or tokenizer differ; the message has both.
        InvalidArgument: the hash is empty.
    """
    # The version comes first: in another one the other fields may have another meaning.
    if message.protocol_version != PROTOCOL_VERSION:
        raise FailedPrecondition(
            f"handshake.protocol_version must be {PROTOCOL_VERSION}, this server's, got {message.protocol_version}"
        )
    if not message.tokenizer_hash:
        raise InvalidArgument("handshake.tokenizer_hash", "must be set")
    if message.tokenizer_hash != model.tokenizer_hash:
        raise FailedPrecondition(
            f"handshake.tokenizer_hash must be {model.tokenizer_hash} ({model.model_id}), got {message.tokenizer_hash} "
            f"({message.model_id or 'unnamed model'}): the token ids of the two models do not mean the same"
        )
    check(message.vocab_size > 0, "handshake.vocab_size", ">= 1", message.vocab_size)
