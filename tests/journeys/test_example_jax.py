"""examples/jax, run as its first lines say."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "jax"


@pytest.mark.slow
def test_the_jax_example_trains_a_model_with_the_command_it_gives() -> None:
    """People copy an example before they read any page; this one is cut over two devices."""
    found = re.search(r"`penstock (run .*) -- python (train\.py)`", (EXAMPLE / "train.py").read_text())
    assert found
    command = [sys.executable, "-m", "penstock", *shlex.split(found[1]), "--", sys.executable, found[2]]
    folders = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
    environment = {
        **os.environ, "PYTHONPATH": folders, "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }  # fmt: skip
    done = subprocess.run(
        command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    accuracy = [float(value) for value in re.findall(r"accuracy ([\d.]+)", done.stdout)]
    assert len(accuracy) == 8
    assert max(accuracy) > 0.9


def test_the_jax_example_is_short_enough_to_copy() -> None:
    """What is longer is not read."""
    assert len((EXAMPLE / "train.py").read_text().splitlines()) < 60
