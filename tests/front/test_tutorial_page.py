"""The tutorial as its readers follow it: each file is saved, each command runs, and each output is compared."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```(python|console) ?(\S*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
VARIES = re.compile(
    r"[\d,.]+(?= ?(?:s|samples/s|/s|MB/s|MiB/s)\b)|(?<=id )\w+|\d+(?= entries,|  2\.0 MiB$)", re.MULTILINE
)
"""The text that differs between runs: times, rates, a stream's id, and the number of entries. A slow worker sends an
entry before it is full."""
KILLED = re.compile(r"^bash: line \d+: +\d+ Killed.*$", re.MULTILINE)
"""A script's shell names the process that an interactive one only calls killed."""
WAITED = re.compile(r"(?<= MB/s); waited .*$", re.MULTILINE)
"""A slow machine's epoch takes longer than a second, and its line then says what it waited for."""


def commands(session: str) -> list[tuple[str, str]]:
    """Split a console block into its commands, each with the output that the page shows."""
    parts = re.split(r"^\$ (.*)\n", session, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def run(command: str, folder: Path, url: str) -> str:
    """Run a command line as a user does; return stdout and stderr together."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment["PYTHONUNBUFFERED"] = "1"  # a terminal shows each line at once, and a pipe only at the end
    environment |= {"PENSTOCK_URL": url, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{command}\ntrue"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        cwd=folder, env=environment, timeout=120,
    )  # fmt: skip
    return WAITED.sub("", KILLED.sub("Killed", done.stdout))


def test_a_reader_who_follows_the_tutorial_sees_what_it_shows(any_url: str, tmp_path: Path) -> None:
    """A tutorial whose output differs from the reader's is trusted no further."""
    checker = doctest.OutputChecker()
    shown = 0
    for kind, name, text in BLOCKS:
        if kind == "python":
            (tmp_path / name).write_text(text)
            continue
        for command, expected in commands(text):
            if command == "penstock server":  # test_readme.py starts one; here the server is a fixture
                continue
            printed = run(command, tmp_path, any_url)
            assert checker.check_output(VARIES.sub("...", expected), printed, doctest.ELLIPSIS), f"{command}\n{printed}"
            shown += 1
    assert shown == 12
