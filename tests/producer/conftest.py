"""Fixtures for all tests of production."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a failed job go back to the queue soon, because its tries pause for more than seven seconds together."""
    monkeypatch.setattr("penstock_producer.jobs.queue.PAUSES_S", (0.0, 0.05, 0.1, 0.2))
