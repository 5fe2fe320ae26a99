"""The suite of structured output: which texts it compares, what it claims of them, and that it fails on wrong ones."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from jsonschema import Draft202012Validator
from PIL import Image
from rich.console import Console

from outrider.core.structure import Structure, StructureKind
from outrider.models.structure import Grammars
from outrider.v1 import verifier_pb2
from outrider_bench.config import STRUCTURED_PARTS, StructuredConfig
from outrider_bench.drivers import ClientDriver, GenerationFailed
from outrider_bench.experiment import OFF, label_of
from outrider_bench.result import INCONCLUSIVE, MET, MISSED, NOT_MEASURED
from outrider_bench.samples import Block, Request
from outrider_bench.suites.structured.beginnings import Beginnings
from outrider_bench.suites.structured.claims import (
    StructuredEvidence,
    agreements,
    claims_of,
    different_texts,
    evidence_of,
    mask_costs,
    partings,
)
from outrider_bench.suites.structured.descriptions import ANY_TEXT, CHANGES_NOTHING, FORCED, LOOSE, SCHEMAS
from outrider_bench.suites.structured.experiments import (
    FILTERED,
    FORCING,
    GENERAL,
    KEPT_PARAMETERS,
    MASK,
    QUICK,
    StructuredSizes,
    experiments_of,
    sizes_of,
    structures_of,
)
from outrider_bench.suites.structured.report import report_of
from outrider_bench.suites.structured.suite import StructuredSuite, is_json
from outrider_client.errors import Internal, InvalidArgument
from outrider_client.generation import Chunk, FinishReason, Result
from outrider_client.requests import generate_request
from tests.bench.experiment_samples import made, ran
from tests.bench.virtual_loop import run_virtually
from tests.support.services import target_model

CONFIG = StructuredConfig(methods=("off", "auto"), parts=("mask",))


def turns(seconds: dict[str, float], *, prompt: int = 0, lengths: dict[str, int] | None = None) -> list[Block]:
    """A turn of each contender at T = 0. Texts of the same length are the same."""
    lengths = lengths or {}
    return [
        ran(label, 0.0, made(each, tokens=lengths.get(label, 100)), prompt=prompt) for label, each in seconds.items()
    ]


def evidence(blocks: Sequence[Block], name: str = MASK, config: StructuredConfig = CONFIG) -> StructuredEvidence:
    sizes = StructuredSizes(temperatures=(0.0,))
    return evidence_of({name: blocks}, experiments_of(config, sizes), Beginnings(sizes))


def test_a_mask_costs_what_it_costs_on_texts_that_it_does_not_change() -> None:
    blocks = turns({"off": 10.0, "auto": 4.0, "off any text": 12.5, "auto any text": 4.0})
    # A text that the mask changes is another one, however fast it came.
    blocks += turns({"off": 10.0, "off short lines": 1.0}, prompt=1, lengths={"off short lines": 99})
    costs = {(cost.method, cost.setting): cost for cost in mask_costs(evidence(blocks)) if cost.experiment == MASK}
    assert costs["off", ANY_TEXT].kept_speed == pytest.approx(0.8)
    assert costs["off", ANY_TEXT].kept_gain is None
    assert costs["auto", ANY_TEXT].kept_speed == pytest.approx(1.0)
    assert costs["auto", ANY_TEXT].kept_gain == pytest.approx(3.125 / 2.5)
    assert costs["off", "short lines"].kept_speed is None
    assert (costs["off", "short lines"].num_same, costs["off", "short lines"].num_texts) == (0, 1)


def test_claims_are_met_missed_or_not_measured_where_hardly_a_text_is_the_same() -> None:
    blocks = []
    for prompt in range(5):
        seconds = {"off": 10.0, "auto": 4.0, "off any text": 12.5, "auto any text": 4.0, "off lexemes": 10.0}
        blocks += turns(seconds, prompt=prompt, lengths={"off lexemes": 100 if prompt < 3 else 99})
    found = {claim.name: claim for claim in claims_of(("mask",), evidence(blocks))}
    assert found["T = 0, any text: off with the mask by without"].verdict == MISSED
    assert found["T = 0, any text: auto with the mask by without"].verdict == MET
    assert found["T = 0, any text: auto by off with the mask, by that without"].verdict == MET
    few = found["T = 0, lexemes: off with the mask by without"]
    assert (few.verdict, few.remark) == (NOT_MEASURED, "3 of 5 texts are the same")


def test_a_text_that_must_not_change_and_does_is_a_failure() -> None:
    labels = ["off", "auto", "off any text", "auto any text", "off printable", "auto printable"]
    same = evidence(turns(dict.fromkeys(labels, 1.0)))
    assert partings(same, is_exact=True) == {}
    assert agreements(same) == ["The same texts with and without a mask: 3 of 3 texts are those of off"]
    title = "The same texts with and without a mask"
    for label, is_exact, is_wrong in (
        ("off any text", True, True),
        ("auto any text", True, True),
        ("auto", True, True),  # losslessness itself
        ("off printable", True, False),  # it may forbid what the text has
        ("off any text", False, True),  # one row a forward in either text
        ("auto any text", False, False),  # near ties go as the rows fall
    ):
        parted = evidence(turns(dict.fromkeys(labels, 1.0), lengths={label: 99}))
        wanted = {f"{title}: {label}, T = 0": "1 of 1 texts are not those of off"} if is_wrong else {}
        assert partings(parted, is_exact=is_exact) == wanted, label


def test_with_a_schema_every_method_must_say_what_off_says() -> None:
    config = StructuredConfig(parts=("schemas",), methods=("off", "auto"))
    blocks = turns({"off": 10.0, "auto": 5.0}) + turns({"off": 10.0, "auto": 5.0}, prompt=1, lengths={"auto": 99})
    found = evidence(blocks, GENERAL, config)
    assert partings(found, is_exact=True) == {"Schemas: auto, T = 0": "1 of 2 texts are not those of off"}
    [claim] = claims_of(("schemas",), found)
    assert (claim.name, claim.value, claim.verdict) == ("T = 0: auto by off", pytest.approx(1.99), "")
    assert len(different_texts(blocks)) == 2


def test_names_are_unique_and_every_part_is_there_in_small_sizes_too() -> None:
    for config in (StructuredConfig(), StructuredConfig(is_quick=True)):
        experiments = experiments_of(config, sizes_of(config))
        names = [experiment.name for experiment in experiments]
        assert len(set(names)) == len(names)
        assert {experiment.part for experiment in experiments} == set(STRUCTURED_PARTS) - {"texts"}
        for experiment in experiments:
            labels = [label_of(one) for one in experiment.contenders]
            assert len(set(labels)) == len(labels), experiment.name
            assert OFF in labels
            structures = structures_of(experiment)
            is_of_schemas = experiment.name in (FORCING, GENERAL)
            assert len(structures) == (len(experiment.prompts) if is_of_schemas else 0), "prompts are different"


def test_what_a_contender_asks_for_is_what_the_server_hears() -> None:
    sent = {}
    for experiment in experiments_of(StructuredConfig(methods=("card", "pearl+retrieval")), StructuredSizes()):
        for one in experiment.contenders:
            request = generate_request("p", dict(one.options))  # type: ignore[arg-type]  # by name, as the SDK takes it
            assert not request.sampling.ignore_eos, "the text with a mask could not"
            sent[experiment.name, label_of(one)] = request
    assert sent[MASK, "off any text"].structured_outputs.regex == "(?s:.*)"
    assert sent[MASK, "pearl+retrieval lexemes"].speculation.retrieval
    assert sent[MASK, "card lexemes"].structured_outputs.grammar
    assert sent[FILTERED, "off"].sampling.top_p == sent[FILTERED, "card any text"].sampling.top_p == 0.95
    assert not sent[FILTERED, "off"].HasField("structured_outputs")
    assert [setting for setting in KEPT_PARAMETERS if ("parameters", f"auto {setting}") not in sent] == []


def test_every_description_compiles_and_any_text_is_refused_no_token_that_is_text() -> None:
    model = target_model()
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    for schema in (*SCHEMAS.values(), *FORCED.values()):
        Draft202012Validator.check_schema(schema)
        grammars.matcher(Structure(StructureKind.JSON, json.dumps(schema)))
    for structure in LOOSE.values():
        ((kind, text),) = structure.items()
        mask = grammars.matcher(Structure(StructureKind(kind), text)).mask()
        assert 0 < int((~mask).sum()) < 0.5 * len(mask), "it forbids something, and not most of it"
    mask = grammars.matcher(Structure(StructureKind.REGEX, str(CHANGES_NOTHING["regex"]))).mask()
    text = [token_id for token_id in range(model.vocab_size) if token_id not in model.tokenizer.all_special_ids]
    decoded = [model.tokenizer.decode([token_id]) for token_id in text]
    refused = [token for token_id, token in zip(text, decoded, strict=True) if not mask[token_id]]
    # A byte that begins no character can only follow one that does.
    assert [token for token in refused if "\ufffd" not in token] == []
    assert all(mask[token_id] for token_id in model.eos_token_ids)


@dataclass
class ScriptedGeneration:
    """Each of n texts begins 0.1 s after the one before, the first after a second; then goes on."""

    n: int
    num_begun: int
    error: Exception | None

    @property
    def result(self) -> Result:
        return Result("", (1, 2), FinishReason.STOP, None, 1, 9, 2, verifier_pb2.SpeculationSummary(num_rounds=2))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    async def __aiter__(self) -> Any:
        await asyncio.sleep(0.9)
        if self.error is not None:
            raise self.error
        for index in range(self.num_begun):
            await asyncio.sleep(0.1)
            yield Chunk((1,), (), "", 0, index=index)
        await asyncio.sleep(5.0)
        yield Chunk((2,), (), "", 0, index=0)


@dataclass
class ScriptedClient:
    """A client of the SDK: tokens of a text are its characters."""

    most: int = 100
    error: Exception | None = None
    requests: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    async def tokenize(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    async def info(self) -> verifier_pb2.GetInfoResponse:
        info = verifier_pb2.GetInfoResponse()
        info.model.max_context_len = 500
        return info

    def generate(self, prompt: Any, **options: Any) -> ScriptedGeneration:
        self.requests.append((prompt, options))
        n = options.get("n", 1)
        return ScriptedGeneration(n, min(n, self.most), self.error)


def begun(client: ScriptedClient, num_turns: int = 2) -> Beginnings:
    found = Beginnings(StructuredSizes(num_texts=4, text_tokens=8))
    run_virtually(found.run(client, 3, num_turns))  # type: ignore[arg-type]  # a scripted one
    return found


def test_several_texts_have_begun_when_the_last_one_has() -> None:
    client = ScriptedClient()
    found = {one.name: one for one in begun(client).measurements("texts")}
    assert found["off: until all of n = 4 texts have begun"].values == pytest.approx((1.3, 1.3))
    ratio = found["auto: n = 4 by n = 1"]
    assert ratio.values == pytest.approx((1.3, 1.3))
    assert (ratio.verdict, ratio.part) == (MISSED, "texts")


def test_no_two_prompts_begin_alike_and_all_have_room() -> None:
    client = ScriptedClient()
    begun(client)
    prompts = [prompt for prompt, _ in client.requests]
    assert {len(prompt) for prompt in prompts} == {500 - 8}, "as long as the context has room for"
    heads = ["".join(map(chr, prompt)).splitlines()[0] for prompt in prompts]
    assert len(set(heads)) == len(heads) == 12, "two methods, one and four texts, two turns and one to warm up"
    # Neither one text nor several ones always come first.
    assert [options["n"] for _, options in client.requests[4:]] == [4, 1, 4, 1, 1, 4, 1, 4]


def test_texts_of_which_one_never_begins_are_a_failure() -> None:
    with pytest.raises(GenerationFailed, match="3 of 4 texts have begun"):
        begun(ScriptedClient(most=3))


def test_a_prompt_gets_its_structure_and_a_refusal_is_the_contenders_failure() -> None:
    client = ScriptedClient()
    driver = ClientDriver(client, {"a": {"regex": "x"}})  # type: ignore[arg-type]  # a scripted one
    generation = run_virtually(driver.generate(Request("a", 0.7, 5, 8), {"method": "auto", "logprobs": 1}))
    run_virtually(driver.generate(Request("b", 0.7, 5, 8), {"method": "off"}))
    run_virtually(driver.generate(Request("a", 0.7, 5, 8), {"method": "off", "structured_outputs": {"regex": "y"}}))
    asked = [options["structured_outputs"] for _, options in client.requests]
    assert asked == [{"regex": "x"}, None, {"regex": "y"}]
    first = client.requests[0][1]
    assert (first["temperature"], first["seed"], first["max_tokens"], first["logprobs"]) == (0.7, 5, 8, 1)
    assert (generation.token_ids, generation.duration_s) == ((1, 2), pytest.approx(6.0))
    for error in (InvalidArgument("no such regex"), Internal("broken")):
        refused = ClientDriver(ScriptedClient(error=error))  # type: ignore[arg-type]
        with pytest.raises(GenerationFailed, match=error.message):
            run_virtually(refused.generate(Request("a", 0.7, 5, 8), {"method": "off"}))


def a_suite(config: StructuredConfig | None = None) -> StructuredSuite:
    """A suite that has measured everything: the more is asked, the longer it takes."""
    suite = StructuredSuite(config or StructuredConfig(repeats=1, cores=(0, 1)))
    for experiment in suite.experiments:
        for number, one in enumerate(experiment.contenders):
            for temperature in experiment.temperatures:
                for prompt, category in enumerate(each.category for each in experiment.prompts):
                    generation = made(1.0 + 0.01 * number * (prompt + 1), num_rounds=20, num_accepted=80)
                    block = ran(label_of(one), temperature, generation, prompt=prompt, category=category)
                    suite.keep(experiment.name, [block])
    for method in ("off", "auto"):
        suite.beginnings.seconds[method] = {1: [1.0, 2.0], suite.sizes.num_texts: [1.1, 2.0]}
    return suite


def test_a_table_fits_into_an_ordinary_terminal() -> None:
    console = Console(width=118, force_terminal=False)
    with console.capture() as capture:
        report_of(a_suite().results()).print(console)
    assert "…" not in capture.get()


def test_intervals_say_how_far_prompts_lie_apart() -> None:
    results = a_suite().results()
    claims = {(claim["part"], claim["name"]): claim for claim in results["claims"]}
    interval = claims["mask", "T = 0, any text: auto with the mask by without"]["interval"]
    assert interval[0] < interval[1]
    assert claims["texts", "off: n = 8 by n = 1"]["interval"] is None
    assert claims["forced", "T = 0: auto by off"]["verdict"] in (MISSED, INCONCLUSIVE)


def test_numbers_report_and_pictures_are_written(tmp_path: Path) -> None:
    results = a_suite().results()
    results["failures"] = {"Schemas: auto, T = 0": "1 of 2 texts are not those of off"}
    results["checks"] = ["Schemas: 3 of 4 texts are those of off"]
    paths = StructuredSuite.write(results, tmp_path / "new")
    assert [path.name for path in paths] == ["results.json", "report.md", "mask.png", "forced.png", "schemas.png"]
    report = paths[1].read_text()
    wrong = "Schemas: auto, T = 0: 1 of 2 texts are not those of off."
    assert (
        0
        < report.index(wrong)
        < report.index("* Schemas: 3 of 4 texts are those of off")
        < report.index("| measured |")
    )
    assert "![mask](mask.png)" in report
    for path in paths[2:]:
        with Image.open(path) as image:
            assert min(image.size) >= 300


def test_without_a_server_there_is_a_reason_and_no_number(tmp_path: Path) -> None:
    suite = StructuredSuite(StructuredConfig(address="127.0.0.1:1", repeats=1))
    assert suite.run(tmp_path, Console(quiet=True)) == 1
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"]
    assert "UNAVAILABLE" in results["failures"]["server"] or "Unavailable" in results["failures"]["server"]


def test_json_is_told_from_what_is_cut_off() -> None:
    assert is_json('{"a":1}')
    assert not is_json('{"a":')


@pytest.mark.timeout(620)
@pytest.mark.suite
def test_the_suite_measures_everything_in_small_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "structured", "--quick", "--repeats", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    assert not results["interrupted"]
    for experiment in results["experiments"]:
        assert experiment["failures"] == {}
        assert all(not row["partial"] and not row["failed"] for row in experiment["rows"])
    assert len(results["checks"]) == 7
    assert all(claim["value"] is not None for claim in results["claims"] if ANY_TEXT in claim["name"])
    assert {claim["part"] for claim in results["claims"]} == set(STRUCTURED_PARTS)
    assert QUICK.text_prompt_tokens == results["config"]["text_prompt_tokens"]
