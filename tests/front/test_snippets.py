"""The pages whose snippets read one stream: each snippet is a script, and runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.__main__ import main
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROWS, EPOCHS = 640, 8
PASS, ALL = ROWS, ROWS * EPOCHS
PAGES: dict[str, dict[str, int]] = {
    "export": {},
    "jax": {"jax": ALL, "jax-saved": PASS, "jax-ranks": PASS},
    "numpy": {"ahead": PASS, "saved": PASS},
    "pytorch": {"resnet": ALL, "saved": 3 * PASS, "gpu": PASS, "workers": PASS},
    "segments": {},
    "tensorflow": {"resnet": ALL, "compiled": PASS, "mirrored": PASS, "saved": 2 * PASS},
}
"""Each page, and how many samples each of its groups acknowledges. The state of jax, numpy and
TensorFlow is saved at the end of an epoch. That of torch is saved at step 10, before the first of its runs ends."""
FRAMEWORKS = {"jax": "jax", "pytorch": "torch", "tensorflow": "tensorflow"}
RUN = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path, run_name='__main__')"


def write_streams(url: str) -> None:
    """Write what the snippets read: images of one row, and texts that differ in length."""
    with penstock.Writer("train", url=url) as writer:
        for _ in range(EPOCHS):
            with writer.epoch() as epoch:
                for number in range(ROWS):
                    epoch.write({"x": np.full(4, number, np.float32), "y": number % 10})
    spec: dict[str, tuple[str, tuple[int | None, ...]]] = {"tokens": ("int32", (None,))}
    with penstock.Writer("texts", url=url, spec=spec) as writer, writer.epoch() as epoch:
        for number in range(ROWS):
            epoch.write({"tokens": np.ones(1 + number % 200, np.int32)})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run_as_they_stand(
    page: str, any_url: str, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader pastes a snippet into a file. What saves a state runs twice, the first time less far, and continues."""
    if page in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[page])
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    write_streams(any_url)
    assert main(["export", "train", str(tmp_path / "data" / "train")]) == 0
    text = (DOCS / f"{page}.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert snippets
    for arguments in re.findall(r"^penstock (groups declare .*)$", text, re.MULTILINE):
        assert main(arguments.split()) == 0
    paths = []
    for number, snippet in enumerate(snippets):
        path = tmp_path / f"{number}.py"
        placed = re.sub(r"/dev/shm|/data", lambda folder: f"{tmp_path}{folder[0]}", snippet)
        path.write_text(placed)
        paths.append(path)
        if "if checkpoint.exists()" in snippet or "saving.restore(" in snippet:
            before = tmp_path / f"{number}-before.py"
            before.write_text(placed.replace("step < 30", "step < 15").replace("step == 30", "step == 15"))
            paths.insert(-1, before)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *paths], check=False, capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert audit_stream(any_client, "train").delivered == PAGES[page]


@pytest.mark.slow
def test_the_script_of_two_ranks_runs_by_the_command_below_it(tmp_path: Path) -> None:
    """DDP hangs if ranks have different numbers of steps, and a newcomer starts with this script."""
    pytest.importorskip("torch")
    page = (DOCS / "pytorch.md").read_text().partition("\n## DDP\n")[2].partition("\n## ")[0]
    [script] = re.findall(r"^```python ddp.py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    [command] = re.findall(r"^```sh\npenstock (.*?)\n```", page, re.MULTILINE)
    (tmp_path / "ddp.py").write_text(script)
    pixels = np.random.default_rng(0).integers(0, 256, (70, 8, 8, 3), np.uint8)
    for number, picture in enumerate(pixels):
        path = tmp_path / "photos" / f"class{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command.split()],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    steps = [f"rank {rank}, epoch {epoch}: 3 steps" for epoch in range(2) for rank in range(2)]
    assert sorted(re.findall(r"rank \d, epoch \d: \d+ steps", done.stdout)) == sorted(steps)
