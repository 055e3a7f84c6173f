"""The shuffle window: how well it shuffles, what it acknowledges, what it holds, and what a crash returns."""

from __future__ import annotations

import importlib
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.shuffling import interleaved, measured, windowed
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.tuning import Tuning
from penstock_common.wire.spec import Spec
from penstock_consumer.adapters.step_tracking import StepTracker
from penstock_consumer.stages.batch import ArrayPool, Batch, BatchSpan, Lease
from penstock_consumer.stages.shuffle import ShuffleWindow
from penstock_consumer.stages.stage import StageContext
from penstock_producer.sources.order import permutation
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, loader_of, numbers, produce
from tests.contracts.ordered import plan
from tests.contracts.processes import child

WINDOW = 50


def delivered(client: Client) -> int:
    """Return the samples in the group's ledgers."""
    return audit_stream(client, "t").delivered.get("g", 0)


def test_every_sample_comes_once_and_far_from_where_it_was(any_url: str, any_client: Client) -> None:
    """Neighbours in a source are similar, and a batch of them misleads training."""
    produce(any_url, "t", 500, epochs=2)
    with loader_of(any_url) as loader:
        loader.shuffle(samples=100, seed=3)
        passes = [numbers(loader), numbers(loader)]
    for found in passes:
        assert sorted(found) == list(range(500))
        assert measured(np.array(found)).displacement > 0.1
        assert np.mean(np.diff(found) == 1) < 0.05
    assert passes[0] != passes[1]
    assert delivered(any_client) == 1000
    assert audit_stream(any_client, "t").is_clean


def test_canonical_order_is_a_true_permutation_and_a_window_mixes_what_is_near() -> None:
    """docs/shuffling.md tells users to choose by these figures."""
    n = 20_000
    sorted_source, canonical = np.arange(n), measured(permutation(n, 1, 0))
    true = measured(np.random.default_rng(1).permutation(n))
    windows = [measured(windowed(sorted_source, size, 1)) for size in (20, 200, 2000, 10_000)]
    assert abs(canonical.displacement - true.displacement) < 0.01
    assert abs(canonical.labels - true.labels) < 1
    assert [one.displacement for one in windows] == sorted(one.displacement for one in windows)
    assert [one.labels for one in windows] == sorted(one.labels for one in windows)
    assert windows[2].correlation > 0.9
    assert measured(interleaved(permutation(n, 1, 0), 4)).labels > 0.97 * true.labels


def test_the_same_arrivals_and_seed_give_the_same_batches(any_url: str) -> None:
    """A single trainer on a finished epoch can repeat a run, and another seed gives another run."""
    produce(any_url, "t", 300)

    def run(group: str, seed: int) -> list[int]:
        with loader_of(any_url, group=group) as loader:
            return numbers(loader.shuffle(samples=WINDOW, seed=seed))

    assert run("a", 1) == run("b", 1)
    assert run("a2", 1) != run("c", 2)


def test_a_window_in_bytes_holds_as_many_samples_as_fit(any_url: str) -> None:
    """Users plan with memory."""
    produce(any_url, "t", 300)
    with loader_of(any_url) as loader, loader_of(any_url, group="h") as other:
        loader.shuffle(bytes=WINDOW * SAMPLE_BYTES, seed=5)
        other.shuffle(samples=WINDOW, seed=5)
        assert numbers(loader) == numbers(other)


@pytest.mark.parametrize("policy", ["on_next", "on_checkpoint", "manual"])
def test_a_sample_is_acknowledged_with_the_batch_it_left_in(policy: Any, any_url: str, any_client: Client) -> None:
    """Samples in the window have not been trained on."""
    produce(any_url, "t", 200, block_samples=7)
    with loader_of(any_url, acknowledge=policy) as loader:
        batches = iter(loader.shuffle(samples=WINDOW, seed=1))
        for step in range(1, 6):
            batch = next(batches)
            if policy == "manual":
                loader.acknowledge(batch)
            elif policy == "on_checkpoint":
                loader.checkpointed()
            loader._acknowledger.flush()
            assert delivered(any_client) == 8 * (step - (policy == "on_next"))


