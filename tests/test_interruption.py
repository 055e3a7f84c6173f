"""The Ctrl-C of the tests comes only where Python would raise it, so no test fails by chance."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.interruption import Interruption


class Owner:
    """An object with a destructor of one call, and a callback of `weakref.finalize`."""

    def __init__(self) -> None:
        weakref.finalize(self, called)

    def __del__(self) -> None:
        called()


def called() -> int:
    """Be one call."""
    return 0


def suspended() -> Iterator[int]:
    """Yield, and be dropped before the end."""
    try:
        yield called()
    finally:
        called()


def work() -> None:
    """Release objects, and make enough for the collector."""
    for _ in range(8):
        called()
        Owner()
        next(iter(suspended()))
        list(map(lambda number: [number], range(20)))  # noqa: C417 - each object comes from a call


@pytest.fixture
def collecting() -> Iterator[None]:
    """Collect all the time, with a callback as JAX has one."""

    def callback(phase: str, info: dict[str, int]) -> None:
        called()

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1)
    yield
    gc.callbacks.remove(callback)
    gc.set_threshold(*before)


@pytest.mark.usefixtures("collecting")
def test_each_interruption_reaches_the_caller() -> None:
    """An exception that Python ignores is a warning, and pytest makes an error of it."""
    whole = Interruption()
    whole.of(work)
    assert whole.calls > 100
    for after in range(1, whole.calls - 10):
        with pytest.raises(KeyboardInterrupt):
            Interruption(after).of(work)
