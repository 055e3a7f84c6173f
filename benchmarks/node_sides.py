"""The processes of ``python -m benchmarks.node``.

Each process that replays is started once, and replays the epoch on each request. Run as a program, this is the Python
side. The Node sides are js/bench/replay.mjs and js/bench/pair.mjs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import penstock
from benchmarks.cpu import running_seconds

ROOT = Path(__file__).parents[1]
PYTHON, NODE, RELEASED, CLIENT = "Python", "Node", "Node, release()", "Node, @redis/client"
SENDS = ("process.send, json", "process.send, advanced", "a stream")
JSON_SHARE = 8
"""The factor by which a turn of json has fewer samples than the others, because it is slow."""


@dataclass(frozen=True)
class Job:
    """The epoch that is replayed, and the side that replays it."""

    url: str
    stream: str
    batch: int
    side: str


@dataclass(frozen=True)
class Pass:
    """One pass of one side over the epoch."""

    seconds: float
    cpu_s: float
    server_cpu_s: float
    samples: int
    check: int
    """The sum of the first byte of each sample."""


class ReplayProcess:
    """A process that replays the epoch on each request."""

    def __init__(self, job: Job, node: Path, server: int) -> None:
        python = [sys.executable, "-m", "benchmarks.node_sides"]
        program = python if job.side == PYTHON else [str(node), "js/bench/replay.mjs"]
        self._name, self._server = job.side, server
        self._popen = subprocess.Popen(
            [*program, json.dumps(asdict(job))], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.samples = int(self._answer()["samples"])

    def run(self) -> Pass:
        """Let it replay the epoch once."""
        assert self._popen.stdin is not None
        before = self._cpu()
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()
        found = self._answer()
        cpu_s, server_cpu_s = (late - early for early, late in zip(before, self._cpu(), strict=True))
        return Pass(found["seconds"], cpu_s, server_cpu_s, found["samples"], found["check"])

    def peak_bytes(self) -> int:
        """Return the most memory that it has had resident."""
        lines = Path(f"/proc/{self._popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

    def __enter__(self) -> ReplayProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self._popen.communicate(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._name} ended with exit code {self._popen.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu(self) -> tuple[float, float]:
        return running_seconds([self._popen.pid]), running_seconds([self._server])


def send(node: Path, url: str, way: str, samples: int) -> float:
    """Return how many samples per second a producer in Node gives to a trainer in Node."""
    wanted = max(2, samples // (JSON_SHARE if way == SENDS[0] else 1))
    job = {"url": url, "way": way, "samples": wanted, "stream": "sent"}
    done = subprocess.run(
        [node, "js/bench/pair.mjs", json.dumps(job)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout)
    if found["samples"] != wanted:
        raise RuntimeError(f"{way} lost samples: {found}, of {wanted}")
    return found["rate"]


def main() -> None:
    """Replay the epoch for each line of standard input."""
    job = Job(**json.loads(sys.argv[1]))
    quiet = penstock.Tuning(notify=lambda _: None)
    with penstock.Replay(job.stream, epoch=0, batch_size=job.batch, url=job.url, tuning=quiet) as source:
        print(json.dumps({"samples": source.samples}), flush=True)
        for _ in sys.stdin:
            began, samples, check = time.perf_counter(), 0, 0
            for batch in source:
                rows = batch["x"].reshape(batch.size, -1).view(np.uint8)
                check += int(rows[:, 0].sum(dtype=np.int64))
                samples += batch.size
            seconds = time.perf_counter() - began
            print(json.dumps({"seconds": seconds, "samples": samples, "check": check}), flush=True)


if __name__ == "__main__":
    main()
