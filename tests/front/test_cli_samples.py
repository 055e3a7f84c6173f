"""Samples of a stream: `penstock show` and `penstock stat`, with both payload settings, without disturbing the
stream.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.__main__ import main
from penstock.cli import show
from penstock.cli.console import Console
from penstock_common.errors import EntryNotFound, EpochNotFound
from penstock_common.stream.client import connect
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.stream.streams import load_stream
from penstock_consumer.replay.samples import Identity, SampleReader

Told = Callable[..., tuple[int, str, str]]
CLASSES = ["cat", "dog", "emu"]
RNG = np.random.default_rng(7)
PICTURES = RNG.integers(0, 256, (90, 12, 10, 3), np.uint8)


@pytest.fixture(params=["inline", "segments"])
def payload(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return both payload settings."""
    return "inline" if request.param == "inline" else f"segments:{tmp_path / 'segments'}"


@pytest.fixture
def told(any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that runs a command line against the server: exit code, stdout, stderr."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(argv))
        return code, *capsys.readouterr()

    return run


def label(number: int) -> int:
    """Return the label of a picture: two of three are cats."""
    return [0, 0, 1][number % 3]


def produced(url: str, payload: str) -> None:
    """Produce 90 pictures in three shards of two partitions, two samples an entry. Sample 1/5 is bad."""
    writer = penstock.Writer(
        "train",
        url=url,
        payload=payload,
        partitions=2,
        tuning=penstock.Tuning(block_bytes=720),
        info={"classes": {"y": CLASSES}},
        spec={"x": ("uint8", (12, 10, 3)), "y": ("int64", ())},
    )
    with writer, writer.epoch(sizes=[30, 31, 30]) as epoch:
        for number, start in enumerate((0, 30, 60)):
            with epoch.shard(number) as part:
                for index in range(start, start + 30):
                    if (number, index) == (1, 35):
                        part.quarantine("truncated")
                    part.write({"x": PICTURES[index], "y": label(index)})


def state_of(client: Any) -> dict[bytes, Any]:
    """Return every key with its value, without the generation, which rises with each lease of a reader."""
    keys = [key for key in client.scan_iter() if b":{" in key and b"events" not in key]
    rosters = {key: client.hgetall(key) for key in keys if key.endswith(b":roster")}
    return {
        key: {name: value for name, value in rosters[key].items() if name != b"gen"}
        if key in rosters
        else client.dump(key)
        for key in keys
    }


def test_stat_tells_what_numpy_does_and_changes_nothing(
    told: Told, any_url: str, any_client: Any, payload: str, tmp_path: Path
) -> None:
    """The numbers go into a training script, and reading them must not hold, deliver or acknowledge anything."""
    produced(any_url, payload)
    with penstock.Loader("train", group="resnet", batch_size=8, url=any_url) as loader:
        next(iter(loader))
    before = state_of(any_client)
    code, out, err = told("stat", "train", "--exact", "--json", "--plots", str(tmp_path / "plots"))
    assert (code, err) == (0, "")
    view = json.loads(out)
    assert state_of(any_client) == before
    assert (view["epoch"], view["samples_there"], view["samples_read"], view["exact"]) == (0, 90, 90, True)
    x, y = view["tensors"]
    assert x["channels"]["mean"] == pytest.approx(PICTURES.mean(axis=(0, 1, 2)).tolist())
    assert x["channels"]["std"] == pytest.approx(PICTURES.std(axis=(0, 1, 2)).tolist())
    assert (x["min"], x["max"], x["bytes"]) == (0, 255, PICTURES.nbytes)
    assert y["classes"] == [
        {"class": 0, "name": "cat", "samples": 60},
        {"class": 1, "name": "dog", "samples": 30},
    ]
    assert set(y["compression"]["ratios"]) == {"zstd", "blosc2"}
    assert 0 < y["compression"]["bytes"] <= y["bytes"]
    assert y["findings"] == ["y: no sample of class 'emu' was seen"]
    for name in ("x.histogram", "y.histogram", "y.classes"):
        with Image.open(tmp_path / "plots" / f"{name}.png") as chart:
            assert chart.size == (640, 320)
    out = told("stat", "train")[1]
    for words in (
        "epoch 0: all 90 samples",
        "torchvision.transforms.Normalize(mean=[",
        "cat 60, dog 30",
        "compressed  zstd 1.",
        "warning: y:",
    ):
        assert words in out


def test_a_sampled_statistic_says_so_and_is_repeatable(told: Told, any_url: str) -> None:
    """A number from a part of the samples must not look like one from all, and the same seed gives the same part."""
    produced(any_url, "inline")
    first, again, other = (
        json.loads(told("stat", "train", "--json", "--samples", "40", "--seed", seed)[1]) for seed in ("5", "5", "6")
    )
    assert first == again != other
    assert (first["samples_there"], first["samples_read"], first["exact"], first["seed"]) == (90, 40, False, 5)
    assert sum(one["samples"] for one in first["tensors"][1]["classes"]) == 40
    out = told("stat", "train", "--samples", "40", "--seed", "5")[1]
    assert "40 of 90 samples, drawn with seed 5; --exact reads all" in out


def test_the_newest_epoch_with_samples_is_taken(told: Told, any_url: str, any_client: Any) -> None:
    """An epoch that was just opened, abandoned, or trimmed has no samples to show, but another one has."""

    def taken() -> tuple[int, int]:
        shown = json.loads(told("show", "train", "--json")[1])["samples"]
        view = json.loads(told("stat", "train", "--json")[1])
        assert {one["epoch"] for one in shown} == {view["epoch"]}
        return view["epoch"], view["samples_read"]

    with penstock.Writer(
        "train", url=any_url, tuning=penstock.Tuning(block_bytes=1), spec={"x": ("int64", ())}
    ) as writer:
        for count in (3, 2):
            with writer.epoch() as epoch:
                for number in range(count):
                    epoch.write({"x": number})
        writer.epoch().abandon()
        running = writer.epoch()
        assert taken() == (1, 2)
        any_client.xtrim(any_client.keys("*:1:entries")[0], maxlen=0)
        assert taken() == (0, 3)
        running.write({"x": 7})
        writer.flush()
        assert taken() == (3, 1)
        running.abandon()


def test_what_is_gone_or_damaged_is_left_out_and_counted(
    told: Told, any_url: str, any_client: Any, tmp_path: Path
) -> None:
    """A running epoch is trimmed during the reading, or a disk is damaged: the rest is shown, with the number of
    missing ones.
    """
    with penstock.Writer(
        "train", url=any_url, tuning=penstock.Tuning(block_bytes=1), spec={"x": ("float32", (4,))}
    ) as writer:
        epoch = writer.epoch()
        for number in range(5):
            epoch.write({"x": np.full(4, number, np.float32)})
            writer.flush()
        (entries,) = any_client.keys("*:0:entries")
        first = any_client.xrange(entries, count=1)[0][0]
        any_client.xdel(entries, first)
        view = json.loads(told("stat", "train", "--exact", "--json")[1])
        assert (view["state"], view["samples_read"], view["trimmed"], view["exact"]) == ("open", 4, 1, False)
        assert view["tensors"][0]["min"] == 1
        code, out, err = told("stat", "train", "--exact")
        assert (code, err) == (0, "1 samples are left out: retention has removed them\n")
        assert "all 4 samples so far (open)" in out
        assert told("show", "train", "--id", "0/0/0")[2] == (
            "penstock: sample 0/0/0 of 'train': retention has removed it\n"
        )
        epoch.abandon()
    folder = tmp_path / "segments"
    produced_there = penstock.Writer("disk", url=any_url, payload=f"segments:{folder}", spec={"x": ("int8", (4,))})
    with produced_there as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(4, np.int8)})
    for path in folder.rglob("*.seg"):
        path.write_bytes(path.read_bytes()[:4096])
    view = json.loads(told("stat", "disk", "--json")[1])
    assert (view["samples_read"], view["unreadable"]) == (0, 1)
    assert "ends before it" in view["why_unreadable"]
    folder.rename(tmp_path / "elsewhere")
    code, _, err = told("stat", "disk")
    assert code == 1
    assert err.count("\n") == 1


