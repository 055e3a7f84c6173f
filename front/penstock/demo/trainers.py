"""The demo's trainer processes as seen by the demo: started, listened to, told to go on, ended."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from typing import IO, Any

from penstock.demo.trainer import Task
from penstock_common.errors import PenstockError
from penstock_common.settings import child_environment

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # what TensorFlow finds and misses on this machine is another story
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "KERAS_BACKEND": "tensorflow",
    "OPENBLAS_NUM_THREADS": "1",  # small matrices, and the cores are the workers' too
    "OMP_NUM_THREADS": "1",
}
END_S = 5.0
LAST_LINES = 5


def keras_is_there() -> bool:
    """Whether Keras models can be trained here."""
    return all(importlib.util.find_spec(name) is not None for name in ("tensorflow", "keras"))


@dataclass
class Trainer:
    """One process. Its messages arrive in a thread and are kept here."""

    task: Task
    on_notice: Any
    samples: int = 0
    pid: int = 0
    is_started: bool = False
    state: str = "starting"
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """``trained`` and ``compared``, when they are there."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self) -> None:
        """Runs it; what it says on stderr is kept for the case that it fails."""
        self.is_started = True
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.demo.trainer"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
            env=child_environment(ENVIRONMENT),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._tell(self.task.model_dump_json())

    def compare(self) -> None:
        """Tells it to train once more, in-process."""
        self._tell("compare")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: `check` says of what
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Raises what it died of."""
        if self.state == "failed" or ("compared" not in self.results and self._process.poll() is not None):
            self._thread.join(END_S)
            raise PenstockError(f"the trainer of group {self.task.group!r} failed: {self._last_words()}")

    def end(self) -> None:
        """Ends it, whatever it does."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join(END_S)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        state = message.pop("state")
        if state == "notice":
            self.on_notice(f"{self.task.group}: {message['text']}")
            return
        with self.changed:
            self.state = state
            self.samples = message.get("samples", self.samples)
            self.pid = message.get("pid", self.pid)
            if state in ("trained", "compared", "failed"):
                self.results[state] = message
            self.changed.notify_all()

    def _last_words(self) -> str:
        if "failed" in self.results:
            return str(self.results["failed"]["reason"])
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:]) or f"it ended with code {self._process.returncode} and said nothing"
