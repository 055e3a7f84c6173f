"""The README as its readers use it: every snippet is run, every command line is run, nothing is only shown.

Snippets have names (```python train.py) and become files next to a folder of images. That the wheel alone suffices is
tested in test_wheel.py.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
"""The number of epochs in the README's commands. Each is one batch, because there are few images."""
BIN = Path(sys.executable).parent


def snippets() -> dict[str, str]:
    """Each snippet's file name and its code."""
    return dict(re.findall(r"^```python (\S+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL))


def command_lines() -> list[str]:
    """The lines of all ```sh blocks, without their comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for text in block.splitlines() if (line := text.partition("#")[0].strip())]


def terminals() -> str:
    """The lines of the section with three terminals, without their comments."""
    section = README.partition("## In three terminals")[2]
    found = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found
    return "\n".join(line.partition("#")[0].strip() for line in found[1].splitlines())


def from_node() -> list[str]:
    """The lines of the section on Node, without their comments, which js/test/readme.test.mjs runs."""
    assert (ROOT / "js" / "test" / "readme.test.mjs").exists()
    section = README.partition("## From Node")[2].partition("## ")[0]
    found = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found
    return [line.partition("#")[0].strip() for line in found[1].splitlines()]


def write_workplace(folder: Path) -> None:
    """A reader's folder: photos of two classes, and the README's named files."""
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = folder / "photos" / ("cat", "dog")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (80, 100, 3), dtype=np.uint8)).save(path)
    for name, code in snippets().items():
        (folder / name).write_text(code)


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """See write_workplace."""
    write_workplace(tmp_path)
    return tmp_path


class Reader:
    """A user at a shell in ``folder``, who types the README's lines."""

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


def test_one_command_feeds_a_trainer_from_a_folder_of_images(workplace: Path) -> None:
    """It is the first thing to try, on a machine without a server."""
    (line,) = (line for line in command_lines() if line.startswith("penstock run"))
    losses = Reader(workplace).runs(line).splitlines()
    assert [int(text.split()[0]) for text in losses] == [*range(EPOCHS)]
    assert all(float(text.split()[1]) > 0 for text in losses)


@pytest.mark.slow
def test_keras_trains_on_what_was_produced(reader: Reader) -> None:
    """A snippet with a framework rots unseen if only the numpy ones are run."""
    (produce,) = (line for line in command_lines() if line.startswith("penstock produce"))
    reader.runs(produce.replace("--no-workers", "--workers 1"))
    reader.runs("python keras_train.py")
    assert "clean" in reader.runs("penstock audit train")


def test_three_terminals_feed_a_training(workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server asks for a password that the reader never sees, and each terminal finds it.

    The processes of the first two terminals stay in the foreground until the third one is done.
    """
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir(mode=0o700)
    server, worker, *others = (line for line in terminals().splitlines())
    alone = Reader(workplace)
    with alone.running(f"{server} --port 0", "is ready at"), alone.running(worker, "on queue"):
        told = {line: alone.runs(line) for line in others}
        script = "import os, redis; print(redis.Redis.from_url(os.environ['PENSTOCK_URL']).ping())"
        export = 'export PENSTOCK_URL="$(penstock server --print-url)"'  # as docs/commands.md has it, for redis-cli
        assert alone.runs(shlex.join(["sh", "-euc", f"{export}; python -c {shlex.quote(script)}"])) == "True\n"
    assert "clean: lost 0, duplicate 0, pending 0" in told["penstock audit train"]


def test_every_command_line_runs() -> None:
    """A renamed option must break here, not at a reader's."""
    runs = (line for line in command_lines() if line.startswith("penstock run"))
    elsewhere = {*terminals().splitlines(), *from_node(), *runs}
    for line in command_lines():
        if line.startswith("pip install"):
            _offers_the_extras(line)
        else:
            assert line in elsewhere, f"the README shows {line!r}, and nothing here runs it"


def _offers_the_extras(line: str) -> None:
    offered = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"\[([a-z,]+)\]", line)
    assert asked
    assert {extra for some in asked for extra in some.split(",")} <= set(offered)


def _is_a_target(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(shlex.split(line)[1:]) <= set(targets)


def test_what_is_said_in_passing_exists() -> None:
    """`penstock groups declare`, `make bench`: a name in the running text is a promise like any other."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`penstock ([a-z]+)", prose)) <= set(COMMANDS)
    for target in re.findall(r"`(make [a-z]+)`", prose):
        _is_a_target(target)
