"""The datastore beside models: loading a prior of real text, and what retrieval costs a generation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2, verifier_pb2
from outrider_bench.datastore_streams import connected, load_prior
from outrider_bench.result import Measurement, Runs, Section, Target, statistic_of
from outrider_bench.suites.datastore.data import library_texts
from outrider_bench.suites.datastore.inprocess import TokenFiles
from outrider_bench.suites.datastore.sizes import DatastoreRun
from outrider_cli.local.redis import LocalRedis, find_program
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.prior import requests as prior_requests
from outrider_cli.prior import split
from outrider_cli.prior_file import PriorHeader, write_prior
from outrider_cli.prompts import choose, default_prompts
from outrider_client.client import Client
from outrider_client.requests import GenerateOptions

DRAFT = "demo/draft"
TEMPERATURES = (0.0, 0.7)
SEED = 7
LOAD_TARGET, SIZE_TARGET = Target("<=", 3), Target("<=", 10)
TARGET_COST, DRAFT_COST = Target("<=", 2), Target("<=", 5)


@dataclass(frozen=True, slots=True)
class RealText:
    """Python's library in tokens of the demo pair."""

    header: PriorHeader
    documents: Sequence[Sequence[int]]
    """Files, for a prior."""
    files: TokenFiles


async def measure_generation(run: DatastoreRun) -> tuple[list[Section], TokenFiles]:
    """Loads a prior into a datastore beside the demo pair, and generates with it. Also returns the text's tokens."""
    folder = run.folder / "generation"
    folder.mkdir()
    redis = LocalRedis(find_program(), folder, run.server_cores)
    # Blocks the event loop on purpose: the processes live as long as the thread that starts them.
    redis.start()
    try:
        stack_config = StackConfig(
            target=run.sizes.target,
            draft=DRAFT,
            redis_url=redis.url,
            cores=run.config.cores,
            log_folder=folder,
        )
        with LocalStack(stack_config, run.log) as stack:
            assert stack.datastore is not None
            async with Client(stack.address) as client, connected(stack.datastore.address) as stub:
                text = await _real_text(run, client)
                loading = await _load(run, stub, text)
                return [loading, *await _generate(run, client)], text.files
    finally:
        redis.kill()


async def _real_text(run: DatastoreRun, client: Client) -> RealText:
    run.log("tokenizing Python's library")
    sizes = run.sizes
    model = (await client.info()).model
    learned, heldout = library_texts()
    documents = await _tokenized(client, learned, sizes.prior_tokens)
    new = await _tokenized(client, heldout, sizes.replay_tokens)
    files = TokenFiles.write(run, "library", [*chain(*documents)], [*chain(*new)], "Tokens of Python's library")
    return RealText(PriorHeader(model.tokenizer_hash, model.vocab_size, model.model_id, 1), documents, files)


async def _tokenized(client: Client, texts: Sequence[str], num_tokens: int) -> list[list[int]]:
    """Tokenize the first texts, until they come to `num_tokens`."""
    documents: list[list[int]] = []
    missing = num_tokens
    for text in texts:
        if missing < 2:  # a document of one token has no n-gram
            break
        documents.append((await client.tokenize(text))[:missing])
        missing -= len(documents[-1])
    return [document for document in documents if len(document) > 1]


async def _load(run: DatastoreRun, stub: pb_grpc.DatastoreServiceAsyncStub, text: RealText) -> Section:
    """Loads the prior under several names, at last under the one that is used."""
    times, num_ngrams = Runs(), 0
    documents = list(split(text.documents))
    # Each time under a name of its own: replacing a prior is other work than loading one. Number 0, the last, has the
    # empty name.
    for repeat in reversed(range(run.config.repeats)):
        run.log(f"loading a prior, {repeat + 1} to go")
        corpus = f"load {repeat}" if repeat else ""
        scope = pb.Scope(tokenizer_hash=text.header.tokenizer_hash, corpus=corpus, vocab_size=text.header.vocab_size)
        began = time.perf_counter()
        num_ngrams = (await load_prior(stub, prior_requests(scope, documents))).num_ngrams
        times.add("load", time.perf_counter() - began)
    num_tokens = sum(map(len, documents))
    size = write_prior(run.folder / "prior", text.header, text.documents)
    section = Section(f"A prior of {num_tokens} tokens of source code")
    section.measurements = times.measurements("s", {"load": LOAD_TARGET})
    section.measurements += [
        Measurement("prior file", "MB", (size / 1e6,), SIZE_TARGET),
        Measurement("n-grams", "n-grams", (num_ngrams,)),
    ]
    section.notes = [
        f"{len(text.documents)} files of Python's library, none of them held out, in tokens of the demo pair."
    ]
    return section


