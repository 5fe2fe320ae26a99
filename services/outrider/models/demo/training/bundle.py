"""Model folders: the results of a stage, for the next stage and for users.

A folder is an ordinary Transformers checkpoint: bfloat16 weights, the config,
the tokenizer, and ``training.json`` with how it came about. Files are replaced
one by one and each of them at once, so a reader never sees half a file.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, LlamaForCausalLM

from outrider.models.demo.training.vocabulary import END_OF_TEXT_ID

TRAINING_RECORD = "training.json"


def save_bundle(model: LlamaForCausalLM, folder: Path, record: dict[str, Any]) -> None:
    """Write ``model`` to ``folder``, next to its tokenizer, with bfloat16 weights.

    The weights are cast one by one rather than with ``model.to``, which would
    also cast the rotary frequencies and so change the positions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Next to the folder: `os.replace` works only within one file system.
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as name:
        partial = Path(name)
        # safetensors refuses tensors that are not contiguous, and two that share their memory.
        weights = {
            key: value.detach().to(torch.bfloat16).contiguous()
            for key, value in model.state_dict().items()
            if key != "lm_head.weight"  # tied to the embedding
        }
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        config = copy.deepcopy(model.config)
        config.architectures = ["LlamaForCausalLM"]
        config.dtype = torch.bfloat16
        config.save_pretrained(partial)
        GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=END_OF_TEXT_ID,
            # At 1 models this small write word salad.
            do_sample=True,
            temperature=0.7,
        ).save_pretrained(partial)
        text = json.dumps(record, indent=2, sort_keys=True)
        (partial / TRAINING_RECORD).write_text(text + "\n")
        for path in sorted(partial.iterdir()):
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def load_bundle(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The model in ``folder``, computed in ``dtype``, ready for inference."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def training_record(folder: Path) -> dict[str, Any]:
    """Reads how the model in ``folder`` was trained."""
    record: dict[str, Any] = json.loads((folder / TRAINING_RECORD).read_text())
    return record
