"""Limits the sessions, requests and tokens of a caller, in buckets that fill up by the minute."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from outrider.security.callers import Caller, TenantLimits
from outrider.wire.errors import ResourceExhausted

Clock = Callable[[], float]
"""Returns seconds since any fixed moment."""
SESSION_RETRY_S = 1.0
"""Delay that a refusal advises if another session must end first; the end of a session cannot be foreseen."""


MAX_NUM_READERS = 1024
"""Callers whose reading is remembered even if they have not read for a minute."""


class LimitReached(ResourceExhausted):
    """A caller has reached the limit of one caller. Names the setting and when to retry."""

    def __init__(self, setting: str, limit: float, retry_after_s: float) -> None:
        super().__init__(f"{setting} is reached: {limit:g}", retry_after_s)
        self.setting = setting
        """Name of the setting."""


class TokenBucket:
    """Allows `rate_per_s` on average, and bursts of what accumulates in `burst_s`."""

    def __init__(self, rate_per_s: float, burst_s: float, clock: Clock = time.monotonic) -> None:
        self._clock, self._burst_s = clock, burst_s
        self.rate_per_s = rate_per_s
        # At least 1: a bucket that holds less would never have enough for one request.
        self._level = self._capacity = max(1.0, rate_per_s * burst_s)
        self._at = clock()

    def set_rate(self, rate_per_s: float) -> None:
        """Sets the rate from now on; what was taken stays taken."""
        missing = self._capacity - self.level
        self.rate_per_s = rate_per_s
        self._capacity = max(1.0, rate_per_s * self._burst_s)
        self._level = self._capacity - missing

    @property
    def level(self) -> float:
        """Amount that may be taken now; negative if too much was taken."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self.rate_per_s)
        self._at = now
        return self._level

    @property
    def is_full(self) -> bool:
        """True if the full amount may be taken."""
        return self.level >= self._capacity

    def take(self, amount: float) -> None:
        """Takes an amount, even if it is not there."""
        self._level = self.level - amount

    def wait_s(self, amount: float) -> float:
        """Returns the seconds until an amount is there; 0 if it is."""
        # More than the bucket holds would never be there.
        return max(0.0, (min(amount, self._capacity) - self.level) / self.rate_per_s)


class TenantQuota:
    """Counts what a tenant has taken, and refuses what is beyond its limits."""

    def __init__(self, tenant: str, clock: Clock) -> None:
        self.limits = TenantLimits()
        self.num_sessions = 0
        self._tenant, self._clock = tenant, clock
        self._buckets: dict[str, TokenBucket] = {}

    def set_limits(self, limits: TenantLimits) -> None:
        """Sets the limits from now on: the file of the credentials may have changed."""
        self.limits = limits
        for name in ("requests_per_minute", "tokens_per_minute"):
            per_minute = getattr(limits, name)
            if per_minute is None:
                self._buckets.pop(name, None)
            elif name in self._buckets:
                # Not a new bucket, which would be full: an edit of the file gives nothing back.
                self._buckets[name].set_rate(per_minute / 60)
            else:
                self._buckets[name] = TokenBucket(per_minute / 60, 60.0, self._clock)

    def begin(self) -> None:
        """Counts a request that begins. Raises ResourceExhausted, which names the limit and says when to retry."""
        # All limits are checked before anything is counted, so that a refusal costs the tenant nothing.
        limit = self.limits.num_sessions
        if limit is not None and self.num_sessions >= limit:
            raise self._exhausted("num_sessions", limit, SESSION_RETRY_S)
        # One token is enough to begin: how many a generation will take is not known yet.
        self._check_bucket("tokens_per_minute")
        self.count_request()
        self.num_sessions += 1

    def count_request(self) -> None:
        """Counts a request that takes no session. Raises ResourceExhausted, which names the limit and says when to
        retry."""
        self._check_bucket("requests_per_minute")
        if (requests := self._buckets.get("requests_per_minute")) is not None:
            requests.take(1)

    def end(self) -> None:
        """Counts a request that is over."""
        self.num_sessions -= 1

    def charge(self, num_tokens: int) -> None:
        """Charges generated tokens, even beyond the limit: the next request is refused then."""
        if (tokens := self._buckets.get("tokens_per_minute")) is not None:
            tokens.take(num_tokens)

    def _check_bucket(self, name: str) -> None:
        bucket = self._buckets.get(name)
        if bucket is not None and (wait_s := bucket.wait_s(1)) > 0:
            raise self._exhausted(name, getattr(self.limits, name), wait_s)

    def _exhausted(self, name: str, limit: float, retry_after_s: float) -> ResourceExhausted:
        return ResourceExhausted(f"the limit {name} of tenant {self._tenant!r} is reached: {limit:g}", retry_after_s)


