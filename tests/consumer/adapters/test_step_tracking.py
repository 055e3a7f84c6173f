"""Which pulled batches count as trained on, without a framework: cases that frameworks rarely show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock_consumer.adapters.step_tracking import StepTracker
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.stats import StatsCounter


class Numbers:
    """A loader of five batches, known by their positions."""

    adapter: Any = None

    def __init__(self) -> None:
        self.trained_on: list[int] = []
        self.returned: list[int] = []
        self.counter = StatsCounter()

    def _hooks(self) -> Any:
        return self

    def __iter__(self) -> Iterator[Batch]:
        return (Batch({}, 0, [], position) for position in range(5))

    def take_over(self, adapter: Any) -> None:
        """Note that the loader is taken over."""
        self.adapter = adapter

    def trained(self, batch: Batch) -> None:
        """Note a report."""
        self.trained_on.append(batch.position)

    def return_batches(self, batches: Iterable[Batch]) -> None:
        """Note a returned batch."""
        self.returned += [batch.position for batch in batches]


def test_the_end_of_a_pass_proves_nothing_where_a_callback_reports_the_steps() -> None:
    """With several steps in one call, the end is met while the last of them still run, and a crash would lose them."""
    loader = Numbers()
    tracker = StepTracker.of(loader)  # type: ignore[arg-type]
    tracker.begin_reports()
    rounds = tracker.passes(is_ordered=True, is_drained=True)
    next(rounds)
    tokens = [token for _, token in tracker.batches()]
    tracker.arrive(tokens[:3])
    assert loader.trained_on == []
    tracker.report()  # the call has ended
    assert loader.trained_on == [0, 1, 2]
    tracker.arrive(tokens[3:])  # and the end is met after the last call
    assert list(rounds) == []
    assert loader.trained_on == [0, 1, 2]
    tracker.report()
    assert loader.trained_on == [0, 1, 2, 3, 4]


def test_what_was_dropped_on_the_way_counts_as_read_at_the_end_of_a_pass() -> None:
    """A filter's last batches never arrive, and without this the epoch would not close."""
    loader = Numbers()
    tracker = StepTracker.of(loader)  # type: ignore[arg-type]
    rounds = tracker.passes(is_ordered=True, is_drained=True)
    next(rounds)
    tokens = [token for _, token in tracker.batches()]
    tracker.arrive(tokens[1:2])
    assert list(rounds) == []
    assert loader.trained_on == [0, 1, 2, 3, 4]
    assert loader.returned == []


def test_asking_for_a_batch_with_nothing_in_between_acknowledges_the_one_before() -> None:
    """An untouched tf.data dataset reports nothing else."""
    loader = Numbers()
    tracker = StepTracker.of(loader)  # type: ignore[arg-type]
    rounds = tracker.passes(is_ordered=True, is_drained=True)
    next(rounds)
    batches = tracker.asked()
    assert [next(batches).position for _ in range(3)] == [0, 1, 2]
    assert loader.trained_on == [0, 1]
    assert [batch.position for batch in batches] == [3, 4]
    assert list(rounds) == []
    assert loader.trained_on == [0, 1, 2, 3, 4]


class Overtaken(StepTracker):
    """A loader in which another pass begins just after a batch was pulled."""

    def batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield batches of the pass before."""
        for pair in super().batches():
            next(self.passes(is_ordered=True, is_drained=True))
            yield pair


def test_a_batch_that_a_new_pass_hands_back_is_not_given_to_the_old_one_too() -> None:
    """It would be trained on twice, and the new pass would acknowledge what it has not reached."""
    loader = Numbers()
    tracker = Overtaken(loader)  # type: ignore[arg-type]
    rounds = tracker.passes(is_ordered=True, is_drained=True)
    next(rounds)
    assert list(tracker.asked()) == []
    assert loader.returned == [0]
    tracker.report()
    assert loader.trained_on == []
