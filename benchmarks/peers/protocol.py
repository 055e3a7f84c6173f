"""The protocol of a measured process and its observer: one line of JSON in, lines of JSON out.

The input, on stdin, is a `Job`. The output goes to the original stdout, with one `write` a line, so that SIGKILL cannot
take a line back. Its lines are ``ready`` (imports are done), ``step`` (a batch was given to the training, with the
numbers that its bytes prove), ``ended`` (its step is over), ``checkpoint``, ``made`` and ``workers``. The output of
libraries goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 384
SAMPLE_BYTES = 8 * WORDS
"""3 kB: a row of features, or a small image."""
BLOCK = 10
"""The samples of a producer's unit of sending, if it has one."""
_STEPS = np.arange(WORDS, dtype=np.int64) * 1_000_003


@dataclass(frozen=True)
class Job:
    """The work of one process."""

    role: str
    """``prepare``, ``serve``, ``produce`` or ``read``. A peer has those that it needs."""
    mode: str
    """The variant of the peer."""
    place: str
    """The address of the other processes: a URL, a folder, ports."""
    samples: int = 2000
    batch: int = 20
    room: int = 500
    """The samples that may lie between producer and trainer."""
    make_s: float = 0.001
    """The time for making a sample: a small Python transform."""
    step_s: float = 0.02
    """The time of a training step."""
    lease_s: float = 2.0
    """The silence after which a trainer counts as dead, if the peer knows that."""
    group: str = "g"
    """The name of one logical trainer."""
    member: str = "m0"
    rank: int = 0
    world: int = 1
    checkpoint_every: int = 0
    """The steps between two checkpoints, or 0 for none."""
    state: dict[str, Any] | None = None
    """The state in the last checkpoint."""
    extra: dict[str, str] = field(default_factory=dict)


def sample(number: int) -> NDArray[np.uint8]:
    """Return a sample ``[SAMPLE_BYTES]`` whose bytes all follow from the number."""
    return (_STEPS + number).view(np.uint8)


def numbers(rows: Any) -> list[int]:
    """Return the samples' numbers as their bytes prove them, with -1 for a damaged one.

    ``rows`` is uint8 ``[n, SAMPLE_BYTES]``.
    """
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
        """Print one line."""
        line = json.dumps({"what": what, "at": time.monotonic(), **fields}) + "\n"
        os.write(self._out, line.encode())

    def step(self, rows: Any, step_s: float) -> None:
        """Run a training step on a batch."""
        self.say("step", numbers=numbers(rows))
        time.sleep(step_s)
        self.say("ended")
        self.steps += 1

    def is_checkpoint_due(self, job: Job) -> bool:
        """Return whether the next checkpoint is due."""
        return job.checkpoint_every > 0 and self.steps % job.checkpoint_every == 0


def run(roles: Mapping[str, Callable[[Job, Report], None]]) -> None:
    """Run a child process: read its job, and do it."""
    report = Report()
    job = Job(**json.loads(sys.stdin.readline()))
    report.say("ready")
    roles[job.role](job, report)
