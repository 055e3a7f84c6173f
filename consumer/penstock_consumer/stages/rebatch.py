"""Make batches of one size from smaller ones, and treat the last one, which is not full.

This follows a filter, or serves a trainer that needs equal shapes. Full batches pass unchanged.
"""

from __future__ import annotations

import numpy as np

from penstock_consumer.stages.batch import Batch, BatchSpan
from penstock_consumer.stages.rows import chosen_spans, dropped, joined
from penstock_consumer.stages.stage import Stage, StageContext


class Rebatch(Stage):
    """A stage that makes full batches. ``remainder`` is 'keep', 'drop' or 'pad', see `loader.Loader`.

    It holds back less than a batch, which is not worth a notice.
    """

    def __init__(self, setting: StageContext, remainder: str) -> None:
        super().__init__(setting)
        self._size, self._remainder = setting.batch_size, remainder
        self._parts: list[Batch] = []
        """Fewer rows than a batch has, all of one epoch."""

    def put(self, batch: Batch) -> None:
        """Take a batch that is no larger than the size wanted."""
        if batch.is_dropped:
            self._ready.append(batch)
        elif batch.is_alone:  # no other sample may be in its training step
            self._ready.append(self._fixed(batch))
        else:
            if self._parts and self._parts[0].epoch != batch.epoch:
                self._flush()
            self._parts.append(batch)
            if sum(part.size for part in self._parts) >= self._size:
                self._cut()

    def end(self) -> None:
        """Treat the remaining rows as ``remainder`` says."""
        self._flush()

    def _cut(self) -> None:
        *parts, last = self._parts
        missing = self._size - sum(part.size for part in parts)
        head, tail = _slice(last, 0, missing), _slice(last, missing, last.size)
        self._ready.append(self._fixed(self._joined([*parts, head])))
        self._parts = [tail] if tail.size else []

    def _flush(self) -> None:
        if not self._parts:
            return
        spans: list[BatchSpan] = [span for part in self._parts for span in part.spans]
        if self._remainder == "drop":
            self._ready.append(dropped(self._parts[0], spans))
        else:
            self._ready.append(self._fixed(self._joined(self._parts)))
        self._parts = []

    def _fixed(self, batch: Batch) -> Batch:
        """Return a batch with the same shapes as all others, even if it lost rows on its way."""
        if self._remainder == "keep":
            return batch
        return Batch(
            batch.items(), batch.epoch, batch.spans, batch.position, rows=self._size, is_alone=batch.is_alone
        ).filled_up()

    def _joined(self, parts: list[Batch]) -> Batch:
        values = {name: joined([part[name] for part in parts], self._setting.pool) for name in parts[0]}
        return Batch(values, parts[0].epoch, [span for part in parts for span in part.spans])


def _slice(batch: Batch, lo: int, hi: int) -> Batch:
    if lo == 0 and hi == batch.size:
        return batch
    spans = chosen_spans(batch.spans, np.arange(lo, hi))
    return Batch({name: value[lo:hi] for name, value in batch.items()}, batch.epoch, spans, batch.position)
