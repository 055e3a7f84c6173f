"""From times to a cause: the rule as tables, and the times that it takes, on a test clock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from penstock_consumer.stages.batch import Batch, BatchSpan, Lease
from penstock_consumer.stages.queue import PrefetchQueue
from penstock_consumer.stages.stats import (
    FEED_S,
    Cause,
    ReaderTimes,
    Stats,
    StatsCounter,
    TimeSpent,
    attribute,
    readable_rate,
    summed,
    verdict,
)


class Clock:
    """A clock whose time passes on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the seconds."""
        return self.now


@pytest.mark.parametrize(
    ("seconds", "booked", "doing", "found"),
    [
        (2.0, TimeSpent(producers=2.0), "reader", TimeSpent(producers=2.0)),
        (2.0, TimeSpent(), "server", TimeSpent(server=2.0)),  # not finished
        (2.0, TimeSpent(reader=0.5), "server", TimeSpent(server=1.5, reader=0.5)),
        # begun before the wait
        (1.0, TimeSpent(producers=3.0, server=1.0), "reader", TimeSpent(producers=0.75, server=0.25)),
        (0.0, TimeSpent(producers=3.0), "reader", TimeSpent()),
    ],
)
def test_a_wait_is_for_what_the_reader_was_at(
    seconds: float, booked: TimeSpent, doing: Cause, found: TimeSpent
) -> None:
    """All of it is attributed, once."""
    assert attribute(seconds, booked, doing) == found


@pytest.mark.parametrize(
    ("spent", "elapsed_s", "cause"),
    [
        (TimeSpent(), 0.0, None),
        (TimeSpent(), 10.0, None),
        (TimeSpent(producers=0.4), 10.0, None),  # the ordinary cost of a request
        (TimeSpent(producers=4.0, server=3.0, reader=2.0), 10.0, "producers"),
        (TimeSpent(producers=1.0, server=3.0, reader=2.0), 10.0, "server"),
        (TimeSpent(producers=1.0, server=1.0, reader=2.0), 10.0, "reader"),
    ],
)
def test_the_cause_is_what_most_of_the_waiting_was_for(spent: TimeSpent, elapsed_s: float, cause: Cause | None) -> None:
    """A loop that hardly waits gets no cause, because it would look for something to fix."""
    assert verdict(spent, elapsed_s) == cause


@pytest.mark.parametrize(
    ("took_s", "in_socket_s", "created_at_s", "found"),
    [
        (3.0, 2.0, 0.0, TimeSpent(server=2.0, reader=1.0)),  # it existed when it was requested
        (3.0, 2.0, 1.5, TimeSpent(producers=1.5, server=0.5, reader=1.0)),
        (3.0, 2.0, 9.0, TimeSpent(producers=2.0, reader=1.0)),  # clocks that disagree change nothing
        (3.0, 2.0, -9.0, TimeSpent(server=2.0, reader=1.0)),
        (3.0, 2.0, None, TimeSpent(producers=2.0, reader=1.0)),  # nothing came because there was nothing
        (1.0, 2.0, 0.0, TimeSpent(server=1.0)),
        (21.0, 20.0, None, TimeSpent(producers=2.0, server=18.0, reader=1.0)),  # the server stood still
        (21.0, 20.0, 20.0, TimeSpent(producers=2.0, server=18.0, reader=1.0)),  # and its producer waited for it, too
    ],
)
def test_until_a_sample_was_made_its_producer_is_waited_for_and_from_then_on_the_server(
    took_s: float, in_socket_s: float, created_at_s: float | None, found: TimeSpent
) -> None:
    """A blocking read looks the same whether it waits for a producer or for the network."""
    clock = Clock()
    meter = ReaderTimes(clock)
    clock.now += 5
    meter.pause()
    clock.now += 7  # the trainer's time
    meter.to("server")
    before = meter.spent
    clock.now += took_s
    meter.received(in_socket_s, None if created_at_s is None else clock.now - took_s + created_at_s)
    assert meter.spent.since(before) == found
    assert before == TimeSpent(reader=5.0)


def test_a_reader_whose_request_is_not_answered_waits_for_the_server() -> None:
    """A loop that waits at the same time reports that, and sends no user to the producers' host."""
    clock = Clock()
    meter = ReaderTimes(clock)
    meter.to("producers")
    doing = []
    for seconds in (1, 2):
        clock.now += seconds
        doing.append(meter.doing)
    assert doing == ["producers", "server"]
    meter.to("reader")
    assert meter.spent == TimeSpent(server=3.0)


