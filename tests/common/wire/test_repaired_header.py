"""The header key ``repair``: it is true and nothing else, and an old reader still reads the entry."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.header import parse_header
from penstock_common.wire.spec import Spec

GOOD = Path(__file__).parents[2] / "golden" / "good"


@pytest.mark.parametrize(("name", "is_repair"), [("repair", True), ("repair-is-not-true", False), ("scalars", False)])
def test_only_true_says_that_an_entry_was_written_again(name: str, is_repair: bool) -> None:
    """Every reader must agree on whether the ledger decides which samples are yielded."""
    case = json.loads((GOOD / f"{name}.json").read_text())
    meta = bytes.fromhex(case["fields"][0][1])
    assert parse_header(meta, Spec.from_json(case["spec"])).is_repair is is_repair


def test_a_writer_says_so_only_where_it_repairs() -> None:
    """Ordinary entries stay the same, byte for byte."""
    spec = Spec.of({"y": ("int32", ())})
    builder = BlockBuilder(spec, 100, 10)
    builder.add({"y": np.int32(1)})
    block = builder.finish(0)
    plain = bytes(encode(block, stream="s", epoch=0, shard=0)[0][1])
    repaired = bytes(encode(block, stream="s", epoch=0, shard=0, is_repair=True)[0][1])
    assert b"repair" not in plain
    assert json.loads(repaired) == {**json.loads(plain), "repair": True}
    assert parse_header(repaired, spec).is_repair
