"""Grammars of structured output, compiled for a tokenizer by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.core.structure import Matcher, Structure, StructureBroken, StructureKind
from outrider.core.tree import TokenId
from outrider.models.sampling import Sampler

MAX_DESCRIPTION_BYTES = 64 * 1024
"""Longest description of a grammar."""
NUM_CACHED = 64
"""Compiled grammars that are cached: an application asks for the same ones again and again."""
MAX_FORCED = 64
"""Most forced tokens that are drafted at a time: as many as a round verifies on one path."""
MANY_ALLOWED = 512
"""If a grammar allows more tokens than this, the whole row is drawn from. Otherwise noise is computed for the allowed
tokens alone: a tenth of the work if, of a large vocabulary, only a comma may follow."""
LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000)
"""Bounds of time and memory of one grammar: 20 ms at first and 17 ms a token by the library's own measure, and some 100
MB."""


ALLOWS_NOTHING = "allows no text at all"
_NOTHING_FOLLOWS = "NoExtensionBias"
"""The library's word for a beginning after which nothing may stand."""


class BadStructure(ValueError):
    """A description is invalid or too complex. The message says where."""


class Grammars:
    """Compiles grammars for one tokenizer, and caches them. Any thread may use it."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[TokenId]) -> None:
        """
        Args:
            tokenizer: A fast tokenizer of transformers.
            vocab_size: Token ids are below it.
            eos_token_ids: Tokens that end a text where its grammar allows an end.
        """
        self._hf_tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        named = set(tokenizer.get_vocab().values())
        # A tokenizer may have more tokens than the model. Masks end with the model's, so none lets the others through.
        self._num_tokens = max(vocab_size, max(named) + 1)
        self._holes = set(range(max(named))) - named
        self._lock = threading.Lock()
        self._tokenizers: dict[bool, llguidance.LLTokenizer] = {}
        """The tokenizer in the library's form; the key is True if special tokens count as text."""
        self._cache: OrderedDict[Structure, llguidance.LLMatcher] = OrderedDict()
        self._plain: llguidance.LLTokenizer | None = None

    def token_bytes(self, token_ids: Sequence[TokenId]) -> list[bytes]:
        """Returns the bytes that each token stands for: for a special token those that it is written as, for an id
        without a token none. Takes up to seconds the first time."""
        with self._lock:
            plain = self._plain_tokenizer()
        spell = self._hf_tokenizer.backend_tokenizer.decode
        # The library has no bytes for the character of code 0.
        return [
            b"" if token_id in self._holes else known or spell([token_id], skip_special_tokens=False).encode()
            for token_id, known in zip(token_ids, _bytes_of(plain, token_ids), strict=True)
        ]

    def prepare(self, structure: Structure) -> None:
        """Makes the tokenizer that a structure needs, unless there is one. Takes up to seconds."""
        self._ll_tokenizer(special_tokens_as_text=structure.special_tokens_as_text)

    def matcher(self, structure: Structure) -> GrammarMatcher:
        """Returns a matcher at the beginning of a text. Takes milliseconds, and without `prepare` up to seconds.

        Raises:
            BadStructure: The description is invalid or too complex.
        """
        with self._lock:
            compiled = self._cache.get(structure)
        if compiled is None:
            # Outside of the lock: a slow compilation must not keep others from compiled grammars.
            compiled = self._compiled(structure)
        with self._lock:
            self._cache[structure] = compiled
            self._cache.move_to_end(structure)
            while len(self._cache) > NUM_CACHED:
                self._cache.popitem(last=False)
            return GrammarMatcher(compiled.deep_copy(), self._vocab_size)

    def _compiled(self, structure: Structure) -> llguidance.LLMatcher:
        length = len(structure.text.encode())
        if length > MAX_DESCRIPTION_BYTES:
            raise BadStructure(f"must be at most {MAX_DESCRIPTION_BYTES} bytes long, got {length}")
        if structure.kind is StructureKind.JSON and structure.text.strip() == "false":
            raise BadStructure(ALLOWS_NOTHING)  # the library takes options only with objects
        try:
            grammar = _grammar_of(structure)
        except ValueError as error:
            raise BadStructure(f"cannot be read: {error}") from error
        tokenizer = self._ll_tokenizer(special_tokens_as_text=structure.special_tokens_as_text)
        if structure.begins_after:
            added = self._hf_tokenizer.backend_tokenizer.get_added_tokens_decoder()
            grammar = _behind_marker(grammar, structure.begins_after, tokenizer, added)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise BadStructure(f"does not compile: {_reason(matcher)}")
        # The first mask costs most: a grammar that is too complex fails here, before a token was generated.
        matcher.compute_bitmask()
        if matcher.is_error():
            reason = _reason(matcher)
            raise BadStructure(ALLOWS_NOTHING if reason == _NOTHING_FOLLOWS else f"is too complex: {reason}")
        return matcher

    def _ll_tokenizer(self, *, special_tokens_as_text: bool) -> llguidance.LLTokenizer:
        with self._lock:
            if special_tokens_as_text not in self._tokenizers:
                spelling = _Spelling(
                    self._backend(), self._plain_tokenizer(), special_tokens_as_text=special_tokens_as_text
                )
                self._tokenizers[special_tokens_as_text] = llguidance.LLTokenizer(
                    llguidance.TokenizerWrapper(spelling), n_vocab=self._num_tokens, eos_token=self._eos_token_ids
                )
            return self._tokenizers[special_tokens_as_text]

    def _plain_tokenizer(self) -> llguidance.LLTokenizer:
        """Returns the tokenizer as the library reads it by itself. The caller holds the lock."""
        if self._plain is None:
            text = _without_holes(self._backend().to_str(), self._holes)
            self._plain = llguidance.LLTokenizer(text, n_vocab=self._num_tokens, eos_token=self._eos_token_ids)
        return self._plain

    def _backend(self) -> Tokenizer:
        # A copy, so that padding and truncation of the tokenizer that encodes prompts stay as they are.
        backend: Tokenizer = copy(self._hf_tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return backend


class _Spelling:
    """Tells llguidance what each token is written as, and how a text is cut into tokens."""

    bos_token_id = None

    def __init__(self, backend: Tokenizer, plain: llguidance.LLTokenizer, *, special_tokens_as_text: bool) -> None:
        """
        Args:
            backend: The tokenizer.
            plain: The same tokenizer, as the library reads it by itself: an added token is special if the tokenizer
                says so, or if it is written as a tag.
            special_tokens_as_text: True if the only special added tokens are those that end a text.
        """
        self.eos_token_id, token_ids = plain.eos_tokens[0], range(plain.vocab_size)
        self.tokens = _bytes_of(plain, token_ids)
        special, self._cutting = {token_id for token_id in token_ids if plain.is_special_token(token_id)}, plain
        if special_tokens_as_text:
            special = special - backend.get_added_tokens_decoder().keys() | set(plain.eos_tokens)
        else:
            # A forced text must not be tokenized into a special token, which would not match the grammar.
            without = json.dumps({**json.loads(backend.to_str()), "added_tokens": []})
            self._cutting = llguidance.LLTokenizer(without, n_vocab=plain.vocab_size, eos_token=plain.eos_tokens)
        self.special_token_ids = sorted(special)

    def __call__(self, text: bytes) -> list[TokenId]:
        # Not by the backend's own method: with some tokenizers it puts a blank before a text.
        return self._cutting.tokenize_bytes(text)


def _without_holes(tokenizer: str, holes: Collection[TokenId]) -> str:
    """Returns a tokenizer, as JSON, with a special token for each id that has no token: the library counts tokens, and
    takes ids above their number for unknown."""
    if not holes:
        return tokenizer
    state = json.loads(tokenizer)
    names = {f"<|no token {token_id}|>": token_id for token_id in sorted(holes)}
    state["model"]["vocab"].update(names)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    state["added_tokens"] += [{"id": names[name], "content": name, "special": True, **flags} for name in names]
    return json.dumps(state)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Returns the error of a matcher, without the library's inner state, which follows it."""
    return str(matcher.get_error()).partition("\n<state>")[0].strip()


def _bytes_of(tokenizer: llguidance.LLTokenizer, token_ids: Sequence[TokenId]) -> list[bytes]:
    return [tokenizer.decode_bytes([token_id]) for token_id in token_ids]


def _grammar_of(structure: Structure) -> str:
    """Returns a description in the library's own language. Raises ValueError."""
    match structure.kind:
        case StructureKind.JSON | StructureKind.JSON_OBJECT:
            schema = structure.text if structure.kind is StructureKind.JSON else '{"type": "object"}'
            if schema.strip() == "true":
                schema = "{}"  # equivalent, and the library takes options only with objects
            # With free whitespace, models that have finished write blanks up to the limit.
            return llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
        case StructureKind.REGEX:
            return llguidance.LLMatcher.grammar_from_regex(structure.text)
        case StructureKind.GRAMMAR:
            return llguidance.grammar_from("grammar", structure.text)
        case StructureKind.CHOICE:
            return llguidance.grammar_from("regex", _regex_of(json.loads(structure.text)))


def _behind_marker(
    grammar: str, marker: str, tokenizer: llguidance.LLTokenizer, added: Mapping[TokenId, AddedToken]
) -> str:
    """Returns the grammar of texts in which another grammar holds after a marker.

    Before the marker anything may stand, but the text may not end.
    """
    # The library's own language is either a list of grammars in JSON, here of one, or one in Lark's notation.
    answer = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    # The library never matches these by their text, so they are named.
    named = {token_id: token for token_id, token in added.items() if tokenizer.is_special_token(token_id)}
    meant = [token_id for token_id, token in named.items() if token.content == marker]
    if meant:
        others = [token_id for token_id, token in named.items() if not token.special and token_id not in meant]
        other = f" | <{json.dumps(others)}>" if others else ""
        thoughts = f"start: (TEXT{other})* <{json.dumps(meant)}> @answer\nTEXT: /(?s:.+)/"
    else:
        thoughts = f"start: thoughts @answer\nthoughts[suffix={json.dumps(marker)}]: /(?s:.*)/"
    return json.dumps({"grammars": [{"lark_grammar": thoughts}, {**answer, "name": "answer"}]})


def _regex_of(choices: Sequence[str]) -> str:
    # Not `re.escape`, which escapes characters that Rust's expressions do not allow to be escaped.
    return "|".join("".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in choice) for choice in choices)