def test_show_finds_samples_by_identity_class_and_chance(told: Told, any_url: str, payload: str) -> None:
    """A user looks at a sample that a trainer reported, at a class with errors, or at any samples."""
    produced(any_url, payload)

    def ids(*argv: str) -> list[str]:
        code, out, err = told("show", "train", "--json", *argv)
        assert (code, err) == (0, "")
        return [one["id"] for one in json.loads(out)["samples"]]

    assert ids("--count", "3") == ["0/0/0", "0/0/1", "0/0/2"]
    assert ids("--id", "0/2/29", "--id", "0/1/6") == ["0/2/29", "0/1/6"]
    assert ids("--class", "dog", "--count", "2") == ["0/0/2", "0/0/5"]
    assert ids("--class", "1", "--count", "100") == ids("--class", "dog", "--seed", "1", "--count", "100")
    assert len(ids("--class", "dog", "--count", "100")) == 30
    assert ids("--seed", "1") == ids("--seed", "1") != ids("--seed", "2")
    assert len(set(ids("--seed", "1", "--count", "500"))) == 90
    lines = told("show", "train", "--count", "4")[1].splitlines()
    assert lines[3] == "0/0/2  y=dog  x: [12, 10, 3]"
    for argv, words in (
        (("--id", "0/1/5"), "sample 0/1/5 of 'train' is a bad one, a hole: `penstock bad list train --epoch 0`"),
        (("--id", "0/1/31"), "sample 0/1/31 of 'train' is not committed: epoch 0 has 3 shards, and this one has 31"),
        (("--id", "7/0/0"), "stream 'train' has no epoch 7; retained epochs: 0"),
        (("--class", "dig"), "no class 'dig'; classes there: cat, dog, emu; did you mean 'dog'?"),
        (("--tensor", "z"), "no tensor 'z'; the stream has x, y"),
    ):
        code, out, err = told("show", "train", *argv)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert words in err


