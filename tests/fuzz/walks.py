"""Stored schedules of the state machine: each step and all random choices, for later code to repeat them exactly.
Hypothesis does not promise this, because the walk of a seed changes with the code. ``walks.json`` has the walks, and
the number of samples that each commits. ``python -m tests.fuzz.walks`` repeats them all, and ``--record`` draws new
ones.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import penstock
from tests.fuzz.machine import Machine

STORED = Path(__file__).with_name("walks.json")
KEPT = 12
"""The stored walks, of `DRAWN`: those that together do the most different things."""
DRAWN = 60
STEPS = 40

Walk = dict[str, Any]
"""``steps``: [rule, arguments, draws], in order; ``committed``: samples of each epoch; ``did``: its purpose."""


def stored() -> list[Walk]:
    """Return all of them."""
    walks: list[Walk] = json.loads(STORED.read_text())
    return walks


def replay(walk: Walk, url: str) -> None:
    """Repeat a walk, compared with the model. Raises AssertionError if a promise is broken or a count differs."""
    Machine.url = url
    Machine.steps.clear()
    machine = Machine()
    try:
        for name, arguments, draws in walk["steps"]:
            given = {key: set(value) if key == "bad" else value for key, value in arguments.items()}
            if draws is not None:
                given["data"] = _Replayed(draws)
            getattr(machine, name)(**given)
    finally:
        machine.teardown()
    assert _committed(machine) == walk["committed"]
    for what, count in walk["did"].items():
        assert Machine.steps[what] > 0 or not count, f"nothing was {what}"


def _committed(machine: Machine) -> dict[str, int]:
    return {str(number): len(epoch.committed) for number, epoch in machine.model.epochs.items()}


class _Replayed:
    """A replacement for Hypothesis' data object that gives the stored draws."""

    def __init__(self, draws: list[Any]) -> None:
        self._draws = iter(draws)

    def draw(self, _: object) -> Any:
        """Return the next value. For a list, return the tuple or the positions that it was."""
        value = next(self._draws)
        return tuple(value) if isinstance(value, list) else value


# --- recording --------------------------------------------------------------------------------------------------------


class _Recorded:
    """Hypothesis' data object, with recorded draws."""

    def __init__(self, data: Any, draws: list[Any]) -> None:
        self._data, self._draws = data, draws

    def draw(self, strategy: Any) -> Any:
        """Return what Hypothesis draws."""
        value = self._data.draw(strategy)
        self._draws.append(sorted(value) if isinstance(value, set) else value)
        return value


@contextmanager
def _recording(walks: list[Walk]) -> Iterator[None]:
    """Record the walk of every machine that is made in the block."""
    setup = Machine.setup_state()  # an internal of Hypothesis, needed to record, never to repeat
    rules: dict[str, Any] = {one.function.__name__: one for one in [*setup.rules, *setup.initializers]}
    begun: dict[int, Walk] = {}

    def recorded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Machine, **arguments: Any) -> Any:
            walk = begun.setdefault(id(self), {"steps": [], "before": Counter(Machine.steps)})
            draws: list[Any] | None = [] if "data" in arguments else None
            plain = {key: sorted(v) if isinstance(v, set) else v for key, v in arguments.items() if key != "data"}
            walk["steps"].append([name, plain, draws])
            if draws is not None:
                arguments["data"] = _Recorded(arguments["data"], draws)
            return function(self, **arguments)

        return run

    end = Machine.end

    def ended(self: Machine) -> None:
        walk = begun.pop(id(self))
        did = Machine.steps - walk.pop("before")
        end(self)
        walks.append({**walk, "committed": _committed(self), "did": dict(did)})

    functions = {name: one.function for name, one in rules.items()}
    for name, one in rules.items():
        object.__setattr__(one, "function", recorded(name, functions[name]))
    try:
        with patch.object(Machine, "end", ended):
            yield
    finally:
        for name, one in rules.items():
            object.__setattr__(one, "function", functions[name])


def record(url: str) -> list[Walk]:
    """Draw random walks, and return those that are worth keeping."""
    walks: list[Walk] = []
    Machine.url = url
    with _recording(walks):
        for chance in range(DRAWN // 6):
            run_state_machine_as_test(
                seed(chance)(Machine),
                settings=settings(
                    max_examples=6, stateful_step_count=STEPS, deadline=None, database=None,
                    suppress_health_check=list(HealthCheck), phases=[Phase.generate],
                ),
            )  # fmt: skip
    return chosen(walks)


def chosen(walks: list[Walk]) -> list[Walk]:
    """Choose, repeatedly, the walk that adds most to the others."""
    kept: list[Walk] = []
    seen: Counter[tuple[str, str]] = Counter()
    left = list(walks)
    while left and len(kept) < KEPT:
        best = max(left, key=lambda walk: sum(1 / (1 + seen[pair]) for pair in _pairs(walk)))
        left.remove(best)
        kept.append(best)
        seen.update(_pairs(best))
    return kept


def _pairs(walk: Walk) -> set[tuple[str, str]]:
    """Return the pairs of consecutive rules, and all rules that ran."""
    names = [name for name, _, _ in walk["steps"]]
    return {*pairwise(names), *((what, "") for what in walk["did"])}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.walks", description=__doc__)
    parser.add_argument("--record", action="store_true", help="replace the stored walks by new ones")
    args = parser.parse_args()
    with penstock.EmbeddedServer() as server:
        if args.record:
            walks = record(server.url)
            STORED.write_text("[\n" + ",\n".join(json.dumps(walk) for walk in walks) + "\n]\n")
        for number, walk in enumerate(stored()):
            replay(walk, server.url)
            print(f"walk {number}: {len(walk['steps'])} steps, {sum(walk['committed'].values())} samples committed")


if __name__ == "__main__":
    main()
