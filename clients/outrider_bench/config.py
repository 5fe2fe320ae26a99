"""Configurations of all suites. Every flag is checked here, and every error is one line that names the flag."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from outrider.core import methods
from outrider_cli.failures import FlagError
from outrider_cli.prompts import TEXT_SETS, Prompt, PromptError, choose, load_prompts

METHODS = (*methods.METHODS, "speculative+retrieval", "pearl+retrieval")
"""`+retrieval` sets `SpeculationParams.retrieval`."""
BASELINES = ("hf", "bare")
DTYPES = ("auto", "bfloat16", "float32")
DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32"}
GPU_PARTS = ("services", "peers", "micro")
"""Parts of the GPU suite: our services, other programs with the same weights, and single parts of a forward."""
MAX_CHAIN_LEN = 32
"""Limit of num_speculative_tokens of a verifier with default settings."""
GPU_SIZES = ("8b", "tiny")
GPU_WEIGHTS = ("widened", "random")
GPU_DRAFTERS = ("speculator", "in-process")
_GPU_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
PAIR_MODELS = ("demo/target-100m", "demo/draft", "auto", "auto")
"""Default target and draft of `pair` and `serve`, and their number formats."""
DEFAULT_PROMPTS = "demo"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """A benchmark with all choices made."""

    target: str = "demo/target-100m"
    draft: str = "demo/draft"
    dtype: str = "auto"
    draft_dtype: str = "float32"
    methods: tuple[str, ...] = ("off", "speculative", "pearl", "retrieval")
    baselines: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    concurrencies: tuple[int, ...] = (1,)
    rtts_ms: tuple[float, ...] = (0.0,)
    num_speculative_tokens: tuple[int, ...] = ()
    """Each adds a row for every drafting method; empty means the server's default."""
    lookahead: int | None = None
    min_path_probability: float | None = None
    max_tokens: int = 128
    repeats: int = 3
    seed: int = 0
    address: str | None = None
    """Address of a running verifier; None means that the suite starts services."""
    cores: tuple[int, ...] = ()
    """The target's core, then the core of everything else; empty = not pinned."""
    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    prompt_set: str = DEFAULT_PROMPTS
    """Name of the set or file that they are from."""
    llama_server: str = ""
    """Path of llama.cpp's server, which then takes part."""

    def __post_init__(self) -> None:
        _require(self.max_tokens >= 2, "--max-tokens", ">= 2 (a rate needs two tokens)", self.max_tokens)
        _require(self.repeats >= 1, "--repeats", ">= 1", self.repeats)
        _require(0 <= self.seed < 2**32, "--seed", "in [0, 2**32)", self.seed)
        _require(self.dtype in DTYPES, "--dtype", _one_of(DTYPES), self.dtype)
        _require(self.draft_dtype in DTYPES, "--draft-dtype", _one_of(DTYPES), self.draft_dtype)
        _require(self.lookahead is None or self.lookahead >= 1, "--lookahead", ">= 1", self.lookahead)
        minimum = self.min_path_probability
        _require(minimum is None or 0 <= minimum < 1, "--min-path-probability", "in [0, 1)", minimum)
        _check_llama_server(self.llama_server)
        # Baselines generate one text at a time, so without a 1 they would have no turn.
        for flag, is_given in (("--baselines", self.baselines), ("--llama-server", self.llama_server)):
            is_listed = 1 in self.concurrencies or not is_given
            _require(is_listed, "--concurrency", f"a list with 1 in it for {flag}", _joined(self.concurrencies))
        if self.address is not None:
            # The baselines need the weights, and the delay stands between services that we start, so both need a stack
            # of our own.
            _require(not self.baselines, "--baselines", "empty with --address", _joined(self.baselines))
            _require(not self.llama_server, "--llama-server", "empty with --address", self.llama_server)
            _require(self.rtts_ms == (0.0,), "--rtt-ms", "0 with --address", _joined(self.rtts_ms))


@dataclass(frozen=True, slots=True)
class PapersConfig:
    """A run of the papers' claims, with all choices made."""

    papers: tuple[str, ...]
    seed: int = 0
    cores: tuple[int, ...] = ()
    """Cores for the simulations; empty = not pinned."""
    is_quick: bool = False

    def __post_init__(self) -> None:
        _require(bool(self.papers), "--papers", "at least one paper", "")
        _require(0 <= self.seed < 2**32, "--seed", "in [0, 2**32)", self.seed)


