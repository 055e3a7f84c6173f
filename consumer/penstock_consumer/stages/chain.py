"""Connect stages between the reader's queue and the training loop, which pulls batches through them.

One thread pulls. It waits for the reader only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.filter import Filter
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_consumer.stages.rebatch import Rebatch
from penstock_consumer.stages.stage import Stage, StageContext, StageMaker

STARVED_S = 2.0
"""After this time without a batch, a stage gives what it holds. Writers may be waiting for the quota that it takes."""


def stages_of(setting: StageContext, makers: Sequence[StageMaker], remainder: str) -> list[Stage]:
    """Return the stages of one epoch. In shared reading the last stage makes full batches of smaller ones."""
    stages = [make(setting) for make in makers]
    is_refilled = not setting.is_ordered and (remainder != "keep" or any(isinstance(one, Filter) for one in stages))
    return [*stages, Rebatch(setting, remainder)] if is_refilled else stages


class StageChain:
    """The training loop's end of a prefetch queue and its stages. One thread uses it; any thread may call `stop`."""

    def __init__(
        self, inner: PrefetchQueue, stages: Sequence[Stage], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.inner = inner
        self._stages, self._clock = stages, clock
        self._ended = 0
        """The number of stages, from the first on, that know that nothing more comes."""
        self._next: Batch | None = None
        self._empty_s: float | None = None
        """The time of the first `get` that found nothing. A long step of the trainer does not count."""

    def get(self, timeout_s: float) -> Batch | None:
        """Return the next batch, or None at the timeout or if `is_over`. Raises the reader's error."""
        batch, self._next = self._next, None
        if batch is not None:
            return batch
        if not self._stages and self.inner.holds_batches:
            self._empty_s = None
            return self.inner.get(0)
        last, asked_s = len(self._stages) - 1, self._clock()
        batch = self._pull(last, asked_s + timeout_s)
        if batch is not None:
            return batch
        if self._empty_s is None:
            self._empty_s = asked_s
        if self._clock() - self._empty_s < STARVED_S:
            return None
        for stage in self._stages:
            stage.starve()
        return self._pull(last, None)

    @property
    def holds_batches(self) -> bool:
        """Return whether `get` would return one at once."""
        self._peek()
        return self._next is not None

    @property
    def is_over(self) -> bool:
        """Return whether every batch was taken and no more will come."""
        self._peek()
        return self._next is None and self._is_over(len(self._stages) - 1)

    def waiting(self) -> str | None:
        """Return what a stage waits for, if it holds back samples that have arrived."""
        return next((said for stage in self._stages if (said := stage.waiting()) is not None), None)

    def stop(self) -> None:
        """Tell the reader's thread to end. What the stages hold is returned with all other leases."""
        self.inner.stop()

    def _peek(self) -> None:
        if self._next is None:
            self._next = self._pull(len(self._stages) - 1, None)

    def _pull(self, number: int, until: float | None) -> Batch | None:
        """Return a stage's next batch, or the reader's for number -1. Wait for it until ``until``; None never waits."""
        if number < 0:
            return self._arrived(until)
        stage = self._stages[number]
        while True:
            if (batch := stage.take()) is not None:
                return batch
            if (below := self._pull(number - 1, until)) is not None:
                stage.put(below)
            elif self._ended == number and self._is_over(number - 1):
                self._ended += 1
                stage.end()
            else:
                return None

    def _is_over(self, number: int) -> bool:
        """Return whether a stage will give no more batches. Call it after `_pull` gave nothing."""
        return self.inner.is_over if number < 0 else self._ended > number

    def _arrived(self, until: float | None) -> Batch | None:
        if until is None and not self.inner.holds_batches:
            return None
        batch = self.inner.get(0 if until is None else max(0.0, until - self._clock()))
        if batch is not None:
            self._empty_s = None
        return batch
