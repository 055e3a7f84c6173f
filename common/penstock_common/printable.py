"""Texts for people: bytes, times, lists, and what other programs wrote, which must not control a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote


def printable(text: str) -> str:
    r"""Return a text as one line: each character that is not printable is spelled out, as in ``\x1b`` or ``\n``.

    The text may have halves of surrogate pairs, which no stream encodes.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def spaced(text: str) -> str:
    """Return a text with a space for each character that is not printable."""
    return "".join(c if c.isprintable() else " " for c in text)


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters. One that is cut ends with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable_values(value: Any) -> Any:
    """Return lists and dicts of texts and numbers with ``printable`` of each text in them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(name): printable_values(held) for name, held in value.items()}
    return [printable_values(held) for held in value] if isinstance(value, list | tuple) else value


def readable_server(where: str) -> str:
    """Return how messages name a server, by its address without a password.

    Of a service that Sentinels watch, the primary is named, and who was asked for it.
    """
    hosts, _, path = where.partition("+sentinel://")[2].partition("?")[0].partition("/")
    service = unquote(path.partition("/")[0])
    return f"the primary of service {service!r} (Sentinels {hosts.rpartition('@')[2]})" if service else where


def readable_bytes(count: int) -> str:
    """Return bytes as people read them."""
    if 0 < count < 1024:
        return f"{count} byte{'s' * (count > 1)}"
    if count < 1 << 20:
        return f"{count / 1024:.0f} KiB"
    if count >= 10 << 40:
        return f"{count / (1 << 40):.1f} TiB"
    if count >= 10 << 30:
        return f"{count / (1 << 30):.1f} GiB"
    return f"{count / (1 << 20):.0f} MiB" if count >= 10 << 20 else f"{count / (1 << 20):.1f} MiB"


def readable_span(seconds: float) -> str:
    """Return a time span as people read it, in the largest unit of which there are at least two."""
    seconds = max(0.0, seconds)
    for unit, name in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first ``most`` of some names, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")
