"""Batches of one size, made of smaller ones; and what becomes of the last, which nothing fills up.

After a filter, and where a trainer needs equal shapes. Full batches pass as they are.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock_consumer.stages.batch import Batch, BatchSpan
from penstock_consumer.stages.rows import chosen_spans, dropped, joined
from penstock_consumer.stages.stage import StageContext


class Rebatch:
    """A stage; ``remainder`` is 'keep', 'drop' or 'pad', see `loader.Loader`."""

    def __init__(self, setting: StageContext, remainder: str) -> None:
        self._setting, self._size, self._remainder = setting, setting.batch_size, remainder
        self._parts: list[Batch] = []
        """Fewer than a batch's rows, of one epoch."""
        self._ready: deque[Batch] = deque()

    def put(self, batch: Batch) -> None:
        """Takes a batch of at most the size wanted."""
        if batch.is_dropped:
            self._ready.append(batch)
        elif batch.is_alone:  # whatever else: nothing may be trained on together with it
            self._ready.append(self._fixed(batch))
        else:
            if self._parts and self._parts[0].epoch != batch.epoch:
                self._flush()
            self._parts.append(batch)
            if sum(part.size for part in self._parts) >= self._size:
                self._cut()

    def take(self) -> Batch | None:
        """The next batch that is full."""
        return self._ready.popleft() if self._ready else None

    def end(self) -> None:
        """The rest is what ``remainder`` makes of it."""
        self._flush()

    def starve(self) -> None:
        """Less than a batch is kept."""

    def waiting(self) -> str | None:
        """Less than a batch is nothing to speak of."""
        return None

    def _cut(self) -> None:
        *parts, last = self._parts
        room = self._size - sum(part.size for part in parts)
        head, tail = _slice(last, 0, room), _slice(last, room, last.size)
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
        """Return a batch whose shapes equal all others', also one that lost rows on its way."""
        if self._remainder == "keep":
            return batch
        batch.rows = self._size
        return batch.padded()

    def _joined(self, parts: list[Batch]) -> Batch:
        if len(parts) == 1:
            return parts[0]
        values = {name: joined([part[name] for part in parts], self._setting.pool) for name in parts[0]}
        return Batch(values, parts[0].epoch, [span for part in parts for span in part.spans])


def _slice(batch: Batch, lo: int, hi: int) -> Batch:
    if lo == 0 and hi == batch.size:
        return batch
    spans = chosen_spans(batch.spans, np.arange(lo, hi))
    return Batch({name: value[lo:hi] for name, value in batch.items()}, batch.epoch, spans, batch.position)
