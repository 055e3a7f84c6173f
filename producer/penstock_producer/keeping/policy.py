"""What a stream keeps of epochs that are settled: a policy as text, as a value, and the errors that name its forms.

Which epochs go by it is ``retention``'s plan; the text lies in the stream's meta.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock_common.errors import BadRetention

FORMS = (
    "budget (keep all until room is needed), epochs:N (the newest N), time:DURATION as 90m, 24h or 7d, "
    "or bytes:SIZE as 500mb"
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True)
class Policy:
    """How much of what every group has settled is kept; the byte budget rules on top, and what is owed always stays."""

    text: str
    """As it is stored: `parse_policy` of it is this value."""
    epochs: int | None = None
    """The newest so many settled epochs."""
    age_ms: int | None = None
    """Settled epochs that were produced no longer ago than this."""
    nbytes: int | None = None
    """The newest settled epochs, up to so many payload bytes."""


def parse_policy(text: str) -> Policy:
    """The policy; raises BadRetention, which names the forms there are."""
    kind, _, amount = text.strip().lower().partition(":")
    if kind == "budget" and not amount:
        return Policy("budget")
    if kind == "epochs" and re.fullmatch(r"\d{1,9}", amount):
        return Policy(f"epochs:{int(amount)}", epochs=int(amount))
    if kind == "time" and (found := re.fullmatch(r"(\d{1,9})([smhd])", amount)):
        return Policy(f"time:{amount}", age_ms=int(found[1]) * _SECONDS[found[2]] * 1000)
    if kind == "bytes" and (found := re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kmgt]?)b?", amount)):
        size = int(float(found[1]) * 1024 ** _POWERS[found[2]])
        return Policy(f"bytes:{size}", nbytes=size)
    raise BadRetention(f"retention {text!r} is not one of: {FORMS}")
