"""A feed's shard has one writer, also after the server forgot that it gave the shard out."""

from __future__ import annotations

from typing import Any

import pytest

from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import commit_commands, commit_keys, index_records, read_commit
from penstock_common.stream.manifest import load_manifest
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.spec import Spec
from tests.contracts.feed import SAMPLE_BYTES, SPEC, open_stream, produce, sample, stored, writer_of

QUIET: dict[str, Any] = {"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES}


def commit_next(client: Client, token: str) -> tuple[bool, str | None]:
    """Commits one more sample of shard 0 with this token: whether it was, and the newest record's token."""
    stream, manifest = open_stream(client, "t"), load_manifest(client, open_stream(client, "t"), 0)
    (newest,) = client.xrevrange(stream.partitions[0].index(0, 0), count=1)
    builder = BlockBuilder(Spec.of(SPEC), 1 << 20, 100)
    builder.add(sample(999))
    block = builder.finish(int(newest[0].split(b"-")[0]), [])
    fields = encode(block, stream=stream.id, epoch=0, shard=0)
    commands = commit_commands(
        commit_keys(stream.partitions[0], manifest.epoch, 0), manifest, 0, block, fields, writer=token
    )
    channel = open_channel(client)
    channel.send(commands)
    answer: Any = [channel.read() for _ in commands][-1]
    channel.close()
    is_committed, progress = read_commit(answer[-1], block, manifest.live_state, token)
    return is_committed, progress.writer


def test_each_record_of_a_feed_names_the_writer_that_took_the_shard(any_url: str, any_client: Client) -> None:
    """The manifest forgets with a server that comes back older; the record says who wrote it all the same."""
    with writer_of(any_url, **QUIET) as one, writer_of(any_url, **QUIET) as two:
        for number in range(20):
            one.write(sample(number))
            two.write(sample(number))
    stream = open_stream(any_client, "t")
    fields = any_client.hgetall(stream.keys.manifest(0))
    taken = {name[2:].decode(): int(shard) for name, shard in fields.items() if name.startswith(b"w:")}
    for shard in (0, 1):
        records = index_records(any_client, stream.partitions[0], 0, shard)
        (token,) = {record.writer for record in records}
        assert taken[token] == shard


def test_records_of_a_planned_shard_name_no_writer(any_url: str, any_client: Client) -> None:
    """Another worker continues the shard of a dead one, and must not be refused."""
    produce(any_url, "t", 20)
    stream = open_stream(any_client, "t")
    assert {record.writer for record in index_records(any_client, stream.partitions[0], 0, 0)} == {""}
    assert b"w" not in any_client.xrange(stream.partitions[0].index(0, 0))[0][1]
    assert commit_next(any_client, "") == (True, "")


@pytest.mark.parametrize("token", ["", "another"])
def test_a_block_behind_another_writers_is_taken_back(url: str, client: Client, token: str) -> None:
    """Its offsets come next, and it would be among samples that its writer does not know."""
    with writer_of(url, **QUIET) as writer:
        for number in range(8):
            writer.write(sample(number))
        writer.flush()
        (own,) = {record.writer for record in index_records(client, writer.stream.partitions[0], 0, 0)}
        assert commit_next(client, token) == (False, own)
        assert stored(client, "t", 0).total() == 8
    assert commit_next(client, own) == (True, own)


def test_a_writer_ends_its_shard_though_the_streams_slot_forgot_that_it_was_taken(
    any_url: str, any_client: Client
) -> None:
    """On a cluster its own connection leads to another server, so it does not notice, and the others must go on."""
    with writer_of(any_url, **QUIET) as one:
        for number in range(8):
            one.write(sample(number))
        one.flush()
        two = writer_of(any_url, **QUIET)
        for number in range(8, 16):
            two.write(sample(number))
        two.flush()
        key = open_stream(any_client, "t").keys.manifest(0)
        (token,) = [name for name, shard in any_client.hgetall(key).items() if name[:2] == b"w:" and shard == b"1"]
        any_client.hdel(key, token)
        any_client.hset(key, "next_shard", 1)
        two.close()
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "open"
    manifest = load_manifest(any_client, open_stream(any_client, "t"), 0)
    assert (manifest.state, manifest.sizes) == ("produced", (8, 8))
