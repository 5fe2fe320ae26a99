"""vLLM's interface for drafters, and nothing else: `{"method": "custom_class", "model": "outrider.vllm.Proposer"}`."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import structlog

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.core.tree import TokenId
from outrider.telemetry.metrics import Metrics, MetricsServer, counter, register
from outrider.vllm.drafting import Drafting
from outrider.vllm.rows import Tokens
from outrider.vllm.settings import MAX_TOKENS, ProposerSettings, read_settings

log = structlog.get_logger(__name__)

KNOWN_VERSIONS = ("0.32",)
"""Versions of vLLM that this was tried with, by their beginnings."""


class CannotDraft(ValueError):
    """This vLLM cannot be drafted for. The message says why, and what to change."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that vLLM serves, as handshakes name it."""

    model_id: str
    tokenizer_hash: str
    vocab_size: int
    max_context_len: int
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    numerics_id: str = ""
    default_sampling: Mapping[str, float] = field(default_factory=dict)


class Proposer:
    """Drafts for vLLM's batches by Outrider's speculators and datastore.

    Under tensor parallelism the first rank drafts: vLLM takes the drafts of no other.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Reads the settings, and begins to dial the peers without waiting for them.

        Raises:
            CannotDraft: vLLM's configuration, or its version, does not allow it.
            ValueError: A setting is wrong.
        """
        settings = read_settings(vllm_config.additional_config)
        _check(vllm_config, settings)
        self._num_failures = 0
        self._drafting: Drafting | None = None
        self._metrics_server: MetricsServer | None = None
        parallel = vllm_config.parallel_config
        if parallel.rank % parallel.tensor_parallel_size:
            return
        num_tokens = vllm_config.speculative_config.num_speculative_tokens
        self._drafting = Drafting(settings, _target(vllm_config.model_config), num_tokens)
        # vLLM tells a proposer nothing at its end.
        atexit.register(self.close)
        register(self._metrics)
        if settings.metrics_listen:
            self._metrics_server = MetricsServer(settings.metrics_listen, self._metrics)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads nothing: the draft models are elsewhere."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[TokenId]],
        num_tokens_no_spec: npt.NDArray[Any],
        token_ids_cpu: Tokens,
        slot_mappings: object = None,
    ) -> list[list[TokenId]]:
        """Returns drafts for the next step. Never raises, and never waits longer than `patience_ms`.

        Args:
            sampled_token_ids: Tokens that the step has drawn for each row; none while a prompt is read in pieces.
            num_tokens_no_spec: Tokens of each row, these included.
            token_ids_cpu: The rows' tokens, [rows, columns].
            slot_mappings: Not needed.

        Returns:
            For each row, 0 to num_speculative_tokens tokens.
        """
        if self._drafting is not None:
            try:
                return self._drafting.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            except Exception:
                # Drafts are never worth a request: the step goes on without them.
                self._num_failures += 1
                if self._num_failures == 1:
                    log.exception("proposer.failed", consequence="this step has no drafts; further ones are counted")
        return [[] for _ in sampled_token_ids]

    def close(self) -> None:
        """Ends all sessions. Idempotent."""
        atexit.unregister(self.close)
        if self._drafting is not None:
            self._drafting.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None

    def _metrics(self) -> Metrics:
        yield counter("outrider_vllm_failed_steps_total", "Steps without drafts for an error.", self._num_failures)
        if self._drafting is not None:
            yield from self._drafting.metrics()


def _check(vllm_config: Any, settings: ProposerSettings) -> None:
    """Raises CannotDraft for what the settings cannot say."""
    from vllm import __version__ as version

    if not (settings.any_vllm or version.startswith(tuple(f"{known}." for known in KNOWN_VERSIONS))):
        raise CannotDraft(
            f"outrider.vllm was tried with vLLM {' and '.join(KNOWN_VERSIONS)}, and this is {version}: install one of "
            "these, or set any_vllm to run with this one"
        )
    if (size := vllm_config.parallel_config.pipeline_parallel_size) > 1:
        raise CannotDraft(
            f"pipeline_parallel_size must be 1, got {size}: the stages' overlap is lost to drafts; use "
            "tensor_parallel_size"
        )
    if (number := vllm_config.speculative_config.num_speculative_tokens) > MAX_TOKENS:
        raise CannotDraft(f"num_speculative_tokens must be at most {MAX_TOKENS}, as a speculator drafts, got {number}")


def _target(model_config: Any) -> TargetModel:
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    if not hasattr(tokenizer, "backend_tokenizer"):
        kind = type(tokenizer).__name__
        raise CannotDraft(f"the model's tokenizer must be a fast one of transformers (tokenizer.json), got {kind}")
    return TargetModel(
        model_id=model_config.served_model_name or model_config.model,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=model_config.get_vocab_size(),
        max_context_len=model_config.max_model_len,
        dtype=str(model_config.dtype).removeprefix("torch."),
    )
