"""The packed runner: one forward of one model over rows of many sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.params import SamplingParams
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.cpu.contenders import Best
from outrider.models.cuda.graphs import BUCKETS, EXACT_ROWS, INVARIANT_BUCKETS, Acceleration, Capture, Forwards
from outrider.models.cuda.inputs import loop_lens
from outrider.models.cuda.loop import DraftLoop
from outrider.models.cuda.rows import MAX_NUM_BEST, RowDraws
from outrider.models.cuda.steps import CudaSteps
from outrider.models.fusion import FusedStack, is_fusable
from outrider.models.kv_cache import TILE, CacheShape, KVCache, KVPool
from outrider.models.packing import Plan, Segment
from outrider.models.rotary import RotaryTable
from outrider.models.torch.plain import PlainHead, PlainStack
from outrider.models.torch.products import Product, make_head

__all__ = ["KVCache", "Runner", "Segment"]

log = structlog.get_logger(__name__)

DEFAULT_NUM_BLOCKS = 1024
"""Blocks of a pool where nobody says."""


class Runner:
    """Runs a causal language model over packed rows. All calls come from one thread.

    Takes the model over: do not use it elsewhere afterwards.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fuse: bool = True,
        use_kernels: bool = True,
        is_exact: bool = True,
        num_blocks: int | Callable[[], int] = DEFAULT_NUM_BLOCKS,
        block_size: int = TILE,
        use_graphs: bool = True,
        acceleration: Acceleration | None = None,
    ) -> None:
        """
        Args:
            model: Any causal model of the library with standard attention, in its final type and on its device.
            fuse: Takes the layers apart where they are known (`outrider.models.fusion`).
            use_kernels: Runs attention, and what is between the products of known layers, by the kernels of a CPU, if
                the model is on one (`outrider.models.cpu.kernels`).
            is_exact: Uses products whose rows have the same bits whatever their number, where there are such.
            num_blocks: Blocks of the pool of keys and values; or what says so, called when all else has its memory.
            block_size: Slots of a block.
            use_graphs: Captures CUDA graphs, if the model is on such a device.
            acceleration: How a GPU is used. None means as the model's device can be.

        Raises:
            UnsupportedModel: The model has no head, or says no context; or a layer does not attend through the
                library's attention interface, or with extras.
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
        """Most slots of a chain; and why the model's own context is longer, empty if it is not."""
        self._queries_per_key = config.num_attention_heads // self.cache_shape.num_heads
        self.is_fused = fuse and is_fusable(model)
        self._use_kernels = use_kernels and self.device.type == "cpu"
        acceleration = acceleration or Acceleration.on(self.device, use_graphs=use_graphs)
        shape = self.cache_shape
        if acceleration and not self.is_fused:
            log.warning("kernels.not_used", reason=f"layers of a model of type {config.model_type} run as they are")
            acceleration = None
        elif acceleration and not acceleration.suits(self._queries_per_key, shape.head_dim):
            acceleration = None
        self._acceleration = acceleration
        self._use_kernels = self._use_kernels and acceleration is None
        with torch.inference_mode():
            self._head: Product = make_head(head.weight, head.bias, is_exact=is_exact, use_kernels=self._use_kernels)
            self._stack: Stack
            if self.is_fused:
                make_steps = partial(self._make_steps, acceleration, is_exact) if acceleration else None
                self._stack = FusedStack(model, is_exact=is_exact, use_kernels=self._use_kernels, make_steps=make_steps)
            else:
                self._stack = PlainStack(model)
                self._head = PlainHead(model, self._head)
        if acceleration:
            self._take_invariant_products()
        self.has_one_shape = acceleration is not None and is_exact and not self.is_invariant
        """True if all forwards have the same number of rows, so that libraries compute each row alike."""
        self._forwards: Forwards | None = None
        self._loop: DraftLoop | None = None
        if acceleration and callable(num_blocks):
            # Tried with a pool of one block: what is free then is free for the pool.
            self._forwards = self._make_forwards(KVPool(shape, 1, block_size, num_scratch_slots=1), None)
            self._forwards.warm()
        self.pool = KVPool(
            shape,
            num_blocks() if callable(num_blocks) else num_blocks,
            block_size,
            num_scratch_slots=1 if acceleration else 0,
        )
        """Keys and values of all sessions."""
        self.min_rows = 1
        """Least rows of a forward; fewer are filled up."""
        if acceleration:
            self._capture(acceleration)
        else:
            self._check_attention()

    @torch.inference_mode()
    def _take_invariant_products(self) -> None:
        self._head = self._steps.head(self._head)
        # Launches go to the thread's current device.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self._steps.is_invariant:
                self._steps.try_invariant(INVARIANT_BUCKETS)

    def _make_steps(self, acceleration: Acceleration, is_exact: bool, rotary: RotaryTable) -> CudaSteps:
        kernels = acceleration.kernels
        self._steps = CudaSteps(rotary, self.dtype, kernels, self.max_context_len, is_exact=is_exact)
        return self._steps

    @torch.inference_mode()
    def _make_forwards(self, pool: KVPool, capture: Capture | None) -> Forwards:
        stack, acceleration = self._stack, self._acceleration
        assert acceleration is not None
        assert isinstance(stack, FusedStack), "no other model is accelerated"
        return Forwards(
            lambda inputs, num_layers: stack.all_rows(inputs.token_ids, inputs, num_layers),
            self._head,
            self._steps,
            pool,
            queries_per_key=self._queries_per_key,
            max_context_len=self.max_context_len,
            vocab_size=self.vocab_size,
            buckets=(EXACT_ROWS,) if self.has_one_shape else INVARIANT_BUCKETS if self.is_invariant else BUCKETS,
            capture=capture,
            measure=acceleration.measure,
        )

    def _capture(self, acceleration: Acceleration) -> None:
        self._forwards = self._loop = None
        if self.device.type == "cuda":
            # What was taken to try it goes to the pool of the graphs.
            torch.cuda.empty_cache()
        self._forwards = self._make_forwards(self.pool, acceleration.capture)

    def give_up_exactness(self) -> None:
        """Takes the next way to exact rows on a GPU from here on: behind batch-invariant products come forwards that
        all have the same number of rows, and behind these, which are the last way, forwards of the fewest."""
        if self._acceleration is not None and (self.is_invariant or self.has_one_shape):
            self.has_one_shape = self.is_invariant
            self._steps.is_invariant = False
            self._capture(self._acceleration)

    @property
    def is_invariant(self) -> bool:
        """True if a GPU's products are batch-invariant, so that rows are exact in forwards of any number of them."""
        return self._acceleration is not None and self._steps.is_invariant

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows, ascending, that forwards are filled up to: those within one cost the same. More rows than
        the last one has are run in several forwards. Empty if a forward has as many rows as it is asked for."""
        return () if self._forwards is None else self._forwards.buckets

    @property
    def takes_gaps(self) -> bool:
        """True if positions of a session may be left out. A GPU's kernels read a slot for each of them."""
        return self._forwards is None

    @property
    def graphs(self) -> str:
        """The way in which forwards reach a GPU: `one-shape`, `buckets`, `eager` (one kernel after the other), or
        `none`, where there are no graphs for the device or for the model."""
        if self._forwards is None:
            return "none"
        if not self._forwards.has_graphs:
            return "eager"
        return "one-shape" if self.has_one_shape else "buckets"

    @property
    def fused_ms(self) -> dict[int, tuple[float, float]]:
        """Milliseconds below the head by rows of a forward: with fused products, and with a library's. Only of those
        that both were tried for (`outrider.models.cuda.few_rows`)."""
        return {} if self._forwards is None else self._forwards.fused_ms

    @property
    def compiler(self) -> str:
        """Version of what compiled a GPU's kernels; empty where none are used."""
        return self._acceleration.kernels.compiler if self._acceleration else ""

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
        """Appends the rows of every segment to its cache, and returns the logits that are wanted.

        Args:
            segments: One for each session.
            num_layers: Runs the first layers alone, for tests of the arithmetic. None means all; a model that runs as
                the library has it runs all in any case.
            draws: Describes how some of the wanted rows will be drawn from: a GPU is told so in the one copy that
                brings the inputs of its forward. None tells it nothing.
            drawn: Whole numbers [draws]: tokens that the device draws, or has drawn, without the host having read them.
                Token ids of the segments may be placeholders for them (`outrider.models.packing.placeholder`). What is
                below 0 counts as some token, so that its rows mean nothing. None: there are no placeholders.

        Returns:
            float32 [sum of num_logits, vocab_size], in the order of the segments.

        Raises:
            ValueError: A segment is malformed, or two segments share a cache. No cache has changed then.
        """
        if not segments:
            return torch.empty(0, self.vocab_size, device=self.device)
        if self._forwards is not None:
            found = self._forwards.forward(segments, num_layers, draws, drawn)
            return torch.empty(0, self.vocab_size, device=self.device) if found is None else found
        plan = Plan(segments, self._queries_per_key, self.min_rows, use_kernels=self._use_kernels, drawn=drawn)
        hidden = self._stack(plan, num_layers)
        plan.commit()
        if not plan.wanted_rows:
            return torch.empty(0, self.vocab_size, device=self.device)
        # The head sees the wanted rows alone: most rows of a prompt need no logits.
        logits = self._head(hidden)[: plan.num_wanted]
        return logits if logits.dtype is torch.float32 else logits.float()

    def make_loop(self) -> None:
        """Captures graphs of several steps of chains, which only draft models need, where forwards are graphs. Takes
        seconds the first time, and belongs in the thread that loads; does nothing after that."""
        if self._loop is not None or self._forwards is None or self._acceleration is None:
            return
        if self.vocab_size >= MAX_NUM_BEST:
            kernels = self._acceleration.kernels
            # What failed for single forwards is not tried, and told of, again.
            capture = self._acceleration.capture if self._forwards.has_graphs else None
            self._loop = DraftLoop(self._forwards, kernels.best_tokens, capture)

    @property
    def has_loop(self) -> bool:
        """True if chains may grow by several steps at once."""
        return self._loop is not None

    def loop_lens(self, num_steps: int) -> list[int]:
        """Returns how many steps `draft` can make at once where so many are wanted, see
        `outrider.models.cuda.inputs.loop_lens`; none without a loop."""
        return [] if self._loop is None else loop_lens(num_steps)

    def draft(
        self,
        segments: Sequence[Segment],
        params: Sequence[SamplingParams],
        first_indices: Sequence[int],
        length: int,
    ) -> list[list[Best | None]]:
        """Appends the rows of every segment to its cache, and finds the best tokens behind them for several steps, each
        behind the best one of the step before.

        Args:
            segments: Chains of at most 128 rows, one for each session. Only their own rows count as used slots of
                their caches afterwards. Those of the steps are written behind them; who goes on with a step's token
                appends it.
            params: Parameters by which each session draws.
            first_indices: For each session, how many tokens the generation put out before the first one drawn.
            length: Steps: one of those that `loop_lens` returns.

        Returns:
            For each segment and step, the `MAX_NUM_BEST` best tokens of `logits / temperature + noise` and their
            scores, the best first, equals by the lower id; scores of minus infinity stand for tokens that are not
            allowed. None where the host has to draw. What stands behind that step means nothing.

        Raises:
            ValueError: A segment is malformed, or has too many rows, or two share a cache. No cache has changed then.
            OutOfBlocks: The pool has no room for all steps.
        """
        assert self._loop is not None, "`loop_lens` says if there is one"
        return self._loop.run(segments, params, first_indices, length)

    def large_products(self) -> list[tuple[Product, int]]:
        """Returns the large products of the layers, each with its inputs, for measurements. None of a model that runs
        as the library has it."""
        return self._stack.large_products() if isinstance(self._stack, FusedStack) else []

    @torch.inference_mode()
    def _check_attention(self) -> None:
        """Runs one row, so that a model that would give wrong logits fails when it is loaded."""
        cache = self.new_cache()
        plan = Plan([Segment(cache, [0], 1)], self._queries_per_key, use_kernels=self._use_kernels)
        try:
            self._stack(plan)
        except UnsupportedModel:
            raise
        except Exception as error:
            # Anything: the code is the library's, and was not written to be run this way.
            raise UnsupportedModel(
                f"its layers do not run over packed rows: {type(error).__name__}: {error}"
            ) from error
        finally:
            cache.clear()
        if plan.num_attended != self.cache_shape.num_layers:
            raise UnsupportedModel(
                f"{plan.num_attended} of {self.cache_shape.num_layers} layers use the attention interface"
            )


