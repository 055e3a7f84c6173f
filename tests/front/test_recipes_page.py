"""The page of recipes with complete scripts: its files are written, its commands run, and what they say is checked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from tests.front.test_coming_from_pages import write_data

torch = pytest.importorskip("torch")  # `make lowest` has none
import penstock.torch  # noqa: E402

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "recipes.md").read_text()
SAYS = {
    "Ragged text": r"loss 0\.\d",
    "Detection": r"200 images with \d{3} boxes",
    "Only some": r"7\d\d texts, the shortest of 6 words, 0 repeated",
    "Packed": r"\d+ rows of 32 tokens",
    "A curriculum": r"epoch 1: levels \{1\}\n(?:.*\n)?epoch 2: levels \{2\}",
    "Other weights": r"share 0.9: 1\d easy of 15\n(?s:.*)share 0.2: \d+ easy of 25",
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


def test_labels_are_padded_with_what_a_loss_leaves_out(any_url: str) -> None:
    """A causal language model whose labels are padded with 0 trains on its padding."""
    text = (DOCS / "pytorch-trainers.md").read_text()
    [code] = re.findall(r"^FILL = .*?(?=^class )", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"pad_sequence": torch.nn.utils.rnn.pad_sequence}
    exec(code, names)
    spec: Any = dict.fromkeys(names["FILL"], ("int64", (None,)))
    with penstock.Writer("texts", url=any_url, spec=spec) as writer, writer.epoch() as epoch:
        for length in (1, 3):
            epoch.write(dict.fromkeys(spec, np.arange(1, length + 1)))
    with penstock.Loader("texts", group="gpt", batch_size=2, url=any_url) as loader:
        dataset = penstock.torch.dataset(loader)
        [batch] = torch.utils.data.DataLoader(dataset, batch_size=None, collate_fn=names["padded"])
    with penstock.Replay("texts", epoch=0, batch_size=2, url=any_url) as replay:
        [plain] = replay
    assert batch["labels"].tolist() == [[1, -100, -100], [1, 2, 3]] == plain["labels"].padded(-100).tolist()
    assert batch["input_ids"].tolist() == [[1, 0, 0], [1, 2, 3]]
    [told] = re.findall(r"gives a `Ragged`, whose (.*?)\.", PAGE, re.DOTALL)
    assert all(hasattr(plain["labels"], name) for name in re.findall(r"`(\w+)`", told))
