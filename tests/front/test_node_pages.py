"""The Python programs of the pages for Node: they make the streams that the pages' JavaScript reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import penstock

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("page", "stream", "samples", "shape"),
    [("javascript.md", "train", 100, (4, 4, 3)), ("tensorflow-js.md", "digits.train", 1437, (8, 8))],
)
def test_a_page_makes_the_stream_that_it_reads(
    page: str, stream: str, samples: int, shape: tuple[int, ...], any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader without the stream can run no snippet of the page."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    with penstock.Replay(stream, epoch=0, batch_size=samples, url=any_url) as replay:
        (batch,) = replay
    assert batch["x"].shape == (samples, *shape)
    assert batch["y"].dtype == "int64"