@dataclass(frozen=True, slots=True)
class PairConfig:
    """A run of the pair's suite, with all choices made."""

    repeats: int = 3
    seed: int = 0
    cores: tuple[int, ...] = ()
    """The target's core, then the core of everything else; empty = not pinned."""
    is_quick: bool = False
    """True for smaller sizes, which show that the suite works, but measure nothing."""
    target: str = PAIR_MODELS[0]
    draft: str = PAIR_MODELS[1]
    dtype: str = PAIR_MODELS[2]
    draft_dtype: str = PAIR_MODELS[3]
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    num_speculative_tokens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 12)
    """Lengths of chains to predict; the last one is a server's default."""
    max_tokens: int = 40
    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    prompt_set: str = DEFAULT_PROMPTS
    """Name of the set or file that they are from."""
    is_family: bool = False
    """True if the prediction is checked on pairs made of the demo models, instead of this one."""
    address: str | None = None
    """Address of a running verifier; None means that the suite starts services."""

    def __post_init__(self) -> None:
        _require(self.repeats >= 1, "--repeats", ">= 1", self.repeats)
        _require(0 <= self.seed < 2**32, "--seed", "in [0, 2**32)", self.seed)
        _require(self.max_tokens >= 16, "--max-tokens", ">= 16 (a few rounds of every setting)", self.max_tokens)
        for flag, dtype in (("--dtype", self.dtype), ("--draft-dtype", self.draft_dtype)):
            _require(dtype in DTYPES, flag, _one_of(DTYPES), dtype)
        # A verifier with default settings refuses requests beyond it.
        for count in self.num_speculative_tokens:
            _require(count <= MAX_CHAIN_LEN, "--num-speculative-tokens", f"at most {MAX_CHAIN_LEN}", count)
        is_usual = (self.target, self.draft, self.dtype, self.draft_dtype) == PAIR_MODELS
        for flag, is_given in (("--family", self.is_family), ("--address", self.address is not None)):
            unset = f"their defaults with {flag}, which has models of its own"
            models = f"{self.target} ({self.dtype}) and {self.draft} ({self.draft_dtype})"
            _require(is_usual or not is_given, "--target and --draft", unset, models)
        _require(self.address is None or not self.is_family, "--family", "unset with --address", "--family")

    @property
    def num_timed_turns(self) -> int:
        """Counts the turns of the two models when their forwards are timed."""
        return 3 if self.is_quick else 15


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """A run of the GPU suite, with all choices made."""

    device: str = "cuda:0"
    size: str = "8b"
    """Sizes of the pair: `8b`, those of Qwen3-8B and Qwen3-0.6B, or `tiny`, which shows on a CPU that the suite
    works."""
    weights: str = "widened"
    """`widened`, the demo pair in these sizes, or `random`, whose text means nothing, at the same cost."""
    drafter: str = "in-process"
    """`in-process` runs the draft model in the verifier's process, which is best on one GPU; `speculator` in its
    own."""
    parts: tuple[str, ...] = GPU_PARTS
    methods: tuple[str, ...] = ("off", "speculative", "best-first", "retrieval", "auto")
    sessions: tuple[int, ...] = (1, 8, 32)
    """Numbers of concurrent generations."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    contexts: tuple[int, ...] = (1024, 8192)
    """Lengths of the prompts, in tokens."""
    max_tokens: int = 128
    repeats: int = 2
    minutes: float = 10.0
    """The time budget: what would exceed it is left out, and named."""
    seed: int = 0
    models: Path = Path("models")
    """The folder of the models."""
    cells: Path | None = None
    """The folder of results, one file per cell, with which a run continues; None means no files."""

    def __post_init__(self) -> None:
        _require(bool(_GPU_DEVICE.fullmatch(self.device)), "--device", "cuda, cuda:NUMBER or cpu", self.device)
        _require(self.size in GPU_SIZES, "--size", _one_of(GPU_SIZES), self.size)
        _require(self.weights in GPU_WEIGHTS, "--weights", _one_of(GPU_WEIGHTS), self.weights)
        _require(self.drafter in GPU_DRAFTERS, "--drafter", _one_of(GPU_DRAFTERS), self.drafter)
        _require(bool(self.parts), "--parts", f"some of {', '.join(GPU_PARTS)}", _joined(self.parts))
        _require(bool(self.methods), "--methods", f"some of {', '.join(METHODS)}", _joined(self.methods))
        _require(self.max_tokens >= 2, "--max-tokens", ">= 2 (a rate needs two tokens)", self.max_tokens)
        longest = 16_384 if self.size == "8b" else 2048
        fits = max(self.contexts) + self.max_tokens <= longest
        rule = f"at most {longest - self.max_tokens} with --size {self.size} and --max-tokens {self.max_tokens}"
        _require(fits, "--contexts", rule, _joined(self.contexts))
        _require(self.repeats >= 1, "--repeats", ">= 1", self.repeats)
        _require(0 < self.minutes <= 24 * 60, "--minutes", "in (0, 1440]", self.minutes)
        _require(0 <= self.seed < 2**32, "--seed", "in [0, 2**32)", self.seed)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A load test, with all choices made."""

    url: str | None = None
    """Address of a running gateway; None means that the suite starts services."""
    guidellm: str = "guidellm"
    """The program that generates the load."""
    methods: tuple[str, ...] = ("off", "auto")
    request_rates: tuple[float, ...] = (math.inf,)
    """Requests a second, one run for each; infinity means all at once."""
    num_prompts: int = 1
    """Requests of each run; prompts are repeated if there are fewer."""
    prompts: tuple[Prompt, ...] = field(default=(), repr=False)
    max_tokens: int = 128
    temperature: float = 0.7
    seed: int = 0
    target: str = PAIR_MODELS[0]
    draft: str = PAIR_MODELS[1]
    cores: tuple[int, ...] = ()
    """The target's core, then the core of everything else, the load included; empty = not pinned."""

    def __post_init__(self) -> None:
        rule = "the path of GuideLLM, which can be executed (pip install guidellm, in an environment of its own)"
        _require(shutil.which(self.guidellm) is not None, "--guidellm", rule, self.guidellm)
        is_url = self.url is None or self.url.startswith(("http://", "https://"))
        _require(is_url, "--url", "a URL of http or https", self.url)
        _require(bool(self.methods), "--methods", f"some of {', '.join(methods.METHODS)}", _joined(self.methods))
        _require(self.num_prompts >= 1, "--num-prompts", ">= 1", self.num_prompts)
        has_chats = any(prompt.messages for prompt in self.prompts)
        texts = f"texts, as {' and '.join(TEXT_SETS)} are, because GuideLLM is given texts"
        _require(not has_chats, "--prompts", texts, "chats")
        _require(self.max_tokens >= 2, "--max-tokens", ">= 2 (a rate needs two tokens)", self.max_tokens)
        _require(self.temperature >= 0, "--temperature", "a number >= 0", self.temperature)
        _require(0 <= self.seed < 2**32, "--seed", "in [0, 2**32)", self.seed)
        is_usual = (self.target, self.draft) == PAIR_MODELS[:2]
        unset = "their defaults with --url, where the models run already"
        _require(self.url is None or is_usual, "--target and --draft", unset, f"{self.target} and {self.draft}")