class Quotas:
    """Holds the quotas of all tenants, and of all callers, of a server. Lives on the event loop."""

    def __init__(
        self, max_sessions_per_caller: int = 0, clock: Clock = time.monotonic, *, max_read_tokens_per_minute: int = 0
    ) -> None:
        """
        Args:
            max_sessions_per_caller: Most sessions of a caller at a time. 0 means no limit.
            clock: Returns the time.
            max_read_tokens_per_minute: Most tokens that are read for a caller, on average over a minute. 0 means no
                limit.
        """
        self._max_sessions_per_caller, self._clock = max_sessions_per_caller, clock
        self._max_read_tokens_per_minute = max_read_tokens_per_minute
        self._num_sessions: Counter[str] = Counter()
        self._reading: dict[str, TokenBucket] = {}
        self._tenants: dict[str, TenantQuota] = {}

    @contextmanager
    def session(self, name: str, caller: Caller | None = None, num_read_tokens: int = 0) -> Iterator[TenantQuota]:
        """Counts a session of a caller while the body runs; yields the quota that its tokens are charged to.

        Args:
            name: Distinguishes this caller from others.
            caller: None means that it has no tenant, and only the limits of all callers.
            num_read_tokens: Tokens that are read for it at the beginning.

        Raises:
            LimitReached: a limit of every caller is reached.
            ResourceExhausted: a limit of its tenant is reached; names it.
        """
        limit = self._max_sessions_per_caller
        if limit and self._num_sessions[name] >= limit:
            raise LimitReached("max_sessions_per_caller", limit, SESSION_RETRY_S)
        # One token is enough to begin, as below: a text longer than a minute's tokens must not wait for ever.
        if (reading := self._reading_of(name)) is not None and (wait_s := reading.wait_s(1)) > 0:
            raise LimitReached("max_read_tokens_per_minute", self._max_read_tokens_per_minute, wait_s)
        quota = self._quota_of(caller)
        quota.begin()
        self.charge_reading(name, num_read_tokens)
        self._num_sessions[name] += 1
        try:
            yield quota
        finally:
            quota.end()
            self._num_sessions[name] -= 1
            # Without credentials the names are those of hosts, whose number is unlimited.
            if not self._num_sessions[name]:
                del self._num_sessions[name]

    def count_request(self, caller: Caller | None) -> None:
        """Counts a request of a caller that takes no session. Raises ResourceExhausted: the limit of its tenant is
        reached; names it."""
        self._quota_of(caller).count_request()

    def charge_reading(self, name: str, num_tokens: int) -> None:
        """Charges tokens that are read for a caller, even beyond the limit: its next session is refused then."""
        if (reading := self._reading_of(name)) is not None:
            reading.take(num_tokens)

    def _reading_of(self, name: str) -> TokenBucket | None:
        if not self._max_read_tokens_per_minute:
            return None
        if name not in self._reading and len(self._reading) >= MAX_NUM_READERS:
            # Drops callers with a full bucket, which are like new ones.
            self._reading = {other: each for other, each in self._reading.items() if not each.is_full}
        rate_per_s = self._max_read_tokens_per_minute / 60
        return self._reading.setdefault(name, TokenBucket(rate_per_s, 60.0, self._clock))

    def _quota_of(self, caller: Caller | None) -> TenantQuota:
        if caller is None:
            return TenantQuota("", self._clock)
        quota = self._tenants.setdefault(caller.tenant, TenantQuota(caller.tenant, self._clock))
        if quota.limits != caller.limits:
            quota.set_limits(caller.limits)
        return quota
