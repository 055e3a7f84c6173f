"""`penstock trim`: it releases at once what may go, and names the groups for which the rest stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.printable import readable_bytes
from penstock_common.stream.servers.embedded import EmbeddedServer


def test_trim_releases_acknowledged_epochs_at_once_and_names_who_needs_the_others(
    any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who needs space learns what holds it, and samples that a group has yet to read are never removed."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)

    def trimmed(*options: str) -> str:
        capsys.readouterr()
        assert main(["trim", "train", *options]) == 0
        return capsys.readouterr().out

    with penstock.Writer("train", url=any_url, spec={"x": ("uint8", (1000,))}) as writer:
        for _ in range(4):
            with writer.epoch(sizes=[20]) as epoch, epoch.shard(0) as part:
                for number in range(20):
                    part.write({"x": np.full(1000, number, np.uint8)})
        assert "no whole epoch of 'train' (epochs:0, this once)" in (told := trimmed("--keep", "0"))
        advice = "penstock epochs abandon train 3 --force"
        assert f"epoch 3 stays: no group has read it (`{advice}` gives it up)" in told
        with penstock.Loader("train", group="resnet", batch_size=20, url=any_url) as loader:
            for _ in range(4):
                assert sum(batch.size for batch in loader) == 20
        assert main(["groups", "declare", "train", "vit"]) == 0
        assert main(["epochs", "pin", "train", "0"]) == 0
        told = trimmed("--keep", "1")
        assert told.splitlines() == [
            "released no whole epoch of 'train' (epochs:1, this once): 0 KiB freed",
            "epoch 0 stays: group vit has not acknowledged 20 samples, it is pinned (`penstock epochs unpin`)",
            *(f"epoch {number} stays: group vit has not acknowledged 20 samples" for number in (1, 2, 3)),
        ]
        assert json.loads(trimmed("--bytes", "1kb", "--json"))["kept"][3]["epoch"] == 3
        assert main(["groups", "drop", "train", "vit"]) == 0
        assert "released epoch 1 of 'train' (bytes:41984, this once)" in (told := trimmed("--bytes", "41kb"))
        assert "epoch 0 stays: it is pinned" in told
        assert json.loads(trimmed("--keep", "0", "--json"))["released_epochs"] == [2, 3]
        assert "released no whole epoch of 'train' (retention budget)" in trimmed()
    assert main(["trim", "train", "--keep", "-1"]) == 2
    assert "argument --keep: '-1' is not a whole number from 0" in capsys.readouterr().err


def test_trim_says_that_files_of_segments_stay(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who trims to make space on a disk must know that the disk has none more."""
    payload = f"segments:{tmp_path / 'segments'}"
    with penstock.Writer("t", url=any_url, spec={"x": ("uint8", (1000,))}, payload=payload) as writer:
        for _ in range(2):
            with writer.epoch() as epoch:
                epoch.write({"x": np.zeros(1000, np.uint8)})
    with penstock.Loader("t", group="g", batch_size=1, url=any_url) as loader:
        assert [sum(batch.size for batch in loader) for _ in range(2)] == [1, 1]
    capsys.readouterr()
    assert main(["trim", "t", "--keep", "1", "--url", any_url]) == 0
    (folder,) = (tmp_path / "segments").iterdir()
    nbytes = sum(path.stat().st_size for path in folder.glob("free-*"))
    told = f"its spare files in {folder} ({readable_bytes(nbytes)}) stay until a writer uses them again"
    assert told in capsys.readouterr().out
    monkeypatch.setenv("PENSTOCK_SEGMENTS", str(tmp_path / "elsewhere"))
    assert main(["trim", "t", "--keep", "0", "--url", any_url]) == 0
    assert "stay until a writer runs: this process does not see them" in capsys.readouterr().out


def test_what_frees_memory_works_on_a_server_above_its_maxmemory(
    server: EmbeddedServer,
    fresh_server: Callable[..., EmbeddedServer],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message of a full server advises these commands, so that it must not refuse them with the same advice."""
    full = fresh_server(server.executable)
    monkeypatch.setenv("PENSTOCK_URL", full.url)
    with penstock.Writer("train", url=full.url, spec={"x": ("uint8", (1 << 20,))}) as writer:
        for _ in range(3):
            with writer.epoch(sizes=[4]) as epoch, epoch.shard(0) as part:
                for number in range(4):
                    part.write({"x": np.full(1 << 20, number, np.uint8)})
    with redis.Redis.from_url(full.url) as raw:
        raw.config_set("maxmemory", "5mb")
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            raw.set("any", "value")
    assert main(["epochs", "retain", "train", "epochs:1"]) == 0
    assert main(["epochs", "abandon", "train", "0", "--force"]) == 0
    assert main(["trim", "train", "--keep", "0"]) == 0  # and it is still above maxmemory
    assert "released epoch 0 of 'train'" in capsys.readouterr().out
    assert main(["delete", "train", "--yes"]) == 0
    assert "stream 'train' is deleted: 2 epochs, 8.0 MiB" in capsys.readouterr().out
