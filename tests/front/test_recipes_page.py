"""The page of recipes with complete scripts: its files are written, its commands run, and what they say is checked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from tests.front.test_coming_from_pages import write_data

pytest.importorskip("torch")  # `make lowest` has none
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text()
SAYS = {
    "Ragged text": r"loss 0\.\d",
    "Detection": r"200 images with \d{3} boxes",
    "Several models": r"large: 1000 samples",
    "Weights": r"trained on samples of version [2-9]\d",
}
RECIPES = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with pictures, and every file of the page."""
    write_data(tmp_path)
    for name, text in re.findall(r"^```python (\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_it_stands(recipe: str, any_url: str, folder: Path) -> None:
    """A reader pastes the files and the commands, and nothing else."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    printed = ""
    for command in re.findall(r"^```sh\n(.*?)^```", RECIPES[recipe], re.MULTILINE | re.DOTALL):
        done = subprocess.run(
            shlex.split(command), cwd=folder, env=environment | {"PENSTOCK_URL": any_url, "PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        printed += done.stdout
    (says,) = [text for name, text in SAYS.items() if recipe.startswith(name)] or [""]
    assert re.search(says, printed), printed
    if recipe == "A table of paths":
        for stream in ("labelled", "table"):
            with penstock.Replay(stream, epoch=0, batch_size=16, url=any_url) as replay:
                (batch,) = replay
            assert sorted(batch["y"].tolist()) == [0] * 8 + [1] * 8
            assert batch["x"].shape == (16, 32, 32, 3)
