"""The golden corpus is what the code makes; the code reads it, and so does a reader that knows only the document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common import errors
from penstock_common.wire.block import Block
from penstock_common.wire.codec import decode
from penstock_common.wire.compression import BLOSC2
from penstock_common.wire.dtypes import NAMES, numpy_dtype
from penstock_common.wire.header import parse_header
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from tests.common.wire import independent
from tests.golden.make import HERE, corpus

Case = dict[str, Any]


def load(folder: str) -> list[Any]:
    """Return the cases of a folder as pytest parameters."""
    files = sorted((HERE / folder).glob("*.json"))
    return [pytest.param(json.loads(file.read_text(encoding="utf-8")), id=file.stem) for file in files]


def fields_of(case: Case) -> list[tuple[bytes, bytes]]:
    """Return a case's fields as they come from the server."""
    return [(name.encode(), bytes.fromhex(value)) for name, value in case["fields"]]


def codecs_of(case: Case) -> set[str]:
    """Return the codecs that an entry's header names."""
    try:
        found = json.loads(bytes.fromhex(case["fields"][0][1])).get("compression", {})
    except (ValueError, AttributeError, IndexError, RecursionError):
        return set()
    return set(map(str, found.values())) if isinstance(found, dict) else set()


def test_the_corpus_is_what_the_code_makes() -> None:
    """An unintended change of the format shows here before it reaches users' data."""
    on_disk = {path: path.read_text(encoding="utf-8") for path in Path(HERE).glob("*/*.json")}
    made = corpus()
    assert sorted(path.name for path in on_disk) == sorted(path.name for path in made)
    assert [path.name for path, text in made.items() if on_disk[path] != text] == []


def test_the_corpus_has_every_dtype_and_is_large_enough() -> None:
    """A dtype without an example is a dtype another language will get wrong."""
    good = [param.values[0] for param in load("good")]
    assert {dtype for case in good for dtype, _ in case["spec"].values()} == set(NAMES)
    assert len(good) >= 25
    assert len(load("hostile")) >= 40


@pytest.mark.parametrize("case", load("good"))
def test_a_good_entry_gives_back_every_sample_bit_for_bit(case: Case) -> None:
    """Samples come back as they were written, whichever version of the code wrote them."""
    header, block = decode(fields_of(case), Spec.from_json(case["spec"]))
    said = {key: getattr(header, key) for key in case["header"]}
    assert said | {"holes": list(header.holes)} == case["header"]
    assert block.offsets().tolist() == [sample["offset"] for sample in case["samples"]]
    for column in block.columns:
        expected = [sample["tensors"][column.spec.name] for sample in case["samples"]]
        assert rows_of(block, column.spec.name) == [(tensor["shape"], tensor["hex"]) for tensor in expected]
        assert column.values.dtype == numpy_dtype(column.spec.dtype)


def rows_of(block: Block, name: str) -> list[tuple[list[int], str]]:
    """Return shape and bytes of each sample of a tensor."""
    (column,) = (column for column in block.columns if column.spec.name == name)
    rows = (
        list(Ragged(column.values, column.shapes))
        if column.shapes is not None
        else [np.asarray(row) for row in column.values]
    )
    return [(list(row.shape), row.tobytes().hex()) for row in rows]


@pytest.mark.parametrize("case", load("good"))
def test_the_document_alone_suffices_to_read_a_good_entry(case: Case) -> None:
    """A programmer without Python or Penstock can write a reader, and needs no Blosc2 for it."""
    if BLOSC2 in codecs_of(case):
        with pytest.raises(independent.Refused) as caught:
            independent.read(fields_of(case), case["spec"])
        assert caught.value.kind == "UnsupportedVersion"
        return
    entry = independent.read(fields_of(case), case["spec"])
    digest = case["header"]["xxh3"] or "absent"
    assert {key: entry.header[key] for key in case["header"]} == case["header"] | {"xxh3": digest}
    assert entry.offsets == [sample["offset"] for sample in case["samples"]]
    for found, sample in zip(entry.samples, case["samples"], strict=True):
        for name, expected in sample["tensors"].items():
            tensor = found[name]
            assert (tensor.dtype, tensor.shape, tensor.raw.hex()) == (
                *[expected[k] for k in ("dtype", "shape", "hex")],
            )
            assert tensor.dtype == "bytes" or numbers(tensor) == expected["values"]


def numbers(tensor: independent.Tensor) -> list[str]:
    """Return a tensor's values as the corpus writes them."""
    written: list[str] = []
    for value in tensor.values():
        if isinstance(value, complex):
            written += [repr(value.real), repr(value.imag)]
        else:
            written.append(str(int(value)) if isinstance(value, (bool, int)) else repr(value))
    return written


@pytest.mark.parametrize("case", load("hostile"))
def test_a_hostile_entry_is_refused_by_name(case: Case) -> None:
    """One bad entry must cost one dead letter, not a training run."""
    with pytest.raises(errors.BadEntry) as caught:
        if case.get("segments"):
            parse_header(fields_of(case)[0][1], Spec.from_json(case["spec"]), takes_refs=True)
        else:
            decode(fields_of(case), Spec.from_json(case["spec"]))
    assert type(caught.value).__name__ == case["error"], caught.value
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("case", load("hostile"))
def test_the_document_alone_suffices_to_refuse_a_hostile_entry(case: Case) -> None:
    """The document decides what is bad, not what our code happens to refuse."""
    with pytest.raises(independent.Refused) as caught:
        if case.get("segments"):
            independent.read_ref(fields_of(case)[0][1], case["spec"])
        else:
            independent.read(fields_of(case), case["spec"])
    assert caught.value.kind == ("UnsupportedVersion" if BLOSC2 in codecs_of(case) else case["error"]), caught.value
