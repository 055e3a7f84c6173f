"""The machine and the versions on which figures depend, and progress lines."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks.peers.environments import Unavailable, python_of
from benchmarks.sides import SHARED_MEMORY, Side
from penstock import EmbeddedServer, PenstockError

PROGRESS_S = 15.0
"""The time between two lines of progress without a terminal."""


def describe_machine() -> dict[str, str]:
    """Return the facts by name."""
    return {
        "cores": str(len(os.sched_getaffinity(0))),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "redis-py": redis.__version__,
        "server": _server(),
    }


@cache
def _server() -> str:
    """Return name and version of the server that a benchmark starts, like ``redis-7.0.15``."""
    try:
        with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
            told: Any = client.info("server")
    except PenstockError:
        return "none"
    is_valkey = told.get("server_name") == "valkey"
    return f"valkey-{told['valkey_version']}" if is_valkey else f"redis-{told['redis_version']}"


def describe_more(sides: Iterable[Side]) -> dict[str, str]:
    """Return the facts on the machine, and the peers' versions."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    found = {"processor": _processor(), "memory": f"{gigabytes:.0f} GB", "system": platform.release()}
    found["/dev/shm"] = "there" if SHARED_MEMORY.is_dir() else "not there: no segments in memory"  # noqa: S108
    wanted = {side.package: side.environment for side in sides if side.package}
    return found | {package: _version(package, environment) for package, environment in wanted.items()}


def _processor() -> str:
    listed = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in listed.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else "unknown"


def _version(package: str, environment: str) -> str:
    try:
        python = python_of(environment)
    except Unavailable:
        return "not here"
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "not here"


class _Told:
    """The time of the last line without a terminal."""

    at = 0.0


def progress(text: str) -> None:
    """Show progress: on a terminal always in one line, else a line now and then. ``""`` clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif text and time.monotonic() - _Told.at > PROGRESS_S:
        _Told.at = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
