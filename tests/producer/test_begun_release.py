"""A release whose writer died: the next pass completes it, and no reader sees half an epoch."""

from __future__ import annotations

from typing import Any

from penstock_common.explain.monitor import StreamMonitor
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.removal.deletion import retire_epoch
from penstock_producer.write.cleaner import clean_up
from tests.contracts.feed import loader_of, numbers, open_stream
from tests.contracts.ordered import plan


def test_the_next_pass_ends_a_release_that_somebody_began_and_did_not_live_to_end(
    any_url: str, any_client: Any
) -> None:
    """This needs no full budget: half an epoch must not remain until then."""
    plan(any_url, [40, 40, 40], partitions=3)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(120))
    stream = open_stream(any_client, "t")
    assert retire_epoch(any_client, stream.partitions[0], 0, load_manifest(any_client, stream, 0).id)
    seen = StreamMonitor(any_client, "t").snapshot()
    assert not seen.epochs
    assert audit_stream(any_client, "t").is_clean
    clean_up(any_client, stream, lambda _: None)
    assert not retained_epochs(any_client, stream)
    assert not [key for key in any_client.keys("*") if b":0:" in key]
