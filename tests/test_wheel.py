"""The wheel as a user gets it: its content, and an empty environment outside the repository that runs it.

What the installed code does in detail is tested elsewhere, on the editable install.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_readme import EPOCHS, command_lines, write_workplace

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "penstock_common": "common",
    "penstock_producer": "producer",
    "penstock_consumer": "consumer",
    "penstock": "front",
}
NEWER = ("3.12", "3.13", "3.14")
NUMPY_TRAINING = """
import penstock

with penstock.Loader("train", group="resnet", batch_size=64) as loader:
    for _ in range(3):
        for batch in loader:
            print(batch["x"].shape)
"""

pytestmark = pytest.mark.slow


def _run(*command: str | Path, cwd: Path, **extra: str) -> str:
    """Run outside the repository, without what this interpreter's environment would add."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=kept | extra)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _install(environment: Path, wanted: str) -> None:
    """Install into an environment. Modules are compiled when imported, because most never are."""
    python = environment / "bin" / "python"
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile", wanted, cwd=environment)


def _version_of(python: Path) -> str:
    """The version it reports when really run; empty for a shim that leads nowhere or a Python without venv."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def newer_python() -> Path | None:
    """Return a newer Python, from PATH or from the folder in which version managers install."""
    beside = Path(sys.base_prefix).parent
    for version in NEWER:
        on_path = shutil.which(f"python{version}")
        for python in (*([Path(on_path)] if on_path else []), *beside.glob(f"*{version}*/bin/python{version}")):
            if sys.version_info < tuple(map(int, version.split("."))) and _version_of(python) == version:
                return python
    return None


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once from this tree."""
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return next(out.glob("penstock-*.whl"))


@pytest.fixture(scope="module", params=["this", "newer"])
def installed(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An otherwise empty virtual environment with the wheel in it: on this Python, and on a newer one where found."""
    folder = tmp_path_factory.mktemp(f"venv-{request.param}")
    if request.param == "this":
        venv.create(folder, with_pip=False)
    elif newer := newer_python():
        _run(newer, "-m", "venv", "--without-pip", folder, cwd=folder)
    else:
        pytest.skip(f"no Python newer than {sys.version.split()[0]} on this machine")
    _install(folder, str(wheel))
    yield folder
    shutil.rmtree(folder)


def test_the_wheel_holds_every_module_and_nothing_else(wheel: Path) -> None:
    """A misspelt package, a test or a note inside the wheel would reach every user."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT / side).as_posix()
        for package, side in PACKAGES.items()
        for path in (ROOT / side / package).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert packed == sources
    assert {f"{package}/py.typed" for package in PACKAGES} <= packed


def test_the_wheel_carries_licence_and_command(wheel: Path) -> None:
    """A licence that is not in the wheel is not given; a command that is not declared is not installed."""
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "Apache License" in texts["LICENSE"]
    assert "penstock = penstock.__main__:main" in texts["entry_points.txt"]
    assert {"producer", "tensorflow", "torch", "jax", "embedded"} <= set(
        re.findall(r"^Provides-Extra: (\S+)", texts["METADATA"], re.MULTILINE)
    )


def test_the_wheel_works_in_an_empty_environment(installed: Path, wheel: Path, tmp_path: Path) -> None:
    """A package that works only in the repository is broken."""
    where = _run(
        installed / "bin" / "python", "-W", "error", "-c", "import penstock; print(penstock.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed)
    assert _run(installed / "bin" / "penstock", "--version", cwd=tmp_path).split()[-1] == wheel.name.split("-")[1]


def test_every_dependency_is_declared(installed: Path, tmp_path: Path) -> None:
    """A module that imports an undeclared package works for its author only."""
    code = "import penstock; penstock.Writer, penstock.Loader, penstock.Replay, penstock.EmbeddedServer"
    _run(installed / "bin" / "python", "-W", "error", "-c", code, cwd=tmp_path)
    _run(sys.executable, "-m", "pip", "--python", installed / "bin" / "python", "check", cwd=tmp_path)


def test_writer_loader_and_replay_run_without_an_extra(installed: Path, any_url: str, tmp_path: Path) -> None:
    """A program that writes and reads needs the wheel and its dependencies only."""
    recipe, *_ = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs" / "howto.md").read_text(), re.MULTILINE | re.DOTALL
    )
    script = tmp_path / "own.py"
    script.write_text(recipe)
    _run(installed / "bin" / "python", "-W", "error", script, cwd=tmp_path, PENSTOCK_URL=any_url)


def test_the_readmes_first_command_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    """A module that only the workers import, or an extra that forgets a package, shows in a fresh environment only.

    The script reads numpy batches, because torch is no part of the two extras.
    """
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    _install(environment, f"{wheel}[producer,embedded]")
    write_workplace(tmp_path)
    (tmp_path / "train.py").write_text(NUMPY_TRAINING)
    (line,) = (line for line in command_lines() if line.startswith("penstock run"))
    path = f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"
    told = _run(*shlex.split(line), cwd=tmp_path, PATH=path, PENSTOCK_URL="")
    assert told.count("(24, 64, 64, 3)") == EPOCHS
