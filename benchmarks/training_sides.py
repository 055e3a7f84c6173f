"""The processes of ``benchmarks.training``: one round of one feed, in a new process.

Every trainer trains the same model for the same number of steps on the same samples (``digits``), with waits counted.
It is tested on digits that no training uses. Batches go to the device ahead of the step, even if the device is the CPU.
``device='cuda'`` was not run, because no GPU was available. The same code with a small ResNet on the CPU is tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.command import Workers
from benchmarks.cpu import tree_seconds
from benchmarks.digits import WARM_UP, Digits, digits, warm_up
from benchmarks.malloc import keep_freed
from benchmarks.trainers import QUIET, Trainers, expect_more, in_clean_process, own_seconds, produce
from penstock import EmbeddedServer, Loader, Writer

Look = Callable[[], dict[str, float]]
"""A function that returns the CPU seconds so far, by role."""
STREAM = "digits"
SYNTHETIC = 16
"""The number of different batches of the synthetic feed."""


@dataclass(frozen=True)
class Lesson:
    """The parameters of one round of one feed."""

    feed: str
    """``synthetic``, ``penstock`` or ``torch``."""
    workers: int
    """The worker processes of each trainer, for torch."""
    trainers: int
    batch: int
    device: str = "cpu"
    model: str = "cnn"
    """A name in ``MODELS``."""


@dataclass(frozen=True)
class Trained:
    """The result of one trainer."""

    seconds: float
    waited_s: float
    """The time that it waited for batches."""
    steps: int


@dataclass(frozen=True)
class Round:
    """The result of a round."""

    seconds: float
    """The time until the last trainer finished."""
    steps: int
    """The steps of all trainers."""
    stalled: float
    """The share of their time that they waited for batches."""
    right: float
    """The share of held-out digits that they classify correctly."""
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Return the steps a second of all trainers."""
        return self.steps / self.seconds

    @property
    def cores(self) -> float:
        """Return the cores that it kept busy.

        They are fewer than exist if it waited, or if other programs used them.
        """
        return sum(self.cpu_s.values()) / self.seconds


def run_round(lesson: Lesson) -> Round:
    """Run one round. Raises RuntimeError if it fails."""
    found: Round = in_clean_process({"penstock": _penstock}.get(lesson.feed, _alone), lesson)
    return found


# --- a trainer --------------------------------------------------------------------------------------------------------


