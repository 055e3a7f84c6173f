"""Promises for any entry: it is refused by name, or read to exactly what the document says it holds. Three readers read
each input: the decoder, a loader's receiver, and the one written from the document alone.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import BadEntry, UnsupportedVersion
from penstock_common.server.channel import SKIP
from penstock_common.stream.manifest import Manifest, find_manifest
from penstock_common.stream.streams import Stream, find_stream
from penstock_common.wire.block import Block
from penstock_common.wire.codec import decode, encode
from penstock_common.wire.codec import unpacked as unpacked_payload
from penstock_common.wire.compression import BLOSC2, CODECS
from penstock_common.wire.header import Header
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_consumer.read.receive import ReceivedEntry, Receiver, check_identity
from penstock_consumer.stages.batch import ArrayPool, Assembler
from tests.common.wire import independent
from tests.fuzz.entries import SETTLED, SMALL_BATCHES, SPECS, Entry, Fields, unpacked
from tests.fuzz.making import made_entry
from tests.golden.good_cases import STREAM

MANY = 4096
"""Entries of more samples are not compared sample by sample: a hundred bytes may hold a million empty ones."""

KNOWN = {**independent.ZSTD, BLOSC2: CODECS[BLOSC2].unpack}
"""The independent reader has a zstd of its own."""
for _codec in CODECS.values():
    _codec.load()  # now, because the memory of an import is no entry's

Rows = list[list[tuple[tuple[int, ...], bytes]]]


def check(data: bytes) -> None:
    """Raise AssertionError, or an error that a reader should not raise, if the input breaks a promise."""
    entry = unpacked(data)
    fields = entry.as_received()
    try:
        decoded = decode(fields, entry.spec)
    except BadEntry as error:
        _check_refusal(error, fields, entry.spec)
        _check_receiver(entry, fields, None)
        return
    _check_sizes(*decoded)
    _check_bytes(fields, entry.spec, *decoded)
    if decoded[0].count <= MANY:
        read = independent.read(fields, entry.spec.as_json(), KNOWN)
        assert read.offsets == decoded[1].offsets().tolist()
        found = [
            [(tuple(t.shape), t.raw) for t in map(sample.__getitem__, entry.spec.names)] for sample in read.samples
        ]
        assert found == rows_of(decoded[1])
        _check_receiver(entry, fields, decoded)


def _check_refusal(error: BadEntry, fields: Fields, spec: Spec) -> None:
    text = str(error)
    assert text.isascii()
    assert text.isprintable()  # it goes to a terminal
    assert len(text) < 1000
    assert (type(error) is UnsupportedVersion) == (_refusal(fields, spec) == "UnsupportedVersion")


def _refusal(fields: Fields, spec: Spec) -> str:
    try:
        independent.read(fields, spec.as_json(), KNOWN)
    except independent.Refused as refused:
        return refused.kind
    raise AssertionError("the document takes what the decoder refuses")


def _check_sizes(header: Header, block: Block) -> None:
    """Check that no array's shape contradicts the header, the spec or another array."""
    assert 0 <= header.first < header.end <= 1 << 20
    assert (block.first, block.count, block.end) == (header.first, header.count, header.end)
    for column in block.columns:
        if column.shapes is None:
            assert column.values.shape == (header.count, *column.spec.shape)
        else:
            assert column.shapes.shape == (header.count, column.spec.wire_ndim)
            assert column.values.shape == (int(np.prod(column.shapes, axis=1).sum()),)
            assert all(column.spec.admits(tuple(shape)) for shape in column.shapes[:MANY].tolist())


def _check_bytes(fields: Fields, spec: Spec, header: Header, block: Block) -> None:
    """Check that it is the same when written again: the payload byte for byte, the rest as a writer would write it."""
    identity: dict[str, Any] = {"stream": header.stream, "epoch": header.epoch, "shard": header.shard}
    again = [(name, bytes(value)) for name, value in encode(block, **identity)]
    given, written = unpacked_payload(header, dict(fields[1:])), dict(again[1:])
    for name in spec.names:
        assert written[name.encode()] == given[name.encode()]
    if list(given) == list(written):
        assert given == written
        assert header.compression or header.xxh3 in (None, _digest_in(again, spec))  # it is of the frames
    assert [(name, bytes(value)) for name, value in encode(decode(again, spec)[1], **identity)] == again


def _digest_in(fields: Fields, spec: Spec) -> str | None:
    return decode(fields, spec)[0].xxh3


def rows_of(block: Block) -> Rows:
    """Return shape and bytes of each tensor of each sample."""
    columns: list[Any] = [
        list(Ragged(column.values, column.shapes)) if column.shapes is not None else list(column.values)
        for column in block.columns
    ]
    return [[(row.shape, row.tobytes()) for row in map(np.asarray, rows)] for rows in zip(*columns, strict=True)]


