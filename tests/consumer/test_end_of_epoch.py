"""The end of an epoch: a member checks its pending entries before it reports that it has finished."""

from __future__ import annotations

from typing import Any

from tests.contracts.feed import loader_of, numbers, open_stream, produce

COUNT, BLOCK, BATCH = 40, 4, 5


def test_an_entry_that_never_arrived_is_in_the_same_pass_of_its_epoch(any_url: str, any_client: Any) -> None:
    """In a second pass it would be alone, would not fill a batch, and `remainder="drop"` would drop it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    entries = open_stream(any_client, "t").partitions[0].entries(0)
    with loader_of(any_url, batch_size=BATCH, member="m", remainder="drop") as loader:
        assert loader.stream.name == "t"  # so it has joined
        taken = any_client.xreadgroup("g", "m", {entries: ">"}, count=1)  # an answer that its member never receives
        assert len(taken[0][1]) == 1
        assert sorted(numbers(loader)) == list(range(COUNT))
        assert loader.stats().samples == COUNT
    assert any_client.xpending(entries, "g")["pending"] == 0
