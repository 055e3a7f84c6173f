"""The threads of a training loop: whatever ends one of them reaches the loop, or leases would lapse silently."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import penstock_consumer.read.heartbeat
from penstock_consumer.read.loader import Loader
from tests.contracts.feed import loader_of, produce
from tests.contracts.ordered import plan, rank_of

PATIENCE_S = 20.0


def breaks(*_: Any) -> None:
    """Raise an error that the author of the thread did not foresee."""
    raise ZeroDivisionError("nobody expects this")


def train_until_told(loader: Loader) -> None:
    """Take one step at a time, for as long as there are samples."""
    deadline = time.monotonic() + PATIENCE_S
    batches: Iterator[Any] = iter(loader)
    for _ in batches:
        time.sleep(0.02)
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("opened", "made"),
    [
        (lambda url: loader_of(url, lease_s=0.6, batch_size=1), produce),
        (lambda url: rank_of(url, batch=1, lease_s=0.6), None),
    ],
    ids=["shared", "ordered"],
)
def test_whatever_ends_the_thread_that_renews_reaches_the_training_loop(
    any_url: str,
    monkeypatch: pytest.MonkeyPatch,
    opened: Callable[[str], AbstractContextManager[Loader]],
    made: Callable[..., Any] | None,
) -> None:
    """A thread that died silently would let every lease lapse while the loop continues."""
    if made is not None:
        produce(any_url, "t", 2000)
    else:
        plan(any_url, [2000])
    with pytest.raises(ZeroDivisionError, match="nobody expects"), opened(any_url) as loader:
        next(iter(loader))
        monkeypatch.setattr(penstock_consumer.read.heartbeat, "beat_each", breaks)
        train_until_told(loader)
