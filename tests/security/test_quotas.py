"""Quotas of sessions, requests, tokens and draft nodes: what is allowed, what is refused, and when to come back. Only
the test advances the time."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

from outrider.peers.speculator import DraftLimit
from outrider.security import quotas as quotas_module
from outrider.security.callers import Caller, Role, TenantLimits
from outrider.security.quotas import Quotas, TokenBucket
from outrider.v1 import types_pb2
from outrider.wire.errors import ResourceExhausted


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def caller(tenant: str, **limits: float) -> Caller:
    return Caller("name", tenant, frozenset({Role.GENERATE}), TenantLimits(**limits))  # type: ignore[arg-type]


def refusal(quotas: Quotas, who: Caller | None, name: str = "x") -> tuple[str, float]:
    """The refusal of a request, and after how many seconds it may come back."""
    with pytest.raises(ResourceExhausted) as error, quotas.session(name, who):
        pass
    [detail] = error.value.details
    assert isinstance(detail, error_details_pb2.RetryInfo)
    delay: duration_pb2.Duration = detail.retry_delay
    return str(error.value), delay.seconds + delay.nanos / 1e9


def test_a_bucket_gives_its_burst_and_then_its_rate(clock: Clock) -> None:
    bucket = TokenBucket(10.0, 2.0, clock)
    bucket.take(20)
    assert bucket.wait_s(1) == pytest.approx(0.1)
    clock.now += 0.1
    assert bucket.wait_s(1) == pytest.approx(0)
    clock.now += 1000
    assert bucket.level == 20


def test_a_bucket_whose_rate_changes_forgets_nothing_that_was_taken(clock: Clock) -> None:
    bucket = TokenBucket(10.0, 1.0, clock)
    bucket.take(10)
    bucket.set_rate(20.0)
    assert bucket.level == 10


def test_a_tenant_has_so_many_sessions_at_a_time_whoever_asks(clock: Clock) -> None:
    quotas, acme = Quotas(clock=clock), caller("acme", num_sessions=2)
    with quotas.session("one", acme):
        with quotas.session("two", acme):
            text, after_s = refusal(quotas, acme, "three")
            assert "num_sessions of tenant 'acme'" in text
            assert ": 2" in text
            assert after_s == 1.0
            with quotas.session("one", caller("other", num_sessions=1)):
                pass
        with quotas.session("three", acme):
            pass


def test_requests_beyond_the_limit_of_a_minute_are_told_when_to_come_back(clock: Clock) -> None:
    quotas, acme = Quotas(clock=clock), caller("acme", requests_per_minute=6)
    for _ in range(6):
        with quotas.session("x", acme):
            pass
    text, after_s = refusal(quotas, acme)
    assert "requests_per_minute of tenant 'acme' is reached: 6" in text
    assert after_s == pytest.approx(10.0)
    clock.now += after_s
    with quotas.session("x", acme):
        pass
    refusal(quotas, acme)


def test_tokens_beyond_the_limit_are_the_next_requests_trouble(clock: Clock) -> None:
    quotas, acme = Quotas(clock=clock), caller("acme", tokens_per_minute=60)
    with quotas.session("x", acme) as quota:
        for _ in range(9):
            quota.charge(10)
    text, after_s = refusal(quotas, acme)
    assert "tokens_per_minute" in text
    assert after_s == pytest.approx(31.0)
    clock.now += after_s
    with quotas.session("x", acme):
        pass


def test_limits_that_change_hold_from_the_next_request_on(clock: Clock) -> None:
    quotas = Quotas(clock=clock)
    with quotas.session("x", caller("acme", num_sessions=2)), quotas.session("x", caller("acme")):
        refusal(quotas, caller("acme", num_sessions=2))
        refusal(quotas, caller("acme", num_sessions=1))
        with quotas.session("x", caller("acme", num_sessions=3)):
            pass


def test_a_caller_without_credentials_is_limited_by_its_name(clock: Clock) -> None:
    quotas = Quotas(2, clock)
    with ExitStack() as sessions:
        for _ in range(2):
            sessions.enter_context(quotas.session("ipv4:10.0.0.1"))
        text, after_s = refusal(quotas, None, "ipv4:10.0.0.1")
        assert text == "max_sessions_per_caller is reached: 2"
        assert after_s == 1.0
        with quotas.session("ipv4:10.0.0.2"):
            pass
    with quotas.session("ipv4:10.0.0.1"):
        pass


def draft(num_nodes: int, **fields: object) -> types_pb2.Draft:
    return types_pb2.Draft(token_ids=[1] * num_nodes, parent_offsets=[1] * num_nodes, **fields)  # type: ignore[arg-type]


def test_drafts_beyond_the_rate_are_dropped_and_counted_until_time_has_passed(clock: Clock) -> None:
    limit = DraftLimit(100, "s", clock)
    assert all(limit.admits(draft(10)) for _ in range(10))
    assert not limit.admits(draft(10))
    assert not limit.admits(draft(1000))
    assert limit.num_dropped_nodes == 1010
    clock.now += 0.105
    assert limit.admits(draft(10))
    assert not limit.admits(draft(1))


def test_no_form_of_a_draft_is_free(clock: Clock) -> None:
    free = [
        types_pb2.Draft(),
        types_pb2.Draft(parent_offsets=[1] * 50),
        types_pb2.Draft(costs=[1] * 50),
        types_pb2.Draft(q_rows=[types_pb2.SparseRow()] * 50),
        draft(1, q_rows=[types_pb2.SparseRow(token_ids=range(30_000), weights=range(30_000))]),
    ]
    for message in free:
        limit = DraftLimit(100, "s", clock)
        num_admitted = 0
        while limit.admits(message):
            num_admitted += 1
            assert num_admitted <= 100


def test_a_caller_reads_so_many_tokens_in_a_minute_and_the_others_as_many(clock: Clock) -> None:
    quotas = Quotas(clock=clock, max_read_tokens_per_minute=600)
    with quotas.session("one", num_read_tokens=500):
        quotas.charge_reading("one", 200)  # later output is read, too, whatever the quota
        text, after_s = refusal(quotas, None, "one")
        assert text == "max_read_tokens_per_minute is reached: 600"
        assert after_s == pytest.approx(10.1)
        with quotas.session("two", num_read_tokens=500):
            pass
    clock.now += 10.2
    with quotas.session("one", num_read_tokens=10_000):  # longer than a minute's tokens, and still read
        pass
    assert refusal(quotas, None, "one")[1] == pytest.approx(999.9, abs=1.0)


def test_callers_that_have_read_nothing_for_long_are_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas_module, "MAX_NUM_READERS", 3)
    quotas = Quotas(clock=clock, max_read_tokens_per_minute=60)
    for number in range(3):
        quotas.charge_reading(f"old {number}", 60)
    clock.now += 61
    quotas.charge_reading("greedy", 1)
    assert set(quotas._reading) == {"greedy"}
