"""`outrider prior load`, `list` and `delete`: messages to the datastore, output, and exit status."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, verifier_pb2_grpc
from outrider_cli import prior
from outrider_cli.app import app
from outrider_cli.prior_file import PriorHeader, write_prior
from tests.cli.prior_fakes import TOKENIZER_HASH as OURS
from tests.cli.prior_fakes import VOCAB_SIZE, FakeDatastore, KnowingVerifier, serving

NO_SERVER = "127.0.0.1:1"
OTHER = "cd" * 32
DOCUMENTS = [[1, 2, 3], [4, 5, 6, 7]]

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


@pytest.fixture
def datastore() -> Iterator[FakeDatastore]:
    fake = FakeDatastore()
    with serving(lambda server: datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(fake, server)) as address:
        fake.address = address
        yield fake


@pytest.fixture
def verifier(datastore: FakeDatastore) -> Iterator[KnowingVerifier]:
    fake = KnowingVerifier()
    fake.datastore = datastore.address
    with serving(lambda server: verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)) as address:
        fake.address = address
        yield fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "prior.bin"
    write_prior(path, PriorHeader(OURS, VOCAB_SIZE, "a model", rounds=2), DOCUMENTS)
    return path


@pytest.mark.parametrize("command", ["build", "load", "list", "delete"])
def test_every_flag_has_a_line_of_help(command: str) -> None:
    result = runner.invoke(app, ["prior", command, "--help-all"])
    assert result.exit_code == 0
    flags = [line for line in result.stdout.splitlines() if line.startswith("  --")]
    assert len(flags) > 2
    for line in flags:
        assert len(line.strip().split("  ", 1)[-1].strip()) > 10, line


def test_the_verifier_says_where_the_datastore_is(
    verifier: KnowingVerifier, datastore: FakeDatastore, file: Path
) -> None:
    command = ["prior", "load", str(file), "--corpus", "code", "--tenant", "acme", "--address", verifier.address]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("prior 'code' of the tenant 'acme' is in use: 7 tokens, 9 n-grams, loaded in ")
    assert result.stderr == ""
    ((message,),) = datastore.loads
    assert message.scope == pb.Scope(tokenizer_hash=OURS, corpus="code", tenant="acme", vocab_size=VOCAB_SIZE)
    assert [list(document.token_ids) for document in message.documents] == DOCUMENTS


def test_json_has_what_was_loaded(datastore: FakeDatastore, file: Path) -> None:
    result = runner.invoke(app, ["prior", "load", str(file), "--datastore", datastore.address, "--json"])
    found = json.loads(result.stdout)
    assert found.pop("seconds") >= 0
    assert found == {"corpus": "default", "tenant": "", "num_tokens": 7, "num_ngrams": 9}


def test_a_named_datastore_is_used_without_a_verifier(datastore: FakeDatastore, file: Path) -> None:
    result = runner.invoke(app, ["prior", "load", str(file), "--datastore", datastore.address])
    assert result.exit_code == 0, result.stderr
    assert "prior 'default' of all tenants is in use" in result.stdout
    assert datastore.loads[0][0].scope.tenant == ""


@pytest.mark.parametrize("with_datastore", [False, True])
def test_a_file_of_another_tokenizer_is_refused(
    verifier: KnowingVerifier, datastore: FakeDatastore, tmp_path: Path, with_datastore: bool
) -> None:
    write_prior(path := tmp_path / "prior.bin", PriorHeader(OTHER, VOCAB_SIZE, "other", rounds=2), DOCUMENTS)
    flags = ["--datastore", datastore.address] if with_datastore else []
    result = runner.invoke(app, ["prior", "load", str(path), "--address", verifier.address, *flags])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert OURS in result.stderr
    assert OTHER in result.stderr
    assert datastore.loads == []


@pytest.mark.parametrize("contents", [None, b"text", b"OUTPRIOR"])
def test_a_file_that_is_no_prior_is_an_error_before_anybody_is_asked(contents: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "prior.bin"
    if contents is not None:
        path.write_bytes(contents)
    result = runner.invoke(app, ["prior", "load", str(path), "--address", NO_SERVER])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["load FILE", "list", "delete code"])
def test_who_does_not_answer_is_named(command: str, file: Path) -> None:
    words = ["prior", *command.replace("FILE", str(file)).split()]
    result = runner.invoke(app, [*words, "--address", NO_SERVER])
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert f"cannot reach a verifier at {NO_SERVER}" in result.stderr
    words += ["--tokenizer", OURS] if "delete" in words else []
    result = runner.invoke(app, [*words, "--datastore", NO_SERVER])
    assert (result.exit_code, result.stderr.count("\n")) == (3, 1)
    assert f"the datastore at {NO_SERVER} is not available" in result.stderr


def test_a_verifier_without_a_datastore_is_an_error(verifier: KnowingVerifier) -> None:
    verifier.datastore = ""
    result = runner.invoke(app, ["prior", "list", "--address", verifier.address])
    assert result.exit_code == 1
    assert f"the verifier at {verifier.address} has no datastore; name one with --datastore" in result.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, 2),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, 1),
        (grpc.StatusCode.UNAVAILABLE, 3),
    ],
)
def test_what_the_datastore_says_is_one_line(
    datastore: FakeDatastore, file: Path, code: grpc.StatusCode, status: int
) -> None:
    datastore.failure = (code, "Redis cannot be reached: connection refused")
    result = runner.invoke(app, ["prior", "load", str(file), "--datastore", datastore.address])
    assert result.exit_code == status
    assert "Redis cannot be reached" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_an_answer_that_never_says_done_is_a_failure(datastore: FakeDatastore, file: Path) -> None:
    datastore.is_done = False
    result = runner.invoke(app, ["prior", "load", str(file), "--datastore", datastore.address])
    assert result.exit_code == 1
    assert "without saying that the prior is in use" in result.stderr
    assert result.stdout == ""


def corpus(name: str, tenant: str = "", tokenizer_hash: str = OURS) -> pb.CorpusInfo:
    return pb.CorpusInfo(
        corpus=name, tenant=tenant, tokenizer_hash=tokenizer_hash, num_tokens=1234567, num_ngrams=3_000_000_000
    )


def test_the_list_shows_every_corpus_by_name(verifier: KnowingVerifier, datastore: FakeDatastore) -> None:
    datastore.corpora = [corpus("code", "acme"), corpus("[red]b[/]"), corpus("code")]
    result = runner.invoke(app, ["prior", "list", "--address", verifier.address])
    assert result.exit_code == 0
    head, *rows = (line.split() for line in result.stdout.splitlines())
    assert head == ["corpus", "tenant", "tokenizer", "tokens", "n-grams"]
    numbers = [OURS[:12], "1234567", "3000000000"]
    assert rows == [["[red]b[/]", "all", *numbers], ["code", "all", *numbers], ["code", "acme", *numbers]]


def test_the_list_is_json_where_that_is_wanted(datastore: FakeDatastore) -> None:
    for corpora in ([], [corpus("code", "acme")]):
        datastore.corpora = corpora
        result = runner.invoke(app, ["prior", "list", "--json", "--datastore", datastore.address])
        assert result.exit_code == 0
        found = [pb.CorpusInfo(**fields) for fields in json.loads(result.stdout)]
        assert found == corpora


def test_a_prior_of_the_verifiers_tokenizer_is_deleted(verifier: KnowingVerifier, datastore: FakeDatastore) -> None:
    result = runner.invoke(app, ["prior", "delete", "code", "--tenant", "acme", "--address", verifier.address])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "prior 'code' of the tenant 'acme' is deleted\n"
    assert datastore.deleted == [pb.Scope(tokenizer_hash=OURS, corpus="code", tenant="acme")]


def test_json_has_what_was_deleted(verifier: KnowingVerifier, datastore: FakeDatastore) -> None:
    result = runner.invoke(app, ["prior", "delete", "code", "--address", verifier.address, "--json"])
    assert json.loads(result.stdout) == {"corpus": "code", "tenant": "", "tokenizer_hash": OURS}


@pytest.mark.parametrize(("given_hash", "sent"), [(OTHER, OTHER), (OTHER[:12], OTHER), ("unknown", "unknown")])
def test_a_tokenizer_may_be_named_by_its_beginning(datastore: FakeDatastore, given_hash: str, sent: str) -> None:
    datastore.corpora = [corpus("code"), corpus("code", tokenizer_hash=OTHER), corpus("prose", tokenizer_hash=OTHER)]
    command = ["prior", "delete", "code", "--tokenizer", given_hash, "--datastore", datastore.address]
    assert runner.invoke(app, command).exit_code == 0
    assert datastore.deleted == [pb.Scope(tokenizer_hash=sent, corpus="code")]


def test_a_beginning_that_two_tokenizers_have_deletes_nothing(datastore: FakeDatastore) -> None:
    datastore.corpora = [corpus("code"), corpus("code", tokenizer_hash=OURS[:12] + "f" * 52)]
    command = ["prior", "delete", "code", "--tokenizer", OURS[:12], "--datastore", datastore.address]
    result = runner.invoke(app, command)
    assert result.exit_code == 2
    assert f"--tokenizer '{OURS[:12]}' may be any of {OURS}, " in result.stderr
    assert datastore.deleted == []


def test_a_datastore_alone_does_not_know_the_tokenizer() -> None:
    result = runner.invoke(app, ["prior", "delete", "code", "--datastore", NO_SERVER])
    assert result.exit_code == 2
    assert "--tokenizer must be given with --datastore" in result.stderr


def test_deleting_what_is_not_there_says_so(verifier: KnowingVerifier, datastore: FakeDatastore) -> None:
    datastore.failure = (grpc.StatusCode.NOT_FOUND, "no such corpus")
    result = runner.invoke(app, ["prior", "delete", "code", "--address", verifier.address])
    assert result.exit_code == 1
    assert f"there is no prior 'code' of all tenants with the tokenizer {OURS[:12]}" in result.stderr
    assert "(NOT_FOUND)\n" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("extra", [-1, 0, 1, prior.OVERLAP_LEN, prior.OVERLAP_LEN + 1, 200_000])
def test_long_documents_are_sent_in_parts_that_lose_no_ngram(extra: int) -> None:
    document = list(range(prior.MAX_DOCUMENT_LEN + extra))
    parts = list(prior.split([document]))
    assert len(parts) == {-1: 1, 0: 1, 200_000: 3}.get(extra, 2)
    assert all(prior.OVERLAP_LEN < len(part) <= prior.MAX_DOCUMENT_LEN for part in parts)
    assert [*parts[0], *(token for part in parts[1:] for token in part[prior.OVERLAP_LEN :])] == document
    for before, after in pairwise(parts):
        assert before[-prior.OVERLAP_LEN :] == after[: prior.OVERLAP_LEN]


@given(st.lists(st.integers(2, 40_000), min_size=1, max_size=12))
def test_documents_are_sent_in_order_in_pieces_of_a_limited_size(lengths: list[int]) -> None:
    documents = [range(length) for length in lengths]
    messages = list(prior.requests(pb.Scope(corpus="code"), documents))
    assert [len(document.token_ids) for message in messages for document in message.documents] == lengths
    assert [message.num_tokens for message in messages] == [sum(lengths)] + [0] * (len(messages) - 1)
    assert [message.HasField("scope") for message in messages] == [True] + [False] * (len(messages) - 1)
    for message in messages:
        sizes = [len(document.token_ids) for document in message.documents]
        assert sum(sizes) <= prior.PIECE_LEN or len(sizes) == 1


def test_ctrl_c_ends_the_load_on_the_server_too(datastore: FakeDatastore, file: Path) -> None:
    datastore.is_stuck = True
    command = [sys.executable, "-m", "outrider_cli", "prior", "load", str(file), "--datastore", datastore.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert datastore.started.wait(30)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output == (b"", b"interrupted\n")
    assert datastore.ended.wait(10)
