"""The ways out of a commit after an error: the writer goes on, or it says why it cannot."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import (
    DamagedKey,
    PenstockError,
    SegmentsUnseen,
    ServerUnavailable,
    ShardMismatch,
    Unauthorized,
)
from penstock_common.segments.writer import SegmentWriter
from penstock_common.server.channel import Channel
from penstock_common.server.resp import RespReader
from penstock_common.stream.commands import Client
from penstock_common.stream.servers.durability import ReplicaWatch
from penstock_common.waiting import OUTAGE_S
from penstock_producer.write.commit import Committer
from penstock_producer.write.shard import ShardWriter, _tell_lost
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, replayed, sample, stored, writer_of
from tests.torn_slots import partition_slot

SIZE = 40


@contextmanager
def shard_of(url: str, **settings: Any) -> Iterator[tuple[Writer, ShardWriter]]:
    """Yield a writer with four samples in a block, and its planned shard. The shard is closed at the end."""
    with writer_of(url, **{"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES, **settings}) as writer:
        shard = writer.epoch(0, sizes=[SIZE]).shard(0)
        try:
            yield writer, shard
            fill(shard, SIZE)
            shard.close()
        finally:
            shard.abort()


def fill(shard: ShardWriter, upto: int) -> None:
    """Write numbered samples from where the shard stands."""
    while shard.position < upto:
        shard.write(sample(shard.position))


def once(
    monkeypatch: pytest.MonkeyPatch, method: str, error: BaseException, number: int = 1, of: type = Channel
) -> None:
    """Make one call of a channel's method, or of another class's, raise: the call with this number from now on."""
    real, calls = getattr(of, method), 0

    def called(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise error
        return real(self, *arguments)

    monkeypatch.setattr(of, method, called)


def require_once_each(url: str, client: Client) -> None:
    """Require every sample in one entry, in order."""
    assert stored(client, "t", 0) == {(0, offset): 1 for offset in range(SIZE)}
    assert replayed(url) == list(range(SIZE))


@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_write_that_was_interrupted_may_be_continued(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A user interrupts a cell of a notebook and runs the next. Answers under way must not answer for its blocks."""
    with shard_of(any_url) as (_, shard):
        fill(shard, 8)
        once(monkeypatch, "reply", KeyboardInterrupt(), number, of=RespReader)
        with pytest.raises(KeyboardInterrupt):
            fill(shard, 20)
    require_once_each(any_url, any_client)


