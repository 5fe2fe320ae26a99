"""Log-probabilities in OpenAI's two shapes, and vLLM's of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from outrider.core.reports import TokenLogprobs
from outrider_gateway.upstream import Upstream

LOWEST = -9999.0
"""Sent for minus infinity, which JSON does not have, as vLLM does."""


async def token_texts(upstream: Upstream, token_ids: Sequence[int], told: Iterable[TokenLogprobs]) -> dict[int, bytes]:
    """Returns the bytes of tokens and of their alternatives."""
    beside = (token_id for each in told for token_id, _ in each.top)
    return await upstream.token_bytes({*token_ids, *beside})


def chat_logprobs(
    token_ids: Sequence[int], told: Sequence[TokenLogprobs], known: Mapping[int, bytes]
) -> dict[str, Any]:
    """Returns the log-probabilities of tokens in the shape of a chat."""
    content = [
        {
            **_chat_token(token_id, each.logprob, known),
            "top_logprobs": [_chat_token(other, logprob, known) for other, logprob in each.top],
        }
        for token_id, each in zip(token_ids, told, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, known: Mapping[int, bytes]) -> dict[str, Any]:
    return {"token": _text(known[token_id]), "logprob": max(logprob, LOWEST), "bytes": list(known[token_id])}


def completion_logprobs(
    token_ids: Sequence[int],
    told: Sequence[TokenLogprobs | None],
    begins: Sequence[int],
    known: Mapping[int, bytes],
    num_top: int,
) -> dict[str, Any]:
    """Returns the log-probabilities of tokens in the shape of a completion.

    Args:
        token_ids: The tokens.
        told: In parallel; None for the first token of a prompt, which has none.
        begins: In parallel: where the text of each begins, in characters.
        known: Bytes by token.
        num_top: Number of alternatives that are sent with each token.
    """
    return {
        "tokens": [_key(known[token_id]) for token_id in token_ids],
        "token_logprobs": [None if each is None else max(each.logprob, LOWEST) for each in told],
        "top_logprobs": [
            None if each is None else _by_key(token_id, each.top, known)
            for token_id, each in zip(token_ids, told, strict=True)
        ]
        if num_top
        else None,
        "text_offset": list(begins),
    }


def _by_key(own: int, top: Iterable[tuple[int, float]], known: Mapping[int, bytes]) -> dict[str, float]:
    """Returns the log-probabilities of the tokens at one place, by their keys. If several tokens have one key, the
    place's own token gets it, or else the most probable one; the others are keyed by their ids, as vLLM writes
    these."""
    keys = {_key(known[own]): own}
    for token_id, _ in top:
        keys.setdefault(_key(known[token_id]), token_id)
    return {
        key if keys[key := _key(known[token_id])] == token_id else f"token_id:{token_id}": max(logprob, LOWEST)
        for token_id, logprob in top
    }


def prompt_logprobs(
    token_ids: Sequence[int], told: Sequence[TokenLogprobs], known: Mapping[int, bytes]
) -> list[dict[str, Any] | None]:
    """Returns the log-probabilities of a prompt in vLLM's shape: None for its first token."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(token_ids[1:], told, strict=True):
        beside = {token_id: (each.logprob, each.rank)}
        for rank, (other, logprob) in enumerate(each.top, 1):
            beside.setdefault(other, (logprob, rank))
        found.append(
            {
                str(other): {"logprob": max(logprob, LOWEST), "rank": rank, "decoded_token": _text(known[other])}
                for other, (logprob, rank) in beside.items()
            }
        )
    return found


def begins_of(ends: Sequence[int], last: int, limit: int | None = None) -> list[int]:
    """Returns where the text of each token begins: at the end of the previous one, and at `last` for the first.
    `limit`: the length at which the text is cut off."""
    begins = [last, *ends[:-1]] if ends else []
    return begins if limit is None else [min(begin, limit) for begin in begins]


def _key(token: bytes) -> str:
    """Returns the key of a token in a completion: its text, or its bytes as OpenAI writes them if the text is only part
    of a character. U+FFFD would stand for many tokens."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(byte) if 0x20 <= byte < 0x7F else f"\\x{byte:02x}" for byte in token)


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
