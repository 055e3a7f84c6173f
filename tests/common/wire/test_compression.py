"""Compressed payload fields: exact bytes back, and no memory for a false claim."""

from __future__ import annotations

import json
import sys
import tracemalloc
from typing import Any

import blosc2  # type: ignore[import-untyped,unused-ignore]
import numpy as np
import pytest
import zstandard

from penstock_common.errors import BadEntry, BadSpec, ChecksumMismatch, MissingExtra, UnsupportedVersion
from penstock_common.wire import compression
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import Fields, decode, digest_of, encode
from penstock_common.wire.compression import CODECS, Compression
from penstock_common.wire.spec import Spec

SPEC = Spec.of(
    {
        "x": ("uint16", (32, 32)),
        "mask": ("bool", (64,)),
        "ids": ("int64", (None,)),
        "t": ("bytes", ()),
        "y": ("int8", ()),
    }
)


def block_of(count: int) -> Any:
    """Return a block of every kind of tensor."""
    builder = BlockBuilder(SPEC, 1 << 30, count)
    for n in range(count):
        builder.add(
            {
                "x": np.full((32, 32), n, np.uint16),
                "mask": np.arange(64) % 7 == n % 7,
                "ids": np.arange(n % 9, dtype=np.int64),
                "t": b"word " * (n % 50),
                "y": 1,
            }
        )
    return builder.finish(0)


def entry(count: int = 40, codecs: str = "zstd") -> Fields:
    """Return a compressed entry."""
    return encode(block_of(count), stream="s", epoch=1, shard=2, compression=Compression.parse(codecs))


def changed(fields: Fields, name: bytes, value: bytes) -> Fields:
    """Return an entry with another payload field and the checksum of it, as a hostile writer makes it."""
    found: Fields = [(key, value if key == name else data) for key, data in fields]
    header = json.loads(bytes(found[0][1]))
    header["xxh3"] = digest_of(data for _, data in found[1:])
    return [(b"meta", json.dumps(header).encode()), *found[1:]]


@pytest.mark.parametrize("count", [40, 100])
@pytest.mark.parametrize("codecs", ["zstd", "blosc2", "x=zstd,ids=blosc2"])
def test_a_compressed_block_comes_back_bit_exact(codecs: str, count: int) -> None:
    """Ragged shapes in the header (40 samples) and in fields of their own (100) size what is decompressed."""
    plain, packed = encode(block_of(count), stream="s", epoch=1, shard=2), entry(count, codecs)
    assert sum(len(value) for _, value in packed) < sum(len(value) for _, value in plain)
    header, block = decode(packed, SPEC)
    again = encode(block, stream="s", epoch=1, shard=2)
    assert [(name, bytes(value)) for name, value in again] == [(name, bytes(value)) for name, value in plain]
    assert header.xxh3 == digest_of(value for _, value in packed[1:])


def test_without_compression_no_byte_changes_and_what_does_not_shrink_stays() -> None:
    """Streams without compression, and noise in streams with it, look as before to every older reader."""
    plain = encode(block_of(9), stream="s", epoch=1, shard=2)
    none = encode(block_of(9), stream="s", epoch=1, shard=2, compression=Compression.parse("none"))
    assert [(name, bytes(value)) for name, value in none] == [(name, bytes(value)) for name, value in plain]
    builder = BlockBuilder(Spec.of({"x": ("uint8", (5000,))}), 1 << 20, 1)
    builder.add({"x": np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)})
    noise = builder.finish(0)
    assert b"compression" not in bytes(
        encode(noise, stream="s", epoch=0, shard=0, compression=Compression.parse("zstd"))[0][1]
    )


def bomb(codec: str, size: int) -> bytes:
    """Return a small frame of many zeros."""
    if codec == "zstd":
        return zstandard.ZstdCompressor().compress(bytes(size))
    return bytes(blosc2.compress2(bytes(size), typesize=1, codec=blosc2.Codec.ZSTD, filters=[blosc2.Filter.SHUFFLE]))


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_is_refused_before_memory_is_taken(codec: str) -> None:
    """A frame that claims more than the header's shapes must not cost the memory that it claims."""
    fields = changed(entry(40, f"x={codec}"), b"x", bomb(codec, 400_000_000))
    compression.CODECS[codec].load()
    tracemalloc.start()
    try:
        with pytest.raises(BadEntry, match=r"claims 400000000 bytes.*its shapes say 81920"):
            decode(fields, SPEC)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_frame_is_a_bad_entry(codec: str) -> None:
    """No damage to a frame crashes a reader or gives it wrong samples."""
    fields = entry(40, f"x={codec}")
    frame = bytes(dict(fields)[b"x"])
    with pytest.raises(ChecksumMismatch):
        decode([(name, frame[:-1] + b"?" if name == b"x" else value) for name, value in fields], SPEC)
    for cut in range(0, len(frame), 3):
        with pytest.raises(BadEntry):
            decode(changed(fields, b"x", frame[:cut]), SPEC)
    with pytest.raises(BadEntry):
        decode(changed(fields, b"x", frame + b"more"), SPEC)
    with pytest.raises(BadEntry, match="compressed to 81920 bytes, its shapes say 81920"):
        decode(changed(fields, b"x", bytes(81920)), SPEC)


