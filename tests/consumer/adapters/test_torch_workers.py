"""`penstock.torch` with worker processes, and under torchdata's StatefulDataLoader: the same batches in the same order.

Worker processes only read; the training process is the rank and acknowledges.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import PenstockError, StateMismatch
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import load_roster
from penstock_consumer.read.hooks import hooks_of
from tests.contracts.adapter import report_until_killed
from tests.contracts.feed import sample
from tests.contracts.ordered import plan, planned_writer, rank_of, write_shards
from tests.contracts.processes import child

torch = pytest.importorskip("torch")
stateful = pytest.importorskip("torchdata.stateful_dataloader")

from torch.utils.data import DataLoader  # noqa: E402 - only where PyTorch is

from penstock.torch import acknowledging, dataset, prefetch_to_device  # noqa: E402 - only where PyTorch is

# torchdata 0.11 sets one of PyTorch's vitals, and PyTorch 2.13 warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

SIZES, BAD = (40, 33, 30), frozenset({3, 4, 50, 102})
"""103 samples: 13 batches of 8 for one rank, the last one of 7; 5 steps for each of three."""


def labels(batches: Any) -> list[list[int]]:
    """Return the contents of each batch."""
    return [batch["y"].tolist() for batch in batches]


def made(loader: Any, workers: int = 0, kind: Any = DataLoader, **settings: Any) -> Any:
    """Return the objects of a training script."""
    return acknowledging(kind(dataset(loader), batch_size=None, num_workers=workers, **settings))


def positions(url: str, group: str = "g") -> list[int]:
    """Return the acknowledged positions of each epoch."""
    client = connect(url)
    try:
        return [one.groups[group].delivered if group in one.groups else 0 for one in audit_stream(client, "t").epochs]
    finally:
        client.close()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # PyTorch counts this machine's cores
def test_any_number_of_workers_gives_the_same_batches_in_the_same_order(any_url: str) -> None:
    """num_workers only changes the speed, and must not change what is trained on."""
    plan(any_url, SIZES, BAD, epochs=2)
    found = {}
    for workers in (0, 1, 2, 4):
        with rank_of(any_url, group=f"g{workers}") as loader:
            batches = made(loader, workers)
            found[workers] = labels(batches) + labels(batches)
            assert len(batches) == 13
        assert positions(any_url, f"g{workers}") == [sum(SIZES) - len(BAD)] * 2
    assert [len(one) for one in found[0]] == ([8] * 12 + [7]) * 2
    assert found[1] == found[2] == found[4] == found[0]


@pytest.mark.parametrize("kind", [DataLoader, stateful.StatefulDataLoader])
def test_a_collate_function_is_given_the_same_element_by_any_number_of_workers(kind: Any, any_url: str) -> None:
    """A script must not break because its author changes num_workers, whatever the function makes of a batch."""
    plan(any_url, SIZES)
    found = []
    for workers in (0, 2):
        with rank_of(any_url, group=f"g{workers}") as loader:
            batches = made(loader, workers, kind, collate_fn=lambda batch: (batch["y"] + 1, type(batch)))
            found.append([(y.tolist(), element) for y, element in batches])
        assert positions(any_url, f"g{workers}") == [sum(SIZES)]
    assert found[0] == found[1]


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_of_ranks_pad_as_the_rank_does(workers: int, any_url: str) -> None:
    """A rank with one more batch than the others hangs all of them at its last step."""
    plan(any_url, SIZES, BAD)
    for rank in range(3):
        with rank_of(any_url, rank, 3, group="plain") as loader:
            expected = labels(loader)
        with rank_of(any_url, rank, 3, group="workers") as loader:
            assert labels(made(loader, workers)) == expected
        assert len(expected) == 5


class NeedsThread:
    """An object that can be destroyed only in the process that made it, as one of TensorFlow."""

    def __init__(self) -> None:
        self.itself, self.process = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            os.kill(os.getpid(), signal.SIGSEGV)


class CollectsGarbage:
    """An object for which each process that multiprocessing forks collects garbage, before it does anything else."""

    def __init__(self) -> None:
        register_after_fork(self, lambda _: gc.collect())


def test_workers_leave_the_garbage_of_the_training_process_alone(any_url: str) -> None:
    """An iterator of tf.data that is destroyed in a fork waits for threads that do not exist there."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        gc.disable()
        try:
            NeedsThread()
            collecting = CollectsGarbage()
            assert len(labels(made(loader, 2))) == 13
            del collecting
        finally:
            gc.enable()


