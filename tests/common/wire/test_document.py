"""docs/wire-format.md says what the code does: its worked example, its numbers, its dtype table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from penstock_common.wire import limits
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.dtypes import NAMES, item_size
from penstock_common.wire.spec import Spec
from tests.common.wire import independent

DOCUMENT = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text(encoding="utf-8")
PROSE = " ".join(DOCUMENT.split())
SPEC = {"x": ["uint16", [2]], "tag": ["bytes", []]}


def example() -> list[tuple[bytes, bytes]]:
    """Return the fields of the worked example, as the document prints them."""
    found = re.search(r"<!-- example.*?```text\n(.*?)```", DOCUMENT, re.DOTALL)
    assert found is not None
    fields: list[tuple[bytes, bytes]] = []
    for line in found[1].splitlines():
        if line.endswith(":"):
            fields.append((line[:-1].encode(), b""))
        else:
            fields[-1] = (fields[-1][0], fields[-1][1] + bytes.fromhex(line))
    return fields


def test_the_worked_example_is_what_the_code_writes() -> None:
    """A wrong example costs every reader of the document an afternoon."""
    builder = BlockBuilder(Spec.from_json(SPEC), 1000, 10)
    builder.add({"x": np.array([1, 513], "uint16"), "tag": b"hi"})
    builder.add({"x": np.array([65535, 2], "uint16"), "tag": b""})
    fields = encode(builder.finish(20, [21]), stream="5f1c0a9be2d4", epoch=3, shard=7)
    assert [(name, bytes(value)) for name, value in fields] == example()


def test_the_worked_example_can_be_read_by_the_document_alone() -> None:
    """The prose around the example and its bytes agree."""
    entry = independent.read(example(), SPEC)
    assert entry.offsets == [20, 22]
    assert [sample["x"].values() for sample in entry.samples] == [[1, 513], [65535, 2]]
    assert [sample["tag"].raw for sample in entry.samples] == [b"hi", b""]


def test_the_header_printed_beside_the_example_is_the_one_inside_it() -> None:
    """The two forms of the same header must not drift apart."""
    printed = re.search(r"The header reads\n\n```json\n(.*?)```", DOCUMENT, re.DOTALL)
    assert printed is not None
    assert json.loads(printed[1]) == json.loads(example()[0][1])


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("1,048,576 bytes", limits.MAX_HEADER_BYTES),
        ("512,000,000", limits.MAX_FIELD_BYTES),
        ("1,073,741,824 bytes", limits.MAX_ENTRY_BYTES),
        ("2^20", limits.MAX_SHARD_SAMPLES),
        ("2^53 - 1", limits.MAX_NUMBER),
        ("at most 1,024 integers", limits.MAX_HOLES),
        ("1 to 256 tensors", limits.MAX_TENSORS),
        ("at most 31 sizes", limits.MAX_NDIM),
        ("at most 64 samples", limits.INLINE_SAMPLES),
        ("16,384", limits.INLINE_SIZES),
    ],
)
def test_the_document_names_the_limit_the_code_keeps(number: str, value: int) -> None:
    """A limit changed in one place only would make one side refuse what the other writes."""
    assert number in PROSE
    digits = re.search(r"(?:\d+ to )?(\d[\d,]*(?:\^\d+(?: - 1)?)?)", number)
    assert digits is not None
    assert eval(digits[1].replace(",", "").replace("^", "**")) == value


def test_the_dtype_table_has_every_dtype_with_its_width() -> None:
    """The one table in the code is the one in the document."""
    rows = re.findall(r"^\| ((?:`[a-z0-9]+` ?)+)\| ([\d ]+)\|", DOCUMENT, re.MULTILINE)
    table = {
        name: int(width)
        for names, widths in rows
        for name, width in zip(names.replace("`", "").split(), widths.split(), strict=True)
    }
    assert table == {name: item_size(name) for name in NAMES}
