"""A client remembers little of a server that may lose data, compares it once a run, and records a loss once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import redis

from penstock_common.errors import ServerUnavailable
from penstock_common.server.client import RestartDetector
from penstock_common.server.connection import open_channel
from penstock_common.stream.audit import is_held_by
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import IndexRecord
from penstock_common.stream.groups import losses
from penstock_common.stream.groups.losses import (
    AcknowledgedSamples,
    Loss,
    LossDetector,
    committed_front,
    note_loss,
    note_sent_again,
    noted_losses,
    resent_losses,
)
from penstock_common.stream.manifest import Manifest, load_manifest
from penstock_common.stream.removal.deletion import release_epoch
from tests.contracts.feed import open_stream, produce


@dataclass
class Lease:
    """The fields of a lease that a loss detector reads."""

    entry_id: bytes
    partition: int = 0
    shard: int = 0


@pytest.mark.parametrize(
    ("sizes", "ends", "front"),
    [
        ((10, 10, 10), [10, 4, 7], (1, 4, 14)),
        ((10, 10), [10, 10], (1, 10, 20)),
        ((10, 10), [0, 10], (0, 0, 0)),
        (None, [10, 4, 7], (2, 7, 21)),
        (None, [], (0, 0, 0)),
    ],
)
def test_a_rank_can_have_acknowledged_no_more_than_is_committed_without_a_gap(
    sizes: tuple[int, ...] | None, ends: list[int], front: tuple[int, int, int]
) -> None:
    """A position counts every sample before it. Without planned shards, no gap can be found."""
    assert committed_front(sizes, ends) == front


class TestRuns:
    """The identity of a server's run, and its consequences."""

    def test_a_connection_that_lasts_costs_no_question(self, any_url: str) -> None:
        """Every heartbeat and every commit asks this, so it must be free on a stable connection."""
        with connect(any_url) as client:
            watch = RestartDetector(client)
            watch.check(self.never)
            watch.check(self.never)  # the first question may have opened a connection itself
            before = info_calls(client)
            for _ in range(10):
                watch.check(self.never)
            assert info_calls(client) == before + 1  # this question itself
            open_channel(client).close()
            watch.check(self.never)
            assert info_calls(client) == before + 3

    def test_a_comparison_that_failed_is_made_again(self, any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The server may go away again during the comparison, and the loss must still be found."""
        compared: list[bool] = []

        def compare() -> None:
            compared.append(True)
            if len(compared) == 1:
                raise ConnectionError

        with connect(any_url) as client:
            watch = RestartDetector(client)
            watch.check(self.never)
            monkeypatch.setattr("penstock_common.server.client.read_run_id", lambda *_: "another run")
            open_channel(client).close()
            with pytest.raises(ConnectionError):
                watch.check(compare)
            watch.check(compare)
            watch.check(compare)
            assert len(compared) == 2

    def never(self) -> None:
        """Fail, because the server is the same."""
        raise AssertionError("compared without cause")


def info_calls(client: Client) -> int:
    """Return the INFO commands that the server has answered. Asking is one of them."""
    return int(client.info("commandstats").get("cmdstat_info", {}).get("calls", 0))


class TestWitness:
    """A loss detector remembers entries and reports those that the server lost."""

    def told(self, url: str, client: Client) -> tuple[LossDetector, Manifest, list[str]]:
        """Return a loss detector that knows the run and an epoch of 30 samples in 3 entries."""
        produce(url, "t", 30)
        stream, said = open_stream(client, "t"), list[str]()
        loss_detector = LossDetector(client, stream, "member g/m", said.append, clock=lambda: 1.0)
        loss_detector.check()
        return loss_detector, load_manifest(client, stream, 0), said

    def reconnect(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reconnect, so that the next check finds another run."""
        monkeypatch.setattr("penstock_common.server.client.read_run_id", lambda *_: None)
        open_channel(client).close()

    def test_an_entry_with_other_samples_under_the_same_offsets_is_a_loss(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A feed continues at the offsets that the server forgot, so their numbers alone would hide the loss."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            ids = [fields[b"e"] for _, fields in client.xrange(open_stream(client, "t").partitions[0].index(0, 0))]
            gone = Lease(b"1-1")
            loss_detector.acknowledged(
                manifest, [AcknowledgedSamples(Lease(ids[0]), 0, 10, 10), AcknowledgedSamples(gone, 10, 15, 4)]
            )
            loss_detector.acknowledged(manifest, [AcknowledgedSamples(gone, 14, 17, 3)])
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert "shard 0 offsets 10-16: 7 samples that member g/m had acknowledged" in said[0]
            assert noted_losses(client, open_stream(client, "t"), 0) == [
                Loss(0, manifest.id, 0, 10, 17, 7, "acknowledged", "member g/m", 1000)
            ]
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert len(said) == 1  # a reported loss is not reported again

    @pytest.mark.parametrize("position", [29, 30, 31])
    def test_a_position_within_what_is_committed_is_no_loss(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch, position: int
    ) -> None:
        """The last step of an epoch may be filled with its first samples, and so end beyond its last sample."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.reached(manifest, position)
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert said == []

    def test_a_position_beyond_what_is_committed_is_a_loss(self, any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank whose batches another process reads knows no entries, only how far it is."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.reached(manifest, 30)
            client.xdel(open_stream(client, "t").partitions[0].index(0, 0), "30-0")  # as after a truncated file
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert "shard 0 offsets 20-29: 10 samples" in said[0]

    def test_a_released_epoch_is_no_loss(self, any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Retention removes acknowledged samples for ever, and correctly."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.acknowledged(manifest, [AcknowledgedSamples(Lease(b"1-1"), 0, 10, 10)])
            loss_detector.committed(manifest, 0, 30)
            assert release_epoch(client, open_stream(client, "t"), 0)
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert said == []

    def test_memory_is_bounded_and_the_newest_is_kept(self, any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A trainer runs for weeks; a server forgets its newest writes."""
        monkeypatch.setattr(losses, "MOST_ENTRIES", 3)
        monkeypatch.setattr(losses, "MOST_SHARDS", 2)
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.acknowledged(
                manifest, [AcknowledgedSamples(Lease(b"1-%d" % n), n, n + 1, 1) for n in range(9)]
            )
            for shard in range(4):
                loss_detector.committed(manifest, shard, 40)
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert "offsets 6-8: 3 samples that member" in said[0]
            assert "shard 1 " not in said[0]
            assert "shard 2 offsets 0-39" in said[0]

    def test_a_server_that_goes_away_again_is_compared_when_it_is_back(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The caller waits for outages in its own way, and the loss must not be forgotten during one."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.committed(manifest, 0, 40)

            def vanish(*_: object) -> None:
                raise ServerUnavailable("it is away")

            self.reconnect(client, monkeypatch)
            with monkeypatch.context() as patch, pytest.raises(ServerUnavailable):
                patch.setattr(losses, "run_script", vanish)
                loss_detector.check()
            assert said == []
            loss_detector.check()
            assert "shard 0 offsets 30-39" in said[0]

    def test_a_user_who_may_not_note_it_says_so_and_goes_on(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer whose ACL only lets it read a manifest must not stop because of a note."""
        with connect(any_url) as client:
            loss_detector, manifest, said = self.told(any_url, client)
            loss_detector.acknowledged(manifest, [AcknowledgedSamples(Lease(b"1-1"), 0, 10, 10)])

            def refuse(*_: object) -> None:
                raise redis.exceptions.NoPermissionError("this user has no permissions to run 'evalsha'")

            monkeypatch.setattr(losses, "run_script", refuse)
            self.reconnect(client, monkeypatch)
            loss_detector.check()
            assert "cannot be found or noted" in said[0]


def test_a_loss_is_noted_once_and_notes_are_bounded(url: str) -> None:
    """Every member of a large group notes what it lost, and each may say it again after a broken connection."""
    produce(url, "t", 10)
    with connect(url) as client:
        stream = open_stream(client, "t")
        of = load_manifest(client, stream, 0).id
        for _ in range(2):
            for number in range(losses.MOST_NOTES + 5):
                note_loss(client, stream, Loss(0, of, number, 0, 1, 1, "committed", "writer w", 0))
        noted = noted_losses(client, stream, 0)
        assert [loss.shard for loss in noted] == list(range(losses.MOST_NOTES))
        assert not [field for field in client.hkeys(stream.keys.meta) if field.startswith(b"lost:")]


@pytest.mark.parametrize(
    ("gone", "again", "writers"),
    [
        ([b"1-0"], [("t", 0, [b"1-0", b"2-0"])], {"t"}),
        ([b"1-0", b"2-0"], [("t", 0, [b"1-0"]), ("t", 0, [b"2-0"])], {"t"}),
        ([b"1-0", b"2-0"], [("t", 0, [b"1-0"]), ("u", 0, [b"2-0"])], set()),
        ([b"1-0", b"3-0"], [("t", 0, [b"1-0", b"2-0"])], set()),
        ([b"1-0"], [("t", 1, [b"1-0"])], set()),
        ([b"1-0"], [], set()),
        ([b"%d-0" % number for number in range(losses.MOST_IDS + 1)], [("t", 0, [b"1-0"])], None),
        ([], [("t", 0, [b"1-0"])], None),
    ],
)
def test_a_note_is_settled_by_a_writer_that_sent_all_of_its_entries_again(
    any_url: str,
    any_client: Client,
    gone: list[bytes],
    again: list[tuple[str, int, list[bytes]]],
    writers: set[str] | None,
) -> None:
    """An entry that its writer does not know is a loss, whatever is in its place. None: the note names no entries."""
    produce(any_url, "t", 30)
    stream = open_stream(any_client, "t")
    manifest = load_manifest(any_client, stream, 0)
    loss = Loss(0, manifest.id, 0, 10, 20, 10, "acknowledged", "member g/m", 1000)
    for token, shard, entries in again:
        note_sent_again(any_client, stream, manifest, shard, token, entries)
    note_loss(any_client, stream, loss, gone)
    assert noted_losses(any_client, stream, 0) == [loss]
    assert resent_losses(any_client, stream, 0) == ({} if writers is None else {loss: writers})


def test_what_is_lost_again_at_the_same_offsets_is_noted_again(any_url: str, any_client: Client) -> None:
    """The first note may be settled, and would hide the second loss."""
    produce(any_url, "t", 30)
    stream = open_stream(any_client, "t")
    of = load_manifest(any_client, stream, 0).id
    first, second = (Loss(0, of, 0, 10, end, end - 10, "acknowledged", "member g/m", 1000) for end in (20, 30))
    note_loss(any_client, stream, first, [b"1-0"])
    note_loss(any_client, stream, second, [b"2-0", b"3-0"])
    note_loss(any_client, stream, second, [b"2-0", b"3-0"])
    assert noted_losses(any_client, stream, 0) == [first, second]


@pytest.mark.parametrize(
    ("records", "is_held"),
    [
        ([(0, 10, "t"), (10, 15, "t"), (15, 20, "t")], True),
        ([(0, 30, "t")], True),
        ([(0, 10, "u"), (10, 20, "t"), (20, 30, "u")], True),
        ([(0, 10, "t"), (10, 15, "t")], False),
        ([(0, 10, "t"), (10, 15, "t"), (15, 20, "u")], False),
        ([(0, 10, "t"), (12, 20, "t")], False),
        ([(0, 10, "t"), (10, 20, "")], False),
        ([], False),
    ],
)
def test_offsets_are_held_where_every_record_is_by_the_writer(
    records: list[tuple[int, int, str]], *, is_held: bool
) -> None:
    """A loss of the offsets 10 to 19. What is sent again may be lost again, and then be another writer's."""
    index = [IndexRecord(end, b"1-0", first, end - first, 0, (), "", writer) for first, end, writer in records]
    assert is_held_by({"t"}, 10, 20, index) == is_held
