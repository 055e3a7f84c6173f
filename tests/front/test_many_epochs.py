"""Commands on a stream of many small epochs: their time and their lines do not grow with the square of the epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import penstock
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.ledger import uncovered
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.mending.bad import list_bad
from penstock_common.stream.streams import Stream, load_stream

EPOCHS, SAMPLES = 12, 20
FIELDS = 5000
"""The fields of other epochs on the roster, which are more than 100 kB."""


@pytest.fixture
def stream(any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    """Yield a stream of small epochs that a group has read."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer("t", url=any_url, spec={"x": ("uint8", ())}) as writer:
        for _ in range(EPOCHS):
            with writer.epoch(sizes=[SAMPLES]) as epoch, epoch.shard(0) as shard:
                for number in range(SAMPLES):
                    shard.write({"x": number})
        with penstock.Loader("t", group="net", batch_size=SAMPLES, url=any_url) as loader:
            for _ in range(EPOCHS):
                assert sum(batch.size for batch in loader) == SAMPLES
        yield load_stream(any_client, "t")


def sent(client: Client, stream: Stream, action: Callable[[], object]) -> int:
    """Return the bytes that the server sends while a roster has fields of many other epochs."""
    roster = stream.partitions[0].roster
    others = {f"d:net:{10_000 + number}": "1" for number in range(FIELDS)}
    client.hset(roster, mapping=others)
    before = client.info("stats")["total_net_output_bytes"]
    action()
    moved: int = client.info("stats")["total_net_output_bytes"] - before
    client.hdel(roster, *others)
    return moved


def test_lists_and_members_read_no_roster_for_each_epoch(stream: Stream, any_client: Client) -> None:
    """A member took a fifth of its time to read one group's record."""
    assert sent(any_client, stream, lambda: list_bad(any_client, stream)) < 2 * FIELDS * 20
    manifest = load_manifest(any_client, stream, 0)
    assert sent(any_client, stream, lambda: uncovered(any_client, stream, manifest, "net")) < FIELDS * 20
