"""What the jobs of a worker may name: modules and functions, and the folders that files must lie in.

A worker's host says it once for the whole process. Where nothing was said, everything is allowed.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection
from types import ModuleType

from penstock_common.errors import SourceError
from penstock_producer.sources.files import shown


class NotAllowed(SourceError):
    """A job names code or files that this worker's host did not allow."""


_allowed: frozenset[str] | None = None
"""Modules, and single names, that this process may import; None: any."""


def allow_names(names: Collection[str]) -> None:
    """From now on only these names are imported: ``module`` with all below it, or ``module:name``.

    For workers: whoever can write jobs could otherwise have them call any function of any module there is.
    """
    global _allowed  # noqa: PLW0603 - one law for the whole process, which no caller can forget to pass on
    _allowed = frozenset(names)


def require_import(name: str) -> None:
    """Raise NotAllowed if this process may not import ``module:attribute``."""
    if _allowed is not None:
        require_name(name, _allowed)


def require_attribute(name: str, part: str) -> None:
    """Raise NotAllowed for a part of an import name that reaches into Python itself."""
    if _allowed is not None and part.startswith("__"):
        raise NotAllowed(f"{shown(name)} reaches into Python itself by {part!r}, which no job may")


def require_name(name: str, allowed: Collection[str]) -> None:
    """Raise NotAllowed if ``module:attribute`` is not among the allowed modules and names. Nothing is imported."""
    if name in allowed or _is_below(name.partition(":")[0], allowed):
        return
    listed = " ".join(f"--allow {each}" for each in sorted(allowed)) or "no --allow"
    raise NotAllowed(
        f"{shown(name)} is not allowed in this worker, which was started with {listed}: start it with --allow "
        f"{shown(name.partition(':')[0])} (or --allow {shown(name)}) if whoever queues jobs may run it"
    )


def require_own(name: str, found: object) -> None:
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


def _is_below(module_name: str, allowed: Collection[str]) -> bool:
    return any(module_name == each or module_name.startswith(f"{each}.") for each in allowed if ":" not in each)


_roots: tuple[str, ...] | None = None
"""Folders, without links; None: any file may be read."""


def allow_folders(folders: Collection[str]) -> None:
    """From now on this process opens no file of a source outside these folders."""
    global _roots  # noqa: PLW0603 - one law for the whole process, which no caller can forget to pass on
    _roots = tuple(map(os.path.realpath, folders))


def require_inside(path: str | os.PathLike[str]) -> None:
    """Raise NotAllowed if this process may not open a path, wherever its links lead."""
    if _roots is not None:
        require_below(path, _roots)


def require_below(path: str | os.PathLike[str], roots: Collection[str]) -> None:
    """Raise NotAllowed if a path is not, links resolved, one of the folders or below one. It is not opened."""
    text = os.fspath(path)
    try:
        found = os.path.realpath(text)
    except ValueError:  # a zero byte
        found = ""
    if any(found == root or found.startswith(root.rstrip("/") + "/") for root in roots):
        return
    where = shown(text) if found in ("", text) else f"{shown(text)} (which is {shown(found)})"
    raise NotAllowed(
        f"{where} is outside the folders that this worker may read ({', '.join(map(shown, roots)) or 'none'}): start "
        f"it with --root {shown(os.path.dirname(found) or '/')} if whoever queues jobs may read there"  # noqa: PTH120
    )
