"""Loads a model by its name into a runner, with the facts that the services need."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.models.backend import backend_of
from outrider.models.checkpoint import (
    DEMO_PREFIX,
    NUM_NAMED,
    UnknownModel,
    UnsupportedModel,
    judge_config,
    judge_tensors,
)
from outrider.models.demo.inflate import forget, inflate
from outrider.models.demo.names import UNTRAINED, demo_folder, parse_inflation
from outrider.models.exactness import Exactness, NotExact, make_exact
from outrider.models.gguf import format_of, is_gguf, is_quantised, judge_gguf, read_header
from outrider.models.gguf_model import read_model, read_tokenizer
from outrider.models.hub import NotFetched, progress_line
from outrider.models.kv_cache import TILE
from outrider.models.names import fetch_model, gguf_of, is_here, why_no_model
from outrider.models.pool_size import Beside, NoMemory, NoRoom, check_weights_memory, num_blocks
from outrider.models.reference import Reference
from outrider.models.runner import Runner, cache_shape, context_of

log = structlog.get_logger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class CannotLoadModel(Exception):
    """The model of a service cannot be loaded, mostly because of the settings, or else of a disk or the network. The
    message names the flag."""


class ModelFlags(Protocol):
    """Settings of a service that say which model to load, and how."""

    @property
    def model(self) -> str:
        """Name of the model, see `load_model`."""

    @property
    def dtype(self) -> str:
        """Number format, see `load_model`."""

    @property
    def device(self) -> str:
        """A torch device."""

    @property
    def num_threads(self) -> int:
        """Threads of a forward on a CPU; 0 means one for each core in `cores`."""

    @property
    def cores(self) -> set[int]:
        """Cores that the process is bound to; empty means all."""

    @property
    def exact(self) -> str:
        """See `load_model`."""

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens whose keys and values fit into the pool; 0 means `default_num_tokens`."""

    @property
    def kv_block_size(self) -> int:
        """Tokens of a block."""

    @property
    def max_num_sessions(self) -> int:
        """Most sessions at a time."""

    @property
    def graphs(self) -> bool:
        """True if forwards on a GPU are captured as graphs."""


@dataclass(frozen=True)
class LoadedModel:
    """Holds a model that is ready to run, and the facts that a service needs."""

    runner: Runner
    tokenizer: Any
    """A fast tokenizer of transformers."""
    tokenizer_hash: str
    """Hex SHA-256 of the tokenizer's behaviour. Target and draft must have the same."""
    vocab_size: int
    """Token ids are below this: they have rows in the model and, except for holes, a name. The logits may be wider,
    padded to a round number."""
    eos_token_ids: tuple[int, ...]
    model_id: str
    max_context_len: int
    exactness: Exactness
    """Says whether the bits of a row depend only on its text."""
    checkpoint: str = ""
    """Folder or GGUF file that the model was read from, or its name on the Hugging Face hub."""
    stored_as: str = ""
    """Format of quantised weights that were dequantised, by llama.cpp's name: Q4_K_M. Empty if they were not."""
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling defaults of requests, see `outrider.models.generation_config`."""

    @property
    def numerics_id(self) -> str:
        """Hash of everything that the bits of the logits depend on; empty if they may differ from forward to
        forward."""
        return self.exactness.numerics_id

    @property
    def dtype(self) -> str:
        """Number format, as a key of `DTYPES`."""
        return str(self.runner.dtype).removeprefix("torch.")


class Weights(NamedTuple):
    """Holds the library's own model and tokenizer, on their device. A runner takes the model over."""

    model: PreTrainedModel
    tokenizer: Any


