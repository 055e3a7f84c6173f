"""The pages for users of other tools: each page's files are written, and its commands and scripts run in order."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("torch")  # and TensorFlow: `make lowest` has neither, and leaves files out that name one
DOCS = Path(__file__).resolve().parents[2] / "docs"
TOOLS = ("webdataset", "mosaicml-streaming", "ray-data", "reverb", "tf-data-service", "dataloader", "tf-data")


def write_data(folder: Path) -> None:
    """Write sixteen pictures of two classes, as a folder and as a tar in webdataset's layout."""
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "train-0000.tar", "w") as tar:
        for number in range(16):
            path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((40, 50, 3), number, np.uint8)).save(path)
            for name, content in (("jpg", path.read_bytes()), ("cls", str(number % 2).encode())):
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("tool", TOOLS)
def test_what_a_page_shows_runs_as_it_stands(tool: str, any_url: str, tmp_path: Path) -> None:
    """A reader tries the snippet before reading the table of arguments."""
    write_data(tmp_path)
    page = (DOCS / f"coming-from-{tool}.md").read_text()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PENSTOCK_URL": any_url, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    blocks = re.findall(r"^```(sh|python) ?(\S*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert blocks
    for language, name, text in blocks:
        if language == "sh":
            command = shlex.split(text)
        else:
            (tmp_path / (name or "script.py")).write_text(text)
            command = [sys.executable, name or "script.py"]
        if not name:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=400
            )
            assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


def test_every_page_is_run() -> None:
    """The page for Node runs with the package's tests, and that for tensorcom with `make integrations`."""
    pages = {path.stem.removeprefix("coming-from-") for path in DOCS.glob("coming-from-*.md")}
    assert pages == {*TOOLS, "process-send", "tensorcom"}
