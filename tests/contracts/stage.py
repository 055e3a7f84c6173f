"""The promises of every stage, for any input: no sample lost, none twice, none of a lease that another member holds. A
subclass makes its stage, and says which samples it may leave out or repeat.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import ArrayPool, Batch, BatchSpan, Lease
from penstock_consumer.stages.queue import PrefetchQueue, StageChain
from penstock_consumer.stages.stage import Stage, StageContext

SPEC = Spec.of({"x": ("int64", (2,)), "r": ("int64", (None,))})
EPOCH, BATCH = 3, 8

Identity = tuple[int, int, int]
sizes = st.lists(st.integers(1, BATCH), max_size=25)
"""The samples in the batches that arrive."""
flags = st.lists(st.booleans(), min_size=25, max_size=25)


def setting(*, batch_size: int = BATCH, is_ordered: bool = False) -> StageContext:
    """Return a member that reads an epoch of SPEC."""
    return StageContext(SPEC, ArrayPool(4), EPOCH, batch_size, is_ordered)


def made(first: int, count: int, *, epoch: int = EPOCH) -> Batch:
    """Return a batch of samples from ``first`` on of one entry: shard 0, and offset and values are the number."""
    lease = Lease(0, epoch, 0, b"%d-1" % first, count)
    numbers = np.arange(first, first + count, dtype=np.int64)
    lengths = (numbers % 3)[:, None]
    values = {"x": np.repeat(numbers[:, None], 2, axis=1), "r": Ragged(np.repeat(numbers, lengths[:, 0]), lengths)}
    return Batch(values, epoch, [BatchSpan(lease, first, first + count)])


def arrivals(counts: list[int], *, epoch: int = EPOCH) -> list[Batch]:
    """Return batches of these sizes, numbered from 0."""
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return [made(int(start), count, epoch=epoch) for start, count in zip(starts, counts, strict=False)]


def checked(batch: Batch) -> list[Identity]:
    """Return the identities of a batch, after comparing its values with them."""
    identities = list(batch.identities())
    assert len(identities) == batch.size
    if not batch.is_dropped:
        rows = max(batch.rows, batch.size)
        for row in range(rows):
            number = identities[row % batch.size][2]
            assert batch["x"][row].tolist() == [number, number]
            assert batch["r"][row].tolist() == [number] * (number % 3)
        assert len(batch["x"]) == len(batch["r"]) == rows
    return identities


def through(stages: Stage | list[Stage], batches: list[Batch]) -> list[Batch]:
    """Return everything that comes out."""
    queue = PrefetchQueue(1 << 30)
    for batch in batches:
        queue.put(batch)
    queue.end()
    staged = StageChain(queue, stages if isinstance(stages, list) else [stages])
    found: list[Batch] = []
    while not staged.is_over:
        ready = staged.get(0)
        assert ready is not None
        found.append(ready)
    assert staged.get(0) is None
    return found


class StageContract:
    """The promises. Inherit them as ``class TestX(StageContract)``."""

    def stage(self, where: StageContext) -> Stage:
        """Return the stage."""
        raise NotImplementedError

    def test_every_sample_comes_out_once(self) -> None:
        """A sample is yielded or counted as trained on: an epoch closes only if each sample is one of the two, and
        once.
        """

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            found = through(self.stage(setting()), arrivals(counts))
            identities = [identity for batch in found for identity in checked(batch)]
            assert sorted(identities) == [(EPOCH, 0, number) for number in range(sum(counts))]

        holds()

    def test_what_someone_else_holds_now_is_handed_out_by_nobody_here(self) -> None:
        """A member that stood still for a lease would train on what another one was given."""

        @settings(deadline=None)
        @given(sizes, flags)
        def holds(counts: list[int], lost: list[bool]) -> None:
            batches = arrivals(counts)
            leases = [batch.spans[0].lease for batch in batches]
            mine = {n for b, gone in zip(batches, lost, strict=False) if not gone for _, _, n in b.identities()}
            stage, found = self.stage(setting()), []
            for batch in batches:
                while (ready := stage.take()) is not None:
                    found.append(ready)
                stage.put(batch)
            early = {number for batch in found for _, _, number in batch.identities()}
            for lease, gone in zip(leases, lost, strict=False):
                lease.is_lost = gone
            stage.end()
            late = []
            while (ready := stage.take()) is not None:
                if (left := ready.without_lost()) is not None:
                    late += [number for _, _, number in checked(left)]
            assert len(set(late)) == len(late)
            assert set(late) == mine - early

        holds()

    def test_batches_of_another_epoch_are_not_mixed_in(self) -> None:
        """Samples that a dead member left of the last epoch are given out in separate batches."""

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            these, others = arrivals(counts), arrivals(counts, epoch=EPOCH - 1)
            mixed: list[Any] = [batch for pair in zip(these, others, strict=True) for batch in pair]
            found = through(self.stage(setting()), mixed)
            for batch in found:
                assert {span.lease.epoch for span in batch.spans} == {batch.epoch}
            identities = [identity for batch in found for identity in checked(batch)]
            assert sorted(identities) == [(e, 0, n) for e in (EPOCH - 1, EPOCH) for n in range(sum(counts))]

        holds()

    def test_an_entry_under_suspicion_stays_alone(self) -> None:
        """Training died at it before: a training that dies now has died of it alone."""
        batches = arrivals([4, 4, 4, 4])
        batches[2].is_alone = True
        alone = set(batches[2].identities())
        for batch in through(self.stage(setting()), batches):
            assert not alone & set(batch.identities()) or set(batch.identities()) <= alone
