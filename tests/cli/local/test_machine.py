"""The cores that this process may use are counted and shared out. Addresses are checked before use."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from outrider_cli.local.machine import shared_out, usable_cores, why_taken, why_unreachable
from tests.support.fake_verifier import FakeVerifier


@pytest.mark.parametrize("num_cores", [1, 2, 3, 4, 7, 16, 96])
@pytest.mark.parametrize("num_targets", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_no_thread_waits_for_a_core_while_there_are_as_many_as_models(
    num_cores: int, num_targets: int, num_drafts: int
) -> None:
    threads = shared_out(num_cores, num_targets, num_drafts)
    assert min(threads) >= 1
    num_threads = num_targets * threads.target + num_drafts * threads.draft
    assert num_threads <= max(num_cores, num_targets + num_drafts)
    assert num_threads > num_cores - max(1, num_targets) - num_drafts, "no core is left out that could be shared"


def test_a_target_has_most_of_the_cores() -> None:
    assert shared_out(16) == (12, 4)


@pytest.mark.parametrize(
    ("own", "around", "expected"), [("100000 100000", "max 100000", 1), ("max", "150000 100000", 1), ("max", "max", 0)]
)
def test_a_control_group_with_less_time_counts_for_less(tmp_path: Path, own: str, around: str, expected: int) -> None:
    group = tmp_path / "slice" / "service"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(own + "\n")
    (group.parent / "cpu.max").write_text(around + "\n")
    (tmp_path / "own").write_text("0::/slice/service\n")
    assert usable_cores(tmp_path, tmp_path / "own") == (expected or len(os.sched_getaffinity(0)))


def test_without_control_groups_the_cores_that_it_is_bound_to_count(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == len(os.sched_getaffinity(0))


def test_a_verifier_is_recognized(verifier: FakeVerifier) -> None:
    port = int(verifier.address.rpartition(":")[2])
    what = f"an outrider verifier serves fake there: outrider chat --address {verifier.address}"
    assert why_taken("127.0.0.1", port) == f"port {port} is in use ({what})"


def test_a_server_that_is_not_there_is_missed(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://user:secret@127.0.0.1:{listener.getsockname()[1]}/0"
        assert why_unreachable(url) == ""
        port = listener.getsockname()[1]
        assert why_unreachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/first/0") == ""
    assert why_unreachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/first/0") == "connection refused"
    assert why_unreachable(url) == "connection refused"
    assert why_unreachable(f"unix://{tmp_path}/none.sock") == "no such file or directory"
