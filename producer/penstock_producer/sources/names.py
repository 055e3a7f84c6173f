"""Import names ``module:attribute`` of the user's functions and objects, and errors that say what is nearest.

The current directory is importable, as it is for ``python -m``. What the objects mean is their callers' business.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock_common.errors import SourceError
from penstock_producer.sources.files import shown

_allowed: frozenset[str] | None = None
"""Modules, and single names, that this process may import; None: any."""


class NotAllowed(SourceError):
    """A job names code or files that this worker's host did not allow."""


def allow_only(names: Collection[str]) -> None:
    """From now on only these names are imported: ``module`` with all below it, or ``module:name``.

    For workers: whoever can write jobs could otherwise have them call any function of any module there is.
    """
    global _allowed  # noqa: PLW0603 - one law for the whole process, which no caller can forget to pass on
    _allowed = frozenset(names)


def require_named(name: str, allowed: Collection[str]) -> None:
    """Raise NotAllowed if ``module:attribute`` is not among the allowed modules and names. Nothing is imported."""
    if name in allowed or _is_below(name.partition(":")[0], allowed):
        return
    listed = " ".join(f"--allow {each}" for each in sorted(allowed)) or "no --allow"
    raise NotAllowed(
        f"{shown(name)} is not allowed in this worker, which was started with {listed}: start it with --allow "
        f"{shown(name.partition(':')[0])} (or --allow {shown(name)}) if whoever queues jobs may run it"
    )


def _is_below(module_name: str, allowed: Collection[str]) -> bool:
    return any(module_name == each or module_name.startswith(f"{each}.") for each in allowed if ":" not in each)


def _require_own(name: str, found: object) -> None:
    """Refuse what an allowed module only imports; the module that defines it may be allowed, or this very name."""
    if _allowed is None or name in _allowed:
        return
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    is_code = isinstance(found, ModuleType | type) or inspect.isroutine(found)
    if is_code and not _is_below(home or "", _allowed):
        raise NotAllowed(
            f"{shown(name)} is defined in {home or 'C'}, which is not allowed in this worker: start it with --allow "
            f"{shown(name)} if whoever queues jobs may run it"
        )


def split_name(name: str) -> tuple[str, str]:
    """Return module and attribute of ``module:attribute`` without importing; raise SourceError for another form."""
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise SourceError(f"{name!r} is not an import name; write module:attribute, like augment:flip")
    if module_name.endswith(".py") or "/" in module_name:
        wanted = Path(module_name).with_suffix("").as_posix().replace("/", ".")
        raise SourceError(f"{name!r} names a file; write the module instead: {wanted}:{attribute}")
    return module_name, attribute


def resolve(name: str) -> Any:
    """The object behind ``module:attribute`` (dots allowed on both sides); raises SourceError."""
    module_name, attribute = split_name(name)
    if _allowed is not None:
        require_named(name, _allowed)
    found = _import(module_name)
    for part in attribute.split("."):
        if _allowed is not None and part.startswith("__"):
            raise NotAllowed(f"{shown(name)} reaches into Python itself by {part!r}, which no job may")
        if not hasattr(found, part):
            there = [n for n in dir(found) if not n.startswith("_")]
            near = _nearest(part, there) or (f"; it has {', '.join(there[:10])}" if there else "")
            raise SourceError(f"{name!r}: {module_name} has no {part!r}{near}")
        found = getattr(found, part)
        _require_own(name, found)
    return found


def resolve_callable(name: str) -> Callable[..., Any]:
    """As `resolve`, but the object must be callable."""
    found = resolve(name)
    if not callable(found):
        raise SourceError(f"{name!r} is a {type(found).__name__}; expected a function")
    return found  # type: ignore[no-any-return]


def resolve_object(name: str) -> Any:
    """As `resolve`; a class or a plain function is called without arguments and what it returns is the object."""
    found = resolve(name)
    if not callable(found) or hasattr(type(found), "__getitem__") or hasattr(type(found), "__iter__"):
        return found
    try:
        return found()
    except Exception as error:
        raise SourceError(f"calling {name} failed: {blame(error)}") from error


def blame(error: BaseException) -> str:
    """``ZeroDivisionError: division by zero (augment.py:12)``, with the deepest line that is not a library's."""
    text = " ".join(str(error).split())
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not _is_library(f.filename)]
    return f"{what} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else what


def _is_library(filename: str) -> bool:
    here = str(Path(__file__).parent)
    return filename.startswith(("<frozen", here, _STDLIB)) or "site-packages" in filename


_STDLIB = str(Path(importlib.__file__).parent.parent)


def _import(module_name: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise SourceError(f"importing {module_name} failed: {blame(error)}") from error
        near = _nearest(module_name, [p.stem for p in Path(here).iterdir() if p.suffix == ".py" or p.is_dir()])
        raise SourceError(f"no module {error.name!r} on the import path or in {here}{near}") from None
    except Exception as error:
        raise SourceError(f"importing {module_name} failed: {blame(error)}") from error


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
