"""Run the ``penstock`` command as an operator does."""

from __future__ import annotations

import subprocess
import sys

PATIENCE_S = 120


def penstock(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command on a server, and return its output and its exit code."""
    command = [sys.executable, "-m", "penstock", *map(str, arguments), "--url", url]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
