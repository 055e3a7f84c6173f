"""The Loader, on real servers: every sample once for every group, in its own memory, and no silent wait."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pytest

from penstock_common.errors import (
    EpochNotFound,
    GroupBusy,
    GroupFinished,
    GroupNotFound,
    PenstockError,
    WaitTimeout,
)
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.streams import set_plan
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, loader_of, numbers, open_stream, produce, sample


class TestDelivery:
    """Every sample reaches the right loaders."""

    def test_every_sample_comes_once_epoch_after_epoch(self, url: str) -> None:
        """One iteration is one epoch, and brings all of it."""
        produce(url, "t", 103, epochs=3)
        with loader_of(url) as loader:
            for epoch in range(3):
                batches = list(loader)
                assert sorted(numbers(batches)) == list(range(103))
                assert {batch.epoch for batch in batches} == {epoch}
                assert [batch.size for batch in batches] == [8] * 12 + [7]
            assert (loader.stats(total=True).samples, loader.stats(total=True).batches) == (309, 39)

    def test_every_group_sees_every_sample(self, any_url: str) -> None:
        """Decode once, train many: groups do not share samples."""
        produce(any_url, "t", 100, epochs=2)
        with loader_of(any_url, "a") as a, loader_of(any_url, "b", 30) as b:
            for _ in range(2):
                assert sorted(numbers(a)) == list(range(100))
                assert sorted(numbers(b)) == list(range(100))

    @pytest.mark.parametrize("partitions", [1, 3])
    def test_the_members_of_a_group_share_an_epoch(self, any_url: str, any_client: Client, partitions: int) -> None:
        """Two trainers of one group do together what one would do alone."""
        with Writer("t", url=any_url, spec=SPEC, tuning=Tuning(block_bytes=200), partitions=partitions) as writer:
            for _ in range(2):
                epoch = writer.epoch(sizes=[100] * 6)
                for number in range(6):
                    with epoch.shard(number) as shard:
                        for offset in range(100):
                            shard.write(sample(100 * number + offset))
        set_plan(any_client, open_stream(any_client, "t"), 2)
        found: dict[int, list[int]] = {0: [], 1: []}
        identities: list[tuple[int, int, int]] = []

        both_have_some = threading.Barrier(2, timeout=20)

        def train(loader: Loader) -> None:
            is_first = True
            with suppress(GroupFinished):  # a member may find that the other one has read a whole epoch
                for _ in range(2):
                    for batch in loader:
                        if is_first:
                            both_have_some.wait()
                        is_first = False
                        found[batch.epoch] += batch["y"].tolist()
                        identities.extend(batch.identities())

        settings: dict[str, Any] = {"prefetch_bytes": 1000, "batch_size": 5}
        with loader_of(any_url, member="one", **settings) as one, loader_of(any_url, member="two", **settings) as two:
            threads = [threading.Thread(target=train, args=(loader,)) for loader in (one, two)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert not both_have_some.broken
        assert sorted(found[0]) == sorted(found[1]) == list(range(600))
        assert len(set(identities)) == 1200

    def test_a_batch_names_its_samples(self, any_url: str) -> None:
        """Logs, audits and dead letters name (epoch, shard, offset)."""
        produce(any_url, "t", 30, epochs=2)
        with loader_of(any_url) as loader:
            for epoch in range(2):
                for batch in loader:
                    assert list(batch.identities()) == [(epoch, 0, number) for number in batch["y"].tolist()]
                    assert batch.size == len(batch["y"]) == len(list(batch.identities()))

    def test_ragged_tensors_and_bytes_arrive_as_written(self, any_url: str) -> None:
        """Boxes differ in number from image to image."""
        spec = {"boxes": ("float32", (None, 4)), "name": ("bytes", ()), "y": ("int64", ())}
        with Writer("t", url=any_url, spec=spec, tuning=Tuning(block_bytes=300)) as writer, writer.epoch() as epoch:
            for number in range(70):
                boxes = np.full((number % 5, 4), number, np.float32)
                epoch.write({"boxes": boxes, "name": b"n" * number, "y": number})
        with loader_of(any_url) as loader:
            seen = 0
            for batch in loader:
                for y, boxes, name in zip(batch["y"].tolist(), batch["boxes"], batch["name"], strict=True):
                    assert np.array_equal(boxes, np.full((y % 5, 4), y, np.float32))
                    assert name == b"n" * y
                    seen += 1
        assert seen == 70

    def test_going_on_after_a_break_gives_the_rest(self, any_url: str) -> None:
        """A loop that looks at one batch before training must not lose or repeat it."""
        produce(any_url, "t", 100)
        with loader_of(any_url) as loader:
            first = next(iter(loader))
            for batch in loader:
                second = batch
                break
            rest = list(loader)
        assert sorted(numbers([first, second, *rest])) == list(range(100))

    def test_the_next_process_goes_on_where_the_last_one_stopped(self, any_url: str) -> None:
        """Closing returns what was not trained on, at once and to any member."""
        produce(any_url, "t", 100, epochs=2)
        seen: list[int] = []
        for member in ("one", "two", "three"):
            with loader_of(any_url, member=member) as loader:
                began = time.monotonic()
                for batch in loader:
                    assert batch.epoch == 0
                    seen += batch["y"].tolist()
                    if member != "three" and len(seen) % 40 == 0:
                        break
                assert time.monotonic() - began < 5
        assert sorted(seen) == list(range(100))

    def test_what_an_error_in_the_loop_left_untrained_comes_again(self, any_url: str) -> None:
        """After an exception in a training step, its batch does not count as trained on."""
        produce(any_url, "t", 30)
        trained: list[int] = []
        with pytest.raises(ZeroDivisionError), loader_of(any_url) as loader:
            for number, batch in enumerate(loader):
                if number == 2:
                    raise ZeroDivisionError
                trained += batch["y"].tolist()
        with loader_of(any_url) as loader:
            trained += numbers(loader)
        assert sorted(trained) == list(range(30))

    def test_a_manual_acknowledgement_covers_what_it_is_given(self, any_url: str) -> None:
        """A user who accumulates gradients knows better than the loop when a batch is trained on."""
        produce(any_url, "t", 40)
        with loader_of(any_url, acknowledge="manual") as loader:
            batches = list(loader)
            for batch in batches[::2]:
                loader.acknowledge(batch)
        kept = sorted(numbers(batches[1::2]))
        with loader_of(any_url, acknowledge="manual") as loader:
            again = list(loader)
            assert sorted(numbers(again)) == kept
            for batch in again:
                loader.acknowledge(batch)
        with loader_of(any_url, timeout_s=0.2) as loader, pytest.raises(WaitTimeout):
            list(loader)

    def test_a_loader_may_start_before_its_producer(self, any_url: str) -> None:
        """A user need not start the processes in a certain order."""
        starter = threading.Timer(0.3, produce, (any_url, "t", 50))
        starter.start()
        with loader_of(any_url) as loader:
            assert sorted(numbers(loader)) == list(range(50))
        starter.join()

    def test_samples_come_while_their_epoch_is_still_written(self, any_url: str) -> None:
        """An epoch may take hours to produce, and training begins with its first block."""
        with Writer("t", url=any_url, spec=SPEC) as writer, loader_of(any_url, batch_size=2) as loader:
            with writer.epoch() as epoch:
                epoch.write(sample(0))
                epoch.write(sample(1))
                epoch.flush()
                batches = iter(loader)
                assert sorted(numbers([next(batches)])) == [0, 1]
                epoch.write(sample(2))
            assert numbers(batches) == [2]

    def test_samples_is_the_size_of_the_epoch_being_read(self, any_url: str) -> None:
        """Progress bars need it. len() would promise what sharing members cannot know."""
        produce(any_url, "t", 50)
        with loader_of(any_url) as loader:
            assert loader.samples == 50
            next(iter(loader))
            assert loader.samples == 50
            with pytest.raises(TypeError, match="samples"):
                len(loader)


class TestStart:
    """A group begins at the start that its first loader chose."""

    @pytest.mark.parametrize("order", [None, "canonical"])
    def test_a_new_group_beside_others_is_announced(self, any_url: str, order: Literal["canonical"] | None) -> None:
        """A misspelt group silently reads everything once more, while the intended one holds data."""
        produce(any_url, "t", 10)
        said: dict[str, list[str]] = {"resnet": [], "resnt": [], "bert": []}
        for group, lines in said.items():
            with loader_of(any_url, group, order=order, notify=lines.append):
                pass
        with loader_of(any_url, "resnt", order=order, notify=said["resnt"].append):
            pass  # the second time it exists
        there = "(there are: resnet); it starts at epoch 0"
        assert said == {
            "resnet": [],  # the first group cannot be confused with another
            "resnt": [f"new group 'resnt' {there}. Did you mean 'resnet'?"],
            "bert": ["new group 'bert' (there are: resnet, resnt); it starts at epoch 0"],
        }

    def test_a_notice_on_a_new_group_names_three_of_many_others(self, any_url: str) -> None:
        """A sweep makes a group for each trial, and the names of all the others hid other lines."""
        produce(any_url, "t", 10)
        said: list[str] = []
        for trial in range(6):
            with loader_of(any_url, f"trial-{trial}", notify=said.append):
                pass
        assert said[-1].startswith("new group 'trial-5' (there are: trial-2, trial-3, trial-4 and 2 more); it starts")
        assert not [line for line in said if "Did you mean" in line]

    @pytest.mark.parametrize("order", [None, "canonical"])
    def test_a_group_that_may_not_be_made_is_refused(
        self, any_url: str, any_client: Client, order: Literal["canonical"] | None
    ) -> None:
        """A job that should continue must not begin again under another name."""
        produce(any_url, "t", 10)
        with loader_of(any_url, "resnet", order=order):
            pass
        refused = pytest.raises(GroupNotFound, match=r"no group 'resnt'; groups there: resnet; did you mean 'resnet'\?")
        with refused, loader_of(any_url, "resnt", order=order, create=False):
            pass
        assert list(load_roster(any_client, open_stream(any_client, "t").partitions[0]).groups) == ["resnet"]
        with loader_of(any_url, "resnet", order=order, create=False) as loader:
            assert sorted(numbers(loader)) == list(range(10))

    def test_a_group_may_read_everything_again(self, any_url: str) -> None:
        """With start, a second experiment under the same name reads everything that is retained, and must acknowledge
        it again.
        """
        produce(any_url, "t", 30, epochs=3)
        with loader_of(any_url) as loader:
            assert [len(numbers(loader)) for _ in range(3)] == [30] * 3
        with loader_of(any_url, start="earliest", member="x") as loader:
            next(iter(loader))
        with loader_of(any_url, member="y") as loader:  # unacknowledged again, as the first time
            assert [len(numbers(loader)) for _ in range(3)] == [22, 30, 30]
        with loader_of(any_url, start=2, member="z") as loader:
            assert {batch.epoch for batch in loader} == {2}

    def test_a_late_group_may_start_with_the_next_epoch(self, any_url: str) -> None:
        """A learner that is started late trains on what its actors write from now on, as the page on moving says."""
        produce(any_url, "t", 30, epochs=2)
        with loader_of(any_url, "late", start=2) as loader:
            produce(any_url, "t", 30)
            assert {batch.epoch for batch in loader} == {2}

    def test_a_start_that_is_not_there_is_named(self, any_url: str) -> None:
        """A request for an epoch that was released must not read another one."""
        produce(any_url, "t", 5, epochs=2)
        with Writer("t", url=any_url, budget_bytes=60_000) as writer:
            abandoned = writer.epoch()
            for number in range(1000):
                abandoned.write(sample(number))
            abandoned.flush()
            abandoned.abandon()
        with pytest.raises(ValueError, match="latest"), loader_of(any_url, start="latest"):
            pass
        produce(any_url, "t", 2000)
        with pytest.raises(EpochNotFound, match=r"epoch 2 .* not retained"), loader_of(any_url, start=2):
            pass

    def test_a_group_is_not_reset_under_its_members(self, any_url: str) -> None:
        """A reset would make another user's training start over."""
        produce(any_url, "t", 50)
        with loader_of(any_url, member="one"), pytest.raises(GroupBusy, match="one"):
            loader_of(any_url, start="earliest", member="two").__enter__()