def load_model(
    model_id: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    fuse: bool = True,
    exact: str = "off",
    num_tokens: int = 0,
    block_size: int = TILE,
    num_sessions: int = 64,
    use_graphs: bool = True,
    weights: Weights | None = None,
    beside: Beside | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Loads a model into a runner.

    Args:
        model_id: `demo/target`, `demo/draft`, an inflated one (`demo/target-100m`, `demo/target-300m`, `demo/draft-c5`)
            or `demo/draft-untrained` (see `outrider.models.demo.inflate`), `smollm2-135m`
            (see `outrider.models.wheels`), a folder, a GGUF file, or a name on the Hugging Face hub.
        dtype: `auto`, or a key of `DTYPES`. `auto` is float32 for the demo pair, bfloat16 for models that are inflated
            from it and for GGUF files, and the checkpoint's own type for others; bfloat16 is replaced by float32 on a
            CPU without it.
        device: A torch device.
        fuse: True if known layers are taken apart for speed.
        exact: `auto` tests whether rows are exact (`outrider.models.exactness`) and reports if they are not; `require`
            then refuses the model; `off` does not test.
        num_tokens: Tokens whose keys and values fit into the pool; 0 means `default_num_tokens`.
        block_size: Tokens of a block of the pool.
        num_sessions: Most sessions at a time.
        use_graphs: True if forwards on a GPU are captured as graphs.
        weights: Weights of the model, from `build_hf_model`. None means that they are built here.
        beside: Another pool that must have room on the same GPU.
        on_step: Called at the beginning of each slow step with a few words about it.

    Raises:
        NoRoom: A GPU has no memory for the pool.
        NotExact: Rows are not exact, and `exact` requires it.
        ValueError: The pool has no block, or a block that is no multiple of 64.
        UnknownModel: There is no such demo model, or no number format of that name.
        UnsupportedModel: The runner cannot run the model correctly, or its weights are incomplete.
    """
    model, tokenizer = weights or build_hf_model(model_id, dtype, device=device)
    shape = cache_shape(model)
    vocab_size = _vocab_size(model, tokenizer)
    # A token that the model has no row for is never put out.
    eos_token_ids = tuple(token_id for token_id in _eos_token_ids(model, tokenizer) if token_id < vocab_size)
    fingerprint = weights_fingerprint(model)
    context_len, context_reason = context_of(model.config.get_text_config())
    if context_reason:
        log.info("model.context", max_context_len=context_len, reason=context_reason)
    reference = Reference(model)
    is_exact = exact != "off"
    on_step("compiling its kernels")
    size_pool = partial(num_blocks, shape, context_len, num_tokens, block_size, num_sessions, beside)
    runner = backend_of(shape.device, use_graphs=use_graphs).make_runner(
        model,
        fuse=fuse,
        is_exact=is_exact,
        # Free memory is known when everything else has its memory.
        num_blocks=size_pool,
        block_size=block_size,
    )
    reference.check(runner)
    if is_exact:
        on_step("compiling its kernels, and trying whether its rows are exact")
    exactness = make_exact(runner, fingerprint) if is_exact else Exactness(reason="it was switched off")
    if is_exact and not exactness.is_exact:
        if exact == "require":
            raise NotExact(exactness.reason)
        log.warning("model.not_exact", reason=exactness.reason, advice="a text may differ between methods in near ties")
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        tokenizer_hash=tokenizer_hash(tokenizer),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        model_id=model_id,
        max_context_len=runner.max_context_len,
        exactness=exactness,
        checkpoint=str(model.name_or_path),
        stored_as=_quantisation_of(Path(str(model.name_or_path))),
    )


def load_for(
    settings: ModelFlags,
    weights: Weights | None = None,
    beside: Beside | None = None,
    on_step: Callable[[str], None] = lambda _: None,
) -> LoadedModel:
    """Loads the model of a service and sets the threads of its process. Takes seconds, so call it in a thread.

    Args:
        settings: Flags of the service.
        weights: Result of `read_weights`. None means that they are read here.
        beside: Another pool that must have room on the same GPU.
        on_step: See `load_model`.

    Raises:
        CannotLoadModel: There is no such model or device, the runner cannot run the model, or its files could not be
            read or fetched. The last may be temporary.
    """
    # 0 if neither is given: torch chooses.
    set_num_threads(settings.num_threads or len(settings.cores))
    weights = weights or read_weights(settings, on_step)
    with _named_by_flags(settings):
        return load_model(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            exact=settings.exact,
            num_tokens=settings.kv_cache_tokens,
            block_size=settings.kv_block_size,
            num_sessions=settings.max_num_sessions,
            use_graphs=settings.graphs,
            weights=weights,
            beside=beside,
            on_step=on_step,
        )


def read_weights(settings: ModelFlags, on_step: Callable[[str], None] = lambda _: None) -> Weights:
    """Reads the weights of a service's model to its device. `on_step`: see `load_model`. Raises CannotLoadModel as
    `load_for` does."""
    on_step(f"reading {settings.model}")
    check_device(settings.device)
    if why := why_no_model(settings.model):
        raise CannotLoadModel(f"--model {settings.model}: {why}")
    with _named_by_flags(settings):
        if not is_here(settings.model):
            fetch_model(settings.model, lambda done, total: on_step(progress_line(settings.model, done, total)))
        return build_hf_model(settings.model, settings.dtype, device=settings.device)


@contextmanager
def _named_by_flags(settings: ModelFlags) -> Iterator[None]:
    """Turns what the body raises into CannotLoadModel, with the flag."""
    try:
        yield
    except NotExact as error:
        raise CannotLoadModel(f"--exact require: {settings.model} is not exact here: {error}") from error
    except (UnsupportedModel, NotFetched, NoMemory, OSError) as error:
        # In one line, because a service's last line says why it ends.
        raise CannotLoadModel(f"--model {settings.model}: {_reason(error)}") from error
    except torch.OutOfMemoryError as error:
        # The first sentences say what was asked for and what was free.
        what = ". ".join(_reason(error).split(". ")[:3])
        raise CannotLoadModel(f"--model {settings.model}: {settings.device} has no memory for it: {what}") from error
    except CannotLoadModel:
        raise
    except NoRoom as error:
        raise CannotLoadModel(str(error)) from error
    except Exception as error:
        # Any error that a library finds in a model's files.
        log.debug("model.load_failed", exc_info=True)
        raise CannotLoadModel(f"--model {settings.model}: {type(error).__name__}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def check_device(device: str) -> None:
    """Raises CannotLoadModel if this machine, or this torch, does not have a device."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        has_cuda = torch.version.cuda is not None
        why = "torch finds no GPU with a driver for it" if has_cuda else "this torch is for CPUs only"
        raise CannotLoadModel(f"--device {device}: no CUDA device here: {why}")
    if (index := torch.device(device).index) is not None and device.startswith("cuda"):
        num_devices = torch.cuda.device_count()
        if index >= num_devices:
            raise CannotLoadModel(f"--device {device}: there are {num_devices} CUDA devices here, the first is cuda:0")


def is_same_gpu(one: str, other: str) -> bool:
    """Returns True if two names of torch devices mean the same CUDA device."""
    first, second = torch.device(one), torch.device(other)
    return first.type == second.type == "cuda" and (first.index or 0) == (second.index or 0)


def build_hf_model(model_id: str, dtype: str = "auto", *, device: str = "cpu") -> Weights:
    """Builds the library's own model and tokenizer, as `load_model` loads them. Also used by baselines and tests.

    Raises:
        NoMemory: The device is a GPU without memory for the weights.
        NotFetched, NoWheel: The model is not here, and cannot be had now.
        UnknownModel, UnsupportedModel: See `load_model`.
    """
    folder, inflation = model_id, None
    is_untrained = model_id == DEMO_PREFIX + UNTRAINED
    if model_id.startswith(DEMO_PREFIX):
        if (demo := demo_folder(model_id)) is None:
            raise UnknownModel(why_no_model(model_id))
        folder = str(demo)
        inflation = parse_inflation(model_id.removeprefix(DEMO_PREFIX))[1]
    if dtype not in {"auto", *DTYPES}:
        raise UnknownModel(f"dtype must be auto or one of {', '.join(DTYPES)}, got {dtype!r}")
    # A service's stderr is its log, and errors of a checkpoint are reported below.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if not is_here(model_id):
        fetch_model(model_id)
    if (file := gguf_of(model_id)) is not None:
        model, tokenizer = _from_gguf(file, DTYPES.get(dtype) or _automatic_dtype(torch.bfloat16, device))
    else:
        # The demo checkpoints are in bfloat16; `auto` means float32 for the pair, and inflation starts from that.
        stored: Any = torch.float32 if model_id.startswith(DEMO_PREFIX) else "auto"
        model, tokenizer = _from_folder(folder, DTYPES.get(dtype, stored))
        if inflation is not None:
            inflate(model, inflation)
        if is_untrained:
            forget(model)
        if dtype == "auto":
            cast(model, _automatic_dtype(torch.bfloat16 if inflation is not None else model.dtype, device))
    if torch.device(device).type == "cuda":
        check_weights_memory(model, device)
    model = model.to(device).eval()
    return Weights(model, tokenizer)


def _from_folder(folder: str, dtype: Any) -> tuple[Any, Any]:
    """Reads model and tokenizer from a folder, or from the hub's cache."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    judge_config(config.to_dict())
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, with their names
    )
    model, found = loaded
    _judge_found(model, found)
    return model, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _from_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Reads model and tokenizer from a GGUF file."""
    header = judge_gguf(path)
    model, found = read_model(header, dtype)
    _judge_found(model, found)
    log.info("model.dequantised", file=str(path), stored_as=format_of(header), dtype=str(dtype))
    return model, read_tokenizer(header)


def _judge_found(model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """Judges a model by what its loader found. Raises UnsupportedModel."""
    modules = {name for name, _ in model.named_modules()}
    unused = judge_tensors(found["missing_keys"], found["unexpected_keys"], found["mismatched_keys"], modules)
    if unused:
        log.warning("model.tensors_unused", tensors=unused[:NUM_NAMED], count=len(unused))


def _quantisation_of(path: Path) -> str:
    """Returns the format of quantised weights in a GGUF file; empty for another file, and for other weights."""
    header = read_header(path) if is_gguf(path) else None
    return format_of(header) if header is not None and is_quantised(header) else ""


def _automatic_dtype(preferred: torch.dtype, device: str) -> torch.dtype:
    """Returns the number format for `auto` on a device."""
    is_cpu = torch.device(device).type == "cpu"
    # A CPU without bfloat16 arithmetic emulates it, several times as slow as float32.
    if is_cpu and preferred == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32 if is_cpu else preferred


def cast(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts the parameters, in place."""
    # `model.to(dtype)` would cast the rotary frequencies too, which are buffers, and spoil positions.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Computes a hex SHA-256 of samples of all weights: models of one name may differ."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 1024)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()


def _vocab_size(model: Any, tokenizer: Any) -> int:
    """Returns one more than the highest token id that has a name and rows in the model. A tokenizer may have holes."""
    num_rows: int = min(model.get_input_embeddings().weight.shape[0], model.get_output_embeddings().weight.shape[0])
    names: dict[str, int] = tokenizer.get_vocab()
    if without := sorted(name for name, token_id in names.items() if token_id >= num_rows):
        log.warning("model.tokens_without_rows", tokens=without[:NUM_NAMED], count=len(without), num_rows=num_rows)
    return min(max(names.values()) + 1, num_rows)


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    generation: Any = model.generation_config
    # The generation config first: chat models such as Qwen2.5 list all their end tokens there, and only one in the
    # config.
    of_config = getattr(model.config.get_text_config(), "eos_token_id", None)
    for ids in (generation and generation.eos_token_id, of_config, tokenizer.eos_token_id):
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def set_num_threads(num_threads: int) -> None:
    """Sets the threads of a forward for this process, before the first one; 0 leaves torch's own choice.

    More threads than cores, or two processes with several threads on the same cores, are many times slower than one
    thread each.
    """
    if num_threads:
        torch.set_num_threads(num_threads)
