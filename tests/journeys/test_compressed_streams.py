"""Streams with compression, from the option of a writer to every way of reading."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.errors import BadSpec, MissingExtra
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_records
from penstock_common.stream.groups.ledger import dead_letters
from penstock_common.stream.streams import find_stream, load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.replay.export import export_stream
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.importer import import_stream
from penstock_producer.write.writer import Writer
from tests.contracts.feed import entries

SPEC: dict[str, Any] = {
    "x": ("float32", (64, 8)), "m": ("bool", (40,)), "r": ("int64", (None,)), "s": ("bytes", ()), "y": ("int64", ()),
}  # fmt: skip
COUNT = 101
QUIET = Tuning(notify=lambda _: None)


def sample(number: int) -> dict[str, Any]:
    """Return a sample that compresses well, with empty parts."""
    return {
        "x": np.full((64, 8), number, np.float32), "m": np.arange(40) == number % 40,
        "r": np.arange(number % 5, dtype=np.int64), "s": b"text " * (number % 4), "y": number,
    }  # fmt: skip


def write(url: str, name: str, payload: str, codecs: Any, *, start: int = 0, spec: Any = SPEC) -> None:
    """Write an epoch in blocks of some ten samples."""
    tuning = Tuning(block_bytes=25_000, compression=codecs, notify=lambda _: None)
    with (
        Writer(name, url=url, spec=spec, payload=payload, tuning=tuning) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(start, start + COUNT):
            epoch.write({key: value for key, value in sample(number).items() if key in spec})


def checked(batches: Any, spec: Any = SPEC) -> list[int]:
    """Return the samples' numbers, after a comparison of every tensor with what was written."""
    found = []
    for batch in batches:
        for row, number in enumerate(batch["y"].tolist()):
            for key, value in sample(number).items():
                if key in spec:
                    got = batch[key][row]
                    assert np.array_equal(
                        np.frombuffer(got, np.uint8) if key == "s" else got,
                        (np.frombuffer(value, np.uint8) if key == "s" else value),
                    )
            found.append(number)
    return found


@pytest.mark.parametrize("where", ["inline", "segments"])
@pytest.mark.parametrize("codecs", ["zstd", {"x": "blosc2", "r": "zstd", "s": "zstd"}])
def test_every_reader_decompresses(any_url: str, any_client: Client, tmp_path: Path, where: str, codecs: Any) -> None:
    """Compression is a writer's choice: no trainer, replay, audit or export needs an option for it."""
    payload = "inline" if where == "inline" else f"segments:{tmp_path / 'segments'}"
    write(any_url, "t", payload, codecs)
    packed = [fields for _, fields in entries(any_client, "t", 0) if b'"compression":{' in fields[b"meta"]]
    assert len(packed) == len(entries(any_client, "t", 0)) > 5
    stream = load_stream(any_client, "t")
    partition = stream.partitions[0]
    nbytes = sum(record.nbytes for record in index_records(any_client, partition, 0, 0))
    assert nbytes < COUNT * 2048 / 10  # the budget counts what is stored
    options: dict[str, Any] = {"url": any_url, "tuning": QUIET}
    with penstock.Loader("t", group="shared", batch_size=8, **options) as loader:
        assert sorted(checked(loader)) == list(range(COUNT))
    with penstock.Loader("t", group="order", batch_size=8, order=penstock.Canonical(0, 1), **options) as loader:
        assert checked(loader) == list(range(COUNT))
    with Replay("t", url=any_url, epoch=0, batch_size=8, tuning=QUIET) as replay:
        assert checked(replay) == list(range(COUNT))
    assert main(["audit", "t", "--url", any_url, "--deep"]) == 0
    assert main(["show", "t", "--url", any_url]) == 0
    export_stream(any_client, "t", tmp_path / "out")
    assert checked(penstock.Files(tmp_path / "out", epoch=0, batch_size=8, tuning=QUIET)) == list(range(COUNT))
    import_stream(tmp_path / "out", "u", url=any_url, notify=lambda _: None)
    again = import_stream(tmp_path / "out", "u", url=any_url, notify=lambda _: None)
    assert again.new == ()
    with Replay("u", url=any_url, epoch=0, batch_size=8, tuning=QUIET) as replay:
        assert checked(replay) == list(range(COUNT))
    assert load_stream(any_client, "u").compression


