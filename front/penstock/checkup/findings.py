"""A finding: how bad it is, what was found, and the command that helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note", "ok"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding."""

    check: str
    severity: Severity
    """``error``: data or runs will be lost, or nothing works. ``warning``: it will cause trouble. ``note``:
    information.
    """
    found: str
    mend: str = ""
    """The exact command or setting, or empty if nothing is to be done."""


def ok(check: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, "ok", found)
