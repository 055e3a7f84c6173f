"""`penstock run` on a terminal, as a person reads it: the rows of the screen and those that scrolled off."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import numpy as np
import pyte
import pytest

import penstock
from penstock.cli.console import Console

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front", "."))
_ROWS, _COLUMNS = 12, 90

TRAINER = """
    import os, sys, time
    import penstock

    print("terminal:", sys.stdout.isatty(), sys.stderr.isatty(), os.get_terminal_size().columns)
    with penstock.Loader("train", group="model", batch_size=10) as loader:
        for step, batch in enumerate(loader):
            print("step", step, "of", len(batch["x"]), "samples")
            for row in range(4):
                print(f"row {step}.{row}", file=sys.stderr)
                time.sleep(0.05)
    print("trained")
"""


def screen_of(text: str) -> list[str]:
    """Return all rows that this output leaves on a terminal, beginning with those that scrolled off."""
    screen = pyte.HistoryScreen(_COLUMNS, _ROWS, history=10_000, ratio=0.5)
    pyte.Stream(screen).feed(text.replace("\n", "\r\n").replace("\r\r\n", "\r\n"))
    gone = ["".join(row[column].data for column in range(_COLUMNS)) for row in screen.history.top]
    return [row.rstrip() for row in [*gone, *screen.display]]


def typed(*command: str, cwd: Path) -> tuple[int, str]:
    """Run a command with a separate terminal, and return its exit code and output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _ROWS, _COLUMNS, 0, 0))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    clean.pop("PYTHONUNBUFFERED", None)  # else each part of a printed line is a write, and progress comes in between
    environment = {**clean, "PYTHONPATH": _PATHS, "TERM": "xterm"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, env=environment, start_new_session=True
    )
    os.close(theirs)
    output = b""
    try:
        with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
            while piece := os.read(ours, 1 << 16):
                output += piece
        return process.wait(), output.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_every_line_of_the_trainer_stays_on_the_terminal(tmp_path: Path) -> None:
    """Our progress must not erase losses, warnings and tracebacks of a training."""
    np.save(tmp_path / "x.npy", np.zeros((90, 2), np.float32))
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINER))
    (tmp_path / "slow.py").write_text("import time\n\n\ndef each(sample):\n    time.sleep(0.02)\n    return sample\n")
    source = ("arrays", "x=x.npy", "--transform", "slow:each", "--workers", "1", "--shard-samples", "10")
    trainer = (sys.executable, "train.py")
    code, output = typed(sys.executable, "-m", "penstock", "run", *source, "--", *trainer, cwd=tmp_path)
    rows = screen_of(output)
    assert code == 0, rows
    expected = [f"terminal: True True {_COLUMNS}"]
    for step in range(9):
        expected += [f"step {step} of 10 samples", *(f"row {step}.{row}" for row in range(4))]
    said = [row for row in rows if row.startswith(("terminal", "step", "row", "trained"))]
    assert said == [*expected, "trained"], output
    assert any(row.startswith("epoch 0  100%  90/90 samples") for row in rows), rows


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize("length", [0, 7, _COLUMNS - 1, _COLUMNS])
def test_progress_begins_a_row_of_its_own_beside_an_unfinished_line(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bar of tqdm or Keras leaves the cursor behind it, and neither bar nor progress could be read in one row."""
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))
    both = Terminal()
    console = Console(both, both)
    console.share()
    with console.progress(0.0, clock=lambda: 0.0) as shown:
        bar = shown.add("epoch 0", 100, "samples")
        for done in (20, 60):
            both.write("#" * length)
            bar.update(done)
        both.write("#" * length)
        console.notice("bad sample: cat.png")
    rows = [row for row in screen_of(both.getvalue()) if row]
    unfinished = ["#" * length] if length else []
    told = ["epoch 0   20%  20/100 samples", "epoch 0   60%  60/100 samples"]
    expected = ["epoch 0    0%  0/100 samples"]
    for line in (told[0], told[1], "bad sample: cat.png"):
        expected += [*unfinished, line]
    assert rows == [*expected, told[1]]
