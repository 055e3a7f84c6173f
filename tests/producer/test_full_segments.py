"""Full segments are reported with a later block: only full ones, also when the answer is lost."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock_common.errors import PenstockError
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import abandon_epoch, load_manifest
from penstock_common.stream.payloads import registered_segments, seal_command, seal_segments
from penstock_common.stream.streams import Stream
from penstock_common.tuning import Tuning
from penstock_consumer.replay.replay import Replay
from penstock_producer.write import payloads
from penstock_producer.write.commit import Committer, SentBlock
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, connections_cut, numbers, open_stream, sample
from tests.tuned import tuned

BLOCK = 400
"""Samples; a segment takes three blocks."""


def writer_in(folder: Path, url: str, **settings: Any) -> Writer:
    """Return a writer of 't' with small blocks and segments."""
    settings = {"block_bytes": BLOCK * SAMPLE_BYTES, "budget_bytes": 8 << 20, "notify": lambda _: None, **settings}
    return Writer("t", url=url, spec=SPEC, payload=f"segments:{folder}", **tuned("Writer", settings))


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one would take all that is written here."""
    monkeypatch.setattr("penstock_producer.write.payloads.SEGMENT_BYTES", 1)


def sealed(client: Client, stream: Stream, epoch: int = 0) -> dict[str, bool]:
    """Segment -> whether the server knows that it gets no more."""
    found = registered_segments(client, stream.partitions[0], epoch)
    return {name: one.is_sealed for name, one in found.items()}


def refuse_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every separate request to the server fail."""

    def refuse(*_: object) -> None:
        raise AssertionError("a round trip for it")

    monkeypatch.setattr(payloads, "seal_segments", refuse)


def test_a_full_segment_is_sealed_behind_a_later_block(
    any_url: str, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is not reported as full is not used again, and a request for each costs more than a small block."""
    with writer_in(tmp_path, any_url) as writer:
        shard = writer.epoch(0, sizes=[10 * BLOCK]).shard(0)
        with monkeypatch.context() as patched:
            refuse_questions(patched)
            for number in range(8 * BLOCK):
                shard.write(sample(number))
        shard._committer._drain()
        states = list(sealed(any_client, writer.stream).values())
        assert len(states) >= 3
        assert states.count(True) >= len(states) - 2
        for number in range(8 * BLOCK, 10 * BLOCK):
            shard.write(sample(number))
        shard.close()
        assert all(sealed(any_client, writer.stream).values())


def test_only_segments_are_sealed_of_which_every_block_is_committed(
    any_url: str, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that comes after it is refused, and its file may be another's by then."""
    sent: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    told: list[str] = []
    execute, collect = Committer._execute, Committer._collect

    def executed(self: Committer, *what: Any) -> SentBlock:
        sending = execute(self, *what)
        sent[sending.segment] += 1
        return sending

    def collected(self: Committer, sending: SentBlock) -> bool:
        answered[sending.segment] += 1
        return collect(self, sending)

    def watched(partition: Any, manifest: Any, names: list[str]) -> Any:
        assert all(sent[name] == answered[name] > 1 for name in names)
        told.extend(names)
        return seal_command(partition, manifest, names)

    monkeypatch.setattr(Committer, "_execute", executed)
    monkeypatch.setattr(Committer, "_collect", collected)
    monkeypatch.setattr(payloads, "seal_command", watched)
    with writer_in(tmp_path, any_url) as writer, writer.epoch(0, sizes=[20 * BLOCK]).shard(0) as shard:
        for number in range(20 * BLOCK):
            shard.write(sample(number))
    assert len(told) >= 5


def test_an_answer_that_is_lost_is_asked_for_again(any_url: str, any_client: Client, tmp_path: Path) -> None:
    """Connections are cut all the time: at the end nothing is lost, and every segment is known to be full."""
    with writer_in(tmp_path, any_url) as writer:
        epoch = writer.epoch(0, sizes=[60 * BLOCK])
        writer.client.client_setname("control")
        with epoch.shard(0) as shard, connections_cut(any_client, spared="control"):
            for number in range(60 * BLOCK):
                shard.write(sample(number))
                time.sleep(0.005 * (number % 100 == 0))
            shard.commit_all()
        states = sealed(any_client, writer.stream)
        assert len(states) >= 15
        assert all(states.values())
    with Replay("t", url=any_url, epoch=0, batch_size=64, tuning=Tuning(notify=lambda _: None)) as replay:
        assert numbers(replay) == list(range(60 * BLOCK))


def test_a_refused_sealing_keeps_nobody_from_going_on(
    any_url: str, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block before it is committed, and a writer that ends reports it again."""
    with writer_in(tmp_path, any_url) as writer, writer.epoch(0, sizes=[8 * BLOCK]).shard(0) as shard:
        with monkeypatch.context() as patched:
            patched.setattr(payloads, "seal_command", lambda *_: (b"EVAL", b"return redis.error_reply('NO')", b"0"))
            for number in range(8 * BLOCK):
                shard.write(sample(number))
            shard._committer._drain()
        assert shard.committed == 8 * BLOCK
        assert not any(sealed(any_client, writer.stream).values())
    assert all(sealed(any_client, open_stream(any_client, "t")).values())


def test_an_epoch_that_was_abandoned_ends_the_shard_as_ever(any_url: str, any_client: Client, tmp_path: Path) -> None:
    """Such an epoch takes no more seals, so the writer must not wait for an answer."""
    with writer_in(tmp_path, any_url) as writer:
        shard = writer.epoch(0, sizes=[20 * BLOCK]).shard(0)
        for number in range(6 * BLOCK):
            shard.write(sample(number))
        abandon_epoch(any_client, writer.stream, 0)
        with pytest.raises(PenstockError, match="takes no more samples"):
            for number in range(6 * BLOCK, 20 * BLOCK):
                shard.write(sample(number))
        shard.abort()


def test_a_block_whose_segment_was_sealed_is_stored_anew_in_another_one(
    any_url: str, any_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent again as it is, the block would be refused for ever, and its file may be another writer's by then."""
    sent: list[tuple[int, str]] = []
    execute = Committer._execute

    def executed(self: Committer, *what: Any) -> SentBlock:
        sending = execute(self, *what)
        place = sending.block.first, sending.segment
        assert place not in sent
        sent.append(place)
        return sending

    monkeypatch.setattr(Committer, "_execute", executed)
    for name in ("FIRST_LINGER_S", "LINGER_S"):  # on a slow machine a first sample would be a block of its own
        monkeypatch.setattr(f"penstock_producer.write.shard.{name}", 600.0)
    with writer_in(tmp_path, any_url) as writer:
        stream = writer.stream
        with writer.epoch(0, sizes=[2 * BLOCK]).shard(0) as shard:
            for number in range(BLOCK):
                shard.write(sample(number))
            shard.commit_all()
            (name,) = sealed(any_client, stream)
            manifest = load_manifest(writer.client, stream, 0)
            seal_segments(writer.client, stream.partitions[0], manifest, [name], for_the_dead=True)
            for number in range(BLOCK, 2 * BLOCK):
                shard.write(sample(number))
            shard.commit_all()
        (other,) = set(sealed(any_client, stream)) - {name}
    assert sent == [(0, name), (BLOCK, name), (BLOCK, other)]
    with Replay("t", url=any_url, epoch=0, batch_size=64, tuning=Tuning(notify=lambda _: None)) as replay:
        assert numbers(replay) == list(range(2 * BLOCK))
