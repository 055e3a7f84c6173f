"""The hostile half of the golden corpus: entries that must be refused, each for one reason. Every case starts from a
good entry and breaks one thing. If the payload changes, the checksum is made right again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.wire.codec import digest_of
from tests.golden import frames
from tests.golden.good_cases import compressed, made

Case = dict[str, Any]
Fields = list[list[Any]]
Header = dict[str, Any]

FIXED = made(
    "",
    "",
    {"x": ("uint8", (2,)), "y": ("int64", ())},
    [{"x": np.array([i, 2], "uint8"), "y": np.int64(i)} for i in (0, 1)],
)
RAGGED = made(
    "",
    "",
    {"b": ("float32", (None, 4)), "s": ("bytes", ())},
    [{"b": np.ones((i, 4), "f4"), "s": b"ab"} for i in (1, 2)],
)
FEW = made("", "", {"b": ("float32", (None, 4))}, [{"b": np.ones((i % 2, 4), "f4")} for i in range(65)])
FLAGS = made("", "", {"m": ("bool", (2,))}, [{"m": np.array([True, False])}])
BYTES = made("", "", dict.fromkeys("abc", ("bytes", ())), [dict.fromkeys("abc", b"ab")])
HUGE = made("", "", {"x": ("float32", (0, 1000, 1000))}, [{"x": np.ones((0, 1000, 1000), "f4")}])


def hostile_cases() -> Iterator[Case]:
    """Return all hostile cases."""
    for part in (_fields(), _json(), _versions(), _numbers(), _holes(), _tensors(), _shapes(), _payloads(), _digests()):
        yield from part
    yield from _refs()
    yield from _compressed()


def case(name: str, about: str, base: Case, fields: Fields, error: str = "BadEntry") -> Case:
    """Return one case."""
    return {"name": name, "about": about, "error": error, "spec": base["spec"], "fields": fields}


def header_of(base: Case) -> Header:
    """Return the base's header, to be broken."""
    found: Header = json.loads(bytes.fromhex(base["fields"][0][1]))
    return found


def text(name: str, about: str, meta: str | bytes, error: str = "BadEntry", base: Case = FIXED) -> Case:
    """Return a case with this text as its header."""
    data = meta if isinstance(meta, bytes) else meta.encode()
    return case(name, about, base, [["meta", data.hex()], *base["fields"][1:]], error)


def header(
    name: str, about: str, *, error: str = "BadEntry", base: Case = FIXED, drop: str = "", **changes: Any
) -> Case:
    """Return a case whose header has some keys changed, or one left out."""
    value = {key: said for key, said in (header_of(base) | changes).items() if key != drop}
    return text(name, about, json.dumps(value), error, base)


def tensor(name: str, about: str, which: str, base: Case = FIXED, drop: str = "", **changes: Any) -> Case:
    """Return a case whose header describes one tensor differently."""
    value = header_of(base)
    said = value["tensors"][which] | changes
    value["tensors"][which] = {key: found for key, found in said.items() if key != drop}
    return text(name, about, json.dumps(value), base=base)


def payload(name: str, about: str, base: Case, change: Callable[[Fields], Any], error: str = "BadEntry") -> Case:
    """Return a case with changed fields and a fitting checksum."""
    fields = [list(field) for field in base["fields"]]
    change(fields)
    value = header_of(base) | {"xxh3": digest_of([bytes.fromhex(data) for _, data in fields[1:]])}
    fields[0][1] = json.dumps(value).encode().hex()
    return case(name, about, base, fields, error)


