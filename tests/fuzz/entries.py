"""The fuzzer's form of an entry: a spec, some switches, fields. Any bytes are an input, and most mutations stay one. A
corpus file of the decoder holds: spec, switches, then per field its name's number, three bytes of length, data.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock_common.wire.codec import digest_of
from penstock_common.wire.spec import Spec

Fields = list[tuple[bytes, bytes]]

GOLDEN = Path(__file__).parent.parent / "golden"
SPECS = [
    Spec.from_json(spec)
    for spec in (
        {"x": ["uint8", [2]], "y": ["int64", []]},
        {"b": ["float32", [None, 4]], "s": ["bytes", []]},
        {"b": ["float32", [None, 4]]},
        {"m": ["bool", [2]]},
        {"x": ["float32", [0, 1000, 1000]]},
        {"x": ["uint8", [3]], "b": ["float64", [None]]},
        {"r": ["int16", [None, None]], "k": ["bool", [None]]},
        {"h": ["bfloat16", [2]], "c": ["complex64", []], "a/b.c-d": ["uint16", [1, 2, 3]]},
        {"z": ["uint8", [None, 0]], "s": ["bytes", []]},
        {"x": ["uint16", [2]], "tag": ["bytes", []]},
        {"x": ["uint16", [64]]},
        {"x": ["uint16", [64]], "m": ["bool", [64]], "y": ["uint8", []]},
        {"r": ["int64", [None]]},
        {"s": ["bytes", []]},
    )
]
"""The specs. Add only at the end, because a corpus file names one by its number. The hostile half of the golden corpus
uses the first.
"""

RIGHT_DIGEST, SETTLED, SMALL_BATCHES = 1, 2, 4
_DIGEST = re.compile(rb'("xxh3"\s*:\s*")[^"\\]*"')


@dataclass(frozen=True)
class Entry:
    """One unpacked input of the decoder."""

    number: int
    switches: int
    fields: Fields = field(default_factory=list)

    @property
    def spec(self) -> Spec:
        """Return the spec of the stream that the entry is read from."""
        return SPECS[self.number % len(SPECS)]

    def as_received(self) -> Fields:
        """Return the fields.

        With RIGHT_DIGEST the header's checksum is made to fit, because no mutation would ever hit it.
        """
        if not self.switches & RIGHT_DIGEST or not self.fields:
            return self.fields
        (name, meta), *payload = self.fields
        right = digest_of([value for _, value in payload]).encode()
        return [(name, _DIGEST.sub(rb"\g<1>" + right + b'"', meta, count=1)), *payload]

    def with_header(self, value: Any) -> Entry:
        """Return the same with another header."""
        meta = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
        return replace(self, fields=[(b"meta", meta), *self.fields[1:]])


def names_of(spec: Spec) -> list[bytes]:
    """Return the field names that an input may have, by number."""
    own = [name.encode() for name in spec.names]
    return [b"meta", *own, *(name + b".shapes" for name in own), b"z", b"META", b"", b"\xff\x00"]


def unpacked(data: bytes) -> Entry:
    """Return the entry that any bytes represent."""
    entry = Entry(data[0] if data else 0, data[1] if len(data) > 1 else 0)
    names, at = names_of(entry.spec), 2
    while at < len(data):
        nbytes = int.from_bytes(data[at + 1 : at + 4], "little")
        entry.fields.append((names[data[at] % len(names)], data[at + 4 : at + 4 + nbytes]))
        at += 4 + nbytes
    return entry


def packed(entry: Entry) -> bytes:
    """Return the bytes of an entry whose names are known: the inverse of `unpacked`."""
    names = names_of(entry.spec)
    parts = [bytes((entry.number, entry.switches))]
    for name, value in entry.fields:
        parts += [bytes((names.index(name),)), len(value).to_bytes(3, "little"), value]
    return b"".join(parts)


def golden_entries() -> list[Entry]:
    """Return the entries of the golden corpus, good and hostile, with one of these specs.

    The fuzzer starts from them.
    """
    known = {json.dumps(spec.as_json()): number for number, spec in enumerate(SPECS)}
    found = []
    for path in sorted(GOLDEN.glob("*/*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        number = known.get(json.dumps(case["spec"]))
        fields = [(name.encode(), bytes.fromhex(value)) for name, value in case["fields"]]
        if number is not None and all(name in names_of(SPECS[number]) for name, _ in fields):
            found.append(Entry(number, 0, fields))
    return found
