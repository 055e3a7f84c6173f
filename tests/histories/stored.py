"""Stored histories: those that failed once, and what they cover. They are in ``stored.json``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tests.histories.step import History, parse_history

FILE = Path(__file__).with_name("stored.json")


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """A history that is run after each change."""

    covers: str
    history: History
    breaks: str = ""
    """The reason why it still breaks a promise, or ''."""


def stored_histories() -> list[StoredHistory]:
    """Return all of them."""
    return [
        StoredHistory(one["covers"], parse_history(one["history"]), one.get("breaks", ""))
        for one in json.loads(FILE.read_text())
    ]