def test_a_connection_that_breaks_as_a_block_is_sent_is_made_again(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No block was sent before it, so no answer shows that the connection is broken."""
    said: list[str] = []
    with shard_of(any_url, notify=said.append) as (_, shard):
        once(monkeypatch, "send", ServerUnavailable("cut"))
        fill(shard, 8)
    assert sum("broke while writing" in line for line in said) == 1, said
    require_once_each(any_url, any_client)


def test_the_times_of_two_outages_do_not_add_up(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job of days meets several. Each may last a minute, however long ago the one before was."""
    now_s = [0.0]
    monkeypatch.setattr("penstock_producer.write.writer.Committer", partial(Committer, clock=lambda: now_s[0]))
    with shard_of(any_url) as (_, shard):
        for upto in range(8, SIZE, 12):
            once(monkeypatch, "read_all", ServerUnavailable("cut"))
            fill(shard, upto)
            fill(shard, upto + 8)  # committed by the blocks that follow, not by the end
            now_s[0] += 2 * OUTAGE_S
        once(monkeypatch, "read_all", ServerUnavailable("cut"))
        shard.commit_all()
        now_s[0] += 2 * OUTAGE_S
        fill(shard, SIZE)
        once(monkeypatch, "read_all", ServerUnavailable("cut"))
        shard.commit_all()
    require_once_each(any_url, any_client)


def test_a_block_whose_answer_was_lost_with_its_connection_is_not_taken_for_anothers(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch would end with the error that another program writes the same shard."""
    read_all, cuts = Channel.read_all, list[str]()
    with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer, writer.epoch() as epoch:
        index = writer.stream.partitions[0].index(0, 0)

        def cut(self: Channel, *arguments: Any) -> Any:
            if not cuts:
                until(lambda: any_client.xlen(index))
                cuts.append("cut")
                raise ServerUnavailable("cut under the answer")
            return read_all(self, *arguments)

        for number in range(SIZE):
            epoch.write(sample(number))
            if number == 0:
                monkeypatch.setattr(Channel, "read_all", cut)
    assert cuts
    require_once_each(any_url, any_client)


@pytest.mark.parametrize(
    ("right", "blocks", "kept"),
    [
        ("xadd", 1, 8),
        ("xrevrange", 1, 8),
        ("xrevrange", 2, 8),
        ("hincrby", 1, 12),
    ],  # the last is used once the index names the entry
)
def test_a_block_whose_script_fails_for_want_of_a_right_is_taken_back(
    any_url: str, any_client: Client, any_server: Any, right: str, blocks: int, kept: int
) -> None:
    """The entry is appended before the script fails, and readers would be given samples that are written again."""
    any_client.execute_command("ACL", "SETUSER", "w", "reset", "on", ">pw", "~*", "&*", "+@all")
    try:
        with shard_of(f"redis://w:pw@127.0.0.1:{any_server.port}") as (_, shard):
            fill(shard, 8)
            shard.commit_all()
            any_client.execute_command("ACL", "SETUSER", "w", f"-{right}")
            with pytest.raises(Unauthorized, match=rf"\+{right}"):
                fill(shard, 8 + 4 * blocks)
                shard.commit_all()
            assert stored(any_client, "t", 0).total() == kept
            any_client.execute_command("ACL", "SETUSER", "w", "+@all")
        require_once_each(any_url, any_client)
    finally:
        any_client.execute_command("ACL", "DELUSER", "w")


def test_a_retried_job_names_what_the_server_lost_of_the_first_run(any_url: str, any_client: Client) -> None:
    """The first run's blocks are not its own, so it cannot send them again."""
    with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer:
        first = writer.epoch(0, sizes=[SIZE]).shard(0)
        fill(first, 8)
        first.commit_all()
        first.abort()
    with pytest.raises(ShardMismatch, match="committed up to 0, the next block starts at 8"), shard_of(any_url):
        any_client.delete(open_stream(any_client, "t").partitions[0].index(0, 0))


def test_a_run_that_has_nothing_to_write_knows_what_the_server_lost(any_url: str, any_client: Client) -> None:
    """A job is retried for that, although an earlier run had committed it."""
    with writer_of(any_url, spec=SPEC) as writer:
        first = writer.epoch(0, sizes=[SIZE]).shard(0)
        fill(first, SIZE)
        first.commit_all()
        first.abort()
    with pytest.raises(ShardMismatch) as caught, shard_of(any_url):
        any_client.delete(open_stream(any_client, "t").partitions[0].index(0, 0))
        any_client.client_kill_filter(_type="normal", skipme=True)
    assert caught.value.lost == (0, SIZE)


def test_a_key_of_another_type_is_named_with_its_repair(any_url: str, any_client: Client) -> None:
    """A commit reads and writes six keys, and the server's words name none of them."""
    with pytest.raises(DamagedKey, match=r"0:0:index is a string.* DEL "), shard_of(any_url) as (writer, shard):
        fill(shard, 8)
        shard.commit_all()
        index = writer.stream.partitions[0].index(0, 0)
        any_client.delete(index)
        any_client.set(index, "rubbish")


def test_a_state_that_no_producer_writes_is_named(any_url: str, any_client: Client) -> None:
    """It is neither an abandoned epoch nor a lost one, and only its key tells where to look."""
    with pytest.raises(DamagedKey, match="state"), shard_of(any_url) as (writer, shard):
        fill(shard, 8)
        shard.commit_all()
        any_client.set(writer.stream.partitions[0].state(0), "rubbish")


def test_blocks_that_a_failover_lost_are_sent_again(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica that was promoted lacks the newest blocks, and the writer kept them because none was confirmed."""
    follows = threading.Event()
    monkeypatch.setattr(ReplicaWatch, "_is_followed", lambda *_: follows.is_set())
    said: list[str] = []
    with shard_of(any_url, notify=said.append, durability="auto") as (writer, shard):
        any_client.client_setname("control")
        follows.set()
        fill(shard, 8)
        index = writer.stream.partitions[0].index(0, 0)
        until(lambda: any_client.xlen(index) == 2)
        replica = partition_slot(any_client, writer.stream, 0)
        fill(shard, 24)
        until(lambda: any_client.xlen(index) == 6)
        replica.restore(any_client)
        for client in any_client.client_list():
            if client["name"] != "control":
                any_client.client_kill_filter(_id=client["id"])
        fill(shard, 32)
        follows.clear()
    assert sum("came back without samples 8-" in line and "sending them again" in line for line in said) == 1, said
    require_once_each(any_url, any_client)


def test_a_folder_that_takes_no_segments_is_named(
    any_url: str, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a full disk is waited for. A broken one does not get better."""

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with (
        pytest.raises(SegmentsUnseen, match=f"{memory_path}.* takes no more segments: .*Input/output"),
        shard_of(any_url, payload=f"segments:{memory_path}") as (_, shard),
    ):
        fill(shard, 4)
        monkeypatch.setattr(SegmentWriter, "append", broken)


def test_a_shard_refuses_what_is_not_its_next_sample(any_url: str, any_client: Client) -> None:
    """Each refusal names the mistake, and leaves the shard as it was."""

    class Sample(dict[str, Any]):
        """A sample that is read by a function."""

        def __init__(self, read: Callable[[], Any]) -> None:
            super().__init__(sample(0))
            self._read = read

        def __getitem__(self, _: str) -> Any:
            return self._read()

    def broken() -> None:
        raise TypeError("of its own")

    def refused(error: type[BaseException], words: str, call: Callable[[], Any]) -> None:
        with pytest.raises(error, match=words):
            call()

    with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES) as writer:
        shard, other = (writer.epoch(number, sizes=[SIZE]).shard(0) for number in (0, 1))
        fill(other, 2)
        block = other._builder.finish(0, [])
        other.abort()
        fill(shard, 4)
        refused(TypeError, "a sample is a list", lambda: shard.write([1, 2]))  # type: ignore[arg-type]
        refused(TypeError, "^of its own", lambda: shard.write(Sample(broken)))
        again = Sample(lambda: shard.write(sample(0)))
        refused(PenstockError, "two threads write", lambda: shard.write(again))
        refused(ShardMismatch, "stands at offset 4, this block begins at 0", lambda: shard.write_block(block, {}))
        fill(shard, SIZE - 1)
        last = block.moved(SIZE - 1)
        refused(ShardMismatch, f"{SIZE} samples are planned, one more", lambda: shard.write_block(last, {}))
        fill(shard, SIZE)
        shard.close()
        refused(ShardMismatch, "is closed: open the next one", lambda: shard.write(sample(0)))
    require_once_each(any_url, any_client)


def test_a_block_that_was_made_before_follows_the_samples_that_were_written_before_it(any_url: str) -> None:
    """Those are still gathered, and the block has the offsets behind them."""
    with writer_of(any_url, spec=SPEC) as writer:
        shard, other = (writer.epoch(number, sizes=[6]).shard(0) for number in (0, 1))
        fill(other, 2)
        block = other._builder.finish(0, [])
        other.abort()
        fill(shard, 2)
        shard.write_block(block.moved(2), {})
        fill(shard, 6)
        shard.close()
    assert replayed(any_url) == [0, 1, 0, 1, 4, 5]


def test_samples_that_no_program_will_commit_are_told_once(any_url: str, any_client: Client) -> None:
    """A script that forgets to close its shard ends without an error, and its last samples are nowhere."""
    said: list[str] = []
    with writer_of(any_url, spec=SPEC, block_bytes=4 * SAMPLE_BYTES, notify=said.append) as writer:
        shard = writer.epoch(0, sizes=[SIZE]).shard(0)
        fill(shard, 8)
        shard.commit_all()
        fill(shard, 11)
        for _ in range(2):
            _tell_lost()  # as at the end of the process
        assert sum("3 samples" in line for line in said) == 1, said
        shard.abort()


def test_a_shard_without_a_plan_refuses_a_sample_after_its_end(any_url: str, any_client: Client) -> None:
    """It has space for more, and what is gathered after the end would be lost."""
    with writer_of(any_url, spec=SPEC) as writer:
        shard = writer.epoch(0).shard(0)
        fill(shard, 3)
        shard.close()
        with pytest.raises(ShardMismatch, match="is closed: open the next one"):
            shard.write(sample(3))