class GrammarMatcher:
    """Follows one text through a compiled grammar; see `outrider.core.structure.Matcher`."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    def consume(self, token_id: TokenId) -> bool:
        """See `Matcher`."""
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        """See `Matcher`."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def num_allowed(self, token_ids: Sequence[TokenId]) -> int:
        """See `Matcher`."""
        count = int(self._matcher.validate_tokens(list(token_ids)))
        self._check()
        return count

    def forced(self) -> list[TokenId]:
        """See `Matcher`."""
        token_ids = [] if self.is_over else self._matcher.compute_ff_tokens()[:MAX_FORCED]
        self._check()
        return list(token_ids)

    @property
    def is_over(self) -> bool:
        """See `Matcher`."""
        return bool(self._matcher.is_stopped())

    def mask(self) -> npt.NDArray[np.bool_]:
        """Returns the tokens that may follow: bool [vocab_size]. Raises StructureBroken if there are none."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not mask.any():
            raise StructureBroken("no token is allowed")
        return mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise StructureBroken(_reason(self._matcher))


def draw_allowed(
    sampler: Sampler, logits: Tensor, matcher: Matcher, params: SamplingParams, output_index: int
) -> TokenId:
    """Draws a token for one row of logits, float32 [1, vocab], from those that may follow: see `Sampler.draw`.

    If other parameters have forbidden all of these, they count as equal: the grammar leaves no other choice.
    """
    assert isinstance(matcher, GrammarMatcher)
    mask = matcher.mask()
    if np.count_nonzero(mask) > MANY_ALLOWED:
        (token_id,) = sampler.draw(_masked(logits, mask), [params], [output_index])
        return token_id
    token_ids = np.flatnonzero(mask)
    # One token: there is nothing to draw, and no device to wait for.
    return int(token_ids[0]) if len(token_ids) == 1 else sampler.draw_among(logits, token_ids, params, output_index)


@torch.inference_mode()
def mask_row(logits: Tensor, row: int, matcher: Matcher) -> None:
    """Masks the tokens that may not follow in one row of logits, in place: float32 [rows, vocab].

    If other parameters have forbidden all tokens that may follow, they count as equal.
    """
    assert isinstance(matcher, GrammarMatcher)
    logits[row] = _masked(logits[row : row + 1], matcher.mask())[0]


def _masked(logits: Tensor, mask: npt.NDArray[np.bool_]) -> Tensor:
    """Returns a new row of logits with minus infinity for tokens that are not allowed: float32 [1, vocab]."""
    # The logits may be padded beyond the vocabulary.
    padded = np.zeros(logits.shape[-1], dtype=np.bool_)
    padded[: len(mask)] = mask
    allowed = torch.from_numpy(padded).to(logits.device)
    row = torch.where(allowed, logits, -torch.inf)
    # Finding a maximum takes a twentieth of the time of comparing each value with minus infinity.
    return row if bool(row.amax() > -torch.inf) else torch.zeros_like(row).masked_fill_(~allowed, -torch.inf)
