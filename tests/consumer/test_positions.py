"""Positions on the server: who may report and join, where a rank may return to, and what retention may remove."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import redis

from penstock_common.errors import (
    DamagedKey,
    GroupBusy,
    GroupKindMismatch,
    GroupNotFound,
    MemberReplaced,
    ReplayTruncated,
    StateMismatch,
)
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client, run_script
from penstock_common.stream.groups import positions
from penstock_common.stream.groups.forgetting import drop_group
from penstock_common.stream.groups.ledger import group_bits
from penstock_common.stream.groups.positions import kept_head, known_positions, report, rewind
from penstock_common.stream.groups.roster import QUIET_MS, Membership, RankOrder, join_group, load_roster, rank_member
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_consumer.read.claims import RankClaim
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.stages.batch import Batch
from penstock_producer.write.cleaner import Cleaner
from penstock_producer.write.writer import Writer
from tests.clusters import until
from tests.contracts.feed import loader_of, numbers, open_stream, sample
from tests.contracts.ordered import interleaved, plan, planned_writer, rank_of, read_ranks

WIDE = {"x": ("uint8", (1000,)), "y": ("int64", ())}
BUDGET = 200 * 1008


def rank(client: Client, number: int, world: int = 2, batch: int = 8, quiet_ms: int = QUIET_MS) -> Membership:
    """Return a rank that joined 'g' of 't' under a new incarnation."""
    who = Membership(
        open_stream(client, "t"), "g", rank_member(number), secrets.token_hex(4), RankOrder(number, world, batch)
    )
    join_group(client, who, quiet_ms=quiet_ms)
    return who


class Silent:
    """A link to a framework that has nothing to report."""

    def report(self) -> None:
        """Report nothing."""

    def reached(self) -> list[Batch]:
        """Return nothing."""
        return []


def position_of(client: Client, number: int, epoch: int = 0) -> int:
    """Return the position of a rank."""
    return known_positions(client, open_stream(client, "t"), epoch, "g").of(number)


def take(loader: Loader, count: int) -> list[Batch]:
    """Return the next batches. The last of them stays unacknowledged until the next is requested."""
    batches: Iterator[Batch] = iter(loader)
    return [next(batches) for _ in range(count)]


class TestReports:
    """A report is believed only from the process that holds the rank."""

    def test_the_lowest_rank_decides_what_is_acknowledged(self, client: Client, url: str) -> None:
        """Samples that one rank still has to train on must stay, because every rank takes part in its step."""
        plan(url, [100], partitions=2)
        manifest = load_manifest(client, open_stream(client, "t"), 0)
        report(client, rank(client, 0), manifest, 48)
        assert known_positions(client, open_stream(client, "t"), 0, "g").minimum(2) == 0
        report(client, rank(client, 1), manifest, 32)
        assert known_positions(client, open_stream(client, "t"), 0, "g").minimum(2) == 32
        audited = audit_stream(client, "t")
        assert (audited.is_clean, audited.delivered, audited.unread) == (True, {"g": 32 + 8}, 60)

    def test_a_report_is_one_step_however_many_partitions_there_are(self, client: Client, url: str) -> None:
        """Each batch of each rank is a report: for 32 partitions, 32 commands would cost more than receiving the
        batch.
        """
        plan(url, [8] * 64, partitions=8)
        ranks = [rank(client, number) for number in range(2)]
        manifest = load_manifest(client, open_stream(client, "t"), 0)
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        for who in ranks:
            report(client, who, manifest, 256)
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 2
        audited = audit_stream(client, "t")
        assert (audited.is_clean, audited.delivered, audited.unread) == (True, {"g": 256}, 256)

    def test_a_position_never_falls_by_a_report(self, any_client: Client, any_url: str) -> None:
        """Reports overtake each other when a connection breaks and they are sent again."""
        plan(any_url, [100])
        who, manifest = rank(any_client, 0), load_manifest(any_client, open_stream(any_client, "t"), 0)
        for position in (48, 16):
            report(any_client, who, manifest, position)
        assert position_of(any_client, 0) == 48

    def test_a_stale_incarnation_and_a_surplus_rank_are_refused(self, any_client: Client, any_url: str) -> None:
        """A replaced process that wakes up must not acknowledge what its successor has yet to train on."""
        plan(any_url, [100])
        manifest = load_manifest(any_client, open_stream(any_client, "t"), 0)
        old, surplus = rank(any_client, 0), rank(any_client, 1)
        new = rank(any_client, 0)
        with pytest.raises(MemberReplaced, match="another process"):
            report(any_client, old, manifest, 48)
        assert position_of(any_client, 0) == 0
        new = rank(any_client, 0, world=1, quiet_ms=0)
        with pytest.raises(MemberReplaced, match="another number of ranks"):
            report(any_client, surplus, manifest, 48)
        report(any_client, new, manifest, 24)
        assert position_of(any_client, 0) == 24
        any_client.hdel(open_stream(any_client, "t").partitions[0].roster, "g:g")
        with pytest.raises(GroupNotFound):
            report(any_client, new, manifest, 48)

    def test_an_epoch_that_is_no_longer_live_takes_no_report(self, any_client: Client, any_url: str) -> None:
        """A key written after the release would stay for ever."""
        plan(any_url, [100])
        partition = open_stream(any_client, "t").partitions[0]
        who, manifest = rank(any_client, 0), load_manifest(any_client, open_stream(any_client, "t"), 0)
        any_client.set(partition.state(0), f"gone:{manifest.id}")
        report(any_client, who, manifest, 48)
        assert not any_client.exists(partition.positions(0, "g"))

    def test_reports_go_on_at_maxmemory(self, fresh_server: Callable[..., EmbeddedServer]) -> None:
        """A foreign key that fills the server must not stop the trainers that would free it."""
        with fresh_server() as server, redis.Redis.from_url(server.url) as client:
            plan(server.url, [100])
            with rank_of(server.url) as loader:
                take(loader, 2)
                client.config_set("maxmemory", 1)
                with pytest.raises(redis.OutOfMemoryError):
                    client.set("foreign", "x")
                assert len(numbers(loader)) == 84
            client.config_set("maxmemory", 0)
            assert audit_stream(client, "t").delivered == {"g": 100}

    def test_a_loader_that_was_replaced_stops(self, any_url: str, any_client: Client) -> None:
        """Two processes with one rank would train on the same batches. The first one keeps no connection."""
        plan(any_url, [400], block_samples=1)
        before = len(any_client.client_list())
        with pytest.raises(MemberReplaced), rank_of(any_url, lease_s=1, prefetch_bytes=500) as old:
            take(old, 1)
            with rank_of(any_url) as new:
                assert numbers(new) == list(range(400))
                list(old)
        until(lambda: len(any_client.client_list()) == before)


class TestJoining:
    """A group has one way of reading for its whole life."""

    def test_joining_as_the_other_kind_is_refused(self, any_url: str) -> None:
        """Positions and bits would contradict each other."""
        plan(any_url, [20])
        with rank_of(any_url, group="o"), loader_of(any_url, "s"):
            with pytest.raises(GroupKindMismatch, match="'o' of 't' is ordered"), loader_of(any_url, "o"):
                pass
            with (
                pytest.raises(
                    GroupKindMismatch, match=r"'s' of 't' is shared.*groups drop t s`; .*declare t s --ordered`"
                ),
                rank_of(any_url, group="s"),
            ):
                pass

    def test_a_reset_by_a_loader_of_the_other_kind_takes_nothing(self, any_url: str, any_client: Client) -> None:
        """A wrong argument must not cost a group its position."""
        plan(any_url, [40])
        with rank_of(any_url) as loader:
            take(loader, 3)
        with pytest.raises(GroupKindMismatch), loader_of(any_url, "g", start="earliest"):
            pass
        assert position_of(any_client, 0) == 24

    def test_another_batch_size_is_refused_with_the_right_one(self, any_url: str) -> None:
        """Positions are whole batches, so with another size a rank would begin in the middle of another's."""
        plan(any_url, [20])
        with rank_of(any_url):
            pass
        with (
            pytest.raises(GroupKindMismatch, match=r"batch_size is 9: .* give batch_size=8; or"),
            rank_of(any_url, batch=9),
        ):
            pass
        accumulated = r"give batch_size=8 \(gradients accumulated over 3 batches keep the global batch\); or .* Another"
        with pytest.raises(GroupKindMismatch, match=accumulated), rank_of(any_url, batch=24):
            pass

    def test_another_world_size_waits_for_nobody_who_is_gone(self, any_url: str) -> None:
        """A restart on fewer machines continues from the lowest rank, and live ranks lose nothing."""
        plan(any_url, [200], partitions=2)
        with rank_of(any_url, 0, 2, lease_s=6) as alive:
            busy = pytest.raises(GroupBusy, match="read by 2 ranks, of which rank-0 are alive")
            with busy, rank_of(any_url, 1, 3, lease_s=6):
                pass
            assert len(take(alive, 2)) == 2
        ranks = read_ranks(any_url, 3, 8, lease_s=6)
        assert interleaved(ranks) == [*range(200), *range(16)]

    def test_a_live_rank_of_another_world_size_is_not_replaced_by_its_namesake(self, any_url: str) -> None:
        """Two jobs of one group by mistake: both would train on the samples of the lowest position on."""
        plan(any_url, [200])
        with rank_of(any_url, 1, 2, lease_s=6) as alive:
            busy = pytest.raises(GroupBusy, match="read by 2 ranks, of which rank-1 are alive; world_size=4")
            with busy, rank_of(any_url, 1, 4, lease_s=6):
                pass
            assert len(take(alive, 2)) == 2

    def test_every_sample_is_acknowledged_once_over_world_sizes(self, any_url: str, any_client: Client) -> None:
        """Two ranks, then three, then one: the next samples always follow the lowest position."""
        plan(any_url, [150, 150], partitions=2)
        found: list[int] = []
        for world, steps in ((2, 3), (3, 4), (1, 5), (4, 2)):
            batches = []
            for number in range(world):
                with rank_of(any_url, number, world) as loader:
                    batches.append([batch["y"].tolist() for batch in take(loader, steps)])
            found += interleaved(batches)
        found += [n for batch in interleaved(read_ranks(any_url, 1, 8)) for n in [batch]]
        assert found == list(range(300))
        audited = audit_stream(any_client, "t")
        assert (audited.is_clean, audited.delivered, audited.unread) == (True, {"g": 300}, 0)


