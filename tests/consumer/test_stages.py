"""Stages: what each does to any batches, and what is acknowledged when, on a server."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_consumer.read.leases import plan_acknowledgement
from penstock_consumer.stages.batch import Batch, BatchSpan, Lease
from penstock_consumer.stages.filter import Filter
from penstock_consumer.stages.queue import STARVED_S, PrefetchQueue, StageChain, stages_of
from penstock_consumer.stages.rebatch import Rebatch
from penstock_consumer.stages.shuffle import ShuffleWindow
from penstock_consumer.stages.stage import Stage, StageContext, StageMaker
from tests.contracts.feed import loader_of, numbers, produce
from tests.contracts.ordered import plan, rank_of
from tests.contracts.processes import child
from tests.contracts.stage import BATCH, EPOCH, StageContract, arrivals, checked, made, setting, sizes, through


def thirds(batch: Batch) -> Any:
    """Keep every third sample."""
    return batch["x"][:, 0] % 3 == 0


class TestFilter(StageContract):
    """Leaving samples out."""

    def stage(self, where: StageContext) -> Stage:
        """Return a filter that leaves two of three samples out."""
        return Filter(where, thirds)

    def test_only_what_is_wanted_is_handed_out(self) -> None:
        """Unwanted samples count as trained on, without their arrays."""

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            for batch in through(self.stage(setting()), arrivals(counts)):
                wanted = {number % 3 == 0 for _, _, number in checked(batch)}
                assert wanted == {not batch.is_dropped}

        holds()

    @pytest.mark.parametrize("answer", [True, [1, 0], np.zeros(3, bool), [[True]]])
    def test_an_answer_that_fits_no_batch_is_refused_in_one_line(self, answer: Any) -> None:
        """A predicate of one sample is the likely mistake, and numpy would apply it to all of them."""
        with pytest.raises(ValueError, match="expected one bool for each"):
            Filter(setting(), lambda _: answer).put(made(0, 2))


class TestRebatchKeep(StageContract):
    """Batches of one size."""

    def stage(self, where: StageContext) -> Stage:
        """Return a stage whose last batch may be smaller."""
        return Rebatch(where, "keep")

    def test_all_but_the_last_are_full_and_in_order(self) -> None:
        """Compiled steps have a fixed shape."""

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            found = through(self.stage(setting()), arrivals(counts))
            assert [batch.size for batch in found[:-1]] == [BATCH] * len(found[:-1])
            assert [number for batch in found for _, _, number in checked(batch)] == list(range(sum(counts)))

        holds()

    def test_full_batches_pass_without_a_copy(self) -> None:
        """Equal sizes cost time for unequal batches only."""
        batches = arrivals([BATCH, BATCH])
        assert [one["x"] is two["x"] for one, two in zip(through(self.stage(setting()), batches), batches, strict=True)]
        assert through(self.stage(setting()), batches) == batches


class TestRebatchDrop(StageContract):
    """Dropping rows that fill no batch."""

    def stage(self, where: StageContext) -> Stage:
        """Return a stage that drops its last batch."""
        return Rebatch(where, "drop")

    def test_every_batch_is_full(self) -> None:
        """Dropped samples count as trained on, or the epoch would never close."""

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            found = through(self.stage(setting()), arrivals(counts))
            assert [batch.size for batch in found if not batch.is_dropped] == [BATCH] * (sum(counts) // BATCH)
            assert sum(batch.size for batch in found if batch.is_dropped) == sum(counts) % BATCH

        holds()


class TestRebatchPad(StageContract):
    """Filling the last batch up."""

    def stage(self, where: StageContext) -> Stage:
        """Return a stage that repeats the first rows."""
        return Rebatch(where, "pad")

    def test_every_batch_has_the_same_rows(self) -> None:
        """Its size tells how many of its rows are samples.

        The others are repeated, and must be left out of the loss.
        """

        @settings(deadline=None)
        @given(sizes)
        def holds(counts: list[int]) -> None:
            found = through(self.stage(setting()), arrivals(counts))
            assert all(len(batch["x"]) == len(batch["r"]) == BATCH for batch in found)
            assert sum(batch.size for batch in found) == sum(counts)

        holds()

    def test_a_batch_that_loses_rows_on_its_last_metres_keeps_its_shape(self) -> None:
        """A member that stood still loses leases after a batch was made."""
        (batch,) = through(self.stage(setting()), arrivals([4, 4]))
        batch.spans[0].lease.is_lost = True
        left = batch.without_lost()
        assert left is not None
        assert [number for _, _, number in checked(left)] == [4, 5, 6, 7]
        assert len(left["x"]) == BATCH


class TestWindow(StageContract):
    """A window in samples."""

    def stage(self, where: StageContext) -> Stage:
        """Return a window of three batches."""
        return ShuffleWindow(where, 7, samples=3 * BATCH, nbytes=None)

    def test_batches_stay_full_where_entries_were_lost(self) -> None:
        """After an interrupted pass, half of the window may be gone, and drawing continues until a batch is full."""
        batches = arrivals([BATCH] * 9)
        window = self.stage(setting())
        for batch in batches[:3]:
            window.put(batch)
        batches[0].spans[0].lease.is_lost = batches[2].spans[0].lease.is_lost = True
        window.end()
        found = window.take()
        assert found is not None
        assert sorted(checked(found)) == list(batches[1].identities())
        assert window.take() is None


class TestWindowInBytes(StageContract):
    """A window in bytes, of samples of different sizes."""

    def stage(self, where: StageContext) -> Stage:
        """Return a window of about twenty samples."""
        return ShuffleWindow(where, 7, samples=None, nbytes=400)


@settings(deadline=None)
@given(sizes)
def test_stages_behind_one_another_lose_nothing(counts: list[int]) -> None:
    """A loader that filters, shuffles and drops its last batch has these stages."""
    makers: list[StageMaker] = [lambda s: Filter(s, thirds), lambda s: ShuffleWindow(s, 1, samples=10, nbytes=None)]
    found = through(stages_of(setting(), makers, "drop"), arrivals(counts))
    handed = [number for batch in found if not batch.is_dropped for _, _, number in checked(batch)]
    assert all(number % 3 == 0 for number in handed)
    assert len(handed) == len(range(0, sum(counts), 3)) // BATCH * BATCH
    every = [number for batch in found for _, _, number in batch.identities()]
    assert sorted(every) == list(range(sum(counts)))


@settings(deadline=None)
@given(st.permutations(range(40)), st.lists(st.integers(1, 7), min_size=40, max_size=40))
def test_samples_acknowledged_in_any_order_acknowledge_their_entry_once(order: list[int], cuts: list[int]) -> None:
    """A shuffled batch has single samples of many entries, and the last sample of an entry acknowledges all of it."""
    leases = [Lease(0, EPOCH, 0, b"%d-1" % first, 10) for first in range(0, 40, 10)]
    spans = [BatchSpan(leases[number // 10], number, number + 1) for number in order]
    acknowledged: set[int] = set()
    ids: list[bytes] = []
    while spans:
        count = cuts.pop()
        taken, spans = spans[:count], spans[count:]
        acknowledged |= {span.lo for span in taken}
        (due,) = plan_acknowledgement(Batch({}, EPOCH, taken)).values()
        bits = {bit for lo, hi in due.ranges[0] for bit in range(lo, hi)}
        assert bits <= acknowledged
        assert {span.lo for span in taken} <= bits
        ids += due.ids
        assert set(due.ids) == {one.entry_id for one in leases if one.unacknowledged == 0} - set(
            ids[: -len(due.ids) or None]
        )
        for lease in leases:
            if lease.entry_id in due.ids:
                first = int(lease.entry_id.split(b"-")[0])
                assert set(range(first, first + 10)) <= bits
    assert sorted(ids) == sorted(lease.entry_id for lease in leases)


def test_a_window_gives_what_it_has_where_nothing_comes() -> None:
    """Writers may wait for the space of the window's samples, and then both would wait for ever."""
    now = [0.0]
    queue = PrefetchQueue(1 << 30)
    window = ShuffleWindow(setting(), 1, samples=1000, nbytes=None)
    staged = StageChain(queue, [window], clock=lambda: now[0])
    for batch in arrivals([8, 8, 3]):
        queue.put(batch)
    assert staged.get(0) is None
    assert staged.waiting() == "the shuffle window to fill: it holds 19 of 1000 samples"
    now[0] = STARVED_S
    found = [staged.get(0), staged.get(0), staged.get(0)]
    assert [None if batch is None else batch.size for batch in found] == [8, 8, None]  # no partial batch


