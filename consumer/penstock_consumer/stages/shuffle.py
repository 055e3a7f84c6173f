"""Shuffle samples in a window, which draws each batch at random from the samples that it holds.

In shared order samples are shuffled in this way. The same arrivals and seed give the same batches. Canonical order
needs no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.printable import readable_bytes
from penstock_common.wire.dtypes import numpy_dtype
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import ArrayPool, Assembler, Batch, row_bytes
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_consumer.stages.rows import gathered, rolled, unrolled
from penstock_consumer.stages.stage import Stage, StageContext

FIRST_SLOTS = 1024
"""The first number of slots of a window in bytes whose samples are ragged. The number doubles when all are in use."""


class SampleSlots:
    """The samples of a window, each in a slot. The number of slots doubles when all are in use."""

    def __init__(self, spec: Spec, pool: ArrayPool, slots: int) -> None:
        self._spec, self._pool = spec, pool
        # the system gives memory at its first use, so slots for a full window cost nothing before it fills
        self._fixed: dict[str, NDArray[Any]] = {
            tensor.name: pool.array((slots, *(dim or 0 for dim in tensor.shape)), numpy_dtype(tensor.dtype))
            for tensor in spec
            if not tensor.is_ragged
        }
        self._ragged: dict[str, NDArray[np.object_]] = {
            tensor.name: np.empty(slots, dtype=object) for tensor in spec if tensor.is_ragged
        }
        self._leases = np.empty(slots, dtype=object)
        self._offsets = np.empty(slots, dtype=np.int64)
        self._slots = np.arange(slots, dtype=np.int64)
        """The slots: the first ``count`` are in use, and the others are free."""
        self.count = self.nbytes = 0
        """The samples in the window, and their payload bytes."""
        self._row_bytes = row_bytes(spec)

    def put(self, batch: Batch) -> None:
        """Copy the samples of a batch into free slots."""
        count = batch.size
        while self.count + count > len(self._slots):
            self._grow()
        slots = self._slots[self.count : self.count + count]
        for name, store in self._fixed.items():
            store[slots] = batch[name]
        for name, kept in self._ragged.items():
            kept[slots] = _singles(batch[name])
        leases, self._offsets[slots] = unrolled(batch.spans)
        self._leases[slots] = leases
        self.count += count
        self.nbytes += sum(int(batch[name].nbytes) for name in self._ragged) + count * self._row_bytes

    def draw(self, rng: np.random.Generator, samples: int) -> NDArray[np.int64]:
        """Return the slots of some samples, without those whose entry another member holds now. Free all drawn slots.

        The samples stay where they are until the next `put`.
        """
        found: list[int] = []
        while self.count and len(found) < samples:
            size = min(samples - len(found), self.count)
            positions = rng.choice(self.count, size=size, replace=False)
            slots = self._slots[positions].copy()
            self._free(positions)
            found += [slot for slot in slots.tolist() if not self._leases[slot].is_lost]
            self.nbytes -= size * self._row_bytes + self._ragged_bytes(slots)
        return np.array(found, dtype=np.int64)

    def _free(self, positions: NDArray[np.int64]) -> None:
        """Free the slots at the drawn positions. The last slots in use move to these positions."""
        left = self.count - len(positions)
        drawn = self._slots[positions].copy()
        last = np.arange(left, self.count)
        stay = self._slots[last[~np.isin(last, positions)]].copy()
        self._slots[positions[positions < left]] = stay
        self._slots[left : self.count] = drawn
        self.count = left

    def _ragged_bytes(self, slots: NDArray[np.int64]) -> int:
        return sum(kept[slot].nbytes for kept in self._ragged.values() for slot in slots.tolist())

    def batch(self, slots: NDArray[np.int64], epoch: int) -> Batch:
        """Return a batch of the samples in drawn slots."""
        values: dict[str, Any] = {}
        for tensor in self._spec:
            if tensor.is_ragged:
                parts = self._ragged[tensor.name][slots].tolist()
                values[tensor.name] = Ragged.concatenate(parts)
                self._ragged[tensor.name][slots] = None
            else:
                values[tensor.name] = gathered(self._fixed[tensor.name], slots, self._pool)
        spans = rolled(self._leases[slots].tolist(), self._offsets[slots].tolist())
        self._leases[slots] = None
        return Batch(values, epoch, spans)

    def _grow(self) -> None:
        more = len(self._slots)
        self._slots = np.concatenate([self._slots, np.arange(more, 2 * more, dtype=np.int64)])
        self._leases = np.concatenate([self._leases, np.empty(more, dtype=object)])
        self._offsets = np.concatenate([self._offsets, np.empty(more, dtype=np.int64)])
        for store in (self._fixed, self._ragged):
            for name, values in store.items():
                store[name] = np.concatenate([values, np.empty_like(values)])


class ShuffleWindow(Stage):
    """A stage that gives nothing before it is full. Its memory is that of the window and one batch.

    A sample is copied once into its slot, which frees the batch that it came in. It is copied once more into the batch
    that it leaves in.
    """

    def __init__(self, setting: StageContext, seed: int, *, samples: int | None, nbytes: int | None) -> None:
        """Make a window that is full with ``samples`` samples, or with ``nbytes`` bytes of payload."""
        super().__init__(setting)
        self._batch_size = setting.batch_size
        key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, setting.epoch], dtype=np.uint64)
        self._rng = np.random.Generator(np.random.Philox(key=key))
        self._limit, self._limit_bytes = samples, nbytes
        is_flexible = any(tensor.is_ragged for tensor in setting.spec)
        if samples is None and not is_flexible:
            assert nbytes is not None
            self._limit, self._limit_bytes = max(1, nbytes // max(1, row_bytes(setting.spec))), None
        slots = FIRST_SLOTS if self._limit is None else self._limit + self._batch_size
        self._slots = SampleSlots(setting.spec, setting.pool, slots)
        self._is_ended = self._is_starved = False

    def put(self, batch: Batch) -> None:
        """Take a batch in. A batch of another epoch, a dropped one, and one to be given alone pass unshuffled."""
        self._is_starved = False
        if batch.epoch != self._setting.epoch or batch.is_alone or batch.is_dropped:
            self._ready.append(batch)
        else:
            self._slots.put(batch)

    def take(self) -> Batch | None:
        """Return the next batch once the window is full."""
        if self._ready:
            return super().take()
        if not (self._is_ended or self._is_full() or (self._is_starved and self._slots.count >= self._batch_size)):
            return None
        slots = self._slots.draw(self._rng, self._batch_size)
        return self._slots.batch(slots, self._setting.epoch) if len(slots) else None

    def end(self) -> None:
        """Give all that is left from now on."""
        self._is_ended = True

    def starve(self) -> None:
        """Give full batches from a window that is not full, until the next `put`."""
        self._is_starved = True

    def waiting(self) -> str | None:
        """Return how full it is, in words."""
        if self._is_ended or self._is_full() or not self._slots.count:
            return None
        if self._limit is not None:
            return f"the shuffle window to fill: it holds {self._slots.count} of {self._limit} samples"
        held, limit = readable_bytes(self._slots.nbytes), readable_bytes(self._limit_bytes or 0)
        return f"the shuffle window to fill: it holds {held} of {limit}"

    def _is_full(self) -> bool:
        return (self._limit is not None and self._slots.count >= self._limit) or (
            self._limit_bytes is not None and self._slots.nbytes >= self._limit_bytes
        )


def _singles(value: Ragged) -> NDArray[np.object_]:
    """Return each sample of a ragged tensor as a copy of its own, so that it keeps no other sample alive."""
    singles = np.empty(len(value), dtype=object)
    parts: Sequence[Ragged] = [value.take([row]) for row in range(len(value))]
    singles[:] = parts
    return singles


@dataclass(frozen=True, slots=True)
class ShuffleOptions:
    """The options of one shuffled pass."""

    seed: int
    number: int
    """The number of the pass."""
    samples: int | None
    """The size of the window; None means as many samples as ``nbytes`` hold."""
    nbytes: int

    def blocks(self, count: int) -> NDArray[np.int64]:
        """Return the order in which this pass reads ``count`` blocks."""
        keys = np.random.Philox(self._seeds()[0]).random_raw(count)
        return np.argsort(keys, kind="stable")

    def window(self, setting: StageContext) -> ShuffleWindow:
        """Return the window that this pass's samples go through."""
        nbytes = self.nbytes if self.samples is None else None
        return ShuffleWindow(setting, self._seeds()[1], samples=self.samples, nbytes=nbytes)

    def _seeds(self) -> list[int]:
        state = np.random.SeedSequence([self.seed, self.number]).generate_state(2, np.uint64)
        return [int(word) for word in state]


class QueueFeeder:
    """A feeder that moves batches from the assembler through a stage into the queue."""

    def __init__(self, assembler: Assembler, queue: PrefetchQueue, stage: Stage) -> None:
        self.assembler = assembler
        """The batches to be filled with samples."""
        self._queue, self._stage = queue, stage

    def drain(self) -> None:
        """Pass on every complete batch."""
        while (batch := self.assembler.take()) is not None:
            self._stage.put(batch)
            self._give()

    def end(self) -> None:
        """Pass on all that is left."""
        self.assembler.flush()
        self.drain()
        self._stage.end()
        self._give()

    def _give(self) -> None:
        while (batch := self._stage.take()) is not None:
            self._queue.put(batch)
