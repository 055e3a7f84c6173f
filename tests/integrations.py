"""Pages whose scripts need tools that `make test` does not install: their files are written, their commands run.

`make integrations` runs this file in a virtual environment of its own. pytest collects it only by name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "pytorch-trainers": [
        r"rank 0, epoch 1: 16 steps", r"rank 1, epoch 1: 16 steps",
        r"rank 0: 32 steps, loss 0", r"rank 1: 32 steps, loss 0",
        r"rank 0: 32 steps$", r"rank 1: 32 steps$",
    ],
    "sweep": [r"5 trials, best loss 0\.\d+"],
}  # fmt: skip
"""Each page, and what its commands print."""


def run(command: str, folder: Path, url: str) -> str:
    """Run a command as a reader would, and return all its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment | quiet | {"PATH": path, "PENSTOCK_URL": url},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs_as_it_stands(page: str, any_url: str, tmp_path: Path) -> None:
    """A reader pastes the files and the commands, and nothing else."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    printed = ""
    for language, name, block in re.findall(r"^```(sh|python) ?(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if name:
            (tmp_path / name).write_text(block)
        else:
            assert language == "sh"
            printed += run(block, tmp_path, any_url)
    missing = [told for told in PAGES[page] if not re.search(told, printed, re.MULTILINE)]
    assert not missing, printed
