"""The page on decoding once: its commands and its code run one after another."""

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


def test_the_page_works_as_it_says(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who follows the page for weeks must not find at the end that one of its steps was never run."""
    for number in range(COUNT):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((70, 70, 3), 8 * number, np.uint8)).save(folder / f"{number}.png")
    steps: list[tuple[int, int]] = []

    def step(images: Any, labels: Any) -> None:
        assert images.shape[1:] == (64, 64, 3)
        steps.extend(zip(np.round(images[:, 9, 9, 0] / 8).astype(int).tolist(), labels.tolist(), strict=True))

    names: dict[str, Any] = {"step": step, "penstock": penstock}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
    environment = {**os.environ, "PYTHONPATH": paths}
    ran = []
    for kind, text in PARTS:
        if kind == "sh":
            line = text.replace("penstock ", f"{sys.executable} -m penstock ", 1)
            done = subprocess.run(
                ["sh", "-c", line], check=False, env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
        else:
            exec(compile(text, "decode-once.md", "exec"), names)
        ran.append(kind)
    assert ran == ["sh", "sh", "python", "sh", "python", "sh"]
    passes = [steps[at : at + COUNT] for at in range(0, len(steps), COUNT)]
    assert len(passes) == 4
    everything = [(number, number % 2) for number in range(COUNT)]
    assert all(sorted(one) == everything for one in passes)
    assert len({tuple(one) for one in passes[:3]}) == 3, "another order each time"
    assert passes[3] == passes[0], "the same pass from files"
    again = penstock.Replay("again", epoch=0, batch_size=64, shuffle=7)
    for batch in again:
        step(batch["x"], batch["y"])
    assert steps[-COUNT:] == passes[0]
    for reader in (again, names["replay"]):
        reader.close()
