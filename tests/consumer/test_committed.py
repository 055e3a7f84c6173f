"""Shared reading compares each entry with the index: entries that no commit wrote become dead letters."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest

from penstock.__main__ import main
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import abandon_epoch
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.removal.deletion import release_epoch
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.header import Header
from penstock_consumer.read import receive
from penstock_consumer.read.receive import CommitCheck
from tests.contracts.feed import (
    SAMPLE_BYTES,
    SPEC,
    entries,
    loader_of,
    numbers,
    open_stream,
    produce,
    sample,
    writer_of,
)

BLOCK = 5 * SAMPLE_BYTES
Fields = dict[Any, Any]


def append(client: Client, fields: Fields) -> str:
    """Append an entry to epoch 0 of 't' as a foreign tool does, and return its id."""
    entry_id: Any = client.xadd(open_stream(client, "t").partitions[0].entries(0), fields)
    return str(entry_id.decode())


def copy_of(client: Client, position: int) -> Fields:
    """Return the fields of an entry that a commit wrote."""
    return dict(entries(client, "t", 0)[position][1])


def require_set_aside(client: Client, said: list[str], forged: list[str]) -> None:
    """Require that each forged entry is a dead letter, reported once, that nothing else is, and that nothing is
    pending.
    """
    letters = list_bad(client, open_stream(client, "t")).dead
    assert sorted(letter.entry for letter in letters) == sorted(forged)
    for entry_id in forged:
        told = [line for line in said if entry_id in line]
        assert len(told) == 1
        assert "UncommittedEntry: no record of the index names this entry" in told[0]
    assert client.xpending(open_stream(client, "t").partitions[0].entries(0), "g")["pending"] == 0


def test_a_copy_of_an_acknowledged_entry_is_not_trained_on(
    any_url: str, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checksum and its position are right, so only the index distinguishes it from the entry that a commit
    wrote.
    """
    said: list[str] = []
    with (
        writer_of(any_url, spec=SPEC, block_bytes=BLOCK) as writer,
        loader_of(any_url, batch_size=5, notify=said.append) as loader,
    ):
        with writer.epoch() as epoch:
            for number in range(20):
                epoch.write(sample(number))
            batches = iter(loader)
            found = []
            for _ in range(2):
                batch = next(batches)
                found += numbers([batch])
                loader.acknowledge(batch)
            forged = [append(any_client, copy_of(any_client, 0))]
            for number in range(20, 40):
                epoch.write(sample(number))
        found += numbers(batches)
        assert loader.stats().bad_entries == 1
    assert sorted(found) == list(range(40))
    require_set_aside(any_client, said, forged)
    assert main(["bad", "list", "t", "--url", any_url]) == 0
    assert forged[0] in capsys.readouterr().out


def test_no_forged_entry_of_a_feed_is_trained_on(any_url: str, any_client: Client) -> None:
    """They are a copy, other samples with their own checksum, and offsets that are still to come.

    No record names them.
    """
    said: list[str] = []
    with writer_of(any_url, spec=SPEC, block_bytes=BLOCK) as writer:
        for number in range(20):
            writer.write(sample(number))
        writer.flush()
        copy = copy_of(any_client, 0)
        meta = json.loads(copy[b"meta"])
        forged = [append(any_client, fields) for fields in (copy, moved(copy, meta["first"] + 22), other(any_client))]
        for number in range(20, 40):
            writer.write(sample(number))
    found = []
    with loader_of(any_url, batch_size=5, notify=said.append) as loader:
        for batch in islice(loader, 8):
            found += numbers([batch])
            loader.acknowledge(batch)
    assert sorted(found) == list(range(40))
    require_set_aside(any_client, said, forged)


def moved(fields: Fields, first: int) -> Fields:
    """Return the same samples at other offsets, because the checksum covers only the payload."""
    return {**fields, b"meta": json.dumps({**json.loads(fields[b"meta"]), "first": first}).encode()}


def other(client: Client) -> Fields:
    """Return five samples that no producer made, encoded as by a producer."""
    stream = open_stream(client, "t")
    builder = BlockBuilder(stream.require_spec(), BLOCK, 5)
    for number in range(1000, 1005):
        builder.add(sample(number))
    fields = encode(builder.finish(0), stream=stream.id, epoch=0, shard=0)
    return {name: bytes(value) for name, value in fields}


