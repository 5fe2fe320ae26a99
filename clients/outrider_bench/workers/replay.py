"""The share of a text that is retrieved: finished documents are learned, new ones are replayed against the truth.

At each position of a new document what was learned proposes a run of tokens; those that agree with the document are
accepted, and with the document's own next token the replay goes on behind them, as a greedy target would.

For comparison the same is done with Arctic Inference's suffix decoding (Snowflake, Apache-2.0), where it is installed:
with its own defaults, which propose only what is likely enough, and with as many tokens as ours propose.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Sequence
from typing import Any, Protocol

from outrider.core.retrieval.ngrams import NgramTier, TokenId
from outrider.core.retrieval.ring import TokenRing
from outrider.core.retrieval.suffix_index import ContextIndex
from outrider.core.retrieval.tiers import LocalTiers

MAX_MATCH_LEN, MAX_RING_MATCH_LEN = 4, 10
ARCTIC = "arctic_inference.suffix_decoding"
_ARCTIC_CONTEXT_LEN = 64
"""The default depth of its trees."""


class Proposer(Protocol):
    """Learns documents and proposes continuations."""

    def learn(self, document: Sequence[TokenId]) -> None:
        """Learn a document that has ended."""

    def settle(self) -> None:
        """Prepare for questions: all documents have been learned."""

    def begin(self, name: str, first: Sequence[TokenId]) -> None:
        """Begin a new document with these tokens."""

    def propose(self, text: Sequence[TokenId], max_len: int) -> Sequence[TokenId]:
        """Propose up to `max_len` tokens that come next."""

    def commit(self, text: Sequence[TokenId], token_ids: Sequence[TokenId], refused: Sequence[TokenId]) -> None:
        """Learn what came behind `text`; the last of these tokens stands where the first of `refused` did, if any."""


class OurTiers:
    """The tiers of a session, a shared tier, and a ring with an index: what a verifier beside a datastore asks."""

    def __init__(self, capacity: int) -> None:
        self._shared = NgramTier(MAX_MATCH_LEN)
        self._ring = TokenRing(capacity, MAX_RING_MATCH_LEN)
        self._tiers = LocalTiers(MAX_MATCH_LEN)

    def learn(self, document: Sequence[TokenId]) -> None:
        self._shared.learn(document)
        self._ring.append(document)

    def settle(self) -> None:
        snapshot = self._ring.snapshot()
        self._ring.swap(snapshot, ContextIndex.build(snapshot.tokens))

    def begin(self, name: str, first: Sequence[TokenId]) -> None:
        self._tiers = LocalTiers(MAX_MATCH_LEN, shared=self._shared)
        self._tiers.record(first)

    def propose(self, text: Sequence[TokenId], max_len: int) -> Sequence[TokenId]:
        context = text[-MAX_RING_MATCH_LEN:]
        found = self._tiers.lookup(context, MAX_MATCH_LEN, max_len)
        in_ring = self._ring.lookup(context, MAX_RING_MATCH_LEN, max_len)
        # At equal length the ring comes last, as in the datastore.
        return (in_ring if in_ring.match_len > found.match_len else found).chain()

    def commit(self, text: Sequence[TokenId], token_ids: Sequence[TokenId], refused: Sequence[TokenId]) -> None:
        if refused:
            context = [*text[-MAX_MATCH_LEN:], *token_ids[:-1]]
            self._tiers.reject(context[-MAX_MATCH_LEN:], refused)
        self._tiers.record(token_ids)


class ArcticCache:
    """Arctic Inference's suffix trees: one of all documents, one of the document at hand."""

    def __init__(self, **options: float) -> None:
        """options: of each `speculate`. Raises ImportError if it is not installed."""
        self._cache: Any = importlib.import_module(ARCTIC).SuffixDecodingCache()
        self._options = options
        self._num_documents = 0
        self._name = ""

    def learn(self, document: Sequence[TokenId]) -> None:
        name = f"finished {self._num_documents}"
        self._num_documents += 1
        self._cache.start_request(name, [])
        self._cache.add_active_response(name, list(document))
        self._cache.stop_request(name)

    def settle(self) -> None:
        """Nothing: the tree is always ready."""

    def begin(self, name: str, first: Sequence[TokenId]) -> None:
        if self._name:
            self._cache.stop_request(self._name)
            self._cache.evict_cached_response(self._name)  # ours do not learn from replayed documents, either
        self._name = name
        self._cache.start_request(name, list(first))

    def propose(self, text: Sequence[TokenId], max_len: int) -> Sequence[TokenId]:
        context = list(text[-_ARCTIC_CONTEXT_LEN:])
        # Without max_spec_tokens it fails: it then reads an attribute that does not exist.
        draft = self._cache.speculate(self._name, context, max_spec_tokens=max_len, **self._options)
        token_ids: list[TokenId] = draft.token_ids
        return token_ids

    def commit(self, text: Sequence[TokenId], token_ids: Sequence[TokenId], refused: Sequence[TokenId]) -> None:
        self._cache.add_active_response(self._name, list(token_ids))


