"""A group that reads again from the earliest epoch, if retention has removed a part of one."""

from __future__ import annotations

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_producer.write.cleaner import Cleaner
from tests.contracts.feed import SPEC, loader_of, numbers, open_stream, sample, writer_of


def test_earliest_is_the_first_epoch_that_is_whole_in_every_partition(any_url: str, any_client: Client) -> None:
    """A group that begins with an incomplete epoch would wait for samples that no longer exist, or miss them."""
    with writer_of(any_url, spec=SPEC, partitions=2, block_bytes=24 * 5) as writer:
        epoch = writer.epoch(sizes=[10, 10])
        with epoch.shard(1) as shard:
            for number in range(10):
                shard.write(sample(number))
        with loader_of(any_url, batch_size=5) as loader:
            batches = iter(loader)
            loader.acknowledge(next(batches))
            loader.acknowledge(next(batches))
            stream = open_stream(any_client, "t")
            assert Cleaner(any_client, stream, lambda _: None).free_bytes(stream.partitions[1], 1) > 0
        trimmed = [load_roster(any_client, partition).trimmed for partition in stream.partitions]
        assert trimmed == [frozenset(), frozenset({0})]
        with epoch.shard(0) as shard:
            for number in range(10):
                shard.write(sample(number))
        with writer.epoch() as after:
            for number in range(100, 110):
                after.write(sample(number))
        with loader_of(any_url, start="earliest") as loader:
            assert sorted(numbers(loader)) == list(range(100, 110))
