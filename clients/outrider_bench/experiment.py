"""An experiment: contenders that take turns on the same prompts, with the same models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToDict

from outrider.core.methods import METHODS
from outrider.v1 import types_pb2
from outrider_bench.config import BenchConfig
from outrider_bench.costs import Costs
from outrider_cli.prompts import Prompt
from outrider_client.enums import enum_number
from outrider_client.presets import published

TARGET = "demo/target-100m"
DRAFT = "demo/draft"
DRAFT_UNTRAINED = "demo/draft-untrained"


@dataclass(frozen=True, slots=True)
class Experiment:
    """Contenders that take turns on the same prompts. Each prompt is continued at every temperature."""

    name: str
    contenders: tuple[Contender, ...]
    temperatures: tuple[float, ...]
    prompts: tuple[Prompt, ...]
    max_tokens: int
    repeats: int
    target: str = TARGET
    draft: str = DRAFT
    """The speculator's model."""
    dtype: str = "auto"
    """Number format of the target."""
    concurrencies: tuple[int, ...] = (1,)
    """Numbers of concurrent generations; everything is measured at each."""
    has_prior: bool = False
    """True if both sides have a prior, in a simulation."""
    costs: Costs | None = None
    """Times of forwards and messages of a simulation; None means real services and measured times."""

    @property
    def num_generations(self) -> int:
        """The generations to run, except the warm-up."""
        each = len(self.contenders) * len(self.temperatures) * len(self.prompts) * self.repeats
        return each * len(self.concurrencies)

    def config(self, seed: int, cores: tuple[int, ...]) -> BenchConfig:
        """Returns the benchmark of this experiment, for the code that takes turns and starts services."""
        return BenchConfig(
            target=self.target,
            draft=self.draft,
            dtype=self.dtype,
            # Operator calls dominate small draft models. Others have the target's type, as their names promise a ratio.
            draft_dtype="float32" if self.draft in (DRAFT, DRAFT_UNTRAINED) else "auto",
            # Not the contenders' methods: a server without one of them fails that contender, not the experiment.
            methods=(OFF,),
            temperatures=self.temperatures,
            concurrencies=self.concurrencies,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            seed=seed,
            cores=cores,
            prompts=self.prompts,
        )


def label_of(contender: Contender) -> str:
    """Returns method and setting in a few words, like `Condition.label`."""
    return f"{contender.method} {contender.setting}".strip()


OFF = "off"
BARE = "bare"
HF_GENERATE = "hf-generate"
HF_ASSISTED = "hf-assisted"
HF_PROMPT_LOOKUP = "hf-prompt-lookup"
LLAMA_CPP = "llama.cpp"


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to generate. `options` is what its driver must know besides the request."""

    method: str
    setting: str = ""
    driver: str = "stack"
    """Name of its driver: "stack", "hf", "bare" or "llama.cpp"."""
    options: Mapping[str, Any] = field(default_factory=dict)


def contender(method: str, setting: str = "", **fields: Any) -> Contender:
    """Makes a contender of a method with fields of `SpeculationParams`."""
    return Contender(method, setting, options={"method": method, **fields})


PLAIN = contender(OFF)
AS_PUBLISHED = "as published"
"""Setting of a contender that follows its paper, without what this project adds to all methods."""


def as_published(method: str, **fields: Any) -> Contender:
    """Makes a contender of a method as published, with the fields of `SpeculationParams` that the paper tunes."""
    number = enum_number(types_pb2.Method.DESCRIPTOR, method, "method")
    preset = published(types_pb2.SpeculationParams(method=number, **fields))  # type: ignore[arg-type]  # a number
    options = MessageToDict(preset, preserving_proto_field_name=True)
    return Contender(method, AS_PUBLISHED, options={**options, "method": method})


def contenders_of(config: BenchConfig) -> list[Contender]:
    """Lists all contenders. `off` always takes part, because the others are compared with it."""
    contenders = [Contender(OFF, options={"method": OFF})]
    for method in config.methods:
        if method != OFF:
            contenders.extend(_settings_of(method, config))
    if "bare" in config.baselines:
        contenders.append(Contender(BARE, driver="bare"))
    if "hf" in config.baselines:
        contenders.extend(_hf_contenders())
    if config.llama_server:
        contenders.extend(LLAMA_CPP_CONTENDERS)
    return contenders


def _settings_of(method: str, config: BenchConfig) -> list[Contender]:
    """Lists a method once for each --num-speculative-tokens."""
    name, _, retrieval = method.partition("+")
    base = METHODS[name]
    shared: dict[str, Any] = {"method": name}
    if retrieval:
        shared["retrieval"] = True
    # The server refuses the field for a method that takes nodes while they pay.
    if config.min_path_probability is not None and base.bounds_paths(base.rows):
        shared["min_path_probability"] = config.min_path_probability
    # The server refuses the field for a method that does not draft ahead.
    lookahead = config.lookahead if base.drafts_ahead else None
    found = []
    for count in config.num_speculative_tokens or (None,):
        options = dict(shared)
        if count is not None:
            options["num_speculative_tokens"] = count
        if lookahead is not None:
            # A lookahead below the chain's length is refused; one fixed lookahead should not end a sweep over lengths.
            options["lookahead"] = max(count or 0, lookahead)
        found.append(Contender(method, "" if count is None else f"k={count}", options=options))
    return found


def _hf_contenders() -> list[Contender]:
    """transformers' own ways to generate.

    Assisted generation has two schedules worth comparing with: its default, which drafts up to 20 tokens and stops
    if the draft model is less than 40 % sure (a threshold that moves if scikit-learn is installed), and a constant
    length; which one is best is not known beforehand.
    """
    # A threshold of 0: with another one, drafts would end early in spite of the constant length.
    constant = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
    assisted = [Contender(HF_ASSISTED, "default", "hf", {"assistant": {}})]
    for count in (3, 5, 8):
        options = {"assistant": constant | {"num_assistant_tokens": count}}
        assisted.append(Contender(HF_ASSISTED, f"constant {count}", "hf", options))
    return [
        Contender(HF_GENERATE, driver="hf"),
        *assisted,
        Contender(HF_PROMPT_LOOKUP, "10 tokens", "hf", {"prompt_lookup_num_tokens": 10}),
    ]


def _llama_cpp(max_drafted: int, min_probability: float) -> Contender:
    options = {"max_drafted": max_drafted, "min_probability": min_probability}
    return Contender(LLAMA_CPP, f"{max_drafted} drafted, p >= {min_probability:g}", LLAMA_CPP, options)


LLAMA_CPP_CONTENDERS = (
    Contender(LLAMA_CPP, "plain", LLAMA_CPP),
    _llama_cpp(4, 0.6),
    _llama_cpp(10, 0.4),
    _llama_cpp(16, 0.6),
    _llama_cpp(24, 0.4),
)
"""llama.cpp without a draft model, and with several settings of it; which one is best is not known beforehand."""
