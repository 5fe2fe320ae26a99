"""Replicas take turns, and one that has just failed is left alone for a while."""

from __future__ import annotations

import pytest

from outrider.security.addresses import addresses_of
from outrider_client.retries import MAX_AVOID_S, Replicas


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:1", ("a:1",)),
        (" a:1, b:2,,a:1 ", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("ipv4:1.2.3.4:1,5.6.7.8:2", ("ipv4:1.2.3.4:1", "5.6.7.8:2")),
        ("dns:///verifier:1", ("dns:///verifier:1",)),
    ],
)
def test_addresses_are_told_apart_by_commas_and_each_counts_once(given: str | list[str], found: tuple[str]) -> None:
    assert addresses_of(given) == found


@pytest.mark.parametrize("nothing", ["", " , ", []])
def test_an_address_of_nobody_is_refused(nothing: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address must name at least one server"):
        Replicas(nothing)


def test_replicas_take_turns() -> None:
    replicas = Replicas("a:1,b:2,c:3", Clock())
    assert [replicas.next() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_one_that_has_failed_is_left_alone_as_long_as_it_kept_its_caller_waiting() -> None:
    clock = Clock()
    replicas = Replicas("a:1,b:2,c:3", clock)
    replicas.failed(1, 0.0)
    assert [replicas.next() for _ in range(4)] == [0, 2, 0, 2]
    clock.now += 1.1
    assert {replicas.next() for _ in range(3)} == {0, 1, 2}
    replicas.failed(1, 15.0)
    clock.now += 14.0
    assert {replicas.next() for _ in range(4)} == {0, 2}
    clock.now += 1.1
    assert 1 in {replicas.next() for _ in range(3)}
    replicas.failed(1, 1e6)
    clock.now += MAX_AVOID_S
    assert 1 in {replicas.next() for _ in range(3)}


def test_if_all_have_failed_the_first_to_come_back_is_asked() -> None:
    clock = Clock()
    replicas = Replicas("a:1,b:2", clock)
    replicas.failed(0, 5.0)
    assert replicas.has_fresh
    replicas.failed(1, 2.0)
    assert not replicas.has_fresh
    assert [replicas.next() for _ in range(3)] == [1, 1, 1]
    replicas.answered(0)
    assert replicas.has_fresh
    assert replicas.next() == 0


def test_a_lone_one_is_asked_whatever_happened() -> None:
    replicas = Replicas("a:1", Clock())
    replicas.failed(0, 10.0)
    assert replicas.next() == 0
