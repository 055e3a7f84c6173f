"""The sentences that a client gets: they name its own stream and group, and nothing else of the operator's.

A page is not the operator's. It must not learn addresses, users, folders, or the names of other streams and groups.
"""

from __future__ import annotations

import re

from penstock.gateway.tokens import Grant
from penstock_common import errors
from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.waiting import WAITING

_TOLD = (
    errors.CheckpointOverdue,
    errors.EpochAbandoned,
    errors.EpochIncomplete,
    errors.EpochNotFound,
    errors.EpochsReleased,
    errors.GroupFinished,
    errors.GroupKindMismatch,
    errors.GroupNotFound,
    errors.MemberReplaced,
    errors.StreamNotFound,
    errors.TooLarge,
    errors.WaitTimeout,
)
"""The errors that speak of a client's own stream and group. The texts of all others are the operator's."""
_INTERNAL = re.compile(r"://|[\w\]]:\d{2,5}\b|Sentinel|\bACL\b|(?<![\w.])/[\w.-]+/")
"""An address, a host and port, a user's rights, or the path of a folder."""
_NO_ROOM = "its writer waits for space"
"""The groups that hold the space follow."""
_READ_AGAIN = "; start='earliest' or penstock.Replay reads the retained again"
"""What a client cannot do. A group that has read everything is told so."""
_BACK = "the server behind the gateway answers again"
_AWAY = "the server behind the gateway does not answer as it should"


def notice_for(grant: Grant, line: str) -> str:
    """Return what a client is told of a loader's notice, or '' if it is the operator's alone."""
    if line.startswith("new group "):  # the operator named the group, and the line names the others
        return ""
    if " answers again, after " in line:
        return _BACK
    prefix = WAITING if line.startswith(WAITING) else ""
    return _own(grant, line) or f"{prefix}{_AWAY}; the gateway tries again"


def error_for(grant: Grant, error: PenstockError) -> str:
    """Return what a client is told of an error."""
    if isinstance(error, ServerUnavailable):
        return f"{_AWAY}: connect again later; the group gives out again what was not acknowledged"
    ask = f"{grant} cannot be read ({type(error).__name__}): ask who runs the gateway, whose output says why"
    return (isinstance(error, _TOLD) and _own(grant, str(error))) or ask


def _own(grant: Grant, text: str) -> str:
    """Return a text without the names of others, or '' if it has more that a client must not learn."""
    before, absent, _ = text.partition(f"no stream {grant.stream!r}; ")
    if absent:
        text = f"{before}stream {grant.stream!r} is not there yet: is a producer running?"
    text = text.partition("; groups there:")[0]
    before, full, _ = text.partition(_NO_ROOM)
    text = f"{before}{full}".replace(_READ_AGAIN, "")
    return "" if _INTERNAL.search(text) else text
