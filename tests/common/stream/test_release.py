"""Removing acknowledged data: any number of writers do it at once, so every step may find its work done."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.errors import EpochNotFound
from penstock_common.stream import manifest
from penstock_common.stream.client import connect
from penstock_common.stream.entries import index_records, trim_entries
from penstock_common.stream.groups.losses import forget_losses
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import delete_stream, release_epoch, retire_epoch, unlink_epoch
from penstock_common.stream.streams import Stream, load_stream


def made(url: str, client: redis.Redis, *, good: int) -> Stream:
    """Make one epoch with some good samples and a bad one."""
    spec = {"x": ("uint8", (100,))}
    with (
        penstock.Writer("train", url=url, spec=spec, tuning=penstock.Tuning(block_bytes=1)) as writer,
        writer.epoch() as epoch,
    ):
        for _ in range(good):
            epoch.write({"x": np.zeros(100, dtype=np.uint8)})
        epoch.quarantine("truncated")
    return load_stream(client, "train")


def test_trimming_what_another_writer_just_trimmed_frees_nothing_and_fails_nothing(
    url: str, client: redis.Redis
) -> None:
    """Two jobs that wait for quota plan the same entries, and the second must continue, not die."""
    stream = made(url, client, good=3)
    partition = stream.partitions[0]
    records = [record for record in index_records(client, partition, 0, 0) if record.entry_id]
    generation = load_roster(client, partition).generation
    assert [trim_entries(client, partition, generation, 0, records) for _ in range(2)] == [300, 0]
    assert load_roster(client, partition).bytes == 0


def test_an_epoch_that_holds_no_bytes_is_released(url: str, client: redis.Redis) -> None:
    """All its samples were bad, or all entries were trimmed before, but its keys must still be removed."""
    stream = made(url, client, good=0)
    assert release_epoch(client, stream, 0)
    assert retained_epochs(client, stream) == {}
    left = {key.decode().rpartition(":")[2] for key in client.scan_iter(match="*")}
    assert left == {"meta", "events", "roster", "names"}


@pytest.mark.parametrize("trouble", ["cut", "another"])
def test_a_release_is_noted_through_a_cut_connection_and_beside_another(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Between the look at the note and its change a connection breaks, or another writer notes its own release."""
    stream, met = made(url, client, good=3), list[int]()
    releasing = connect(url)
    hget: Any = type(releasing).hget

    def look_and_meet_trouble(self: Any, name: str, field: str) -> Any:
        found = hget(self, name, field)
        if field == "released" and self is releasing and not met:
            if trouble == "cut":
                met.append(client.client_kill_filter(_id=str(self.client_id())))
            else:
                met.append(client.hset(stream.keys.meta, "released", "5"))
        return found

    monkeypatch.setattr(type(releasing), "hget", look_and_meet_trouble)
    assert release_epoch(releasing, stream, 0)
    assert met == [1]
    assert client.hget(stream.keys.meta, "released") == (b"0" if trouble == "cut" else b"0,5")
    assert retained_epochs(client, stream) == {}


def test_an_epoch_that_was_released_while_it_was_being_opened_does_not_come_back(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer may pause between two commands for the whole life of an epoch, and groups would read the epoch
    again.
    """
    stream, reserve = made(url, client, good=3), manifest.take_number

    def reserve_and_stand_still(*given: Any) -> int:
        number = reserve(*given)
        assert release_epoch(client, stream, number)
        return number

    monkeypatch.setattr(manifest, "take_number", reserve_and_stand_still)
    with pytest.raises(EpochNotFound, match="epoch 0 of 'train' was released; the next is 1"):
        manifest.open_epoch(client, stream, 0)
    assert retained_epochs(client, stream) == {}
    assert not client.exists(stream.keys.manifest(0))


def test_what_was_made_of_an_epoch_that_was_released_while_it_was_opened_goes_again(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that pauses before it registers the epoch would leave keys that nothing ever removes."""
    stream, load = made(url, client, good=3), manifest.load_manifest

    def load_and_stand_still(*given: Any) -> manifest.Manifest:
        found = load(*given)
        assert release_epoch(client, stream, 0)
        return found

    monkeypatch.setattr(manifest, "load_manifest", load_and_stand_still)
    with pytest.raises(EpochNotFound, match="epoch 0 of 'train' was released; the next is 1"):
        manifest.open_epoch(client, stream, 0)
    monkeypatch.undo()
    partition = stream.partitions[0]
    assert not client.exists(partition.state(0), partition.entries(0), stream.keys.manifest(0))
    assert load_roster(client, partition).epochs == {}
    assert manifest.open_epoch(client, stream).epoch == 1


def test_an_epoch_that_is_being_released_is_not_registered_again(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is removed last, so a caller that only looks for the manifest takes a half-removed epoch for a live
    one.
    """
    stream = made(url, client, good=3)
    manifest_id = manifest.load_manifest(client, stream, 0).id
    retire_epoch(client, stream.partitions[0], 0, manifest_id)
    with pytest.raises(EpochNotFound, match="was released"):
        manifest.open_epoch(client, stream, 0)
    assert load_roster(client, stream.partitions[0]).retiring == {0: manifest_id}
    assert load_roster(client, stream.partitions[0]).epochs == {}
    unlink_epoch(client, stream, 0, manifest_id)
    assert retained_epochs(client, stream) == {}


def test_a_release_leaves_alone_an_epoch_that_was_opened_under_the_same_number(url: str, client: redis.Redis) -> None:
    """A server that lost its newest writes gives out a number again. The old epoch of this number is still on other
    servers, and what removes it there must not take the new one's entries.
    """
    stream = made(url, client, good=3)
    before = sorted(client.scan_iter())
    unlink_epoch(client, stream, 0, "the manifest that the server lost")
    assert sorted(client.scan_iter()) == before
    assert load_roster(client, stream.partitions[0]).epochs == {0: manifest.load_manifest(client, stream, 0).id}
    with penstock.Loader("train", group="g", batch_size=3, url=url) as loader:
        assert [len(batch["x"]) for batch in loader] == [3]


def test_a_release_that_paused_leaves_alone_the_manifest_of_a_newer_stream(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of an epoch bear the stream's id, but its manifest only has the name. Samples without it are lost."""
    stream, forget = made(url, client, good=3), forget_losses

    def forget_and_stand_still(*given: Any) -> None:
        forget(*given)
        delete_stream(client, "train")
        made(url, client, good=3)

    monkeypatch.setattr("penstock_common.stream.removal.deletion.forget_losses", forget_and_stand_still)
    assert release_epoch(client, stream, 0)
    monkeypatch.undo()
    assert [*retained_epochs(client, load_stream(client, "train"))] == [0]
    with penstock.Loader("train", group="g", batch_size=3, url=url) as loader:
        assert [len(batch["x"]) for batch in loader] == [3]


def test_an_epoch_that_was_released_while_it_was_abandoned_does_not_come_back_as_a_part(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes abandon an epoch, and one pauses until it is released. A manifest of one field is damaged."""
    stream = made(url, client, good=3)
    known = manifest.load_manifest(client, stream, 0)

    def find_and_stand_still(*given: Any) -> manifest.Manifest:
        monkeypatch.undo()
        manifest.abandon_epoch(client, stream, 0)
        assert release_epoch(client, stream, 0)
        return known

    monkeypatch.setattr(manifest, "find_manifest", find_and_stand_still)
    manifest.abandon_epoch(client, stream, 0, known.id)
    assert retained_epochs(client, stream) == {}
    assert not client.exists(stream.keys.manifest(0), stream.partitions[0].state(0))