def _fields() -> Iterator[Case]:
    meta, x, y = FIXED["fields"]
    yield case("no-fields", "an entry without fields", FIXED, [])
    yield case("meta-missing", "payload only", FIXED, [x, y])
    yield case("meta-not-first", "the header after a payload", FIXED, [x, meta, y])
    yield case("meta-twice", "two headers", FIXED, [meta, meta, x, y])
    yield case("meta-upper-case", "names are case-sensitive", FIXED, [["META", meta[1]], x, y])
    yield case(
        "field-of-control-characters", "a name that would colour a terminal", FIXED, [meta, ["\x1b[31m\n", x[1]], y]
    )
    yield case("field-not-ascii", "a name in another alphabet", FIXED, [meta, ["\u03c7", x[1]], y])
    yield payload("field-missing", "no payload for y", FIXED, lambda fields: fields.pop())
    yield payload("field-extra", "a payload nobody announced", FIXED, lambda fields: fields.append(["z", "00"]))
    yield payload("field-twice", "x stands twice", FIXED, lambda fields: fields.append(x))
    yield payload("fields-swapped", "not in the spec's order", FIXED, lambda fields: fields.append(fields.pop(1)))


def _json() -> Iterator[Case]:
    good = json.dumps(header_of(FIXED))
    yield text("json-empty", "an empty header", "")
    yield text("json-truncated", "cut off", good[:-1])
    yield text("json-trailing", "a second value after the header", good + "{}")
    yield text("json-array", "a list holding the header", f"[{good}]")
    yield text("json-number", "not an object", "1")
    yield text("json-not-utf8", "a byte that is no UTF-8, in a key to be ignored", good[:-1].encode() + b',"n":"\xff"}')
    yield text("json-utf16", "another encoding", good.encode("utf-16"))
    yield text("json-byte-order-mark", "UTF-8 with a mark", b"\xef\xbb\xbf" + good.encode())
    yield text("json-single-quotes", "Python is not JSON", good.replace('"', "'"))
    yield text("json-nan", "NaN in a key to be ignored", good[:-1] + ',"note":NaN}')
    yield text("json-infinity", "Infinity as an epoch", good.replace('"epoch": 0', '"epoch": -Infinity'))
    yield text("json-nested", "3000 lists begin, none ends", good[:-1] + ',"note":' + "[" * 3000)
    yield text("json-key-twice", "count twice, the same", good[:-1] + ',"count":2}')
    yield text("json-key-twice-escaped", "count and c\\u006funt", good[:-1] + r',"c\u006funt":2}')
    yield text("json-tensor-twice", "x twice", good.replace('"tensors": {', '"tensors": {"x": {},'))
    yield text(
        "json-dtype-twice",
        "dtype twice inside a tensor",
        good.replace('"dtype": "uint8"', '"dtype":"uint8","dtype":"uint8"'),
    )


def _versions() -> Iterator[Case]:
    newer = "UnsupportedVersion"
    yield header("version-2", "a newer format", v=2, error=newer)
    yield header("version-missing", "no version", drop="v")
    yield header("version-0", "there was none", v=0)
    yield header("version-text", "text", v="1")
    yield header("version-float", "1.0 is not an integer", v=1.0)
    yield header("version-true", "true is not 1", v=True)
    yield header("reserved-ref", "the payload lies elsewhere", ref="segment-1", error=newer)
    yield header("reserved-compression", "no object", compression="zstd", error=newer)
    yield header("reserved-compression-null", "even null", compression=None, error=newer)


def _numbers() -> Iterator[Case]:
    yield header("stream-missing", "no stream id", drop="stream")
    yield header("stream-empty", "an empty id", stream="")
    yield header("stream-signs", "signs an id cannot have", stream='a"b\n')
    yield header("stream-long", "65 letters", stream="a" * 65)
    yield header("stream-number", "a number", stream=5)
    yield header("epoch-missing", "no epoch", drop="epoch")
    yield header("epoch-negative", "below 0", epoch=-1)
    yield header("epoch-too-large", "2^53", epoch=2**53)
    yield header("shard-float", "2.0", shard=2.0)
    yield header("shard-null", "null", shard=None)
    yield header("first-negative", "below 0", first=-1)
    yield header("first-too-large", "2^20", first=1 << 20)
    yield header("first-2-to-the-32", "would grow a bitmap to half a gigabyte", first=1 << 32)
    yield header("count-0", "no samples", count=0)
    yield header("count-true", "true is not 1", count=True)
    yield header("count-too-large", "more than a shard has", count=(1 << 20) + 1)
    yield header("count-2-to-the-62", "far more", count=1 << 62)
    yield header("count-of-400-digits", "a very large integer", count=10**400)
    yield header("count-differs", "tensors say 2", count=3)
    yield header("end-beyond-shard", "the last sample lies outside", first=(1 << 20) - 1)


