"""`penstock monitor` on a terminal of 60 columns: what it shows, and how it leaves the terminal."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console as RichConsole

import penstock
from penstock.cli.console import Console
from penstock.cli.interrupts import quit_key
from penstock.cli.monitor_screen import drawn, print_streams
from penstock_common.stream.servers.embedded import EmbeddedServer

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
COLUMNS = 60

RECORD: dict[str, Any] = {
    "stream": "train", "held_bytes": 900 << 20, "budget_bytes": 1 << 30,
    "in": {"samples_per_s": 12345.0, "bytes_per_s": 1.8e9, "entries_per_s": 3.0},
    "epochs": [
        {"epoch": 13, "state": "produced", "planned": 1281167, "committed": 1281167, "bad": 12,
         "read": {"resnet": 1281167}},
    ],
    "groups": [
        {"name": "resnet", "declared": False, "holds": True, "out": {"samples_per_s": 12345.0}, "lag_entries": 12345,
         "lag_samples": 1234567, "lag_s": 1234.5, "pending_entries": 128, "redelivered_entries": 12, "bad_entries": 1,
         "members": [{"name": "gpu-0", "seen_s": 61.2, "is_silent": True, "pending_entries": 64, "rate": 6000.0,
                      "waits": 0.4}]},
    ],
    "workers": [{"host": "maker-1", "workers": 16, "samples_per_s": 12345.0, "busy": 0.91, "room": 0.05, "idle": 0.04}],
    "silent_workers": [{"host": "maker-2", "workers": 8, "seen_s": 34.0}],
    "server": {"used_bytes": 3 << 30, "limit_bytes": 4 << 30},
    "servers": [
        {
            "server": "redis://node-1:6379", "role": "master", "partitions": [0, 3], "used_bytes": 1 << 30,
            "limit_bytes": 2 << 30, "usable_bytes": 1 << 30, "away": "", "away_s": 0.0,
            "replicas": [{"replica": "node-4:6379", "is_online": True, "lag_bytes": 5 << 20}],
        },
        {
            "server": "redis://node-2:6379", "role": "", "partitions": [1, 2], "used_bytes": 0, "limit_bytes": 0,
            "usable_bytes": None, "away": "it is gone", "away_s": 3.0, "replicas": [],
        },
    ],
    "bottleneck": {"cause": "trainers", "text": "producers wait for trainers", "remedy": ""},
}  # fmt: skip


def test_at_60_columns_every_name_and_number_is_whole() -> None:
    """A monitor often runs in half of a split screen, and a group without its name helps no user."""
    terminal = RichConsole(file=io.StringIO(), width=COLUMNS)
    terminal.print(drawn([RECORD], COLUMNS))
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) == COLUMNS
    words = {word for line in lines for word in line.split()}
    names = {
        "train",
        "epoch",
        "state",
        "produced",
        "bad",
        "group",
        "resnet",
        "member",
        "gpu-0",
        "silent",
        "maker-1",
        "maker-2:",
        "34",
    }
    numbers = {"900", "13", "100%", "12,345/s", "1234567", "1234.5", "128", "64", "61", "40%", "91%", "5%", "4%", "16"}
    assert names | numbers <= words


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR is a promise of many tools, and escape codes in a log are noise."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            """Return True."""
            return True

    def drawn() -> str:
        out = Terminal()
        print_streams([RECORD], Console(out))
        return out.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    assert {"╭", "━", "\x1b"} <= set(drawn())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in drawn()
    assert {"╭", "━"} <= set(drawn())


# --- in a real terminal -----------------------------------------------------------------------------------------------


@contextmanager
def monitor(
    url: str, program: Sequence[str] = ("-m", "penstock")
) -> Iterator[tuple[subprocess.Popen[bytes], FileIO, int]]:
    """Start a monitor in the foreground of a separate terminal, and yield both ends of the terminal."""
    master, its = pty.openpty()
    ours = FileIO(master, "r+")
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {**os.environ, "PYTHONPATH": _PATHS, "TERM": "xterm"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, *program, "monitor", "--every", "0.1", "--url", url],
        stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - the child runs this line alone
    )  # fmt: skip
    try:
        yield process, ours, its
    finally:
        process.kill()
        process.wait()
        ours.close()
        os.close(its)


def read_until(ours: FileIO, is_enough: Callable[[str], bool]) -> str:
    """Read what is written on the terminal until it is enough."""
    text = ""
    till = time.monotonic() + 60
    while not is_enough(text):
        assert time.monotonic() < till, text
        if select.select([ours], [], [], 0.02)[0]:
            text += os.read(ours.fileno(), 65536).decode()
    return text


ENDS: dict[str, Callable[[subprocess.Popen[bytes], FileIO, EmbeddedServer], object]] = {
    "q": lambda process, ours, server: ours.write(b"q"),
    "Ctrl-C": lambda process, ours, server: ours.write(b"\x03"),
    "SIGTERM": lambda process, ours, server: process.terminate(),
    "the server's end": lambda process, ours, server: server.close(),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_it_ends_the_terminal_is_as_before(end: str, fresh_server: Callable[..., EmbeddedServer]) -> None:
    """A shell that shows no typed letter is unusable."""
    server = fresh_server()
    with monitor(server.url) as (process, ours, its):
        before = termios.tcgetattr(its)
        read_until(ours, lambda text: "q ends it" in text)
        assert termios.tcgetattr(its) != before
        ENDS[end](process, ours, server)
        left = read_until(ours, lambda _: process.poll() is not None)
        assert process.returncode == (1 if "server" in end else 0)
        assert termios.tcgetattr(its) == before
        left += read_until(ours, lambda text: "\x1b[?25h" in left + text)  # the cursor is visible again
        assert "Traceback" not in left


WITHOUT_RICH = "import sys; sys.modules['rich'] = None; from penstock.__main__ import main; sys.exit(main())"


def test_without_rich_each_look_is_plain_lines_below_the_last(any_url: str) -> None:
    """The plain package is enough to watch a training, and the same key ends it."""
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(4, np.uint8)})
    with monitor(any_url, ["-c", WITHOUT_RICH]) as (process, ours, _):
        text = read_until(ours, lambda text: text.count("stream train") == 3)
        ours.write(b"q")
        text += read_until(ours, lambda _: process.poll() is not None)
        assert process.returncode == 0
    assert "\x1b" not in text
    first, *_ = text.replace("\r\n", "\n").split("\n\nstream train")
    title, budget, into, verdict, *_, head, row = first.splitlines()
    assert (title, budget[:24], into) == ("stream train", "budget  4 bytes of 1024 ", "in ? samples, ?")
    assert verdict.startswith("nobody reads")
    assert head.split() == ["epoch", "state", "made", "samples", "bad", "read", "by"]
    assert row.split() == ["0", "produced", "100%", "1", "of", "1", "0"]


def test_it_ends_with_its_terminal(any_url: str) -> None:
    """Without a terminal no user can press a key, and the monitor would read the server for ever."""
    with monitor(any_url) as (process, ours, _):
        read_until(ours, lambda text: "q ends it" in text)
        ours.close()
        assert process.wait(timeout=60) == 0


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shell must take lines again, and back in the foreground the key works again."""
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    stopped: list[bool] = []
    cursor: list[bool] = []
    monkeypatch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp())  # this terminal belongs to no other job
    monkeypatch.setattr(os, "kill", lambda pid, number: stopped.append(termios.tcgetattr(its) == before))
    with os.fdopen(its, "w+b", buffering=0) as keyboard, io.TextIOWrapper(keyboard) as text:
        with quit_key(cursor.append, text) as works:
            taken = termios.tcgetattr(its)
            signal.raise_signal(signal.SIGTSTP)
            assert (works, stopped, termios.tcgetattr(its)) == (True, [True], taken)
            assert cursor == [True, False]  # visible for the shell
        assert termios.tcgetattr(its) == before
    os.close(ours)


def test_a_terminal_of_another_job_is_left_alone() -> None:
    """In the background, changing the terminal would stop the command, and a pipe has none."""
    with quit_key(lambda is_shown: None, io.StringIO()) as works:
        assert not works