async def _generate(run: DatastoreRun, client: Client) -> list[Section]:
    """Generate with the draft model and retrieval: the time of retrieval is compared with that of the forwards."""
    prompts = [prompt.text for prompt in choose(default_prompts(), ["code"], run.sizes.num_prompts)]
    options = GenerateOptions(
        max_tokens=run.sizes.max_tokens, seed=SEED, ignore_eos=True, method="pearl", retrieval=True
    )
    run.log("generating, to warm up")
    for prompt in prompts:
        await client.complete(prompt, **GenerateOptions(**options, temperature=0.0))
    costs, lengths = _Costs(), Runs()
    for repeat in range(run.config.repeats):
        for temperature in TEMPERATURES:
            run.log(f"generating at temperature {temperature:g}, repeat {repeat + 1}")
            sampling = GenerateOptions(**options, temperature=temperature)
            results = [await client.complete(prompt, **sampling) for prompt in prompts]
            summaries = [result.summary for result in results]
            costs.add(temperature, summaries)
            num_rounds = sum(summary.num_rounds for summary in summaries)
            num_accepted = sum(summary.num_accepted_tokens for summary in summaries)
            lengths.add(f"T = {temperature:g}: acceptance length", 1 + num_accepted / max(1, num_rounds))
    section = costs.section()
    section.measurements += lengths.measurements("tokens")
    section.notes.insert(
        0,
        f"{run.sizes.target} and {DRAFT}, pearl with retrieval, the prior above; {len(prompts)} code prompts that are "
        f"not in it, {run.sizes.max_tokens} tokens each. Medians over the rounds, then over the prompts.",
    )
    return [section]


class _Costs:
    """Times of retrieval by times of forwards, and where accepted tokens came from."""

    def __init__(self) -> None:
        self._target, self._draft, self._accepted = Runs(), Runs(), Runs()
        self._num_silent: Counter[str] = Counter()
        self._num_generations = self._num_degraded = 0

    def add(self, temperature: float, summaries: Sequence[verifier_pb2.SpeculationSummary]) -> None:
        """Add the generations of one repeat at one temperature."""
        self._num_generations += len(summaries)
        times = [summary.times_p50 for summary in summaries]
        for runs, side, pairs in (
            (self._target, "target", [(each.retrieval_ms, each.forward_ms) for each in times]),
            (self._draft, "draft", [(each.draft_retrieval_ms, each.draft_forward_ms) for each in times]),
        ):
            # Nothing is measured as nothing at all: a time that is not reported would pass for a perfect one.
            shares = [100 * retrieval / forward for retrieval, forward in pairs if retrieval and forward]
            if shares:
                runs.add(_cost_name(temperature, side), statistic_of(shares, "p50"))
            self._num_silent[side] += len(pairs) - len(shares)
        accepted: Counter[str] = Counter()
        for summary in summaries:
            self._num_degraded += summary.degraded
            for count in summary.accepted_by_source:
                accepted[types_pb2.Source.Name(count.source).removeprefix("SOURCE_").lower()] += count.num_tokens
        for name, num_tokens in sorted(accepted.items()):
            self._accepted.add(f"T = {temperature:g}: accepted tokens, {name}", num_tokens)

    def section(self) -> Section:
        """Return a section with everything added."""
        section = Section("Retrieval inside a generation")
        for runs, side, target in ((self._target, "target", TARGET_COST), (self._draft, "draft", DRAFT_COST)):
            section.measurements += [replace(number, target=target) for number in runs.measurements("%")]
            if self._num_silent[side]:
                section.notes.append(
                    f"{self._num_silent[side]} of {self._num_generations} generations did not report the times of the "
                    f"{side}'s side, and are left out there."
                )
        section.measurements += self._accepted.measurements("tokens")
        section.notes.append("Accepted tokens: of all prompts together, in one repeat.")
        if self._num_degraded:
            section.notes.append(f"In {self._num_degraded} generations a peer was missing for a time.")
        return section


def _cost_name(temperature: float, side: str) -> str:
    return f"T = {temperature:g}: retrieval by {side} forward"