def test_what_lies_in_the_queues_of_workers_is_not_acknowledged(any_url: str) -> None:
    """At least four batches are read ahead. An interruption brings them again, in their place."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        batches = made(loader, 2)
        seen = []
        for steps, batch in enumerate(batches, 1):
            seen.append(batch["y"].tolist())
            hooks_of(loader).acknowledger.flush()
            assert positions(any_url) == [(steps - 1) * 8]
            if steps == 5:
                break
        seen += labels(batches)
    assert [number for one in seen for number in one] == list(range(sum(SIZES)))
    assert positions(any_url) == [sum(SIZES)]


def test_a_checkpoint_covers_what_the_loop_was_given(any_url: str) -> None:
    """This also holds with workers: `checkpointed` acknowledges the batches of the step, and the next pass continues
    after them.
    """
    plan(any_url, SIZES)
    with rank_of(any_url, acknowledge="on_checkpoint") as loader:
        batches = made(loader, 2)
        for steps, _ in enumerate(batches, 1):
            if steps == 3:
                assert positions(any_url) == [0]
                loader.checkpointed()
                assert positions(any_url) == [24]
            if steps == 5:
                break
        assert labels(batches)[0] == list(range(40, 48))
        loader.checkpointed()
    assert positions(any_url) == [sum(SIZES)]


def test_workers_whose_batches_nobody_would_acknowledge_are_refused(any_url: str) -> None:
    """The training would seem to work until the next start, which would begin at the first sample."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        with pytest.raises(PenstockError, match=r"penstock\.torch\.acknowledging"):
            next(iter(DataLoader(dataset(loader), batch_size=None, num_workers=1)))
        with pytest.raises(ValueError, match="persistent_workers"):
            made(loader, 1, persistent_workers=True)
        batches = made(loader, 1)
        loader.filter(lambda batch: batch["y"] % 2 == 0)
        with pytest.raises(ValueError, match="num_workers=0"):
            next(iter(batches))
        assert [number for one in labels(made(loader)) for number in one] == list(range(0, sum(SIZES), 2))


def test_workers_may_wait_for_the_producer(any_url: str) -> None:
    """A training starts before its first sample is made, and is faster than its producer at every step."""

    def write() -> None:
        with planned_writer(any_url) as writer:
            for _ in range(2):
                write_shards(writer.epoch(sizes=list(SIZES)), range(len(SIZES)), SIZES, frozenset())

    writing = threading.Thread(target=write)
    with rank_of(any_url) as loader:
        threading.Timer(0.5, writing.start).start()
        batches = made(loader, 2)
        assert [number for one in labels(batches) for number in one] == list(range(sum(SIZES)))
        assert [number for one in labels(batches) for number in one] == list(range(sum(SIZES)))
    writing.join(20)
    assert positions(any_url) == [sum(SIZES)] * 2


def train_until_killed(url: str) -> None:
    """Train with two workers."""
    with rank_of(url) as loader:
        report_until_killed(batch["y"].tolist() for batch in made(loader, 2))


def test_a_killed_training_goes_on_at_its_first_unacknowledged_batch(any_url: str) -> None:
    """SIGKILL of the training process: what its workers had read ahead comes again, and the workers end."""
    plan(any_url, SIZES)
    with child(train_until_killed, any_url) as trainer:
        trained = [int(number) for _ in range(4) for number in trainer.line().split()]
        trained += [int(number) for line in trainer.kill() for number in line.split()]
    with rank_of(any_url) as loader:
        again = [number for one in labels(made(loader, 1)) for number in one]
    assert trained == list(range(len(trained)))
    assert again == list(range(sum(SIZES)))[-len(again) :]
    assert len(trained) + len(again) >= sum(SIZES)
    assert len(again) <= sum(SIZES) - 3 * 8


