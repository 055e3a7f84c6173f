"""The scripts alone: those that may run twice do so, and rules that other tests show only indirectly."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from penstock_common.errors import WritesRefused
from penstock_common.server.connection import open_channel
from penstock_common.server.scripts import load_script
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client, EntryId, parse_id, run_script
from penstock_common.stream.damage import unreadable_value
from penstock_common.stream.entries import (
    commit_commands,
    commit_keys,
    index_records,
    is_sealed,
    last_given,
    trim_entries,
)
from penstock_common.stream.events import EVENTS_KEPT
from penstock_common.stream.groups.ledger import done_bits
from penstock_common.stream.groups.roster import Membership, join_group
from penstock_common.stream.keys import LAST, PartitionKeys
from penstock_common.stream.manifest import Manifest, abandon_epoch, load_manifest, open_epoch
from penstock_common.stream.removal.deletion import release_epoch, retire_epoch
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import Stream
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.spec import Spec
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, sample, writer_of
from tests.contracts.fork_server import ROOT
from tests.house.lua import LUA_FILES

_MILLISECONDS = re.compile(rb"\b1\d{12}\b")


@dataclass
class World:
    """A stream with a planned epoch 0 of two shards, one half written, and an open epoch 1 of a feed."""

    client: Client
    stream: Stream
    planned: Manifest
    feed: Manifest
    ids: list[bytes]
    """The entries of epoch 0, all of them given to member ``m`` of group ``g``."""

    @property
    def partition(self) -> PartitionKeys:
        """Return the only partition."""
        return self.stream.partitions[0]

    def state(self) -> dict[bytes, Any]:
        """Return all that the server holds except hints, without times of day."""
        found: dict[bytes, Any] = {}
        for key in sorted(self.client.scan_iter()):
            if key != self.stream.keys.events.encode():
                found[key] = self._content(key)
        return found

    def _content(self, key: bytes) -> Any:
        kind = self.client.type(key)
        if kind == b"hash":
            return {field: _comparable(value) for field, value in self.client.hgetall(key).items()}
        if kind == b"string":
            return self.client.get(key)
        named = [info["name"] for info in self.client.xinfo_groups(key)]
        held = {name: self.client.xpending_range(key, name, "-", "+", 100) for name in named}
        pending = {name: [(one["message_id"], one["consumer"]) for one in some] for name, some in held.items()}
        return self.client.xrange(key), pending, self.client.xinfo_groups(key) if not named else None


def _comparable(value: bytes) -> Any:
    """Return a field's value without the time of day. cjson writes an object's members in any order."""
    text = _MILLISECONDS.sub(b"0", value)
    return json.loads(text) if text.startswith(b"{") else text


Twice = Callable[[World], tuple[str, list[str], list[Any]]]
"""A script, its keys and its arguments."""
CASES: dict[str, Twice] = {}


def case(make: Twice) -> Twice:
    """Register a case whose script runs twice."""
    CASES[make.__name__] = make
    return make


@pytest.fixture
def world(any_url: str, any_client: redis.Redis) -> Iterator[World]:
    """Make a world with a real writer."""
    client: Client = any_client
    with writer_of(any_url, spec=SPEC, block_bytes=5 * SAMPLE_BYTES) as writer:
        shard = writer.epoch(0, sizes=[10, 10]).shard(0)
        for number in range(10):
            shard.write(sample(number))
        shard.commit_all()
        shard.abort()
        feed = open_epoch(client, writer.stream, kind="feed")
        yield _joined(client, writer, feed)


def _joined(client: Client, writer: Writer, feed: Manifest) -> World:
    stream, planned = writer.stream, load_manifest(client, writer.stream, 0)
    join_group(client, Membership(stream, "g", "m", "inc"), declared=True)
    key = stream.partitions[0].entries(0)
    client.xreadgroup("g", "m", {key: ">"})
    return World(client, stream, planned, feed, [entry_id for entry_id, _ in client.xrange(key)])


def manifest_keys(w: World, epoch: int) -> list[str]:
    """Return the keys that the scripts of completion take."""
    return [w.stream.keys.manifest(epoch), w.stream.keys.events, w.stream.keys.epochs]


@case
def a_shard_of_two_is_finished(w: World) -> Any:
    """If it counted twice, the epoch would be complete with half of its samples."""
    return load_script("finish_shard"), manifest_keys(w, 0), [w.planned.id, 0, 0, 10]


@case
def the_last_shard_is_finished(w: World) -> Any:
    """The last shard makes the epoch produced."""
    run_script(w.client, load_script("finish_shard"), manifest_keys(w, 0), [w.planned.id, 0, 1, 10])
    return load_script("finish_shard"), manifest_keys(w, 0), [w.planned.id, 0, 0, 10]


@case
def a_feeds_shard_of_two_is_finished(w: World) -> Any:
    """If it counted twice, it would end the epoch while its other writer is at work."""
    for token in ("a", "b"):
        run_script(w.client, load_script("take_shard"), manifest_keys(w, 1)[:1], [token, w.feed.id])
    return load_script("finish_feed_shard"), manifest_keys(w, 1), [w.feed.id, 1, 0, 10]


@case
def a_feeds_last_shard_is_finished(w: World) -> Any:
    """The last shard sizes the epoch."""
    run_script(w.client, load_script("take_shard"), manifest_keys(w, 1)[:1], ["a", w.feed.id])
    return load_script("finish_feed_shard"), manifest_keys(w, 1), [w.feed.id, 1, 0, 10]


@case
def a_feeds_shard_is_taken(w: World) -> Any:
    """A shard without a writer would keep the epoch open."""
    return load_script("take_shard"), manifest_keys(w, 1)[:1], ["token", w.feed.id]


@case
def a_feeds_shard_is_taken_again(w: World) -> Any:
    """Take a shard again after a server came back without it."""
    return load_script("retake_shard"), manifest_keys(w, 1)[:1], [w.feed.id, "token", 3]


@case
def a_shard_is_reserved(w: World) -> Any:
    """Reserve a shard by its number."""
    return load_script("reserve_shard"), manifest_keys(w, 1)[:1], [w.feed.id, 4]


@case
def an_epoch_is_closed_as_it_stands(w: World) -> Any:
    """Close an epoch, as an operator does."""
    keys = [*manifest_keys(w, 1), w.stream.keys.meta]
    return load_script("close_as_committed"), keys, [w.feed.id, 1, w.stream.id, 5, 6]


@case
def an_epoch_is_sized(w: World) -> Any:
    """Size an epoch that has no complete shard."""
    return load_script("size_epoch"), manifest_keys(w, 1), [w.feed.id, 1, 2, "[5,5]"]


@case
def an_epoch_is_begun(w: World) -> Any:
    """Begin an epoch. Its first fields stay."""
    keys = [w.stream.keys.meta, w.stream.keys.manifest(2), w.stream.keys.epochs]
    return load_script("begin_manifest"), keys, [w.stream.id, 2, "open", "id", "x", "state", "open"]


@case
def a_feeds_next_epoch_is_begun(w: World) -> Any:
    """Begin the next epoch. A call that is repeated after a lost reply finds its own one."""
    keys = [w.stream.keys.meta, w.stream.keys.manifest(2), w.stream.keys.epochs]
    return load_script("begin_next_epoch"), keys, [w.stream.id, 2, "x", "open", "kind", "feed"]


@case
def an_epoch_is_registered(w: World) -> Any:
    """Register an epoch in one partition."""
    return load_script("open_epoch"), [w.partition.roster, w.partition.state(2), w.partition.entries(2)], [2, "x"]


@case
def a_registration_is_taken_back(w: World) -> Any:
    """Undo a registration. Its bytes are subtracted once."""
    w.client.hincrby(w.partition.roster, "b:1", 100)
    w.client.hincrby(w.partition.roster, "bytes", 100)
    return (
        load_script("undo_open_epoch"),
        [w.partition.roster, w.partition.state(1), w.partition.entries(1)],
        [1, w.feed.id],
    )


@case
def a_manifest_is_taken_back(w: World) -> Any:
    """Undo a manifest that could not be registered."""
    return load_script("forget_manifest"), [w.stream.keys.manifest(1), w.stream.keys.epochs], [w.feed.id, 1]


@case
def a_manifest_is_abandoned(w: World) -> Any:
    """Abandon an epoch."""
    keys = [w.stream.keys.manifest(1), w.stream.keys.epochs, w.stream.keys.meta]
    return load_script("abandon_manifest"), keys, [w.feed.id, 1, w.stream.id]


@case
def a_state_is_abandoned(w: World) -> Any:
    """Abandon an epoch in one partition."""
    return load_script("abandon_state"), [w.partition.roster, w.partition.state(1)], [w.feed.id]


@case
def a_release_is_noted(w: World) -> Any:
    """Note the number of a released epoch."""
    return load_script("note_released"), [w.stream.keys.meta], [w.stream.id, "", "0"]


@case
def a_retired_epoch_is_forgotten(w: World) -> Any:
    """Forget that an epoch was retired."""
    w.client.hset(w.partition.roster, "x:0", w.planned.id)
    return load_script("forget_field"), [w.partition.roster], ["x:0", w.planned.id]


@case
def keys_that_have_the_name_are_unlinked(w: World) -> Any:
    """Unlink keys of a stream that is deleted."""
    return load_script("unlink_named"), [w.stream.keys.meta, w.stream.keys.epochs], [w.stream.id]


@case
def an_epoch_is_retired(w: World) -> Any:
    """Retire an epoch. Its bytes are subtracted once, and groups note once that they had read it."""
    run_script(w.client, load_script("close_epoch_for_group"), [w.partition.roster], ["g", 0])
    return load_script("retire_epoch"), [w.partition.roster, w.partition.state(0)], ["", 0, w.planned.id]


@case
def entries_are_acknowledged(w: World) -> Any:
    """Acknowledge entries with the bits of their samples."""
    keys = [w.partition.state(0), w.partition.entries(0), w.partition.ledger(0, "g", 0)]
    return load_script("acknowledge"), keys, [w.planned.live_state, "g", 1, w.ids[0], 1, 0, 5]


@case
def an_entry_is_buried(w: World) -> Any:
    """Make an entry a dead letter."""
    keys = [w.partition.state(0), w.partition.entries(0), w.partition.dead(0, "g")]
    return load_script("dead_letter"), keys, [w.planned.live_state, "g", w.ids[0], "unreadable"]


@case
def entries_are_trimmed(w: World) -> Any:
    """Trim entries. Their bytes, and their count in a segment, are subtracted once."""
    w.client.hset(w.partition.segments(0), "segment", 2)
    keys = [w.partition.roster, w.partition.entries(0), w.partition.segments(0)]
    generation = w.client.hget(w.partition.roster, "gen")
    return load_script("trim"), keys, [generation, 0, w.ids[0], 5 * SAMPLE_BYTES, "segment"]


@case
def a_segment_is_sealed(w: World) -> Any:
    """Seal a segment for a dead writer."""
    return load_script("seal_segments"), [w.partition.segments(0), w.partition.state(0)], [w.planned.id, 2, "segment"]


@case
def a_segment_is_freed(w: World) -> Any:
    """Free a segment that its writer sealed."""
    w.client.hset(w.partition.segments(0), mapping={"segment": 0, "s:segment": 1})
    return load_script("free_segments"), [w.partition.segments(0)], ["segment"]


@case
def a_group_closes_an_epoch(w: World) -> Any:
    """Close an epoch whose ledger covers the manifest."""
    return load_script("close_epoch_for_group"), [w.partition.roster], ["g", 0]


@case
def a_member_leaves(w: World) -> Any:
    """Return the leases of a member that leaves."""
    return load_script("leave_group"), [w.partition.roster, w.partition.entries(0)], ["g", "m", "inc", 1, w.ids[0]]


@case
def a_group_is_dropped(w: World) -> Any:
    """Drop a group. Its field is removed, and the generation rises once."""
    return load_script("drop_group"), [w.partition.roster, w.partition.entries(0), w.partition.entries(1)], ["g"]


@case
def a_replay_holds_an_epoch(w: World) -> Any:
    """Hold an epoch by a replay's lease."""
    return load_script("lease_replay"), [w.partition.roster], ["token", 0, 30_000, 0]


