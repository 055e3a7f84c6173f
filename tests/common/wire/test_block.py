"""Packing samples and batches into blocks, and blocks into entries."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import SpecMismatch, TooLarge
from penstock_common.wire import codec
from penstock_common.wire.block import Block, BlockBuilder, BlockFull, Column, check_rows
from penstock_common.wire.codec import decode, encode
from penstock_common.wire.dtypes import NAMES, numpy_dtype
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec

PAIR = Spec.of({"x": ("float32", (2,)), "y": ("int64", ())})
BOXES = Spec.of({"boxes": ("float32", (None, 4)), "y": ("int64", ()), "file": ("bytes", ())})
IDENTITY: dict[str, Any] = {"stream": "abc", "epoch": 0, "shard": 0}


def ragged_of(column: Column) -> Ragged:
    """Return the samples of a ragged column."""
    assert column.shapes is not None
    return Ragged(column.values, column.shapes)


def test_an_array_reused_after_add_does_not_change_the_block() -> None:
    """Augmentation writes the next image into the same buffer."""
    builder = BlockBuilder(BOXES, 1000, 10)
    boxes, name = np.ones((2, 4), "f4"), bytearray(b"one")
    builder.add({"boxes": boxes, "y": 1, "file": name})
    boxes[:] = 7
    name[:] = b"two"
    block = builder.finish(0)
    assert block.columns[0].values.tolist() == [1.0] * 8
    assert block.columns[2].values.tobytes() == b"one"


def test_a_refused_sample_leaves_the_block_as_it_was() -> None:
    """A caller may catch the error, skip the sample and continue."""
    builder = BlockBuilder(BOXES, 1000, 10)
    good = {"boxes": np.ones((1, 4), "f4"), "y": 1, "file": b"a"}
    builder.add(good)
    for bad in ({"boxes": np.ones((1, 4))}, {"y": 1.5}, {"file": "a"}, {"more": 1}):
        with pytest.raises(SpecMismatch):
            builder.add(good | bad)
    with pytest.raises(SpecMismatch, match="tensor 'y': found nothing"):
        builder.add({"boxes": good["boxes"], "file": b"a"})
    builder.add(good | {"y": 2})
    block = builder.finish(0)
    assert block.count == 2
    assert block.columns[1].values.tolist() == [1, 2]
    assert ragged_of(block.columns[0])[1].tolist() == [[1.0] * 4]


def test_a_finished_block_stays_whole_while_the_next_one_fills() -> None:
    """It is being sent during that time, and may have to be sent again after many blocks."""
    builder = BlockBuilder(PAIR, 1000, 10)
    builder.add({"x": np.ones(2, "f4"), "y": 1})
    block = builder.finish(0)
    builder.add({"x": np.zeros(2, "f4"), "y": 2})
    assert len(builder) == 1
    assert block.columns[0].values.tolist() == [[1.0, 1.0]]
    for number in range(3, 40):
        builder.finish(number)
        builder.add({"x": np.zeros(2, "f4"), "y": number})
    assert block.columns[0].values.tolist() == [[1.0, 1.0]]


def test_a_moved_block_is_the_same_samples_elsewhere_in_memory_of_its_own() -> None:
    """Its arrays may be in a segment that is given back while the block still waits to be committed."""
    spec = Spec.of({"x": ("int32", (2,)), "r": ("int32", (None,)), "b": ("bytes", ())})
    builder = BlockBuilder(spec, 1 << 20, 100)
    for number in range(3):
        builder.add({"x": np.full(2, number, np.int32), "r": np.arange(number, dtype=np.int32), "b": b"%d" % number})
    block = builder.finish(10, [11, 14])
    moved = block.moved(100)
    assert (moved.first, moved.count, moved.end, moved.holes) == (100, 3, 105, [101, 104])
    assert moved.offsets().tolist() == [100, 102, 103]
    for before, after in zip(block.columns, moved.columns, strict=True):
        assert np.array_equal(before.values, after.values)
        assert not np.shares_memory(before.values, after.values)
        assert after.shapes is None or not np.shares_memory(before.shapes, after.shapes)


def test_a_block_is_full_at_its_target_or_its_number_of_samples() -> None:
    """The server is fastest with entries of 100-600 kB."""
    assert BlockBuilder(PAIR, 160, 1000).capacity == 10
    assert BlockBuilder(PAIR, 160, 3).capacity == 3
    assert BlockBuilder(PAIR, 1, 1000).capacity == 1
    builder = BlockBuilder(BOXES, 200, 1000)
    while not builder.is_full:
        builder.add({"boxes": np.ones((1, 4), "f4"), "y": 0, "file": b"12345678"})
    assert len(builder) == 4  # 56 bytes each: 16 of boxes, 8 of y, 8 of file, 24 of shapes


def test_a_number_out_of_range_is_refused_on_the_fast_way_too() -> None:
    """A plain numpy assignment would wrap a Python integer around, or not name the tensor."""
    builder = BlockBuilder(Spec.of({"y": ("uint8", ()), "f": ("float32", ())}), 100, 10)
    for bad in ({"y": 256, "f": 0.5}, {"y": -1, "f": 0.5}, {"y": 1, "f": 1e300}, {"y": True, "f": "x"}):
        with pytest.raises(SpecMismatch):
            builder.add(bad)
    builder.add({"y": 255, "f": float("nan")})
    assert builder.finish(0).columns[0].values.tolist() == [255]


def test_a_broadcastable_array_is_refused() -> None:
    """A plain assignment would spread one row over the whole sample."""
    builder = BlockBuilder(PAIR, 100, 10)
    for x in (np.ones(1, "f4"), np.ones((1, 2), "f4"), np.ones((), "f4"), np.float32(1), 1.0):
        with pytest.raises(SpecMismatch, match="tensor 'x'"):
            builder.add({"x": x, "y": 1})


def test_a_bool_array_with_other_bytes_is_stored_as_0_and_1() -> None:
    """A view of uint8 may hold 2, which readers refuse."""
    odd = np.array([0, 2, 255], "u1").view(bool)
    spec = Spec.of({"m": ("bool", (3,)), "r": ("bool", (None,))})
    builder = BlockBuilder(spec, 100, 10)
    builder.add({"m": odd, "r": odd})
    _, block = decode(encode(builder.finish(0), **IDENTITY), spec)
    assert [column.values.tobytes() for column in block.columns] == [b"\0\1\1"] * 2


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"x": np.zeros((3, 2), "f4"), "y": np.zeros(2, "i8")}, "'y': found 2 rows, expected 3 rows as in 'x'"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, "i8")}, "'x': found dtype float64"),
        ({"x": np.zeros((3, 3), "f4"), "y": np.zeros(3, "i8")}, r"'x': found shape \(3,\)"),
        ({"x": np.zeros(2, "f4"), "y": np.zeros(2, "i8")}, r"'x': found shape \(\)"),
        ({"x": np.zeros((), "f4"), "y": np.zeros(2, "i8")}, "'x'"),
        ({"x": [[1.0, 2.0]], "y": np.zeros(1, "i8")}, "'x': found a list, expected a numpy array"),
        ({"x": np.zeros((1, 2), "f4"), "y": 5}, "'y': found a int"),
        ({"x": np.zeros((1, 2), "f4")}, "'y': found nothing"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_anything_is_copied(rows: dict[str, Any], text: str) -> None:
    """Half a batch in the stream would be worse than none."""
    with pytest.raises(SpecMismatch, match=text):
        check_rows(PAIR, rows)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({"boxes": np.zeros((), "f4")}, "'boxes'"),
        ({"boxes": b"ab"}, "'boxes': found a bytes"),
        ({"boxes": [np.zeros((1, 4)), np.zeros((1, 4), "f4")]}, "'boxes': found dtype float64"),
        ({"boxes": np.zeros((2, 3, 5), "f4")}, r"'boxes': found shape \(3, 5\)"),
        ({"file": b"ab"}, "'file': found a bytes, expected a list"),
        ({"file": ["a", "b"]}, "'file': found a str, expected bytes"),
        ({"file": np.array([b"a\0", b"b"])}, "'file': found a numpy array"),
        ({"file": [b"a"]}, "'file': found 1 rows"),
    ],
)
def test_a_ragged_column_that_does_not_fit_is_refused(rows: dict[str, Any], text: str) -> None:
    """The second sample is checked like the first, and numpy's S arrays have lost their trailing zeros."""
    good = {"boxes": [np.zeros((1, 4), "f4")] * 2, "y": np.zeros(2, "i8"), "file": [b"a", b"b"]}
    with pytest.raises(SpecMismatch, match=text):
        check_rows(BOXES, good | rows)


