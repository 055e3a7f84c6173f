"""The rule whether an import name or a folder is allowed: which modules an allowed one includes, and what none may.

The worker sets them once for its whole process. A process in which nothing was set may import and read anything.
"""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Collection
from types import ModuleType

from penstock_common.errors import SourceError
from penstock_producer.sources.files import shown


class NotAllowed(SourceError):
    """A job names code or files that this worker's host did not allow."""


_allowed: frozenset[str] | None = None
"""The modules and single names that this process may import. None means any."""


def allow_names(names: Collection[str]) -> None:
    """Let this process import these names only, from now on.

    A worker calls this first. Otherwise every user who can write jobs could call any function of any module.

    Args:
        names: ``module``, which includes everything below it, or ``module:name``.

    Example:
        >>> allow_names(["augment", "torchvision.datasets:CIFAR10"])
    """
    global _allowed  # noqa: PLW0603 - one rule for the whole process, which no caller can forget to pass on
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
    """Raise NotAllowed if ``module:attribute`` is not among the allowed modules and names, without importing it."""
    if name in allowed or _is_below(name.partition(":")[0], allowed):
        return
    listed = " ".join(f"--allow {each}" for each in sorted(allowed)) or "no --allow"
    raise NotAllowed(
        f"{shown(name)} is not allowed in this worker, which was started with {listed}: start it with --allow "
        f"{_word(name.partition(':')[0])} (or --allow {_word(name)}) if everyone who queues jobs may run it"
    )


def _word(text: str) -> str:
    """Return a job's text as one word of a shell, because people paste the option."""
    return shlex.quote(shown(text))


def require_own(name: str, found: object) -> None:
    """Raise NotAllowed for a function, class or module that an allowed module only imports from elsewhere.

    It is allowed where the module that defines it is allowed, or this very name. An instance does not tell which module
    made it. It is allowed, because a transform such as ``Compose([...])`` is an instance of a foreign class.
    """
    if _allowed is None or name in _allowed:
        return
    home = found.__name__ if isinstance(found, ModuleType) else getattr(found, "__module__", None)
    is_code = isinstance(found, ModuleType | type) or inspect.isroutine(found)
    if is_code and not _is_below(home or "", _allowed):
        raise NotAllowed(
            f"{shown(name)} is defined in {home or 'C'}, which is not allowed in this worker: start it with --allow "
            f"{_word(name)} if everyone who queues jobs may run it"
        )


def _is_below(module_name: str, allowed: Collection[str]) -> bool:
    return any(module_name == each or module_name.startswith(f"{each}.") for each in allowed if ":" not in each)


_roots: tuple[str, ...] | None = None
"""The folders below which files may be read, with links resolved. None means that any file may be read."""


def allow_folders(folders: Collection[str]) -> None:
    """Let this process open files of a source only inside these folders, from now on."""
    global _roots  # noqa: PLW0603 - one rule for the whole process, which no caller can forget to pass on
    _roots = tuple(map(os.path.realpath, folders))


def require_inside(path: str | os.PathLike[str]) -> None:
    """Raise NotAllowed if this process may not open the file that a path leads to through its links."""
    if _roots is not None:
        require_below(path, _roots)


def require_below(path: str | os.PathLike[str], roots: Collection[str]) -> None:
    """Raise NotAllowed if a path, with its links resolved, is outside all of the folders. Nothing is opened."""
    text = os.fspath(path)
    try:
        found = os.path.realpath(text)
    except ValueError:  # a zero byte
        found = ""
    if any(found == root or found.startswith(root.rstrip("/") + "/") for root in roots):
        return
    folder = os.path.dirname(found) if os.path.isfile(found) else found  # noqa: PTH113, PTH120
    where = shown(text) if found in ("", text) else f"{shown(text)} (which is {shown(found)})"
    raise NotAllowed(
        f"{where} is outside the folders that this worker may read ({', '.join(map(shown, roots)) or 'none'}): start "
        f"it with --root {_word(folder or '/')} if everyone who queues jobs may read there"
    )