@case
def a_rank_reports(w: World) -> Any:
    """Report the position of a rank."""
    member = '{"inc":"i","seen":1}'
    w.client.hset(w.partition.roster, mapping={"g:o": '{"world":1,"first":0,"holds":true}', "m:o:rank-0": member})
    keys = [w.partition.roster, w.partition.state(0), w.partition.positions(0, "o")]
    return load_script("report_position"), keys, [w.planned.live_state, "o", 0, "i", 5]


@case
def samples_are_given_up(w: World) -> Any:
    """Discard samples, as an operator does."""
    keys = [w.partition.state(0), w.partition.entries(0), w.partition.dead(0, "g"), w.partition.ledger(0, "g", 0)]
    return load_script("give_up_samples"), keys, [w.planned.live_state, "g", w.ids[0], w.ids[0], "{}", 1, 0, 5]


@case
def a_dead_letter_is_given_back(w: World) -> Any:
    """Give a dead letter back to any member."""
    run_script(w.client, *an_entry_is_buried(w))
    keys = [w.partition.state(0), w.partition.entries(0), w.partition.dead(0, "g")]
    return load_script("retry_dead_letter"), keys, [w.planned.live_state, "g", w.ids[0]]


@case
def bytes_are_balanced(w: World) -> Any:
    """Correct the counted bytes once."""
    return load_script("correct_bytes"), [w.partition.roster], [0, 10 * SAMPLE_BYTES, 5 * SAMPLE_BYTES]


