"""Exactly once: whatever happens to a writer or to its connection, each identity is in the stream once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from penstock_common.errors import BudgetFull, EpochAbandoned, ServerUnavailable, ShardMismatch
from penstock_common.server.connection import open_channel
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import abandon_epoch, load_manifest
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.commit import Committer, SentBlock
from penstock_producer.write.unconfirmed import UnconfirmedBlocks
from penstock_producer.write.writer import Writer
from tests.contracts.feed import (
    SAMPLE_BYTES,
    SPEC,
    accounted_bytes,
    connections_cut,
    index_spans,
    is_contiguous,
    numbers,
    open_stream,
    payload_bytes,
    sample,
    stored,
)
from tests.contracts.processes import child
from tests.tuned import tuned

SIZE = 400
LOSS = r"starts at 8: the server lost data, and with it 8 samples .* \(offsets 0-7, noticed at .* UTC, at redis:"


def writer_of(url: str, **settings: Any) -> Writer:
    """A quiet writer of 't' with four samples in an entry."""
    settings = {"spec": SPEC, "block_bytes": 4 * SAMPLE_BYTES, "notify": lambda _: None, **settings}
    return Writer("t", url=url, **tuned("Writer", settings))


def require_exactly_once(url: str, client: Client, size: int = SIZE) -> None:
    """Epoch 0, shard 0: every identity once in the entries, the index without gap, the bytes as counted."""
    counts = stored(client, "t", 0)
    assert sorted(counts) == [(0, offset) for offset in range(size)]
    assert set(counts.values()) == {1}
    assert is_contiguous(index_spans(client, "t", 0, 0), size)
    assert accounted_bytes(client, "t")[0] == payload_bytes(client, "t", 0)
    with Replay("t", url=url, epoch=0, batch_size=64) as replay:
        assert numbers(replay) == list(range(size))


def write_shard(url: str, pause_s: str, size: str = str(SIZE)) -> None:
    """A job: shard 0 of epoch 0, from wherever it stands."""
    with writer_of(url) as writer, writer.epoch(0, sizes=[int(size)]).shard(0) as shard:
        print(f"at {shard.position}")
        while shard.position < int(size):
            shard.write(sample(shard.position))
            if shard.position % 4 == 0:
                print(f"wrote {shard.position}")
                time.sleep(float(pause_s))


def test_two_runs_of_one_shard_at_once_append_each_sample_once(url: str, client: Client) -> None:
    """A job whose worker seemed dead is started again while the first still runs."""
    errors: list[BaseException] = []
    start = threading.Barrier(3)

    def run(packed: int) -> None:
        try:
            with writer_of(url) as writer, writer.epoch(0, sizes=[SIZE]).shard(0) as shard:
                start.wait(10)
                while shard.position < SIZE:
                    shard.write(sample(shard.position))
                    if shard.position % packed == 0:
                        shard.flush()
        except BaseException as error:
            errors.append(error)
            start.abort()

    threads = [threading.Thread(target=run, args=(packed,)) for packed in (2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    require_exactly_once(url, client)
    assert load_manifest(client, open_stream(client, "t"), 0).state == "produced"


def test_two_processes_with_one_shard_append_each_sample_once(any_url: str, any_client: Client) -> None:
    """This holds also for two processes that share only the server and both open the epoch."""
    with child(write_shard, any_url, 0.001) as one, child(write_shard, any_url, 0.001) as two:
        one.rest()
        two.rest()
    require_exactly_once(any_url, any_client)


def test_a_writer_killed_in_its_shard_is_gone_on_from(any_url: str, any_client: Client) -> None:
    """Kill -9 between any two instructions leaves whole blocks; the retried job starts behind the last of them."""
    for wait_for in (8, 60, 160):
        with child(write_shard, any_url, 0.002) as job:
            while (line := job.line()) != f"wrote {wait_for}":
                assert line
            job.kill()
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "sized"
    with child(write_shard, any_url, 0) as job:
        began = int(job.line().split()[1])
        job.rest()
    assert 100 <= began < SIZE
    require_exactly_once(any_url, any_client)


def test_a_connection_cut_again_and_again_loses_and_doubles_nothing(url: str, client: Client) -> None:
    """The answer to an append may be lost with the connection: the writer must look before it sends again."""
    said: list[str] = []
    with writer_of(url, notify=said.append) as writer:
        epoch = writer.epoch(0, sizes=[SIZE])
        writer.client.client_setname("control")
        with epoch.shard(0) as shard, connections_cut(client, spared="control"):
            for number in range(SIZE):
                shard.write(sample(number))
                time.sleep(0.0005)
            shard.commit_all()
    assert any("connection broke while writing" in line for line in said)
    require_exactly_once(url, client)


def test_a_server_that_forgot_its_scripts_is_taught_again(any_url: str, any_client: Client) -> None:
    """SCRIPT FLUSH, or a restart: inside MULTI a script is called by its digest alone."""
    with writer_of(any_url) as writer:
        epoch = writer.epoch(0, sizes=[SIZE])
        with epoch.shard(0) as shard:
            for number in range(SIZE):
                if number == 200:
                    shard.commit_all()
                    any_client.script_flush()
                shard.write(sample(number))
    require_exactly_once(any_url, any_client)


def test_an_abandoned_epoch_takes_nothing_more(any_url: str, any_client: Client) -> None:
    """A user who abandons an epoch relies on it that no late sample is added."""
    with writer_of(any_url) as writer:
        shard = writer.epoch(0, sizes=[SIZE]).shard(0)
        for number in range(8):
            shard.write(sample(number))
        shard.commit_all()
        abandon_epoch(any_client, writer.stream, 0)
        with pytest.raises(EpochAbandoned, match="abandoned"):
            for number in range(8, 16):
                shard.write(sample(number))
            shard.commit_all()
        shard.abort()
    assert stored(any_client, "t", 0).total() == 8


def test_a_server_that_lost_committed_blocks_is_named(any_url: str, any_client: Client) -> None:
    """After a failover acknowledged writes may be lost, and continuing would leave an unseen gap."""
    with writer_of(any_url) as writer:
        shard = writer.epoch(0, sizes=[SIZE]).shard(0)
        for number in range(8):
            shard.write(sample(number))
        shard.commit_all()
        any_client.delete(writer.stream.partitions[0].index(0, 0))
        with pytest.raises(ShardMismatch, match=LOSS) as caught:
            for number in range(8, 20):
                shard.write(sample(number))
            shard.commit_all()
        assert caught.value.lost == (0, 8)
        shard.abort()


def test_jobs_that_open_an_epoch_at_once_agree_on_it(any_url: str, any_client: Client) -> None:
    """Workers begin together, and each opens the epoch its shard is of."""
    with writer_of(any_url):
        pass
    errors: list[BaseException] = []
    start = threading.Barrier(6)

    def run(shard: int) -> None:
        try:
            with writer_of(any_url) as writer:
                start.wait(10)
                for number in range(5):
                    with writer.epoch(number, sizes=[1] * 6).shard(shard) as one:
                        one.write(sample(shard))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(shard,)) for shard in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    stream = open_stream(any_client, "t")
    assert [load_manifest(any_client, stream, number).state for number in range(5)] == ["produced"] * 5
    with writer_of(any_url) as writer:
        assert writer.epoch().number == 5


def test_a_server_that_is_away_just_when_a_shard_is_opened_is_waited_for(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that begins during a restart of the server must not fail: its epoch would be given up."""
    away = iter([True, True, False])

    def opened(*arguments: Any, **options: Any) -> Any:
        if next(away, False):
            raise ServerUnavailable("it restarts")
        return open_channel(*arguments, **options)

    monkeypatch.setattr("penstock_producer.write.target.open_channel", opened)
    with writer_of(any_url) as writer, writer.epoch() as epoch:
        epoch.write(sample(0))
    require_exactly_once(any_url, any_client, size=1)