def test_a_long_step_is_no_hunger() -> None:
    """Only a waiting trainer is starved: after a step of minutes the window is filled again before it gives a batch."""
    now = [0.0]
    queue = PrefetchQueue(1 << 30)
    staged = StageChain(queue, [ShuffleWindow(setting(), 1, samples=16, nbytes=None)], clock=lambda: now[0])
    for batch in arrivals([8, 8, 8]):
        queue.put(batch)
    assert [staged.get(0) is None for _ in range(2)] == [False, False]
    now[0] = 100
    assert staged.get(0) is None
    now[0] += STARVED_S
    assert staged.get(0) is not None


def test_an_error_of_the_reader_comes_through() -> None:
    """Stages must not hide why an epoch ended early."""
    queue = PrefetchQueue(1 << 30)
    staged = StageChain(queue, [ShuffleWindow(setting(), 1, samples=100, nbytes=None)])
    queue.put(made(0, 4))
    queue.end(OSError("broken"))
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            staged.get(0)
    assert not staged.is_over


# --- on a server ------------------------------------------------------------------------------------------------------


def third(batch: Batch) -> Any:
    """Keep every third number."""
    return batch["y"] % 3 == 0


def delivered(client: Client, group: str = "g") -> int:
    """Return the samples in the group's ledgers."""
    return audit_stream(client, "t").delivered.get(group, 0)