def replay(
    finished: Sequence[Sequence[TokenId]], new: Sequence[Sequence[TokenId]], max_len: int
) -> dict[str, dict[str, Any]]:
    """Replay with each proposer that is installed, document by document; return what each achieves, by its name."""
    # One more for each: the ring separates documents, so that no continuation runs from one into the next.
    capacity = sum(len(document) + 1 for document in finished)
    proposers: dict[str, Proposer] = {"ours": OurTiers(capacity)}
    with contextlib.suppress(ImportError):
        proposers["arctic"] = ArcticCache()
        proposers["arctic_long"] = ArcticCache(max_spec_offset=max_len, min_token_prob=0.0)
    tallies = {name: _Tally() for name in proposers}
    for name, proposer in proposers.items():
        began = time.perf_counter()
        for document in finished:
            proposer.learn(document)
        proposer.settle()
        tallies[name].learn_s = time.perf_counter() - began
    for number, document in enumerate(new):
        for name, proposer in proposers.items():
            tallies[name].add(proposer, f"new {number}", document, max_len)
    num_learned = sum(map(len, finished))
    return {name: tally.to_json(num_learned) for name, tally in tallies.items()}


class _Tally:
    """Counts and times of one proposer."""

    def __init__(self) -> None:
        self.learn_s = 0.0
        self._lookups: list[float] = []
        self._num_proposed = self._num_accepted = self._num_empty = 0

    def add(self, proposer: Proposer, name: str, document: Sequence[TokenId], max_len: int) -> None:
        """Replays a document."""
        done = 1
        proposer.begin(name, document[:done])
        while done < len(document):
            text = document[:done]
            began = time.perf_counter()
            proposed = proposer.propose(text, max_len)
            self._lookups.append(1e6 * (time.perf_counter() - began))
            rest = document[done : done + len(proposed)]
            pairs = enumerate(zip(proposed, rest, strict=False))
            accepted = next((place for place, (ours, theirs) in pairs if ours != theirs), min(len(proposed), len(rest)))
            # Empty where all of the proposal was accepted: `rest` is never longer than it. At the end of the document
            # it may be shorter, and what was proposed beyond is neither right nor wrong.
            refused = proposed[accepted:] if accepted < len(rest) else ()
            self._num_proposed += len(proposed)
            self._num_accepted += accepted
            self._num_empty += not proposed
            proposer.commit(text, document[done : done + accepted + 1], refused)
            done += accepted + 1

    def to_json(self, num_learned: int) -> dict[str, Any]:
        """Per proposal and per token."""
        num_proposals = len(self._lookups)
        return {
            "lookup_us": self._lookups,
            "accepted_per_proposal": self._num_accepted / num_proposals,
            "proposed_per_proposal": self._num_proposed / num_proposals,
            "empty_rate": self._num_empty / num_proposals,
            "learn_us_per_token": 1e6 * self.learn_s / num_learned,
        }
