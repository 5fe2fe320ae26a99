"""Changes of logits before temperature and filters: bias, penalties, and tokens that are forbidden for now.

They follow from the tokens before a row, which are the committed tokens and the path of its node. So each row of a
draft tree has its own. The target adjusts its logits before it draws. A draft model adjusts its own before it guesses,
because it guesses the target's draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.core.params import SamplingParams
from outrider.core.tree import DraftTree, Node, TokenId, path_to

INITIAL_CAPACITY = 256
"""Different tokens that there is room for at first."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """The change of one row of logits, in the order of its fields."""

    bias_token_ids: npt.NDArray[np.int64]
    bias: npt.NDArray[np.float32]
    """Added, in parallel with `bias_token_ids`."""
    seen_token_ids: npt.NDArray[np.int64]
    """Tokens that prompt or output have, each once; empty without penalties."""
    repetition_penalty: float
    """Divides their logits where they are positive, and multiplies them elsewhere."""
    subtrahends: npt.NDArray[np.float32]
    """Taken off their logits, in parallel with `seen_token_ids`."""
    forbidden_token_ids: npt.NDArray[np.int64]
    """Tokens that are not drawn."""

    @property
    def is_empty(self) -> bool:
        """True if no logit of the row changes."""
        return not (len(self.bias_token_ids) or len(self.seen_token_ids) or len(self.forbidden_token_ids))


class TextAdjustments:
    """Follows one generation's text, and says how the logits after any node of its draft tree are adjusted."""

    def __init__(self, params: SamplingParams, tree: DraftTree, num_prompt_tokens: int) -> None:
        """
        Args:
            params: Those of the generation.
            tree: Its draft tree, whose committed tokens are followed.
            num_prompt_tokens: How many of them, from the first, are the prompt.
        """
        self._params, self._tree, self._num_prompt_tokens = params, tree, num_prompt_tokens
        self._num_counted = 0
        self._places: dict[TokenId, int] = {}
        self._seen = np.empty(INITIAL_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(INITIAL_CAPACITY, dtype=np.int64)
        self._bias_token_ids = np.array([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self._bias = np.array([bias for _, bias in params.logit_bias], dtype=np.float32)
        self._stops = np.array(params.stop_token_ids, dtype=np.int64)
        self._bad_words: dict[TokenId, list[tuple[TokenId, ...]]] = {}
        """Bad words of several tokens, by their last token but one: the last one is forbidden after it."""
        for word in params.bad_words_token_ids:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._bad_tokens = sorted({word[0] for word in params.bad_words_token_ids if len(word) == 1})

    def behind(self, node: Node, phrase: Sequence[TokenId] = ()) -> Adjustment:
        """Returns the adjustment of the logits after a node of the tree, or its root, and further tokens after it."""
        path = [*path_to(node, self._tree.root), *phrase]
        self._count_committed()
        seen, subtrahends = self._penalised(path)
        return Adjustment(
            self._bias_token_ids,
            self._bias,
            seen,
            self._params.repetition_penalty,
            subtrahends,
            self._forbidden(path),
        )

    def _count_committed(self) -> None:
        committed = self._tree.committed
        if self._params.has_penalties:
            for position in range(self._num_counted, len(committed)):
                place = self._place(committed[position])
                self._counts[place] += position >= self._num_prompt_tokens
        self._num_counted = len(committed)

    def _place(self, token_id: TokenId) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place >= len(self._seen):
            self._seen = np.concatenate((self._seen, np.empty_like(self._seen)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._seen[place] = token_id
        return place

    def _penalised(self, path: Sequence[TokenId]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Returns the tokens that committed text and path have, and what is taken off their logits."""
        num_seen, params = len(self._places), self._params
        seen, counts = self._seen[:num_seen], self._counts[:num_seen]
        if path and params.has_penalties:
            fresh: dict[TokenId, int] = {}
            counts = counts.copy()
            for token_id in path:
                place = self._places.get(token_id)
                if place is None:
                    fresh[token_id] = fresh.get(token_id, 0) + 1
                else:
                    counts[place] += 1
            if fresh:
                seen = np.concatenate((seen, np.fromiter(fresh, np.int64, len(fresh))))
                counts = np.concatenate((counts, np.fromiter(fresh.values(), np.int64, len(fresh))))
        subtrahends = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return seen, subtrahends.astype(np.float32)

    def _forbidden(self, path: Sequence[TokenId]) -> npt.NDArray[np.int64]:
        committed = self._tree.committed
        forbidden = list(self._bad_tokens)
        last = path[-1] if path else committed[-1]
        for word in self._bad_words.get(last, ()):
            num_before = len(word) - 1
            before = path[-num_before:]
            if len(before) < num_before:
                before = [*committed[max(0, len(committed) - (num_before - len(before))) :], *before]
            if tuple(before) == word[:-1]:
                forbidden.append(word[-1])
        if len(committed) - self._num_prompt_tokens + len(path) < self._params.min_tokens:
            return np.concatenate((np.array(forbidden, dtype=np.int64), self._stops))
        return np.array(forbidden, dtype=np.int64)