def test_rows_in_any_layout_are_packed_as_they_read() -> None:
    """write_batch takes slices, transposes and big-endian arrays."""
    x = np.arange(12, dtype=">f4").reshape(2, 6).T[::2]
    rows = {"x": x, "y": np.arange(9, dtype=">i8")[::3]}
    assert check_rows(PAIR, rows) == 3
    builder = BlockBuilder(PAIR, 1000, 10)
    assert builder.add_rows(rows, 1, 3) == 2
    block = builder.finish(0)
    assert block.columns[0].values.tolist() == x[1:].tolist()
    assert block.columns[0].values.dtype == np.dtype("<f4")
    assert block.columns[1].values.tolist() == [3, 6]


def test_a_batch_larger_than_a_block_is_taken_in_parts() -> None:
    """The writer sends a full block and comes back for the rest."""
    count = 20
    rows: dict[str, Any] = {
        "boxes": np.arange(count * 8, dtype="f4").reshape(count, 2, 4),
        "y": np.arange(count),
        "file": [b"x" * 8] * count,
    }
    assert check_rows(BOXES, rows) == count
    builder = BlockBuilder(BOXES, 300, 100)
    start, labels, boxes = 0, [], []
    while start < count:
        taken = builder.add_rows(rows, start, count)
        assert taken > 0
        assert builder.is_full or start + taken == count
        start += taken
        block = builder.finish(0)
        labels += block.columns[1].values.tolist()
        boxes += [row.tolist() for row in ragged_of(block.columns[0])]
    assert labels == list(range(count))
    assert boxes == rows["boxes"].tolist()


