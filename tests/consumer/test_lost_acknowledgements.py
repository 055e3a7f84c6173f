"""A server that comes back without its last second forgot acknowledgements: nothing hangs, nothing is missing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import redis

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import Command
from penstock_common.stream.groups.ledger import Acknowledgement
from penstock_common.stream.groups.outbox import Outbox
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.keys import RELEASED
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.servers.durability import touch_command
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import set_field
from penstock_common.tuning import Tuning
from penstock_common.waiting import OUTAGE_S
from penstock_consumer.read.heartbeat import LeaseRenewer
from penstock_consumer.read.hooks import hooks_of
from penstock_producer.write.writer import Writer
from tests.contracts.feed import loader_of, numbers, open_stream, produce
from tests.torn_slots import SlotState, partition_slot

COUNT, BLOCK, BATCH = 40, 4, 5


def test_an_entry_whose_acknowledgement_was_lost_is_handed_out_again(any_url: str, any_client: Any) -> None:
    """It is pending under a live member that has acknowledged it, so no other member would ever take it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    partition = open_stream(any_client, "t").partitions[0]
    entries, ledger = partition.entries(0), partition.ledger(0, "g", 0)
    with loader_of(any_url, batch_size=BATCH, member="m") as loader:
        found = []
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 3:
                hooks_of(loader).acknowledger.flush()
                first = any_client.xrange(entries, count=1)[0][0]
                with any_client.pipeline(transaction=True) as pipe:  # the reader must not see a half
                    pipe.xclaim(entries, "g", "m", 0, [first], force=True, justid=True)
                    for offset in range(BLOCK):
                        pipe.setbit(ledger, offset, 0)
                    assert pipe.execute()[0] == [first]
    assert sorted(found) == sorted([*range(COUNT), *range(BLOCK)])
    assert any_client.xpending(entries, "g")["pending"] == 0
    assert any_client.bitcount(ledger) == COUNT


def test_an_entry_of_which_only_the_acknowledgement_is_missing_is_acknowledged(any_url: str, any_client: Any) -> None:
    """Another member acknowledged all its samples and died: none of them is yielded, and no other member would end
    it.
    """
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    stream = open_stream(any_client, "t")
    partition = stream.partitions[0]
    entries, ledger = partition.entries(0), partition.ledger(0, "g", 0)
    join_group(any_client, Membership(stream, "g", "", ""))
    assert any_client.xreadgroup("g", RELEASED, {entries: ">"}, count=1)
    for offset in range(BLOCK):
        any_client.setbit(ledger, offset, 1)
    with loader_of(any_url, batch_size=BATCH) as loader:
        assert sorted(numbers(loader)) == list(range(BLOCK, COUNT))
    assert any_client.xpending(entries, "g")["pending"] == 0


def test_an_entry_acknowledged_in_two_batches_keeps_the_bits_of_the_first(any_url: str, any_client: Any) -> None:
    """The entry is acknowledged with its second batch.

    Without the bits of the first, the epoch would stay incomplete.
    """
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    ledger = open_stream(any_client, "t").partitions[0].ledger(0, "g", 0)
    with loader_of(any_url, batch_size=BATCH) as loader:
        found = []
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 1:
                hooks_of(loader).acknowledger.flush()
                assert any_client.setbit(ledger, 4, 0) == 1  # of the second entry, whose last batch is in hand
    assert found == list(range(COUNT))
    assert any_client.bitcount(ledger) == COUNT


def test_an_entry_that_two_members_acknowledged_keeps_the_bits_of_both_when_a_failover_loses_them(
    any_url: str, any_client: Any
) -> None:
    """The second member sends its acknowledgement again, and with it the entry ends. The first has left."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    stream = open_stream(any_client, "t")
    ledger, found = stream.partitions[0].ledger(0, "g", 0), list[int]()
    settings: dict[str, Any] = {"batch_size": 2, "lease_s": 1.0}
    with loader_of(any_url, member="second", **settings) as second:
        with loader_of(any_url, member="first", acknowledge="manual", **settings) as first:
            batch = next(iter(first))
            before: SlotState | None = partition_slot(any_client, stream, 0)
            first.acknowledge(batch)
        for batch in second:
            if 2 in found and before is not None:  # the rest of the first entry is acknowledged by now
                hooks_of(second).acknowledger.flush()
                before.restore(any_client)
                before = None
                any_client.client_kill_filter(_type="normal", skipme=True)
            found += batch["y"].tolist()
    assert {*found} == set(range(2, COUNT))
    assert any_client.bitcount(ledger) == COUNT


def test_a_connection_cut_while_an_epochs_end_is_looked_at_ends_no_training(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that wait for a checkpoint are read on the heartbeat's connection, which does not retry."""
    produce(any_url, "t", COUNT)
    recover, cut = LeaseRenewer.recover, list[str]()

    def recover_later(keeper: LeaseRenewer, *acknowledged: Any) -> None:
        if len(cut) < 2 and acknowledged and threading.current_thread() is threading.main_thread():
            cut.append("as that connection says it")
            raise ServerUnavailable(cut[0])
        recover(keeper, *acknowledged)

    monkeypatch.setattr(LeaseRenewer, "recover", recover_later)
    with loader_of(any_url, acknowledge="on_checkpoint") as loader:
        assert sorted(numbers(loader)) == list(range(COUNT))
        assert len(cut) == 2
        loader.checkpointed()
    assert any_client.xpending(open_stream(any_client, "t").partitions[0].entries(0), "g")["pending"] == 0


