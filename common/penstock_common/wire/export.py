"""The contents of ``export.json``: an export's stream, epochs, shards, files and bad samples.

An export may come from anybody, so every value is bounded before use. docs/segment-format.md defines the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock_common.errors import BadExport, BadSpec
from penstock_common.wire.header import MAX_SEGMENT_BYTES, NAME, STREAM_ID
from penstock_common.wire.limits import MAX_NUMBER, MAX_PARTITIONS, MAX_SHARD_SAMPLES
from penstock_common.wire.spec import Spec

CONTENTS = "export.json"
KIND, VERSION = "penstock export", 1
MAX_CONTENTS_BYTES = 256 << 20
MAX_SHARDS = 1 << 22
MAX_REASON = 500
"""Characters that are kept of a bad sample's reason, as in a stream."""


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A segment file of an export."""

    name: str
    nbytes: int
    """The bytes of the whole file: a shorter file was truncated."""
    records: int


@dataclass(frozen=True, slots=True)
class ExportedEpoch:
    """An epoch of an export."""

    epoch: int
    kind: str
    seed: int
    fingerprint: str
    sizes: tuple[int, ...]
    """The samples of each shard, bad ones included."""
    samples: int
    """The number of good samples."""
    nbytes: int
    """The payload bytes."""
    files: tuple[ExportedFile, ...]
    """The files in canonical order; so are the records in them."""
    bad: tuple[tuple[int, int, str], ...]
    """(shard, offset, reason) of each bad sample."""


@dataclass(frozen=True, slots=True)
class ExportContents:
    """The description of an export."""

    name: str
    """The stream's name, for people."""
    stream: str
    """The stream's id, which every record names."""
    spec: Spec
    info: dict[str, Any]
    partitions: int
    epochs: tuple[ExportedEpoch, ...] = ()

    def find(self, epoch: int) -> ExportedEpoch | None:
        """Return the epoch, or None if it was not exported."""
        return next((note for note in self.epochs if note.epoch == epoch), None)

    def require(self, epoch: int | None) -> ExportedEpoch:
        """Return the epoch, or the only one for None. Raises BadExport, which names the epochs of the export."""
        found = self.find(epoch) if epoch is not None else self.epochs[0] if len(self.epochs) == 1 else None
        if found is None:
            there = ", ".join(str(note.epoch) for note in self.epochs) or "none"
            asked = "say which with epoch=" if epoch is None else f"there is no epoch {epoch}"
            raise BadExport(f"the export of {self.name!r} has the epochs {there}: {asked}")
        return found


def dump_contents(contents: ExportContents) -> bytes:
    """Return the bytes of ``export.json``."""
    epochs = [
        {
            "epoch": one.epoch, "kind": one.kind, "seed": one.seed, "fingerprint": one.fingerprint,
            "sizes": list(one.sizes), "samples": one.samples, "bytes": one.nbytes,
            "files": [[note.name, note.nbytes, note.records] for note in one.files], "bad": [list(b) for b in one.bad],
        }
        for one in contents.epochs
    ]  # fmt: skip
    value = {
        "format": KIND, "v": VERSION, "name": contents.name, "stream": contents.stream,
        "spec": contents.spec.as_json(), "info": contents.info, "partitions": contents.partitions, "epochs": epochs,
    }  # fmt: skip
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def parse_contents(data: bytes) -> ExportContents:
    """Parse and bound the bytes of ``export.json``. Raises BadExport, which says what is wrong."""
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise BadExport(f"{CONTENTS} is not JSON: {str(error)[:80]}") from None
    if type(value) is not dict or value.get("format") != KIND:
        raise BadExport(f"{CONTENTS} is not that of an export")
    if value.get("v") != VERSION:
        raise BadExport(f"{CONTENTS} has version {value.get('v')!r:.40}, this process knows {VERSION}: update penstock")
    try:
        return _contents(value)
    except (KeyError, TypeError, ValueError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else str(error)[:200]
        raise BadExport(f"{CONTENTS}: {what}") from None


def _contents(value: dict[str, Any]) -> ExportContents:
    stream = _text(value, "stream")
    if not STREAM_ID.match(stream):
        raise ValueError("stream is no id")
    try:
        spec = Spec.from_json(value["spec"])
    except BadSpec as error:
        raise ValueError(f"spec: {error}") from None
    if type(value["info"]) is not dict:
        raise ValueError("info is not an object")
    epochs = tuple(_epoch(one) for one in _list(value, "epochs"))
    numbers = [one.epoch for one in epochs]
    if sorted(set(numbers)) != numbers:
        raise ValueError("epochs do not rise")
    partitions = _number(value, "partitions", MAX_PARTITIONS)
    return ExportContents(_text(value, "name"), stream, spec, value["info"], max(1, partitions), epochs)


def _epoch(value: dict[str, Any]) -> ExportedEpoch:
    epoch = _number(value, "epoch", MAX_NUMBER)
    sizes = tuple(_bounded("sizes", size, MAX_SHARD_SAMPLES) for size in _list(value, "sizes"))
    if len(sizes) > MAX_SHARDS:
        raise ValueError(f"epoch {epoch} has {len(sizes)} shards")
    files = tuple(_file(epoch, one) for one in _list(value, "files"))
    if len({note.name for note in files}) != len(files):
        raise ValueError(f"epoch {epoch} names a file more than once")
    bad = tuple(_bad(sizes, one) for one in _list(value, "bad"))
    seed = value["seed"]
    if type(seed) is not int:
        raise ValueError(f"seed is {seed!r:.40}")
    return ExportedEpoch(
        epoch, _text(value, "kind"), seed, _text(value, "fingerprint"), sizes,
        _number(value, "samples", sum(sizes)), _number(value, "bytes", MAX_NUMBER), files, bad,
    )  # fmt: skip


def _file(epoch: int, value: Any) -> ExportedFile:
    name, nbytes, records = value
    if type(name) is not str or not NAME.match(name) or not name.startswith(f"{epoch}-"):
        raise ValueError(f"{ascii(name)[:80]} is no name of a segment of epoch {epoch}")
    return ExportedFile(name, _bounded("bytes", nbytes, MAX_SEGMENT_BYTES), _bounded("records", records, MAX_NUMBER))


def _bad(sizes: tuple[int, ...], value: Any) -> tuple[int, int, str]:
    shard, offset, why = value
    _bounded("bad shard", shard, len(sizes) - 1)
    _bounded("bad offset", offset, sizes[shard] - 1)
    if type(why) is not str:
        raise ValueError("a reason is no text")
    return shard, offset, why[:MAX_REASON]


def _typed(value: dict[str, Any], key: str, kind: Callable[..., Any]) -> Any:
    if type(value[key]) is not kind:
        raise ValueError(f"{key} is {ascii(value[key])[:40]}")
    return value[key]


def _text(value: dict[str, Any], key: str) -> str:
    found: str = _typed(value, key, str)
    return found


def _list(value: dict[str, Any], key: str) -> list[Any]:
    found: list[Any] = _typed(value, key, list)
    return found


def _number(value: dict[str, Any], key: str, most: int) -> int:
    return _bounded(key, value[key], most)


def _bounded(what: str, value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{what} is {ascii(value)[:40]}, expected 0 to {most}")
    return value
