"""The experiments of the suite of structured output: contenders with and without a mask, schemas, parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider_bench.config import BenchConfig, StructuredConfig
from outrider_bench.experiment import OFF, PLAIN, TARGET, Contender, Experiment, contender, contenders_of
from outrider_bench.suites.structured.descriptions import (
    ANY_TEXT,
    CHANGES_NOTHING,
    FORCED,
    LOOSE,
    PROMPTS,
    SCHEMAS,
    Schema,
    Structure,
)
from outrider_cli.prompts import Prompt, choose, default_prompts

MASK, FILTERED, FORCING, GENERAL, ASKED = "mask", "mask-filtered", "forced", "schemas", "parameters"
"""Names of the experiments."""
TOP_P = 0.95
FILTERED_TEMPERATURE = 0.7
KEPT_PARAMETERS: Mapping[str, Mapping[str, Any]] = {
    "logprobs": {"logprobs": 5},
    # Too small to change a float32, and with it a draw, but computed like any others.
    "penalties": {"repetition_penalty": 1 + 1e-9, "presence_penalty": 1e-30, "frequency_penalty": 1e-30},
    "stop strings": {"stop": ["\x00 is never said", "\x01 is never said either"]},
}
"""Options that change no text, by the setting's name."""
ASKED_METHODS = (OFF, "auto")
FORCED_METHODS = ("auto", "retrieval")


@dataclass(frozen=True, slots=True)
class StructuredSizes:
    """Says how much is measured."""

    target: str = TARGET
    temperatures: tuple[float, ...] = (0.0, 0.7)
    num_prompts: int = 8
    """Prompts of code, of which texts with and without a mask are compared."""
    max_tokens: int = 96
    num_schemas: int = len(SCHEMAS)
    num_forced: int = len(FORCED)
    num_schema_prompts: int = len(PROMPTS)
    schema_tokens: int = 256
    """Limit of each JSON text; all are shorter."""
    num_texts: int = 8
    """Texts of one prompt."""
    text_prompt_tokens: int = 1500
    text_tokens: int = 8
    """Limit of each of several texts: only their beginnings are timed."""
    rounds_per_repeat: int = 3
    """Turns of several texts in a repeat."""


QUICK = StructuredSizes(
    target="demo/target",
    temperatures=(0.7,),
    num_prompts=1,
    max_tokens=12,
    num_schemas=2,
    num_forced=1,
    num_schema_prompts=1,
    num_texts=2,
    text_prompt_tokens=200,
    text_tokens=2,
    rounds_per_repeat=1,
)


def sizes_of(config: StructuredConfig) -> StructuredSizes:
    """Choose the sizes that the flags ask for."""
    return QUICK if config.is_quick else StructuredSizes()


def experiments_of(config: StructuredConfig, sizes: StructuredSizes) -> list[Experiment]:
    """List the experiments of the chosen parts. Contenders have options of the SDK."""
    return [experiment for part in config.parts if part in _PARTS for experiment in _PARTS[part](config, sizes)]


def structures_of(experiment: Experiment) -> dict[str, Structure]:
    """Return the structures of an experiment in which each prompt has its own, by the text of the prompt."""
    schemas = {FORCING: FORCED, GENERAL: SCHEMAS}.get(experiment.name, {})
    return {prompt.text: {"json": schemas[prompt.category]} for prompt in experiment.prompts if schemas}


def settings_kept(experiment: str) -> tuple[str, ...]:
    """Return the settings of an experiment that must not change a text."""
    return {MASK: (ANY_TEXT,), FILTERED: (ANY_TEXT,), ASKED: tuple(KEPT_PARAMETERS)}.get(experiment, ())


def _with(one: Contender, setting: str, **options: Any) -> Contender:
    return replace(one, setting=setting, options={**one.options, **options})


def _methods(names: Sequence[str]) -> list[Contender]:
    return contenders_of(BenchConfig(methods=tuple(names)))


def _masks(config: StructuredConfig, sizes: StructuredSizes) -> list[Experiment]:
    """Make the experiments with a mask on the same text: all draws, and filtered ones, which the mask comes before."""
    masks = {ANY_TEXT: CHANGES_NOTHING, **LOOSE}
    everyone = _methods(config.methods)
    masked = [_with(one, name, structured_outputs=mask) for name, mask in masks.items() for one in everyone]
    filtered = [_with(one, one.setting, top_p=TOP_P) for one in everyone]
    filtered += [_with(one, ANY_TEXT, structured_outputs=CHANGES_NOTHING) for one in filtered]
    whole = _of_code(MASK, "The same texts with and without a mask", [*everyone, *masked], config, sizes)
    return [
        whole,
        replace(
            whole,
            name=FILTERED,
            title=f"The same with top_p = {TOP_P:g}",
            contenders=tuple(filtered),
            temperatures=(FILTERED_TEMPERATURE,),
        ),
    ]


def _forced(config: StructuredConfig, sizes: StructuredSizes) -> list[Experiment]:
    some = dict(list(FORCED.items())[: sizes.num_forced])
    everyone = [PLAIN, *map(contender, FORCED_METHODS)]
    return [_of_schemas(FORCING, "Schemas that force most of the text", some, everyone, config, sizes)]


def _schemas(config: StructuredConfig, sizes: StructuredSizes) -> list[Experiment]:
    some = dict(list(SCHEMAS.items())[: sizes.num_schemas])
    return [_of_schemas(GENERAL, "Schemas", some, _methods(config.methods), config, sizes)]


def _parameters(config: StructuredConfig, sizes: StructuredSizes) -> list[Experiment]:
    everyone = [contender(method) for method in ASKED_METHODS]
    asking = [_with(one, name, **options) for name, options in KEPT_PARAMETERS.items() for one in everyone]
    return [_of_code(ASKED, "Parameters that change no text", [*everyone, *asking], config, sizes)]


def _of_code(
    name: str, title: str, contenders: Sequence[Contender], config: StructuredConfig, sizes: StructuredSizes
) -> Experiment:
    prompts = tuple(choose(default_prompts(), ("code",), sizes.num_prompts))
    part = {FILTERED: MASK}.get(name, name)
    return Experiment(
        name,
        part,
        title,
        tuple(contenders),
        sizes.temperatures,
        prompts,
        sizes.max_tokens,
        config.repeats,
        target=sizes.target,
    )


def _of_schemas(
    name: str,
    title: str,
    schemas: Mapping[str, Schema],
    contenders: Sequence[Contender],
    config: StructuredConfig,
    sizes: StructuredSizes,
) -> Experiment:
    """Make an experiment in which each prompt has a schema: its category is the schema's name."""
    prompts = [
        Prompt(text.format(name=schema), schema) for schema in schemas for text in PROMPTS[: sizes.num_schema_prompts]
    ]
    return Experiment(
        name,
        name,
        title,
        tuple(contenders),
        sizes.temperatures,
        tuple(prompts),
        sizes.schema_tokens,
        config.repeats,
        target=sizes.target,
    )


_PARTS: Mapping[str, Callable[[StructuredConfig, StructuredSizes], list[Experiment]]] = {
    "mask": _masks,
    "forced": _forced,
    "schemas": _schemas,
    "parameters": _parameters,
}