# --- as a loader receives it ------------------------------------------------------------------------------------------


class Hashes:
    """A server with a fixed answer: the contents of a hash."""

    def __init__(self, fields: dict[bytes, bytes]) -> None:
        self._fields = fields

    def hgetall(self, key: str) -> dict[bytes, bytes]:
        """Return the same for every key."""
        return self._fields


_META = {
    b"id": STREAM.encode(), b"tags": b'["0123456789ab.0"]', b"spec": b"", b"budget_bytes": b"1000000000",
    b"block_bytes": b"1000000", b"retention": b"budget", b"partitions": b"1", b"v": b"1", b"created_ms": b"0",
    b"info": b"{}",
}  # fmt: skip
_PLAN = {
    b"id": b"m", b"state": b"sized", b"kind": b"epoch", b"seed": b"0", b"fingerprint": b"", b"shards": b"3",
    b"sizes": json.dumps([MANY, 100, 100]).encode(), b"created_ms": b"0",
}  # fmt: skip


def _place() -> tuple[Stream, Manifest]:
    stream = find_stream(Hashes(_META), "t")
    assert stream is not None
    manifest = find_manifest(Hashes(_PLAN), stream, 0)
    assert manifest is not None
    return stream, manifest


_STREAM, _MANIFEST = _place()


class _Where:
    """A scope in which some samples may be acknowledged already."""

    def __init__(self, is_settled: bool) -> None:
        self._is_settled = is_settled

    def check(self, header: Header) -> None:
        check_identity(header, _STREAM, _MANIFEST)

    def wanted(self, header: Header, entry_id: bytes) -> NDArray[np.bool_] | None:
        return np.arange(header.first, header.end) % 3 > 0 if self._is_settled else None


def _check_receiver(entry: Entry, fields: Fields, decoded: tuple[Header, Block] | None) -> None:
    """Receive the entry between two good ones: those are yielded whole, and of this one its due samples, or none."""
    spec, where = entry.spec, _Where(bool(entry.switches & SETTLED))
    assembler = Assembler(spec, 2 if entry.switches & SMALL_BATCHES else 64, ArrayPool(keep=4), 0)
    reports: list[ReceivedEntry] = []
    receiver = Receiver(spec, assembler, where, 0, reports.append)
    good = GOOD[entry.number % len(GOOD)]
    for number, one in enumerate((good, fields, good)):
        receive(receiver, b"%d-0" % number, one)
    assembler.flush()
    before, found, after = reports
    assert before.error is after.error is None
    assert found.error is None or type(found.error).__module__ == "penstock_common.errors"
    of_good = _wanted(decode(good, spec), where)
    expected = _wanted(decoded, where) if decoded is not None and found.error is None else []
    assert _handed(assembler, spec) == [*of_good, *expected, *of_good]
    if found.lease is not None and found.lease.unacknowledged == 0:
        return  # every sample was acknowledged before, so its payload does not matter
    if decoded is None or not _is_inside(decoded[0]):
        assert found.error is not None
    else:
        assert found.error is None


def receive(receiver: Receiver, entry_id: bytes, fields: Fields) -> None:
    """Give an entry to the receiver as a channel does."""
    receiver.begin(entry_id)
    for name, value in fields:
        target = receiver.target(name, len(value))
        if target is None:
            receiver.value(name, value)
        elif target is not SKIP:
            assert sum(len(view) for view in target) == len(value)
            at = 0
            for view in target:
                view[:] = value[at : at + len(view)]
                at += len(view)
    receiver.end()


def _is_inside(header: Header) -> bool:
    try:
        check_identity(header, _STREAM, _MANIFEST)
    except BadEntry:
        return False
    return True


def _wanted(decoded: tuple[Header, Block], where: _Where) -> Rows:
    header, block = decoded
    rows, mask = rows_of(block), where.wanted(header, b"")
    kept = [True] * len(rows) if mask is None else mask[block.offsets() - header.first].tolist()
    return [row for row, is_wanted in zip(rows, kept, strict=True) if is_wanted]


def _handed(assembler: Assembler, spec: Spec) -> Rows:
    rows: Rows = []
    while (batch := assembler.take()) is not None:
        columns: list[Any] = []
        for name in spec.names:
            value = batch[name]
            is_bytes = isinstance(value, Ragged) and value.is_bytes
            columns.append([((len(v),), v) if is_bytes else (v.shape, v.tobytes()) for v in value])
            assert len(value) == batch.size
        rows += [list(row) for row in zip(*columns, strict=True)]
    return rows


GOOD = [made_entry(number, seed=1, count=2).as_received() for number in range(len(SPECS))]
"""A good entry of each spec."""
