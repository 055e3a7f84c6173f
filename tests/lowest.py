"""Print the lowest version of each package that pyproject.toml declares, frameworks aside, as pip's requirements."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = ("producer", "embedded", "terminal", "metrics", "gateway", "zstd", "blosc2", "test")


def lowest(requirement: str) -> str:
    """Return ``rq==2.8`` for ``rq>=2.8,<3``."""
    found = re.fullmatch(r"([\w.-]+)>=([\w.]+)(,<[\w.]+)?", requirement)
    if found is None:
        sys.exit(f"pyproject.toml says {requirement!r}, expected a lowest version, such as name>=1.2 or name>=1.2,<2")
    return f"{found[1]}=={found[2]}"


if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    print(*map(lowest, [*project["dependencies"], *extras]), sep="\n")
