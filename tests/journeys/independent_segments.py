"""A reader of segment files and exports, written from docs/segment-format.md and docs/wire-format.md alone.

It proves that the two pages suffice, without a server. Keep it so: when it must change, they must have changed first.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.common.wire import independent

Identity = tuple[int, int]
"""An identity: (shard, offset)."""
PAGE, ALIGN = 4096, 64


@dataclass
class Segment:
    """One file: the contents of its head, and the entries of its records in the order written."""

    info: dict[str, Any]
    entries: list[independent.Entry]


def read_segment(path: Path) -> Segment:
    """Read one segment file. Raises AssertionError if it breaks a rule of the page."""
    data = path.read_bytes()
    magic, version, n, digest = struct.unpack_from("<8sIIQ", data)
    assert (magic, version) == (b"PENSTOCK", 1)
    text = data[24 : 24 + n]
    assert xxhash.xxh3_64_intdigest(text) == digest
    at = up(24 + n, PAGE)
    assert not any(data[24 + n : at])
    info = json.loads(text)
    assert path.name == f"{info['epoch']}-{info['partition']}-{info['token']}.seg"
    assert re.fullmatch(r"[0-9a-f]{12}", info["token"])
    entries = []
    while at + ALIGN <= len(data):
        magic, m, nbytes, token, digest = struct.unpack_from("<4sIQQQ", data, at)
        if magic != b"PSRC" or token != int(info["token"], 16):
            break
        meta = data[at + ALIGN : at + ALIGN + m]
        assert xxhash.xxh3_64_intdigest(meta) == digest
        entries.append(entry_of(data, meta, path.name, info["spec"]))
        assert nbytes % ALIGN == 0
        at += nbytes
    return Segment(info, entries)


def entry_of(data: bytes, meta: bytes, name: str, spec: dict[str, Any]) -> independent.Entry:
    """Return the entry in its inline form."""
    header = json.loads(meta)
    file, at, sizes = header.pop("ref")
    assert (file, at % ALIGN) == (name, 0)
    payload = []
    for field, size in zip(names_of(header, spec), sizes, strict=True):
        payload.append((field.encode(), data[at : at + size]))
        at = up(at + size, ALIGN)
    return independent.read([(b"meta", json.dumps(header).encode()), *payload], spec)


def names_of(header: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    """Return the payload's fields in wire order."""
    for name, (dtype, shape) in spec.items():
        if independent.is_ragged(dtype, shape) and "shapes" not in header["tensors"][name]:
            yield f"{name}.shapes"
        yield name


def up(number: int, to: int) -> int:
    """Return the next multiple."""
    return -(-number // to) * to


def samples_of(entries: list[independent.Entry]) -> Iterator[tuple[Identity, dict[str, independent.Tensor]]]:
    """Return each sample with its identity, in the order of the entries."""
    for entry in entries:
        for offset, sample in zip(entry.offsets, entry.samples, strict=True):
            yield (entry.header["shard"], offset), sample


def read_export(
    folder: Path, number: int
) -> tuple[list[tuple[Identity, dict[str, independent.Tensor]]], dict[Any, str]]:
    """Return an epoch of an export in canonical order, and (shard, offset) -> reason of each bad sample."""
    contents = json.loads((folder / "export.json").read_text())
    assert (contents["format"], contents["v"]) == ("penstock export", 1)
    (epoch,) = (one for one in contents["epochs"] if one["epoch"] == number)
    found: list[tuple[Identity, dict[str, independent.Tensor]]] = []
    for name, nbytes, records in epoch["files"]:
        assert (folder / name).stat().st_size == nbytes
        segment = read_segment(folder / name)
        assert (segment.info["spec"], len(segment.entries)) == (contents["spec"], records)
        found += samples_of(segment.entries)
    bad = {(shard, offset): why for shard, offset, why in epoch["bad"]}
    covered = [*(identity for identity, _ in found), *bad]
    assert sorted(covered) == [(shard, o) for shard, size in enumerate(epoch["sizes"]) for o in range(size)]
    return found, bad