def test_a_block_that_the_server_refused_at_maxmemory_waits_before_it_is_sent_again(
    fresh_server: Callable[..., EmbeddedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs may fill the server in between, and a retry without a pause only adds load."""
    sent: list[int] = []
    execute = Committer._execute

    def executed(self: Committer, *what: Any) -> SentBlock:
        sending = execute(self, *what)
        sent.append(sending.block.first)
        assert len(sent) <= 3, "it is sent again and again"
        return sending

    monkeypatch.setattr(Committer, "_execute", executed)
    monkeypatch.setattr("penstock_producer.write.resources.ASK_EVERY_S", 3600.0)  # it uses the earlier answer
    server = fresh_server()
    with redis.Redis.from_url(server.url) as client, writer_of(server.url, room_wait_s=0.05) as writer:
        shard = writer.epoch(0, sizes=[8]).shard(0)
        for number in range(4):
            shard.write(sample(number))
        shard.commit_all()
        client.config_set("maxmemory", "1mb")
        for number in range(4, 8):
            shard.write(sample(number))
        with pytest.raises(BudgetFull, match=r"of its maxmemory 1(\.0)? MiB"):
            shard.commit_all()
        assert sent == [0, 4]
        client.config_set("maxmemory", 0)
        shard.close()
        assert sent == [0, 4, 4]
        require_exactly_once(server.url, client, size=8)


def test_a_block_waits_for_confirmation_only_where_no_more_can_be_kept(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unconfirmed block must be sent again after a failover. A wait for each block would halve the rate."""
    is_full, confirmed = [False], list[int]()
    confirm = Committer._confirm

    def noted(self: Committer) -> None:
        confirmed.append(self.position)
        confirm(self)

    monkeypatch.setattr(UnconfirmedBlocks, "must_wait", lambda *_: is_full[0])
    monkeypatch.setattr(Committer, "_confirm", noted)
    with writer_of(any_url) as writer:
        shard = writer.epoch(0, sizes=[32]).shard(0)
        for number in range(16):
            shard.write(sample(number))
        assert confirmed == []
        is_full[0] = True
        for number in range(16, 24):
            shard.write(sample(number))
        assert confirmed == [16, 20], "each was committed and confirmed before the next was sent"
        is_full[0] = False
        for number in range(24, 32):
            shard.write(sample(number))
        assert confirmed == [16, 20]
        shard.close()
