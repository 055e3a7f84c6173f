"""Limits: the sizes and rates of a client's messages, credits and batches, how many clients there are, and which pages
may connect.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from penstock.gateway.refusals import FOREIGN_ORIGIN, TOO_MANY, Refusal
from penstock.gateway.tokens import Grant
from penstock_common.errors import PenstockError
from penstock_common.tuning import LEASE_S

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_MESSAGE_BYTES = 16 << 10
"""The largest message that a client may send. No request needs more."""
MAX_CREDITS = 16
"""The most batches that a client may have granted and not received."""
MAX_ACKED = 1024
"""The most batches in one acknowledgement."""
MAX_BATCH_SIZE = 1 << 16
MAX_UNPROVEN = 256
"""The most connections that have not shown a token yet. The oldest one is closed for the next."""
OPEN_S = 5.0
"""The time for a client to show its token, from its connection on."""
CLOSE_S = 1.0
"""The time for a client that is refused to take the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one gateway that its operator chooses."""

    members: int = 64
    """The most members at once. Each has a few threads and connections to Redis."""
    members_per_token: int = 32
    messages_per_s: float = 200.0
    """The messages of one client, or the HTTP requests of one token. A burst may have twice as many."""
    batch_bytes: int = 64 << 20
    """The payload of the largest batch."""
    buffer_bytes: int = 8 << 20
    """The payload that is read ahead for one member."""
    lease_s: float = LEASE_S


def parse_origin(text: str) -> str:
    """Return an origin as a browser sends it: ``https://host`` or ``https://host:port``, or ``null``.

    Raises PenstockError if no page can have it.
    """
    if text.lower() == "null":
        return "null"
    if "*" in text:
        raise PenstockError(f"{text!r:.80} is no origin: there are no patterns, so give --origin for each origin")
    scheme, mark, rest = text.lower().rpartition("://")
    host = re.split("[/?#]", rest.rpartition("@")[2])[0]
    if not mark or not scheme or not host or rest.rstrip("/") != host:
        write = f"{scheme or 'https'}://{host or 'lab.example.org'}"
        raise PenstockError(f"{text!r:.80} is no origin, which is a scheme and a host: write {write}")
    port = {"http": ":80", "https": ":443"}.get(scheme, "/")  # a browser leaves it out
    return f"{scheme}://{host.removesuffix(port)}"


class OriginCheck:
    """The pages that may connect. A program that is no page sends no origin, and its token decides."""

    def __init__(self, allowed: Sequence[str], *, allows_local: bool) -> None:
        self._allowed = {parse_origin(origin) for origin in allowed}
        self._allows_local = allows_local

    def require(self, origin: str | None, host: str | None) -> None:
        """Raise Refusal unless the page may connect: it is listed, of this host, or local where the gateway is."""
        if origin is None:
            return
        text = origin.lower()
        netloc, hostname = _host_of(text)
        if text in self._allowed or (netloc and host is not None and netloc == host.lower()):
            return
        if self._allows_local and hostname in LOCAL_HOSTS:
            return
        raise Refusal(FOREIGN_ORIGIN, f"pages of {origin[:80]} may not read here: --origin allows an origin")


def _host_of(origin: str) -> tuple[str, str]:
    """Return host and port, and the host alone, of an origin. Both are empty where it is none."""
    try:
        parts = urlsplit(origin)
        return parts.netloc, parts.hostname or ""
    except ValueError:
        return "", ""


class RateLimit:
    """A token bucket for one client."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s, self._clock = per_s, clock
        self._burst = self._left = 2 * per_s
        self._at = clock()

    def spend(self) -> float:
        """Count one message. Returns the seconds until the client is within its rate again, or 0."""
        now = self._clock()
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s) - 1
        self._at = now
        return max(0.0, -self._left / self._per_s)


class Places:
    """The most members of one gateway."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._taken: Counter[Grant] = Counter()

    @property
    def taken(self) -> int:
        """Return the number of members."""
        return self._taken.total()

    def take(self, grant: Grant) -> None:
        """Count a member. Raises Refusal if the gateway, or the token's group, has as many as it may."""
        limits = self._limits
        if self.taken >= limits.members:
            raise Refusal(TOO_MANY, f"the gateway has {limits.members} members, its limit (--members): try again later")
        if self._taken[grant] >= limits.members_per_token:
            raise Refusal(
                TOO_MANY,
                f"{grant} has {limits.members_per_token} members here, the limit of one token (--per-token): close one",
            )
        self._taken[grant] += 1

    def give_back(self, grant: Grant) -> None:
        """Count a member less."""
        self._taken[grant] -= 1
