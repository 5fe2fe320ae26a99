"""Makes an untrained draft for a target: a smaller model of its family, with what its weights can give.

A draft of the target's width begins as its first layers; embedding and head are the target's, and stay so. A narrower
one keeps of embedding and head the directions in which they vary most, and its layers begin at random. Measured on
SmolLM2-135M with heads of 8192 tokens, 150 s of training on a core of a busy machine each (tokens learnt from; greedy
acceptance; ms of a forward of one row on one core, where the target's takes 14.6):

* its first 3 layers: 75 000; .261; 1.2. With embedding and head trained too: 50 000; .259;
* its first 2 layers: 91 000; .260; 0.9;
* layers 0, 15 and 29 (at a lower rate, as the next): 52 000; .191; the first 3: 87 000; .226;
* 256 wide, 4 layers at random: 196 000; .254; 0.6. 320 wide, 5 layers: 101 000; .222.
"""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from outrider.core.tokenizer_hash import tokenizer_hash
from outrider.models.checkpoint import WEIGHTS, UnsupportedModel
from outrider.models.loading import Weights, build_hf_model
from outrider.models.names import why_no_model
from outrider_cli.failures import FlagError
from outrider_draft.answers import documents_of
from outrider_draft.card import Card
from outrider_draft.files import written

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
COST_RATIO = 8.0
"""Least forwards of the usual draft that should fit into one of its target."""
LEAST_WIDTH = 16
"""A narrower draft's width is a multiple of it."""
NUM_LAYERS = 4
"""Layers of the usual draft."""


@dataclass(frozen=True, slots=True)
class Size:
    """Describes the size of a draft next to its target's."""

    hidden_size: int
    num_layers: int
    num_parameters: int
    share: float
    """Of the weights that a token of the target reads: about its share of the time."""


