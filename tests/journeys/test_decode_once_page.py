"""The page on decoding once: its commands and its snippets run in order, each snippet alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "decode-once.md").read_text()
PARTS = re.findall(r"^```(sh|python)\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)
COUNT = 30


def samples_of(batch: Any) -> list[tuple[int, int]]:
    """Return the numbers and labels of a batch, which is a whole pass."""
    assert batch["x"].shape[1:] == (64, 64, 3)
    return list(zip(np.round(batch["x"][:, 9, 9, 0] / 8).astype(int).tolist(), batch["y"].tolist(), strict=True))


def test_the_page_works_as_it_says(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who follows the page for weeks must not find at the end that one of its steps was never run."""
    for number in range(COUNT):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((70, 70, 3), 8 * number, np.uint8)).save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
    environment = {**os.environ, "PYTHONPATH": paths}
    last: list[list[tuple[int, int]]] = []

    def type_in(text: str) -> str:
        line = re.sub("^penstock ", f"{sys.executable} -m penstock ", text, flags=re.MULTILINE)
        done = subprocess.run(
            ["sh", "-ec", line], check=False, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    for kind, text in PARTS[:-1]:
        if kind == "sh":
            type_in(text)
        else:
            names: dict[str, Any] = {}
            exec(compile(text, "decode-once.md", "exec"), names)
            last.append(samples_of(names["batch"]))
    assert [kind for kind, _ in PARTS] == ["sh", "sh", "python", "sh", "python", "sh", "sh"]
    with penstock.Replay("train", epoch=0, batch_size=64, shuffle=7) as replay:
        passes = [samples_of(batch) for _ in range(3) for batch in replay]
    everything = [(number, number % 2) for number in range(COUNT)]
    assert all(sorted(one) == everything for one in passes)
    assert len({tuple(one) for one in passes}) == 3, "another order each time"
    assert last == [passes[2], passes[0]], "the page's third pass, and the first pass from files"
    with penstock.Replay("again", epoch=0, batch_size=64, shuffle=7) as again:
        assert [samples_of(batch) for batch in again] == passes[:1]
    assert "released epoch 0 of 'train'" in type_in(PARTS[-1][1])
    with penstock.Replay("train", epoch=1, batch_size=64) as replay:
        assert [sorted(samples_of(batch)) for batch in replay] == [everything]
