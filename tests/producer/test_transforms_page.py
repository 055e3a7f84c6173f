"""The page on transforms as its readers use it: its modules are written, its commands run, on a folder of images."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import redis
from PIL import Image

from penstock.__main__ import main
from penstock_common.stream.streams import load_stream
from tests.producer.reading import read_epoch

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "transforms.md").read_text()
MODULES = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = re.findall(r"^```sh\npenstock (.*?)\n```", PAGE, re.MULTILINE)


def test_the_page_has_modules_and_commands() -> None:
    """A page whose snippets are not found would pass in silence."""
    assert sorted(MODULES) == ["augment.py", "pipeline.py", "standardize.py"]
    assert len(COMMANDS) == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_of_the_page_makes_an_epoch(
    command: str, any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users type what the page shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, code in MODULES.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    rng = np.random.default_rng(0)
    for number in range(20):
        path = tmp_path / "photos" / f"class-{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(path)
    assert main([*shlex.split(command), "--workers", "2", "--url", any_url]) == 0
    for name in MODULES:
        sys.modules.pop(name.removesuffix(".py"), None)
    samples = read_epoch(any_url)
    assert len(samples) == 20
    assert {sample["x"].shape for sample in samples.values()} == {(32, 32, 3)}
    is_float = "noisy" in command or "standardize" in command
    spec = load_stream(any_client, "train").spec
    assert spec is not None
    assert spec["x"].dtype == ("float32" if is_float else "uint8")
