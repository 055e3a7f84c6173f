"""A trainer older than the format of its stream: it stops with an error, and unreadable entries wait."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock_common.errors import UnsupportedVersion
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import list_pending
from penstock_common.stream.groups.ledger import dead_letters
from penstock_common.stream.keys import RELEASED
from penstock_common.tuning import Tuning
from penstock_common.wire import codec, header
from penstock_consumer.replay.replay import Replay
from penstock_producer.write import payloads
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, loader_of, numbers, open_stream, sample

NEWER: dict[str, dict[str, Any]] = {
    "v2": {"v": 2},
    "compression": {"compression": "zstd"},
    "ref": {"ref": "segment-1"},
}
FOUND = {"v2": "wire format v2, this process knows v1", "compression": "'compression'", "ref": "'ref'"}


def write(url: str, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    """Write samples 0-9 in today's format, 10-19 in a future one, and 20-29 in today's, one entry each."""
    encode = codec.encode

    def later(*args: Any, **options: Any) -> Any:
        (name, meta), *payload = encode(*args, **options)
        return [(name, json.dumps(json.loads(bytes(meta)) | change).encode()), *payload]

    with (
        Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=240, notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        for number in range(30):
            if number == 10:
                epoch.flush()
                monkeypatch.setattr(payloads, "encode", later)
            if number == 20:
                epoch.flush()
                monkeypatch.setattr(payloads, "encode", encode)
            epoch.write(sample(number))


@pytest.mark.parametrize("what", NEWER)
def test_an_entry_of_a_newer_format_stops_the_trainer_and_is_not_buried(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """An upgrade of the producers alone must not turn an epoch into dead letters while training continues."""
    write(any_url, monkeypatch, NEWER[what])
    partition = open_stream(any_client, "t").partitions[0]
    found: list[int] = []
    with pytest.raises(UnsupportedVersion) as caught, loader_of(any_url, batch_size=5) as loader:
        for batch in loader:
            found += batch["y"].tolist()
    assert FOUND[what] in str(caught.value)
    assert "update penstock" in str(caught.value)
    assert "epoch 0 of 't'" in str(caught.value)
    assert not set(found) & set(range(10, 20))
    assert loader.stats().bad_entries == 0
    assert dead_letters(any_client, partition, 0, "g") == {}
    assert {one.member for one in list_pending(any_client, partition, 0, "g")} <= {RELEASED}


def test_an_upgraded_trainer_is_given_what_the_old_one_could_not_read(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is enough: nothing is lost and nothing comes twice."""
    write(any_url, monkeypatch, NEWER["v2"])
    found: list[int] = []
    with pytest.raises(UnsupportedVersion), loader_of(any_url, batch_size=5) as loader:
        for batch in loader:
            found += batch["y"].tolist()
    parse = header._number
    monkeypatch.setattr(header, "_number", lambda v, key, *bounds: 1 if key == "v" else parse(v, key, *bounds))
    with loader_of(any_url, batch_size=5) as loader:
        found += numbers(loader)
    assert sorted(found) == list(range(30))


def test_of_several_old_trainers_each_is_told_at_once(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that silently waits for an entry that another returned would look like a hang."""
    write(any_url, monkeypatch, NEWER["v2"])
    for member in ("one", "two", "one"):
        told = pytest.raises(UnsupportedVersion, match="v2")
        with told, loader_of(any_url, batch_size=5, member=member, timeout_s=10) as loader:
            list(loader)


def test_it_says_so_again_at_every_attempt(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that swallows errors must never see an epoch that looks complete."""
    write(any_url, monkeypatch, NEWER["v2"])
    with loader_of(any_url, batch_size=5) as loader:
        for _ in range(2):
            with pytest.raises(UnsupportedVersion, match="v2"):
                list(loader)


def test_a_replay_that_meets_it_says_so(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must never leave a gap."""
    write(any_url, monkeypatch, NEWER["v2"])
    with Replay("t", url=any_url, epoch=0, batch_size=5) as replay, pytest.raises(UnsupportedVersion, match="v2"):
        list(replay)


def test_an_ordered_trainer_stops_as_well(any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fetches by id and shares nothing, but it must not leave the samples out either."""
    write(any_url, monkeypatch, NEWER["v2"])
    ordered = loader_of(any_url, batch_size=5, order="canonical", rank=0, world_size=1)
    with pytest.raises(UnsupportedVersion, match="v2"), ordered as loader:
        list(loader)
    assert dead_letters(any_client, open_stream(any_client, "t").partitions[0], 0, "g") == {}
