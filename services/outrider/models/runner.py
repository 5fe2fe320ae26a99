"""The packed runner: one forward of one model over rows of many sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.draws import Best, RowDraws
from outrider.models.kv_cache import CacheShape, KVCache, KVPool
from outrider.models.packing import Segment
from outrider.models.torch.products import MakeProduct, PartialHead, Product

__all__ = ["KVCache", "Runner", "Segment"]

DEFAULT_NUM_BLOCKS = 1024
"""Default blocks of a pool."""
NumBlocks = int | Callable[[], int]
"""Blocks of a pool; or a function that returns them, called when everything else has its memory."""


class Runner(ABC):
    """Runs a causal language model over packed rows. All calls come from one thread.

    Takes the model over: do not use it elsewhere afterwards. `outrider.models.backend` makes that of a device.
    """

    PACKAGES: ClassVar[tuple[str, ...]]
    """Packages of `outrider.models` that the bits of the logits depend on."""
    pool: KVPool
    """Keys and values of all sessions."""

    def __init__(self, model: PreTrainedModel, *, is_fused: bool) -> None:
        """
        Args:
            model: Any causal model of the library with standard attention, in its final type and on its device.
            is_fused: True if its layers are taken apart (`outrider.models.fusion`).

        Raises:
            UnsupportedModel: The model has no head, or states no context.
        """
        model.requires_grad_(False).train(False)
        self.cache_shape = cache_shape(model)
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        config = model.config.get_text_config()
        self.dtype: torch.dtype = head.weight.dtype
        self.device: torch.device = head.weight.device
        self.vocab_size: int = head.weight.shape[0]
        """Width of the logits."""
        self.max_context_len, self.context_reason = context_of(config)
        """Most slots of a chain; and the reason if the model's own context is longer, otherwise empty."""
        self.queries_per_key = config.num_attention_heads // self.cache_shape.num_heads
        """Query heads that share a key-value head."""
        self.is_fused = is_fused
        self.head_token_ids = head_token_ids(model)
        """Whole numbers [tokens]: the only tokens that have logits; those of the others are minus infinity. None means
        that all have."""
        if self.head_token_ids is not None and not is_fused:
            raise UnsupportedModel(f"a model of type {config.model_type} cannot have a head of some tokens alone")
        self.min_rows = 1
        """Least rows of a forward; fewer are padded. Unused if there are `buckets`."""

    def make_head(self, head: Any, make: MakeProduct) -> Product:
        """Makes the product that gives the logits, of the model's own head."""
        if self.head_token_ids is None:
            return make(head.weight, head.bias)
        bias = None if head.bias is None else head.bias[self.head_token_ids]
        return PartialHead(make(head.weight[self.head_token_ids], bias), self.head_token_ids, self.vocab_size)

    # Properties of forwards.

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows, ascending, that forwards are padded to: all forwards within one bucket cost the same. More
        rows than the last bucket has run in several forwards. Empty if forwards are not padded to buckets."""
        return ()

    @property
    def takes_gaps(self) -> bool:
        """True if positions of a session may be left out. A GPU's kernels read a slot for each position."""
        return True

    @property
    def graphs(self) -> str:
        """Way in which forwards are launched on a GPU: `one-shape`, `buckets`, `eager` (one kernel after the other), or
        `none` if there are no graphs for the device or for the model."""
        return "none"

    @abstractmethod
    def exact_ways(self) -> Iterator[None]:
        """Switches the runner to one way after the other in which rows may be exact, the fastest first. The caller
        stops when it finds rows exact; after the last way, rows are not exact."""

    @abstractmethod
    def arithmetic(self) -> list[str]:
        """Returns what the bits of the logits depend on, besides the weights and the code of `PACKAGES`: compilers,
        libraries, the processor."""

    @abstractmethod
    def large_products(self) -> list[tuple[Product, int]]:
        """Returns the large products of the layers, each with its inputs, for measurements. Empty for a model that runs
        by the library's own code."""

    # Forwards.

    def new_cache(self, salt: str | None = None) -> KVCache:
        """Makes an empty cache; see `KVPool.new_cache`."""
        return self.pool.new_cache(salt)

    @torch.inference_mode()
    def forward(
        self,
        segments: Sequence[Segment],
        num_layers: int | None = None,
        draws: RowDraws | None = None,
        drawn: Tensor | None = None,
    ) -> Tensor:
        """Appends the rows of every segment to its cache, and returns the wanted logits.

        Args:
            segments: One for each session.
            num_layers: Runs the first layers alone, for tests of the arithmetic. None means all. A model that runs by
                the library's own code always runs all.
            draws: Describes how some of the wanted rows will be drawn from. A GPU gets it in the one copy that brings
                the inputs of its forward. None means no description.
            drawn: Whole numbers [draws]: tokens that the device draws, or has drawn, and that the host has not read.
                Token ids of the segments may be placeholders for them (`outrider.models.packing.placeholder`). Numbers
                below 0 count as some token, and their rows mean nothing. None means that there are no placeholders.

        Returns:
            float32 [sum of num_logits, vocab_size], in the order of the segments.

        Raises:
            ValueError: A segment is malformed, or two segments share a cache. No cache has changed then.
        """
        found = self.run(segments, num_layers, draws, drawn) if segments else None
        return torch.empty(0, self.vocab_size, device=self.device) if found is None else found

    @abstractmethod
    def run(
        self, segments: Sequence[Segment], num_layers: int | None, draws: RowDraws | None, drawn: Tensor | None
    ) -> Tensor | None:
        """Does the work of `forward` for at least one segment. Returns None if no logits are wanted."""

    # Several steps of chains at once.

    def make_loop(self) -> None:  # noqa: B027  # most runners have none
        """Captures graphs of several steps of chains, if forwards are graphs. Only draft models need them. Takes
        seconds the first time, so call it in the thread that loads; does nothing after that."""

    @property
    def has_loop(self) -> bool:
        """True if chains may grow by several steps at once."""
        return False

    def loop_lens(self, num_steps: int) -> list[int]:
        """Returns how many steps `draft` can make at once if `num_steps` are wanted; empty without a loop."""
        return []

    def draft(
        self,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> list[list[Best | None]]:
        """Appends the rows of every segment to its cache, and finds the best tokens after them for several steps, each
        after the best token of the step before.

        Args:
            segments: Chains of at most 128 rows, one for each session. Only their own rows count as used slots of their
                caches afterwards. Rows of the steps are written after them; a caller that goes on with a step's token
                appends it.
            params: Parameters by which each session draws.
            first_indices: For each session, how many tokens the generation put out before the first one that is drawn.
            length: Number of steps, one of those that `loop_lens` returns.

        Returns:
            For each segment and step, the `MAX_NUM_BEST` best tokens of `logits / temperature + noise` and their
            scores, the best first, equals by the lower id; scores of minus infinity stand for tokens that are not
            allowed. None if the host has to draw. Results after that step mean nothing.

        Raises:
            ValueError: A segment is malformed, or has too many rows, or two share a cache. No cache has changed then.
            OutOfBlocks: The pool has no room for all steps.
        """
        raise NotImplementedError("`loop_lens` says if there is a loop")


def resolved(num_blocks: NumBlocks) -> int:
    """Returns the blocks of a pool. Called when everything else has its memory."""
    return num_blocks() if callable(num_blocks) else num_blocks


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Returns the shape of a model's keys and values. Raises UnsupportedModel if it has no head, or no keys."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_queries: int | None = getattr(config, "num_attention_heads", None)
    if head is None or not num_queries:
        raise UnsupportedModel(f"a {type(model).__name__} has no {'attention' if head is not None else 'head'}")
    return CacheShape(
        num_layers=config.num_hidden_layers,
        # Missing or None if every query head has its own keys and values.
        num_heads=getattr(config, "num_key_value_heads", None) or num_queries,
        # Heads may be wider than hidden size / heads: Qwen3-0.6B has 16 of 128 at a hidden size of 1024.
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_queries,
        # On a CPU sums are exact in float32 only, and attention of bfloat16 is several times as slow.
        dtype=torch.float32 if head.weight.device.type == "cpu" else head.weight.dtype,
        device=head.weight.device,
    )


def head_token_ids(model: PreTrainedModel) -> Tensor | None:
    """Returns the tokens to which the config of a model limits its head, `head_token_ids`: whole numbers [tokens], on
    its device. None means that it does not. Raises UnsupportedModel if they are no tokens of the model."""
    listed = getattr(model.config, "head_token_ids", None)
    if listed is None:
        return None
    weight: Tensor = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    if not (isinstance(listed, list) and set(map(type, listed)) == {int} and len(set(listed)) == len(listed)):
        raise UnsupportedModel("its head_token_ids must be a list of different token ids")
    if min(listed) < 0 or max(listed) >= len(weight):
        raise UnsupportedModel(f"its head_token_ids must be below {len(weight)}, the rows of its head")
    return torch.tensor(sorted(listed), device=weight.device)


class Context(NamedTuple):
    """Holds the number of slots of a chain for which the runner is exact."""

    length: int
    """Most slots."""
    reason: str = ""
    """Says why the model's own context is longer; empty if it is not."""


def context_of(config: Any) -> Context:
    """Returns the context for which the runner is exact, by the config of the text model. Raises UnsupportedModel if it
    states none."""
    whole: int | None = getattr(config, "max_position_embeddings", None)
    if not whole:
        raise UnsupportedModel("its config has no max_position_embeddings")
    contexts = [Context(whole)]
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    # A sliding window hides only positions further back than its width, so up to that length it is full attention.
    # Mistral's config has a window and no `layer_types`: the window applies to all layers.
    if window and (layer_types is None or "sliding_attention" in layer_types):
        contexts.append(Context(window, f"beyond {window} tokens its attention is a sliding window"))
    # These choose their frequencies by the longest text of a call, for all texts in it. Up to this length there is one
    # choice. (`dynamic` begins to choose beyond the whole context.)
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            length = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            contexts.append(Context(length, f"beyond {length} tokens its rotary embedding (longrope) is another one"))
    return min(contexts, key=lambda context: context.length)


def _ropes(config: Any) -> list[dict[str, Any]]:
    """Returns the rotary embeddings of a config: one, or one for each type of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
