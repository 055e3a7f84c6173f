"""Texts for terminals: a name or reason that another program wrote must not move the cursor or change a title."""

from __future__ import annotations

from typing import Any


def printable(text: str) -> str:
    r"""Return a text as one line: each character that is not printable is spelled out, as in ``\x1b`` or ``\n``.

    The text may have halves of surrogate pairs, which no stream encodes.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def spaced(text: str) -> str:
    """Return a text with a space for each character that is not printable."""
    return "".join(c if c.isprintable() else " " for c in text)


def printable_values(value: Any) -> Any:
    """Return lists and dicts of texts and numbers with ``printable`` of each text in them."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(name): printable_values(held) for name, held in value.items()}
    return [printable_values(held) for held in value] if isinstance(value, list | tuple) else value
