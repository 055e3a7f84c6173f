"""What each image is labelled with: its class folder, a function of its path, or a row of a file.

Reads the rows and checks that images and rows cover each other; ``columns`` makes tensors of them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from penstock_common.errors import SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.columns import Column, column
from penstock_producer.sources.files import EXTENSIONS, shown
from penstock_producer.sources.names import blame, resolve_callable

FILE_KEYS = ("file", "file_name", "path")
"""Keys of a JSON row that may name the image."""


@dataclass(frozen=True)
class Labels:
    """Tensors of every image, by position among the images that are kept."""

    columns: Mapping[str, Column] = field(default_factory=dict)
    kept: Sequence[int] | None = None
    """Indices of the images that have labels; None: all."""
    digest: str = ""
    """Changes when the labels do."""

    def row(self, index: int) -> dict[str, Any]:
        """One image's tensors; copies, because transforms work in place."""
        return {name: column.values[index].copy() for name, column in self.columns.items()}

    @property
    def spec(self) -> SpecLike:
        """Of the label tensors."""
        return {name: (column.dtype, column.shape) for name, column in self.columns.items()}

    @property
    def classes(self) -> dict[str, list[str]]:
        """Class names in id order, per tensor that has them."""
        return {name: list(column.classes) for name, column in self.columns.items() if column.classes}


def from_folders(paths: Sequence[str], classes: tuple[str, ...] | None, where: str) -> Labels:
    """``y`` int64: the first folder of each path, names sorted. A folder without sub-folders has no labels."""
    loose = [path for path in paths if "/" not in path]
    if len(loose) == len(paths):
        return Labels()
    if loose:
        raise SourceError(
            f"{where}: {_some(loose)} lie beside the class folders; move them into one, or give label= or labels="
        )
    return Labels({"y": column("y", [shown(path.split("/", 1)[0]) for path in paths], where, classes)})


def from_function(paths: Sequence[str], name: str, classes: tuple[str, ...] | None) -> Labels:
    """What ``module:function`` says of each relative path: a value (``y``) or a dict of tensors."""
    function = resolve_callable(name)
    rows = [_called(function, name, path) for path in paths]
    columns = _columns(rows, f"label function {name}", classes)
    return Labels(columns, digest=_digest(json.dumps(rows, default=str).encode()))


def _called(function: Any, name: str, path: str) -> dict[str, Any]:
    try:
        value = function(path)
    except Exception as error:
        raise SourceError(f"label function {name} failed on {shown(path)!r}: {blame(error)}") from error
    return dict(value) if isinstance(value, Mapping) else {"y": value}


def from_file(paths: Sequence[str], file: str, skip_unlabelled: bool, classes: tuple[str, ...] | None) -> Labels:
    """Return the labels in a CSV, TSV, JSON or JSON-lines file.

    Raises SourceError when rows and images do not cover each other.
    """
    try:
        content = Path(file).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise SourceError(f"labels file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"labels file {file} is not UTF-8: {error.reason} at byte {error.start}") from error
    is_table = Path(file).suffix.lower() in (".csv", ".tsv")
    named = _table(text, file) if is_table else _json_rows(text, file)
    absent = sorted(named.keys() - set(paths))
    if absent:
        raise SourceError(
            f"{file} names {_some(absent)} not among the images, which are named like {shown(paths[0])!r}"
        )
    kept = [index for index, path in enumerate(paths) if path in named]
    if len(kept) < len(paths) and not skip_unlabelled:
        bare = [path for path in paths if path not in named]
        raise SourceError(f"{file} has no labels for {_some(bare)}; add them, or leave them out (--skip-unlabelled)")
    return Labels(_columns([named[paths[index]] for index in kept], file, classes), kept, _digest(content))


def _table(text: str, file: str) -> dict[str, dict[str, Any]]:
    lines = list(csv.reader(io.StringIO(text), delimiter="\t" if file.lower().endswith(".tsv") else ","))
    header, rows = (lines[0], [line for line in lines[1:] if line]) if lines else ([], [])
    if len(header) < 2 or PurePosixPath(header[0]).suffix.lower() in EXTENSIONS:
        raise SourceError(f"{file} has no header: found {','.join(header)!r}; expected a first line like file,label")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or "" in row:
            raise SourceError(f"{file}, row {number}: found {row}; expected a value for each of {header}")
    cells = [_typed([row[at] for row in rows], header[at], file) for at in range(1, len(header))]
    values = [dict(zip(header[1:], row, strict=True)) for row in zip(*cells, strict=True)]
    return _by_path([row[0] for row in rows], values, file)


def _typed(cells: list[str], name: str, file: str) -> list[Any]:
    """Cells of one column as ints, else floats, else JSON lists, else strings."""
    for convert in (int, float):
        try:
            return [convert(cell) for cell in cells]
        except ValueError:
            continue
    if all(cell.lstrip().startswith("[") for cell in cells):
        try:
            return [json.loads(cell) for cell in cells]
        except ValueError as error:
            raise SourceError(f"{file}: {name!r} holds a list that is no JSON: {error}") from error
    return list(cells)


def _json_rows(text: str, file: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a JSON array of objects, or of one object a line."""
    if text.lstrip().startswith("["):
        numbered = [(f"row {number}", row) for number, row in enumerate(_parsed(text, file), 1)]
    else:
        lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        numbered = [(place, _parsed(line, f"{file}, {place}")) for place, line in lines]
    paths, values = [], []
    for place, row in numbered:
        key = next((key for key in FILE_KEYS if isinstance(row, dict) and isinstance(row.get(key), str)), None)
        if key is None:
            raise SourceError(
                f'{file}, {place}: found {json.dumps(row):.60}; expected an object like {{"file": "a.jpg", ...}}'
            )
        paths.append(row.pop(key))
        values.append(row)
    return _by_path(paths, values, file)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is no JSON: {error}") from error


def _by_path(paths: list[str], values: list[dict[str, Any]], file: str) -> dict[str, dict[str, Any]]:
    named: dict[str, dict[str, Any]] = {}
    for path, value in zip(paths, values, strict=True):
        clean = path.removeprefix("./")
        if clean in named:
            raise SourceError(f"{file} names {clean!r} twice; give one row per image, several boxes as a list")
        named[clean] = value
    if not named:
        raise SourceError(f"{file} holds no rows; expected one per image")
    return named


def _columns(rows: list[dict[str, Any]], where: str, classes: tuple[str, ...] | None) -> dict[str, Column]:
    names = list(rows[0])
    for row in rows:
        if row.keys() != set(names):
            raise SourceError(
                f"{where}: rows differ: {sorted(names)} and {sorted(row)}; every image needs the same ones"
            )
    if "x" in names:
        raise SourceError(f"{where}: 'x' is the image itself; give the column another name")
    given = {name: classes for name in names if name in ("y", "label") or len(names) == 1}
    return {name: column(name, [row[name] for row in rows], where, given.get(name)) for name in names}


def _some(paths: Sequence[str]) -> str:
    first = f"{len(paths)} image{'s' if len(paths) > 1 else ''} ({shown(paths[0])}"
    return f"{first}, ...)" if len(paths) > 1 else f"{first})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
