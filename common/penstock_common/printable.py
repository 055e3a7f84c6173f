"""Texts for terminals: a name or reason that another program wrote must not move the cursor or change a title."""

from __future__ import annotations

import re
from typing import Any

_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str, *, has_colours: bool = False) -> str:
    r"""Return a text as one line: each character that is not printable is spelled out, as in ``\x1b`` or ``\n``.

    Args:
        text: Any text, also with halves of surrogate pairs, which no stream encodes.
        has_colours: Whether colours stay where a command put them.
    """
    if text.isprintable():
        return text
    if has_colours:
        return "".join(part if number % 2 else printable(part) for number, part in enumerate(_COLOURS.split(text)))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_values(value: Any) -> Any:
    """Return lists and dicts of texts and numbers with ``printable`` of each text in them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(name): printable_values(held) for name, held in value.items()}
    return [printable_values(held) for held in value] if isinstance(value, list | tuple) else value
