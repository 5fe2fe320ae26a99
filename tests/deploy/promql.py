"""Reads PromQL: which series and labels an expression queries, and which labels its result has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as promql

Labels = frozenset[str]
COUNTER_FUNCTIONS = {"rate", "irate", "increase", "resets"}
VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}
"""Grafana's variables, where PromQL has a duration."""


@dataclass(frozen=True, slots=True)
class Known:
    """The series and labels that may be queried."""

    series: Mapping[str, Labels]
    """Labels of each series, by its name."""
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Values of those labels that have no others."""


class Wrong(Exception):
    """An expression queries something that does not exist. The message names it."""


def labels_of(expression: str, known: Known) -> Labels:
    """The labels of an expression's result. Raises Wrong."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    try:
        parsed = promql.parse(expression)
    except ValueError as error:
        raise Wrong(f"{error}: {expression}") from None
    try:
        return _labels(parsed, known)
    except Wrong as wrong:
        raise Wrong(f"{wrong}, in: {expression}") from None


def names_in(expression: str) -> set[str]:
    """The series that an expression queries. Raises Wrong."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return {selector.name for selector in _selectors(promql.parse(expression))}


def _selectors(node: promql.Expr) -> Iterator[promql.VectorSelector]:
    match node:
        case promql.VectorSelector():
            yield node
        case promql.MatrixSelector():
            yield node.vector_selector
        case promql.BinaryExpr():
            yield from _selectors(node.lhs)
            yield from _selectors(node.rhs)
        case promql.Call():
            for argument in node.args:
                yield from _selectors(argument)
        case promql.AggregateExpr() | promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            yield from _selectors(node.expr)


def _labels(node: promql.Expr, known: Known) -> Labels:
    match node:
        case promql.VectorSelector():
            return _selected(node, known)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, known)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            return _labels(node.expr, known)
        case promql.Call():
            return _called(node, known)
        case promql.AggregateExpr():
            return _aggregated(node, known)
        case promql.BinaryExpr():
            return _joined(node, known)
    return frozenset()  # a number or a string


def _selected(selector: promql.VectorSelector, known: Known) -> Labels:
    if selector.name not in known.series:
        raise Wrong(f"nobody exports {selector.name}")
    labels = known.series[selector.name]
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels:
            raise Wrong(f"{selector.name} has no label {matcher.name}")
        if "$" not in matcher.value and matcher.name in known.values:
            _check_value(matcher, known.values[matcher.name])
    return labels


def _check_value(matcher: promql.Matcher, values: frozenset[str]) -> None:
    """True if each alternative of the value is one that the label can have."""
    for value in matcher.value.split("|"):
        if not any(re.fullmatch(value, known) for known in values):
            raise Wrong(f"{matcher.name} is never {value}")


def _called(call: promql.Call, known: Known) -> Labels:
    name = call.func.name
    if name in COUNTER_FUNCTIONS:
        for selector in _selectors(call):
            if not selector.name.endswith(("_total", "_bucket", "_count", "_sum")):
                raise Wrong(f"{name} of {selector.name}, which is no counter")
    found = frozenset[str]().union(*(_labels(argument, known) for argument in call.args))
    if name == "histogram_quantile":
        if "le" not in found:
            raise Wrong("histogram_quantile without le")
        return found - {"le"}
    return found


def _aggregated(node: promql.AggregateExpr, known: Known) -> Labels:
    inside = _labels(node.expr, known)
    if node.modifier is None:
        return frozenset()
    asked = frozenset(node.modifier.labels)
    if asked - inside:
        raise Wrong(f"there is no label {sorted(asked - inside)} to aggregate by")
    return asked if node.modifier.type == promql.AggModifierType.By else inside - asked


def _joined(node: promql.BinaryExpr, known: Known) -> Labels:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    if not (_is_vector(node.lhs) and _is_vector(node.rhs)):
        return left | right
    modifier = node.modifier
    matching = None if modifier is None else modifier.matching
    if matching is None:
        if left != right and str(node.op) != "or":
            raise Wrong(f"{sorted(left)} never equal {sorted(right)}")
        return left | right
    asked = frozenset(matching.labels)
    if asked - (left & right):
        raise Wrong(f"there is no label {sorted(asked - (left & right))} on both sides")
    if modifier.card == promql.VectorMatchCardinality.ManyToOne:
        brought = frozenset(modifier.group_labels or ())
        if brought - right:
            raise Wrong(f"there is no label {sorted(brought - right)} to bring over")
        return left | brought
    return left if str(node.op) in ("and", "unless") else asked


def _is_vector(node: promql.Expr) -> bool:
    return any(True for _ in _selectors(node))