def test_a_contact_sheet_has_the_pixels_of_the_stream(told: Told, any_url: str, tmp_path: Path) -> None:
    """A picture in a report must show what was trained on."""
    produced(any_url, "inline")
    code, out, err = told("show", "train", "--id", "0/1/6", "--out", str(tmp_path / "sheet.png"))
    assert (code, out, err) == (0, "", f"wrote {tmp_path / 'sheet.png'} (1 by identity)\n")
    with Image.open(tmp_path / "sheet.png") as sheet:
        pixels = {tuple(pixel) for pixel in np.asarray(sheet).reshape(-1, 3).tolist()}
    assert {tuple(pixel) for pixel in PICTURES[35].reshape(-1, 3).tolist()} <= pixels


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_a_terminal_shows_pictures_and_no_color_letters(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file has to be opened, and without colours shapes are still visible."""
    produced(any_url, "inline")
    monkeypatch.setenv("COLUMNS", "80")

    def screen(**environment: str) -> str:
        for name in ("NO_COLOR", "COLORTERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        parser = argparse.ArgumentParser()
        show.add_arguments(parser)
        out = Terminal()
        assert show.run(parser.parse_args(["train", "--url", any_url, "--count", "4"]), Console(out)) == 0
        return out.getvalue()

    assert "\x1b[38;2;" in (coloured := screen(COLORTERM="truecolor", TERM="xterm"))
    assert coloured.count("▀") == 4 * 24 * 12
    letters = screen(NO_COLOR="1", TERM="xterm")
    assert screen(TERM="dumb") == letters
    assert "\x1b" not in letters
    assert sum(letters.count(one) for one in ":-=+*#%@") > 500
    assert "0/0/3" in letters
    assert "y=cat" in letters
    assert max(map(len, letters.splitlines())) <= 80


def test_tensors_of_every_kind_can_be_looked_at(told: Told, any_url: str, tmp_path: Path) -> None:
    """Sound, tables, films, boxes, files, text: none of them may end in a traceback."""
    import ml_dtypes

    data = io.BytesIO()
    Image.fromarray(PICTURES[0]).save(data, format="JPEG")
    sample = {
        "wave": np.sin(np.arange(500)).astype(np.float32),
        "table": RNG.normal(size=(20, 30)),
        "half": RNG.normal(size=(9, 9)).astype(ml_dtypes.bfloat16),
        "film": RNG.integers(0, 256, (5, 8, 8, 3), np.uint8),
        "z": np.exp(1j * np.arange(40)).astype(np.complex64),
        "mask": RNG.random((16, 16)) > 0.5,
        "file": data.getvalue(),
        "text": "größer\x1b[31m".encode(),
        "score": 0.25,
        "brain": np.float32("nan"),
        "small": ml_dtypes.bfloat16(1.5),
        "imaginary": 1 + 2j,
    }
    spec = dict.fromkeys(("boxes",), ("float32", (None, 4)))
    known = {name: penstock_spec(value) for name, value in sample.items()}
    with penstock.Writer("all", url=any_url, spec={**known, **spec}) as writer, writer.epoch() as epoch:
        for count in (0, 3):
            epoch.write({**sample, "boxes": np.ones((count, 4), np.float32)})
    for name in (*sample, "boxes"):
        path = tmp_path / f"{name}.png"
        assert told("show", "all", "--tensor", name, "--out", str(path))[0] == 0
        assert path.exists()
        assert "\x1b" not in told("show", "all", "--tensor", name)[1]
    (one, _) = json.loads(told("show", "all", "--json")[1])["samples"]
    assert one["tensors"]["score"] == {"shape": [], "value": 0.25}
    assert one["tensors"]["brain"]["value"] == "nan"
    assert one["tensors"]["text"]["text"] == "größer [31m"
    assert one["tensors"]["boxes"] == {"shape": [0, 4]}
    view = json.loads(told("stat", "all", "--json")[1])
    assert [tensor["tensor"] for tensor in view["tensors"]] == [*sample, "boxes"]
    assert any("brain: 2 NaN" in finding for tensor in view["tensors"] for finding in tensor["findings"])


def penstock_spec(value: Any) -> tuple[str, tuple[int, ...]]:
    """Return the spec of a value."""
    from penstock_common.wire.spec import Spec

    tensor = Spec.infer({"x": value})["x"]
    return tensor.dtype, tuple(dim or 0 for dim in tensor.shape)


def test_live_shows_what_has_come_since(
    told: Told, any_url: str, any_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user watches an augmentation while it runs: the newest first, across epochs, without holding anything."""
    slept: list[float] = []
    with penstock.Writer(
        "train", url=any_url, spec={"x": ("int64", ())}, tuning=penstock.Tuning(block_bytes=1), partitions=2
    ) as writer:
        epochs = [writer.epoch()]

        def write(count: int) -> None:
            for number in range(count):
                epochs[-1].write({"x": number})
            writer.flush()

        steps: Iterator[Callable[[], object]] = iter(
            [lambda: None, lambda: write(2), lambda: epochs.append(writer.epoch()), lambda: write(1)]
        )

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            next(steps)()

        monkeypatch.setattr(show, "time", SimpleNamespace(sleep=sleep))
        write(3)
        code, out, err = told("show", "train", "--live", "--updates", "3", "--count", "4", "--interval", "0.5")
        assert (code, err) == (0, "")
        pictures = [part.splitlines() for part in out.split("train: ")[1:]]
        assert [[line.split()[0] for line in part[1:]] for part in pictures] == [
            ["0/0/2", "0/0/1", "0/0/0"],
            ["0/0/4", "0/0/3", "0/0/2", "0/0/1"],
            ["1/0/0", "0/0/4", "0/0/3", "0/0/2"],
        ]
        assert slept == [0.5] * 4
        assert not any(field.startswith(b"r:") for field in any_client.hkeys(any_client.keys("*:roster")[0]))
        for epoch in epochs:
            epoch.abandon()


@pytest.mark.parametrize("command", [["stat"], ["show"], ["show", "--id", "0/1/3"]], ids=" ".join)
def test_without_a_lease_nothing_is_written(told: Told, any_url: str, any_client: Any, command: list[str]) -> None:
    """A monitor's user has no right to write."""
    produced(any_url, "inline")
    before = {key: any_client.dump(key) for key in any_client.scan_iter()}
    code, _, err = told(*command, "train", "--no-lease")
    assert (code, err) == (0, "")
    assert {key: any_client.dump(key) for key in any_client.scan_iter()} == before


def test_an_epoch_that_is_released_without_a_lease_is_told_as_released(any_url: str, any_client: Any) -> None:
    """Numbers from a part of an epoch must not look like those of all of it."""
    produced(any_url, "inline")
    with connect(any_url) as client:
        stream = load_stream(client, "train")
        with SampleReader(client, stream, holds=False) as viewer:
            drawn = viewer.drawn()
            next(drawn)
            assert release_epoch(client, stream, 0)
            with pytest.raises(EpochNotFound, match=r"epoch 0 of 'train' was released while .* --no-lease"):
                next(drawn)
            with pytest.raises(EpochNotFound, match="was released while"):
                viewer.committed()
            with pytest.raises(EpochNotFound, match="was released while"):
                viewer.sample(Identity(0, 0, 1))


def test_a_complete_epoch_is_held_while_it_is_looked_at(any_url: str, any_client: Any) -> None:
    """No entry of it is removed while it is read, and afterwards nothing is held."""
    produced(any_url, "inline")
    now = [0.0]

    def leases() -> list[bytes]:
        rosters = any_client.keys("*:roster")
        return [field for roster in rosters for field in any_client.hkeys(roster) if field.startswith(b"r:")]

    with connect(any_url) as client:
        stream = load_stream(client, "train")
        with SampleReader(client, stream, clock=lambda: now[0]) as viewer:
            assert len(leases()) == 2
            for roster in any_client.keys("*:roster"):  # the lease expired, and another process removed it
                any_client.hdel(roster, *[field for field in any_client.hkeys(roster) if field[:2] == b"r:"])
            now[0] += 60
            assert viewer.sample(Identity(0, 0, 1)).tensors["y"] == 0
            assert len(leases()) == 2
        assert leases() == []
        with pytest.raises(EpochNotFound, match="no epoch 9"):
            SampleReader(client, stream, 9)
        with pytest.raises(EntryNotFound, match="no sample yet"), penstock.Writer("new", url=any_url) as writer:
            epoch = writer.epoch()
            try:
                SampleReader(client, load_stream(client, "new"))
            finally:
                epoch.abandon()
