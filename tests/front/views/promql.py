"""The part of PromQL that our alerts use, evaluated on given series. promql-parser reads the expressions. Values of a
series are a minute apart, as in the files of `promtool test rules`. An expression outside this part raises an error, so
a new kind of alert needs its part here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
Series = dict[tuple[str, Labels], list[float | None]]
"""(name, labels) -> a value a minute, or None for a gap."""
Vector = dict[Labels, float]

COMPARED: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, ">": operator.gt}
OVER_TIME: Mapping[str, Callable[[list[float]], float]] = {
    "last_over_time": lambda seen: seen[-1],
    "max_over_time": max,
}
STEP_S = 60.0


def parse_series(text: str, values: str) -> tuple[tuple[str, Labels], list[float | None]]:
    """Parse one `input_series`: `name{label="value"}` and values like `0x5 12x25` or `_x3`."""
    name, _, rest = text.partition("{")
    labels = frozenset(re.findall(r'(\w+)="([^"]*)"', rest))
    found: list[float | None] = []
    for word in values.split():
        value, _, more = word.partition("x")
        first, _, step = value.partition("+")
        count = int(more or 0) + (value != "_" or not more)  # `1x3` is four values, `_x3` three gaps
        found += [None if first == "_" else float(first) + at * float(step or 0) for at in range(count)]
    return (name, labels), found


def evaluate(expression: str, series: Series, minute: int) -> Vector:
    """Return what an expression yields at this minute: labels without the name -> value."""
    return _vector(promql.parse(expression), series, minute)


def _vector(node: Any, series: Series, minute: int) -> Vector:
    match node:
        case promql.ParenExpr():
            return _vector(node.expr, series, minute)
        case promql.VectorSelector():
            found = _selected(node, series)
            return {
                labels: value
                for labels, values in found.items()
                if minute < len(values) and (value := values[minute]) is not None
            }
        case promql.Call():
            return _called(node.func.name, node.args[0], series, minute)
        case promql.AggregateExpr():
            return _aggregated(node, series, minute)
        case promql.BinaryExpr():
            return _binary(node, series, minute)
    raise NotImplementedError(node.prettify())


def _selected(node: Any, series: Series) -> dict[Labels, list[float | None]]:
    wanted = {(one.name, one.value) for one in node.matchers.matchers}
    assert all(str(one.op) == "MatchOp.Equal" for one in node.matchers.matchers)
    return {labels: values for (name, labels), values in series.items() if name == node.name and wanted <= labels}


def _called(name: str, node: Any, series: Series, minute: int) -> Vector:
    if name == "absent":
        return {} if _vector(node, series, minute) else {frozenset(): 1.0}
    span = _steps(node.range)
    till = minute - _steps(node.vector_selector.offset)
    found: Vector = {}
    for labels, values in _selected(node.vector_selector, series).items():
        seen = [value for value in values[max(0, till - span) : max(0, till + 1)] if value is not None]
        if name in OVER_TIME:
            found |= {labels: OVER_TIME[name](seen)} if seen else {}
        elif len(seen) > 1:
            assert name == "rate"
            assert seen == sorted(seen)  # no counter of a test restarts
            found[labels] = (seen[-1] - seen[0]) / (span * STEP_S)
    return found


def _steps(time: timedelta | None) -> int:
    return 0 if time is None else int(time.total_seconds() / STEP_S)


def _aggregated(node: Any, series: Series, minute: int) -> Vector:
    assert str(node.op) == "max"
    groups: dict[Labels, list[float]] = {}
    for labels, value in _vector(node.expr, series, minute).items():
        by = [] if node.modifier is None else node.modifier.labels
        groups.setdefault(_part(labels, by), []).append(value)
    return {labels: max(values) for labels, values in groups.items()}


def _binary(node: Any, series: Series, minute: int) -> Vector:
    sign, on = str(node.op), _on(node.modifier)
    if sign == "*":
        number, other = (node.lhs, node.rhs) if isinstance(node.lhs, promql.NumberLiteral) else (node.rhs, node.lhs)
        return {labels: number.val * value for labels, value in _vector(other, series, minute).items()}
    left = _vector(node.lhs, series, minute)
    if isinstance(node.rhs, promql.NumberLiteral):
        return {labels: value for labels, value in left.items() if COMPARED[sign](value, node.rhs.val)}
    right = _vector(node.rhs, series, minute)
    there = {_part(labels, on): value for labels, value in right.items()}
    if sign in COMPARED:
        pairs = ((labels, value, there.get(_part(labels, on))) for labels, value in left.items())
        return {labels: value for labels, value, other in pairs if other is not None and COMPARED[sign](value, other)}
    if sign == "and":
        return {labels: value for labels, value in left.items() if _part(labels, on) in there}
    assert sign == "or"
    mine = {_part(labels, on) for labels in left}
    return {**{labels: value for labels, value in right.items() if _part(labels, on) not in mine}, **left}


def _on(modifier: Any) -> list[str] | None:
    """Return the labels that match two sides, or None for all."""
    if modifier is None or modifier.matching is None:
        return None
    if str(modifier.matching.type) == "LabelModifierType.Include":
        return list(modifier.matching.labels)
    assert modifier.matching.labels == []
    return None


def _part(labels: Labels, on: list[str] | None) -> Labels:
    return labels if on is None else frozenset((name, value) for name, value in labels if name in on)
