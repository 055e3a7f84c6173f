"""Each alert fires in its situation and in no other. `promtool test rules`, if installed, must agree."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.front.views.promql import Labels, Series, evaluate, parse_series

MONITORING = Path(__file__).resolve().parents[3] / "docker" / "monitoring"
RULES = {rule["alert"]: rule for rule in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"][0]["rules"]}
SITUATIONS = yaml.load((MONITORING / "alerts_test.yml").read_text(), yaml.BaseLoader)["tests"]
"""The situations. Values are read as texts, because YAML would read `0x30`, thirty-one zeros, as a number."""


def minutes(text: str) -> int:
    """Return `5m` as a number."""
    found = re.fullmatch(r"(\d+)m", text)
    assert found is not None
    return int(found[1])


def firing(alert: str, series: Series, minute: int) -> set[Labels]:
    """Return the labels with which the alert fires, if its expression has yielded them for long enough."""
    rule = RULES[alert]
    held = [
        set(evaluate(rule["expr"], series, at)) for at in range(minute - minutes(rule.get("for", "0m")), minute + 1)
    ]
    return {labels | frozenset(rule["labels"].items()) for labels in set.intersection(*held)}


def cases() -> list[tuple[str, int, Series, set[Labels]]]:
    """Yield alert, minute, series, and the labels with which it must fire."""
    found = []
    for situation in SITUATIONS:
        series = dict(parse_series(one["series"], one["values"]) for one in situation["input_series"])
        for asked in situation["alert_rule_test"]:
            expected = {frozenset(one["exp_labels"].items()) for one in asked["exp_alerts"]}
            found.append((asked["alertname"], minutes(asked["eval_time"]), series, expected))
    return found


def test_every_alert_fires_when_it_should_and_not_before() -> None:
    """Otherwise a missing alert shows in the night when it should have fired."""
    wrong = [
        (alert, minute, found, expected)
        for alert, minute, series, expected in cases()
        if (found := firing(alert, series, minute)) != expected
    ]
    assert wrong == []


def test_every_alert_has_a_situation_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    """A new alert comes with both."""
    fires: dict[str, set[bool]] = {}
    for alert, _, _, expected in cases():
        fires.setdefault(alert, set()).add(bool(expected))
    assert fires == {alert: {True, False} for alert in RULES}


def test_the_page_lists_each_alert_in_the_order_of_the_rules() -> None:
    """A receiver of an alert looks there for what to do, and an alert that is listed and does not exist never fires."""
    page = (MONITORING.parents[1] / "docs" / "metrics.md").read_text()
    assert re.findall(r"^\| (Penstock\w+) \|", page, re.MULTILINE) == list(RULES)
