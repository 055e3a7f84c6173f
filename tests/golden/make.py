"""Writes the golden corpus: ``PYTHONPATH=common:. python tests/golden/make.py``. README.md describes the files. A test
compares this with the files on disk. Run it only for an intended change of the format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.golden.good_cases import good_cases
from tests.golden.hostile_cases import hostile_cases

HERE = Path(__file__).parent


def corpus() -> dict[Path, str]:
    """Return every file of the corpus, with its text."""
    files = {HERE / "good" / f"{case['name']}.json": case for case in good_cases()}
    files |= {HERE / "hostile" / f"{case['name']}.json": case for case in hostile_cases()}
    return {path: as_text(case) for path, case in files.items()}


def as_text(case: dict[str, Any]) -> str:
    """Return one case as JSON with one line per field and sample, so that a diff shows what changed."""
    lines = []
    for key, value in case.items():
        if key in ("fields", "samples") and value:
            inner = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    """Replace the files on disk."""
    for old in [*HERE.glob("good/*.json"), *HERE.glob("hostile/*.json")]:
        old.unlink()
    for path, text in corpus().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
