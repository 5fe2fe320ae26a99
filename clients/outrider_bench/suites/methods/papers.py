"""The papers' own figures, each with its place there: what stands beside ours in claims and in the table of methods.

Pairs of models, hardware and prompts are theirs, so a figure says how much a method is worth, not what ours must be.

* CARD: Zhou et al., "CARD: A Cache-Assisted Parallel Speculative Decoding Framework".
* SAGUARO: Kumar, Dao and May, "Speculative Speculative Decoding".
* DOUBLE: "Breaking the Acceleration Limit via Double Retrieval Speculative Parallelism".
* Token Recycling: Luo et al. 2024, "Turning Trash into Treasure".
* Lookahead: Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding".
* REST: He et al. 2023, "REST: Retrieval-Based Speculative Decoding".
* Takeoff: Doubleword's article on spacelike speculative decoding.
* the tutorial: a chapter on speculative decoding, with the arithmetic of Leviathan et al. 2023.
"""

from __future__ import annotations

NONE = "none"
"""Said of what no paper has a figure for."""


def in_words(claim: str, place: str) -> str:
    """Quote what a paper claims without a figure."""
    return f"{NONE}; in words: {claim} ({place})"


SAGUARO_BY_SPECULATIVE = "up to 2x (SAGUARO, abstract); 1.5x to 5.5x (Experiment)"
SAGUARO_BY_OFF = "up to 5x (SAGUARO, abstract)"
SAGUARO_FAN_OUT = in_words("geometric gives more hits and speed, the more so at higher T", "SAGUARO, Experiment")
SAGUARO_HITS = in_words("hits grow with the size of the cache", "SAGUARO, Experiment")
SAGUARO_FALLBACK = in_words("fast random backups beat slower drafts at larger batches", "SAGUARO, Experiment")
SAGUARO_SCALING = in_words("hit rates scale predictably with the size of the cache", "SAGUARO, Experiment")
SAGUARO_BIAS = in_words("C trades acceptance for hits", "SAGUARO, Method and Experiment")

CARD_QUERY_ONLY = "30.23 by 8.75 tokens/s = 3.45x (CARD, Table 2, T = 0)"
CARD_CORRECTION = "41.34 by 30.23 tokens/s = 1.37x (CARD, Table 2, T = 0)"
CARD_QUERY_SHARE = "30.23 by 41.34 tokens/s = 73 % (CARD, Table 2, T = 0)"
CARD_HITS = "97 % at most, rising with K (CARD, section 3.4, Fig. 6)"
CARD_COST = "70 B x 7 = 490 of the target, 1 B x 100 = 100 of the draft model, a forward (CARD, section 3.5, Table 3)"
CARD_SPEED_BY_K = in_words("rises with K, then falls; little beyond K = 50", "CARD, section 3.4, Fig. 6")