def _holes() -> Iterator[Case]:
    yield header("holes-text", "not a list", holes="1")
    yield header("holes-null", "null", holes=None)
    yield header("holes-of-text", "a list of text", holes=["1"])
    yield header("holes-falling", "not rising", holes=[2, 1])
    yield header("holes-repeated", "not strictly rising", holes=[1, 1])
    yield header("holes-before-first", "before the entry", first=5, holes=[4])
    yield header("holes-after-end", "behind the entry", holes=[3])
    yield header("holes-beyond-shard", "the last hole lies outside the shard", first=(1 << 20) - 2, holes=[1 << 20])
    yield header("holes-1025", "more than there may be", holes=list(range(1025)))
    yield header("holes-true", "true is not 1", holes=[True])


def ref(name: str, about: str, value: Any, base: Case = FIXED) -> Case:
    """Return a case with a payload in a file, for a reader that sees the files."""
    broken = header(name, about, base=base, ref=value)
    return broken | {"segments": True, "fields": broken["fields"][:1]}


def _refs() -> Iterator[Case]:
    file, sizes = "0-0-0123456789ab.seg", [4, 16]
    yield ref("ref-null", "no list", None)
    yield ref("ref-text", "no list", file)
    yield ref("ref-of-two", "no sizes", [file, 4096])
    yield ref("ref-path", "a file elsewhere", [f"../{file}", 4096, sizes])
    yield ref("ref-line-end", "a name and more", [f"{file}\n", 4096, sizes])
    yield ref("ref-offset-in-head", "in the file's head", [file, 4032, sizes])
    yield ref("ref-offset-odd", "no multiple of 64", [file, 4097, sizes])
    yield ref("ref-offset-float", "4096.0", [file, 4096.0, sizes])
    yield ref("ref-offset-2-to-the-40", "behind every file", [file, 1 << 40, sizes])
    yield ref("ref-sizes-few", "one field of two", [file, 4096, [4]])
    yield ref("ref-sizes-many", "three fields of two", [file, 4096, [*sizes, 0]])
    yield ref("ref-size-differs", "x has 4 bytes", [file, 4096, [5, 16]])
    yield ref("ref-size-negative", "below 0", [file, 4096, [-1, 2, 2]], BYTES)
    yield ref("ref-size-true", "true is not 1", [file, 4096, [True, 2, 2]], BYTES)
    yield ref("ref-size-float", "2.0", [file, 4096, [2.0, 2, 2]], BYTES)
    yield ref("ref-size-too-large", "more than a field may have", [file, 4096, [512_000_001, 2, 2]], BYTES)
    yield ref(
        "ref-sizes-too-large", "more than an entry may have, no field too large", [file, 4096, [5 * 10**8] * 3], BYTES
    )


def _tensors() -> Iterator[Case]:
    known = header_of(FIXED)["tensors"]
    yield header("tensors-missing", "none announced", drop="tensors")
    yield header("tensors-list", "a list of names", tensors=["x", "y"])
    yield header("tensors-one-less", "y not announced", tensors={"x": known["x"]})
    yield header("tensors-one-more", "z is not in the spec", tensors=known | {"z": known["y"]})
    yield header("tensors-renamed", "another name", tensors={"x": known["x"], "Y": known["y"]})
    yield tensor("dtype-differs", "another dtype of the same size", "x", dtype="int8")
    yield tensor("dtype-unknown", "no such dtype", "x", dtype="object")
    yield tensor("dtype-missing", "no dtype", "x", drop="dtype")
    yield tensor("shape-missing", "no shape", "x", drop="shape")
    yield tensor("shape-differs", "another shape of the same size", "x", shape=[2, 1, 2])
    yield tensor("shape-without-count", "a sample's shape alone", "x", shape=[2])
    yield tensor("shape-float", "2.0 is not an integer", "x", shape=[2, 2.0])
    yield tensor("shape-null", "null in a fixed tensor", "x", shape=[2, None])
    yield tensor("shape-negative", "-1 for whatever is there", "x", shape=[2, -1])
    yield tensor("ragged-shape-filled", "a size where the spec has null", "b", RAGGED, shape=[2, 2, 4])


