"""The cost of beginning and removing an epoch in many partitions is counted in round trips, not in time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import redis

from penstock_common.errors import DamagedKey
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.removal.deletion import release_epoch
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SPEC, sample, writer_of

MANY = 24


def keys_of_epochs(client: Client) -> set[bytes]:
    """Keys that some epoch of the stream has in its partitions."""
    return {key for key in client.scan_iter("*", count=1000) if b"}:0:" in key or b"}:1:" in key}


def test_an_epoch_begins_and_goes_in_as_many_steps_however_many_partitions_there_are(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless feed begins a new one for each eighth of a partition's budget: with many these are small, and many."""
    sent: Counter[str] = Counter()
    send = redis.Connection.send_packed_command

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        sent[stage] += 1
        return send(self, *args, **options)  # type: ignore[no-untyped-call]

    for partitions in (1, MANY):
        with Writer(f"t{partitions}", url=any_url, spec=SPEC, partitions=partitions) as writer:
            stage = f"begun {partitions}"
            with monkeypatch.context() as patched:
                patched.setattr(redis.Connection, "send_packed_command", counted)
                writer.epoch(sizes=[1])
                stage = f"gone {partitions}"
                assert release_epoch(writer.client, writer.stream, 0)
            assert not retained_epochs(any_client, writer.stream)
            assert not keys_of_epochs(any_client)
    assert sent["begun 1"] > 5
    assert sent[f"begun {MANY}"] <= sent["begun 1"] + 1
    assert sent[f"gone {MANY}"] <= sent["gone 1"] + 1


def test_a_server_that_forgot_its_scripts_is_told_them_again(any_url: str, any_client: Client) -> None:
    """After a restart or a flush of scripts it must not fail either when many calls come at once."""
    with writer_of(any_url, spec=SPEC, partitions=3) as writer:
        for number in range(2):
            any_client.script_flush()
            with writer.epoch(sizes=[1] * 3) as epoch:
                for shard in range(3):
                    with epoch.shard(shard) as one:
                        one.write(sample(shard))
            any_client.script_flush()
            assert release_epoch(writer.client, writer.stream, number)
            assert not keys_of_epochs(any_client)


def test_of_many_partitions_the_roster_that_is_damaged_is_named(any_url: str, any_client: Client) -> None:
    """An operator has to know where to look."""
    with writer_of(any_url, spec=SPEC, partitions=3) as writer:
        any_client.hset(writer.stream.partitions[1].roster, "g:broken", "{")
        with pytest.raises(DamagedKey) as found:
            writer.epoch(sizes=[1])
        assert str(found.value).startswith(f"{writer.stream.partitions[1].roster} or ")
        any_client.delete(writer.stream.partitions[1].roster)
