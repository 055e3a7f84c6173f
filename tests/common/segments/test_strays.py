"""Folders of an emptied server are listed, and removed if an operator says so and no process uses them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
import redis

from penstock.__main__ import main
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.removal import deletion
from tests.contracts.feed import open_stream, produce


def test_folders_whose_stream_is_gone_are_removed_on_an_operators_word(
    any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """After FLUSHALL no server knows the files.

    Files that are read or were just written, or that belong to a stream, must stay.
    """
    root = tmp_path / "segments"
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    produce(any_url, "old", 50, payload=f"segments:{root}")
    folder = segments_of(open_stream(any_client, "old"))
    assert folder is not None
    any_client.flushall()
    produce(any_url, "old", 50, payload=f"segments:{root}")
    produce(any_url, "other", 50, payload=f"segments:{root}")
    (root / "somebody-elses").mkdir()

    def told(*more: str) -> str:
        capsys.readouterr()
        assert main(["delete", "--segments", str(root), *more]) == 0
        return capsys.readouterr().out

    lines = told("--yes").splitlines()
    assert len(lines) == 1
    assert str(folder.path) in lines[0]
    assert "written to 0 s ago: kept until nothing was written for 10 min" in lines[0]
    monkeypatch.setattr(deletion, "QUIET_S", 0.0)
    reader = os.open(folder.path / next(iter(folder.names())), os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    assert "in use by a process" in told("--yes")
    os.close(reader)
    assert "give --yes" in told()
    assert folder.path.exists()
    assert "removed" in told("--yes")
    assert not folder.path.exists()
    assert "is that of a stream on this server" in told("--yes")
    (tmp_path / "empty").mkdir()
    assert main(["delete", "--segments", str(tmp_path / "empty")]) == 0
    assert f"{tmp_path / 'empty'} has no folders of segments" in capsys.readouterr().out
    assert len([path for path in root.iterdir() if path.is_dir()]) == 3
    assert main(["delete"]) == 2
    assert main(["delete", "--segments", str(root / "mistyped")]) == 1
    assert main(["delete", "old", "--segments", str(root)]) == 2
