"""A commit that does not come next: it is refused by the server, and nothing of it is ever seen."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BudgetFull
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import commit_commands, commit_keys, has_unread, read_commit
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import Manifest, abandon_epoch, load_manifest
from penstock_common.stream.streams import Stream
from penstock_common.wire.block import Block, BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.spec import Spec
from tests.contracts.feed import SPEC, loader_of, numbers, sample, stored, writer_of

WRONG = 9999
WIDE = {"x": ("uint8", (1000,))}


def wide(number: int) -> dict[str, Any]:
    """A sample of a kilobyte."""
    return {"x": np.full(1000, number, np.uint8)}


def block_at(first: int, count: int = 5, holes: int = 1) -> Block:
    """Return a block of samples that no reader must ever get, with holes after them."""
    builder = BlockBuilder(Spec.of(SPEC), 1 << 20, 100)
    for _ in range(count):
        builder.add(sample(WRONG))
    return builder.finish(first, range(first + count, first + count + holes))


def commit(client: Client, stream: Stream, manifest: Manifest, block: Block) -> Any:
    """The transaction of shard 0, by another run of its job, say; what its script answered."""
    fields = encode(block, stream=stream.id, epoch=manifest.epoch, shard=0) if block.count else []
    bad = dict.fromkeys(block.holes, '{"why": "wrong"}')
    commands = commit_commands(
        commit_keys(stream.partitions[0], manifest.epoch, 0), manifest, 0, block, fields, bad=bad
    )
    channel = open_channel(client)
    channel.send(commands)
    answers: list[Any] = [channel.read() for _ in commands]
    channel.close()
    assert isinstance(answers[-1], list)
    return answers[-1][-1] if block.count else answers[-1]


def test_what_does_not_come_next_is_taken_back_before_anybody_can_see_it(url: str, client: Client) -> None:
    """A run of a job that was thought dead sends its block late, while trainers wait for the next."""
    handed: list[int] = []

    def train() -> None:
        with loader_of(url, batch_size=5) as loader:
            handed.extend(numbers(loader))

    with writer_of(url, spec=SPEC) as writer:
        epoch = writer.epoch(0, sizes=[20])
        partition, manifest = writer.stream.partitions[0], load_manifest(writer.client, writer.stream, 0)
        trainer = threading.Thread(target=train)
        trainer.start()
        with epoch.shard(0) as shard:
            for number in range(10):
                shard.write(sample(number))
            shard.commit_all()
            held = load_roster(writer.client, partition).bytes
            for first in (0, 5, 12):  # all of it there, some of it, and with a gap before it
                block = block_at(first)
                answer = commit(writer.client, writer.stream, manifest, block)
                is_committed, progress = read_commit(answer, block, manifest.live_state)
                assert not is_committed
                assert (progress.end, progress.held_bytes) == (10, held)
            assert stored(client, "t", 0).total() == 10
            assert not client.exists(partition.quarantine(0))
            for number in range(10, 20):
                shard.write(sample(number))
        trainer.join(30)
        assert not trainer.is_alive()
        assert sorted(handed) == list(range(20))
        commit(writer.client, writer.stream, manifest, block_at(0))
        # who compares with the newest entry would wait for one that is not there
        assert not has_unread(writer.client, partition, 0, "g")


def test_an_epoch_that_takes_nothing_more_is_left_as_it_is(url: str, client: Client) -> None:
    """A transaction may be in a socket's buffer while its epoch is abandoned or released."""
    with writer_of(url, spec=SPEC) as writer:
        partition = writer.stream.partitions[0]
        epoch = writer.epoch(0, sizes=[20])
        manifest, shard = load_manifest(writer.client, writer.stream, 0), epoch.shard(0)
        shard.write(sample(0))
        shard.commit_all()
        abandon_epoch(writer.client, writer.stream, 0)
        at, state, *_ = commit(writer.client, writer.stream, manifest, block_at(1))
        assert (at, state) == (b"1-0", f"abandoned:{manifest.id}".encode())
        assert stored(client, "t", 0).total() == 1
        shard.abort()
        keys = [partition.state(0), partition.entries(0), partition.index(0, 0)]
        client.unlink(*keys)  # as a release does
        for block in (block_at(0), block_at(0, count=0)):
            assert commit(writer.client, writer.stream, manifest, block)[1] == b""
        assert not client.exists(*keys, partition.quarantine(0))


def test_the_answer_to_a_block_sent_behind_a_refused_one_is_read(any_url: str, any_client: Client) -> None:
    """Left unread it is taken for the answer to what is sent next, and everything after it by one too early."""
    with writer_of(any_url, spec=SPEC) as writer, writer_of(any_url, spec=SPEC) as other:
        ours, theirs = (each.epoch(0, sizes=[8]).shard(0) for each in (writer, other))
        for number in range(6):
            theirs.write(sample(number))
        theirs.commit_all()
        any_client.config_resetstat()
        for number in range(8):
            ours.write(sample(number))
            if number % 4 == 3:
                ours.flush()
        ours.close()
        theirs.abort()
        sent = any_client.info("commandstats")["cmdstat_exec"]["calls"]
    assert sent == 3  # both blocks, and what of the second one was missing
    assert stored(any_client, "t", 0) == {(0, offset): 1 for offset in range(8)}


def test_blocks_sent_ahead_of_one_that_is_refused_come_in_order(url: str, client: Client) -> None:
    """The next block travels before the last one was answered; another run's block may come between the two."""
    with writer_of(url, spec=SPEC) as writer, writer_of(url, spec=SPEC) as other:
        ours, theirs = (each.epoch(0, sizes=[40]).shard(0) for each in (writer, other))
        for number in range(40):
            ours.write(sample(number))
            theirs.write(sample(number))
            if number % 4 == 3:
                ours.flush()
            if number % 6 == 5:
                theirs.flush()
        ours.close()
        theirs.close()
    assert stored(client, "t", 0) == {(0, offset): 1 for offset in range(40)}
    with loader_of(url, start="earliest", batch_size=8) as loader:
        assert np.array_equal(sorted(numbers(loader)), range(40))


def test_a_block_that_was_lost_with_its_connection_outlasts_a_full_budget(any_url: str, any_client: Client) -> None:
    """The writer reconnects, finds no space and says so. A reader that waits and continues must not lack that block."""
    settings: dict[str, Any] = {"spec": WIDE, "block_bytes": 1000, "budget_bytes": 100_000, "room_wait_s": 0.05}
    with writer_of(any_url, **settings) as writer, writer_of(any_url, **settings) as other:
        ahead = writer.epoch(0, sizes=[1, 3]).shard(1)  # of what the others leave, since shard 0 is not there
        ahead.write(wide(0))
        ahead.commit_all()
        any_client.client_pause(60_000, all=False)
        ahead.write(wide(1))
        for connection in any_client.client_list():
            if int(connection["id"]) != any_client.client_id():
                any_client.client_kill_filter(_id=connection["id"])
        any_client.client_unpause()
        later = other.epoch(1, sizes=[100]).shard(0)
        with pytest.raises(BudgetFull):
            for number in range(100):
                later.write(wide(number))
        with pytest.raises(BudgetFull):
            ahead.write(wide(2))
        assert stored(any_client, "t", 0) == {(1, 0): 1}
        abandon_epoch(other.client, other.stream, 1)
        later.abort()
        while ahead.committed < 3:
            with suppress(BudgetFull):
                ahead.commit_all()
        ahead.close()
    assert stored(any_client, "t", 0) == {(1, offset): 1 for offset in range(3)}