def _shapes() -> Iterator[Case]:
    def inline(name: str, about: str, value: Any) -> Case:
        return tensor(name, about, "b", RAGGED, shapes=value)

    yield tensor("shapes-on-fixed", "a fixed tensor has none", "x", shapes=[[2], [2]])
    yield inline("shapes-null", "null", None)
    yield inline("shapes-one-less", "one shape for two samples", [[3, 4]])
    yield inline("shapes-flat", "not a list of lists", [1, 2])
    yield inline("shapes-one-size-less", "one size instead of two", [[1], [2]])
    yield inline("shapes-fixed-size-differs", "4 is fixed", [[2, 2], [2, 4]])
    yield inline("shapes-negative", "sizes that add up all the same", [[4, 4], [-1, 4]])
    yield inline("shapes-true", "true is not 1", [[True, 4], [2, 4]])
    yield inline("shapes-float", "1.0 is not 1", [[1.0, 4], [2, 4]])
    yield inline("shapes-beyond-64-bits", "2^70", [[1, 4], [2**70, 4]])
    yield inline("shapes-wrap-around", "2^62 x 4 is 0 in 64 bits", [[3, 4], [2**62, 4]])
    yield inline("shapes-too-large", "half a gigabyte in one sample", [[1, 4], [32_000_001, 4]])
    yield inline("shapes-too-small", "payload is left over", [[1, 4], [1, 4]])
    yield tensor("length-too-large", "a byte string longer than its payload", "s", RAGGED, shapes=[[2], [3]])
    yield tensor(
        "lengths-wrap-around",
        "lengths whose sum wraps around in 64 bits",
        "s",
        RAGGED,
        shapes=[[2**63 - 1], [2**63 - 1]],
    )
    yield _two_free("shapes-empty-yet-huge", "0 x 10^9: no bytes, but no array either", [[0, 1_000_000_000], [0, 0]])
    yield _two_free("shapes-empty-and-overflowing", "0 x 2^63-1", [[0, 2**63 - 1], [0, 0]])
    yield tensor("shapes-nowhere", "neither inline nor in a field", "b", RAGGED, drop="shapes")
    yield _with_field("shapes-twice", "inline and in a field", RAGGED)
    yield payload(
        "shapes-field-short", "one size less", FEW, lambda fields: fields[1].__setitem__(1, fields[1][1][:-16])
    )
    yield payload(
        "shapes-field-odd",
        "not a whole number of sizes",
        FEW,
        lambda fields: fields[1].__setitem__(1, fields[1][1][:-2]),
    )
    yield payload("shapes-field-negative", "-1", FEW, lambda fields: _poke(fields, [(0, -1), (2, 2)]))
    yield payload("shapes-field-wraps", "2^62 twice", FEW, lambda fields: _poke(fields, [(0, 2**62), (2, 2**62 + 1)]))
    yield payload("shapes-field-fixed-size-differs", "4 is fixed", FEW, lambda fields: _poke(fields, [(3, 5)]))
    yield payload(
        "shapes-field-after-values", "it stands before them", FEW, lambda fields: fields.append(fields.pop(1))
    )


def _two_free(name: str, about: str, shapes: list[list[int]]) -> Case:
    base = made("", "", {"b": ("uint8", (None, None))}, [{"b": np.ones((0, 0), "u1")}] * 2)
    return tensor(name, about, "b", base, shapes=shapes)