@case
def an_epoch_is_pinned(w: World) -> Any:
    """Pin an epoch. The generation rises once."""
    return load_script("pin_epoch"), [w.partition.roster], [0]


@case
def a_setting_is_changed(w: World) -> Any:
    """Change a setting of an existing stream."""
    return load_script("set_stream_field"), [w.stream.keys.meta], [w.stream.id, "budget_bytes", 5]


@case
def a_deletion_is_begun(w: World) -> Any:
    """Begin a deletion, after which nothing is opened."""
    return load_script("mark_deleting"), [w.stream.keys.meta], [w.stream.id, 5]


@case
def a_loss_is_noted(w: World) -> Any:
    """Note a loss in the manifest."""
    return load_script("note_loss"), manifest_keys(w, 0)[:1], [w.planned.id, 5, "lost:x", "{}"]


@case
def files_are_taken_for_an_epoch(w: World) -> Any:
    """Take the files of a watched folder for an epoch."""
    return load_script("take_files"), [w.stream.keys.watched, w.stream.keys.meta], [w.stream.id, 2, "a.jpg", "1"]


@pytest.mark.parametrize("name", CASES)
def test_a_script_whose_answer_was_lost_does_the_same_again(world: World, name: str) -> None:
    """A patient client asks again, and a count, a subtraction or a rise must happen once."""
    script, keys, arguments = CASES[name](world)
    before = world.state()
    run_script(world.client, script, keys, arguments)
    once = world.state()
    assert once != before
    run_script(world.client, script, keys, arguments)
    assert world.state() == once


