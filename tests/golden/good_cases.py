"""The good half of the golden corpus: every dtype and every form of samples in an entry. Expected samples come from the
arrays that went in, never from a decoder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import digest_of, encode
from penstock_common.wire.spec import Spec
from tests.golden import frames

STREAM = "5f1c0a9be2d4"
Case = dict[str, Any]
Sample = dict[str, Any]


def good_cases() -> Iterator[Case]:
    """Return all good cases."""
    yield from _dtypes()
    yield from _shapes()
    yield from _ragged()
    yield from _identities()
    yield from _headers()
    yield from _compressed()


def made(
    name: str,
    about: str,
    spec: dict[str, Any],
    samples: Sequence[Sample],
    *,
    first: int = 0,
    holes: Sequence[int] = (),
    epoch: int = 0,
    shard: int = 0,
    checksum: bool = True,
) -> Case:
    """Return a case as the code writes it, with the expected samples."""
    builder = BlockBuilder(Spec.of(spec), 1 << 20, len(samples))
    for sample in samples:
        builder.add(sample)
    block = builder.finish(first, holes)
    fields = encode(block, stream=STREAM, epoch=epoch, shard=shard, checksum=checksum)
    offsets = [offset for offset in range(first, first + len(samples) + len(holes)) if offset not in holes]
    digest = digest_of([value for _, value in fields[1:]]) if checksum else None
    return {
        "name": name,
        "about": about,
        "spec": {key: [dtype, list(shape)] for key, (dtype, shape) in spec.items()},
        "fields": [[field.decode(), bytes(value).hex()] for field, value in fields],
        "header": {
            "stream": STREAM,
            "epoch": epoch,
            "shard": shard,
            "first": first,
            "count": len(samples),
            "holes": list(holes),
            "xxh3": digest,
        },
        "samples": [
            {"offset": offset, "tensors": {key: _expected(sample[key], *spec[key]) for key in spec}}
            for offset, sample in zip(offsets, samples, strict=True)
        ],
    }


def _expected(value: Any, dtype: str, _shape: Any) -> dict[str, Any]:
    if dtype == "bytes":
        return {"dtype": dtype, "shape": [len(value)], "hex": bytes(value).hex()}
    array: NDArray[Any] = np.asarray(value)
    if dtype == "bfloat16":
        array = array.astype(ml_dtypes.bfloat16)
    little = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": dtype, "shape": list(array.shape), "hex": little.tobytes().hex(), "values": _numbers(array)}


def _numbers(array: NDArray[Any]) -> list[str]:
    flat = array.reshape(-1)
    if array.dtype.kind in "biu":
        return [str(int(number)) for number in flat]
    if array.dtype.kind == "c":
        return [repr(float(part)) for number in flat for part in (number.real, number.imag)]
    return [repr(float(number)) for number in flat]


def _dtypes() -> Iterator[Case]:
    yield made("dtype-bool", "one byte each", {"x": ("bool", (3,))}, [{"x": np.array([True, False, True])}])
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"):
        info = np.iinfo(name)
        row = np.array([info.min, info.max, 1, 0, info.max // 3], dtype=name)
        yield made(f"dtype-{name}", "the smallest, the largest, and some between", {"x": (name, (5,))}, [{"x": row}])
    for name in ("float16", "float32", "float64"):
        floats = np.finfo(name)
        odd = [0.0, -0.0, 1.5, floats.min, floats.smallest_subnormal, np.inf, -np.inf, np.nan]
        yield made(
            f"dtype-{name}", "signed zeros, subnormal, infinities, NaN", _one(name, 8), [{"x": np.array(odd, name)}]
        )
    small = np.array([0.0, -0.0, 1.0, -2.5, 3.3895314e38, np.inf, -np.inf, np.nan]).astype(ml_dtypes.bfloat16)
    yield made("dtype-bfloat16", "the upper half of a binary32", _one("bfloat16", 8), [{"x": small}])
    for name in ("complex64", "complex128"):
        row = np.array([1 + 2j, -0.5j, complex(np.inf, -1)], dtype=name)
        yield made(f"dtype-{name}", "real part first", _one(name, 3), [{"x": row}])
    payload = np.array([0x7FF8000000000123, 0xFFF0000000000001], dtype=np.uint64).view(np.float64)
    yield made("nan-payloads", "bits of a NaN travel unchanged", _one("float64", 2), [{"x": payload}])
    strings = [b"plain", bytes(range(256)), "ü€𝄞".encode(), b"ends in zeros\0\0"]
    yield made("dtype-bytes", "any bytes at all", {"x": ("bytes", ())}, [{"x": string} for string in strings])


def _one(dtype: str, size: int) -> dict[str, Any]:
    return {"x": (dtype, (size,))}


def _ramp(*shape: int, dtype: str = "float32") -> NDArray[Any]:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def _shapes() -> Iterator[Case]:
    scalars = [{"x": np.int64(value), "y": float(value)} for value in (7, -1, 3)]
    yield made("scalars", "shape [] has one element", {"x": ("int64", ()), "y": ("float64", ())}, scalars)
    empty = {"x": np.zeros((3, 0, 2), "float32"), "y": np.uint8(9)}
    zero = {"x": ("float32", (3, 0, 2)), "y": ("uint8", ())}
    yield made("zero-size-dimension", "an empty payload is still a field", zero, [empty, empty])
    yield made(
        "c-order", "the last index runs fastest", {"x": ("uint8", (2, 3, 4))}, [{"x": _ramp(2, 3, 4, dtype="uint8")}]
    )
    ones = (1,) * 31
    yield made("many-dimensions", "31, the most there may be", {"x": ("int8", ones)}, [{"x": np.full(ones, 5, "int8")}])
    big = {"x": _ramp(4).astype(">f4"), "y": np.array(258, dtype=">u2")}
    little = {"x": ("float32", (4,)), "y": ("uint16", ())}
    yield made("big-endian-input", "is stored little-endian", little, [big])
    table = _ramp(4, 6, dtype="int32")
    views = [{"x": table[::2, ::3]}, {"x": table.T[:2, :2]}, {"x": table[::-2, -2:]}]
    yield made("strided-input", "is stored in C order", {"x": ("int32", (2, 2))}, views)
    names = {"a/b.c-d": ("int8", ()), "0": ("int8", ()), "_": ("int8", ()), "metadata": ("int8", ())}
    yield made("names", "every sign a name may have", names, [dict.fromkeys(names, np.int8(1))])
    yield made("many-samples", "300 in one entry", {"y": ("uint16", ())}, [{"y": np.uint16(i)} for i in range(300)])


def _ragged() -> Iterator[Case]:
    boxes = {"boxes": ("float32", (None, 4))}
    some = [{"boxes": _ramp(size, 4)} for size in (2, 0, 3)]
    yield made("ragged-inline", "shapes in the header; the second sample has no box", boxes, some)
    exact = [{"boxes": _ramp(i % 3, 4)} for i in range(64)]
    yield made("ragged-64-samples", "the most whose shapes are inlined", boxes, exact)
    yield made("ragged-65-samples", "shapes in a field of their own", boxes, [*exact, {"boxes": _ramp(1, 4)}])
    free = [{"x": _ramp(*shape, dtype="uint8")} for shape in ((2, 3, 3), (1, 5, 3), (0, 7, 3), (4, 0, 3))]
    yield made("ragged-two-free", "two sizes differ, one is fixed", {"x": ("uint8", (None, None, 3))}, free)
    none = [{"boxes": _ramp(0, 4)}, {"boxes": _ramp(0, 4)}]
    yield made("ragged-all-empty", "an empty payload, two shapes", boxes, none)
    yield made("ragged-bool", "bool, one dimension", {"m": ("bool", (None,))}, [{"m": np.array([True, False])}])
    half = np.array([1, 2, 3]).astype(ml_dtypes.bfloat16)
    yield made("ragged-bfloat16", "two bytes an element", {"x": ("bfloat16", (None,))}, [{"x": half}, {"x": half[:1]}])
    yield made("bytes-empty", "strings of no bytes", {"s": ("bytes", ())}, [{"s": b""}, {"s": b""}])
    texts = [{"s": b"x" * (i % 4)} for i in range(70)]
    yield made("bytes-70-samples", "lengths in a field of their own", {"s": ("bytes", ())}, texts)
    detection = {
        "image": ("uint8", (2, 2, 3)),
        "boxes": ("float32", (None, 4)),
        "classes": ("int64", (None,)),
        "weight": ("float64", ()),
        "file": ("bytes", ()),
    }
    scenes = [
        {
            "image": _ramp(2, 2, 3, dtype="uint8") + i,
            "boxes": _ramp(i, 4),
            "classes": _ramp(i, dtype="int64"),
            "weight": 0.1 * i,
            "file": f"{i}.jpg".encode(),
        }
        for i in range(3)
    ]
    yield made("detection", "fixed, ragged and bytes tensors together", detection, scenes, first=6, epoch=1, shard=2)
    many = [{"n": np.int8(i), "a": _ramp(i % 2, dtype="int16"), "s": b"q" * (i % 3)} for i in range(66)]
    mixed = {"n": ("int8", ()), "a": ("int16", (None,)), "s": ("bytes", ())}
    yield made("two-shapes-fields", "a fixed tensor between two shapes fields' owners", mixed, many)


def _identities() -> Iterator[Case]:
    spec: dict[str, Any] = {"y": ("int32", ())}
    three = [{"y": np.int32(i)} for i in range(3)]
    yield made("holes-inside", "two dropped in a row", spec, three, first=5, holes=[6, 7])
    yield made("holes-at-both-ends", "first and last offset dropped", spec, three, first=10, holes=[10, 12, 15])
    yield made("holes-1024", "the most there may be", spec, three, first=0, holes=list(range(1, 1025)))
    last = (1 << 20) - 3
    yield made("largest-identity", "2^53-1 and a full shard", spec, three, first=last, epoch=2**53 - 1, shard=2**53 - 1)
    yield made("no-checksum", "xxh3 left out", spec, three, checksum=False)
    example = [{"x": np.array([1, 513], "uint16"), "tag": b"hi"}, {"x": np.array([65535, 2], "uint16"), "tag": b""}]
    worked = {"x": ("uint16", (2,)), "tag": ("bytes", ())}
    yield made("worked-example", "as in the document", worked, example, first=20, holes=[21], epoch=3, shard=7)


def _headers() -> Iterator[Case]:
    """Return headers that our writer does not write and every reader must accept."""
    spec: dict[str, Any] = {"x": ("uint8", (2,)), "s": ("bytes", ())}
    samples = [{"x": np.array([i, 2], "uint8"), "s": b"ab" * i} for i in range(3)]

    def rewritten(name: str, about: str, meta: str) -> Case:
        case = made(name, about, spec, samples)
        case["fields"][0][1] = meta.encode().hex()
        return case

    plain = made("", "", spec, samples)
    meta = bytes.fromhex(plain["fields"][0][1]).decode()
    header = json.loads(meta)
    extra = header | {"note": {"a": [1.5, None, True]}, "nu": 2.5}
    extra["tensors"] = {key: said | {"unit": "mm"} for key, said in header["tensors"].items()}
    yield rewritten("unknown-keys", "are ignored, at the top and inside a tensor", json.dumps(extra))
    backwards = dict(reversed(header.items())) | {"tensors": dict(reversed(header["tensors"].items()))}
    yield rewritten("keys-in-another-order", "white space, too", json.dumps(backwards, indent=2) + "\n")
    yield rewritten("escaped-keys", "JSON escapes in keys", meta.replace('"count"', r'"\u0063ount"'))
    yield rewritten("empty-holes", "the same as none", meta.replace('"tensors"', '"holes":[],"tensors"', 1))
    repaired = meta.replace('"tensors"', '"repair":true,"tensors"', 1)
    yield rewritten("repair", "written again in place of what was lost: read like any other", repaired)
    odd = header | {"repair": [1]}
    yield rewritten("repair-is-not-true", "any other value means the same as none", json.dumps(odd))
    few = made("shapes-field-of-three", "a field although they would fit the header", spec, samples)
    del header["tensors"]["s"]["shapes"]
    shapes = np.array([[0], [2], [4]], "<i8").tobytes()
    few["fields"].insert(2, ["s.shapes", shapes.hex()])
    few["header"]["xxh3"] = header["xxh3"] = digest_of([bytes.fromhex(value) for _, value in few["fields"][1:]])
    few["fields"][0][1] = json.dumps(header).encode().hex()
    yield few
    yield _inlined_seventy()


def _inlined_seventy() -> Case:
    texts = [{"s": b"x" * (i % 4)} for i in range(70)]
    case = made("inline-70-samples", "shapes in the header although they are many", {"s": ("bytes", ())}, texts)
    header = json.loads(bytes.fromhex(case["fields"][0][1]))
    header["tensors"]["s"]["shapes"] = [[i % 4] for i in range(70)]
    del case["fields"][1]
    case["header"]["xxh3"] = header["xxh3"] = digest_of([bytes.fromhex(case["fields"][1][1])])
    case["fields"][0][1] = json.dumps(header).encode().hex()
    return case


def compressed(case: Case, **stored: tuple[str, str]) -> Case:
    """Return a case whose tensors, ``name=(codec, frame)``, are stored as frozen frames."""
    fields = [[name, stored[name][1] if name in stored else value] for name, value in case["fields"]]
    digest = digest_of([bytes.fromhex(value) for _, value in fields[1:]])
    header = json.loads(bytes.fromhex(fields[0][1])) | {"xxh3": digest}
    header["compression"] = {name: codec for name, (codec, _) in stored.items()}
    fields[0][1] = json.dumps(header, separators=(",", ":")).encode().hex()
    return case | {"fields": fields, "header": case["header"] | {"xxh3": digest}}


def _compressed() -> Iterator[Case]:
    spec: dict[str, Any] = {"x": ("uint16", (64,)), "m": ("bool", (64,)), "y": ("uint8", ())}
    rows = (np.arange(192, dtype="uint16") + 250).reshape(3, 64)
    mask = np.arange(64) % 8 < 4
    plain = made("", "", spec, [{"x": row, "m": mask, "y": np.uint8(i)} for i, row in enumerate(rows)])

    def one(name: str, about: str, codec: str, frame: str, base: Case) -> Case:
        return compressed(base | {"name": name, "about": about}, **{next(iter(base["spec"])): (codec, frame)})

    numbers, masks = (frames.ZSTD_NUMBERS, frames.BLOSC2_NUMBERS), (frames.ZSTD_MASK, frames.BLOSC2_MASK)
    about = "two of three tensors are compressed"
    for codec, x, m in zip(("zstd", "blosc2"), numbers, masks, strict=True):
        yield compressed(plain | {"name": f"{codec}-as-written", "about": about}, x=(codec, x), m=(codec, m))
    both = plain | {"name": "zstd-and-blosc2", "about": "each tensor has a codec"}
    yield compressed(both, x=("zstd", frames.ZSTD_NUMBERS), m=("blosc2", frames.BLOSC2_MASK))
    texts = made("", "", {"s": ("bytes", ())}, [{"s": b"word " * 40}, {"s": b""}, {"s": b"word " * 80}])
    yield one("zstd-checksum", "another level, and a checksum in the frame", "zstd", frames.ZSTD_TEXT, texts)
    ragged = made("", "", {"r": ("int64", (None,))}, [{"r": _ramp(i % 5, dtype="int64")} for i in range(70)])
    yield one("zstd-shapes-field", "the field of shapes gives the size", "zstd", frames.ZSTD_RAGGED, ragged)
    pattern = np.frombuffer((b"0123456789abcdef" * 4 + bytes(100)) * 20, "uint8")
    large = made("", "", {"x": ("uint8", (3280,))}, [{"x": pattern}])
    yield one("zstd-window", "a window that is smaller than the content", "zstd", frames.ZSTD_WINDOW, large)
    zeros = made("", "", {"x": ("float32", (150,))}, [{"x": np.zeros(150, "float32")}])
    yield one("blosc2-zeros", "the one special chunk", "blosc2", frames.BLOSC2_ZEROS, zeros)
    yield one("blosc2-no-filter", "another level, no filter", "blosc2", frames.BLOSC2_TEXT, texts)
    blocks = made("", "", {"x": ("uint32", (256,))}, [{"x": _ramp(256, dtype="uint32")}])
    yield one("blosc2-blocks", "four blocks of 256 bytes", "blosc2", frames.BLOSC2_BLOCKS, blocks)