@pytest.mark.parametrize(("at", "value"), [(2, 0x01), (2, 0xC5), (16, 160), (22, 1), (31, 0x08), (31, 0x01), (0, 9)])
def test_blosc2_chunks_of_other_forms_are_not_given_to_the_library(at: int, value: int) -> None:
    """A chunk may name plugins, dictionaries and files, which the library would look for."""
    fields = entry(40, "x=blosc2")
    frame = bytearray(dict(fields)[b"x"])
    frame[at] = value
    with pytest.raises(BadEntry, match="not in the form"):
        decode(changed(fields, b"x", bytes(frame)), SPEC)


def test_all_tensors_of_an_entry_are_bounded_before_the_first_is_decompressed() -> None:
    """256 tensors of 512 MB each would be 128 GB, from an entry of a few kB."""
    spec = Spec.of({f"x{n}": ("uint8", (None,)) for n in range(3)})
    frame = bomb("zstd", 400_000_000)
    tensors = {f"x{n}": {"dtype": "uint8", "shape": [1, None], "shapes": [[400_000_000]]} for n in range(3)}
    header = {"v": 1, "stream": "s", "epoch": 0, "shard": 0, "first": 0, "count": 1, "tensors": tensors}
    header["compression"] = dict.fromkeys(tensors, "zstd")
    with pytest.raises(BadEntry, match="an entry of 1200000000 bytes"):
        decode([(b"meta", json.dumps(header).encode()), *((name.encode(), frame) for name in tensors)], spec)


@pytest.mark.parametrize("value", ["zstd", None, 1, [], {"x": "lz9"}, {"x": None}])
def test_a_codec_of_a_later_version_stops_a_reader(value: Any) -> None:
    """It is no bad entry, because a newer reader can read it."""
    meta = {**json.loads(bytes(entry()[0][1])), "compression": value}
    with pytest.raises(UnsupportedVersion, match="'compression'"):
        decode([(b"meta", json.dumps(meta).encode()), *entry()[1:]], SPEC)


@pytest.mark.parametrize("value", [{}, {"z": "zstd"}])
def test_codecs_of_no_tensor_make_a_bad_entry(value: Any) -> None:
    """A header that names no tensor of the spec was written for none of its readers."""
    meta = {**json.loads(bytes(entry()[0][1])), "compression": value}
    with pytest.raises(BadEntry, match="compression names"):
        decode([(b"meta", json.dumps(meta).encode()), *entry()[1:]], SPEC)


@pytest.mark.parametrize(("codec", "module"), [("zstd", "zstandard"), ("blosc2", "blosc2")])
def test_a_missing_package_is_one_sentence(codec: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line to paste is the answer to a host that lacks the package."""
    fields = entry(40, codec)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf'needs .*: pip install "penstock\[{codec}\]"'):
        decode(fields, SPEC)


@pytest.mark.parametrize("value", ["gzip", "x=gzip", "x=zstd,x=blosc2", "=zstd", {"x": None}, {}, 3, ["zstd"]])
def test_a_wrong_setting_is_refused(value: Any) -> None:
    """A typo must not leave a stream without the compression that its user believes in."""
    with pytest.raises(BadSpec, match="compression is"):
        Compression.parse(value)


def test_a_setting_reads_back_from_its_text() -> None:
    """The stream's meta keeps the text."""
    for value in ("zstd", "none", {"x": "zstd", "a/b": "blosc2"}):
        found = Compression.parse(value)
        assert Compression.parse(str(found)) == found
    with pytest.raises(BadSpec, match="names the tensor 'z'; the spec has x"):
        Compression.parse({"z": "zstd"}).require(SPEC)
