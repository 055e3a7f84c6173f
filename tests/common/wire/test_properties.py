"""Hypothesis searches for a spec, a sample or a damage that breaks a property of the format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.errors import BadEntry, BadSpec
from penstock_common.wire.block import Block, BlockBuilder, check_rows
from penstock_common.wire.codec import decode, encode
from penstock_common.wire.dtypes import BYTES, numpy_dtype
from penstock_common.wire.header import Header, parse_header
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from tests.common.wire import independent
from tests.common.wire.strategies import Sample, holes, samples, specs

IDENTITY: dict[str, Any] = {"stream": "abc", "epoch": 4, "shard": 2}
Fields = list[tuple[bytes, bytes]]


def block_of(spec: Spec, rows: list[Sample], first: int = 0, dropped: list[int] | None = None) -> Block:
    """Return the block of the samples, which are added separately."""
    builder = BlockBuilder(spec, 1 << 20, len(rows))
    for row in rows:
        builder.add(row)
    return builder.finish(first, dropped or [])


def fields_of(block: Block, **options: Any) -> Fields:
    """Return copies of an entry's fields as bytes."""
    return [(name, bytes(value)) for name, value in encode(block, **IDENTITY, **options)]


def bits(spec: Spec, row: Sample) -> list[tuple[tuple[int, ...], bytes]]:
    """Return shape and little-endian bytes of each tensor of a sample, computed without the code under test."""
    found: list[tuple[tuple[int, ...], bytes]] = []
    for tensor in spec:
        value = row[tensor.name]
        if tensor.dtype == BYTES:
            found.append(((len(value),), bytes(value)))
        else:
            swapped = value.dtype.byteorder == ">"
            found.append((value.shape, (value.byteswap() if swapped else value).tobytes()))
    return found


def rows_of(block: Block) -> list[list[tuple[tuple[int, ...], bytes]]]:
    """Return shape and bytes of each tensor of each sample."""
    columns = [
        list(Ragged(column.values, column.shapes))
        if column.shapes is not None
        else [np.asarray(row) for row in column.values]
        for column in block.columns
    ]
    return [[(row.shape, row.tobytes()) for row in rows] for rows in zip(*columns, strict=True)]


@st.composite
def entries(draw: st.DrawFn) -> tuple[Spec, list[Sample], Block]:
    """Draw a spec, samples of it, and the block that they make."""
    spec = draw(specs())
    rows = draw(samples(spec))
    first = draw(st.integers(0, 1000))
    return spec, rows, block_of(spec, rows, first, draw(holes(first, len(rows))))


@given(entries())
@settings(max_examples=150, deadline=None)
def test_every_sample_comes_back_bit_for_bit(made: tuple[Spec, list[Sample], Block]) -> None:
    """The promise of the format, for our decoder and for one that knows only the document."""
    spec, rows, block = made
    expected = [bits(spec, row) for row in rows]
    fields = fields_of(block)
    header, decoded = decode(fields, spec)
    assert rows_of(decoded) == expected
    assert (header.first, header.end, header.holes) == (block.first, block.end, tuple(block.holes))
    entry = independent.read(fields, spec.as_json())
    assert entry.offsets == decoded.offsets().tolist() == block.offsets().tolist()
    found = [[(tuple(t.shape), t.raw) for t in (sample[n] for n in spec.names)] for sample in entry.samples]
    assert found == expected


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_batch_is_packed_as_its_samples_are(data: st.DataObject) -> None:
    """write_batch and write must put the same bytes into the stream."""
    spec = data.draw(specs())
    rows = data.draw(samples(spec))
    columns: dict[str, Any] = {t.name: [row[t.name] for row in rows] for t in spec}
    for tensor in spec:
        if not tensor.is_ragged:
            little = [np.asarray(value, numpy_dtype(tensor.dtype)) for value in columns[tensor.name]]
            columns[tensor.name] = np.stack(little)
    assert check_rows(spec, columns) == len(rows)
    builder = BlockBuilder(spec, 1 << 20, len(rows))
    half = len(rows) // 2
    assert builder.add_rows(columns, 0, half) + builder.add_rows(columns, half, len(rows)) == len(rows)
    assert fields_of(builder.finish(0)) == fields_of(block_of(spec, rows))


