"""What a loader tells of its work: how much it handed out, how long it was waited for, and whose fault that was.

The record and its line; who counts is ``tally``, the rule from times to a cause is ``pipeline.causes``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock_consumer.pipeline.causes import MOSTLY, Cause, Spent, verdict

NAMES: Mapping[Cause, str] = {"producers": "producers", "server": "the server", "reader": "this process"}
"""The causes as the line of an epoch spells them."""
SHORT_S = 1.0
"""A shorter epoch is mostly its own start: its line has no share of waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """One epoch as far as it was read, or several together. Times are of the training loop, in seconds."""

    epoch: int | None = None
    """None of several, and before the first."""
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    """Payload, of the samples handed out."""
    elapsed_s: float = 0.0
    """While the loop was iterating, its steps included; what it does between two iterations is not."""
    waited_s: float = 0.0
    """Of it, what the loop spent in asking for the next batch."""
    producers_s: float = 0.0
    """Of the waiting: nothing was there to be read."""
    server_s: float = 0.0
    """Of the waiting: something was there, and had not arrived."""
    reader_s: float = 0.0
    """Of the waiting: this process was at work on it (checksums, rows, stages, `map`), or at acknowledging."""
    bad_entries: int = 0
    filled: int = 0
    """In ordered reading, samples that stood in for bad ones, so that every rank has the same number of steps."""
    streams: Mapping[str, Stats] = field(default_factory=dict)
    """Of a mixture, each loader's own."""

    @property
    def samples_per_s(self) -> float:
        """Over all of the time, steps included."""
        return self.samples / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        """Over all of the time, steps included."""
        return self.bytes / self.elapsed_s if self.elapsed_s > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Of the time, 0 to 1."""
        return min(1.0, self.waited_s / self.elapsed_s) if self.elapsed_s > 0 else 0.0

    @property
    def cause(self) -> Cause | None:
        """Whom most of the waiting was for; None where there was none to speak of."""
        return verdict(self._spent, self.elapsed_s)

    @property
    def _spent(self) -> Spent:
        return Spent(self.producers_s, self.server_s, self.reader_s)

    def as_dict(self) -> dict[str, Any]:
        """For scripts: fields and what follows from them, as JSON has them."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "streams"}
        found |= {
            "samples_per_s": self.samples_per_s, "bytes_per_s": self.bytes_per_s, "wait_share": self.wait_share,
            "cause": self.cause,
        }  # fmt: skip
        return {**found, "streams": {name: one.as_dict() for name, one in self.streams.items()}}

    def __str__(self) -> str:
        """One line."""
        rates = f"{self.samples_per_s:,.0f} samples/s, {readable_rate(self.bytes_per_s)}"
        if self.elapsed_s < SHORT_S:
            return f"{self.samples:,} samples in {self.elapsed_s:.2g} s, {rates}"
        waited = f"waited {self.wait_share:.0%} of the time".replace("%", " %")
        return f"{self.samples:,} samples in {self.elapsed_s:.1f} s, {rates}; {waited}{self._whom()}"

    def _whom(self) -> str:
        if (cause := self.cause) is None:
            return ""
        spent, total = self._spent, self._spent.total
        share = float(getattr(spent, cause)) / total
        if share > MOSTLY:
            return f", mostly for {NAMES[cause]}"
        parts = [f"{name} {float(getattr(spent, key)) / total:.0%}".replace("%", " %") for key, name in NAMES.items()]
        return f", for {', '.join(parts)}"


def mixed(whole: Stats, streams: Mapping[str, Stats]) -> Stats:
    """A mixture's: ``whole`` as its own loop was waited for, with the causes that its loaders know."""
    parts = summed(streams.values())
    producers, server = min(parts.producers_s, whole.waited_s), min(parts.server_s, whole.waited_s)
    return replace(
        whole, producers_s=producers, server_s=server, reader_s=max(0.0, whole.waited_s - producers - server),
        bad_entries=parts.bad_entries, filled=parts.filled, streams=dict(streams),
    )  # fmt: skip


def readable_rate(bytes_per_s: float) -> str:
    """``182 MB/s``: of 1000, as networks and disks count."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def summed(parts: Iterable[Stats], epoch: int | None = None) -> Stats:
    """Several, one after the other."""
    counted = ("batches", "samples", "bytes", "elapsed_s", "waited_s", "producers_s", "server_s", "reader_s")
    every = list(parts)
    totals = {name: sum(getattr(one, name) for one in every) for name in (*counted, "bad_entries", "filled")}
    return Stats(epoch=epoch, **totals)
