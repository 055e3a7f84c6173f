"""The labels of images, from their class folders, a function of their paths, or the rows of a file.

Every image must have a row, and every row an image. The columns become tensors of the dtype and shape that hold all
rows. Strings become class ids.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SourceError
from penstock_common.hints import near
from penstock_common.wire.spec import SpecLike
from penstock_producer.sources.files import shown
from penstock_producer.sources.image_files import EXTENSIONS
from penstock_producer.sources.names import blame, resolve_callable

FILE_KEYS = ("file", "file_name", "path")
"""The keys of a JSON row that may name the image."""

SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval", "dev"}
"""Folders that hold parts of a dataset. Taken for classes they would be wrong in silence."""
_FLOAT32_MAX = float(np.finfo(np.float32).max)
_INT64 = np.iinfo(np.int64)
_WHOLE = 1 << 24
"""The largest whole number up to which float32 holds all."""
_TABLES = (".csv", ".tsv", ".json", ".jsonl")


@dataclass(frozen=True)
class Labels:
    """The label tensors of every image, by position among the images that are kept."""

    columns: Mapping[str, LabelColumn] = field(default_factory=dict)
    kept: Sequence[int] | None = None
    """The indices of the images that have labels. None means all."""
    digest: str = ""
    """A hash that changes when the labels do."""

    def row(self, index: int) -> dict[str, Any]:
        """Return copies of one image's tensors, because transforms may change them in place."""
        return {name: column.values[index].copy() for name, column in self.columns.items()}

    @property
    def spec(self) -> SpecLike:
        """Return the dtypes and shapes of the label tensors."""
        return {name: (column.dtype, column.shape) for name, column in self.columns.items()}

    @property
    def classes(self) -> dict[str, list[str]]:
        """Return tensor name -> class names in the order of their ids, for tensors that have class names."""
        return {name: list(column.classes) for name, column in self.columns.items() if column.classes}


def from_folders(paths: Sequence[str], classes: tuple[str, ...] | None, where: str) -> Labels:
    """Return ``y`` as the class id of the first folder of each path.

    A folder without sub-folders has no labels.

    Args:
        paths: the paths of the images, relative to ``where``.
        classes: class names in the order of their ids. None means the names of the folders, sorted.
        where: the folder of all images, for the error.

    Raises:
        SourceError: some images are not in a class folder, or a folder is not among the classes.
    """
    loose = [path for path in paths if "/" not in path]
    if len(loose) == len(paths):
        return Labels()
    if loose:
        raise SourceError(
            f"{where}: {_some(loose)} are not in a class folder; move them into one, or give label= or labels="
        )
    tops = {path.split("/", 1)[0] for path in paths}
    if classes is None and tops <= SPLITS and all(path.count("/") > 1 for path in paths):
        below = sorted({path.split("/")[1] for path in paths})
        raise SourceError(
            f"{where}: its folders are parts, {', '.join(sorted(tops))}, and below them lie {', '.join(below[:4])}: "
            f"give one of them, {Path(where) / min(tops)}, or name them as classes, --classes {','.join(sorted(tops))}"
        )
    return Labels({"y": column("y", [shown(path.split("/", 1)[0]) for path in paths], where, classes)})