class Stack(Protocol):
    """Runs everything of a model below its head."""

    def __call__(self, plan: Plan, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of the wanted rows: [num wanted rows, hidden]."""


def cache_shape(model: PreTrainedModel) -> CacheShape:
    """Returns the shape of a model's keys and values. Raises UnsupportedModel if it has no head, or no keys."""
    config = model.config.get_text_config()
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    num_queries: int | None = getattr(config, "num_attention_heads", None)
    if head is None or not num_queries:
        raise UnsupportedModel(f"a {type(model).__name__} has no {'attention' if head is not None else 'head'}")
    return CacheShape(
        num_layers=config.num_hidden_layers,
        # Missing or None where every query head has keys and values to itself.
        num_heads=getattr(config, "num_key_value_heads", None) or num_queries,
        # Heads may be wider than the quotient: Qwen3-0.6B has 16 of 128 at a hidden size of 1024.
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_queries,
        # On a CPU sums are exact in float32 only, and attention of bfloat16 is several times as slow.
        dtype=torch.float32 if head.weight.device.type == "cpu" else head.weight.dtype,
        device=head.weight.device,
    )


class Context(NamedTuple):
    """Holds the slots of a chain for which the runner is exact."""

    length: int
    """Most of them."""
    reason: str = ""
    """Says why the model's own context is longer; empty if it is not."""


def context_of(config: Any) -> Context:
    """Returns the context for which the runner is exact, by the config of a model's text. Raises UnsupportedModel if it
    says none."""
    whole: int | None = getattr(config, "max_position_embeddings", None)
    if not whole:
        raise UnsupportedModel("its config has no max_position_embeddings")
    contexts = [Context(whole)]
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    # A sliding window hides only what lies further back than its width, so up to that length it is full attention.
    # Mistral's config has a window and no `layer_types`: it is that of all layers.
    if window and (layer_types is None or "sliding_attention" in layer_types):
        contexts.append(Context(window, f"beyond {window} tokens its attention is a sliding window"))
    # These choose their frequencies by the longest text of a call, for all texts in it. Up to this length they have one
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