def one(size: int = 4) -> Batch:
    """Return a batch of ``nbytes`` bytes and ``size`` samples."""
    return Batch({"x": np.zeros(size, np.uint8)}, 0, [BatchSpan(Lease(0, 0, 0, b"", size), 0, size)])


def test_a_counter_adds_up_to_the_time_of_the_loop() -> None:
    """Steps are not waiting, the time between two iterations does not count, and the rest has a cause."""
    clock = Clock()
    counter, queue = StatsCounter(clock), PrefetchQueue(1000)
    counter.ask()
    with counter.waiting_for("producers"):
        clock.now += 2
    counter.begin(3, queue)
    queue.loop_waited = TimeSpent(producers=1.0, server=4.0)
    clock.now += 6
    counter.deliver(one())
    clock.now += 10
    counter.pause()
    clock.now += 1000
    counter.ask()
    counter.begin(3, queue)
    clock.now += 1
    counter.count(2, 1)
    counter.pause()
    stats = counter.end()
    assert (stats.epoch, stats.batches, stats.samples, stats.bytes, stats.bad_entries, stats.filled) == (
        3,
        1,
        4,
        4,
        2,
        1,
    )
    assert (stats.elapsed_s, stats.waited_s) == (19.0, 9.0)
    assert (stats.producers_s, stats.server_s, stats.reader_s) == (3.0, 4.0, 2.0)
    assert (stats.wait_share, stats.samples_per_s, stats.cause) == (9 / 19, 4 / 19, "server")
    assert counter.stats() == stats
    assert counter.stats(total=True) == stats


def test_epochs_are_told_apart_and_together() -> None:
    """A slow epoch must not hide behind the fast ones before it."""
    clock = Clock()
    counter = StatsCounter(clock)
    for epoch, seconds in enumerate((1.0, 5.0)):
        counter.ask()
        counter.begin(epoch, PrefetchQueue(10))
        clock.now += seconds
        counter.deliver(one(8))
        counter.pause()
        counter.end()
    assert (counter.stats().epoch, counter.stats().samples, counter.stats().elapsed_s) == (1, 8, 5.0)
    assert (counter.stats(total=True).samples, counter.stats(total=True).elapsed_s, counter.batches) == (16, 6.0, 2)


class TestRate:
    """Producers learn how fast the loop would be if it never waited."""

    def trained(self, counter: StatsCounter, clock: Clock, asked_s: float, trained_s: float, size: int = 8) -> None:
        """Let the loop wait for a batch, and train on it."""
        counter.ask()
        clock.now += asked_s
        counter.deliver(one(size))
        clock.now += trained_s

    def test_it_is_that_of_the_steps_alone(self) -> None:
        """A step that is under way counts once it is over, or a long one would look like a slow loop."""
        clock = Clock()
        counter = StatsCounter(clock)
        assert counter.look().rate is None
        assert counter.look().shares == {}
        self.trained(counter, clock, 6.0, 2.0)
        assert counter.look().rate is None
        assert counter.look().shares == pytest.approx({"asking": 0.75, "training": 0.25}, abs=0.1)
        counter.ask()
        assert (counter.look().rate, counter.look().samples) == (4.0, 8)
        clock.now += 30
        assert counter.look().rate == 4.0
        assert counter.look().spent_s == {"asking": 36.0, "training": 2.0}

    def test_it_goes_on_through_the_epochs(self) -> None:
        """The times of an epoch begin at 0."""
        clock = Clock()
        counter = StatsCounter(clock)
        for epoch in range(3):
            counter.begin(epoch)
            self.trained(counter, clock, 1.0, 2.0)
            counter.ask()
            counter.pause()
            counter.end()
            clock.now += 1000
            assert counter.look().rate == pytest.approx(4.0)
            assert counter.look().samples == 8 * (epoch + 1)
        assert counter.look().spent_s == {"asking": 3.0, "training": 6.0}

    def test_the_step_in_which_a_loop_is_broken_off_does_not_count(self) -> None:
        """It may have lasted no time, and a rate without end would start a fleet of workers."""
        clock = Clock()
        counter = StatsCounter(clock)
        self.trained(counter, clock, 1.0, 2.0)
        self.trained(counter, clock, 1.0, 50.0)
        counter.pause()
        self.trained(counter, clock, 1.0, 2.0)
        counter.ask()
        assert (counter.look().rate, counter.look().samples) == (4.0, 16)

    def test_the_work_on_a_batch_before_the_loop_has_it_is_no_step(self) -> None:
        """A slow `map` is no reason to start fewer workers."""
        clock = Clock()
        counter = StatsCounter(clock)

        def mapped() -> Iterator[Batch]:
            for batch in counter.counted([one(8), one(8)]):
                clock.now += 30
                yield batch

        for _ in counter.around(mapped()):
            clock.now += 2
        assert (counter.look().rate, counter.look().samples) == (4.0, 16)
        assert counter.look().spent_s == {"asking": 60.0, "training": 4.0}


