"""examples/pytorch, run as its first lines say: in one process, and in two by torchrun."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pytorch"
LAUNCHERS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_pytorch_example_trains_a_model_with_the_commands_it_gives(launcher: str) -> None:
    """People copy an example before they read any page; two ranks must reach what one reaches."""
    found = re.search(rf"`penstock (run .*) -- {launcher} (.*train\.py)`", (EXAMPLE / "train.py").read_text())
    assert found
    started = [*LAUNCHERS[launcher], *shlex.split(found[2])]
    command = [sys.executable, "-m", "penstock", *shlex.split(found[1]), "--", *started]
    folders = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
    environment = {**os.environ, "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy = [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracy) == 8
    assert max(accuracy) > 0.9


def test_the_pytorch_example_is_short_enough_to_copy() -> None:
    """What is longer is not read."""
    assert len((EXAMPLE / "train.py").read_text().splitlines()) < 60