# --- single rules -----------------------------------------------------------------------------------------------------


def commit(w: World, first: int, *, count: int = 5, holes: int = 0, segment: str = "") -> Any:
    """Commit a block of shard 0, and return the last answer of its transaction."""
    builder = BlockBuilder(Spec.of(SPEC), 1 << 20, 100)
    for number in range(count):
        builder.add(sample(number))
    block = builder.finish(first, range(first + count, first + count + holes))
    fields = encode(block, stream=w.stream.id, epoch=0, shard=0) if count else []
    bad = dict.fromkeys(block.holes, "{}")
    commands = commit_commands(
        commit_keys(w.partition, w.planned.epoch, 0), w.planned, 0, block, fields, bad=bad, segment=segment
    )
    channel = open_channel(w.client)
    channel.send(commands)
    answers: Any = [channel.read() for _ in commands]
    channel.close()
    return answers[-1] if count else answers


def test_a_retired_epoch_takes_no_late_write_and_no_late_acknowledgement(world: World) -> None:
    """Keys are unlinked after it: a write in between would stay for ever, or come back."""
    assert retire_epoch(world.client, world.partition, 0, world.planned.id)
    assert world.client.get(world.partition.state(0)) == f"gone:{world.planned.id}".encode()
    before = world.state()
    (*_, said) = commit(world, 10)
    assert said[1] == f"gone:{world.planned.id}".encode()
    script, keys, arguments = entries_are_acknowledged(world)
    assert run_script(world.client, script, keys, arguments) == -1
    assert world.state() == before