def test_views_copy_compressed_blocks_and_view_the_others(any_url: str, tmp_path: Path) -> None:
    """A stream may change its compression between runs, and a reader with views reads both."""
    spec = {key: SPEC[key] for key in ("x", "m", "y")}
    payload = f"segments:{tmp_path / 'segments'}"
    write(any_url, "t", payload, None, spec=spec)
    write(any_url, "t", payload, {"x": "zstd"}, spec=spec, start=COUNT)
    write(any_url, "t", payload, None, spec=spec, start=2 * COUNT)  # None keeps the stream's
    write(any_url, "t", payload, "none", spec=spec, start=3 * COUNT)
    tuning = Tuning(views=True, notify=lambda _: None)
    with penstock.Loader("t", url=any_url, group="g", batch_size=8, tuning=tuning) as loader:
        found = [number for _ in range(4) for number in checked(loader, spec)]
    assert sorted(found) == list(range(4 * COUNT))


def test_a_reader_without_the_package_stops_and_buries_nothing(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's host that lacks a package must not turn an epoch into dead letters."""
    write(any_url, "t", "inline", "zstd")
    with monkeypatch.context() as changes:
        changes.setitem(sys.modules, "zstandard", None)
        for order in (None, penstock.Canonical(0, 1)):
            group = "g" if order is None else "h"
            with (
                pytest.raises(MissingExtra, match=r'pip install "penstock\[zstd\]"'),
                penstock.Loader("t", url=any_url, group=group, batch_size=8, order=order, tuning=QUIET) as loader,
            ):
                checked(loader)
        with pytest.raises(MissingExtra, match=r'pip install "penstock\[zstd\]"'):
            Writer("new", url=any_url, tuning=Tuning(compression="zstd", notify=lambda _: None))
    assert dead_letters(any_client, load_stream(any_client, "t").partitions[0], 0, "g") == {}
    with penstock.Loader("t", url=any_url, group="g", batch_size=8, tuning=QUIET) as loader:
        assert sorted(checked(loader)) == list(range(COUNT))


def test_a_tensor_that_the_spec_lacks_is_refused_at_the_start(any_url: str) -> None:
    """A typo would otherwise leave a stream without compression."""
    with pytest.raises(BadSpec, match="names the tensor 'z'; the spec has x, m, r, s, y"):
        Writer("t", url=any_url, spec=SPEC, tuning=Tuning(compression={"z": "zstd"}, notify=lambda _: None))
    with connect(any_url) as client:
        assert find_stream(client, "t") is None
    with (
        pytest.raises(BadSpec, match="names the tensor 'z'; the spec has y"),
        Writer("t", url=any_url, tuning=Tuning(compression={"z": "zstd"}, notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        epoch.write({"y": 1})


def test_the_command_and_produce_take_the_option(
    any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Workers learn the setting from the stream, so a job need not carry it."""
    data = [{"x": np.full(2000, n, np.float32)} for n in range(30)]
    penstock.produce(
        data, stream="p", url=any_url, workers=1, wait=True, tuning=Tuning(compression={"x": "zstd"}, notify=print)
    )
    assert all(b'"compression":{"x":"zstd"}' in fields[b"meta"] for _, fields in entries(any_client, "p", 0))
    command = ["produce", "arrays", "nothing.npz", "--url", any_url, "--compression"]
    assert main([*command, "x=gzip"]) == 2
    assert "compression is 'x=gzip', expected one of zstd, blosc2" in capsys.readouterr().err
