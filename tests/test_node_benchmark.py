"""The benchmark of Node: one tiny real run of every side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import node
from benchmarks.node_sides import SENDS


def test_every_side_reads_every_sample_and_every_way_carries_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark compares what the sides read, and refuses figures of different samples."""
    path = tmp_path / "node.json"
    node.main(["--gigabytes", "0.02", "--epoch", "10mb", "--rounds", "1", "--samples", "200", "--json", str(path)])
    told = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert set(found["replay"]["sides"]) == set(node.SIDES)
    assert set(found["send"]) == set(SENDS)
    for name in (*node.SIDES, *SENDS):
        assert f"| {name} " in told
    for side in found["replay"]["sides"].values():
        assert 0 < side["peak_bytes"] < 300e6
        assert all(one["cpu_s"] > 0 for one in side["passes"])


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A run of ten minutes must not end with nothing."""
    with pytest.raises(SystemExit):
        node.main(["replays"])
    assert "there are replay, send" in capsys.readouterr().err
