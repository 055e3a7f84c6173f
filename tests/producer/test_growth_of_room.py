"""What making room costs the server in an epoch of many shards: counted in commands, not in time."""

from __future__ import annotations

from penstock_common.stream.groups.ledger import acknowledge
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.link.commands import Client
from penstock_common.stream.manifest import SHARDS_ASKED, first_unfinished, load_manifest
from penstock_producer.keeping.janitor import FAR_S, SHARDS_AT_ONCE, Janitor
from penstock_producer.writing.writer import EpochWriter, Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, sample

PLANNED, WRITTEN, HELD = 400, 60, 7


def calls(client: Client, name: str) -> int:
    """How often a command was called since the server was started."""
    return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])


def write(epoch: EpochWriter, number: int) -> None:
    """One shard of one sample."""
    with epoch.shard(number) as shard:
        shard.write(sample(number))


def test_what_is_gone_is_not_looked_at_again_and_what_is_far_off_only_now_and_then(
    any_url: str, any_client: Client
) -> None:
    """A writer that waits asks for room many times a second: with thousands of shards it did little else."""
    now = 0.0
    with Writer("t", url=any_url, spec=SPEC) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * PLANNED)
        for number in range(WRITTEN):
            write(epoch, number)
        manifest, partition = load_manifest(any_client, writer.stream, 0), writer.stream.partitions[0]
        settled = {number: [(0, 1)] for number in range(WRITTEN) if number != HELD}
        assert acknowledge(any_client, partition, manifest, "g", [], settled)

        janitor = Janitor(any_client, writer.stream, partition, lambda _: None, clock=lambda: now)
        assert janitor.make_room(10**9) == SAMPLE_BYTES * (WRITTEN - 1)
        asked, removed = calls(any_client, "xrevrange"), calls(any_client, "xdel")
        assert janitor.make_room(10**9) == 0
        assert calls(any_client, "xrevrange") - asked == 1 + SHARDS_AT_ONCE  # what is held, and what may come next

        write(epoch, PLANNED - 1)  # somebody writes from the end
        assert acknowledge(any_client, partition, manifest, "g", [], {PLANNED - 1: [(0, 1)], HELD: [(0, 1)]})
        assert janitor.make_room(10**9) == SAMPLE_BYTES
        now += FAR_S
        assert janitor.make_room(10**9) == SAMPLE_BYTES
        assert calls(any_client, "xdel") - removed == 2  # nothing that was gone was removed again


def test_a_writer_of_many_shards_removes_each_entry_once(any_url: str, any_client: Client) -> None:
    """Each shard's writer used to begin anew, and to remove again what those before it had removed."""
    shards = 120
    with Writer("t", url=any_url, spec=SPEC, budget_bytes=20 * SAMPLE_BYTES, notify=lambda _: None) as writer:
        join_group(any_client, Membership(writer.stream, "g", "", ""), declared=True)
        epoch = writer.epoch(sizes=[1] * shards)
        manifest = load_manifest(any_client, writer.stream, 0)
        before = calls(any_client, "xdel")
        for number in range(shards):
            write(epoch, number)
            assert acknowledge(any_client, writer.stream.partitions[0], manifest, "g", [], {number: [(0, 1)]})
        assert shards - 20 <= calls(any_client, "xdel") - before <= shards


def test_a_shard_in_the_last_quarter_asks_only_for_what_was_not_known_to_be_complete(
    any_url: str, any_client: Client
) -> None:
    """Whose turn it is used to be read out of the whole manifest by each shard, and manifests grow."""
    shards = 3 * SHARDS_ASKED
    with Writer("t", url=any_url, spec=SPEC, budget_bytes=(shards + 1) * SAMPLE_BYTES) as writer:
        epoch = writer.epoch(sizes=[1] * shards)
        for number in range(shards - 40):
            write(epoch, number)
        asked, read = calls(any_client, "hmget"), calls(any_client, "hgetall")
        for number in range(shards - 40, shards):
            write(epoch, number)
        assert calls(any_client, "hmget") - asked <= 50
        assert calls(any_client, "hgetall") - read <= 50
        assert first_unfinished(any_client, writer.stream, 0, range(shards)) is None
    with Writer("u", url=any_url, spec=SPEC) as writer:
        epoch = writer.epoch(sizes=[1] * shards)
        late = SHARDS_ASKED + 5
        for number in (*range(late), late + 1):
            write(epoch, number)
        assert first_unfinished(any_client, writer.stream, 0, range(shards)) == late
        assert first_unfinished(any_client, writer.stream, 0, range(late)) is None
