"""One trainer process of the demo: reads its group's epochs, trains, says how far it is as JSON lines on stdout.

Started by ``trainers``; ends when its stdin does, so that it never outlives the demo.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from penstock.demo.models import BATCH, Arrays, Model, build
from penstock_common.errors import PenstockError
from penstock_consumer.loader import Loader
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.open import open_source
from penstock_producer.sources.seeding import sample_rng

TRANSFORM = "penstock.demo.augment:augment"
STREAM = "digits"
COMPARE_S = 6.0
"""How long the comparison trains in-process: enough for a steady rate."""
TELL_S = 0.1


class Task(BaseModel):
    """What a trainer is to do: the first line of its stdin, as JSON, because every user reads command lines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(repr=False)
    group: str
    model: str
    epochs: int
    samples: int
    """Per epoch."""
    train: Path
    held_out: Path
    seed: int = 0


@dataclass(slots=True)
class _Clock:
    """Counts steps from the end of the first one, in which a framework compiles."""

    began: float = 0.0
    waited: float = 0.0
    samples: int = 0


def main(argument: str) -> int:
    """Train, evaluate, and on the word ``compare`` train again in-process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the demo's to handle
    task = Task.model_validate_json(argument)
    go = threading.Event()
    threading.Thread(target=_listen, args=(go,), daemon=True).start()
    model = build(task.model, task.epochs * -(-task.samples // BATCH), task.seed)
    _tell(state="ready", pid=os.getpid())
    try:
        _tell(state="trained", **_train(task, model))
    except PenstockError as error:
        _tell(state="failed", reason=str(error))
        return 1
    go.wait()
    _tell(state="compared", **_compare(task, model))
    return 0


def _listen(go: threading.Event) -> None:
    """``compare`` starts the comparison; the end of stdin is the end of the demo, however it came."""
    for _ in sys.stdin:
        go.set()
    os._exit(1)


def _tell(**message: Any) -> None:
    # sys.__stdout__: frameworks print to sys.stdout now and then
    assert sys.__stdout__ is not None
    sys.__stdout__.write(json.dumps(message) + "\n")
    sys.__stdout__.flush()


def _train(task: Task, model: Model) -> dict[str, Any]:
    clock, told = _Clock(), [0.0]
    with Loader(
        STREAM, group=task.group, batch_size=BATCH, url=task.url, member=task.group,
        notify=lambda text: _tell(state="notice", text=text),
    ) as loader:  # fmt: skip

        def on_step() -> None:
            now = time.monotonic()
            if not clock.began:
                before = loader.stats(total=True)
                clock.began, clock.waited, clock.samples = now, before.waited_s, before.samples
            if now - told[0] > TELL_S:
                told[0] = now
                _tell(state="training", samples=loader.stats(total=True).samples)

        model.train(loader, task.epochs, on_step)
        seconds = time.monotonic() - clock.began
        stats = loader.stats(total=True)
        result = {
            "samples": stats.samples,
            "rate": (stats.samples - clock.samples) / max(seconds, 1e-9),
            "waited": (stats.waited_s - clock.waited) / max(seconds, 1e-9),
        }
    images, labels = _held_out(task)
    return {**result, "accuracy": model.accuracy(images, labels)}


def _held_out(task: Task) -> Arrays:
    source = open_source(ImagesConfig(path=str(task.held_out), mode="gray", transform="penstock.demo.augment:plain"))
    assert source.unit == "sample"
    return _stacked([dict(source.read(index, np.random.default_rng())) for index in range(len(source))])


def _compare(task: Task, model: Model) -> dict[str, float]:
    """The same model, source and transform, without Penstock: this process makes every batch itself."""
    source = open_source(ImagesConfig(path=str(task.train), mode="gray", transform=TRANSFORM))
    assert source.unit == "sample"
    clock, making = _Clock(), [0.0]

    def batches() -> Iterator[Arrays]:
        end = time.monotonic() + COMPARE_S
        order = np.random.default_rng(task.seed).permutation(len(source)).tolist()
        for start in range(0, len(order), BATCH):
            began = time.monotonic()
            if began > end:
                return
            made = [dict(source.read(i, sample_rng(task.seed, 0, 0, i))) for i in order[start : start + BATCH]]
            making[0] += time.monotonic() - began
            counted[0] += len(made)
            yield _stacked(made)

    counted = [0]

    def on_step() -> None:
        if not clock.began:
            clock.began, clock.waited, clock.samples = time.monotonic(), making[0], counted[0]

    model.train_on(batches(), on_step)
    seconds = max(time.monotonic() - clock.began, 1e-9)
    return {"rate": (counted[0] - clock.samples) / seconds, "waited": (making[0] - clock.waited) / seconds}


def _stacked(samples: list[dict[str, Any]]) -> Arrays:
    return np.stack([s["x"] for s in samples]), np.array([s["y"] for s in samples])


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        code = main(sys.stdin.readline())
    sys.stdout.flush()
    os._exit(code)  # TensorFlow's threads have nothing left to say