def make(
    target: str,
    out: Path,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    donor: str | None = None,
    vocabulary: int | None = None,
    data: Sequence[Path] = (),
) -> Size:
    """Makes a draft folder.

    Args:
        target: Name of the target, see `load_model`.
        out: The folder; it must not exist, or be empty.
        layers: Layers of the draft; None means the usual number.
        hidden: Width of the draft; None means what makes a token `COST_RATIO` times cheaper than the target's, or with
            a donor the donor's width.
        donor: Name of another model with the same tokenizer, whose weights are taken instead of the target's.
        vocabulary: Tokens that the draft can say; None means all.
        data: Folders of answers, which say what tokens are frequent.

    Raises:
        FlagError: A flag does not fit the target.
        OSError: The folder cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FlagError("--out", "a folder that does not exist yet, or is empty", out)
    of_target = _opened("--target", target)
    source = of_target if donor is None else _opened("--donor", donor)
    wanted = tokenizer_hash(of_target.tokenizer)
    if tokenizer_hash(source.tokenizer) != wanted:
        raise FlagError("--donor", f"a model with the tokenizer of {target}", donor)
    base: Any = copy.deepcopy(source.model.config)
    if vocabulary is not None:
        base.head_token_ids = _frequent(of_target, wanted, vocabulary, data)
    config = _config_of(base, _cost(of_target.model.config), layers, hidden, is_donor=donor is not None)
    size = _size_of(config, of_target.model.config)
    if size.share >= 1:
        flag, value = ("--donor", donor) if donor and hidden is None and layers is None else ("--layers", layers)
        rule = f"such that the draft is smaller than its target, {_millions(_cost(of_target.model.config))}"
        raise FlagError(flag, rule, f"{value}, {_millions(_cost(config))}")
    draft = _shrunk(source.model, config)
    card = Card(
        target=target,
        source=donor or target,
        num_parameters=size.num_parameters,
        share=round(size.share, 4),
        keeps_embedding=donor is None and config.hidden_size == of_target.model.config.hidden_size,
    )
    # Next to the folder, because a rename works only within one file system.
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=out.parent) as name:
        partial = Path(name) / "draft"
        of_target.tokenizer.save_pretrained(partial)
        if tokenizer_hash(AutoTokenizer.from_pretrained(partial)) != wanted:
            raise FlagError("--target", "a model whose tokenizer is the same after it is saved", target)
        if of_target.model.generation_config is not None:
            of_target.model.generation_config.save_pretrained(partial)
        config.save_pretrained(partial)
        write_weights(draft, partial)
        card.write(partial)
        if out.exists():
            out.rmdir()
        shutil.move(partial, out)
    return size


def write_weights(model: PreTrainedModel, folder: Path) -> None:
    """Writes the weights of a model, in bfloat16. Raises OSError; those before are then still there."""
    # One by one: `model.to` would also cast the rotary frequencies, which are no weights. A tied head is not named.
    weights = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous() for name, parameter in model.named_parameters()
    }
    with written(folder / WEIGHTS) as partial:
        save_file(weights, partial, metadata={"format": "pt"})


def _opened(flag: str, name: str) -> Weights:
    if why := why_no_model(name):
        raise FlagError(flag, f"a model that can be opened ({why})", name)
    try:
        weights = build_hf_model(name, "bfloat16")
    except UnsupportedModel as error:
        raise FlagError(flag, f"a model that can be opened ({error})", name) from None
    if (family := weights.model.config.model_type) not in FAMILIES:
        raise FlagError(flag, f"a model of the families {', '.join(FAMILIES)}", f"{name} ({family})")
    return weights


def _config_of(source: Any, target_cost: int, layers: int | None, hidden: int | None, *, is_donor: bool) -> Any:
    """Returns the config of the draft. Raises FlagError if its flags do not fit the source."""
    deepest, widest = source.num_hidden_layers, source.hidden_size
    if layers is not None and not 1 <= layers <= deepest:
        raise FlagError("--layers", f"1 to {deepest}, as many as there are to take", layers)
    if hidden is not None and hidden != widest and (hidden % LEAST_WIDTH or not 0 < hidden < widest):
        rule = f"a multiple of {LEAST_WIDTH} below {widest}, or {widest}, the width of the weights that it is made from"
        raise FlagError("--hidden", rule, hidden)
    if is_donor and hidden is None:
        return _trimmed(source, layers or deepest)
    layers = layers or min(NUM_LAYERS, max(1, deepest // 2))
    if hidden is not None:
        return _trimmed(source, layers) if hidden == widest else _narrowed(source, layers, hidden)
    head_dim = _head_dim(source)
    step = head_dim if widest >= 8 * head_dim else 2 * LEAST_WIDTH
    for width in range(widest - step, step, -step):
        if _cost(config := _narrowed(source, layers, width)) * COST_RATIO <= target_cost:
            return config
    return _narrowed(source, layers, step)


def _trimmed(source: Any, num_layers: int) -> Any:
    """Returns the config of a model with fewer layers."""
    config = copy.deepcopy(source)
    config.num_hidden_layers = num_layers
    if getattr(source, "layer_types", None):
        config.layer_types = source.layer_types[:num_layers]
    config.dtype = torch.bfloat16
    return config


def _narrowed(source: Any, num_layers: int, hidden: int) -> PretrainedConfig:
    """Returns the config of a narrower model, in the usual proportions."""
    config = _trimmed(source, num_layers)
    config.hidden_size = hidden
    config.intermediate_size = 64 * max(1, round(hidden * 8 / 3 / 64))
    config.head_dim = math.gcd(hidden, _head_dim(source))
    config.num_attention_heads = config.num_key_value_heads = hidden // config.head_dim
    checked: PretrainedConfig = AutoConfig.for_model(**config.to_dict())
    return checked


def _head_dim(config: Any) -> int:
    found: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return found


def _frequent(target: Weights, own_hash: str, count: int, data: Sequence[Path]) -> list[int]:
    """Returns the tokens that a target says most often, and those that have a meaning to programs: ends, and the marks
    of a chat. Raises FlagError."""
    if not data:
        raise FlagError("--vocabulary", "unset without --data, which says what tokens are frequent", count)
    num_tokens = target.model.get_output_embeddings().weight.shape[0]  # type: ignore[no-untyped-call]
    special = {*target.tokenizer.all_special_ids, *_ends(target.model.generation_config)}
    if not len(special) < count < num_tokens:
        raise FlagError("--vocabulary", f"above the {len(special)} special tokens, and below all {num_tokens}", count)
    # Expected, not counted: the target's other choices would have been as good.
    expected = np.zeros(num_tokens)
    for document in documents_of(data, own_hash, num_tokens):
        np.add.at(expected, document.top_ids, np.exp(document.top_logprobs, dtype=np.float64))
    expected[list(special)] = np.inf
    return sorted(np.argsort(-expected, kind="stable")[:count].tolist())


def _ends(generation: Any) -> Sequence[int]:
    ends = getattr(generation, "eos_token_id", None)
    return () if ends is None else ends if isinstance(ends, list) else [ends]


def _cost(config: Any) -> int:
    """Counts the weights that a token reads: of the embedding one row, of the head those of its tokens."""
    num_matrices = 1 if config.tie_word_embeddings else 2
    vocab_size, hidden_size = int(config.vocab_size), int(config.hidden_size)
    num_head = len(getattr(config, "head_token_ids", None) or range(vocab_size))
    return _num_parameters(config) + (num_head - num_matrices * vocab_size) * hidden_size


def _num_parameters(config: Any) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return sum(parameter.numel() for parameter in model.parameters())


def _size_of(config: Any, target: Any) -> Size:
    share = _cost(config) / _cost(target)
    return Size(config.hidden_size, config.num_hidden_layers, _num_parameters(config), share)


def _millions(num_parameters: float) -> str:
    return f"{num_parameters / 1e6:.1f} M parameters"


@torch.no_grad()
def _shrunk(source: PreTrainedModel, config: Any) -> PreTrainedModel:
    """Returns a draft with the weights of a larger model."""
    torch.manual_seed(0)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    weights = dict(source.named_parameters())
    if config.hidden_size != source.config.hidden_size:
        basis = _basis(source, config.hidden_size)
        for name, parameter in draft.named_parameters():
            if "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(weights[name].float() @ basis)
        return draft
    for name, parameter in draft.named_parameters():
        parameter.copy_(weights[name])
    return draft


def _basis(source: PreTrainedModel, width: int) -> Tensor:
    """Returns the directions in which the head's rows vary most, [hidden_size, width]."""
    head: Tensor = source.get_output_embeddings().weight.double()  # type: ignore[no-untyped-call]
    directions: Tensor = torch.linalg.eigh(head.T @ head).eigenvectors[:, -width:].flip(1).float()
    return directions
