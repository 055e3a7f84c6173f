"""The results of a run of ``python -m benchmarks``, and their file, which is rewritten after every round."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import fanout, targets, transport
from benchmarks.rounds import Round
from benchmarks.sides import INLINE, PLAIN, SEGMENTS
from benchmarks.spread import Spread, ratios, table


@dataclass
class Results:
    """The results so far."""

    environment: dict[str, str]
    transport: list[transport.Measured] = field(default_factory=list)
    fanned: list[fanout.Fanned] = field(default_factory=list)
    tfdata: dict[str, Spread] | str = field(default_factory=dict)
    """The ratios, or the reason why there are none."""

    @property
    def is_whole(self) -> bool:
        """Return whether Penstock carried everything."""
        failed = [name for one in self.transport for name in one.failed]
        failed += [name for one in self.fanned for name, _ in one.failed]
        return not any(name in (INLINE, SEGMENTS) for name in failed) and not isinstance(self.tfdata, str)

    def targets(self) -> list[targets.Target]:
        """Return the targets for which there are figures."""
        return targets.targets(self.transport, self.fanned, {} if isinstance(self.tfdata, str) else self.tfdata)

    def plain(self) -> dict[str, Any]:
        """Return the results for JSON."""
        return {
            "environment": self.environment,
            "transport": [asdict(one) for one in self.transport],
            "trainers": [
                {
                    "payload": one.case.name,
                    "make_s": one.make_s,
                    "rounds": [
                        {"side": side, "trainers": count, "rounds": [asdict(each) for each in rounds]}
                        for (side, count), rounds in one.rounds.items()
                    ],
                    "failed": {f"{side}, {count}": reason for (side, count), reason in one.failed.items()},
                }
                for one in self.fanned
            ],
            "tf.data": found
            if isinstance(found := self.tfdata, str)
            else {what: asdict(one) for what, one in found.items()},
            "targets": [one.plain() for one in self.targets()],
        }

    def save(self, path: Path) -> None:
        """Write all of it atomically: an interruption leaves the old file or the new one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(self.plain(), indent=1))
        beside.replace(path)


def rounds_of(plain: dict[str, Any]) -> dict[str, list[Round]]:
    """Return side -> rounds, of one payload in such a file."""
    return {side: [Round(**one) for one in rounds] for side, rounds in plain["rounds"].items() if rounds}


def compared(now: list[transport.Measured], before: dict[str, Any]) -> str:
    """Return ratios to plain redis-py, which depend less on a slower machine than times do."""
    then = {one["case"]["name"]: rounds_of(one) for one in before["transport"]}
    rows = []
    for measured in now:
        for name in (INLINE, SEGMENTS):
            new = _to_plain(measured.rounds, name)
            old = _to_plain(then.get(measured.case.name, {}), name)
            if new and old:
                rows.append([measured.case.name, name, old.shown(), new.shown(), f"{new.median / old.median:.2f}x"])
    return (
        "### Against before, as ratios to plain redis-py\n\n" + table(("", "", "before", "now", "change"), rows) + "\n"
    )


def _to_plain(rounds: dict[str, list[Round]], name: str) -> Spread | None:
    return ratios(rounds.get(name, []), rounds.get(PLAIN, []))