class TestMemory:
    """Batches are the trainer's own."""

    def test_batches_that_are_kept_keep_their_values(self, url: str) -> None:
        """Most new users try list(loader) first."""
        produce(url, "t", 2000, epochs=2, block_samples=7)
        with loader_of(url, batch_size=10, prefetch_bytes=2000) as loader:
            kept = list(loader)
            list(loader)
        assert sorted(numbers(kept)) == list(range(2000))

    def test_a_tensor_made_of_a_batch_keeps_its_values(self, any_url: str) -> None:
        """torch.from_numpy shares memory, without a sign of when it ends."""
        torch = pytest.importorskip("torch")
        produce(any_url, "t", 1000, block_samples=7)
        with loader_of(any_url, batch_size=10, prefetch_bytes=2000) as loader:
            kept = [(torch.from_numpy(batch["x"])[3:7], batch["y"][3:7].copy()) for batch in loader]
        for tensor, want in kept:
            assert tensor[:, 0].tolist() == want.tolist()

    def test_memory_that_is_let_go_is_used_again(self, any_url: str) -> None:
        """Fresh arrays cost page faults, and a trainer that keeps nothing must not grow."""
        with Writer("t", url=any_url, spec={"x": ("uint8", (50_000,))}) as writer, writer.epoch() as epoch:
            epoch.write_batch({"x": np.zeros((800, 50_000), np.uint8)})
        with loader_of(any_url, batch_size=4, prefetch_bytes=400_000) as loader:
            addresses = [batch["x"].ctypes.data for batch in loader]
        assert len(addresses) == 200
        assert len(set(addresses)) < 40

    def test_arrays_are_aligned_and_writable(self, any_url: str) -> None:
        """Frameworks take aligned arrays without a copy, and trainers normalize in place."""
        spec = {"a": ("uint8", (3,)), "b": ("float16", (5,)), "c": ("int64", ())}
        with Writer("t", url=any_url, spec=spec) as writer, writer.epoch() as epoch:
            for number in range(100):
                epoch.write({"a": np.zeros(3, np.uint8), "b": np.zeros(5, np.float16), "c": number})
        with loader_of(any_url, batch_size=7) as loader:
            for batch in loader:
                for value in batch.values():
                    assert value.ctypes.data % 64 == 0
                    assert value.flags.c_contiguous
                    assert value.flags.writeable


def test_the_progress_bar_of_notebooks_takes_a_loader(any_url: str) -> None:
    """`tqdm.auto` prefers the asynchronous form of what has one, and failed at the first batch."""
    progress = pytest.importorskip("tqdm.asyncio")
    produce(any_url, "t", 20)
    with loader_of(any_url) as loader:
        assert sum(batch.size for batch in progress.tqdm(loader, disable=True)) == 20


def test_a_loader_that_is_closed_while_it_waits_for_its_stream_ends(any_url: str, any_client: Client) -> None:
    """A program that gives up waiting closes its loader in another thread, and the wait went on for a minute."""
    loader, ended = Loader("train", group="g", batch_size=4, url=any_url), threading.Event()

    def wait() -> None:
        with pytest.raises(PenstockError, match="is closed"):
            _ = loader.spec
        ended.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not any_client.info("clients")["blocked_clients"]:
        pass
    loader.close()
    waiting.join(20)
    assert ended.is_set()
