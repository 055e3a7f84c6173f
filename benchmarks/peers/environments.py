"""A virtual environment for each peer that needs one: made on demand, outside the tree, from pinned requirements.

``python -m benchmarks.peers.environments`` makes all of them and reports those that cannot be made here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
OWN = {
    "penstock": "penstock",
    "torch": "torch",
    "torchdata": "torchdata",
    "tfdata": "tensorflow",
}
"""Peers of the development environment -> the package that must be installed there."""
PINNED = ("redis", "tensorcom", "mosaic")
"""The peers with requirements of their own."""
CACHE = "~/.cache/penstock"
INSTALL_S = 1200
STAMP = "installed"


class Unavailable(Exception):
    """A peer cannot be run here. The message gives the reason."""


@cache
def python_of(environment: str) -> Path:
    """Return the interpreter of an environment, which is installed first if it is missing. Raises Unavailable."""
    if environment in OWN:
        if importlib.util.find_spec(OWN[environment]) is None:
            raise Unavailable(f"{OWN[environment]} is not installed: pip install -e '.[dev]'")
        return Path(sys.executable)
    requirements = REQUIREMENTS / f"{environment}.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    folder = Path(os.environ.get("PENSTOCK_CACHE", CACHE)).expanduser() / "peers" / f"{environment}-{digest}"
    if not (folder / STAMP).exists():
        _install(folder, requirements)
    return folder / "bin" / "python"


def _install(folder: Path, requirements: Path) -> None:
    """Install the complete list of packages, without resolving dependencies."""
    print(f"installing {requirements.stem} into {folder} (once; some minutes)", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    command: list[str | Path] = [
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--no-deps",
    ]
    try:
        done = subprocess.run(
            [*command, "-r", requirements], capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"installing {requirements.stem} took longer than {INSTALL_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if "ERROR" in line] or ["no reason given"]
        raise Unavailable(f"pip cannot install {requirements.stem}: {lines[0]}")
    (folder / STAMP).touch()


def main() -> int:
    """Make all of them."""
    for name in (*OWN, *PINNED):
        try:
            print(f"{name:12}{python_of(name)}")
        except Unavailable as reason:
            print(f"{name:12}not here: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
