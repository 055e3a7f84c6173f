"""The processes of ``benchmarks.loading``: one round of one side, in a new process.

Every side makes the same samples with the same code (``photographs``), in batches of the same size, and ends with torch
tensors. Before the clock starts, each process has done some of the work. So imports, starts and first connections are
not timed, and file caches are warm. The stream has also carried its budget a few times, as in a long run, so that
memory for payloads exists in the server or in segments. ``tax`` measures the tax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.command import Workers
from benchmarks.cpu import tree_seconds
from benchmarks.malloc import keep_freed
from benchmarks.photographs import SIDE, photographs, warm_up
from benchmarks.trainers import QUIET, Trainers, expect_more, in_clean_process, own_seconds, produce
from penstock import EmbeddedServer, Loader, Writer

STREAM = "photographs"
BATCH = 64
SPEC = {"x": ("uint8", (SIDE, SIDE, 3)), "y": ("int64", ())}
BUDGET_BYTES, EARLIER = 512 << 20, 12
"""The budget of the stream, and the epochs of ready-made samples that it carries before the clock starts. A process
keeps a segment mapped from the second time that it writes to it."""


@dataclass(frozen=True)
class Job:
    """The parameters of one round of one side."""

    side: str
    """``penstock``, ``torch`` with its defaults, ``torch, tuned``, with `keep_freed` in its workers as in Penstock's,
    or ``tf.data``.
    """
    workers: int
    """The worker processes of each trainer, for torch. For tf.data, its parallel calls."""
    trainers: int
    payload: str = "inline"
    epochs: int = 1
    """The timed epochs, one after another."""


@dataclass(frozen=True)
class Round:
    """The result of a round."""

    seconds: float
    samples: int
    """The samples of all trainers."""
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Role -> CPU seconds of its processes."""

    @property
    def rate(self) -> float:
        """Return the samples a second."""
        return self.samples / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Return the CPU milliseconds of all processes, for each sample."""
        return 1000 * sum(self.cpu_s.values()) / self.samples

    @property
    def cores(self) -> float:
        """Return the cores that it kept busy.

        They are fewer than exist if it waited, or if other programs used them.
        """
        return sum(self.cpu_s.values()) / self.seconds


def run_round(job: Job) -> Round:
    """Run one round. Raises RuntimeError if it fails."""
    side = {"penstock": _penstock, "tf.data": _tfdata}.get(job.side, _torch)
    found: Round = in_clean_process(side, job)
    return found


def _count(passes: Iterator[Any], epochs: int) -> int:
    return sum(len(batch["x"]) for _ in range(epochs) for batch in next(passes))


# --- torch ------------------------------------------------------------------------------------------------------------


class Order:
    """Batches of positions: of the first few, until `length` sets another number."""

    def __init__(self, length: int, batch: int = BATCH, seed: int = 1) -> None:
        self.length, self._batch, self._seed = length, batch, seed

    def __iter__(self) -> Iterator[list[int]]:
        places = np.random.default_rng(self._seed).permutation(self.length).tolist()
        return iter([places[at : at + self._batch] for at in range(0, len(places), self._batch)])


def _torch(job: Job) -> Round:
    """Run torch. Every trainer has a separate DataLoader with separate worker processes."""
    from torch.utils.data import DataLoader

    def passes() -> Iterator[Any]:
        whole, order = photographs(), Order(len(warm_up()))
        loader: Any = DataLoader(
            whole, batch_sampler=order, num_workers=job.workers, persistent_workers=True,
            worker_init_fn=keep_freed if job.side == "torch, tuned" else None,
        )  # fmt: skip
        yield loader
        order.length = len(whole)
        while True:
            yield loader

    return _alone(job, passes)


def _alone(job: Job, passes: Callable[[], Iterator[Any]]) -> Round:
    """Run trainers that share nothing: a pass over the first few samples, and then the timed ones."""

    def course(_: int) -> Iterator[int]:
        mine = passes()
        for epochs in (1, job.epochs):
            yield _count(mine, epochs)

    trainers = Trainers(job.trainers, course)
    trainers.begin()
    trainers.end()
    before = tree_seconds(trainers.pids)
    began = trainers.begin()
    at, samples = trainers.end()
    found = Round(at - began, sum(samples), {"trainers and workers": tree_seconds(trainers.pids) - before})
    trainers.close()
    return found


# --- tf.data ----------------------------------------------------------------------------------------------------------


def _tfdata(job: Job) -> Round:
    """Run tf.data with the trick for samples of Python: a generator over indices, and parallel calls behind it."""

    def passes() -> Iterator[Any]:
        import tensorflow as tf
        import torch

        whole = photographs()

        def sample(index: Any) -> tuple[Any, Any]:
            found = whole[int(index)]
            return found["x"], np.int64(found["y"])

        def made(index: Any) -> dict[str, Any]:
            x, y = tf.numpy_function(sample, [index], [tf.uint8, tf.int64])
            return {"x": tf.ensure_shape(x, (SIDE, SIDE, 3)), "y": tf.ensure_shape(y, ())}

        def over(length: int) -> Iterator[Any]:
            places = np.random.default_rng(1).permutation(length)
            indices = tf.data.Dataset.from_generator(lambda: places, output_signature=tf.TensorSpec((), tf.int64))
            samples = indices.map(made, num_parallel_calls=job.workers, deterministic=False)
            for batch in samples.batch(BATCH).prefetch(tf.data.AUTOTUNE):
                capsules = {name: tf.experimental.dlpack.to_dlpack(tensor) for name, tensor in batch.items()}
                yield {name: torch.from_dlpack(capsule) for name, capsule in capsules.items()}

        yield over(len(warm_up()))
        while True:
            yield over(len(whole))

    return _alone(job, passes)


# --- Penstock ---------------------------------------------------------------------------------------------------------


def _penstock(job: Job) -> Round:
    """Run Penstock: one server, one fleet, one stream, a group for each trainer.

    The epoch is planned and queued on the clock.
    """
    with EmbeddedServer() as server:
        with Writer(STREAM, url=server.url, spec=SPEC, payload=job.payload, budget_bytes=BUDGET_BYTES, **QUIET):
            pass
        workers = Workers(server.url, job.workers)
        try:
            return _fed(job, server, workers)
        finally:
            workers.stop()


def _fed(job: Job, server: EmbeddedServer, workers: Workers) -> Round:
    def course(number: int) -> Iterator[int]:
        from torch.utils.data import DataLoader

        from penstock.torch import dataset

        with Loader(STREAM, group=f"g{number}", batch_size=BATCH, url=server.url, **QUIET) as loader:
            batches: Any = DataLoader(dataset(loader), batch_size=None)
            for epochs in (1, EARLIER, job.epochs):
                yield _count(iter([batches] * epochs), epochs)

    trainers = Trainers(job.trainers, course)
    roles = {"server": [server.pid], "workers": workers.pids, "trainers": trainers.pids}
    for dataset_name, epochs in (("warm_up", 1), ("ready", EARLIER)):
        trainers.begin()
        produce(server.url, STREAM, f"benchmarks.photographs:{dataset_name}", epochs)
        trainers.end()
        expect_more(server.url, STREAM)
    before = {role: tree_seconds(pids) for role, pids in roles.items()} | {"dispatcher": own_seconds()}
    began = trainers.begin()
    produce(server.url, STREAM, "benchmarks.photographs:photographs", job.epochs)
    at, samples = trainers.end()
    after = {role: tree_seconds(pids) for role, pids in roles.items()} | {"dispatcher": own_seconds()}
    trainers.close()
    return Round(at - began, sum(samples), {role: after[role] - before[role] for role in after})
