"""The page on loading: each of its snippets runs alone, on a server with the streams that it reads."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from tests.contracts.feed import produce

PAGE = (Path(__file__).parents[2] / "docs" / "loading.md").read_text()


def test_the_snippets_of_the_page_run_and_acknowledge_their_epochs(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copied snippets keep the page's promise: the epoch is acknowledged, and filtered samples are never seen."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    for name, count in {"train": 400, "photos": 140, "drawings": 60}.items():
        produce(any_url, name, count)
    filtered, mixed = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(filtered, {})
    steps = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert {dtype for dtype, _ in steps} == {"float32"}
    seen = {label for _, labels in steps for label in json.loads(labels)}
    assert len(seen) == 399 // 64 * 64
    assert 3 not in seen
    exec(mixed, {})
    sources = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(sources) == ["drawings", "photos", "photos", "photos"]
    for name, count in {"train": 400, "photos": 140, "drawings": 60}.items():
        assert audit_stream(any_client, name).delivered == {"net": count}
