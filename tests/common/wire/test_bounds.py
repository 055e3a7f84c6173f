"""Claims in an entry cost nothing: memory depends on the received bytes, and every bound is kept."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BadEntry
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import decode, encode
from penstock_common.wire.header import parse_header
from penstock_common.wire.limits import MAX_HEADER_BYTES
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from tests.golden.make import HERE

SPEC = Spec.of({"x": ("uint8", (3,)), "b": ("float64", (None,))})


def entry() -> list[tuple[bytes, bytes]]:
    """Return an entry of 70 samples, with a shapes field."""
    builder = BlockBuilder(SPEC, 1 << 20, 100)
    for i in range(70):
        builder.add({"x": np.full(3, i, "u1"), "b": np.arange(i % 3, dtype="f8")})
    return [(name, bytes(value)) for name, value in encode(builder.finish(0), stream="a", epoch=0, shard=0)]


def test_no_hostile_entry_takes_memory_by_what_it_claims() -> None:
    """A header can claim terabytes at no cost, and refusing it must cost nothing, too."""
    cases = [json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "hostile").glob("*.json")]
    worst = (0, "")
    for case in cases:
        fields = [(name.encode(), bytes.fromhex(value)) for name, value in case["fields"]]
        spec = Spec.from_json(case["spec"])
        tracemalloc.start()
        with pytest.raises(BadEntry):
            decode(fields, spec)
        worst = max(worst, (tracemalloc.get_traced_memory()[1], case["name"]))
        tracemalloc.stop()
    assert worst < (1 << 20, "")


def test_a_header_over_a_megabyte_is_not_even_parsed() -> None:
    """Parsing costs many times a text's size."""
    fields = entry()
    padded = fields[0][1] + b" " * (MAX_HEADER_BYTES - len(fields[0][1]))
    assert parse_header(padded, SPEC).count == 70
    with pytest.raises(BadEntry, match="header of 1048577 bytes"):
        parse_header(padded + b" ", SPEC)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_fields_may_come_in_any_buffer(kind: Any) -> None:
    """A fast receiver has memoryviews of larger buffers, which are not always aligned."""
    fields = [(name, kind(b"!" + value)[1:]) for name, value in entry()]
    header, block = decode(fields, SPEC)
    assert header.count == 70
    assert block.columns[0].values[5].tolist() == [5, 5, 5]
    column = block.columns[1]
    assert column.shapes is not None
    assert Ragged(column.values, column.shapes)[5].tolist() == [0.0, 1.0]


def test_the_header_announces_the_sizes_a_receiver_must_make_room_for() -> None:
    """Payloads are received in place, so the sizes come from the header, before the bytes."""
    fields = entry()
    announced = parse_header(fields[0][1], SPEC).fields()
    assert announced == [(b"x", 210), (b"b.shapes", 560), (b"b", None)]
    assert [(name, len(value)) for name, value in fields[1:3]] == announced[:2]


def test_fields_that_are_each_small_enough_are_refused_where_they_are_too_large_together() -> None:
    """A reader takes memory by these sizes, and three fields of 400 MB are more than a command can carry."""

    def said(names: str) -> Any:
        spec = Spec.of(dict.fromkeys(names, ("uint8", (400_000_000,))))
        tensors = {name: {"dtype": "uint8", "shape": [1, 400_000_000]} for name in names}
        header = {"v": 1, "stream": "a", "epoch": 0, "shard": 0, "first": 0, "count": 1, "tensors": tensors}
        return parse_header(json.dumps(header, separators=(",", ":")).encode(), spec)

    assert list(said("ab").fields()) == [(b"a", 400_000_000), (b"b", 400_000_000)]
    with pytest.raises(BadEntry, match="an entry of 1200000000 bytes, at most 1073741824 are read"):
        said("abc")
