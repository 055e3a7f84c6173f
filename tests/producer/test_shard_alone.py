"""A shard's writer on its own: it hands blocks to a committer, which only takes notes here."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock_common.errors import BudgetFull, PenstockError, ServerUnavailable, ShardMismatch
from penstock_common.wire.block import Block
from penstock_common.wire.limits import MAX_HOLES
from penstock_common.wire.spec import Spec
from penstock_producer.write.commit import Committer, ShardTaken
from penstock_producer.write.reserve import memory_for
from penstock_producer.write.shard import (
    FIRST_LINGER_S,
    LINGER_S,
    MAX_BLOCK_SAMPLES,
    ShardSlot,
    ShardWriter,
    _Copied,
    _tell_lost,
)

SPEC = Spec.of({"y": ("int64", ())})
BLOCK_BYTES = 4 * 8


class Notes:
    """A committer that notes what it is given, and can refuse it."""

    def __init__(self, position: int = 0) -> None:
        """Begin behind what an earlier run committed."""
        self.position = position
        self.left_out = 0
        self.blocks: list[tuple[int, list[int], Mapping[int, str]]] = []
        """First offset, samples and the reasons of its holes, of each block."""
        self.calls: list[str] = []
        self.errors: list[Exception] = []
        """The errors of the next calls."""
        self.sent: list[tuple[Block, Mapping[int, str]]] = []
        self.dropped: list[Block] = []
        self.places = 0
        """The number of requests for memory of a segment."""
        self.during: Callable[[], None] = lambda: None
        """The action of another thread during a commit."""

    def commit(self, block: Block, bad: Mapping[int, str]) -> None:
        """See Committer."""
        self.during()
        if self.errors:
            raise self.errors.pop(0)
        samples = [int(value) for value in block.columns[0].values] if block.count else []
        self.blocks.append((block.first, samples, bad))
        self.sent.append((block, bad))
        self.position = block.end

    def commit_all(self) -> None:
        """See Committer."""
        self.calls.append("commit_all")
        if self.errors:
            raise self.errors.pop(0)

    def require_whole(self, end: int) -> None:
        """See Committer."""
        self.calls.append(f"require_whole({end})")
        if self.errors:
            raise self.errors.pop(0)

    def finish(self) -> None:
        """See Committer."""
        self.calls.append("finish")

    def close(self) -> None:
        """See Committer."""
        self.calls.append("close")

    def place(self, _: int) -> None:
        """See Committer. There are no segments."""
        self.places += 1

    def reserve(self, spec: Spec, count: int) -> NDArray[np.uint8]:
        """See Committer."""
        return memory_for(spec, count)

    def drop_reserved(self, block: Block) -> None:
        """See Committer."""
        self.dropped.append(block)

    def blocks_to_move(self) -> list[tuple[Block, Mapping[int, str]]]:
        """See Committer."""
        return self.sent


def shard_of(notes: Notes, size: int | None, *, spec: Spec = SPEC, **settings: Any) -> ShardWriter:
    """Return a writer of shard 3, which declares its end to the notes."""
    given = {"finish": lambda end: notes.calls.append(f"finish({end})"), "clock": lambda: 0.0, **settings}
    return ShardWriter(cast("Committer", notes), spec, block_bytes=BLOCK_BYTES, shard=3, size=size, **given)


def write(shard: ShardWriter, upto: int) -> None:
    """Write samples that are their own offsets."""
    while shard.position < upto:
        shard.write({"y": shard.position})


def rows(count: int, start: int = 0) -> dict[str, Any]:
    """Return samples as columns."""
    return {"y": np.arange(start, start + count)}


def full() -> BudgetFull:
    """Return the error of a committer that finds no space."""
    return BudgetFull("no space")


def taken() -> ShardTaken:
    """Return the error of a committer whose shard is another writer's."""
    return ShardTaken("another writer's")