def test_closing_hands_back_what_the_window_holds_at_once(any_url: str, any_client: Client) -> None:
    """The next trainer need not wait for a lease, and gets exactly what was not trained on."""
    produce(any_url, "t", 200, block_samples=7)
    with loader_of(any_url, lease_s=600) as loader:
        batches = iter(loader.shuffle(samples=WINDOW, seed=1))
        first = numbers(next(batches) for _ in range(4))
    began = time.monotonic()
    with loader_of(any_url, member="other", lease_s=600) as loader:
        rest = numbers(loader)
    assert time.monotonic() - began < 5
    assert sorted(first + rest) == list(range(200))
    assert audit_stream(any_client, "t").is_clean


def test_going_on_after_a_break_loses_nothing_of_the_window(any_url: str) -> None:
    """`break` is a common statement."""
    produce(any_url, "t", 200)
    with loader_of(any_url) as loader:
        loader.shuffle(samples=WINDOW, seed=1)
        found = [numbers([next(iter(loader))]) for _ in range(3)]
        assert sorted([number for one in found for number in one] + numbers(loader)) == list(range(200))


def test_what_the_window_holds_is_renewed_for_as_long_as_it_takes(any_url: str) -> None:
    """A sample may wait in the window for much longer than a lease, and must not be given to another member."""
    produce(any_url, "t", 100, block_samples=7)
    with loader_of(any_url, member="a", lease_s=0.6) as one, loader_of(any_url, member="b", lease_s=0.6) as two:
        batches = iter(one.shuffle(samples=WINDOW, seed=1))
        found = numbers([next(batches)])
        time.sleep(1.5)  # more than two leases
        found += numbers(batches)
        assert sorted(found) == list(range(100))
        two._options = replace(two._options, timeout_s=1)
        with pytest.raises(Exception, match=r"waited|finished|has read"):
            list(two)


@pytest.mark.parametrize("policy", ["on_next", "on_checkpoint"])
def test_what_a_framework_had_read_ahead_comes_again_and_nothing_else(
    policy: Any, any_url: str, any_client: Client
) -> None:
    """An interrupted pass returns its batches, also if other samples of their entries are trained on."""
    produce(any_url, "t", 200, block_samples=7)
    with loader_of(any_url, acknowledge=policy) as loader:
        tracker = StepTracker.of(loader.shuffle(samples=WINDOW, seed=2))
        trained: list[int] = []
        for limit in (3, 1, 4, 100):
            steps = limit
            for _ in tracker.passes(is_ordered=True, is_drained=True):
                ahead: list[tuple[list[int], int]] = []
                for batch, token in tracker.batches():
                    ahead.append((batch["y"].tolist(), token))
                    if steps and len(ahead) > 5:
                        steps, (step, first) = steps - 1, ahead.pop(0)
                        tracker.arrive([first])
                        trained += step
                    if not steps:
                        break
                if not steps:
                    break
                for step, first in ahead:
                    tracker.arrive([first])
                    trained += step
        if policy == "on_checkpoint":
            loader.checkpointed()
    assert sorted(trained) == list(range(200))
    assert delivered(any_client) == 200
    assert audit_stream(any_client, "t").is_clean


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_adapters_take_a_loader_that_shuffles_and_filters(framework: str, any_url: str, any_client: Client) -> None:
    """Such a loader is a Loader, and its stages do not concern the adapters."""
    pytest.importorskip(framework)
    adapter = importlib.import_module(f"penstock.{framework}")
    produce(any_url, "t", 200, epochs=2, block_samples=7)
    with loader_of(any_url, remainder="drop") as loader:
        loader.filter(lambda batch: batch["y"] % 3 == 0).shuffle(samples=20, seed=2)
        batches = adapter.dataset(loader)
        for _ in range(2):
            found = [np.asarray(batch["y"]).tolist() for batch in batches]
            assert [len(row) for row in found] == [8] * 8
            every = [number for row in found for number in row]
            assert len(set(every)) == 64
            assert set(every) <= set(range(0, 200, 3))
            assert every != sorted(every)
    assert delivered(any_client) == 400


