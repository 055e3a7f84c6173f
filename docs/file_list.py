"""Write docs/internals/files.md: what each file of the product holds, by the first words of the file itself.

``python -m docs.file_list`` writes the page. A test compares the page with the files.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "internals" / "files.md"
FOLDERS = (
    "common/penstock_common", "producer/penstock_producer", "consumer/penstock_consumer", "front/penstock", "js/src",
)  # fmt: skip
INTRODUCTION = """# Files

This page lists every file of the product and says what it holds. The words are the first words of each file, and
`python -m docs.file_list` writes them. [Architecture](architecture.md) follows a sample through these files. The table
in [CONTRIBUTING.md](../../CONTRIBUTING.md) is for lines that several files could have.
"""


def first_words(path: Path) -> str:
    """Return the first paragraph of a file's docstring, or of the comment at its top, as one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        found = ast.get_docstring(ast.parse(text)) or ""
    else:
        mark = "--" if path.suffix == ".lua" else "//"
        (comment,) = re.findall(rf"\A(?:/// .*\n)*((?:{mark} .*\n)*)", text)
        found = re.sub(rf"^{mark} ", "", comment, flags=re.MULTILINE)
    return " ".join(found.split("\n\n")[0].split()).replace("|", r"\|")


def sections() -> Iterator[str]:
    """Yield a section for each folder, with a table of its files."""
    for top in FOLDERS:
        paths = [path for path in sorted((ROOT / top).rglob("*")) if path.suffix in {".py", ".lua", ".ts"}]
        for folder in sorted({path.parent for path in paths}):
            name = folder.relative_to(ROOT).as_posix()
            here = [path for path in paths if path.parent == folder and not path.name.endswith(".d.ts")]
            about = [first_words(path) for path in here if path.name == "__init__.py"]
            rows = [f"| `{path.name}` | {first_words(path)} |" for path in here if path.name != "__init__.py"]
            table = ["| file | what it holds |", "|---|---|", *rows] if rows else []
            yield "\n".join([f"## {name}", "", *(line for text in about for line in (text, "")), *table, ""])


def rendered() -> str:
    """Return the page as it should be."""
    return "\n".join([INTRODUCTION, *sections()])


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