@pytest.mark.slow
def test_workers_that_are_spawned_get_values_alone(any_url: str) -> None:
    """Newer Pythons do not fork, and a connection, a thread or a lock cannot be sent to a process."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        batches = made(loader, 1, multiprocessing_context="spawn")
        assert [number for one in labels(batches) for number in one] == list(range(sum(SIZES)))


def test_a_forked_process_that_ends_leaves_the_group_alone(any_url: str) -> None:
    """A worker has a copy of the loader. Dropping it there must not make the training process leave the group."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        seen = next(iter(loader))["y"].tolist()
        if (pid := os.fork()) == 0:
            loader._closing()
            os._exit(0)
        os.waitpid(pid, 0)
        client = connect(any_url)
        assert ("g", "rank-0") in load_roster(client, loader.stream.partitions[0]).members
        client.close()
        seen += [number for batch in loader for number in batch["y"].tolist()]
    assert seen == list(range(sum(SIZES)))


# --- state ------------------------------------------------------------------------------------------------------------


WAYS: dict[str, Callable[[Any], Any]] = {
    "dataset": dataset,
    "StatefulDataLoader": lambda loader: stateful.StatefulDataLoader(dataset(loader), batch_size=None),
    "acknowledging": lambda loader: made(loader),
    "workers": lambda loader: made(loader, 2),
    "stateful workers": lambda loader: made(loader, 4, stateful.StatefulDataLoader),
    "device": lambda loader: prefetch_to_device(dataset(loader), "cpu"),
    "device workers": lambda loader: prefetch_to_device(
        stateful.StatefulDataLoader(dataset(loader), batch_size=None, num_workers=2), "cpu"
    ),
    "few snapshots": lambda loader: made(loader, 2, stateful.StatefulDataLoader, snapshot_every_n_steps=3),
    "no snapshot": lambda loader: made(loader, 2, stateful.StatefulDataLoader, snapshot_every_n_steps=20),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_state_goes_on_exactly_where_it_was_taken(way: str, any_url: str) -> None:
    """It runs in a new process, whatever was trained on after the checkpoint: at the start, in the middle, at both
    ends.
    """
    plan(any_url, SIZES, BAD, epochs=3)
    with rank_of(any_url, group="whole") as loader:
        whole = [labels(loader), labels(loader)]
    states: dict[int, Any] = {}
    with rank_of(any_url) as loader:
        batches = WAYS[way](loader)
        states[0] = batches.state_dict()
        for steps, _ in enumerate(batches, 1):
            states[steps] = json.loads(json.dumps(batches.state_dict()))
        states[14] = batches.state_dict()  # after the loop has seen the end
    for steps in (0, 6, 13, 14):
        assert len(json.dumps(states[steps])) < 4096
        with rank_of(any_url) as loader:
            batches = WAYS[way](loader)
            batches.load_state_dict(states[steps])
            assert batches.state_dict().keys() == states[steps].keys()
            rest = [whole[0][steps:]] if steps < 14 else []
            assert [labels(batches) for _ in range(len(rest) + 1)] == [*rest, whole[1]]


EPOCH = 1000
"""Sample p of epoch e is e * EPOCH + p, for tests that must tell epochs apart."""


def plan_epochs(url: str, count: int) -> None:
    """Write epochs that have no sample in common."""
    with planned_writer(url) as writer:
        for number in range(count):
            epoch = writer.epoch(sizes=list(SIZES))
            for shard, size in enumerate(SIZES):
                start = number * EPOCH + sum(SIZES[:shard])
                with epoch.shard(shard) as one:
                    for label in range(start, start + size):
                        one.write(sample(label))


def numbers_of(epoch: int) -> list[int]:
    """Return the numbers of a whole pass over an epoch of `plan_epochs`."""
    return list(range(epoch * EPOCH, epoch * EPOCH + sum(SIZES)))


def one_pass(batches: Any) -> list[int]:
    """Return the numbers of the samples of one pass."""
    return [number for one in labels(batches) for number in one]


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_state_taken_after_the_loop_begins_the_next_epoch(way: str, any_url: str) -> None:
    """The usual checkpoint is written at the end of an epoch, and resuming from it must not repeat that epoch."""
    plan_epochs(any_url, 3)
    states = []
    with rank_of(any_url) as loader:
        batches = WAYS[way](loader)
        for epoch in range(2):
            assert one_pass(batches) == numbers_of(epoch)
            states.append(json.loads(json.dumps(batches.state_dict())))
    for epoch, state in enumerate(states, 1):
        with rank_of(any_url) as loader:
            batches = WAYS[way](loader)
            batches.load_state_dict(state)
            assert [one_pass(batches) for _ in range(epoch, 3)] == [numbers_of(number) for number in range(epoch, 3)]
    assert positions(any_url) == [sum(SIZES)] * 3


@pytest.mark.parametrize("kind", [DataLoader, stateful.StatefulDataLoader])
def test_a_state_with_the_last_batch_leaves_an_empty_pass_and_then_the_next_epoch(kind: Any, any_url: str) -> None:
    """A loop over epochs counts its passes: the interrupted pass ends, though it has nothing left to give."""
    plan_epochs(any_url, 2)
    with rank_of(any_url) as loader:
        batches = made(loader, 2, kind)
        for _ in batches:
            state = batches.state_dict()
    with rank_of(any_url) as loader:
        batches = made(loader, 2, kind)
        batches.load_state_dict(state)
        assert one_pass(batches) == []
        after = batches.state_dict()
        assert one_pass(batches) == numbers_of(1)
        batches.load_state_dict(after)
        assert one_pass(batches) == numbers_of(1)


def test_a_state_after_the_last_epoch_waits_for_no_producer(any_url: str) -> None:
    """A checkpoint at the end of a training, or while the next epoch is being made, must not wait."""
    plan_epochs(any_url, 1)
    with rank_of(any_url, timeout_s=30) as loader:
        batches = made(loader, 2, stateful.StatefulDataLoader)
        assert one_pass(batches) == numbers_of(0)
        loader._options = replace(loader._options, timeout_s=0.1)
        state = batches.state_dict()
    with rank_of(any_url) as loader:
        batches = made(loader, 2, stateful.StatefulDataLoader)
        batches.load_state_dict(state)
        loader._options = replace(loader._options, timeout_s=0.1)
        assert batches.state_dict() == state
        loader._options = replace(loader._options, timeout_s=30)
        with planned_writer(any_url) as writer:
            write_shards(writer.epoch(sizes=list(SIZES)), range(len(SIZES)), SIZES, frozenset())
        assert one_pass(batches) == list(range(sum(SIZES)))


def test_a_loaded_state_counts_more_than_one_that_was_asked_for_before(any_url: str) -> None:
    """Frameworks read a fresh loader's state before they load the checkpoint's state into it."""
    plan_epochs(any_url, 2)
    with rank_of(any_url) as loader:
        batches = made(loader, 2, stateful.StatefulDataLoader)
        for steps, _ in enumerate(batches, 1):
            if steps == 5:
                state = batches.state_dict()
    with rank_of(any_url) as loader:
        batches = made(loader, 2, stateful.StatefulDataLoader)
        fresh = batches.state_dict()
        batches.load_state_dict(state)
        assert batches.state_dict() == state
        assert [one_pass(batches), one_pass(batches)] == [numbers_of(0)[40:], numbers_of(1)]
        batches.load_state_dict(fresh)
        assert one_pass(batches) == numbers_of(1)


def train_with_checkpoints(url: str, file: str, workers: str, stop: str) -> None:
    """Save the state every other step and report it to the loader. In step ``stop`` it waits to be killed."""
    with rank_of(url, acknowledge="on_checkpoint") as loader:
        batches = made(loader, int(workers), stateful.StatefulDataLoader)
        for steps, _ in enumerate(batches, 1):
            if steps % 2 == 0:
                Path(file + ".new").write_text(json.dumps([steps, batches.state_dict()]))
                Path(file + ".new").rename(file)
                loader.checkpointed()
            if steps == int(stop):
                sys.stdout.write("here\n")
                sys.stdout.flush()
                signal.pause()


@pytest.mark.parametrize(("killed_after", "workers"), [(2, 2), (7, 0), (7, 2), (12, 2)])
def test_a_killed_training_goes_on_exactly_at_its_checkpoint(
    killed_after: int, workers: int, any_url: str, tmp_path: Path
) -> None:
    """At 10, 50 and 90 % of an epoch, the batches are those of an uninterrupted run."""
    plan(any_url, SIZES, BAD, epochs=2)
    with rank_of(any_url, group="whole") as loader:
        whole = labels(loader) + labels(loader)
    file = tmp_path / "state.json"
    with child(train_with_checkpoints, any_url, file, workers, killed_after) as trainer:
        assert trainer.line() == "here"
        trainer.kill()
    steps, state = json.loads(file.read_text())
    with rank_of(any_url, acknowledge="on_checkpoint") as loader:
        batches = made(loader, workers, stateful.StatefulDataLoader)
        batches.load_state_dict(state)
        assert labels(batches) + labels(batches) == whole[steps:]
        loader.checkpointed()
    assert steps == killed_after // 2 * 2
    assert positions(any_url) == [sum(SIZES) - len(BAD)] * 2


def test_a_state_of_a_dataset_fits_any_number_of_workers(any_url: str) -> None:
    """A run that goes on on another host has another number of cores."""
    plan(any_url, SIZES, BAD)
    with rank_of(any_url) as loader:
        batches = made(loader, 2)
        first = []
        for batch in batches:
            first.append(batch["y"].tolist())
            if len(first) == 4:
                state = batches.dataset.state_dict()
                break
    with rank_of(any_url) as loader:
        batches = made(loader, 1)
        batches.dataset.load_state_dict(state)
        rest = labels(batches)
    with rank_of(any_url, group="whole") as loader:
        assert first + rest == labels(loader)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize(("saved", "now"), [(2, 3), (3, 2), (0, 2), (2, 0)])
def test_a_state_of_another_number_of_workers_is_refused_in_words(saved: int, now: int, any_url: str) -> None:
    """A StatefulDataLoader ends in an AssertionError without a text, at the first batch."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        batches = made(loader, saved, stateful.StatefulDataLoader)
        running = iter(batches)
        next(running)
        next(running)
        state, portable = batches.state_dict(), batches.dataset.state_dict()
        rest = next(running)["y"].tolist()
    refused = (
        f"this state has num_workers {saved}, the loader {now}: use num_workers={saved}, or .* dataset's own state"
    )
    with rank_of(any_url) as loader:
        batches = made(loader, now, stateful.StatefulDataLoader)
        with pytest.raises(StateMismatch, match=refused):
            batches.load_state_dict(state)
        batches.batches.load_state_dict(state)
        if now:
            with pytest.raises(StateMismatch, match=refused):
                next(iter(batches))
        batches = made(loader, now, stateful.StatefulDataLoader)
        batches.dataset.load_state_dict(portable)
        assert next(iter(batches))["y"].tolist() == rest


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_a_state_of_the_end_of_an_epoch_fits_any_number_of_workers(any_url: str) -> None:
    """The next pass begins anew, so nothing of the workers is resumed."""
    plan_epochs(any_url, 2)
    with rank_of(any_url) as loader:
        batches = made(loader, 2, stateful.StatefulDataLoader)
        assert one_pass(batches) == numbers_of(0)
        state = batches.state_dict()
    with rank_of(any_url) as loader:
        batches = made(loader, 3, stateful.StatefulDataLoader)
        batches.load_state_dict(state)
        assert one_pass(batches) == numbers_of(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_another_stream_is_refused(workers: int, any_url: str) -> None:
    """A checkpoint applied to another dataset trains on, silently, somewhere in it."""
    plan(any_url, SIZES)
    with rank_of(any_url, group="g") as loader:
        batches = made(loader, workers, stateful.StatefulDataLoader)
        next(iter(batches))
        state = batches.state_dict()
    with rank_of(any_url, group="h") as loader:
        batches = made(loader, workers, stateful.StatefulDataLoader)
        with pytest.raises(StateMismatch, match="group"):
            batches.load_state_dict(state)
            next(iter(batches))


def test_batches_of_workers_reach_a_device_by_the_same_line(any_url: str) -> None:
    """prefetch_to_device is what acknowledges, then."""
    plan(any_url, SIZES)
    with rank_of(any_url) as loader:
        source = DataLoader(dataset(loader, select="y"), batch_size=None, num_workers=2)
        numbers = [number for y in prefetch_to_device(source, "cpu") for number in y.tolist()]
    assert numbers == list(range(sum(SIZES)))
    assert positions(any_url) == [sum(SIZES)]
