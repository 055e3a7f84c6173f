"""Record the terminals of the landing page from real shells: ``python docs/img/terminals.py``. It takes about 20 s.

It needs the extra ``dev``. It writes run.svg, kill.svg and audit.svg. A shell in a pseudo-terminal gets the commands as
keys, servers, workers and trainers are processes, and one is killed. `pyte` keeps the screen, which is drawn as SVG.
"""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from termios import TIOCSWINSZ
from xml.sax.saxutils import escape

import numpy as np
import pyte
from PIL import Image

from penstock_common.stream.servers.embedded import EmbeddedServer

HERE = Path(__file__).resolve().parent
PATHS = [str(HERE.parents[1] / folder) for folder in ("common", "producer", "consumer", "front")]
COLUMNS, ROWS = 106, 40
PATIENCE_S = 90.0
PROMPT = "$ "
CELL, LINE, MARGIN, HEAD, SIZE = 8.4, 19, 16, 34, 14
COLOURS = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#ff8b94", "green": "#a3d977", "brown": "#f5d76e",
    "blue": "#88b4f7", "magenta": "#d9a7e8", "cyan": "#7fd7d7", "white": "#ffffff",
}  # fmt: skip
SHELL = """
import fcntl, os, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # a shell without a terminal of its own does not report the jobs that were killed
os.execvp("bash", ["bash", "--norc", "--noprofile"])
"""
TRAIN = """
import penstock, time

with penstock.Loader("train", group="resnet", batch_size=25) as loader:
    samples = 0
    for step, batch in enumerate(loader, 1):
        time.sleep({step_s})  # the step
        samples += batch.size
        if step % 6 == 0:
            print(f"step {{step}}: {{samples}} samples", flush=True)
"""


class Terminal:
    """A shell in a pseudo-terminal, and the screen that it draws."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self.screen)
        self._pty, its_side = os.openpty()
        ioctl(its_side, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._shell = subprocess.Popen(
            [sys.executable, "-c", SHELL],
            stdin=its_side, stdout=its_side, stderr=its_side, cwd=folder, env=_environment(url), start_new_session=True,
        )  # fmt: skip
        os.close(its_side)
        self.wait_for(PROMPT.strip())

    @property
    def lines(self) -> list[str]:
        """Return the lines of the screen, without empty ones at the end."""
        lines = [line.rstrip() for line in self.screen.display]
        return lines[: max((at for at, line in enumerate(lines, 1) if line), default=0)]

    def press(self, keys: str) -> None:
        """Send keys."""
        os.write(self._pty, keys.encode())

    def run(self, command: str) -> None:
        """Type a command, and wait for the next prompt."""
        prompts = self._prompts()
        self.press(f"{command}\n")
        self._until(lambda: self._prompts() > prompts and self.lines[-1] == PROMPT.strip(), command)

    def wait_for(self, text: str) -> None:
        """Wait until a text is on the screen."""
        self._until(lambda: any(text in line for line in self.lines), text)

    def close(self) -> None:
        """Hang up, and wait for the shell."""
        os.close(self._pty)  # a signal alone can come just before the shell reads, which then waits for ever
        self._shell.wait()

    def _prompts(self) -> int:
        return sum(line.startswith(PROMPT.strip()) for line in self.lines)

    def _until(self, is_reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not is_reached():
            if time.monotonic() > end:
                raise TimeoutError(f"{what!r} in {PATIENCE_S:.0f} s; the screen has:\n" + "\n".join(self.lines))
            if select.select([self._pty], [], [], 0.1)[0]:
                self._stream.feed(os.read(self._pty, 1 << 16))

    def drawn(self, title: str) -> str:
        """Return the screen as SVG, without the last prompt."""
        count = len(self.lines) - (self.lines[-1] == PROMPT.strip())
        width, height = MARGIN * 2 + CELL * COLUMNS, HEAD + MARGIN + LINE * count
        rows = [_row(self.screen.buffer[at], HEAD + LINE * (at + 0.75)) for at in range(count)]
        body = "\n".join(row for row in rows if row)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" font-size="{SIZE}" '
            'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">\n'
            f"<title>{escape(title)}</title>\n"
            f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="#22262e"/>\n'
            '<circle cx="20" cy="17" r="6" fill="#ff5f57"/><circle cx="40" cy="17" r="6" fill="#febc2e"/>'
            '<circle cx="60" cy="17" r="6" fill="#28c840"/>\n'
            f"{body}\n</svg>\n"
        )


def _environment(url: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    address = {"PENSTOCK_URL": url} if url else {}
    look = {"PS1": r"\[\e[32m\]$\[\e[0m\] ", "TERM": "xterm-256color"}
    return {**kept, "PATH": path, "PYTHONPATH": os.pathsep.join(PATHS), **look, **address}


def _row(cells: dict[int, pyte.screens.Char], y: float) -> str:
    """Return a line as one text for each run of cells that look alike."""
    parts = []
    at = 0
    for (colour, is_bold), run in groupby((cells[x] for x in range(COLUMNS)), key=lambda cell: (cell.fg, cell.bold)):
        text = "".join(cell.data for cell in run)
        if text.strip():
            fill = COLOURS.get(colour) or (f"#{colour}" if len(colour) == 6 else COLOURS["default"])
            weight = ' font-weight="bold"' if is_bold else ""
            begin = at + len(text) - len(text.lstrip())
            shown = text.strip()
            parts.append(
                f'<text x="{MARGIN + CELL * begin:.1f}" y="{y:.1f}" textLength="{CELL * len(shown):.1f}" fill="{fill}"'
                f'{weight} xml:space="preserve">{escape(shown)}</text>'
            )
        at += len(text)
    return "".join(parts)


@contextmanager
def terminal(folder: Path, url: str | None = None) -> Iterator[Terminal]:
    """Open a terminal in a folder, with the address of a server or without, and hang up at the end."""
    opened = Terminal(folder, url)
    try:
        yield opened
    finally:
        opened.close()


def record(folder: Path, images: int = 300, step_s: float = 0.1) -> dict[str, tuple[str, list[str]]]:
    """Record every terminal, and return the picture and the lines of each by its name.

    Args:
        folder: an empty folder to work in.
        images: how many images each of two classes has.
        step_s: how long a step of the training takes, in seconds.
    """
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(images):
            shade = np.full((64, 64, 3), number % 251, np.uint8)
            Image.fromarray(shade).save(folder / "photos" / name / f"{number}.jpg")
    (folder / "train.py").write_text(TRAIN.format(step_s=step_s).lstrip())
    taken = {}
    with terminal(folder) as shown:
        shown.run("penstock run images photos/ --resize 64x64 -- python train.py")
        taken["run"] = shown.drawn("penstock run: a server, workers and a training job by one command"), shown.lines
    with EmbeddedServer() as server:
        with terminal(folder, server.url) as hidden:
            hidden.run("penstock produce images photos/ --resize 64x64 --workers 2")
        with terminal(folder, server.url) as shown:
            shown.press("python train.py & read; kill -9 $!; wait\n")
            shown.wait_for("step 6: 150 samples")
            shown.run("")  # Return, for which `read` waits
            shown.run("python train.py")
            taken["kill"] = shown.drawn("A training is killed and started again"), shown.lines
        with terminal(folder, server.url) as shown:
            shown.run("penstock audit train; echo exit code $?")
            taken["audit"] = shown.drawn("penstock audit: nothing lost, nothing duplicated"), shown.lines
    return taken


def main() -> None:
    """Write the pictures to the folder of this file."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (picture, _) in record(Path(folder)).items():
            (HERE / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
