"""Tells names and addresses of hosts from other texts, because they get into commands that people paste."""

from __future__ import annotations

import re
from typing import Final

_HOST: Final = re.compile(r"(?!-)[\w.:%-]{1,255}")
"""A name, also one with ``_`` as containers have it or of another script, or an IPv4 or IPv6 address with its zone."""


def is_host(text: str) -> bool:
    """Return whether a text may be a host's name or address. The name need not exist."""
    return _HOST.fullmatch(text) is not None