def test_what_was_acknowledged_of_an_epoch_that_was_given_up_is_not_handed_out_again(any_url: str) -> None:
    """An abandoned epoch takes no acknowledgements, so its entries stay pending, although they were trained on."""
    spec = {"y": ("int64", ())}
    with Writer("t", url=any_url, spec=spec, tuning=Tuning(block_bytes=8 * BLOCK, notify=lambda _: None)) as writer:
        epoch = writer.epoch()
        for y in range(COUNT):
            epoch.write({"y": y})
        epoch.flush()
        found = []
        with loader_of(any_url, batch_size=BATCH, acknowledge="on_checkpoint") as loader:
            for number, batch in enumerate(loader):
                found += batch["y"].tolist()
                if number == 1:
                    epoch.abandon()
                loader.checkpointed()
    assert sorted(found) == list(range(COUNT))


def test_a_member_that_hurries_waits_for_no_replica(any_url: str, any_client: Any) -> None:
    """A program that ends would wait a second, and WAIT takes a limit of 0 for no limit."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    stream, limits = open_stream(any_client, "t"), list[int]()
    who = Membership(stream, "g", "m", "i")
    join_group(any_client, who)

    def probe(limit_ms: int) -> list[Command]:
        limits.append(limit_ms)
        return [touch_command(stream.partitions[0].roster), (b"WAIT", b"1", b"%d" % limit_ms)]

    outbox = Outbox(any_client, who, probe=probe)
    manifest = load_manifest(any_client, stream, 0)
    outbox.send(Acknowledgement(stream.partitions[0], manifest, "g", [], {0: [(0, 4)]}))
    for patience_s in (0.2, 0.0):
        outbox.limit_patience(patience_s)
        outbox.confirm()
    assert limits == [100, 1]
    outbox.close()


def test_what_a_replica_confirmed_is_kept_no_longer(any_url: str, any_client: Any) -> None:
    """Kept acknowledgements are sent again after a failover, and a training of months would keep all of them."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    stream = open_stream(any_client, "t")
    who = Membership(stream, "g", "m", "i")
    join_group(any_client, who)

    def probe(limit_ms: int) -> list[Command]:
        return [touch_command(stream.partitions[0].roster), (b"WAIT", b"0", b"%d" % limit_ms)]

    outbox = Outbox(any_client, who, probe=probe)
    outbox.send(Acknowledgement(stream.partitions[0], load_manifest(any_client, stream, 0), "g", [], {0: [(0, 4)]}))
    outbox.flush()
    assert len(outbox._answered) == 1
    outbox.confirm()
    assert len(outbox._answered) == 0
    outbox.close()


def test_a_trainer_without_the_right_to_wait_joins_all_the_same(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """The users of an earlier version lack it. Nothing that they write is confirmed, and nothing is waited for."""
    server = fresh_server()
    produce(server.url, "t", COUNT, block_samples=BLOCK)
    with redis.Redis.from_url(server.url) as admin:
        set_field(admin, open_stream(admin, "t"), "durability", "replicas=1")
        admin.execute_command("ACL", "SETUSER", "trainer", "on", ">word", "~*", "&*", "+@all", "-wait")
    url = f"redis://trainer:word@127.0.0.1:{server.port}"
    with loader_of(url, batch_size=BATCH) as loader:
        assert sorted(numbers(loader)) == list(range(COUNT))


@contextmanager
def acknowledgement_under_way(url: str, client: Any, settings: dict[str, Any], pause_ms: int) -> Iterator[list[int]]:
    """Let a trainer end with an error while its server takes acknowledgements for a while and answers none of them.

    Returns the numbers that it acknowledged.
    """
    found = list[int]()
    with suppress(KeyboardInterrupt), loader_of(url, member="m", acknowledge="manual", **settings) as loader:
        batch = next(iter(loader))
        found += batch["y"].tolist()
        loader.acknowledge(batch)
        hooks_of(loader).acknowledger.flush()  # its script is loaded by now
        batch = next(iter(loader))
        found += batch["y"].tolist()
        client.client_pause(pause_ms, all=False)
        loader.acknowledge(batch)
        raise KeyboardInterrupt
    yield found
    client.client_unpause()


@pytest.mark.parametrize("every_s", [0.0, 0.01])
def test_a_member_that_ends_by_an_error_waits_for_a_server_that_is_back(
    any_url: str, any_client: Any, every_s: float
) -> None:
    """Its server was away until a moment ago. What was under way then was delivered twice."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    settings = {"batch_size": BATCH, "acknowledge_every_s": every_s}
    with acknowledgement_under_way(any_url, any_client, settings, 1800) as found, loader_of(any_url) as loader:
        assert sorted(found + numbers(loader)) == list(range(COUNT))


def test_a_member_that_ends_by_an_error_says_what_it_leaves_behind(any_url: str, any_client: Any) -> None:
    """The wait is limited, because a user who presses Ctrl-C waits for it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    said, began_s = list[str](), time.monotonic()
    with acknowledgement_under_way(any_url, any_client, {"batch_size": BATCH, "notify": said.append}, 60_000):
        assert time.monotonic() - began_s < OUTAGE_S / 2
        assert [line for line in said if line.startswith("left 't' before its server had every acknowledgement (")]
