"""A vLLM on CPUs, for tests: run by its own Python, without anything of the tests'. Answers each line of stdin with
the texts of all prompts, and with the sums of counters."""

from __future__ import annotations

import json
import os
import sys

# Read when vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the counters are in this process
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams

PROMPTS = [
    "def read(path):\n",
    "import os\n\nclass Cache:\n",
    "for name in sorted(",
    "    def __init__(self, ",
    "with open(path) as file:\n",
    "class Error(Exception):\n",
    "if __name__ == ",
    "    return [item for item in ",
    "try:\n    import ",
    "def test_",
]
NUM_TOKENS = 64


def main() -> None:
    """Generates until stdin ends."""
    told = json.loads(sys.argv[1])
    drafts = None
    if told["outrider"] is not None:
        drafts = {"method": "custom_class", "model": "outrider.vllm.Proposer", "num_speculative_tokens": 8}
    llm = LLM(
        told["model"],
        dtype="float32",  # in bfloat16 a row's bits depend on what runs beside it
        max_model_len=512,
        max_num_seqs=told["max_num_seqs"],
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config=drafts,
        additional_config={"outrider": told["outrider"]} if drafts else {},
    )
    for _ in sys.stdin:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        print("answer", json.dumps({"texts": texts, "metrics": counters()}), flush=True)


def counters() -> dict[str, float]:
    """The counters of this process, summed over their labels."""
    return {
        f"{metric.name}_total": sum(sample.value for sample in metric.samples if sample.name.endswith("_total"))
        for metric in REGISTRY.collect()
        if metric.type == "counter"
    }


if __name__ == "__main__":
    main()