def parse_list(
    flag: str, text: str, convert: Callable[[str], T], rule: str, allowed: Callable[[T], bool]
) -> tuple[T, ...]:
    """Returns the values of a comma-separated flag, in order, each once. `rule` says what a value must be."""
    values: list[T] = []
    for part in (part.strip() for part in text.split(",")):
        try:
            value = convert(part)
        except ValueError:
            raise FlagError(flag, rule, part) from None
        if not allowed(value):
            raise FlagError(flag, rule, part)
        if value not in values:
            values.append(value)
    return tuple(values)


def parse_names(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Reads a comma-separated choice of names; an empty text chooses none."""
    return parse_list(flag, text, str, _one_of(known), lambda name: name in known) if text.strip() else ()


def parse_numbers(flag: str, text: str, rule: str, allowed: Callable[[float], bool]) -> tuple[float, ...]:
    """Comma-separated finite numbers."""
    return parse_list(flag, text, float, rule, lambda value: math.isfinite(value) and allowed(value))


def parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers, each at least 1."""
    return parse_list(flag, text, int, ">= 1, a whole number", lambda value: value >= 1)


def parse_cores(text: str, available: Sequence[int]) -> tuple[int, ...]:
    """Cores for the target and for everything else.

    "auto" takes the first two that this process may use, "none" pins nothing. A single core serves as both.
    """
    if text == "none" or (text == "auto" and not available):
        return ()
    if text == "auto":
        return (available[0], available[1 % len(available)])  # a single core serves as both
    rule = f"auto, none, or one or two of the cores {','.join(map(str, available))}"
    cores = parse_list("--cores", text, int, rule, lambda core: core in available)
    _require(len(cores) <= 2, "--cores", rule, text)
    return (cores[0], cores[-1])


def read_prompts(source: str, categories: str, count: int | None, *, held_out: bool = False) -> tuple[Prompt, ...]:
    """Returns the prompts that the flags --prompts, --held-out, --categories and --num-prompts choose."""
    _require(count is None or count >= 1, "--num-prompts", ">= 1", count)
    try:
        prompts = load_prompts(source, held_out=held_out)
    except PromptError as error:
        raise PromptError(f"--prompts: {error}") from None
    names = tuple(name.strip() for name in categories.split(",") if name.strip())
    try:
        return tuple(choose(prompts, names, count))
    except PromptError as error:
        raise PromptError(f"--categories: {error}") from None


def _check_llama_server(path: str) -> None:
    # Empty means that llama.cpp takes no part. Starting the program shows whether it is llama.cpp's.
    is_usable = not path or shutil.which(path) is not None
    _require(is_usable, "--llama-server", "the path of llama.cpp's llama-server, which can be executed", path)


def _joined(values: Sequence[object]) -> str:
    return ",".join(map(str, values))


def _one_of(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}"


def _require(condition: bool, flag: str, rule: str, value: object) -> None:
    if not condition:
        raise FlagError(flag, rule, value)
