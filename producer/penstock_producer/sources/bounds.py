"""The folders that files of a source must lie in, in a worker whose host says so. Links are resolved first."""

from __future__ import annotations

import os
from collections.abc import Collection

from penstock_producer.sources.files import shown
from penstock_producer.sources.names import NotAllowed

_roots: tuple[str, ...] | None = None
"""Folders, without links; None: any file may be read."""


def bound_to(folders: Collection[str]) -> None:
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
