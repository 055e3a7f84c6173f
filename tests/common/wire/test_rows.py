"""Rows of one small array: the fast path takes and refuses them as any block builder does."""

from __future__ import annotations

from mmap import mmap
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.wire.block import Block, BlockBuilder, BlockFull, Place, RowBuilder, builder_of
from penstock_common.wire.spec import Spec

SPEC = Spec.of({"x": ("float32", (2, 3))})
NUMBERS = np.arange(6, dtype="f4").reshape(2, 3)


def mapped(count: int) -> NDArray[np.uint8]:
    """Return mapped memory, like a segment in which blocks are made at some offset."""
    return np.frombuffer(mmap(-1, 1 << 16), np.uint8)[128 : 128 + (1 << 15)]


def plain(count: int) -> NDArray[np.uint8]:
    """Return memory that is not a map."""
    return np.zeros(1 << 15, np.uint8)


@pytest.fixture(params=[None, mapped, plain], ids=["own memory", "a map", "no map"])
def rows(request: pytest.FixtureRequest) -> BlockBuilder:
    """Return a builder for blocks of at most ten rows, which already has one row."""
    place: Place | None = request.param
    found = builder_of(SPEC, 1 << 14, 10, place)
    assert type(found) is RowBuilder
    found.add({"x": NUMBERS})
    return found


def values(block: Block) -> list[Any]:
    """Return the values of the block's only column."""
    found: list[Any] = block.columns[0].values.tolist()
    return found


def said(builder: BlockBuilder, value: Any) -> str:
    """Return the reason why a sample is refused."""
    try:
        builder.add({"x": value})
    except SpecMismatch as error:
        return str(error)
    return ""


STRANGE: dict[str, Any] = {
    "list": NUMBERS.tolist(),
    "integers": [[1, 2, 3], [4, 5, 6]],
    "Fortran order": np.asfortranarray(NUMBERS),
    "big-endian": NUMBERS.astype(">f4"),
    "strided": np.repeat(NUMBERS, 2, axis=1)[:, ::2],
    "backwards": NUMBERS[::-1],
    "read-only": np.frombuffer(NUMBERS.tobytes(), "f4").reshape(2, 3),
    "recarray": NUMBERS.view(np.recarray),
    "masked": np.ma.masked_array(NUMBERS),
    "as many bytes": NUMBERS.reshape(3, 2),
    "flat": NUMBERS.reshape(-1),
    "one more dimension": NUMBERS[None],
    "one row": NUMBERS[0],
    "scalar": np.float32(1),
    "number": 1.0,
    "another dtype": NUMBERS.astype("i4"),
    "wider": NUMBERS.astype("f8"),
    "bytes": NUMBERS.tobytes(),
    "view of memory": NUMBERS.data,
    "nothing": None,
    "text": "x",
}


@pytest.mark.parametrize("value", STRANGE.values(), ids=STRANGE.keys())
def test_a_row_is_taken_or_refused_as_in_any_other_block(rows: BlockBuilder, value: Any) -> None:
    """Whether a stream has one tensor or two makes no difference to what a value means."""
    other = BlockBuilder(SPEC, 1 << 14, 10)
    other.add({"x": NUMBERS})
    assert said(rows, value) == said(other, value)
    assert len(rows) == len(other)
    for builder in (rows, other):
        builder.add({"x": NUMBERS + 1})
    assert values(rows.finish(0)) == values(other.finish(0))


@pytest.mark.parametrize("sample", [{}, {"y": NUMBERS}, {"x": NUMBERS, "y": 1}])
def test_a_sample_of_other_tensors_leaves_the_rows_as_they_were(rows: BlockBuilder, sample: dict[str, Any]) -> None:
    """A caller may catch the error, skip the sample and continue."""
    with pytest.raises(SpecMismatch, match=r"tensor '[xy]'"):
        rows.add(sample)
    rows.add({"x": NUMBERS * 2})
    assert values(rows.finish(0)) == [NUMBERS.tolist(), (NUMBERS * 2).tolist()]


def test_rows_of_arrays_that_are_used_again_are_what_they_were(rows: BlockBuilder) -> None:
    """Augmentation writes the next sample into the same buffer, and a block is sent while the next one fills."""
    buffer, blocks = NUMBERS.copy(), []
    for number in range(2):
        for row in range(3):
            buffer[:] = 10 * number + row
            rows.add({"x": buffer})
        blocks.append(rows.finish(0))
    assert [[row[0][0] for row in values(block)][-3:] for block in blocks] == [[0, 1, 2], [10, 11, 12]]


def test_rows_added_in_turn_one_by_one_and_many_at_once_lie_in_order(rows: BlockBuilder) -> None:
    """`write` and `write_batch` may be mixed."""
    many = np.arange(24, dtype="f4").reshape(4, 2, 3)
    assert rows.add_rows({"x": many}, 0, 2) == 2
    rows.add({"x": NUMBERS})
    assert rows.add_rows({"x": many}, 2, 4) == 2
    assert [not rows.is_full and rows.add({"x": NUMBERS}) for _ in range(4)] == [False, False, False, True]
    block = rows.finish(7)
    assert (block.first, block.count) == (7, 10)
    assert values(block)[1:6] == [*many[:2].tolist(), NUMBERS.tolist(), *many[2:].tolist()]


def test_no_more_rows_are_taken_than_may_come(rows: BlockBuilder) -> None:
    """A shard's size is planned, and a hole takes the place of a sample."""
    rows.shorten(2)
    assert not rows.add({"x": NUMBERS})
    assert rows.add({"x": NUMBERS})
    assert rows.is_full
    assert rows.finish(0).count == 3
    rows.left = 0
    with pytest.raises(BlockFull):
        rows.add({"x": NUMBERS})


def test_a_block_whose_first_row_was_refused_still_asks_whether_any_may_come(rows: BlockBuilder) -> None:
    """A block must not overtake rows that were reserved in the meantime."""
    rows.finish(0)
    with pytest.raises(SpecMismatch):
        rows.add({"x": 1})
    rows.left = 0
    with pytest.raises(BlockFull):
        rows.add({"x": NUMBERS})
    rows.left = 1
    assert rows.add({"x": NUMBERS})
    assert values(rows.finish(0)) == [NUMBERS.tolist()]


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": ("float32", ())}, {"x": ("float32", (None, 3))}, {"x": ("bytes", ())}, {"x": ("uint8", (0, 3))},
        {"x": ("uint8", (1 << 20,))}, {"x": ("float32", (2,)), "y": ("int64", ())},
    ],
)  # fmt: skip
def test_what_is_no_row_of_a_small_array_is_gathered_as_ever(tensors: dict[str, Any]) -> None:
    """These are numbers, ragged and empty tensors, large tensors, and several tensors."""
    assert type(builder_of(Spec.of(tensors), 1 << 14, 10)) is BlockBuilder
