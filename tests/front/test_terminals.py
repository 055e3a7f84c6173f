"""The terminals of the landing page: what their script records today, and what the stored pictures show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import unescape
from pathlib import Path

import pytest

from docs.img.terminals import HERE, record

CLAIMS = {
    "run": [r"epoch 0  100%  600/600 samples", r"step 24: 600 samples", r"train/resnet epoch 0: 600 samples"],
    "kill": [r"kill -9", r"\[1\]\+  Killed", r"has ended on this host", r"resnet epoch 0: 4(00|25|50|75) samples"],
    "audit": [r" 0  produced +600 +0 +0  resnet +600 +0 +0 +0 +0$", r"clean: lost 0, duplicate 0", r"^exit code 0$"],
}
"""The landing page's claims about each picture, as patterns of the line that shows them."""


def missing(shown: Mapping[str, list[str]]) -> list[str]:
    """Return the claims that no line of their picture shows."""
    return [
        f"{name}: {claim}"
        for name, claims in CLAIMS.items()
        for claim in claims
        if not any(re.search(claim, line) for line in shown[name])
    ]


def lines_of(picture: str) -> list[str]:
    """Return the lines of a picture, with a text at each column where it is drawn."""
    rows: dict[str, str] = {}
    for x, y, text in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)', picture):
        rows[y] = rows.get(y, "").ljust(round((float(x) - 16) / 8.4)) + unescape(text)
    return list(rows.values())


@pytest.mark.slow
def test_the_terminals_show_what_the_landing_page_says(tmp_path: Path) -> None:
    """A reader who types the same commands sees a run, a training that survives `kill -9`, and a clean audit."""
    recorded = record(tmp_path)
    assert missing({name: lines for name, (_, lines) in recorded.items()}) == []
    assert missing({name: lines_of(picture) for name, (picture, _) in recorded.items()}) == []


def test_the_stored_pictures_show_the_same() -> None:
    """A picture that was edited, or whose recording failed, shows something else."""
    assert missing({name: lines_of((HERE / f"{name}.svg").read_text()) for name in CLAIMS}) == []