def _with_field(name: str, about: str, base: Case) -> Case:
    shapes = np.array([[1, 4], [2, 4]], "<i8").tobytes().hex()
    return payload(name, about, base, lambda fields: fields.insert(1, ["b.shapes", shapes]))


def _poke(fields: Fields, sizes: list[tuple[int, int]]) -> None:
    shapes = np.frombuffer(bytes.fromhex(fields[1][1]), "<i8").copy()
    for position, size in sizes:
        shapes[position] = size
    fields[1][1] = shapes.tobytes().hex()


def _payloads() -> Iterator[Case]:
    def resized(name: str, about: str, base: Case, which: int, data: Callable[[str], str]) -> Case:
        return payload(name, about, base, lambda fields: fields[which].__setitem__(1, data(fields[which][1])))

    yield resized("payload-short", "a byte is missing", FIXED, 1, lambda data: data[:-2])
    yield resized("payload-long", "a byte too many", FIXED, 1, lambda data: data + "00")
    yield resized("payload-empty", "nothing", FIXED, 2, lambda data: "")
    yield resized("payload-odd", "not a whole number of elements", RAGGED, 1, lambda data: data[:-2])
    yield resized("payload-ragged-long", "an element too many", RAGGED, 1, lambda data: data + "00000000")
    yield resized("payload-bytes-short", "a byte string cut off", RAGGED, 2, lambda data: data[:-2])
    yield resized("bool-2", "neither 0 nor 1", FLAGS, 1, lambda data: "0102")
    shape = [1 << 20, 1000, 1000]
    yield _claims("claims-terabytes", "2^20 samples of 4 MB in no bytes", shape)


def _claims(name: str, about: str, shape: list[int]) -> Case:
    base = HUGE | {"spec": {"x": ["float32", [1000, 1000]]}}
    value = header_of(HUGE) | {"count": shape[0]}
    value["tensors"]["x"]["shape"] = shape
    return text(name, about, json.dumps(value), base=base)


def _digests() -> Iterator[Case]:
    digest = header_of(FIXED)["xxh3"]
    other = "ChecksumMismatch"
    yield header("digest-differs", "another payload", xxh3="0" * 16, error=other)
    flipped = [list(field) for field in FIXED["fields"]]
    flipped[1][1] = "01" + flipped[1][1][2:]
    yield case("digest-of-a-flipped-bit", "one bit of the payload differs", FIXED, flipped, other)
    shapes = [list(field) for field in FEW["fields"]]
    _poke(shapes, [(0, 1), (2, 0)])
    yield case("digest-covers-shapes", "two shapes changed places", FEW, shapes, other)
    yield header("digest-upper-case", "lowercase it is", xxh3=digest.upper())
    yield header("digest-short", "15 digits", xxh3=digest[:15])
    yield header("digest-number", "a number", xxh3=int(digest, 16) >> 12)
    yield header("digest-null", "null", xxh3=None)
    yield header("digest-newline", "a line feed behind it", xxh3=digest + "\n")