DOUBLE_CEILING = in_words("parallel drafting without retrieval stays below C", "DOUBLE, Theorem 3")
DOUBLE_BEYOND_C = "5.33x where C is 4.7: HumanEval, LLaMA-3.3-70B (DOUBLE, Table 1)"
DOUBLE_BY_PEARL = "4.27x by 3.55x = 1.20 on average, LLaMA-3.3-70B (DOUBLE, Table 1)"
DOUBLE_BY_PEARL_SAMPLED = "3.77x by 3.34x = 1.13 on average, LLaMA-3.3-70B, T = 1 (DOUBLE, Table 2)"
DOUBLE_ABLATIONS = {
    "no draft retrieval": "4.50x to 5.33x = 1.18, HumanEval (DOUBLE, section 5.3, Fig. 5)",
    "no target retrieval": "11.5 to 14.35 accepted tokens = 1.25, HumanEval (DOUBLE, section 5.3, Fig. 5)",
    "no prior": "2.35x to 2.84x = 1.21, HumanEval, Qwen3-32B (DOUBLE, Table 3)",
    "no rejected tier": "2.14x to 2.30x = 1.07, MT-Bench, Qwen3-32B (DOUBLE, Table 9)",
}
DOUBLE_REJECTED = in_words("the rejected tier significantly improves the retrieval hit rate", "DOUBLE, Table 9")
DOUBLE_TAILS = in_words("target-side retrieval accepts more tokens a forward", "DOUBLE, section 5.3, Fig. 5")
DOUBLE_AMT = in_words("retrieval lifts the ceiling from C to C (1 + AMT)", "DOUBLE, section 4.4")
DOUBLE_SATURATION = "10 rounds of prior 2.84x, 20 rounds 2.86x: 4 % of the gain (DOUBLE, Table 3, HumanEval)"
DOUBLE_DEPTH = in_words("accepted tokens saturate and speed fluctuates beyond d = 10", "DOUBLE, section 5.3, Fig. 6")
DOUBLE_ONE_DEVICE = "2.29x by 2.01x = 1.14, MT-Bench, Deepseek 1.3B and 33B (DOUBLE, Table 12)"
DOUBLE_BATCH = "2.64x alone, 1.73x at 16, of NANO-PEARL, HumanEval, Qwen3-32B (DOUBLE, Table 6)"

TRAINLESS_BY_OFF = {
    "token-recycling": "about 2x for all sizes of models (Token Recycling, abstract)",
    "ngram-pool": "up to 1.8x on MT-Bench, with Jacobi rows (Lookahead, abstract)",
    "rest": "1.62x to 2.36x on code or text, 7B and 13B (REST, abstract)",
}

TAKEOFF_LATER = "60 to 100-120 tokens/s = 1.7x to 2x (Takeoff, Results)"
TAKEOFF_NEAR = "60 to 200 tokens/s = 3.3x (Takeoff, Results)"
TAKEOFF_COLD = in_words("without accepted tokens it slows down to the baseline", "Takeoff, Results")

TUTORIAL_ACCEPTANCE = "70-80 %, LLaMA-2 7B for 70B (the tutorial, Alignment with Target Model)"
TUTORIAL_TOKENS = in_words("the formula, (1 - a^(g + 1)) / (1 - a)", "the tutorial, Sequential Acceptance")
TUTORIAL_SPEED = "about 2x at 80 % acceptance; 2.6x at 90 %, 1.2x at 50 % (the tutorial, Draft Model Selection)"

SPEEDUPS: dict[str, dict[float, str]] = {
    "speculative": {
        0.0: "2x to 3x (the tutorial, Impact on Inference Efficiency); 2.55x (DOUBLE, Table 1, LLaMA-3.3-70B)",
        1.0: "1.77x to 1.88x (CARD, Table 1, Llama 2 70B/7B)",
    },
    "pearl": {
        0.0: "3.55x (DOUBLE, Table 1, LLaMA-3.3-70B); 2.94x (CARD, Table 1, GSM8K)",
        1.0: "3.34x (DOUBLE, Table 2, LLaMA-3.3-70B)",
    },
    "card": {
        0.0: "4.72x (CARD, Table 1, GSM8K, Llama 3 70B/1B); at most 4.83x (section 3.2, Fig. 5, code)",
        1.0: "2.30x to 2.74x (CARD, Table 1, Llama 2 70B/7B)",
    },
    "saguaro": {0.0: SAGUARO_BY_OFF},
    "double": {
        0.0: "5.33x HumanEval, 4.27x on average (DOUBLE, Table 1, LLaMA-3.3-70B)",
        1.0: "4.70x HumanEval, 3.77x on average (DOUBLE, Table 2, LLaMA-3.3-70B)",
    },
    "retrieval": {0.0: "1.58x HumanEval, 1.53x on average, of PLD (DOUBLE, Table 1, LLaMA-3.3-70B)"},
}
"""Speed-ups over plain decoding by method and temperature, for the table of methods."""
