"""What was handed out and is not settled: which batches a checkpoint covers, and how much waits for one. No Redis here.

Batches are kept by their identities alone, so that their memory can be used again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from penstock_consumer.stages.batch import Batch


class Outstanding(NamedTuple):
    """One batch handed out and not settled."""

    batch: Batch
    """Without its arrays."""
    samples: int
    nbytes: int
    """Payload bytes."""


class Amount(NamedTuple):
    """How much was handed out and is not settled."""

    batches: int = 0
    samples: int = 0
    nbytes: int = 0


class Handed:
    """All batches of one loader between handing out and settling; used by its threads.

    A batch is pulled, trained on, then settled. In a plain loop the first two are one; a framework that reads ahead
    pulls long before its step trains.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._pulled: dict[int, Outstanding] = {}
        self._trained: dict[int, Outstanding] = {}
        """In the order of training. Keys are the ids of the spans, which live as long as the value does."""
        self._covered = 0
        """Of the batches trained on, in order, those that a checkpoint covered."""
        self.promised = 0
        """Of them, those whose state was taken: somebody may be saving it."""
        self.batches = self.samples = 0
        """Trained on since the loader was made."""
        self.last: Batch | None = None
        """The last one trained on, without its arrays."""
        self.waiting = Amount()
        """Trained on and not settled."""
        self._changed_s = clock()

    def pull(self, batch: Batch) -> None:
        """A batch was given to a framework."""
        with self._lock:
            self._pulled[id(batch.spans)] = _outstanding(batch)
            self._changed_s = self._clock()

    def train(self, batch: Batch) -> None:
        """A batch is given to a plain loop."""
        with self._lock:
            self._train(_outstanding(batch))

    def arrive(self, batch: Batch) -> bool:
        """A batch that was pulled reached the training step; False if it was handed back or forgotten meanwhile."""
        with self._lock:
            one = self._pulled.pop(id(batch.spans), None)
            if one is not None:
                self._train(one)
            return one is not None

    def _train(self, one: Outstanding) -> None:
        self._trained[id(one.batch.spans)] = one
        self.batches += 1
        self.samples += one.samples
        self.last = one.batch
        self._count(one, 1)

    def drop(self, batch: Batch) -> bool:
        """A batch is to be settled by itself, or handed back; False if it was before."""
        with self._lock:
            pulled = self._pulled.pop(id(batch.spans), None)
            trained = self._trained.pop(id(batch.spans), None)
            if trained is not None:
                self._count(trained, -1)
            return pulled is not None or trained is not None

    def cover(self, batches: int | None) -> list[Batch]:
        """What a checkpoint covers that was taken after so many batches (None: all), in the order of training."""
        with self._lock:
            count = len(self._trained) if batches is None else max(0, batches - self._covered)
            ones = [self._trained.pop(key) for key in list(self._trained)[:count]]
            for one in ones:
                self._count(one, -1)
            self._covered += len(ones)
            return [one.batch for one in ones]

    def trained(self) -> list[Batch]:
        """Trained on and not settled."""
        with self._lock:
            return [one.batch for one in self._trained.values()]

    def forget(self) -> None:
        """Reading goes on elsewhere: nothing of what was handed out is to be settled."""
        with self._lock:
            self._covered += len(self._trained)
            self._pulled.clear()
            self._trained.clear()
            self.waiting, self.last = Amount(), None

    def first(self, besides: Iterable[Batch] = (), *, pulled_only: bool = False) -> Batch | None:
        """In canonical order the first batch that is not settled, or not even trained on."""
        left_out = {id(batch.spans) for batch in besides}
        with self._lock:
            ones = [one.batch for key, one in self._pulled.items() if key not in left_out]
            ones += [] if pulled_only else [one.batch for one in self._trained.values()]
        return min(ones, key=canonical, default=None)

    @property
    def is_being_saved(self) -> bool:
        """Whether a state was taken of batches that no checkpoint covers yet."""
        return self.promised > self._covered

    @property
    def quiet_s(self) -> float:
        """For how long nothing was pulled, trained on or settled."""
        return self._clock() - self._changed_s

    def _count(self, one: Outstanding, sign: int) -> None:
        batches, samples, nbytes = self.waiting
        self.waiting = Amount(batches + sign, samples + sign * one.samples, nbytes + sign * one.nbytes)
        self._changed_s = self._clock()


def canonical(batch: Batch) -> tuple[int, int]:
    """Where a batch of an ordered group lies."""
    return batch.epoch, batch.position


def _outstanding(batch: Batch) -> Outstanding:
    return Outstanding(Batch({}, batch.epoch, batch.spans, batch.position), batch.size, batch.nbytes)
