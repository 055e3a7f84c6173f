"""The page on notebooks: its cells run one after the other in one namespace, as in a kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "notebooks.md").read_text()


def test_the_cells_of_the_page_make_and_read_an_epoch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever copies them has a server, a production and a trained epoch without another terminal."""
    monkeypatch.delenv("PENSTOCK_URL", raising=False)
    server, making, reading, ending = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    cells: dict[str, Any] = {}
    exec(server, cells)
    try:
        exec(making, cells)
        exec(reading, cells)
        told = capsys.readouterr().out.splitlines()[-1]
        assert re.fullmatch(r"0 1000 <production of 'train', (running|ended): \d+ of 3000 samples>", told)
        cells["production"].wait(60)
        assert [sum(batch.size for batch in cells["loader"]) for _ in range(2)] == [1000, 1000]
    finally:
        exec(ending, cells)
    assert not cells["server"].is_running