@given(entries(), st.data())
@settings(max_examples=60, deadline=None)
def test_the_tail_of_a_block_has_exactly_the_later_samples(
    made: tuple[Spec, list[Sample], Block], data: st.DataObject
) -> None:
    """A retried job skips committed samples: it must lose none and repeat none."""
    spec, rows, block = made
    offset = data.draw(st.integers(block.first, block.end))
    tail = block.tail(offset)
    kept = [row for row, at in zip(rows, block.offsets().tolist(), strict=True) if at >= offset]
    assert (tail.first, tail.end, tail.count) == (offset, block.end, len(kept))
    assert rows_of(tail) == [bits(spec, row) for row in kept]


@given(entries(), st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_entry_is_refused_or_unharmed(made: tuple[Spec, list[Sample], Block], data: st.DataObject) -> None:
    """No damage may raise anything but a bad entry, and a damaged payload may not pass at all."""
    spec, rows, block = made
    fields = fields_of(block)
    which = data.draw(st.integers(0, len(fields) - 1))
    name, value = fields[which]
    fields[which] = (name, damaged(value, data))
    try:
        header, decoded = decode(fields, spec)
    except BadEntry as error:
        assert str(error).isascii()  # noqa: PT017
        return
    if which > 0:
        assert rows_of(decoded) == [bits(spec, row) for row in rows]
    assert len(rows_of(decoded)) == header.count == len(decoded.offsets())


def damaged(value: bytes, data: st.DataObject) -> bytes:
    """Return the value with a byte changed, some removed, or some inserted."""
    at = data.draw(st.integers(0, len(value)))
    removed = data.draw(st.integers(0, 3))
    return value[:at] + data.draw(st.binary(max_size=3)) + value[at + removed :]


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)),
    max_leaves=8,
)
KEYS = ("v", "stream", "epoch", "shard", "first", "count", "holes", "tensors", "xxh3")


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_header_with_any_value_in_any_place_is_read_or_refused(data: st.DataObject) -> None:
    """A client that can write to a stream must not be able to crash a trainer."""
    import json

    spec = Spec.of({"x": ("uint8", (2,)), "b": ("float32", (None, 4)), "s": ("bytes", ())})
    rows = [{"x": np.zeros(2, "u1"), "b": np.ones((1, 4), "f4"), "s": b"ab"}]
    header = json.loads(fields_of(block_of(spec, rows))[0][1])
    place = data.draw(st.sampled_from([header, header["tensors"], *header["tensors"].values()]))
    place[data.draw(st.sampled_from([*place, *KEYS]))] = data.draw(JSON)
    try:
        found = parse_header(json.dumps(header).encode(), spec)
    except BadEntry as error:
        assert str(error).isascii()  # noqa: PT017
        return
    assert isinstance(found, Header)
    assert 0 <= found.first < found.end <= 1 << 20


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_garbage_is_no_header(data: bytes) -> None:
    """Random bytes end in one named error."""
    with pytest.raises(BadEntry):
        parse_header(data, Spec.of({"x": ("uint8", ())}))


@given(JSON)
@settings(max_examples=200, deadline=None)
def test_a_spec_read_from_the_server_is_a_spec_or_refused(value: Any) -> None:
    """Other programs can write the stream's meta, too."""
    try:
        spec = Spec.from_json(value)
    except BadSpec:
        return
    assert Spec.from_json(spec.as_json()) == spec


@given(specs())
@settings(max_examples=60, deadline=None)
def test_a_spec_survives_its_json_form(spec: Spec) -> None:
    """A loader checks against exactly the spec that a writer stored."""
    assert Spec.from_json(spec.as_json()) == spec


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_ragged_batch_has_the_samples_that_were_written(data: st.DataObject) -> None:
    """Indexing, slicing and joining a Ragged never mixes samples up."""
    spec = data.draw(specs().filter(lambda spec: spec.tensors[0].is_ragged))
    rows = data.draw(samples(spec))
    column = block_of(spec, rows).columns[0]
    assert column.shapes is not None
    ragged = Ragged(column.values, column.shapes, is_bytes=column.spec.dtype == BYTES)
    expected = [column.spec.canonical(row[column.spec.name]) for row in rows]
    cut = data.draw(st.integers(0, len(rows)))
    joined = Ragged.concatenate([ragged[:cut], ragged[cut:]])
    for found in (ragged, joined):
        assert [np.frombuffer(s, "u1").tobytes() if ragged.is_bytes else s.tobytes() for s in found] == [
            array.tobytes() for array in expected
        ]
        assert len(found) == len(rows)
