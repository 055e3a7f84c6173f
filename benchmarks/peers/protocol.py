"""What a measured process and its observer say to each other: one line of JSON in, lines of JSON out.

In: a `Job`, on stdin. Out, on the stdout it was started with, one `write` a line, so that a kill -9 takes nothing back:
``ready`` (imports are done), ``step`` (a batch was handed to training, with the numbers its bytes prove), ``ended``
(its step is over), ``checkpoint``, ``made``, ``workers``. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 384
SAMPLE_BYTES = 8 * WORDS
"""3 kB: a row of features, or a small image."""
BLOCK = 10
"""Samples of a producer's unit of sending, where it has one."""
_STEPS = np.arange(WORDS, dtype=np.int64) * 1_000_003


@dataclass(frozen=True)
class Job:
    """What one process is to do."""

    role: str
    """``prepare``, ``serve``, ``produce`` or ``read``; a peer has those that it needs."""
    mode: str
    """The variant of the peer."""
    place: str
    """Where the others are: a URL, a folder, ports."""
    samples: int = 2000
    batch: int = 20
    room: int = 500
    """Samples that may lie between producer and trainer."""
    make_s: float = 0.001
    """What making a sample takes: a small Python transform."""
    step_s: float = 0.02
    """What a training step takes."""
    lease_s: float = 2.0
    """Silence after which a trainer counts as dead, where such a thing is known."""
    group: str = "g"
    """One logical trainer."""
    member: str = "m0"
    rank: int = 0
    world: int = 1
    checkpoint_every: int = 0
    """Steps; 0: none."""
    state: dict[str, Any] | None = None
    """Of the last checkpoint."""
    extra: dict[str, str] = field(default_factory=dict)


def sample(number: int) -> NDArray[np.uint8]:
    """``[SAMPLE_BYTES]``; every byte follows from the number."""
    return (_STEPS + number).view(np.uint8)


def numbers(rows: Any) -> list[int]:
    """The samples' numbers as their bytes prove them; -1 for a damaged one. ``rows``: ``[n, SAMPLE_BYTES]`` uint8."""
    words = np.ascontiguousarray(rows, dtype=np.uint8).view(np.int64)
    found = words[:, 0]
    whole = (words == found[:, None] + _STEPS).all(axis=1)
    return [int(number) for number in np.where(whole, found, -1)]


class Report:
    """The child's side."""

    def __init__(self) -> None:
        self._out = os.dup(1)
        os.dup2(2, 1)
        self.steps = 0

    def say(self, what: str, **fields: Any) -> None:
        """One line."""
        line = json.dumps({"what": what, "at": time.monotonic(), **fields}) + "\n"
        os.write(self._out, line.encode())

    def step(self, rows: Any, step_s: float) -> None:
        """A training step on a batch."""
        self.say("step", numbers=numbers(rows))
        time.sleep(step_s)
        self.say("ended")
        self.steps += 1

    def is_checkpoint_due(self, job: Job) -> bool:
        """After so many steps."""
        return job.checkpoint_every > 0 and self.steps % job.checkpoint_every == 0


def begin() -> tuple[Job, Report]:
    """What to do, and whom to tell."""
    report = Report()
    return Job(**json.loads(sys.stdin.readline())), report
