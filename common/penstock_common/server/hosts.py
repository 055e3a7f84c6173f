"""Tells names and addresses of hosts from other texts, because they get into commands that people paste."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Final

from redis import exceptions as foreign

from penstock_common.server.primary_watcher import Address

_HOST: Final = re.compile(r"(?!-)[\w.:%-]{1,255}")
"""A name, also one with ``_`` as containers have it or of another script, or an IPv4 or IPv6 address with its zone."""


def is_host(text: str) -> bool:
    """Return whether a text may be a host's name or address. The name need not exist."""
    return _HOST.fullmatch(text) is not None


def named_address(host: Any, port: Any) -> Address:
    """Return the address that a node or a Sentinel named, as its answer holds it.

    Raises:
        redis.ConnectionError: It is no address.
    """
    text = host.decode(errors="replace") if isinstance(host, bytes) else host
    if not isinstance(text, str) or not is_host(text):
        raise foreign.ConnectionError(f"it names a node {text!r:.80}, which is no host")
    with suppress(TypeError, ValueError):
        if 0 < (number := int(port)) < 1 << 16:
            return text, number
    raise foreign.ConnectionError(f"it names a node at {text}, at the port {port!r:.80}, which is none")
