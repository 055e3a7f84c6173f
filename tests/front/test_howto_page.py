"""The page of recipes: each of its snippets runs alone, on one stream."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "howto.md").read_text()


def test_the_recipes_do_what_they_say(
    any_url: str,
    any_client: Client,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Recipes are copied: each group sees every sample, a resume continues exactly, ranks have equal steps."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    monkeypatch.chdir(tmp_path)
    spec: dict[str, tuple[str, tuple[int | None, ...]]] = {"x": ("uint8", (3,)), "y": ("int64", ())}
    writer = penstock.Writer("train", url=any_url, spec=spec, tuning=penstock.Tuning(block_bytes=80))
    with writer, writer.epoch(sizes=[100]) as epoch, epoch.shard(0) as part:
        for number in range(100):
            part.write({"x": np.zeros(3, np.uint8), "y": number})
    declared = re.findall(r"^penstock (groups declare train (\w+)[^#\n]*)", PAGE, re.MULTILINE)
    for arguments, _ in declared:
        assert main(arguments.split()) == 0
    assert [group for _, group in declared] == ["resnet", "vit", "safe", "exact"]
    own, several, checkpoints, exact, ranks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(own, {})
    capsys.readouterr()
    exec(several, {})
    seen: dict[str, list[int]] = {"resnet": [], "vit": []}
    for model, labels in re.findall(r"^(\w+) .*(\[.*\])$", capsys.readouterr().out, re.MULTILINE):
        seen[model] += json.loads(labels)
    assert sorted(seen["resnet"]) == sorted(seen["vit"]) == list(range(100))
    names: dict[str, Any] = {}
    exec(checkpoints, names)
    assert (names["model"].sum(), np.load("model.npy").sum()) == (100, 80)
    delivered = audit_stream(any_client, "train").delivered
    assert (delivered["resnet"], delivered["vit"], delivered["safe"]) == (100, 100, 80)
    exec(exact, names := {})
    assert names["third"]["y"].tolist() == list(range(40, 60))
    exec(ranks, names := {})
    assert names["steps"] == [5, 5]
