"""The prefetch limit follows the trainer's need within the declared budget."""

from __future__ import annotations

import numpy as np
import pytest

from penstock_consumer.stages.batch import ArrayPool, Batch
from penstock_consumer.stages.queue import PATIENCE, START_BYTES, PrefetchLimit, PrefetchQueue

BUDGET = 8 * START_BYTES


def grown(times: int = 1) -> PrefetchLimit:
    """Return a limit that was starved ``times`` times after it was full."""
    allowance = PrefetchLimit(BUDGET)
    for _ in range(times):
        allowance.refused()
        allowance.starved()
    return allowance


def test_it_starts_small_and_doubles_up_to_the_budget() -> None:
    """Unneeded memory should be free for other programs."""
    sizes = [grown(times).nbytes for times in range(6)]
    assert sizes == [START_BYTES, 2 * START_BYTES, 4 * START_BYTES, BUDGET, BUDGET, BUDGET]


def test_a_small_budget_is_used_whole() -> None:
    """A lower limit at the start would save nothing."""
    assert PrefetchLimit(1000).nbytes == 1000


def test_a_trainer_that_waits_for_producers_makes_it_no_larger() -> None:
    """A queue that was never full would not be fuller with a higher limit."""
    allowance = PrefetchLimit(BUDGET)
    for _ in range(10):
        allowance.starved()
    assert allowance.nbytes == START_BYTES
    allowance.refused()
    for _ in range(10):
        allowance.starved()  # full once, empty once
    assert allowance.nbytes == 2 * START_BYTES


def taken(allowance: PrefetchLimit, nbytes: int, left: int) -> bool:
    """Return whether taking ``mib`` MiB with ``left`` MiB left always made it smaller."""
    return sum(allowance.took(1 << 20, left) for _ in range(nbytes >> 20)) > 0


@pytest.mark.parametrize(("left_share", "is_less"), [(0.6, True), (0.4, False)])
def test_what_is_never_needed_is_given_back(left_share: float, is_less: bool) -> None:
    """The limit shrinks once the trainer was slower than its producers for long enough."""
    allowance = grown()
    before = allowance.nbytes
    assert taken(allowance, 2 * PATIENCE * before, int(left_share * before)) is is_less
    assert allowance.nbytes == (START_BYTES if is_less else before)


def test_it_never_shrinks_below_its_start() -> None:
    """Half of a small limit saves nothing."""
    allowance = PrefetchLimit(BUDGET)
    assert not taken(allowance, 40 * PATIENCE << 20, START_BYTES)


def test_one_that_starves_after_it_shrank_shrinks_later_the_next_time() -> None:
    """Repeated bursts find the queue ready each time."""
    allowance = grown()
    patience = PATIENCE * 2 * allowance.nbytes
    assert taken(allowance, patience, allowance.nbytes)
    allowance.refused()
    allowance.starved()
    assert not taken(allowance, patience, allowance.nbytes)
    assert taken(allowance, patience, allowance.nbytes)


def test_the_queue_lets_the_reader_go_on_as_far_as_it_is_allowed() -> None:
    """The rule learns what happens at the queue, and the reader's memory follows it."""
    arena = ArrayPool(keep=8)
    queue = PrefetchQueue(BUDGET, arena.trim)
    half = Batch({"x": np.zeros(START_BYTES // 2, np.uint8)}, 0, [])
    queue.put(half)
    queue.put(half)
    assert not queue.wait_for_space(0, 0)
    assert [queue.get(0) is None for _ in range(2)] == [False, False]
    assert queue.get(0.01) is None  # empty, after it was full
    for _ in range(3):
        assert queue.wait_for_space(0, 0)
        queue.put(half)
    kept = [arena.array((100,), np.dtype(np.uint8)) for _ in range(4)]
    del kept[1:]
    for _ in range(8 * PATIENCE):
        queue.put(half)
        assert queue.get(0) is not None
    assert not queue.wait_for_space(0, 0)  # 3 halves are too much again
    assert sum(len(pool) for pool in arena._pool.values()) == 1
    kept[0][:] = 7
    assert arena.array((100,), np.dtype(np.uint8)).ctypes.data != kept[0].ctypes.data
    assert (kept[0] == 7).all()