def test_an_empty_batch_is_a_batch_of_none() -> None:
    """The last batch of a filter may be empty, and still has a dtype."""
    assert check_rows(PAIR, {"x": np.zeros((0, 2), "f4"), "y": np.zeros(0, "i8")}) == 0
    with pytest.raises(SpecMismatch, match="dtype"):
        check_rows(PAIR, {"x": np.zeros((0, 2), "f8"), "y": np.zeros(0, "i8")})


def test_a_block_no_reader_would_take_is_not_encoded() -> None:
    """Every reader would make it a dead letter, so it would be lost."""
    column = Column(Spec.of({"y": ("uint8", ())}).tensors[0], np.zeros(1, "u1"))
    for block in (
        Block(0, 0, [column]),
        Block(-1, 1, [column]),
        Block(1 << 20, 1, [column]),
        Block(0, 1, [column], list(range(1, 1026))),
    ):
        with pytest.raises(ValueError, match="a block of"):
            encode(block, **IDENTITY)
    for identity in ({"stream": 'a"b'}, {"stream": ""}, {"epoch": -1}, {"shard": 1 << 53}):
        with pytest.raises(ValueError, match="not an identity"):
            encode(Block(0, 1, [column]), **(IDENTITY | identity))


def test_an_entry_over_the_limit_is_refused_locally(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would close the connection without a reason."""
    monkeypatch.setattr(codec, "MAX_FIELD_BYTES", 15)
    builder = BlockBuilder(PAIR, 1000, 10)
    for _ in range(2):
        builder.add({"x": np.ones(2, "f4"), "y": 1})
    with pytest.raises(TooLarge, match="an entry of 32 bytes"):
        encode(builder.finish(0), **IDENTITY)


def test_payloads_are_not_copied_when_encoded_or_decoded() -> None:
    """The data path must not copy payloads."""
    spec = Spec.of({"x": ("float32", (2,))})
    builder = BlockBuilder(spec, 1000, 10)
    builder.add({"x": np.ones(2, "f4")})
    block = builder.finish(0)
    fields = encode(block, **IDENTITY)
    assert np.shares_memory(np.frombuffer(fields[1][1], "u1"), block.columns[0].values)
    _, decoded = decode(fields, spec)
    assert np.shares_memory(decoded.columns[0].values, block.columns[0].values)


def test_a_header_too_large_to_inline_shapes_leaves_them_to_a_field() -> None:
    """256 ragged tensors of many dimensions must not outgrow the header's limit."""
    spec = Spec.of({f"t{i}": ("uint8", (None,) * 31) for i in range(256)})
    builder = BlockBuilder(spec, 1 << 20, 64)
    for _ in range(64):
        builder.add(dict.fromkeys(spec.names, np.zeros((1,) * 31, "u1")))
    fields = encode(builder.finish(0), **IDENTITY)
    assert len(fields) == 1 + 2 * 256
    assert decode(fields, spec)[0].count == 64


@pytest.mark.parametrize("place", [None, lambda count: np.zeros(1 << 16, "u1")], ids=["own memory", "memory given"])
def test_small_arrays_of_any_layout_and_dtype_are_packed_as_they_read(place: Any) -> None:
    """Their bytes are copied without numpy if the result is the same, else with numpy."""
    tensors = {name: (name, (2, 3)) for name in NAMES if name != "bytes"}
    spec, rows = Spec.of({**tensors, "none": ("uint8", (0, 3)), "y": ("int64", ())}), []
    builder = BlockBuilder(spec, 1 << 14, 10, place)
    for number in range(3):
        numbers = np.arange(6).reshape(2, 3) + number
        row: dict[str, Any] = {name: np.array(numbers, numpy_dtype(name)) for name in tensors}
        row["int64"] = np.asfortranarray(row["int64"])
        row |= {"none": np.zeros((0, 3), "u1"), "y": number, "float32": np.array(numbers, ">f4")}
        row["int16"] = np.repeat(np.array(numbers, "i2"), 2, axis=1)[:, ::2]
        row["uint8"].flags.writeable = False
        rows.append(row)
        builder.add(row)
    for column in builder.finish(0).columns:
        assert [value.tolist() for value in column.values] == [np.asarray(r[column.spec.name]).tolist() for r in rows]


def test_an_array_of_as_many_bytes_and_another_shape_is_refused() -> None:
    """Copied bytes have no shape."""
    builder = BlockBuilder(Spec.of({"x": ("float32", (2, 3))}), 100, 10)
    for x in (np.ones((3, 2), "f4"), np.ones(6, "f4"), np.ones((2, 3), "i4"), np.ones((1, 2, 3), "f4")):
        with pytest.raises(SpecMismatch, match="tensor 'x'"):
            builder.add({"x": x})
    with pytest.raises(SpecMismatch, match="masked"):
        builder.add({"x": np.ma.masked_array(np.ones((2, 3), "f4"))})
    assert not len(builder)


def test_a_process_forked_meanwhile_writes_into_a_block_of_its_own() -> None:
    """Processes may share mapped memory: a worker's samples would appear in its parent's block."""
    builder = BlockBuilder(PAIR, 1000, 10)
    builder.add({"x": np.ones(2, "f4"), "y": 1})
    pid = os.fork()
    if not pid:
        builder.add({"x": np.full(2, 7, "f4"), "y": 7})
        builder.finish(0).columns[0].values[:] = 7
        os._exit(0)
    os.waitpid(pid, 0)
    builder.add({"x": np.zeros(2, "f4"), "y": 2})
    assert builder.finish(0).columns[0].values.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_no_sample_is_taken_when_none_is_left() -> None:
    """A shard that is full, or has something reserved, must not begin another block."""
    builder = BlockBuilder(PAIR, 1000, 10)
    builder.left = 2
    assert not builder.add({"x": np.ones(2, "f4"), "y": 1})
    builder.shorten(1)
    assert builder.add({"x": np.ones(2, "f4"), "y": 1})
    builder.finish(0)
    builder.left = 0
    with pytest.raises(BlockFull):
        builder.add({"x": np.ones(2, "f4"), "y": 1})