def from_function(paths: Sequence[str], name: str, classes: tuple[str, ...] | None) -> Labels:
    """Return the labels that ``module:function`` gives for each relative path: a value for ``y``, or a dict of tensors.

    Raises:
        SourceError: there is no such function, it fails, or its results do not fit together.
    """
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
        beside = {other.stem: other.name for other in Path(file).parent.glob("*.*") if other.suffix in _TABLES}
        meant = near(Path(file).stem, beside)
        hint = f"; did you mean {Path(file).with_name(beside[meant])}?" if meant else ""
        raise SourceError(f"labels file {file}: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"labels file {file} is not UTF-8: {error.reason} at byte {error.start}") from error
    is_table = Path(file).suffix.lower() in (".csv", ".tsv")
    named = _table(text, file, classes) if is_table else _json_rows(text, file)
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


def _table(text: str, file: str, classes: tuple[str, ...] | None) -> dict[str, dict[str, Any]]:
    delimiter = "\t" if file.lower().endswith(".tsv") else ","
    lines = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    header, rows = (lines[0], [line for line in lines[1:] if line]) if lines else ([], [])
    if len(header) < 2 or PurePosixPath(header[0]).suffix.lower() in EXTENSIONS:
        found, comma = ",".join(header), "tab" if delimiter == "\t" else "comma"
        other = next((sign for sign in ";\t|," if len(header) == 1 and sign != delimiter and sign in found), None)
        if other is not None:
            raise SourceError(
                f"{file} seems to have the separator {other!r}: found {found!r}; expected a {comma} between columns, "
                f"as in {found.replace(other, delimiter)!r}"
            )
        raise SourceError(f"{file} has no header: found {found!r}; expected a first line like file,label")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or "" in row:
            raise SourceError(f"{file}, row {number}: found {row}; expected a value for each of {header}")
    names = header[1:]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SourceError(f"{file} has two columns {twice!r}; give each column a name of its own")
    named = _classes_of(names, classes)
    cells = [
        _typed([row[at] for row in rows], name, file, takes_texts=bool(named[name])) for at, name in enumerate(names, 1)
    ]
    values = [dict(zip(names, row, strict=True)) for row in zip(*cells, strict=True)]
    return _by_path([row[0] for row in rows], values, file)


def _typed(cells: list[str], name: str, file: str, *, takes_texts: bool) -> list[Any]:
    """Return the cells of a column as numbers if possible, else as JSON lists or strings.

    Args:
        cells: the texts of the column.
        name: the header of the column.
        file: the table, for the error.
        takes_texts: whether texts are expected beside numbers, because class names are given.

    Raises:
        SourceError: a number fits no tensor, or most cells are numbers and others are not.
    """
    numbers = [_number(cell) for cell in cells]
    others = [row for row, number in enumerate(numbers) if number is None]
    if not others:
        for row, value in enumerate(numbers, 2):
            _require_number(value, f"{file}, row {row}: {name!r}")
        return numbers
    if all(cell.lstrip().startswith("[") for cell in cells):
        try:
            return [json.loads(cell) for cell in cells]
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{file}: {name!r} holds a list that is not JSON: {error}") from error
    if not takes_texts and len(others) * 2 <= len(cells):
        raise SourceError(
            f"{file}, row {others[0] + 2}: {name!r} is {cells[others[0]]!r}, and {len(cells) - len(others)} of the "
            f"{len(cells)} rows have a number; expected a number in each: correct the cell, or remove the row and give "
            "--skip-unlabelled. Numbers that are class names need a letter before each, or all names in --classes"
        )
    return list(cells)


def _number(cell: str) -> int | float | None:
    for convert in (int, float):
        with suppress(ValueError):
            return convert(cell)
    return None


def _require_number(value: int | float | None, what: str) -> None:
    if isinstance(value, int) and not _INT64.min <= value <= _INT64.max:
        raise SourceError(
            f"{what} is {value}; expected a whole number of 64 bits, from {_INT64.min} to {_INT64.max}: number such "
            "values from 0"
        )
    if isinstance(value, float) and not abs(value) <= _FLOAT32_MAX:
        raise SourceError(
            f"{what} is {value}; expected a finite number of float32: correct the cell, or remove the row and give "
            "--skip-unlabelled"
        )


def _json_rows(text: str, file: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a JSON array of objects, or of one object a line."""
    if text.lstrip().startswith("["):
        numbered = [(f"row {number}", row) for number, row in enumerate(_parsed(text, file), 1)]
    else:
        lines = [(f"line {number}", line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        numbered = [(where, _parsed(line, f"{file}, {where}")) for where, line in lines]
    paths, values = [], []
    for where, row in numbered:
        key = next((key for key in FILE_KEYS if isinstance(row, dict) and isinstance(row.get(key), str)), None)
        if key is None:
            raise SourceError(
                f'{file}, {where}: found {json.dumps(row):.60}; expected an object like {{"file": "a.jpg", ...}}'
            )
        paths.append(row.pop(key))
        values.append(row)
    return _by_path(paths, values, file)


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON: {error}; labels are read from .csv, .tsv, .json and .jsonl") from error


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


def _columns(rows: list[dict[str, Any]], where: str, classes: tuple[str, ...] | None) -> dict[str, LabelColumn]:
    names = list(rows[0])
    for row in rows:
        if row.keys() != set(names):
            raise SourceError(
                f"{where}: rows differ: {sorted(names)} and {sorted(row)}; every image needs the same ones"
            )
    if "x" in names:
        raise SourceError(f"{where}: 'x' is the image itself; give the column another name")
    given = _classes_of(names, classes)
    return {name: column(name, [row[name] for row in rows], where, given[name]) for name in names}


def _classes_of(names: Sequence[str], classes: tuple[str, ...] | None) -> dict[str, tuple[str, ...] | None]:
    """Return column -> the given class names, or None for a column that they are not meant for."""
    return {name: classes if name in ("y", "label") or len(names) == 1 else None for name in names}


def _some(paths: Sequence[str]) -> str:
    first = f"{len(paths)} image{'s' if len(paths) > 1 else ''} ({shown(paths[0])}"
    return f"{first}, ...)" if len(paths) > 1 else f"{first})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


BOXES = ("boxes", "bboxes")
"""The names of columns that are float32 (None, 4): any number of boxes, also none."""


@dataclass(frozen=True)
class LabelColumn:
    """The values of one label tensor for all images."""

    dtype: str
    shape: tuple[int | None, ...]
    """A size is None where rows differ."""
    values: Sequence[NDArray[Any]] | NDArray[Any]
    classes: tuple[str, ...] | None
    """Class names in the order of their ids, where the rows were strings."""


def column(name: str, rows: Sequence[Any], where: str, classes: tuple[str, ...] | None = None) -> LabelColumn:
    """Return the rows of one column as a tensor.

    Whole numbers become int64, other numbers float32, bools bool, strings int64 class ids, and lists arrays.
    Whole numbers beside others are float32, too.

    Args:
        name: the name of the column.
        rows: one value for each image.
        where: the origin of the rows, for the error.
        classes: class names in the order of their ids. None means the strings found, sorted.

    Raises:
        SourceError: the rows mix kinds or depths, a string is not among the classes, or float32 does not hold a whole
            number.
    """
    plain = [row.tolist() if isinstance(row, (np.ndarray, np.generic)) else row for row in rows]
    kinds = {type(leaf) for row in plain for leaf in _leaves(row)}
    if kinds == {str}:
        classes = classes or tuple(sorted({leaf for row in plain for leaf in _leaves(row)}))
        ids = {text: number for number, text in enumerate(classes)}
        try:
            plain = [_mapped(row, ids) for row in plain]
        except KeyError as error:
            raise SourceError(f"{where}: {name!r} holds {error}, which is not among the classes {classes}") from None
        return LabelColumn("int64", *_arrays(name, plain, np.int64, where), classes)
    dtype = _number_dtype(name, kinds, where)
    if dtype == "float32" and int in kinds:
        for leaf in (leaf for row in plain for leaf in _leaves(row)):
            if isinstance(leaf, int) and not _is_exact(leaf):
                raise SourceError(
                    f"{where}: {name!r} holds {leaf} among decimals, and float32 does not hold that number; expected "
                    f"at most {_WHOLE}, or whole numbers alone, which become int64"
                )
    return LabelColumn(dtype, *_arrays(name, plain, np.dtype(dtype).type, where), None)


def _is_exact(number: int) -> bool:
    """Tell whether float32 holds a whole number."""
    return abs(number) <= _WHOLE or (abs(number) <= _INT64.max and int(np.float32(number)) == number)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _mapped(value: Any, ids: dict[str, int]) -> Any:
    return [_mapped(part, ids) for part in value] if isinstance(value, (list, tuple)) else ids[value]


def _number_dtype(name: str, kinds: set[type], where: str) -> str:
    if name in BOXES and kinds <= {int, float}:
        return "float32"
    if kinds == {bool}:
        return "bool"
    if kinds == {int}:
        return "int64"
    if kinds <= {int, float}:
        return "float32"
    found = " and ".join(sorted("a missing value" if kind is type(None) else kind.__name__ for kind in kinds))
    raise SourceError(f"{where}: {name!r} holds {found}; expected numbers only, strings only, or lists of them")


def _arrays(
    name: str, rows: list[Any], dtype: type, where: str
) -> tuple[tuple[int | None, ...], list[NDArray[Any]] | NDArray[Any]]:
    try:
        arrays: list[NDArray[Any]] = [np.asarray(row, dtype=dtype) for row in rows]
    except (ValueError, OverflowError, TypeError) as error:
        raise SourceError(f"{where}: {name!r}: {error}") from error
    ndim = max((a.ndim for a in arrays if a.size), default=2 if name in BOXES else arrays[0].ndim if arrays else 0)
    inner = next((a.shape[1:] for a in arrays if a.size), (4,) if name in BOXES else ())
    arrays = [np.zeros((0, *inner), dtype) if a.ndim and not a.size else a for a in arrays]
    if any(a.ndim != ndim for a in arrays):
        raise SourceError(f"{where}: {name!r} mixes values and lists; every row needs the same depth")
    shape = _shape(arrays, ndim)
    if name in BOXES:
        if shape[1:] != (4,):
            raise SourceError(f"{where}: {name!r} has rows of shape {shape}; expected lists of [x, y, width, height]")
        return (None, 4), arrays
    return shape, (arrays if None in shape else np.stack(arrays))


def _shape(arrays: list[NDArray[Any]], ndim: int) -> tuple[int | None, ...]:
    sizes = [{a.shape[axis] for a in arrays} for axis in range(ndim)]
    return tuple(next(iter(seen)) if len(seen) == 1 else None for seen in sizes)