def test_what_a_killed_member_was_given_is_compared_too(any_url: str, any_client: Client) -> None:
    """Another member takes it over by id: the true entries are trained on, and the forged one is not."""
    produce(any_url, "t", 40, block_samples=5)
    forged = [append(any_client, copy_of(any_client, 1))]
    stream = open_stream(any_client, "t")
    with loader_of(any_url):
        pass  # the group exists now
    key = stream.partitions[0].entries(0)
    any_client.xreadgroup("g", "killed", {key: ">"})
    said: list[str] = []
    with loader_of(any_url, lease_s=1.0, notify=said.append) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    require_set_aside(any_client, said, forged)


def test_the_comparison_costs_no_more_than_a_request_an_answer(any_url: str, any_client: Client) -> None:
    """A round trip an entry would cost small entries more than their payload does."""
    produce(any_url, "t", 4000, block_samples=5)
    any_client.config_resetstat()
    with loader_of(any_url, batch_size=100) as loader:
        assert len(numbers(loader)) == 4000
    calls = {name: one["calls"] for name, one in any_client.info("commandstats").items()}
    assert 0 < calls["cmdstat_eval"] <= calls["cmdstat_xreadgroup"]
    assert "cmdstat_xrange" not in calls or calls["cmdstat_xrange"] <= calls["cmdstat_eval"] + 5


def test_a_connection_that_was_closed_while_it_was_idle_is_no_outage(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow trainer requests a page each minute, and servers close idle connections."""
    monkeypatch.setattr(receive, "CHECK_PAGE", 1)
    produce(any_url, "t", 40, block_samples=5)
    cut = 0
    real = CommitCheck.ask

    def ask(self: CommitCheck, header: Header) -> None:
        nonlocal cut
        for info in any_client.client_list():
            if info["cmd"] == "eval":
                cut += any_client.client_kill_filter(_id=info["id"])
        real(self, header)

    monkeypatch.setattr(CommitCheck, "ask", ask)
    said: list[str] = []
    with loader_of(any_url, notify=said.append) as loader:
        assert sorted(numbers(loader)) == list(range(40))
    assert cut > 0
    assert [line for line in said if "dead letter" in line or "answer" in line or "reading" in line] == []


def test_an_entry_that_was_received_before_its_epoch_was_released_is_no_dead_letter(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index was removed with the epoch, which does not show who wrote it."""
    produce(any_url, "t", 10, block_samples=5, epochs=2)
    stream, real = open_stream(any_client, "t"), CommitCheck.ask

    def ask(self: CommitCheck, header: Header) -> None:
        if header.epoch == header.first == 0:
            abandon_epoch(any_client, stream, 0)
            assert release_epoch(any_client, stream, 0)
        real(self, header)

    monkeypatch.setattr(CommitCheck, "ask", ask)
    said: list[str] = []
    with loader_of(any_url, notify=said.append) as loader:
        assert numbers(loader) == list(range(10))
        assert loader.stats().bad_entries == 0
    assert [line for line in said if "dead letter" in line] == []


def test_an_entry_that_the_server_forgot_with_its_record_is_no_dead_letter(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that restarts without its newest writes has neither, and the audit objected to the samples made
    again.
    """
    produce(any_url, "t", 10)
    forgotten = append(any_client, copy_of(any_client, 0))  # no record names it, as after the restart
    key, real = open_stream(any_client, "t").partitions[0].entries(0), CommitCheck.require

    def require(self: CommitCheck, header: Header, entry_id: bytes) -> None:
        if entry_id.decode() == forgotten:
            any_client.xdel(key, entry_id)
        real(self, header, entry_id)

    monkeypatch.setattr(CommitCheck, "require", require)
    said: list[str] = []
    with loader_of(any_url, notify=said.append) as loader:
        assert numbers(loader) == list(range(10))
        assert loader.stats().bad_entries == 0
    assert [line for line in said if "dead letter" in line] == []
    assert any_client.xpending(key, "g")["pending"] == 0
