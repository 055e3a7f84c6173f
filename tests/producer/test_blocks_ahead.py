"""One block is packed and sent while the one before it is committed. That saves a round trip, and loses nothing."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import ServerUnavailable
from penstock_common.segments.writer import SegmentWriter
from penstock_common.stream.commands import Client
from penstock_common.stream.servers.durability import ReplicaWatch
from penstock_producer.write.commit import Committer
from penstock_producer.write.unconfirmed import UnconfirmedBlocks
from tests.clusters import until
from tests.contracts.feed import SAMPLE_BYTES, SPEC, replayed, writer_of
from tests.producer.test_commit_errors import SIZE, fill, once, require_once_each, shard_of


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the first offsets of the blocks that are sent before the one ahead of them is answered."""
    follow, found = Committer._follow, list[int]()

    def followed(self: Committer, before: Any, block: Any, bad: Any) -> bool:
        found.append(block.first)
        return follow(self, before, block, bad)

    monkeypatch.setattr(Committer, "_follow", followed)
    return found


def test_each_block_with_a_sample_is_sent_ahead(any_url: str, any_client: Client, ahead: list[int]) -> None:
    """A wait for each answer would halve the rate. A block of bad samples has no entry, and need not hurry."""
    with shard_of(any_url, block_bytes=SAMPLE_BYTES) as (_, shard):
        fill(shard, 4)
        shard.quarantine("bad")
        shard.flush()
        assert ahead == [1, 2, 3]
        fill(shard, 8)
        assert ahead == [1, 2, 3, 5, 6, 7]
    assert replayed(any_url) == [*range(4), *range(5, SIZE)]


def test_a_block_is_sent_ahead_only_if_both_can_be_kept(
    any_url: str, any_client: Client, ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unconfirmed block is kept to be sent again, and the memory for such blocks is limited."""
    block_bytes, asked = 4 * SAMPLE_BYTES, list[int]()

    def must_wait(_: UnconfirmedBlocks, nbytes: int) -> bool:
        asked.append(nbytes)
        return nbytes > block_bytes

    monkeypatch.setattr(UnconfirmedBlocks, "must_wait", must_wait)
    with shard_of(any_url):
        pass
    assert ahead == []
    assert {*asked} == {block_bytes, 2 * block_bytes}
    require_once_each(any_url, any_client)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_block_that_finds_a_full_disk_waits_for_space(
    any_url: str, any_client: Client, memory_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Other programs use the disk, too. A block that was left out would be missed at the end of its epoch."""
    append, calls = SegmentWriter.append, list[int]()

    def full(self: SegmentWriter, *what: Any) -> Any:
        calls.append(number)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, *what)

    monkeypatch.setattr(SegmentWriter, "append", full)
    with shard_of(any_url, payload=f"segments:{memory_path}") as (_, shard):
        fill(shard, 16)
        assert len(calls) > number
    require_once_each(any_url, any_client)


def test_a_program_that_is_interrupted_after_an_outage_goes_on(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user interrupts the cell of a notebook that waits. The answers of the old connection come on no other one."""
    send = Committer._send
    with shard_of(any_url) as (_, shard):
        fill(shard, 8)
        once(monkeypatch, "read_all", ServerUnavailable("cut"))

        def interrupted(*_: Any) -> None:
            monkeypatch.setattr(Committer, "_send", send)
            raise KeyboardInterrupt

        monkeypatch.setattr(Committer, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(shard, 12)
        shard.flush()
        fill(shard, 20)
    require_once_each(any_url, any_client)


def test_shards_one_after_the_other_use_one_connection(any_url: str, any_client: Client) -> None:
    """A job of many small shards would make thousands, and each costs several round trips."""

    def made() -> int:
        found: Any = any_client.info("stats")
        return int(found["total_connections_received"])

    with writer_of(any_url, spec=SPEC) as writer:
        epoch, counts = writer.epoch(0, sizes=[4] * 4), []
        for number in range(4):
            with epoch.shard(number) as shard:
                fill(shard, 4)
            counts.append(made())
    assert counts == [counts[0]] * 4


def test_a_shard_that_is_given_up_leaves_no_connection(any_url: str, any_client: Client) -> None:
    """A program that keeps the shard for its error message would keep a connection for each."""
    with writer_of(any_url, spec=SPEC) as writer:
        epoch, before = writer.epoch(0, sizes=[4]), len(any_client.client_list())
        shard = epoch.shard(0)
        fill(shard, 2)
        shard.commit_all()
        assert len(any_client.client_list()) == before + 1
        shard.abort()
        until(lambda: len(any_client.client_list()) == before)


def test_what_a_closed_shard_holds_is_lost_if_a_server_loses_it(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it was open it could send its newest blocks again. A closed shard cannot, so a loss of them is reported."""
    with writer_of(any_url, spec=SPEC, durability="auto", block_bytes=4 * SAMPLE_BYTES) as writer:
        shard, known = writer.epoch(0, sizes=[SIZE]).shard(0), writer._resources.loss_detector._ends
        monkeypatch.setattr(ReplicaWatch, "_is_followed", lambda *_: True)
        monkeypatch.setattr(Committer, "_confirm", lambda _: None)  # nothing confirms them
        fill(shard, SIZE)
        shard.commit_all()
        assert not known
        shard._committer.finish()
        assert [end for _, end, _ in known.values()] == [SIZE]
        shard.abort()
