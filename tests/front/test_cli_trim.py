"""`penstock trim`: it releases at once what may go, and names the groups for which the rest stays."""

from __future__ import annotations

import json

import numpy as np
import pytest

import penstock
from penstock.__main__ import main


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