class TestLoaders:
    """Loaders with a selection of samples."""

    def test_what_a_filter_leaves_out_counts_as_trained_on_at_once(self, any_url: str, any_client: Client) -> None:
        """Otherwise a filtered epoch would never close, and a filter that keeps little would fill the budget."""
        produce(any_url, "t", 100, epochs=2)
        with loader_of(any_url) as loader:
            batches = iter(loader.filter(third))
            first = next(batches)
            assert numbers([first]) == [0, 3, 6, 9, 12, 15, 18, 21]
            loader._acknowledger.flush()
            assert delivered(any_client) == 16  # 0 to 23, without those of the batch in hand
            assert numbers(batches) == list(range(24, 100, 3))
            assert numbers(loader) == list(range(0, 100, 3))
        assert delivered(any_client) == 200
        assert audit_stream(any_client, "t").is_clean

    def test_a_filter_that_wants_nothing_still_closes_the_epoch(self, any_url: str, any_client: Client) -> None:
        """The next epoch follows, as after an empty one."""
        produce(any_url, "t", 30)
        with loader_of(any_url, timeout_s=2) as loader, pytest.raises(Exception, match="has read epoch 0"):
            list(loader.filter(lambda batch: batch["y"] < 0))
        assert delivered(any_client) == 30

    @pytest.mark.parametrize("policy", ["manual", "on_checkpoint"])
    def test_a_filter_keeps_to_the_policy(self, policy: Any, any_url: str, any_client: Client) -> None:
        """With 'manual', only yielded samples can be acknowledged. With checkpoints, all wait for the checkpoint."""
        produce(any_url, "t", 60)
        with loader_of(any_url, acknowledge=policy) as loader:
            batches = list(loader.filter(third))
            loader._acknowledger.flush()
            assert delivered(any_client) == (40 if policy == "manual" else 0)
            for batch in batches:
                if policy == "manual":
                    loader.acknowledge(batch)
            if policy == "on_checkpoint":
                loader.checkpointed()
        assert delivered(any_client) == 60

    @pytest.mark.parametrize(("remainder", "rows"), [("keep", 4), ("drop", None), ("pad", 8)])
    def test_the_last_batch_of_shared_reading_is_as_the_remainder_says(
        self, remainder: Any, rows: int | None, any_url: str, any_client: Client
    ) -> None:
        """Compiled steps have one shape, and in each case every sample is accounted for."""
        produce(any_url, "t", 100)
        with loader_of(any_url, remainder=remainder) as loader:
            found = [len(batch["y"]) for batch in loader]
        assert found == [8] * 12 + ([] if rows is None else [rows])
        assert delivered(any_client) == 100

    def test_ordered_reading_may_leave_out_samples_and_resumes_exactly(self, any_url: str, any_client: Client) -> None:
        """Positions stay those of the epoch, so resuming does not change."""
        plan(any_url, [50, 50])
        with rank_of(any_url, group="whole") as loader:
            whole = [batch["y"].tolist() for batch in loader.filter(third)]
        assert [number for batch in whole for number in batch] == list(range(0, 100, 3))
        with rank_of(any_url, acknowledge="on_checkpoint") as loader:
            batches = iter(loader.filter(third))
            begun = [next(batches)["y"].tolist() for _ in range(5)]
            state = loader.state_dict()
            next(batches)
        with rank_of(any_url) as loader:
            loader.filter(third)
            loader.load_state_dict(state)
            assert begun + [batch["y"].tolist() for batch in loader] == whole

    def test_ordered_reading_drops_batches_of_which_nothing_is_wanted(self, any_url: str, any_client: Client) -> None:
        """An empty batch is not a step, and its position is acknowledged in its turn."""
        plan(any_url, [100])
        with rank_of(any_url) as loader:
            found = [batch["y"].tolist() for batch in loader.filter(lambda batch: batch["y"] >= 90)]
        assert found == [[90, 91, 92, 93, 94, 95], [96, 97, 98, 99]]
        assert audit_stream(any_client, "t").epochs[0].groups["g"].delivered == 100

    def test_what_cannot_be_is_refused_where_it_is_said(self, any_url: str) -> None:
        """Otherwise a promise of ordered reading would be broken silently, or a stage would begin within an epoch."""
        plan(any_url, [20])
        with rank_of(any_url, world=2) as loader, pytest.raises(ValueError, match=r"different numbers .*\(a generator"):
            loader.filter(third)
        with rank_of(any_url, group="h") as loader, pytest.raises(ValueError, match="seeded permutation already"):
            loader.shuffle(samples=10)
        with loader_of(any_url, group="i") as loader:
            next(iter(loader))
            with pytest.raises(ValueError, match="before its first batch"):
                loader.filter(third)
            with pytest.raises(ValueError, match="expected one of them"):
                loader.shuffle()


def train_filtered(url: str) -> None:
    """Train, and stop in the third step."""
    with loader_of(url, member="m") as loader:
        for step, batch in enumerate(loader.filter(third)):
            print(*batch["y"].tolist(), flush=True)
            if step == 2:
                loader._acknowledger.flush()
                print("middle", flush=True)
                time.sleep(60)


def test_a_killed_trainer_gets_of_what_was_filtered_only_the_wanted_again(any_url: str, any_client: Client) -> None:
    """SIGKILL between two batches of a filtered epoch: wanted samples that no step has finished come again."""
    produce(any_url, "t", 100, block_samples=7)
    steps: list[list[int]] = []
    with child(train_filtered, any_url) as trainer:
        while (line := trainer.line()) != "middle":
            assert line, trainer.errors()
            steps.append([int(word) for word in line.split()])
        trainer.kill()
    with loader_of(any_url, member="m") as loader:
        again = numbers(loader.filter(third))
    assert sorted(steps[0] + steps[1] + again) == list(range(0, 100, 3))
    assert delivered(any_client) == 100
    assert audit_stream(any_client, "t").is_clean