class Pupil:
    """A model and its training, in one process on one core. The other cores are the feed's."""

    def __init__(self, lesson: Lesson) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch, self._device = torch, lesson.device
        self.model: Any = MODELS[lesson.model]().to(lesson.device)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def train(self, batches: Any) -> Trained:
        """Train for one pass."""
        self.model.train()
        waited, steps = 0.0, 0
        came = iter(batches)
        began = time.perf_counter()
        while True:
            asked = time.perf_counter()
            batch = next(came, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            self._step(batch["x"], batch["y"])
            steps += 1
        if self._device == "cuda":
            self._torch.cuda.synchronize()
        return Trained(time.perf_counter() - began, waited, steps)

    def _step(self, x: Any, y: Any) -> None:
        x, y = (value.to(self._device, non_blocking=True) for value in (x, y))
        loss = self._torch.nn.functional.cross_entropy(self.model(x.float() / 255), y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def examine(self, data: Digits) -> float:
        """Return the share that it classifies correctly."""
        x, y = (self._torch.from_numpy(array).to(self._device) for array in data.held_out())
        self.model.eval()
        with self._torch.no_grad():
            return float((self.model(x.float() / 255).argmax(1) == y).float().mean())


def _cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(1024, 10),
    )  # fmt: skip


def _resnet50() -> Any:
    from benchmarks.residual import resnet

    return resnet()


def _small_resnet() -> Any:
    from benchmarks.residual import resnet

    return resnet((1, 1), width=8)


MODELS = {"cnn": _cnn, "resnet50": _resnet50, "small resnet": _small_resnet}
"""Name -> the model of ten classes. A ResNet needs three channels."""


def _course(lesson: Lesson, passes: Iterator[Any]) -> Iterator[Any]:
    pupil = Pupil(lesson)
    pupil.train(next(passes))
    yield None
    yield pupil.train(next(passes))
    yield pupil.examine(digits())


def _round(trainers: Trainers, began: float, before: dict[str, float], look: Look) -> Round:
    at, trained = trainers.end()
    cpu_s = {role: seconds - before[role] for role, seconds in look().items()}
    trainers.begin()
    _, right = trainers.end()
    stalled = sum(one.waited_s for one in trained) / sum(one.seconds for one in trained)
    return Round(at - began, sum(one.steps for one in trained), stalled, float(np.mean(right)), cpu_s)


# --- feeds without a server -------------------------------------------------------------------------------------------


def _alone(lesson: Lesson) -> Round:
    feed = _synthetic if lesson.feed == "synthetic" else _data_loader
    trainers = Trainers(lesson.trainers, lambda number: _course(lesson, feed(lesson, number)))
    trainers.begin()
    trainers.end()

    def look() -> dict[str, float]:
        return {"trainers and workers": tree_seconds(trainers.pids)}

    before = look()
    found = _round(trainers, trainers.begin(), before, look)
    trainers.close()
    return found


def _synthetic(lesson: Lesson, number: int) -> Iterator[Any]:
    """Yield batches that are in memory, on the device."""
    import torch

    data, size = digits(), lesson.batch
    made = []
    for at in range(SYNTHETIC):
        samples = [data.quick((at * size + row) * 7 + number) for row in range(size)]
        x, y = np.stack([one["x"] for one in samples]), np.array([one["y"] for one in samples])
        made.append({"x": torch.from_numpy(x).to(lesson.device), "y": torch.from_numpy(y).to(lesson.device)})
    for samples_of in (WARM_UP, len(data)):
        yield (made[at % SYNTHETIC] for at in range(samples_of // size))


def _data_loader(lesson: Lesson, number: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    from benchmarks.loading_sides import Order

    order, whole = Order(WARM_UP, lesson.batch, seed=number), digits()
    loader: Any = DataLoader(
        whole, batch_sampler=order, num_workers=lesson.workers, persistent_workers=lesson.workers > 0,
        pin_memory=lesson.device == "cuda", worker_init_fn=keep_freed,
    )  # fmt: skip
    yield loader
    order.length = len(whole)
    yield loader


# --- Penstock ---------------------------------------------------------------------------------------------------------


def _penstock(lesson: Lesson) -> Round:
    with EmbeddedServer() as server:
        sample = warm_up().quick(0)
        with Writer(STREAM, url=server.url, spec={"x": ("uint8", sample["x"].shape), "y": ("int64", ())}, **QUIET):
            pass
        workers = Workers(server.url, lesson.workers)
        try:
            return _fed(lesson, server, workers)
        finally:
            workers.stop()


def _fed(lesson: Lesson, server: EmbeddedServer, workers: Workers) -> Round:
    trainers = Trainers(lesson.trainers, lambda number: _course(lesson, _groups(lesson, server.url, number)))
    roles = {"server": [server.pid], "workers": workers.pids, "trainers": trainers.pids}
    trainers.begin()
    produce(server.url, STREAM, "benchmarks.digits:warm_up", 1)
    trainers.end()
    expect_more(server.url, STREAM)

    def look() -> dict[str, float]:
        return {role: tree_seconds(pids) for role, pids in roles.items()} | {"dispatcher": own_seconds()}

    before = look()
    began = trainers.begin()
    produce(server.url, STREAM, "benchmarks.digits:digits", 1)
    found = _round(trainers, began, before, look)
    trainers.close()
    return found


def _groups(lesson: Lesson, url: str, number: int) -> Iterator[Any]:
    from penstock.torch import dataset, prefetch_to_device

    with Loader(STREAM, group=f"g{number}", batch_size=lesson.batch, url=url, **QUIET) as loader:
        batches = prefetch_to_device(dataset(loader), lesson.device)
        yield batches
        yield batches
