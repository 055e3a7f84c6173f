"""Records of each process: when it began, was stopped, was replaced and ended, and its journal as read back."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from chaos.journal import read_journal

KILLED, LEFT, FAILED, REPLACED = "killed", "left", "failed", "replaced"
NODE_TRAINER = "node_trainer"
"""The role of a trainer in Node."""
UNANSWERED = 8
"""The acknowledgements that may be under way at once (docs/internals/chaos.md)."""


@dataclass(slots=True)
class Life:
    """One process from start to end, as the conductor saw it. Times in ns of the monotonic clock."""

    role: str
    stream: str
    group: str
    member: str
    journal: Path
    ended_ns: int = 0
    """The end of its life, or 0 while it runs. Once its journal is read, it is the time when it began to leave, if it
    did.
    """
    ending: str = ""
    """The way it ended: killed, left, failed or replaced."""
    stops: list[tuple[int, int]] = field(default_factory=list)
    """The stops: [stopped, continued or killed)."""
    replaced_ns: int = 0
    """The time when another process was started under its name, or 0 for never."""
    host: str = ""
    """The host that it is on, or '' if all are on one."""
    cuts: list[tuple[int, int]] = field(default_factory=list)
    """The times [from, to) in which a fault of a link kept it from the server, or may have."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One batch that one trainer was given."""

    life: int
    seq: int
    ns: int
    epoch: int
    nonces: tuple[int, ...]
    position: int = 0
    """The end of a rank's step, by the batch."""


@dataclass(slots=True)
class Diary:
    """The life of a trainer and the content of its journal."""

    life: Life
    handed: list[Handed] = field(default_factory=list)
    done: set[int] = field(default_factory=set)
    """The batches whose step ended."""
    corrupt: list[str] = field(default_factory=list)
    stalls: list[tuple[int, int]] = field(default_factory=list)
    """The times [from, to) in which it did not run, for any reason."""
    error: str = ""
    acknowledged: dict[int, int] = field(default_factory=dict)
    """Batch -> its position among all that were acknowledged."""
    acknowledged_ns: list[int] = field(default_factory=list)
    """The times of the acknowledgements, by position."""
    flushed_ns: list[int] = field(default_factory=list)

    def is_acknowledged(self, seq: int) -> bool:
        """Return whether the acknowledging call returned."""
        return seq in self.acknowledged

    def is_certain(self, seq: int, at_ns: int) -> bool:
        """Return whether the acknowledgement of a batch had certainly reached the server by then.

        It had if a flush returned after it, or if UNANSWERED later ones were sent, because its answer had then been
        read.
        """
        place = self.acknowledged.get(seq)
        if place is None or self.acknowledged_ns[place] > at_ns:
            return False
        if bisect_right(self.acknowledged_ns, at_ns) - place - 1 >= UNANSWERED:
            return True
        flushed = bisect_right(self.flushed_ns, self.acknowledged_ns[place])
        return flushed < len(self.flushed_ns) and self.flushed_ns[flushed] <= at_ns


def read_diary(number: int, life: Life) -> Diary:
    """Read the journal of a trainer, whose batches carry ``number``."""
    diary = Diary(life)
    for line in read_journal(life.journal):
        words = line.words
        if line.letter == "H":
            nonces = tuple(int(word, 16) for word in words[2].split(",") if word != "-")
            diary.handed.append(Handed(number, int(words[0]), line.ns, int(words[1]), nonces, int(words[3])))
        elif line.letter == "D":
            diary.done.add(int(words[0]))
        elif line.letter == "A":
            diary.acknowledged.setdefault(int(words[0]), len(diary.acknowledged_ns))
            diary.acknowledged_ns.append(line.ns)
        elif line.letter in "FL":
            diary.flushed_ns.append(line.ns)
        elif line.letter == "S":
            diary.stalls.append((line.ns - int(float(words[0]) * 1e9), line.ns))
        elif line.letter == "X":
            diary.corrupt.append(" ".join(words[1:]))
        elif line.letter == "Z":
            life.ended_ns = min(life.ended_ns or line.ns, line.ns)
        elif line.letter == "E":
            diary.error = " ".join(words)
    return diary