def refused(error: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    """Require an error."""
    with pytest.raises(error, match=words):
        call()


def test_a_shard_is_numbered_blocks_and_one_end() -> None:
    """Trainers find each sample by its offset, and wait for the end."""
    notes = Notes()
    with shard_of(notes, 11) as shard:
        write(shard, 6)
        shard.write_batch(rows(5, 6))
        assert shard.is_over
        assert shard.committed == 11
    assert notes.blocks == [(0, [0, 1, 2, 3], {}), (4, [4, 5, 6, 7], {}), (8, [8, 9, 10], {})]
    assert notes.calls == ["commit_all", "require_whole(11)", "finish(11)", "finish"]
    assert shard.bytes_written == 11 * 8
    refused(ShardMismatch, "shard 3 is closed", lambda: shard.write({"y": 11}))
    refused(ShardMismatch, "shard 3 is closed", lambda: shard.write_batch(rows(1)))


def test_a_shard_that_was_begun_is_continued() -> None:
    """A retried job writes what is missing, and no more than was planned."""
    notes = Notes(5)
    notes.left_out = 2
    shard = shard_of(notes, 7)
    assert (shard.position, shard.is_over, shard.left_out, shard.bytes_written) == (5, False, 2, 0)
    refused(ShardMismatch, "7 samples are planned", lambda: shard.write_batch(rows(3)))
    write(shard, 7)
    assert notes.blocks == [(5, [5, 6], {})]
    assert shard_of(Notes(7), 7).is_over
    assert not shard_of(Notes(), 1).is_over
    shard.close()


def test_a_shard_without_a_plan_has_a_limit_and_ends_where_it_is_closed() -> None:
    """Its size is what was written."""
    notes = Notes()
    shard = shard_of(notes, None, most=6)
    write(shard, 6)
    refused(ShardMismatch, "6 samples are planned", lambda: write(shard, 7))
    shard.close()
    assert "finish(6)" in notes.calls
    short = Notes()
    with shard_of(short, None) as shard:
        write(shard, 3)
    assert "finish(3)" in short.calls
    for tried in (lambda: write(shard, 4), lambda: shard.write_batch(rows(1)), lambda: shard.quarantine("bad")):
        refused(ShardMismatch, "shard 3 is closed", tried)


def test_a_planned_shard_is_not_complete_before_its_last_sample() -> None:
    """Its readers would wait for the rest."""
    notes = Notes()
    shard = shard_of(notes, 6)
    write(shard, 5)
    refused(ShardMismatch, "closed after 5 samples, its manifest plans 6", shard.close)
    assert notes.position == 5
    write(shard, 6)
    shard.close()
    assert "finish(6)" in notes.calls


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_a_shard_that_ends_by_an_error_is_left_as_it_is(error: type[Exception] | None) -> None:
    """A retry continues it. What is whole is declared so."""
    notes = Notes()
    with pytest.raises(error or ShardMismatch), shard_of(notes, 6) as shard:
        write(shard, 5)
        if error:
            raise error
    assert notes.calls[-1] == "close"
    assert not any("finish" in call for call in notes.calls)


class TestRefusedBlocks:
    """The committer has no space, and the program tries again."""

    def test_no_more_than_one_block_waits(self) -> None:
        """Each further sample would take memory, for as long as the budget is full."""
        notes = Notes()
        shard = shard_of(notes, 5)
        write(shard, 3)
        notes.errors = [full() for _ in range(5)]
        for tried in (
            lambda: shard.write({"y": 3}),
            lambda: shard.write({"y": 4}),
            lambda: shard.write_batch(rows(1, 4)),
            lambda: shard.quarantine("bad"),
            shard.flush,
        ):
            refused(BudgetFull, "no space", tried)
            assert shard.position == 4
        write(shard, 5)
        assert notes.blocks == [(0, [0, 1, 2, 3], {}), (4, [4], {})]
        shard.close()

    @pytest.mark.parametrize("how", ["write", "rows", "quarantine"])
    def test_the_last_sample_of_a_shard_follows_a_block_that_waited(self, how: str) -> None:
        """It is within the plan."""
        notes = Notes()
        shard = shard_of(notes, 5)
        write(shard, 3)
        notes.errors = [full()]
        refused(BudgetFull, "no space", lambda: shard.write({"y": 3}))
        if how == "write":
            shard.write({"y": 4})
        elif how == "rows":
            shard.write_batch(rows(1, 4))
        else:
            shard.quarantine("bad")
        shard.close()
        assert notes.blocks == [(0, [0, 1, 2, 3], {}), (4, [], {4: "bad"}) if how == "quarantine" else (4, [4], {})]

    def test_samples_of_two_threads_are_not_mixed(self) -> None:
        """An error in a call must not count as a call that still runs."""
        notes = Notes()
        shard = shard_of(notes, 8)
        for tried in (lambda: shard.write({"z": 1}), lambda: shard.write_batch({"y": np.zeros((2, 2), np.int64)})):
            refused(PenstockError, "tensor", tried)
        notes.errors = [full()]
        refused(BudgetFull, "no space", lambda: shard.write_batch(rows(4)))

        one, many = (lambda: shard.write({"y": 9})), (lambda: shard.write_batch(rows(1, 9)))

        def meanwhile() -> None:
            for call in (one, many):
                refused(PenstockError, "two threads", call)

        class Slow(dict[str, Any]):
            """A sample that is read while another thread writes."""

            def __getitem__(self, name: str) -> Any:
                meanwhile()
                return super().__getitem__(name)

        shard.write(Slow(y=4))
        notes.during = meanwhile
        shard.write_batch(rows(3, 5))
        shard.close()
        assert [samples for _, samples, _ in notes.blocks] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_forked_process_sends_nothing_of_its_parents_shard() -> None:
    """Two processes on one connection would tear the stream, and a sample that fills no block be lost in silence."""
    notes = Notes()
    shard = shard_of(notes, 9)
    write(shard, 2)
    if (pid := os.fork()) == 0:
        try:
            shard.write({"y": 2})
        except PenstockError as error:
            os._exit(7 if "a fork copied it" in str(error) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    shard._owner += 1  # as in a forked process
    for tried in (
        shard.flush,
        shard.commit_all,
        lambda: shard.write_batch(rows(1, 2)),
        lambda: shard.quarantine("bad"),
        lambda: _Copied.write(cast("_Copied", shard), {"y": 2}),
    ):
        refused(PenstockError, "a fork copied it", tried)
    assert (notes.blocks, shard.position) == ([], 2)
    shard._owner -= 1
    write(shard, 9)
    shard.close()


class TestHoles:
    """Samples that could not be made."""

    def test_a_block_names_its_bad_samples(self) -> None:
        """The reason is all that a user learns of a bad sample."""
        notes = Notes()
        with shard_of(notes, 6) as shard:
            write(shard, 1)
            shard.quarantine("one")
            shard.write({"y": 2})
            shard.quarantine("three")
            assert shard.position == 4
            write(shard, 6)
            assert shard.is_over
        assert notes.blocks == [(0, [0, 2, 4, 5], {1: "one", 3: "three"})]

    def test_bad_samples_take_the_places_of_a_shards_last_samples(self) -> None:
        """One more sample than planned would have no place in the epoch."""
        notes = Notes()
        shard = shard_of(notes, 3)
        write(shard, 1)
        shard.quarantine("one")
        shard.quarantine("two")
        assert notes.blocks == [(0, [0], {1: "one", 2: "two"})]
        assert shard.is_over
        refused(ShardMismatch, "3 samples are planned", lambda: shard.quarantine("more"))
        refused(ShardMismatch, "3 samples are planned", lambda: shard.write({"y": 3}))
        shard.close()

    def test_a_block_of_bad_samples_ends_at_the_most_that_its_header_may_have(self) -> None:
        """Readers refuse a longer one."""
        notes = Notes()
        shard = shard_of(notes, None)
        for _ in range(MAX_HOLES):
            assert notes.blocks == []
            shard.quarantine("bad")
        ((first, samples, bad),) = notes.blocks
        assert (first, samples, len(bad)) == (0, [], MAX_HOLES)
        shard.abort()


def test_a_block_is_due_after_a_while_that_grows() -> None:
    """A slow producer's first samples come soon, and later ones in larger blocks."""
    notes, now_s, due_s, linger_s = Notes(), [0.0], 0.0, FIRST_LINGER_S
    shard = shard_of(notes, None, clock=lambda: now_s[0])
    for number in range(6):
        due_s += linger_s
        now_s[0] = due_s - 0.01
        shard.write({"y": 0})
        assert len(notes.blocks) == number
        now_s[0] = due_s
        if number % 2:
            shard.write({"y": 0})
        else:
            shard.write_batch(rows(1))
        assert len(notes.blocks) == number + 1
        linger_s = min(2 * linger_s, LINGER_S)
    shard.abort()


class TestReserved:
    """Samples that are made in place."""

    def test_they_are_committed_as_one_block_behind_what_was_written(self) -> None:
        """Samples that were gathered before have the offsets before them, and do not wait until they are made."""
        notes = Notes()
        shard = shard_of(notes, 9)
        write(shard, 2)
        with shard.reserve(3) as arrays:
            assert notes.blocks == [(0, [0, 1], {})]
            arrays["y"][...] = [7, 8, 9]
        assert notes.blocks == [(0, [0, 1], {}), (2, [7, 8, 9], {})]
        assert (shard.position, shard.bytes_written) == (5, 5 * 8)
        write(shard, 6)
        with shard.reserve(3) as arrays:
            arrays["y"][...] = 1
        assert shard.is_over
        assert notes.blocks[2:] == [(5, [5], {}), (6, [1, 1, 1], {})]
        refused(ShardMismatch, "9 samples are planned", lambda: shard.reserve(1))
        shard.close()

    def test_nothing_else_is_written_meanwhile(self) -> None:
        """It would get their offsets."""
        notes = Notes()
        shard = shard_of(notes, 9)
        write(shard, 6)
        arrays = shard.reserve(1)
        for tried in (
            lambda: shard.write({"y": 0}),
            lambda: shard.write_batch(rows(1)),
            lambda: shard.quarantine("bad"),
            lambda: shard.reserve(1),
            shard.close,
            lambda: shard.write({"y": 0}),  # once more, after a flush
        ):
            refused(PenstockError, "1 reserved samples are neither", tried)
            shard.flush()
        arrays.drop()
        assert [block.count for block in notes.dropped] == [1]
        assert (notes.position, shard.position) == (6, 6)
        write(shard, 9)
        refused(ShardMismatch, "9 samples are planned", lambda: shard.write({"y": 9}))
        shard.close()

    def test_they_have_one_size(self) -> None:
        """The place of the next one is not known else."""
        shard = shard_of(Notes(), 9, spec=Spec.of({"y": ("int64", (None,))}))
        refused(PenstockError, "'y' is ragged: use write", lambda: shard.reserve(1))
        shard.abort()

    def test_their_number_has_bounds(self) -> None:
        """A block has at least one sample, and no more than its readers take."""
        notes = Notes()
        shard = shard_of(notes, None)
        for count in (0, MAX_BLOCK_SAMPLES + 1):
            refused(ValueError, f"a block has 1 to {MAX_BLOCK_SAMPLES} samples", partial(shard.reserve, count))
        with shard.reserve(MAX_BLOCK_SAMPLES) as arrays:
            arrays["y"][...] = 0
        assert shard.position == MAX_BLOCK_SAMPLES
        shard.abort()


def test_a_block_that_was_made_before_has_the_next_offsets_of_the_plan() -> None:
    """A job resumes with blocks from a file, and one too many would have no place in the epoch."""
    made = Notes()
    with shard_of(made, 4) as shard:
        write(shard, 3)
        shard.quarantine("three")
    ((block, bad),) = made.sent
    notes = Notes()
    shard = shard_of(notes, 9)
    write(shard, 2)
    refused(ShardMismatch, "shard 3 stands at offset 2, this block begins at 0", lambda: shard.write_block(block, bad))
    shard.write_block(block.moved(2), {5: "three"})
    assert notes.blocks == [(0, [0, 1], {}), (2, [0, 1, 2], {5: "three"})]
    assert (shard.position, shard.bytes_written) == (6, 5 * 8)
    refused(ShardMismatch, "9 samples are planned", lambda: shard.write_block(block.moved(6), {9: "three"}))
    write(shard, 9)
    assert shard.is_over
    exact = shard_of(Notes(), 4)
    exact.write_block(block, bad)
    assert exact.is_over
    for one in (shard, exact):
        one.close()


class TestTakenShards:
    """The shard turns out to be another writer's."""

    @pytest.mark.parametrize("when", ["commit", "commit_all", "require_whole"])
    def test_its_samples_move_to_a_new_one_with_their_reasons(self, when: str) -> None:
        """They are in no shard that a reader would get."""
        old, new, ends = Notes(), Notes(), list[int]()
        shard = shard_of(old, None, take_another=lambda: ShardSlot(cast("Committer", new), 5, ends.append))
        write(shard, 2)
        shard.quarantine("two")
        shard.flush()
        write(shard, 5)
        shard.quarantine("five")
        shard.flush()
        write(shard, 7)
        if when != "commit":
            shard.flush()

        def refuse(*_: Any) -> None:
            raise taken()

        setattr(old, when, refuse)
        shard.close()
        assert old.calls[-1] == "close"
        assert not any("finish" in call for call in old.calls)
        assert new.blocks == [(0, [0, 1], {2: "two"}), (3, [3, 4], {5: "five"}), (6, [6], {})]
        assert new.calls == ["commit_all", "require_whole(7)", "finish"]
        assert ends == [7]

    def test_its_samples_follow_what_the_new_one_has(self) -> None:
        """A taken shard may have been begun."""
        old, new = Notes(), Notes(10)
        shard = shard_of(old, None, take_another=lambda: ShardSlot(cast("Committer", new), 5, lambda _: None))
        write(shard, 4)
        shard.quarantine("four")
        old.errors = [taken()]
        shard.flush()
        assert new.blocks == [(10, [0, 1, 2, 3], {}), (14, [], {14: "four"})]
        assert (shard.position, shard.is_over) == (15, False)
        before = old.places
        write(shard, 16)
        assert (old.places, new.places) == (before, 1), "the old one's segment is given back"
        shard.close()
        assert new.blocks[-1] == (15, [15], {})

    def test_a_planned_shard_is_not_moved(self) -> None:
        """Its samples have no other identity."""
        notes = Notes()
        shard = shard_of(notes, 4)
        notes.errors = [taken()]
        refused(ShardTaken, "another writer's", lambda: write(shard, 4))
        assert shard.position == 4
        shard.abort()


class TestLostSamples:
    """A program ends without its last samples."""

    @pytest.mark.parametrize(("written", "told"), [(4, []), (5, [1]), (7, [3])])
    def test_it_is_told_of_those_that_were_not_committed(self, written: int, told: list[int]) -> None:
        """It learns of them nowhere else, and a warning of nothing is a false alarm."""
        lost: list[int] = []
        shard = shard_of(Notes(), 9, lost=lost.append)
        write(shard, written)
        for _ in range(2):
            _tell_lost()  # as at the end of the process
        del shard
        gc.collect()
        assert lost == told

    def test_a_writer_that_could_not_be_made_has_none(self) -> None:
        """Its destructor must not raise an error of its own."""

        class Away(Notes):
            @property
            def position(self) -> int:
                raise ServerUnavailable("away")

            @position.setter
            def position(self, _: int) -> None:
                pass

        refused(ServerUnavailable, "away", lambda: shard_of(Away(), 9))
        gc.collect()

    def test_a_feed_that_ends_by_an_error_is_complete_with_what_is_committed(self) -> None:
        """Groups would wait for the end of its shard for ever."""
        notes, lost = Notes(), list[int]()
        shard = shard_of(notes, None, lost=lost.append)
        write(shard, 6)
        shard.close_as_committed()
        assert notes.calls == ["commit_all", "require_whole(4)", "finish(4)", "finish"]
        shard.tell_lost()
        assert lost == []
