"""llama.cpp as a peer: its servers' flags and requests, their failures; and a real one, if there is one.

The programs here are fakes, except the one that OUTRIDER_LLAMA_SERVER names.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from outrider.models.backend import CPU
from outrider.models.loading import build_hf_model
from outrider.models.text import TextCodec
from outrider_bench.config import BenchConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.experiment import LLAMA_CPP_CONTENDERS
from outrider_bench.llama_cpp import running_llama_cpp
from outrider_bench.samples import Request
from outrider_bench.workers.bare import BareBaseline
from outrider_bench.workers.llama_cpp import LlamaCppPeer, LlamaServer, NotALlamaServer, ServerFailed
from outrider_cli.prompts import choose, load_prompts
from tests.bench.fake_llama_server import NEW_FLAGS, OLD_FLAGS, program

pytestmark = pytest.mark.slow  # its servers are processes
REAL = os.environ.get("OUTRIDER_LLAMA_SERVER", "")
PLAIN: dict[str, Any] = {}
DRAFTING = {"max_drafted": 10, "min_probability": 0.4}
REQUEST = {"prompt": "def f(x):\n", "temperature": 0.7, "seed": 5, "max_tokens": 12}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    """The smallest models there are, and their tokenizer."""
    draft, tokenizer = build_hf_model("demo/draft")
    return draft, draft, tokenizer


@pytest.fixture
def peer(pair: tuple[Any, Any, Any]) -> Iterator[LlamaCppPeer]:
    with ExitStack() as stack:
        yield LlamaCppPeer(*pair, stack)


def heard(peer: LlamaCppPeer, setting: dict[str, Any]) -> dict[str, Any]:
    """The flags and the request, as the server of a setting reports them."""
    [server] = [each for key, each in peer._servers.items() if ("max_drafted" in key) == bool(setting)]
    return server.complete({"n_predict": 1})


def test_a_generation_is_what_the_server_of_its_setting_answers(peer: LlamaCppPeer, tmp_path: Path) -> None:
    assert peer.start(program(tmp_path), [], [PLAIN, DRAFTING]) == {}
    plain, drafted = (peer.generate(REQUEST, setting) for setting in (PLAIN, DRAFTING))
    assert plain["token_ids"] == drafted["token_ids"] == list(range(12))
    assert plain["num_prompt_tokens"] == len(peer._codec.encode(REQUEST["prompt"]))
    assert plain["rounds"] == {"num_rounds": 12, "num_drafted": 0, "num_accepted": 0}
    assert drafted["rounds"] == {"num_rounds": 8, "num_drafted": 9, "num_accepted": 4}
    assert plain["chunks"] == []
    assert plain["duration_s"] > 0


@pytest.mark.parametrize(
    ("known", "most", "more"),
    [
        (NEW_FLAGS, "--spec-draft-n-max", ["--spec-type", "draft-simple"]),
        (OLD_FLAGS, "--draft-max", []),
    ],
)
def test_flags_of_a_setting_are_those_that_the_release_knows(
    known: tuple[str, ...], most: str, more: list[str], peer: LlamaCppPeer, tmp_path: Path
) -> None:
    core = min(os.sched_getaffinity(0))
    peer.start(program(tmp_path, known), [core], [PLAIN, DRAFTING])
    plain, drafting = (heard(peer, setting)["flags"] for setting in (PLAIN, DRAFTING))
    address = ["--host", "127.0.0.1", "--port"]
    for flags in (plain, drafting):
        assert flags[-4:-1] == address
        assert flags[flags.index("--threads") + 1] == "1"
        assert flags[flags.index("--ctx-size") + 1] == "2048"
        assert ("--cache-ram" in flags) == (known == NEW_FLAGS)
    assert plain[: plain.index("--host")] == drafting[: drafting.index("--model-draft")]
    drafts = drafting[drafting.index("--model-draft") : -4]
    assert drafts[0] == "--model-draft"
    assert Path(drafts[1]).name == "draft.gguf"
    assert drafts[2:] == [most, "10", "--draft-p-min", "0.4", *more]


def test_a_request_asks_for_plain_sampling_of_every_token_and_keeps_no_prompt(
    peer: LlamaCppPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.start(program(tmp_path), [], [PLAIN])
    answers: list[dict[str, Any]] = []
    complete = LlamaServer.complete
    monkeypatch.setattr(LlamaServer, "complete", lambda *asked: answers.append(complete(*asked)) or answers[-1])
    peer.generate(REQUEST, PLAIN)
    assert answers[0]["heard"] == {
        "prompt": peer._codec.encode(REQUEST["prompt"]),
        "n_predict": 12,
        "temperature": 0.7,
        "seed": 5,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": False,
    }


def test_what_a_server_refuses_is_a_failure_with_its_reason(peer: LlamaCppPeer, tmp_path: Path) -> None:
    peer.start(program(tmp_path), [], [PLAIN])
    with pytest.raises(ServerFailed, match=r"llama-server refused: .*too many tokens"):
        peer.generate({**REQUEST, "max_tokens": 2000}, PLAIN)


def test_servers_end_and_files_go_with_their_peer(pair: tuple[Any, Any, Any], tmp_path: Path) -> None:
    with ExitStack() as stack:
        peer = LlamaCppPeer(*pair, stack)
        peer.start(program(tmp_path), [], [PLAIN])
        assert {path.name for path in peer._folder.iterdir()} == {"target.gguf", "draft.gguf", "server-0.log"}
    assert not peer._folder.exists()
    with pytest.raises(ServerFailed, match=r"llama-server did not answer: .*refused"):
        peer.generate(REQUEST, PLAIN)


def test_a_server_that_ends_at_its_start_leaves_its_last_line(peer: LlamaCppPeer, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="llama-server did not start: unknown model architecture"):
        peer.start(program(tmp_path, last_words="unknown model architecture"), [], [PLAIN])


@pytest.mark.parametrize("path", ["true", "/nowhere/llama-server"])
def test_a_program_that_is_no_llama_server_is_refused_by_the_name_of_the_flag(path: str, peer: LlamaCppPeer) -> None:
    with pytest.raises(NotALlamaServer) as caught:
        peer.start(path, [], [PLAIN])
    assert str(caught.value) == f"--llama-server must be a llama-server that takes --model-draft, got {path!r}"


def config_of(llama_server: str, **settings: Any) -> BenchConfig:
    prompts = tuple(choose(load_prompts("demo"), ["code"], 2))
    return BenchConfig(target="demo/target", prompts=prompts, llama_server=llama_server, **settings)


@pytest.mark.suite
async def test_the_benchmark_asks_each_setting_through_one_driver(tmp_path: Path) -> None:
    async with running_llama_cpp(config_of(program(tmp_path))) as driver:
        for contender in LLAMA_CPP_CONTENDERS:
            made = await driver.generate(Request("a", 0.0, 0, 8), contender.options)
            assert made.token_ids == tuple(range(8))
            assert bool(made.rounds.num_drafted) == bool(contender.options)
        with pytest.raises(GenerationFailed, match="ServerFailed: llama-server refused"):
            await driver.generate(Request("a", 0.0, 0, 2000), {})


async def test_a_program_that_is_no_llama_server_ends_the_benchmark_with_one_line() -> None:
    with pytest.raises(GenerationFailed, match=r"--llama-server must be a llama-server that takes --model-draft, got"):
        async with running_llama_cpp(config_of("true")):
            pass


@pytest.mark.skipif(not REAL, reason="OUTRIDER_LLAMA_SERVER names no llama-server")
async def test_a_real_llama_server_says_what_the_bare_loop_says_where_nothing_is_drawn() -> None:
    (target, tokenizer), (draft, _) = build_hf_model("demo/target"), build_hf_model("demo/draft")
    bare = BareBaseline(CPU.make_runner(target), CPU.make_runner(draft), TextCodec(tokenizer))
    # On one core: two threads that spin for each other take minutes if something else runs too.
    core = min(os.sched_getaffinity(0))
    config = config_of(REAL, dtype="float32", cores=(core, core))
    asked = [Request(prompt.text, 0.0, 0, 64) for prompt in config.prompts]
    expected = [
        tuple(bare.generate({"prompt": one.prompt, "temperature": 0.0, "seed": 0, "max_tokens": 64}, {})["token_ids"])
        for one in asked
    ]
    async with running_llama_cpp(config) as driver:
        for contender in LLAMA_CPP_CONTENDERS:
            made = [await driver.generate(one, contender.options) for one in asked]
            # In float32 another order of sums differs too little to change a greedy text of this length.
            assert [each.token_ids for each in made] == expected, contender.setting
            assert any(each.rounds.num_accepted for each in made) == bool(contender.options)
        drawn = await driver.generate(Request(asked[0].prompt, 1.0, 7, 64), {})
        assert len(drawn.token_ids) == 64
        assert drawn.token_ids != expected[0]
