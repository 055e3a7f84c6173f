"""Options of tests, named as they are used, in the groups that Loader, Writer, Replay, Files and produce take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock_common.tuning import FIELDS, OLD_RANK, Canonical, Tuning


def tuned(call: str, options: Mapping[str, Any], tuning: Tuning | None = None) -> dict[str, Any]:
    """Return the options of a call with its tuning and its rank in one value each."""
    rest = {name: value for name, value in options.items() if name not in (*FIELDS[call], *OLD_RANK)}
    fields = {name: value for name, value in options.items() if name in FIELDS[call]}
    rank = {name: value for name, value in options.items() if name in OLD_RANK}
    given = rest.pop("tuning", tuning) or Tuning()
    if rank and rest.get("order") == "canonical":
        rest["order"] = Canonical(**rank)
    return {**rest, "tuning": replace(given, **fields)}
