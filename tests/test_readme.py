"""The README as its readers use it: every snippet is run, every command line is run, nothing is only shown.

Named snippets (```python train.py) become files beside a folder of images; the others run as one script. That the
wheel alone suffices is tested in test_wheel.py.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from penstock.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
IMAGES = 24
EPOCHS = 3
"""Of the README's commands; one batch each with so few images."""
BIN = Path(sys.executable).parent


def snippets() -> dict[str, str]:
    """File name (or '' for the script made of all unnamed ones) -> code."""
    found: dict[str, str] = {}
    for name, code in re.findall(r"^```python *(\S*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        found[name] = found.get(name, "") + code
    return found


def command_lines() -> list[str]:
    """The lines of all ```sh blocks, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for text in block.splitlines() if (line := text.partition("#")[0].strip())]


def write_workplace(folder: Path) -> None:
    """A reader's folder: photos of two classes, and the README's named files."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)
    for name, code in snippets().items():
        if name:
            (folder / name).write_text(code)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """See write_workplace."""
    write_workplace(tmp_path)
    return tmp_path


class Reader:
    """Somebody at a shell in ``folder``, who types what the README says."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self._folder = folder
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "PYTHON"))}
        self._env |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if url:
            self._env["PENSTOCK_URL"] = url

    def runs(self, line: str) -> str:
        """Runs a command line to its end; what it printed."""
        done = subprocess.run(
            shlex.split(line), capture_output=True, text=True, check=False, cwd=self._folder, env=self._env, timeout=120
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def starts_and_ends(self, line: str, ready: str) -> None:
        """Runs a command that goes on until Ctrl-C, until it says ``ready``."""
        with self.running(line, ready):
            pass

    @contextmanager
    def running(self, line: str, ready: str) -> Iterator[None]:
        """Runs a command that goes on until Ctrl-C, from when it says ``ready`` until the block ends."""
        process = subprocess.Popen(
            shlex.split(line),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self._folder,
            env=self._env,
        )
        assert process.stdout is not None
        with process, process.stdout as said:
            heard = []
            for text in said:
                heard.append(text)
                if ready in text:
                    break
            else:
                raise AssertionError(heard)
            try:
                yield
            finally:
                process.send_signal(signal.SIGINT)
                heard.extend(said)
            assert process.wait(30) == 0, heard


@pytest.fixture
def reader(workplace: Path, any_url: str) -> Reader:
    """A reader with a server."""
    return Reader(workplace, any_url)


def test_the_snippets_run_in_their_order(reader: Reader, workplace: Path) -> None:
    """The first lines a user copies must work as they stand."""
    (workplace / "script.py").write_text(snippets()[""])
    reader.runs("python -W error script.py")


def test_one_command_feeds_a_trainer_from_a_folder_of_images(workplace: Path) -> None:
    """It is the first thing to try, on a machine without a server."""
    (line,) = (line for line in command_lines() if line.startswith("penstock run"))
    shapes = Reader(workplace).runs(line).splitlines()
    assert len(shapes) == EPOCHS
    assert all(text.startswith(f"({IMAGES}, 64, 64, 3)") for text in shapes)


@pytest.mark.slow
def test_keras_trains_on_what_was_produced(reader: Reader) -> None:
    """A snippet with a framework rots unseen if only the numpy ones are run."""
    (produce,) = (line for line in command_lines() if line.startswith("penstock produce"))
    reader.runs(f"{produce} --workers 1")
    reader.runs("python keras_train.py")
    assert "clean" in reader.runs("penstock audit train")


def test_every_command_line_runs(reader: Reader) -> None:
    """A renamed option must break here, not at a reader's."""
    ways: dict[str, Callable[[str], object]] = {
        "pip install": _offers_the_extras,
        "penstock demo": _is_a_journey,
        "penstock run": lambda line: None,  # above, without a server
        "penstock server": lambda line: reader.starts_and_ends(f"{line} --port 0", "is ready at"),
        "export PENSTOCK_URL": lambda line: None,  # below, with a server of the README's
        "penstock worker": lambda line: reader.starts_and_ends(line, "on queue"),
        "penstock": reader.runs,
        "python": reader.runs,
        "make": _is_a_target,
    }
    for line in command_lines():
        way = next((way for start, way in ways.items() if line.startswith(start)), None)
        assert way, f"the README shows {line!r}, and nothing here runs it"
        way(line)


def test_the_server_of_the_readme_is_found_by_penstock_and_by_other_programs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It asks for a password that the reader never sees."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    (server,) = (line for line in command_lines() if line.startswith("penstock server"))
    (export,) = (line for line in command_lines() if line.startswith("export PENSTOCK_URL"))
    alone = Reader(workplace)
    with alone.running(f"{server} --port 0", "is ready at"):
        script = (
            f"{export}; python -c \"import os, redis; print(redis.Redis.from_url(os.environ['PENSTOCK_URL']).ping())\""
        )
        assert alone.runs(shlex.join(["sh", "-euc", script])) == "True\n"
        alone.runs("python -c \"import penstock; penstock.Writer('mine', spec={'x': ('uint8', ())}).close()\"")
        assert "mine" in alone.runs("penstock inspect")


def _offers_the_extras(line: str) -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"\[([a-z,]+)\]", line)
    assert asked
    assert {extra for some in asked for extra in some.split(",")} <= set(offered)


def _is_a_journey(line: str) -> None:
    """The demo takes minutes and is tested as a journey of its own."""
    files = [*(ROOT / "tests").rglob("test_*demo*.py")]
    assert files, f"no test runs {line!r}"


def _is_a_target(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shlex.split(line)[1:]) <= set(targets)


def test_what_is_said_in_passing_exists() -> None:
    """`penstock groups declare`, `make bench`: a name in the running text is a promise like any other."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`penstock ([a-z]+)", prose)) <= set(COMMANDS)
    for target in re.findall(r"`(make [a-z]+)`", prose):
        _is_a_target(target)
