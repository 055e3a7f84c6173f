"""The contents of the comments on top of a Lua file, and their comparison with the file and the Python code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LUA_FILES = sorted((ROOT / "common/penstock_common/server/scripts").glob("*.lua"))
HEADINGS = ("KEYS", "ARGV", "Answer", "Callers")
_LOADED = re.compile(r'load_script\("(\w+)"\)')
_NAMED = re.compile(r'^(_\w+) = load_script\("(\w+)"\)', re.MULTILINE)
_SENT_TO_READ = re.compile(r"read_by_script\(\s*\w+,\s*(_\w+)")
_CALLED = re.compile(r"redis\.p?call\('(\w+)'")


@dataclass(frozen=True)
class LuaFile:
    """One script: its purpose, the text under each heading of its comments, and its code."""

    purpose: str
    headings: dict[str, str]
    code: str

    @property
    def callers(self) -> list[str]:
        """Return the Python modules that send it, by its comments."""
        return sorted(self.headings["Callers"].split())

    @property
    def says_that_it_only_reads(self) -> bool:
        """Return whether its comments say so."""
        return self.purpose.endswith("It only reads.")

    @property
    def commands(self) -> set[str]:
        """Return the commands that it calls."""
        return set(_CALLED.findall(self.code))

    def wrong_numbers(self, table: str) -> set[int]:
        """Return the numbers in ``KEYS[n]`` or ``ARGV[n]`` that are missing under the heading."""
        words = self.headings[table]
        if ".." in words:  # any number of arguments
            return set()
        named = 0 if words == "none" else len(words.partition(";")[0].split())
        return {int(number) for number in re.findall(rf"\b{table}\[(\d+)\]", self.code) if int(number) > named}


def parse_lua(path: Path) -> LuaFile:
    """Read a Lua file.

    Raises:
        AssertionError: The comments on top lack a purpose or a heading, or the headings are in another order.
    """
    lines = path.read_text().splitlines()
    top = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    purpose, _, rest = "\n".join(line.removeprefix("--").strip() for line in lines[:top]).partition("\n\n")
    parts = re.split(rf"^({'|'.join(HEADINGS)}): ", rest, flags=re.MULTILINE)
    headings = {name: " ".join(text.split()) for name, text in zip(parts[1::2], parts[2::2], strict=True)}
    assert purpose.endswith((".", ")")), f"{path.name} opens without a sentence"
    assert tuple(headings) == HEADINGS, f"{path.name} has the headings {list(headings)}, not {list(HEADINGS)}"
    assert all(headings.values()), f"{path.name} has an empty heading"
    return LuaFile(purpose, headings, "\n".join(lines[top:]))


def sent_to_read(files: list[Path]) -> set[str]:
    """Return the scripts that these modules send by EVALSHA_RO."""
    sent: set[str] = set()
    for path in files:
        text = path.read_text()
        names = dict(_NAMED.findall(text))
        sent |= {names[constant] for constant in _SENT_TO_READ.findall(text)}
    return sent


def loads_of(files: list[Path]) -> dict[str, list[str]]:
    """Return for each script the modules of the packages that load it."""
    callers: dict[str, list[str]] = {}
    for path in files:
        for name in set(_LOADED.findall(path.read_text())):
            callers.setdefault(name, []).append("/".join(path.relative_to(ROOT).parts[1:]))
    return {name: sorted(paths) for name, paths in callers.items()}
