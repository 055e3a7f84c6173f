"""Counting samples in processes that are killed: it starts peers' programs, reads their reports, and adds them up.

A sample was trained on when its step ended. ``scenarios`` says how the peers are run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import python_of
from benchmarks.peers.protocol import Job

ROOT = Path(__file__).parents[1]
UNCERTAIN = 8
"""The last steps of a killed trainer whose acknowledgements may have been under way (docs/internals/trouble.md)."""
TICK_S = 0.005
PATIENCE_S = 120.0


class Stuck(Exception):
    """A run that neither ends nor continues. The message has the process and its last output."""


class Process:
    """A child process that speaks the protocol. Its reports are kept as they come."""

    def __init__(self, module: str, environment: str, job: Job) -> None:
        self.job = job
        self.began = time.monotonic()
        self.said: list[dict[str, Any]] = []
        self.was_killed = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `close`
        self.popen = subprocess.Popen(
            [python_of(environment), "-m", f"benchmarks.peers.{module}"], cwd=ROOT, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(asdict(job)) + "\n")
        self.popen.stdin.close()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.endswith("\n"):
                self.said.append(json.loads(line))

    def all(self, what: str) -> list[dict[str, Any]]:
        """Return its reports of one kind."""
        return [line for line in list(self.said) if line["what"] == what]

    @property
    def steps(self) -> list[list[int]]:
        """Return the numbers in each batch that was yielded, including the one whose step did not end."""
        return [line["numbers"] for line in self.all("step")]

    @property
    def ended(self) -> list[list[int]]:
        """Return the numbers in each batch whose step ended."""
        return self.steps[: len(self.all("ended"))]

    @property
    def is_over(self) -> bool:
        """Return whether it has ended for any reason."""
        return self.popen.poll() is not None

    def kill(self) -> None:
        """Kill this process alone with SIGKILL."""
        self.was_killed = True
        self.popen.kill()
        self.popen.wait()
        self._listener.join(10)  # workers that it leaves may hold the pipe for a while

    def close(self) -> None:
        """End it with all its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._listener.join(10)

    def last_words(self) -> str:
        """Return the end of its stderr."""
        self._errors.seek(0)
        return " | ".join(self._errors.read().strip().splitlines()[-3:])[-600:]


def wait_for(is_so: Callable[[], bool], what: str, among: Iterable[Process] = (), limit_s: float = PATIENCE_S) -> None:
    """Wait until ``is_so`` returns True. Raises Stuck after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline:
            words = "; ".join(f"{one.job.role} {one.job.member}: {one.last_words() or 'silent'}" for one in among)
            raise Stuck(f"waited {limit_s:.0f} s for {what}: {words}")
        time.sleep(TICK_S)


@dataclass(frozen=True)
class Count:
    """The counts of a run's samples, for one logical trainer."""

    lost: int
    """Samples that were never trained on."""
    twice: int
    """Repeated trainings on a sample."""
    beyond: int
    """The repetitions that no crash excuses: the earlier step was not among the last ones of a killed trainer."""
    damaged: int
    """Samples whose bytes were not those of any number."""


def counted(trainers: Iterable[Process], samples: int) -> Count:
    """Count the steps of all processes of one logical trainer, in the order of time."""
    occurrences: list[tuple[float, bool, list[int]]] = []
    for one in trainers:
        ended = one.ended
        for place, (batch, line) in enumerate(zip(ended, one.all("ended"), strict=False)):
            is_certain = not one.was_killed or place < len(ended) - UNCERTAIN
            occurrences.append((line["at"], is_certain, batch))
    return tallied([(is_certain, batch) for _, is_certain, batch in sorted(occurrences)], samples)


def tallied(batches: Iterable[tuple[bool, list[int]]], samples: int) -> Count:
    """Count ``batches``, in the order of time: whether the step was certainly acknowledged, and its numbers."""
    latest: dict[int, bool] = {}
    twice = beyond = damaged = 0
    for is_certain, batch in batches:
        for number in batch:
            if not 0 <= number < samples:
                damaged += number < 0
                continue
            if number in latest:
                twice += 1
                beyond += latest[number]
            latest[number] = is_certain
    return Count(samples - len(latest), twice, beyond, damaged)