class TestGoingBack:
    """A state is a position: exact, small, and refused if it cannot be kept."""

    @pytest.mark.parametrize("world", [2, 3, 1])
    def test_a_state_goes_on_exactly_there_also_with_other_ranks(self, any_url: str, world: int) -> None:
        """A resumed run must be the same as an uninterrupted one."""
        plan(any_url, [100, 100], partitions=2, epochs=2)
        states = []
        for number in range(2):
            with rank_of(any_url, number, 2) as loader:
                assert [len(one) for one in take(loader, 5)] == [2] * 5
                states.append(loader.state_dict())
                take(loader, 3)
        assert len({(state["epoch"], state["position"]) for state in states}) == 1
        assert states[0]["position"] == 80
        found = []
        for number in range(world):
            with rank_of(any_url, number, world) as loader:
                loader.load_state_dict(states[0])
                found.append([batch["y"].tolist() for batch in loader])
                assert next(iter(loader)).epoch == 1
        assert interleaved(found)[:120] == list(range(80, 200))

    def test_a_state_at_the_end_of_an_epoch_is_the_start_of_the_next(self, any_url: str) -> None:
        """Checkpoints are mostly taken there, and the epoch may be gone when they are loaded."""
        plan(any_url, [40], epochs=2)
        with rank_of(any_url) as loader:
            last = list(loader)[-1]
            assert last.position == 40
            state = loader.state_dict()
            assert (state["epoch"], state["position"]) == (1, 0)
            loader.load_state_dict(state)
            assert {batch.epoch for batch in loader} == {1}

    def test_going_back_reopens_later_epochs_and_closes_earlier_ones(self, any_url: str, any_client: Client) -> None:
        """Everything that was read after the state was taken is read again."""
        plan(any_url, [40], epochs=3)
        with rank_of(any_url) as loader:
            list(loader)
            take(loader, 2)
            state = loader.state_dict()
            list(loader)
            list(loader)
        with rank_of(any_url) as loader:
            loader.load_state_dict(state)
            assert [(batch.epoch, batch.position) for batch in loader] == [(1, 24), (1, 32), (1, 40)]
            assert [(batch.epoch, batch.position) for batch in loader] == [(2, 8 * step) for step in range(1, 6)]
        assert {epoch for _, epoch in load_roster(any_client, open_stream(any_client, "t").partitions[0]).closed} == {
            0, 1, 2,
        }  # fmt: skip

    def test_a_state_of_another_stream_or_batch_size_is_refused(self, any_url: str) -> None:
        """A position means nothing in another stream, and no later error would show it."""
        plan(any_url, [40])
        with rank_of(any_url) as loader:
            state = loader.state_dict()
            for changed in ({"stream_id": "other"}, {"batch_size": 9}, {"kind": "shared"}, {"spec": "0"}):
                with pytest.raises(StateMismatch):
                    loader.load_state_dict({**state, **changed})
        assert len(str(state)) < 4096

    def test_what_retention_may_have_taken_is_not_gone_back_to(self, any_url: str, any_client: Client) -> None:
        """It is an error, never a gap, because it is not known which acknowledged samples still exist."""
        plan(any_url, [100])
        partition = open_stream(any_client, "t").partitions[0]
        manifest = load_manifest(any_client, open_stream(any_client, "t"), 0)
        ranks = [rank(any_client, number) for number in range(2)]
        for who in ranks:
            report(any_client, who, manifest, 48)
        rewind(any_client, ranks[0], manifest, 16)
        report(any_client, ranks[0], manifest, 48)
        any_client.hset(partition.roster, "t:0", "1")
        with pytest.raises(ReplayTruncated, match="from position 16"):
            rewind(any_client, ranks[0], manifest, 16)
        rewind(any_client, ranks[0], manifest, 48)
        assert position_of(any_client, 0) == 48

    def test_what_is_trimmed_in_any_partition_is_not_gone_back_to(self, any_url: str, any_client: Client) -> None:
        """Positions are in the first partition, and the removed entries may have been in another."""
        plan(any_url, [50, 50, 50], partitions=3)
        stream = open_stream(any_client, "t")
        manifest, who = load_manifest(any_client, stream, 0), rank(any_client, 0, world=1)
        report(any_client, who, manifest, 120)
        rosters = [partition.roster for partition in stream.partitions]
        any_client.hset(rosters[2], "t:0", "1")
        with pytest.raises(ReplayTruncated, match="from position 112"):
            rewind(any_client, who, manifest, 112)
        assert position_of(any_client, 0) == 120
        any_client.hdel(rosters[2], "t:0")
        planned = [load_roster(any_client, partition).generation for partition in stream.partitions]
        rewind(any_client, who, manifest, 112)
        assert position_of(any_client, 0) == 112
        now = [load_roster(any_client, partition).generation for partition in stream.partitions]
        assert all(before < after for before, after in zip(planned, now, strict=True)), "a planned removal is refused"

    def test_what_is_trimmed_while_a_rank_goes_back_leaves_it_where_it_was(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that stayed behind in one partition only would hold up the group there."""
        plan(any_url, [50, 50], partitions=2)
        stream, calls = open_stream(any_client, "t"), list[str]()
        manifest, who = load_manifest(any_client, stream, 0), rank(any_client, 0, world=1)
        report(any_client, who, manifest, 88)

        def trimmed_at_last(client: Client, script: str, *call: Any) -> Any:
            calls.append(script)
            if len(calls) == 4:  # both partitions have been looked at, and the first has taken it back
                client.hset(stream.partitions[1].roster, "t:0", "1")
            return run_script(client, script, *call)

        monkeypatch.setattr(positions, "run_script", trimmed_at_last)
        with pytest.raises(ReplayTruncated, match="from position 16: group 'g' had acknowledged all below 88"):
            rewind(any_client, who, manifest, 16)
        assert position_of(any_client, 0) == 88

    def test_start_earliest_reads_again(self, any_url: str) -> None:
        """A second run of the same group over what is retained."""
        plan(any_url, [40], epochs=2)
        with rank_of(any_url) as loader:
            list(loader)
            list(loader)
        with rank_of(any_url, start="earliest") as loader:
            assert numbers(loader) == list(range(40))
        with rank_of(any_url, start=1) as loader:
            assert {batch.epoch for batch in loader} == {1}

    def test_batches_handed_back_come_again_in_order(self, any_url: str) -> None:
        """A framework that read ahead and stopped has trained on less than it pulled."""
        plan(any_url, [80])
        with rank_of(any_url, acknowledge="manual") as loader:
            batches = take(loader, 6)
            loader.acknowledge(batches[2])
            hooks_of(loader).return_batches(batches[3:])
            assert numbers(loader) == list(range(24, 80))

    def test_what_was_trained_on_behind_returned_batches_does_not_acknowledge_them(
        self, any_url: str, any_client: Client
    ) -> None:
        """A position covers everything before it, and the batches in between are still to be trained on."""
        plan(any_url, [80])
        with rank_of(any_url) as loader:
            hooks = hooks_of(loader)
            hooks.take_over(Silent())
            batches = take(loader, 4)
            for number in (0, 3):
                hooks.trained(batches[number])
            hooks.return_batches(batches[1:3])
            again = take(loader, 1)[0]
            assert again["y"].tolist() == batches[1]["y"].tolist()
            hooks.trained(again)
            hooks.acknowledger.flush()
            assert position_of(any_client, 0) == 16

    def test_a_process_that_reads_no_epoch_asks_for_its_manifest_once(self, url: str, client: Client) -> None:
        """A framework's worker processes read, and its main process acknowledges batch after batch."""
        plan(url, [80])
        who = Membership(open_stream(client, "t"), "g", rank_member(0), "i", RankOrder(0, 1, 8))
        claim = RankClaim(client, who, 30.0, lambda _: None)
        claim.join("resume")
        try:
            manifests = []
            for position in range(8, 80, 8):
                before = client.info("commandstats")["cmdstat_hgetall"]["calls"]
                claim.acknowledge(Batch({}, 0, [], position))
                claim.flush()
                manifests.append(client.info("commandstats")["cmdstat_hgetall"]["calls"] - before)
            assert manifests[0] > 0
            assert not any(manifests[1:])
            assert position_of(client, 0) == 72
        finally:
            claim.close()


class TestRetention:
    """The slowest rank decides which epochs go and which stay."""

    def write(self, url: str, total: int) -> None:
        """Write an epoch of two shards, in two partitions."""
        with Writer(
            "t",
            url=url,
            spec=WIDE,
            tuning=Tuning(block_bytes=2016, notify=lambda _: None),
            budget_bytes=BUDGET,
            partitions=2,
        ) as writer:
            epoch = writer.epoch(sizes=[total // 4] * 4)
            for number in range(4):
                with epoch.shard(number) as shard:
                    for offset in range(total // 4):
                        shard.write({"x": np.zeros(1000, np.uint8), "y": number * (total // 4) + offset})

    def test_only_what_every_rank_has_acknowledged_goes(self, any_url: str, any_client: Client) -> None:
        """The epoch's first steps also stay, because they fill its last step."""
        self.write(any_url, 160)
        stream = open_stream(any_client, "t")
        manifest = load_manifest(any_client, stream, 0)
        ranks = [rank(any_client, number, batch=4) for number in range(2)]
        report(any_client, ranks[0], manifest, 120)
        for partition in stream.partitions:
            assert Cleaner(any_client, stream, lambda _: None).free_bytes(partition, 10**9) == 0
        report(any_client, ranks[1], manifest, 72)
        freed = [
            Cleaner(any_client, stream, lambda _: None).free_bytes(partition, 10**9) for partition in stream.partitions
        ]
        assert sum(freed) == (72 - 16) * 1008
        audited = audit_stream(any_client, "t")
        assert audited.is_clean, audited.findings
        assert (audited.delivered, audited.unread) == ({"g": 72 + 24}, 64)

    def test_an_epoch_larger_than_the_budget_passes_through(self, any_url: str, any_client: Client) -> None:
        """Two ranks read while it is written, and the last step is still filled with the first samples."""
        with Writer(
            "t", url=any_url, spec=WIDE, tuning=Tuning(block_bytes=2016), budget_bytes=BUDGET, partitions=2
        ) as writer:
            assert writer.stream.budget_bytes == BUDGET
        with rank_of(any_url, 0, 2, 3, group="g"):
            pass
        thread = threading.Thread(target=self.write, args=(any_url, 1000))
        thread.start()
        ranks = read_ranks(any_url, 2, 3)
        thread.join(30)
        assert interleaved(ranks) == [*range(1000), *range(2)]
        audited = audit_stream(any_client, "t")
        assert audited.is_clean, audited.findings
        assert audited.epochs[0].trimmed > 0
        stream = open_stream(any_client, "t")
        for partition in stream.partitions:
            Cleaner(any_client, stream, lambda _: None).free_bytes(partition, 10**9)
        assert not retained_epochs(any_client, stream)
        assert not [key for key in any_client.keys("*") if b":pos:" in key]


@pytest.mark.parametrize("fields", [{"floor": -1, "0": 8}, {"0": 8, "1": -3}, {"-1": 8}])
def test_a_position_that_no_rank_can_have_is_named_as_damage(
    any_url: str, any_client: Client, fields: dict[str, int]
) -> None:
    """Everything above it would be read again, or kept for ever."""
    plan(any_url, [8])
    stream = open_stream(any_client, "t")
    key = stream.partitions[0].positions(0, "g")
    any_client.hset(key, mapping={"floor": 0, "0": 0})
    assert known_positions(any_client, stream, 0, "g").minimum(1) == 0
    any_client.hset(key, mapping=fields)
    with pytest.raises(DamagedKey, match="a rank or a position is below 0"):
        known_positions(any_client, stream, 0, "g")


def test_a_report_that_is_refused_for_another_reason_raises_that(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member would join again, for ever."""

    def refuse(*_: object) -> None:
        raise redis.ResponseError("NOPERM this user has no permissions")

    plan(any_url, [8])
    who, manifest = rank(any_client, 0, world=1), load_manifest(any_client, open_stream(any_client, "t"), 0)
    monkeypatch.setattr(positions, "run_script", refuse)
    with pytest.raises(redis.ResponseError, match="NOPERM"):
        report(any_client, who, manifest, 8)


def test_the_start_of_an_ordered_epoch_stays_though_it_is_acknowledged(any_url: str, any_client: Client) -> None:
    """The end of the epoch is filled from it. Retention must know that, and others must not count it as unread."""
    with planned_writer(any_url) as writer:
        shard = writer.epoch(sizes=[80]).shard(0)
        for number in range(40):
            shard.write(sample(number))
        shard.commit_all()
        shard.abort()
    stream = open_stream(any_client, "t")
    manifest, who = load_manifest(any_client, stream, 0), rank(any_client, 0, world=1)
    report(any_client, who, manifest, 32)
    group = load_roster(any_client, stream.partitions[0]).groups["g"]
    head, where = kept_head(group), (any_client, stream, manifest, "g", group, 0)
    assert 0 < head < 32
    assert group_bits(*where, 0, 40).tolist() == [True] * 32 + [False] * 8
    assert group_bits(*where, 8, 36).tolist() == [True] * 24 + [False] * 4
    assert group_bits(*where, 0, 40, may_go=True).tolist() == [False] * head + [True] * (32 - head) + [False] * 8
    report(any_client, who, manifest, 80)
    assert group_bits(*where, 0, 40, may_go=True).all()


def test_a_dropped_group_leaves_no_position(any_url: str, any_client: Client) -> None:
    """A new group of that name reads from the start."""
    plan(any_url, [40], partitions=3)
    with rank_of(any_url) as loader:
        list(loader)
    stream = open_stream(any_client, "t")
    assert [key for key in any_client.keys("*") if b":pos:" in key]
    drop_group(any_client, stream, "g")
    assert not [key for key in any_client.keys("*") if b":pos:" in key]
    with rank_of(any_url) as loader:
        assert numbers(loader) == list(range(40))
