"""The prefetch queue: bounded in bytes, with a definite end."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.queue import PrefetchQueue, QueueStopped


def batch(nbytes: int) -> Batch:
    """Return a batch of ``nbytes`` bytes."""
    return Batch({"x": np.zeros(nbytes, np.uint8)}, 0, [])


def test_room_is_given_in_bytes_and_always_for_one_batch() -> None:
    """Memory is bounded by the declared budget, but a larger batch must still come through."""
    queue = PrefetchQueue(100)
    assert queue.wait_for_space(0, 0)
    queue.put(batch(60))
    assert queue.wait_for_space(30, 0)
    assert not queue.wait_for_space(40, 0)
    queue.put(batch(1000))
    assert not queue.wait_for_space(0, 0)
    for _ in range(2):
        assert queue.get(0) is not None
    assert queue.wait_for_space(10**9, 0)


def test_a_wait_counts_from_the_end_of_the_last_outage() -> None:
    """A loop would be told that it waits for itself, a moment before the server brings a batch."""
    now = [100.0]
    queue = PrefetchQueue(100, clock=lambda: now[0])
    first, second = queue.new_input(), queue.new_input()
    assert queue.undisturbed_s == float("inf")
    first.tell_trouble("away")
    now[0] = 130.0
    assert queue.undisturbed_s == 0
    second.tell_trouble("away, too")
    first.tell_trouble("")
    assert queue.undisturbed_s == 0
    now[0] = 140.0
    second.tell_trouble("")
    now[0] = 141.0
    first.tell_trouble("")
    assert queue.undisturbed_s == 1


def test_a_reader_that_waits_for_room_is_woken_by_the_trainer() -> None:
    """A timeout is not enough: the queue would be empty at every turn."""
    queue = PrefetchQueue(10)
    queue.put(batch(10))
    woken: list[float] = []

    def wait() -> None:
        if queue.wait_for_space(0, 30):
            woken.append(time.monotonic())

    reader = threading.Thread(target=wait)
    reader.start()
    taken = time.monotonic()
    queue.get(0)
    reader.join(5)
    assert woken
    assert woken[0] - taken < 2


def test_an_error_comes_after_the_batches_before_it_and_stays() -> None:
    """Received samples can be trained on, and an interrupted epoch must never look as if it had ended."""
    queue = PrefetchQueue(100)
    queue.put(batch(1))
    queue.end(ValueError("broken"))
    assert queue.get(0) is not None
    for _ in range(2):
        assert not queue.is_over
        with pytest.raises(ValueError, match="broken"):
            queue.get(0)


def test_the_end_is_over_when_the_last_batch_was_taken() -> None:
    """The end does not come when it was put."""
    queue = PrefetchQueue(100)
    queue.put(batch(1))
    queue.end()
    assert not queue.is_over
    assert queue.get(0) is not None
    assert queue.get(30) is None
    assert queue.is_over


def test_a_reader_nobody_needs_any_more_is_stopped_at_once() -> None:
    """This holds also while it waits for space."""
    queue = PrefetchQueue(1)
    queue.put(batch(10))
    threading.Timer(0.05, queue.stop).start()
    with pytest.raises(QueueStopped):
        queue.wait_for_space(0, 30)
    assert queue.is_stopped
