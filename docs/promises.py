"""The promises, their limits and the tests that keep them, made of docs/internals/promises.toml.

``python docs/promises.py`` writes the tables of promises.md. The site shows the tests below each mechanism.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
INTERNALS = ROOT / "docs" / "internals"


class Promise(NamedTuple):
    """One promise of the list."""

    part: str
    """The heading of its table in promises.md."""
    name: str
    """The promise itself, which is the heading of its mechanism."""
    limit: str
    tests: list[str]
    """The tests as pytest names them: a file, a class or a function."""


def promises() -> list[Promise]:
    """Return the promises in their order."""
    parts = tomllib.loads((INTERNALS / "promises.toml").read_text())
    return [Promise(part, name, **fields) for part, named in parts.items() for name, fields in named.items()]


def headings(page: Path) -> list[str]:
    """Return the headings of the second level, in order."""
    return re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)


def anchor(heading: str) -> str:
    """Return the fragment by which a link names the heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def link(name: str) -> str:
    """Return the target of a link in docs/internals/ to the mechanism of a promise."""
    [page] = [page for page in sorted(INTERNALS.glob("mechanisms-*.md")) if name in headings(page)]
    return f"{page.name}#{anchor(name)}"


def with_tables(text: str) -> str:
    """Return the text of promises.md with the rows of the list in its tables."""
    rows: dict[str, list[str]] = {}
    for each in promises():
        rows.setdefault(each.part, []).append(f"| [{each.name}.]({link(each.name)}) | {each.limit} |\n")
    head, *parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, part in enumerate(parts):
        title = part.splitlines()[0].removeprefix("## ")
        if title in rows:
            table = "".join(["| promise | limit |\n|---|---|\n", *rows.pop(title)])
            parts[number] = f"## {title}\n\n{table}\n"
    assert not rows, f"promises.md has no heading for {', '.join(rows)}"
    return "".join([head, *parts])


@cache
def docstrings(path: str) -> dict[str, str]:
    """Return the docstring of a file as '', and those of its ``test_x``, ``TestX`` and ``TestX::test_y``.

    The file is not imported, because some import a framework. One that does not exist has none.
    """
    if not (ROOT / path).exists():
        return {}
    found: dict[str, str] = {}

    def add(node: ast.Module | ast.ClassDef | ast.FunctionDef, names: tuple[str, ...]) -> None:
        found["::".join(names)] = ast.get_docstring(node) or ""
        for part in () if isinstance(node, ast.FunctionDef) else node.body:
            if isinstance(part, ast.ClassDef | ast.FunctionDef):
                add(part, (*names, part.name))

    add(ast.parse((ROOT / path).read_text()), ())
    return found


def shown_by(test: str) -> str:
    """Return the first sentence of a test's docstring."""
    path, _, name = test.partition("::")
    sentence = re.match(r".+?[.!?](?=\s|$)", " ".join(docstrings(path)[name].split()))
    assert sentence, f"{test} has no docstring of a sentence"
    return sentence[0]


def _marked(text: str) -> str:
    """Return the text of a docstring as Markdown, with code between backticks and no other markup."""
    parts = re.split(r"(`+[^`]+`+)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<\[])", r"\\\1", part) for part in parts)


def with_tests(text: str) -> str:
    """Return the text of a mechanisms page with the tests of each promise at the end of its section."""
    tests = {each.name: each.tests for each in promises()}
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    for number, section in enumerate(sections):
        named = tests[section.splitlines()[0].removeprefix("## ")]
        told = "".join(f"  - `{test}`: {_marked(shown_by(test))}\n" for test in named)
        sections[number] = f"{section.rstrip()}\n- **Tests.**\n\n{told}\n"
    return "".join([head, *sections])


if __name__ == "__main__":
    PAGE = INTERNALS / "promises.md"
    PAGE.write_text(with_tables(PAGE.read_text()))
