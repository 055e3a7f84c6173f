"""Sources of other distributions, found by the entry points of the group ``penstock.sources``.

A job names an entry point and never a module. So it imports only what was installed on the worker's host as a source.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock_common.errors import SourceError
from penstock_common.hints import near
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import AnySource

GROUP = "penstock.sources"
_NEEDED = ("unit", "fingerprint", "repeatable", "info", "spec", "read", "key", "close", "__len__")
_NEEDED_OF_ITEMS = ("fingerprint", "repeatable", "info", "spec", "batched", "__iter__", "make", "key", "close")


def installed() -> dict[str, EntryPoint]:
    """Return the entry point of every installed source by name. Raises SourceError where two have one name."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise SourceError(f"two sources are installed as {point.name!r}: {other.value} and {point.value}")
    return found


def module_of(name: str) -> str:
    """Return ``module:class`` of an entry point without importing it. Raises SourceError where there is none."""
    return _point(name).value.partition(" ")[0]


def _point(name: str) -> EntryPoint:
    known = installed()
    if name in known:
        return known[name]
    meant = near(name, known)
    have = f"did you mean {meant!r}?" if meant else f"installed here: {', '.join(sorted(known)) or 'none'}"
    raise SourceError(
        f"no source {name!r} is installed here; {have}. A package brings one by an entry point of the group "
        f"{GROUP!r}; your own code is read by the source kind dataset or generator"
    )


def open_installed(name: str, options: dict[str, Any]) -> AnySource:
    """Open the source of an entry point.

    Args:
        name: the name of the entry point.
        options: the keyword arguments of its class.

    Raises:
        SourceError: there is no such source, it fails, or the object is not a source.
    """
    point = _point(name)
    try:
        source: AnySource = point.load()(**options)
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(f"source {name!r} cannot be opened: {blame(error)}") from error
    unit = getattr(source, "unit", None)
    needed = _NEEDED_OF_ITEMS if unit == "item" else (*_NEEDED, "size") if unit == "batch" else _NEEDED
    lacks = [part for part in needed if not hasattr(source, part)]
    if lacks or unit not in ("sample", "batch", "item"):
        raise SourceError(
            f"{name!r} ({point.value}) is not a source: it lacks {', '.join(lacks) or f'a unit, found {unit!r}'}; "
            "docs/own-source.md says what a source needs"
        )
    if source.unit != "item":
        try:
            len(source)
        except Exception as error:
            raise SourceError(f"len() of source {name!r} failed: {blame(error)}") from error
    return source