@pytest.mark.parametrize("partitions", [1, 4])
def test_members_with_windows_share_an_epoch(partitions: int, any_url: str, any_client: Client) -> None:
    """Each member holds a part of the epoch in its window when the last entry is given out, and none waits for the
    other's.
    """
    sizes = [100] * 8
    plan(any_url, sizes, partitions=partitions)
    found: list[list[int]] = [[], []]
    errors: list[BaseException] = []
    started = threading.Barrier(2)
    """At every step of both. It is broken when one of them has finished."""

    def run(member: int) -> None:
        try:
            with loader_of(any_url, member=f"m{member}", remainder="pad", prefetch_bytes=500) as loader:
                for batch in loader.shuffle(samples=WINDOW, seed=member):
                    found[member] += batch["y"][: batch.size].tolist()
                    with suppress(threading.BrokenBarrierError):
                        started.wait(20)
        except BaseException as error:
            errors.append(error)
        finally:
            started.abort()

    threads = [threading.Thread(target=run, args=(member,)) for member in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert min(map(len, found)) > 0
    assert sorted(found[0] + found[1]) == list(range(800))
    assert delivered(any_client) == 800
    assert audit_stream(any_client, "t").is_clean


def train(url: str, policy: str, stop_at: str) -> None:
    """Train with a shuffle window, print the batches, and stop in a step to be killed."""
    with loader_of(url, member="m", acknowledge=policy) as loader:
        for step, batch in enumerate(loader.shuffle(samples=WINDOW, seed=4), 1):
            print(*batch["y"].tolist(), flush=True)
            if policy == "on_checkpoint" and step % 4 == 0:
                loader.checkpointed()
            if step == int(stop_at):
                loader._acknowledger.flush()
                print("middle", flush=True)
                time.sleep(60)


@pytest.mark.parametrize(
    ("policy", "stop_at", "acknowledged"),
    [("on_next", 1, 0), ("on_next", 12, 11), ("on_next", 24, 23), ("on_checkpoint", 10, 8), ("on_checkpoint", 3, 0)],
)
def test_a_killed_trainer_gets_exactly_what_it_had_not_trained_on(
    policy: str, stop_at: int, acknowledged: int, any_url: str, any_client: Client
) -> None:
    """SIGKILL with a full window: its samples come again, but acknowledged samples of the same entries do not."""
    produce(any_url, "t", 200, block_samples=7)
    steps: list[list[int]] = []
    with child(train, any_url, policy, stop_at) as trainer:
        while (line := trainer.line()) != "middle":
            assert line, trainer.errors()
            steps.append([int(word) for word in line.split()])
        trainer.kill()
    assert len(steps) == stop_at
    done = [number for step in steps[:acknowledged] for number in step]
    with loader_of(any_url, member="m") as loader:
        again = numbers(loader.shuffle(samples=WINDOW, seed=4))
    assert sorted(done + again) == list(range(200))
    assert delivered(any_client) == 200
    assert audit_stream(any_client, "t").is_clean


def test_a_window_larger_than_the_budget_stops_nobody(any_url: str) -> None:
    """The writer waits for space that the window holds, and the window for more samples, so it gives those that it
    has.
    """
    block = 10 * SAMPLE_BYTES
    said: list[str] = []
    with Writer(
        "t",
        url=any_url,
        spec={"x": ("float32", (4,)), "y": ("int64", ())},
        tuning=Tuning(block_bytes=block, notify=lambda _: None),
        budget_bytes=20 * block,
    ) as writer:

        def write() -> None:
            with writer.epoch() as epoch:
                for number in range(400):
                    epoch.write({"x": np.full(4, number, np.float32), "y": number})

        thread = threading.Thread(target=write)
        with loader_of(any_url, notify=said.append) as loader:
            loader.shuffle(samples=1000, seed=1)
            thread.start()
            found = numbers(loader)
        thread.join()
    assert sorted(found) == list(range(400))


def test_memory_is_the_window_and_a_batch() -> None:
    """This holds for any length of run: samples are copied out of their batches, which are then free."""
    spec, size = Spec.of({"x": ("uint8", (10_000,))}), 16
    window = ShuffleWindow(StageContext(spec, ArrayPool(4), 0, size, False), 1, samples=64, nbytes=None)
    arrived, seen = ArrayPool(2), set()
    for number in range(200):
        values = arrived.array((size, 10_000), np.dtype(np.uint8))
        values[...] = number % 256
        seen.add(values.ctypes.data)
        lease = Lease(0, 0, 0, b"%d-1" % number, size)
        window.put(Batch({"x": values}, 0, [BatchSpan(lease, number * size, (number + 1) * size)]))
        del values
        while (batch := window.take()) is not None:
            for row, (_, _, offset) in zip(batch["x"], batch.identities(), strict=True):
                assert (row == offset // size % 256).all()
    assert len(seen) <= 2
    assert sum(store.nbytes for store in window._slots._fixed.values()) == (64 + size) * 10_000
