"""The assembler: however blocks are cut, and whatever holes they have, batches hold every wanted row once, in order."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.stream.groups.ledger import runs
from penstock_common.wire.block import Column
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.read.leases import Leases, plan_acknowledgement
from penstock_consumer.stages.batch import UNKNOWN, ArrayPool, Assembler, Batch, BatchSpan, Lease

SPEC = Spec.of({"x": ("int64", (2,)), "r": ("int64", (None,))})


def place(assembler: Assembler, numbers: list[int], spans: list[BatchSpan]) -> None:
    """Receive a whole entry in place, as the reader does."""
    x = np.repeat(np.array(numbers, dtype=np.int64)[:, None], 2, axis=1)
    done = 0
    for piece in assembler.places("x", len(numbers)):
        rows = np.frombuffer(piece, dtype=np.int64).reshape(-1, 2)
        rows[...] = x[done : done + len(rows)]
        done += len(rows)
    assembler.accept(len(numbers), spans, {"r": ragged(numbers)})


def ragged(numbers: list[int]) -> Ragged:
    """Repeat each number as often as its last digit modulo three."""
    counts = np.array([[number % 3] for number in numbers], dtype=np.int64).reshape(-1, 1)
    return Ragged(np.repeat(np.array(numbers, dtype=np.int64), counts[:, 0]), counts)


def append(assembler: Assembler, numbers: list[int], wanted: list[int], spans: list[BatchSpan]) -> None:
    """Copy some rows of an entry."""
    flat = ragged(numbers)
    columns = {
        "x": Column(SPEC.tensors[0], np.repeat(np.array(numbers, dtype=np.int64)[:, None], 2, axis=1)),
        "r": Column(SPEC.tensors[1], flat.values, flat.shapes),
    }
    assembler.append(columns, np.array(wanted, dtype=np.int64), spans)


entries = st.lists(
    st.tuples(st.lists(st.booleans(), min_size=1, max_size=12), st.booleans(), st.booleans()), max_size=12
)
"""For each entry: which offsets are no holes, whether some rows are unwanted, and whether its lease is lost later."""


@settings(deadline=None)
@given(entries, st.integers(1, 9), st.randoms(use_true_random=False))
def test_every_wanted_row_comes_once_in_order(plan: list[Any], batch_size: int, random: Any) -> None:
    """Blocks have any size and holes, some are half acknowledged, and some lose their lease before they are yielded."""
    assembler = Assembler(SPEC, batch_size, ArrayPool(3), epoch=4)
    expected: list[tuple[int, Lease]] = []
    offset = 0
    for present, is_partial, is_lost in plan:
        offsets = [offset + position for position, there in enumerate(present) if there]
        offset += len(present)
        if not offsets:
            continue
        rows = [row for row in range(len(offsets)) if not is_partial or random.random() < 0.5]
        wanted = [offsets[row] for row in rows]
        lease = Lease(0, 4, 0, b"%d-0" % offset, len(wanted))
        spans = [BatchSpan(lease, lo, hi) for lo, hi in runs(wanted)]
        if is_partial:
            append(assembler, offsets, rows, spans)
        else:
            place(assembler, offsets, spans)
        expected += [(number, lease) for number in wanted]
        lease.is_lost = is_lost
    assembler.flush()
    batches: list[Batch] = []
    while (batch := assembler.take()) is not None:
        batches.append(batch)
    assert all(batch.size == batch_size for batch in batches[:-1])
    kept = [batch for one in batches if (batch := one.without_lost()) is not None]
    want = [number for number, lease in expected if not lease.is_lost]
    assert [int(row[0]) for batch in kept for row in batch["x"]] == want
    assert [identity for batch in kept for identity in batch.identities()] == [(4, 0, number) for number in want]
    rows_of_r = [row.tolist() for batch in kept for row in batch["r"]]
    assert rows_of_r == [[number] * (number % 3) for number in want]
    assert assembler.takes_whole(batch_size), "no batch is begun"


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9))
def test_an_entry_is_due_with_its_last_row_and_every_row_once(sizes: list[int], batch_size: int) -> None:
    """Acknowledging batch by batch acknowledges every offset, and each entry exactly when all of it is done."""
    assembler = Assembler(SPEC, batch_size, ArrayPool(3), epoch=4)
    offset = 0
    for size in sizes:
        lease = Lease(0, 4, 0, b"%d-0" % (offset + size), size)
        place(assembler, list(range(offset, offset + size)), [BatchSpan(lease, offset, offset + size)])
        offset += size
    assembler.flush()
    acknowledged: list[int] = []
    ids: list[bytes] = []
    while (batch := assembler.take()) is not None:
        due = plan_acknowledgement(batch)[0]
        acknowledged += [n for lo, hi in due.ranges[0] for n in range(lo, hi) if n >= len(acknowledged)]
        ids += due.ids
        for entry_id in due.ids:
            assert int(entry_id.split(b"-")[0]) <= len(acknowledged)
    assert acknowledged == list(range(offset))
    assert ids == [b"%d-0" % end for end in np.cumsum(sizes).tolist()]


@given(st.sets(st.integers(0, 200)))
def test_runs_are_the_shortest_ranges_of_their_offsets(offsets: set[int]) -> None:
    """Acknowledgements and error messages are made of them."""
    found = runs(sorted(offsets))
    assert {n for lo, hi in found for n in range(lo, hi)} == offsets
    assert all(hi < lo for (_, hi), (lo, _) in pairwise(found))
    assert runs(np.array(sorted(offsets))) == found


class TestArena:
    """Memory is used again once nothing refers to it, and not before."""

    def test_an_array_in_use_is_never_given_out_again(self) -> None:
        """It is not used again while a slice, a view of another dtype or a memoryview of it is alive."""
        arena = ArrayPool(4)
        array = arena.array((10,), np.dtype(np.float32))
        address = array.ctypes.data
        holders: list[Any] = [array[3:], array.view(np.uint8), array.reshape(2, 5), array.data]
        del array
        while holders:
            assert arena.array((10,), np.dtype(np.float32)).ctypes.data != address
            holders.pop()
        assert address in {arena.array((10,), np.dtype(np.float32)).ctypes.data for _ in range(8)}

    def test_memory_that_is_free_is_used_again(self) -> None:
        """A loop that keeps nothing needs only two buffers."""
        arena = ArrayPool(4)
        assert len({arena.array((1000,), np.dtype(np.int64)).ctypes.data for _ in range(50)}) <= 2

    def test_a_trainer_that_keeps_everything_costs_no_more_than_it_keeps(self) -> None:
        """The pool remembers a few buffers, and forgets all others that it made."""
        arena = ArrayPool(4)
        kept = [arena.array((100,), np.dtype(np.int64)) for _ in range(50)]
        assert len({array.ctypes.data for array in kept}) == 50
        addresses = {array.ctypes.data for array in kept}
        del kept
        assert arena.array((100,), np.dtype(np.int64)).ctypes.data in addresses

    @pytest.mark.parametrize(
        ("shape", "dtype"), [((0,), "float32"), ((7, 3), "uint8"), ((5,), "complex128"), ((), "int8")]
    )
    def test_arrays_are_aligned_whatever_their_shape(self, shape: tuple[int, ...], dtype: str) -> None:
        """XLA and TensorFlow copy arrays that do not begin at a cache line."""
        array = ArrayPool(2).array(shape, np.dtype(dtype))
        assert array.shape == shape
        assert array.dtype == np.dtype(dtype)
        assert array.size == 0 or array.ctypes.data % 64 == 0


class TestHoldings:
    """The leases of this member."""

    def test_an_entry_received_again_replaces_its_earlier_lease(self) -> None:
        """Rows of the earlier delivery must not be yielded together with those of the later one."""
        holdings = Leases()
        first, again = Lease(0, 1, 2, b"1-0", 5), Lease(0, 1, 2, b"1-0", 3)
        holdings.add(first)
        holdings.add(again)
        assert first.is_lost
        assert not again.is_lost
        assert holdings.of(1) == [again]

    def test_a_lost_entry_is_marked_once(self) -> None:
        """The lease renewer may report it again."""
        holdings = Leases()
        lease = Lease(0, 1, 2, b"1-0", 5)
        holdings.add(lease)
        assert holdings.lose(0, 1, [b"1-0", b"2-0"]) == 1
        assert holdings.lose(0, 1, [b"1-0"]) == 0
        assert lease.is_lost
        assert holdings.ids(0) == {}

    def test_what_was_just_acknowledged_is_remembered_for_a_while(self) -> None:
        """It may still be pending on the server, and must not be taken for lost."""
        holdings = Leases()
        holdings.add(Lease(0, 1, 2, b"1-0", 5))
        assert not holdings.is_acknowledging(0, 1, b"1-0")
        holdings.remove(0, 1, [b"1-0"])
        assert holdings.is_acknowledging(0, 1, b"1-0")
        assert not holdings.is_acknowledging(1, 1, b"1-0")
        for number in range(100):
            holdings.remove(0, 1, [b"9-%d" % number])
        assert not holdings.is_acknowledging(0, 1, b"1-0")


class TestBatchAsADict:
    """A batch supports what Python and frameworks do with any dict."""

    @staticmethod
    def batch() -> Batch:
        """Four samples of epoch 3."""
        values = {"x": np.zeros((4, 2), np.float32), "y": np.arange(4), "r": ragged([1, 2, 3, 4])}
        return Batch(values, 3, [BatchSpan(Lease(0, 3, 0, b"1-1", 4), 0, 4)])

    def test_a_batch_is_rebuilt_from_its_tensors(self) -> None:
        """Lightning, accelerate and others map a batch by calling its type on a dict."""
        batch = self.batch()
        again = type(batch)(dict(batch))
        assert list(again) == ["x", "y", "r"]
        assert again["x"] is batch["x"]
        assert (again.size, again.epoch, list(again.identities())) == (4, UNKNOWN, [])
        assert type(batch)({"y": np.float32(1)}).size == 0  # a mean over the batch has no rows

    def test_a_copied_batch_keeps_its_identities(self) -> None:
        """Pinning memory in torch copies what it can, so that the copy can still be acknowledged."""
        batch = copy.copy(self.batch())
        assert (batch.size, batch.epoch) == (4, 3)
        assert next(batch.identities()) == (3, 0, 0)

    def test_a_batch_says_what_it_is_in_one_line(self) -> None:
        """In a notebook, the arrays would fill the screen."""
        assert repr(self.batch()) == "<Batch of 4 samples of epoch 3: x float32[4, 2], y int64[4], r Ragged>"
        rebuilt = Batch({"y": np.arange(4), "z": None})
        assert repr(rebuilt) == "<Batch of 4 samples: y int64[4], z NoneType>"

    def test_a_batch_is_iterated_as_any_dict_but_not_unpacked(self) -> None:
        """`x, y = batch` gives two names and no error, which shows three calls later inside the model."""
        batch = self.batch()
        assert [name.upper() for name in batch] == ["X", "Y", "R"]
        assert (list(batch), sorted(batch), "x" in batch) == (["x", "y", "r"], ["r", "x", "y"], True)
        assert {**batch}.keys() == dict(batch).keys() == batch.keys()
        verb = r"loader\.view\(\)\.select\('x', 'y', 'r'\)"
        with pytest.raises(TypeError, match=verb):
            _, _, _ = batch
        with pytest.raises(TypeError, match=verb):
            for _, *_ in [batch]:
                pass