def test_a_release_that_comes_second_leaves_nothing_behind(world: World) -> None:
    """Another process saw the epoch before the first release, and releases it late."""
    assert release_epoch(world.client, world.stream, 0)
    before = world.state()
    assert retire_epoch(world.client, world.partition, 0, world.planned.id)
    assert world.state() == before


def test_trimming_notes_what_groups_that_hold_no_data_have_lost(world: World) -> None:
    """Such a group learns it when it returns. Without the note it would continue behind a gap."""
    who = Membership(world.stream, "away", "", "")
    join_group(world.client, who, declared=False)
    roster = world.partition.roster
    record = json.loads(world.client.hget(roster, "g:away"))
    world.client.hset(roster, "g:away", json.dumps({**record, "holds": False}))
    script, keys, arguments = entries_are_trimmed(world)
    assert run_script(world.client, script, keys, arguments) == 5 * SAMPLE_BYTES
    assert json.loads(world.client.hget(roster, "g:away"))["lost"] == [0, 0]
    assert "lost" not in json.loads(world.client.hget(roster, "g:g"))
    assert world.client.hget(roster, "t:0") == b"1"


def test_a_block_of_bad_samples_alone_is_committed_at_maxmemory(
    fresh_server: Callable[..., EmbeddedServer],
) -> None:
    """It takes no space, and a shard that waited for space because of it would wait for itself."""
    server = fresh_server()
    with connect(server.url) as client, writer_of(server.url, spec=SPEC) as writer:
        planned = open_epoch(client, writer.stream, 0, sizes=[10])
        w = World(client, writer.stream, planned, planned, [])
        client.config_set("maxmemory", "1mb")
        with pytest.raises(WritesRefused):
            client.set("any", "value")
        (answer,) = commit(w, 0, count=0, holes=10)
        assert answer == 0
        assert client.xrange(w.partition.index(0, 0))[0][0] == b"10-0"


def test_each_commit_into_a_segment_is_counted_there_and_each_trim_taken_off(world: World) -> None:
    """A count too high keeps a file for ever. One too low gives it to another writer while it is read."""
    segments = world.partition.segments(0)
    for at in (10, 15):
        commit(world, at, segment="a")
    commit(world, 20, segment="b")
    assert world.client.hgetall(segments) == {b"a": b"2", b"b": b"1"}
    commit(world, 99, segment="a")  # refused
    assert world.client.hgetall(segments) == {b"a": b"2", b"b": b"1"}
    records = [record for record in index_records(world.client, world.partition, 0, 0) if record.segment]
    generation = world.client.hget(world.partition.roster, "gen").decode()
    freed = trim_entries(world.client, world.partition, generation, 0, [records[0], records[2]])
    assert freed == records[0].nbytes + records[2].nbytes
    assert world.client.hgetall(segments) == {b"a": b"1", b"b": b"0"}
    assert trim_entries(world.client, world.partition, generation, 0, records[:1]) == 0
    assert world.client.hgetall(segments) == {b"a": b"1", b"b": b"0"}


def test_an_acknowledgement_sets_the_bits_of_all_its_ranges_and_no_others(world: World) -> None:
    """Ranges of several shards follow each other, and one offset too far acknowledges a sample that no member was
    given.
    """
    ranges = {0: [(0, 1), (3, 8), (9, 31), (40, 64), (70, 70)], 1: [(7, 9)], 3: [(16, 24), (25, 26)]}
    told: list[Any] = []
    for spans in ranges.values():
        told += [len(spans), *(bound for span in spans for bound in span)]
    ledgers = [world.partition.ledger(0, "g", shard) for shard in ranges]
    keys = [world.partition.state(0), world.partition.entries(0), *ledgers]
    arguments = [world.planned.live_state, "g", len(world.ids), *world.ids, *told]
    assert run_script(world.client, load_script("acknowledge"), keys, arguments) == len(world.ids)
    assert world.client.xpending(world.partition.entries(0), "g")["pending"] == 0
    for shard, spans in ranges.items():
        expected = [any(low <= offset < high for low, high in spans) for offset in range(80)]
        assert done_bits(world.client, world.partition, 0, "g", shard, 0, 80).tolist() == expected


