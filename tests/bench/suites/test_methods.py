"""The methods' suite: its flags, its plan, what it asks servers for; and once a part of it, for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.core.methods import METHODS
from outrider.v1 import types_pb2, verifier_pb2
from outrider_bench.config import PARTS, MethodsConfig
from outrider_bench.drivers import num_judged_in, rounds_from_proto, to_proto, wire_name
from outrider_bench.experiment import LLAMA_CPP_CONTENDERS, PLAIN, label_of
from outrider_bench.running import turns_of
from outrider_bench.samples import Request
from outrider_bench.suites.methods.estimate import seconds_of, total_seconds
from outrider_bench.suites.methods.experiments import FALLBACKS, QUICK, MethodsSizes, experiments_of, sizes_of
from outrider_bench.suites.methods.suite import MethodsSuite
from tests.bench.experiment_samples import small

BUDGET_S = 75 * 60
"""Five minutes less than a run may take: the estimate is one."""


@pytest.mark.slow
def test_a_whole_run_fits_into_an_hour_and_a_quarter() -> None:
    config = MethodsConfig()
    experiments = experiments_of(config.parts, sizes_of(config), config.repeats)
    assert total_seconds(experiments, sizes_of(config)) <= BUDGET_S
    assert {experiment.part for experiment in experiments} == set(PARTS)


def test_a_quick_run_is_a_small_part_of_a_whole_one() -> None:
    whole, quick = (experiments_of(PARTS, sizes, repeats) for sizes, repeats in ((MethodsSizes(), 3), (QUICK, 1)))
    assert sum(map(seconds_of, quick)) < 0.15 * sum(map(seconds_of, whole))
    assert {experiment.part for experiment in quick} == {experiment.part for experiment in whole}


def test_an_estimate_grows_with_tokens_prompts_and_repeats_and_speculation_makes_it_smaller() -> None:
    base = seconds_of(small())
    assert seconds_of(small(max_tokens=80)) > 2 * base
    assert seconds_of(small(repeats=6)) > 2 * base
    assert seconds_of(small(temperatures=(0.0, 0.7))) > 1.5 * base
    assert seconds_of(small(contenders=(PLAIN, PLAIN, PLAIN))) > seconds_of(small())


def test_the_number_of_generations_is_that_of_the_turns() -> None:
    for experiment in experiments_of(PARTS, MethodsSizes(), 3):
        config = experiment.config(0, ())
        turns = list(turns_of(experiment, config, experiment.contenders))
        num_generations = sum(len(turn.prompt_indices) for turn in turns)
        assert num_generations == experiment.num_generations, experiment.name


def test_parts_that_need_other_models_stand_together_so_that_services_start_once_each() -> None:
    services = [experiment.services for experiment in experiments_of(PARTS, MethodsSizes(), 3)]
    assert len({draft for draft, _ in services}) == 5
    assert [draft for draft, shares_core in dict.fromkeys(services) if shares_core] == ["demo/draft-c5"]
    assert services == sorted(services, key=services.index)


def test_chosen_parts_are_all_that_runs() -> None:
    chosen = experiments_of(("rows", "card"), MethodsSizes(), 3)
    assert {experiment.part for experiment in chosen} == {"rows", "card"}


def test_an_experiment_has_names_that_are_its_own_and_contenders_that_can_be_told_apart() -> None:
    experiments = experiments_of(PARTS, MethodsSizes(), 3)
    names = [experiment.name for experiment in experiments]
    assert len(set(names)) == len(names)
    for experiment in experiments:
        labels = [label_of(one) for one in experiment.contenders]
        assert len(set(labels)) == len(labels), experiment.name


def test_every_method_stands_in_the_table_of_methods() -> None:
    [experiment] = experiments_of(("methods",), MethodsSizes(), 3)
    alone = {"spacelike"}  # it has nothing to say in a new service, and a part of its own
    assert {one.method for one in experiment.contenders} == METHODS.keys() - alone
    assert experiment.temperatures == (0.0, 0.7, 1.0)


def test_every_experiment_that_something_is_claimed_of_has_a_dozen_prompts_or_all_that_ship() -> None:
    for experiment in experiments_of(PARTS, MethodsSizes(), 3):
        categories = [prompt.category for prompt in experiment.prompts]
        counts = {categories.count(name) for name in set(categories)}
        if experiment.name in ("saguaro-bias", "double-depth", "double-match-len"):
            assert counts == {6}  # drawn, not claimed
        else:
            assert counts == {8} if experiment.name == "auto" else min(counts) >= 12, experiment.name


def test_every_method_stands_in_the_part_with_several_generations_at_once_in_its_usual_setting() -> None:
    batch, fallbacks = experiments_of(("batch",), MethodsSizes(), 3)
    assert {label_of(one) for one in batch.contenders} == METHODS.keys() - {"spacelike"}
    assert (batch.concurrencies, fallbacks.concurrencies) == ((1, 2, 4, 8, 16), (1, 4, 16))
    assert len(batch.prompts) == len(fallbacks.prompts) == 16  # enough for the most at once
    assert batch.config(0, (0, 1)).concurrencies == batch.concurrencies
    assert batch.repeats >= 3


def test_models_that_share_a_core_are_both_pinned_to_it() -> None:
    [one] = [each for each in experiments_of(("double",), MethodsSizes(), 3) if each.shares_core]
    assert one.config(0, (2, 3)).cores == (2, 2)
    assert one.config(0, (2,)).cores == (2, 2)
    others = [each for each in experiments_of(("double",), MethodsSizes(), 3) if not each.shares_core]
    assert {each.config(0, (2, 3)).cores for each in others} == {(2, 3)}


def test_nothing_is_measured_on_one_core_where_none_is_chosen() -> None:
    names = [[one.name for one in MethodsSuite(MethodsConfig(cores=cores)).experiments] for cores in ((), (0, 1))]
    assert "double-one-core" not in names[0]
    assert set(names[1]) - set(names[0]) == {"double-one-core"}


def test_generations_at_once_take_less_time_each_and_more_in_all() -> None:
    times = [seconds_of(small(concurrencies=counts)) for counts in ((1,), (4,), (1, 4))]
    assert times[1] < times[0] < times[2] < times[0] + times[1]


def test_llama_cpp_stands_in_the_table_of_methods_where_its_server_is_named() -> None:
    [without] = experiments_of(("methods",), sizes_of(MethodsConfig()), 3)
    [beside] = experiments_of(("methods",), sizes_of(MethodsConfig(llama_server=sys.executable)), 3)
    assert beside.contenders == (*without.contenders, *LLAMA_CPP_CONTENDERS)
    assert (beside.prompts, beside.max_tokens) == (without.prompts, without.max_tokens)
    assert "llama.cpp" in beside.note
    assert "llama.cpp" not in without.note


def test_what_a_contender_asks_for_is_what_the_server_hears() -> None:
    sent = {
        (experiment.name, label_of(one)): to_proto(Request("p", 1.0, 0, 8), one.options).speculation
        for experiment in experiments_of(PARTS, MethodsSizes(), 3)
        for one in experiment.contenders
    }
    assert sent["card-width", "card K = 200"].card.beam_width == 200
    assert not sent["card", "card query only"].card.correction
    assert sent["card", "card query only"].card.HasField("correction")
    assert sent["saguaro-fan-out", "saguaro uniform"].saguaro.fan_out == types_pb2.FAN_OUT_UNIFORM
    fan_outs = [sent["saguaro-fan-out", f"saguaro {name}"].saguaro.budget for name in ("uniform", "geometric")]
    assert fan_outs == [16, 16]
    assert sent["saguaro-bias", "saguaro C = 0.25"].saguaro.bias == 0.25
    assert sent["saguaro-bias", "saguaro C = 0.25"].acceptance_rule == types_pb2.ACCEPTANCE_RULE_RATIO
    assert types_pb2.SOURCE_PRIOR not in sent["double", "double no prior"].double.tiers
    assert len(sent["double", "double no prior"].double.tiers) == 4
    assert types_pb2.SOURCE_REJECTED not in sent["double", "double no rejected tier"].double.tiers
    assert sent["double-depth", "double d = 16"].double.max_phrase_len == 16
    assert sent["double-match-len", "double n = 10"].double.max_match_len == 10
    assert sent["double-one-core", "double serial"].double.serial
    assert not sent["double-one-core", "double"].double.serial
    fallbacks = {name: sent["batch-fallbacks", f"saguaro fallback {name}"] for name in FALLBACKS}
    assert {name: message.saguaro.fallback for name, message in fallbacks.items()} == {
        name: types_pb2.Fallback.Value(f"FALLBACK_{name.upper()}") for name in FALLBACKS
    }
    assert [name for name, message in fallbacks.items() if message.retrieval] == ["retrieval"]
    assert sent["rows", "best-first rows = 16"].max_rows == 16
    assert sent["rows", "best-first chain"].rows == types_pb2.ROWS_CHAIN
    assert sent["spacelike", "spacelike"].retrieval_params.contribute
    trainless = {name: sent["sources", f"retrieval {name}"] for name in ("token-recycling", "ngram-pool", "rest")}
    assert {name: list(message.retrieval_params.sources) for name, message in trainless.items()} == {
        "token-recycling": [types_pb2.SOURCE_RECYCLED],
        "ngram-pool": [types_pb2.SOURCE_POOL],
        "rest": [types_pb2.SOURCE_PRIOR],
    }
    assert {message.rows for message in trainless.values()} == {types_pb2.ROWS_TREE}
    noise = [sent["noise", f"speculative {name}"] for name in ("shared noise", "greedy draft", "ratio rule")]
    assert [message.shared_noise for message in noise] == [True, False, False]
    assert {(message.num_speculative_tokens, message.min_path_probability) for message in noise} == {(8, 0.0)}
    assert all(message.HasField("min_path_probability") for message in noise)


def test_a_method_has_its_name_on_the_wire() -> None:
    for method in METHODS.values():
        assert wire_name(method.name) in types_pb2.Method.keys()  # noqa: SIM118 - an enum of protobuf


def chunk(num_drafted: int, *sources: int) -> verifier_pb2.Chunk:
    return verifier_pb2.Chunk(
        token_ids=range(len(sources)), sources=[types_pb2.Source.Name(s) for s in sources], num_drafted=num_drafted
    )


TARGET, DRAFT = types_pb2.SOURCE_TARGET, types_pb2.SOURCE_DRAFT


@pytest.mark.parametrize(
    ("round_", "num_judged"),
    [
        (chunk(0, TARGET), 0),
        (chunk(4, TARGET), 1),
        (chunk(4, DRAFT, DRAFT, TARGET), 3),
        (chunk(4, DRAFT, DRAFT, DRAFT, DRAFT, TARGET), 4),
        # The output ended before the target's own token: nothing was refused.
        (chunk(4, DRAFT, DRAFT), 2),
    ],
)
def test_tokens_behind_a_refused_one_were_never_judged(round_: verifier_pb2.Chunk, num_judged: int) -> None:
    assert num_judged_in(round_) == num_judged


def test_what_auto_chose_and_where_tokens_came_from_is_told() -> None:
    summary = verifier_pb2.SpeculationSummary(
        accepted_by_source=[types_pb2.SourceCount(source="SOURCE_RING", num_tokens=7)],
        decisions=[
            verifier_pb2.Decision(method="METHOD_BEST_FIRST", rows="ROWS_TREE", retrieval=True, num_rounds=3),
            verifier_pb2.Decision(method="METHOD_OFF", rows="ROWS_CHAIN", num_rounds=2),
        ],
    )
    rounds = rounds_from_proto(summary)
    assert rounds.accepted_by_source == {"ring": 7}
    assert rounds.decisions == {"best-first tree + retrieval": 3, "off": 2}


@pytest.mark.timeout(420)
@pytest.mark.suite
def test_the_suite_measures_a_part_in_small_sizes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider_cli", "bench", "methods", "--quick", "--repeats", "1"]
    command += ["--parts", "noise", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["failures"] == {}
    assert not results["interrupted"]
    for experiment in results["experiments"]:
        assert experiment["failures"] == {}
        for row in experiment["rows"]:
            assert row["completed"] == 1
            if row["method"] in ("off", "speculative", "pearl", "card", "saguaro", "best-first"):
                assert not row["degraded"]  # the others ask the datastore, which may answer late on a busy machine
    assert all(claim["value"] is not None for claim in results["claims"])
    names = {"results.json", "results.md", "noise.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
