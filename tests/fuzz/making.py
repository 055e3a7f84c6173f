"""New entries for the fuzzer, made by the writer's own code from a seed, and damage that knows the form of an entry.
Nothing is checked here. It also works without a fuzzer's own byte mutations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.compression import CODECS, Compression
from penstock_common.wire.dtypes import BOOL, BYTES, item_size, numpy_dtype
from penstock_common.wire.spec import TensorSpec
from tests.fuzz.entries import RIGHT_DIGEST, SPECS, Entry, names_of
from tests.golden.good_cases import STREAM

Mutate = Callable[[bytes, int], bytes]
"""The fuzzer's own mutation: bytes, and the most bytes of the result."""

INTERESTING: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 63, 64, 65, 1023, 1024, 1025, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 31,
    1 << 32, (1 << 53) - 1, 1 << 53, 1 << 62, (1 << 63) - 1, 1 << 63, 1 << 64, -(1 << 63), 10**400, 0.0, 1.0, 2.0,
    1e300, "", "1", "x", "float32", "bytes", "object", [], [[]], [0], [None], {}, {"dtype": "uint8"},
    [0, 1_000_000_000], [1 << 62, 4], "zstd", {"x": "zstd"}, {"x": "blosc2"},
]  # fmt: skip


def made_entry(
    number: int, *, seed: int, count: int, first: int = 0, holes: int = 0, switches: int = 0, codec: str = "none"
) -> Entry:
    """Return a good entry of the spec, with ``count`` random samples. With a codec all are the same, so it shrinks."""
    spec, random = SPECS[number], Random(seed)
    builder = BlockBuilder(spec, 1 << 24, count)
    for _ in range(count):
        random = Random(seed) if codec != "none" else random
        builder.add({tensor.name: _value(tensor, random) for tensor in spec})
    dropped = sorted(random.sample(range(first, first + count + holes), holes))
    block, compression = builder.finish(first, dropped), Compression.parse(codec)
    fields = encode(block, stream=STREAM, epoch=0, shard=number % 3, compression=compression)
    return Entry(number, switches, [(name, bytes(value)) for name, value in fields])


def _value(tensor: TensorSpec, random: Random) -> Any:
    if tensor.dtype == BYTES:
        return random.randbytes(random.randrange(4))
    shape = tuple(random.randrange(3) if dim is None else dim for dim in tensor.shape)
    raw = random.randbytes(int(np.prod(shape)) * item_size(tensor.dtype))
    raw = bytes(byte & 1 for byte in raw) if tensor.dtype == BOOL else raw
    return np.frombuffer(raw, np.uint8).view(numpy_dtype(tensor.dtype)).reshape(shape)


def damaged(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Return the entry with one thing changed."""
    kinds = [_new, _header_value, _header_value, _header_key, _header_text, _header_bytes, _payload, _fields, _switches]
    return random.choice(kinds)(entry, random, mutate)


def _new(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    count = random.choice([1, 2, 3, 5, 64, 65, 70])
    return made_entry(
        random.randrange(len(SPECS)), seed=random.randrange(1 << 30), count=count,
        first=random.choice([0, 0, 1, 7, 90, 4000, (1 << 20) - 80]), holes=random.choice([0, 0, 1, 3]),
        switches=random.randrange(8), codec=random.choice(["none", "none", *CODECS]),
    )  # fmt: skip


def _header_value(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Put another value somewhere into the header."""
    header = _header(entry)
    places = _places(header)
    if not places:
        return _new(entry, random, mutate)
    holder, key = random.choice(places)
    old = holder[key]
    near = [old + 1, old - 1, -old, str(old)] if type(old) is int else []
    holder[key] = random.choice([random.choice(INTERESTING), *near])
    return replace(entry.with_header(header), switches=entry.switches | random.choice([0, RIGHT_DIGEST]))


def _header_key(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Remove or add a key."""
    header = _header(entry)
    holders = [holder for holder, key in _places(header) if type(holder) is dict and holder]
    if not holders:
        return _new(entry, random, mutate)
    holder = random.choice(holders)
    if random.random() < 0.5:
        del holder[random.choice(list(holder))]
    else:
        holder[random.choice(["v", "holes", "xxh3", "shapes", "ref", "compression", "note"])] = random.choice(
            INTERESTING
        )
    return entry.with_header(header)


def _header_text(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Insert a token of JSON into the header's text, or remove a piece."""
    meta = entry.fields[0][1] if entry.fields else b""
    at = random.randrange(len(meta) + 1)
    token = random.choice(TOKENS)
    return entry.with_header(meta[:at] + token + meta[at + random.choice([0, 0, 1, 2, len(token)]) :])


TOKENS = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b'""', b"null", b"true", b"NaN", b"-Infinity", b"-0", b"1e0", b"0",
    b"\\u006e", b'"v":1,', b'"count":2', b'"holes":[', b'"shapes":[[', b'"xxh3":"', b'"dtype":"', b'"ref":1,', b" ",
    b"\t", b"\r\n", b"\xef\xbb\xbf", b"\xff", b"[" * 40, b"9" * 30,
]  # fmt: skip


def _header_bytes(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    meta = entry.fields[0][1] if entry.fields else b"{}"
    return entry.with_header(mutate(meta, len(meta) + 16))


def _payload(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Another payload in one field, with the checksum made right or not."""
    if len(entry.fields) < 2:
        return _new(entry, random, mutate)
    which = random.randrange(1, len(entry.fields))
    name, value = entry.fields[which]
    changed = bytearray(mutate(value, len(value) + 8) if random.random() < 0.5 else value)
    if changed and random.random() < 0.5:
        at = random.randrange(0, len(changed), 8 if name.endswith(b".shapes") else 1)
        new = random.choice([0, 1, 2, -1, 1 << 62, (1 << 62) + 1]).to_bytes(8, "little", signed=True)
        changed[at : at + 8] = new[: len(changed) - at]
    fields = [*entry.fields]
    fields[which] = (name, bytes(changed))
    return replace(entry, fields=fields, switches=entry.switches | random.choice([0, RIGHT_DIGEST]))


def _fields(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    """Remove, duplicate, move or rename a field."""
    fields = [*entry.fields]
    if not fields:
        return _new(entry, random, mutate)
    at = random.randrange(len(fields))
    kind = random.randrange(4)
    if kind == 0:
        del fields[at]
    elif kind == 1:
        fields.insert(random.randrange(len(fields) + 1), fields[at])
    elif kind == 2:
        fields.insert(random.randrange(len(fields)), fields.pop(at))
    else:
        fields[at] = (random.choice(names_of(entry.spec)), fields[at][1])
    return replace(entry, fields=fields)


def _switches(entry: Entry, random: Random, mutate: Mutate) -> Entry:
    return replace(entry, switches=random.randrange(8))


def _header(entry: Entry) -> Any:
    try:
        return json.loads(entry.fields[0][1])
    except (ValueError, RecursionError, IndexError):
        return json.loads(made_entry(entry.number % len(SPECS), seed=2, count=2).fields[0][1])


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key or index) of every value inside."""
    found: list[tuple[Any, Any]] = []
    inside = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, inner in inside:
        found += [(value, key), *_places(inner)]
    return found[:2000]
