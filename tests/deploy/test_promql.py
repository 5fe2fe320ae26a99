"""What reads the expressions finds what is wrong in them."""

from __future__ import annotations

import pytest

from tests.deploy.promql import Known, Wrong, labels_of, names_in

KNOWN = Known(
    {
        "calls_total": frozenset({"pod", "code"}),
        "seconds_bucket": frozenset({"pod", "le"}),
        "sessions": frozenset({"pod"}),
        "info": frozenset({"pod", "version"}),
    },
    {"code": frozenset({"OK", "INTERNAL"})},
)


@pytest.mark.parametrize(
    ("expression", "labels"),
    [
        ("sessions", {"pod"}),
        ("sum (rate(calls_total[$__rate_interval]))", set()),
        ('sum by (code) (rate(calls_total{pod=~"$pod", code!="OK"}[5m]))', {"code"}),
        ("sum without (pod) (calls_total)", {"code"}),
        ("histogram_quantile(0.9, sum by (pod, le) (rate(seconds_bucket[5m])))", {"pod"}),
        ("sum by (code) (calls_total) / on () group_left () sum (calls_total)", {"code"}),
        ("sessions * on (pod) group_left (version) info", {"pod", "version"}),
        ('calls_total{code=~"OK|INT.*"} and on (pod) sessions', {"pod", "code"}),
        ("avg_over_time(sessions[1h:1m] offset 1d) > 2", {"pod"}),
        ("time() - max by (pod) (sessions)", {"pod"}),
    ],
)
def test_labels_come_out_as_they_do_in_prometheus(expression: str, labels: set[str]) -> None:
    assert labels_of(expression, KNOWN) == labels


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("sum (", "unclosed"),
        ("rate(call_total[5m])", "nobody exports call_total"),
        ("sum(calls_total) / sum(session)", "nobody exports session,"),
        ('calls_total{node="a"}', "calls_total has no label node"),
        ('calls_total{code="BAD"}', "code is never BAD"),
        ('calls_total{code=~"OK|BAD"}', "code is never BAD"),
        ("sum by (tier) (calls_total)", r"no label \['tier'\] to aggregate by"),
        ("sum by (code) (sum by (pod) (calls_total))", r"no label \['code'\]"),
        ("sum by (code) (calls_total) / sum by (pod) (calls_total)", "never equal"),
        ("sessions * on (code) calls_total", r"no label \['code'\] on both sides"),
        ("sessions * on (pod) group_left (code) info", r"no label \['code'\] to bring over"),
        ("rate(sessions[5m])", "which is no counter"),
        ("histogram_quantile(0.9, sum by (pod) (rate(seconds_bucket[5m])))", "without le"),
    ],
)
def test_what_there_is_not_is_named(expression: str, problem: str) -> None:
    with pytest.raises(Wrong, match=problem):
        labels_of(expression, KNOWN)


def test_all_series_of_an_expression_are_found() -> None:
    assert names_in("sum(rate(a[5m])) / (b > 0) or -c and max_over_time(d[1h:1m])") == {"a", "b", "c", "d"}