def seal(w: World, manifest_id: str) -> Any:
    """Seal the segment ``a`` of epoch 0 for a dead writer."""
    keys = [w.partition.segments(0), w.partition.state(0)]
    return run_script(w.client, load_script("seal_segments"), keys, [manifest_id, 2, "a"])


def newest_noted(w: World) -> EntryId:
    """Return the newest entry of epoch 0, as the commits note it."""
    return last_given(w.client, w.partition, 0)[LAST]


def test_a_seal_of_another_manifest_or_a_released_epoch_changes_nothing(world: World) -> None:
    """A late seal would close a segment of the epoch's successor, or leave a key that nothing removes."""
    before = world.state()
    assert seal(world, world.feed.id) == 0
    assert world.state() == before
    abandon_epoch(world.client, world.stream, 0)
    assert seal(world, world.planned.id) == 1  # its entries are still read, and its files used again
    assert world.client.hgetall(world.partition.segments(0)) == {b"s:a": b"2"}
    assert release_epoch(world.client, world.stream, 0)
    before = world.state()
    assert seal(world, world.planned.id) == 0
    assert world.state() == before


def test_a_freed_segment_of_a_dead_writer_still_takes_no_entry(world: World) -> None:
    """The writer's last commit may arrive after another writer has reused the file, and would name foreign bytes."""
    segments = world.partition.segments(0)
    world.client.hset(segments, mapping={"b": 0, "s:b": 1})  # the other one was sealed by its own writer
    seal(world, world.planned.id)
    assert run_script(world.client, load_script("free_segments"), [segments], ["a", "b"]) == [b"a", b"b"]
    assert world.client.hgetall(segments) == {b"s:a": b"2"}
    assert is_sealed(commit(world, 10, segment="a")[-1])
    assert world.client.hgetall(segments) == {b"s:a": b"2"}


def test_a_commit_into_a_sealed_segment_is_refused_and_taken_back(world: World) -> None:
    """Its file may hold another writer's samples by now, which an entry that stayed would give to trainers."""
    seal(world, world.planned.id)
    before, newest = world.state(), newest_noted(world)
    assert is_sealed(commit(world, 10, segment="a")[-1])
    assert world.state() == before
    assert newest_noted(world) == newest
    assert commit(world, 10, segment="b")[-1] > 0  # the same samples are taken from another segment


def test_a_refused_commit_leaves_the_note_of_the_newest_entry_as_it_was(world: World) -> None:
    """The note shows how far groups are behind and whether a writer is active, and a refused commit wrote nothing."""
    newest = newest_noted(world)
    assert newest == parse_id(world.ids[-1])
    for first in (0, 99):  # committed already, and behind a gap
        assert commit(world, first)[-1][0] == b"10-0"
        assert newest_noted(world) == newest
    commit(world, 10)
    assert newest_noted(world) == parse_id(world.client.xrevrange(world.partition.entries(0), count=1)[0][0]) != newest


def test_what_the_server_said_of_a_damaged_key_is_told() -> None:
    """The representation of a redis error is only its class, which names the place but not the cause."""
    told = str(unreadable_value("penstock:{t}:meta", ResponseError("value is not an integer or out of range")))
    assert "did not write (ResponseError('value is not an integer or out of range'))" in told


def test_scripts_keep_as_many_events_as_the_code() -> None:
    """A key that one script cut shorter would lose the hint that a reader waits for."""
    texts = [path.read_text() for path in LUA_FILES]
    kept = [number for text in texts for number in re.findall(r"'MAXLEN', '~', '(\d+)'", text)]
    assert len(kept) == 5
    kept += re.findall(r"EVENTS_KEPT = (\d+);", (ROOT / "js/src/stream/events.ts").read_text())
    assert set(kept) == {str(EVENTS_KEPT)}