def test_lines_on_an_endless_feed_do_not_flood() -> None:
    """Its epochs may be a second long."""
    clock = Clock()
    counter = StatsCounter(clock)
    said = []
    for epoch in range(100):
        counter.begin(epoch)
        counter.deliver(one())
        clock.now += 1
        counter.end()
        said.append(counter.is_due(is_feed=True))
    assert said.count(True) == 2
    assert said[0]
    assert said[int(FEED_S)]


def test_an_epoch_of_which_nothing_came_here_has_no_line() -> None:
    """Other members had all of it."""
    counter = StatsCounter(Clock())
    counter.begin(0)
    counter.end()
    assert not counter.is_due(is_feed=False)


def test_the_line_is_made_for_a_log() -> None:
    """One line: how much, how fast, how long the wait was and its cause."""
    stats = Stats(
        epoch=3, samples=50_000, bytes=7_500_000_000, elapsed_s=41.2, waited_s=15.2,
        producers_s=13.0, server_s=1.2, reader_s=1.0,
    )  # fmt: skip
    line = "50,000 samples in 41.2 s, 1,214 samples/s, 182 MB/s; waited 37 % of the time, mostly for producers"
    assert str(stats) == line
    assert summed([stats, stats]).as_dict()["cause"] == "producers"
    even = Stats(samples=10, bytes=10, elapsed_s=2.0, waited_s=1.0, producers_s=0.4, server_s=0.4, reader_s=0.2)
    assert str(even) == (
        "10 samples in 2.0 s, 5 samples/s, 5 B/s; waited 50 % of the time, "
        "for producers 40 %, the server 40 %, this process 20 %"
    )


def test_an_epoch_under_a_second_has_no_share_of_waiting() -> None:
    """A wait of 95 % of 0.05 s is the start of a connection, and would send a new user after a fault."""
    short = Stats(samples=10, bytes=10, elapsed_s=0.05, waited_s=0.0475, reader_s=0.0475)
    assert str(short) == "10 samples in 0.05 s, 200 samples/s, 200 B/s"
    assert str(Stats()) == "0 samples in 0 s, 0 samples/s, 0 B/s"


def test_the_line_says_how_many_samples_stood_in_for_bad_ones() -> None:
    """In canonical order they are repeated samples, which a count of the samples alone hides."""
    filled = Stats(samples=10, bytes=10, elapsed_s=0.05, filled=3)
    assert str(filled) == "10 samples (3 in place of bad ones) in 0.05 s, 200 samples/s, 200 B/s"
    assert str(replace(filled, elapsed_s=2.0)).startswith("10 samples (3 in place of bad ones) in 2.0 s, ")
    assert str(replace(filled, bad_entries=1)).startswith("10 samples (3 in place of bad ones) and 1 dead letter in ")


@pytest.mark.parametrize(("rate", "text"), [(999, "999 B/s"), (12_300, "12.3 kB/s"), (2.06e9, "2.06 GB/s")])
def test_rates_are_readable(rate: float, text: str) -> None:
    """A reader of the line should not have to count digits."""
    assert readable_rate(rate) == text


def test_a_dry_queue_books_its_wait_by_what_the_reader_does() -> None:
    """The trainer's thread waits, and the reader's thread knows the cause."""
    queue = PrefetchQueue(100)
    queue.reader_times.to("producers")
    threading.Timer(0.2, lambda: queue.put(one())).start()
    assert queue.get(30) is not None
    assert queue.loop_waited.producers == pytest.approx(queue.loop_waited.total)
    assert queue.loop_waited.total >= 0.1
    before = queue.loop_waited
    queue.put(one())
    assert queue.get(30) is not None
    assert queue.loop_waited == before  # nothing to wait for
