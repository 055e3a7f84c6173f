"""The page on loading: its snippets run on a server, one after another."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from tests.contracts.feed import produce

PAGE = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()


def test_the_snippets_of_the_page_run_and_settle_their_epochs(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copied snippets keep the page's promise: the epoch is acknowledged, and filtered samples are never seen."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    for name, count in {"train": 400, "photos": 140, "drawings": 60}.items():
        produce(any_url, name, count)
    seen: Counter[float] = Counter()

    def step(x: Any, y: Any) -> None:
        assert x.dtype == np.float32
        seen.update(y.tolist())

    snippets = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 2
    names: dict[str, Any] = {"step": step, "to_float": lambda batch: {**batch, "x": batch["x"].astype(np.float32)}}
    exec("import penstock\n" + snippets[0], names)
    assert len(seen) == 399 // 64 * 64
    assert 3 not in seen
    names["loader"].close()
    exec(snippets[1], names)
    state = names["mixed"].state_dict()
    names["mixed"].close()
    assert state["step"] == 4  # three of photos, one of drawings
    for name, count in {"train": 400, "photos": 140, "drawings": 60}.items():
        assert audit_stream(any_client, name).delivered == {"net": count}
