"""Tests of what a shared member still wants of an entry, and of the members that it takes for live."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis

from penstock_common.errors import BadEntry
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client, ms_of
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.manifest import load_manifest
from penstock_consumer.read.claims import LeaseClaim
from penstock_consumer.read.leases import Leases
from penstock_consumer.read.receive import DeliveryCheck
from penstock_consumer.read.shared import SharedScope
from penstock_consumer.stages.batch import Lease
from tests.contracts.feed import SPEC, open_stream, sample, writer_of
from tests.contracts.ordered import plan


def test_samples_that_wait_for_a_checkpoint_are_not_given_out_again(any_url: str, any_client: redis.Redis) -> None:
    """An entry that comes again brings the samples before, between and behind those that the loop has."""
    with writer_of(any_url, spec=SPEC) as writer:
        leases, partition = Leases(), writer.stream.partitions[0]
        claim: Any = SimpleNamespace(client=any_client, who=SimpleNamespace(group="g"), leases=leases)
        check = DeliveryCheck(any_client, writer.stream)
        scope = SharedScope(claim, cast(Any, SimpleNamespace(epoch=7)), partition, is_claimed=True, deliveries=check)
        header: Any = SimpleNamespace(shard=3, first=10, end=18, is_repair=False)
        assert scope.wanted(header, b"1-0") is None
        any_client.setbit(partition.ledger(7, "g", 3), 17, 1)
        for entry, kept in ((b"1-0", (12, 14)), (b"2-0", (15, 16)), (b"3-0", (4, 10))):
            leases.hold_again(Lease(partition.number, 7, 3, entry, unacknowledged=1), [kept])
        wanted = scope.wanted(header, b"1-0")
        assert wanted is not None
        assert wanted.tolist() == [True, True, False, False, True, False, True, False]
        assert scope.acknowledged == [(17, 18)]


def test_an_entry_that_is_in_the_wrong_place_is_refused(any_url: str, any_client: redis.Redis) -> None:
    """Its samples would be acknowledged in another ledger, or twice."""
    plan(any_url, [4, 4], partitions=2)
    stream = open_stream(any_client, "t")
    claim: Any = SimpleNamespace(stream=stream)
    scope = SharedScope(
        claim, load_manifest(any_client, stream, 0), stream.partition_of(0), is_claimed=False,
        deliveries=DeliveryCheck(any_client, stream),
    )  # fmt: skip
    right = {"stream": stream.id, "epoch": 0, "shard": 0, "first": 0, "end": 4}
    scope.check(cast(Any, SimpleNamespace(**right)))
    for wrong in ({"stream": "another"}, {"epoch": 1}, {"end": 5}, {"shard": 1}):
        with pytest.raises(BadEntry):
            scope.check(cast(Any, SimpleNamespace(**right | wrong)))


def test_what_is_new_on_a_server_that_was_replaced_may_have_been_acknowledged(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that are written later were never delivered before, and their ledger is not asked."""
    calls: list[str] = []
    with writer_of(any_url, spec=SPEC) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
        epoch.flush()
        partition = writer.stream.partitions[0]
        claim: Any = SimpleNamespace(client=any_client, who=SimpleNamespace(group="g"), leases=Leases())
        check = DeliveryCheck(any_client, writer.stream)
        scope = SharedScope(claim, cast(Any, SimpleNamespace(epoch=0)), partition, is_claimed=False, deliveries=check)
        header: Any = SimpleNamespace(shard=0, first=0, end=2, is_repair=False)
        any_client.setbit(partition.ledger(0, "g", 0), 1, 1)
        before = any_client.xinfo_stream(partition.entries(0))["last-generated-id"]
        check.look([partition], lambda: calls.append("at the join"))
        assert scope.wanted(header, before) is None
        monkeypatch.setattr("penstock_common.server.client.read_run_id", lambda *_: "another run")
        open_channel(any_client).close()
        check.look([partition], lambda: calls.append("at the failover"))
        check.look([partition], lambda: calls.append("later"))
        wanted = scope.wanted(header, before)
        assert wanted is not None
        assert wanted.tolist() == [True, False]
        assert scope.acknowledged == [(1, 2)]
        epoch.write(sample(1))
        epoch.flush()
        assert scope.wanted(header, any_client.xinfo_stream(partition.entries(0))["last-generated-id"]) is None
        assert scope.acknowledged == [], "what is known is of the entry before"
        assert calls == ["at the failover"]
        header.is_repair = True
        repaired = scope.wanted(header, any_client.xinfo_stream(partition.entries(0))["last-generated-id"])
        assert repaired is not None
        assert repaired.tolist() == [True, False], "a repair is given to groups that had acknowledged a part"


def test_members_of_other_groups_and_silent_members_are_not_live(any_url: str, any_client: redis.Redis) -> None:
    """A wait for a holder that is gone, or of another group, would never end."""
    with writer_of(any_url, spec=SPEC) as writer:
        join_group(any_client, Membership(writer.stream, "g", "early", "i"))
        joined_ms = ms_of(any_client.time())
        while ms_of(any_client.time()) == joined_ms:  # the next members have a later time
            pass
        for group, name in (("g", "a"), ("h", "b")):
            join_group(any_client, Membership(writer.stream, group, name, "i"))
        claim: Any = SimpleNamespace(client=any_client, who=SimpleNamespace(group="g"))
        assert LeaseClaim.live_members(claim, joined_ms, writer.stream.partitions[0]) == {"a"}
        assert LeaseClaim.live_members(claim, 0, writer.stream.partitions[0]) == {"a", "early"}
