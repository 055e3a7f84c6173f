"""Without an optional package, each feature that needs it names the extra that installs it, in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_common.extras import PACKAGES, needed

ROOT = Path(__file__).resolve().parents[2]

BARE = """
import contextlib, importlib.machinery, io, json, sys
missing, find = json.loads(sys.argv[1]), importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *more: None if name in missing else find(name, *more)
from penstock.__main__ import main
"""
COMMANDS = """
told = {}
for argv in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        told[" ".join(argv[:2])] = [main(argv), err.getvalue()]
print(json.dumps(told))
"""
IMPORTS = """
import importlib
told = {}
for name in json.loads(sys.argv[2]):
    try:
        importlib.import_module(name)
        told[name] = "imported"
    except ModuleNotFoundError as error:
        told[name] = str(error)
print(json.dumps(told))
"""

SENTENCES = {
    "exporter --port": 'penstock exporter needs prometheus-client: pip install "penstock[metrics]"',
    "gateway train/resnet": 'penstock gateway needs starlette: pip install "penstock[gateway]"',
    "monitor --web": 'penstock monitor --web needs starlette: pip install "penstock[gateway]"; '
    "without --web it needs no server",
    "demo --trainer": 'penstock demo needs scikit-learn, Pillow, rq: pip install "penstock[demo]"',
    "produce images": 'producing needs rq: pip install "penstock[producer]"',
    "run images": 'producing needs rq: pip install "penstock[producer]"',
    "worker --processes": 'producing needs rq: pip install "penstock[producer]"',
    "show train": 'drawing pictures needs Pillow: pip install "penstock[producer]"',
    "stat train": 'drawing pictures needs Pillow: pip install "penstock[producer]"',
}
MODULES = {
    "penstock.torch": 'penstock.torch needs torch: pip install "penstock[torch]"',
    "penstock.jax": 'penstock.jax needs JAX: pip install "penstock[jax]"',
    "penstock.tensorflow": 'penstock.tensorflow needs TensorFlow: pip install "penstock[tensorflow]"',
    "penstock.keras": 'penstock.keras needs Keras: pip install "penstock[tensorflow]"; '
    "for its torch backend: pip install keras 'penstock[torch]'",
    "penstock_producer.sources.torch": 'reading torch datasets needs torch: pip install "penstock[torch]"',
    "penstock_producer.sources.decode": 'reading images needs Pillow: pip install "penstock[producer]"',
}


def without_extras(script: str, tried: list[str] | list[list[str]], **environment: str) -> dict[str, Any]:
    """Run a script in a Python that finds none of the optional packages."""
    done = subprocess.run(
        [sys.executable, "-c", BARE + script, json.dumps([*PACKAGES, "rich"]), json.dumps(tried)],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_command_without_its_extra_says_what_to_install(any_url: str, tmp_path: Path) -> None:
    """The plain package is enough for a trainer, and other commands must not end in a traceback."""
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros((4, 4, 3), np.uint8)})
    commands = [
        ["exporter", "--port", "0"],
        ["monitor", "--once"],
        ["monitor", "--web"],
        ["gateway", "train/resnet"],
        ["demo", "--trainer", "numpy"],
        ["produce", "images", str(tmp_path)],
        ["run", "images", str(tmp_path), "--", "true"],
        ["worker", "--processes", "1"],
        ["show", "train", "--out", str(tmp_path / "sheet.png")],
        ["stat", "train", "--plots", str(tmp_path / "plots")],
    ]
    told = without_extras(COMMANDS, commands, PENSTOCK_URL=any_url)
    assert told.pop("monitor --once") == [0, ""]  # rich is never necessary
    assert told == {name: [1, f"penstock: {text}\n"] for name, text in SENTENCES.items()}


def test_a_module_without_its_extra_says_what_to_install() -> None:
    """Programs catch it as the ModuleNotFoundError that it is, and a person reads what to do."""
    assert without_extras(IMPORTS, list(MODULES)) == MODULES


def test_every_extra_that_is_advised_installs_the_package() -> None:
    """Advice that installs another package leads to the same error again."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package in PACKAGES.values():
        brought = [line.lower() for line in extras[package.extra]]
        name = {"keras": "tensorflow"}.get(package.name.lower(), package.name.lower())  # tensorflow depends on it
        assert any(line.startswith(name) for line in brought), package


def test_a_package_that_is_installed_and_broken_is_not_said_to_be_missing() -> None:
    """Installing it once more would change nothing."""
    with pytest.raises(ModuleNotFoundError) as caught, needed("rq", "producing"):
        raise ModuleNotFoundError("No module named 'croniter'", name="croniter")
    assert str(caught.value) == "No module named 'croniter'"
