"""Writes the examples' notebooks: `python examples/notebooks.py`. Their cells are the scripts, so edit only the
scripts.

A script with ``# %% Title`` lines becomes a cell for each part. Any other file becomes a cell that writes it. A program
that is started by a command, which its docstring names, gets a cell with that command. Notebooks hold no outputs,
because what a run prints depends on the machine and becomes outdated. A test runs all of them.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = {
    "keras/train.ipynb": ["train.py"],
    "pytorch/train.ipynb": ["train.py"],
    "pytorch/ddp.ipynb": ["digits.py", "ddp.py"],
    "jax/train.ipynb": ["train.py"],
    "frameworks/together.ipynb": [
        "digits.py", "with_keras.py", "with_torch.py", "with_jax.py", "with_numpy.py", "together.py",
    ],
    "resume/crash.ipynb": ["train.py", "crash.py"],
    "ragged_text/train.ipynb": ["train.py"],
}  # fmt: skip
"""Notebook -> its files, in order."""


def notebook(name: str) -> str:
    """Return the notebook's JSON."""
    cells: list[tuple[str, str]] = []
    for file in NOTEBOOKS[name]:
        cells += _cells(file, ((HERE / name).parent / file).read_text())
    return json.dumps(_document(cells), indent=1, ensure_ascii=False) + "\n"


def _cells(file: str, script: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    if "\n# %% " not in script:
        written = [("markdown", docstring), ("code", f"%%writefile {file}\n{script}")]
        return written + [("code", f"%%sh\n{command}") for command in re.findall("`(penstock [^`]*)`", docstring)]
    parts = re.split(r"^# %% (.*)$", script, flags=re.MULTILINE)[1:]
    cells = [("markdown", docstring)]
    for title, code in zip(parts[::2], parts[1::2], strict=True):
        cells += [("markdown", f"## {title}"), ("code", code)]
    return cells


def _document(cells: list[tuple[str, str]]) -> dict[str, Any]:
    """Return the notebook in the format nbformat 4.5."""
    return {
        "cells": [
            {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
            | ({"execution_count": None, "outputs": []} if kind == "code" else {})
            | {"source": text.strip("\n").splitlines(keepends=True)}
            for number, (kind, text) in enumerate(cells)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


if __name__ == "__main__":
    for name in NOTEBOOKS:
        (HERE / name).write_text(notebook(name))
