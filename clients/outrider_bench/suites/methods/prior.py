"""The prior of double: what the target says to other prompts than those that are measured (DOUBLE, section 4.3).

The prompts are places of files that the models were trained on; the benchmark's come from others. The target continues
them as it always does, in the size in which it was trained: the inflated one says the same, twenty times as slowly.
Documents that have a run of tokens in common with a prompt that is measured, or with what the target says to it, are
left out: the prior must not know the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from outrider.models.demo.training.corpus import Corpus, code_prompts, is_heldout, load_corpus
from outrider.v1 import datastore_pb2 as pb
from outrider_bench.datastore_streams import connected, load_prior
from outrider_bench.suites.methods.estimate import BUILD_ROUNDS
from outrider_bench.suites.methods.experiments import MethodsSizes
from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_cli.prior import requests as prior_requests
from outrider_cli.prior import split
from outrider_cli.prior_build import BuildPlan, continue_prompts
from outrider_cli.prior_file import PriorHeader

SMALL_TARGET = "demo/target"
RUN_LEN = 24
"""Tokens in a row that a document must not share with what is measured: two lines of code."""
_SHORTEST, _LONGEST = 150, 300
"""Characters of a prompt."""

Tokens = Sequence[int]


@dataclass(frozen=True, slots=True)
class BuiltPrior:
    """A prior, and what was done to keep the answers out of it."""

    header: PriorHeader
    documents: tuple[Tokens, ...]
    num_dropped: int
    """Documents that had too long a run in common with what is measured."""
    longest_shared: int
    """The longest run that one of the others has in common with it, in tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(map(len, self.documents))

    def part(self, share: float) -> tuple[Tokens, ...]:
        """The first documents, such a share of them; at least one."""
        return self.documents[: max(1, round(share * len(self.documents)))]

    @property
    def sentence(self) -> str:
        """For the report."""
        return (
            f"The prior of double: {self.num_tokens} tokens in {len(self.documents)} documents, what the target said "
            f"to other code, of files that it was trained on. {self.num_dropped} more were dropped because they had "
            f"{RUN_LEN} tokens in a row in common with a prompt that is measured or with the target's greedy answer to "
            f"it; the longest run that one of the others has in common with these is {self.longest_shared} tokens."
        )


async def build_prior(
    sizes: MethodsSizes, measured: Sequence[str], num_tokens: int, cores: tuple[int, ...]
) -> BuiltPrior:
    """Has the small target continue other prompts, and those that are measured to know what must not be in it.

    Args:
        measured: The prompts that are measured.
        num_tokens: As far as they are continued.

    Raises:
        ProcessFailed: The services could not be started.
        OutriderError: A generation failed.
    """
    plan = BuildPlan(other_prompts(sizes.prior_prompts), BUILD_ROUNDS, sizes.prior_tokens)
    answers = BuildPlan(tuple(measured), 1, num_tokens)  # one round, which is the greedy one
    config = StackConfig(target=SMALL_TARGET, target_dtype="float32", draft=None, datastore=False, cores=cores)
    # Blocks the event loop on purpose: the processes live as long as the thread that starts them.
    with LocalStack(config) as stack:
        header, documents = await continue_prompts(stack.address, plan)
        _, forbidden = await continue_prompts(stack.address, answers)
    known = runs_of(forbidden, RUN_LEN)
    kept = tuple(document for document in documents if known.isdisjoint(runs_of([document], RUN_LEN)))
    return BuiltPrior(header, kept, len(documents) - len(kept), longest_shared_run(kept, forbidden, RUN_LEN))


def other_prompts(count: int) -> tuple[str, ...]:
    """Choose `count` places of files that the models were trained on, from all of the library."""
    learned = load_corpus().train
    # As if these files were held out: that is what prompts are cut from.
    files = Corpus((), learned[:: max(1, len(learned) // count)])
    return tuple(code_prompts(files, count, shortest=_SHORTEST, longest=_LONGEST))


async def load(address: str, built: BuiltPrior, share: float) -> None:
    """Loads a share of the prior into the datastore at an address, in place of what was loaded before."""
    header = built.header
    scope = pb.Scope(tokenizer_hash=header.tokenizer_hash, vocab_size=header.vocab_size)
    async with connected(address) as stub:
        await load_prior(stub, prior_requests(scope, list(split(built.part(share)))))


def runs_of(documents: Iterable[Tokens], length: int) -> set[tuple[int, ...]]:
    """Return all runs of `length` tokens."""
    return {
        tuple(document[start : start + length]) for document in documents for start in range(len(document) - length + 1)
    }


def longest_shared_run(ours: Sequence[Tokens], theirs: Sequence[Tokens], limit: int) -> int:
    """Return the length of the longest run that both have, if it is below the limit; else the limit."""
    low, high = 0, limit
    # By bisection: who shares a run of some length shares one of every smaller length.
    while low < high:
        middle = (low + high + 1) // 2
        if runs_of(ours, middle) & runs_of(theirs, middle):
            low = middle
        else:
            high = middle - 1
    return low


TAIL_LEN = 200
"""Characters at the end of a prompt that must not occur: what comes next is what is measured."""
_SOURCE = re.compile(r"CPython [\d.]+, Lib/(?P<name>\S+\.py)\b")
_DIGEST = re.compile(r"`([0-9a-f]{64})`")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Holds what was found out about the prompts."""

    is_same_library: bool
    """True if the held-out files here are those of the training."""
    num_prompts: int
    num_in_training_text: int
    """Prompts whose end occurs in the training text."""
    num_from_learned_files: int
    """Prompts whose source is a file that was not held out. A single one would be a mistake in the benchmark."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return asdict(self)

    @property
    def sentences(self) -> list[str]:
        """For the report."""
        said = [
            f"Prompts: {self.num_in_training_text} of {self.num_prompts} end in text that the models were trained on; "
            f"{self.num_from_learned_files} come from files of Python's library that were not held out."
        ]
        if not self.is_same_library:
            said.append(
                "The library of this Python is not that of the training (its held-out files have another hash), so the "
                "search says less than it should."
            )
        return said


def check_prompts(prompts: Sequence[str]) -> Provenance:
    """Searches the training text, 28 MB of it, for the ends of these prompts: about 20 ms each."""
    corpus = load_corpus()
    learned = "\n".join(source.text for source in corpus.train)
    return Provenance(
        is_same_library=corpus.heldout_digest == digest_of_training(),
        num_prompts=len(prompts),
        num_in_training_text=sum(prompt[-TAIL_LEN:] in learned for prompt in prompts),
        num_from_learned_files=sum(
            not is_heldout(match["name"]) for match in map(_SOURCE.match, sources_of(prompts)) if match
        ),
    )


def sources_of(prompts: Sequence[str]) -> list[str]:
    """Return what the file of prompts names as the sources of these; of others nothing is known."""
    text = resources.files("outrider_cli").joinpath("prompts.jsonl").read_text(encoding="utf-8")
    entries = (json.loads(line) for line in text.split("\n") if line.strip())
    sources = {entry["prompt"]: entry.get("source", "") for entry in entries}
    return [sources[prompt] for prompt in prompts if prompt in sources]


def digest_of_training() -> str | None:
    """Return the hash of the held-out files' names from the models' card; None if there is no card."""
    card = resources.files("outrider.models.demo").joinpath("README.md")
    match = _DIGEST.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    return match[1] if match else None