def _compressed() -> Iterator[Case]:
    plain = made("", "", {"x": ("uint16", (64,))}, [{"x": row} for row in _numbers_of(192).reshape(3, 64)])
    zstd = compressed(plain, x=("zstd", frames.ZSTD_NUMBERS))
    blosc2 = compressed(plain, x=("blosc2", frames.BLOSC2_NUMBERS))
    zeros = made("", "", {"x": ("uint8", (600,))}, [{"x": np.zeros(600, "uint8")}])

    def frame(name: str, about: str, data: str, base: Case = zstd) -> Case:
        return payload(name, about, base, lambda fields: fields[1].__setitem__(1, data))

    def byte(name: str, about: str, at: int, value: int) -> Case:
        data = bytearray.fromhex(frames.BLOSC2_NUMBERS)
        data[at] = value
        return frame(name, about, data.hex(), blosc2)

    newer = "UnsupportedVersion"
    yield header("codec-unknown", "a codec of a later version", base=zstd, compression={"x": "lz9"}, error=newer)
    yield header("codec-no-text", "no name of a codec", base=zstd, compression={"x": None}, error=newer)
    yield header("compression-empty", "it would be left out", base=zstd, compression={})
    yield header("compression-of-no-tensor", "z is none", base=zstd, compression={"x": "zstd", "z": "zstd"})
    yield header("digest-of-a-frame-differs", "it is of the frame", base=zstd, xxh3="0" * 16, error="ChecksumMismatch")
    good = frames.ZSTD_NUMBERS
    yield frame("zstd-cut", "the last byte is missing", good[:-2])
    yield frame("zstd-extra", "a byte behind the frame", good + "00")
    yield frame("zstd-twice", "two frames", "28b52ffd608000030c00aa" * 2)
    yield frame("zstd-no-frame", "another magic number", "29" + good[2:])
    yield frame("zstd-empty", "no frame", "")
    yield frame("zstd-not-shorter", "as long as what it holds", good.ljust(2 * plain_bytes(plain), "0"))
    # magic number, descriptor of a content size of 4 bytes and one segment, size, an RLE block
    yield frame("zstd-bomb", "claims 400 MB", f"28b52ffda0{struct.pack('<I', 400_000_000).hex()}030001aa")
    yield frame("zstd-claims-less", "383 bytes", good.replace("608000", "607f00", 1))
    yield frame("zstd-holds-less", "claims 384 bytes, holds 383", "28b52ffd608000fb0b0000")
    yield frame("zstd-holds-more", "claims 384 bytes, holds 385", "28b52ffd6080000b0c0000")
    yield frame("zstd-dictionary", "a dictionary's number", "28b52ffd61078000030c00aa")
    yield frame("zstd-window-too-large", "a window of 2 MB for 384 bytes", "28b52ffd40588000030c00aa")
    yield frame("zstd-skippable", "a skippable frame", "502a4d1800000000")
    shapes = [[400_000_000]]
    many = made("", "", dict.fromkeys("abc", ("uint8", (None,))), [dict.fromkeys("abc", np.zeros(600, "u1"))])
    value = header_of(compressed(many, **dict.fromkeys("abc", ("zstd", frames.ZSTD_MASK))))
    for said in value["tensors"].values():
        said["shapes"] = shapes
    fields = [["meta", json.dumps(value).encode().hex()], *([name, frames.ZSTD_MASK] for name in "abc")]
    yield case("compressed-entry-too-large", "three tensors of 400 MB, in 24 bytes each", many, fields)
    yield frame("zstd-no-size", "no content size", frames.ZSTD_NO_SIZE, compressed(zeros, x=("zstd", "")))
    yield byte("blosc2-version", "another format of chunks", 0, 9)
    yield byte("blosc2-lz4", "another codec in the flags", 2, 0x25)
    yield byte("blosc2-short-head", "no extended header", 2, 0x81)
    yield byte("blosc2-filter", "a filter of a plugin", 16, 160)
    yield byte("blosc2-user-codec", "a codec of a plugin", 22, 160)
    yield byte("blosc2-lazy", "a lazy chunk", 31, 0x08)
    yield byte("blosc2-dictionary", "a dictionary", 31, 0x01)
    yield byte("blosc2-claims-more", "385 bytes", 4, 0x81)
    yield byte("blosc2-bomb", "a claim of 2 GB", 7, 0x7F)
    yield byte("blosc2-block-too-large", "a block larger than the chunk", 9, 0x02)
    yield byte("blosc2-length", "another length", 12, 0x04)
    yield frame("blosc2-cut", "the last byte is missing", frames.BLOSC2_NUMBERS[:-2], blosc2)
    yield frame("blosc2-half-a-head", "less than a header", frames.BLOSC2_NUMBERS[:60], blosc2)


def _numbers_of(count: int) -> NDArray[np.uint16]:
    return np.arange(count, dtype="uint16") + np.uint16(250)


def plain_bytes(base: Case) -> int:
    """Return the bytes of the first payload field."""
    return len(base["fields"][1][1]) // 2
