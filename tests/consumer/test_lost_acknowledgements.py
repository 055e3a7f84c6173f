"""A server that comes back without its last second forgot acknowledgements: nothing hangs, nothing is missing."""

from __future__ import annotations

from typing import Any

from tests.contracts.feed import loader_of, open_stream, produce

COUNT, BLOCK, BATCH = 40, 4, 5


def test_an_entry_whose_acknowledgement_was_lost_is_handed_out_again(any_url: str, any_client: Any) -> None:
    """It is pending under a member that lives and thinks it settled: nobody else would ever take it."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    partition = open_stream(any_client, "t").partitions[0]
    entries, ledger = partition.entries(0), partition.ledger(0, "g", 0)
    with loader_of(any_url, batch_size=BATCH, member="m") as loader:
        found = []
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 3:
                loader._joined().place.flush()
                first = any_client.xrange(entries, count=1)[0][0]
                assert any_client.xclaim(entries, "g", "m", 0, [first], force=True, justid=True) == [first]
                for offset in range(BLOCK):
                    any_client.setbit(ledger, offset, 0)
    assert sorted(found) == sorted([*range(COUNT), *range(BLOCK)])
    assert any_client.xpending(entries, "g")["pending"] == 0
    assert any_client.bitcount(ledger) == COUNT


def test_an_entry_settled_in_two_batches_keeps_the_bits_of_the_first(any_url: str, any_client: Any) -> None:
    """The entry goes with its second batch; bits of the first that were lost would leave the epoch incomplete."""
    produce(any_url, "t", COUNT, block_samples=BLOCK)
    ledger = open_stream(any_client, "t").partitions[0].ledger(0, "g", 0)
    with loader_of(any_url, batch_size=BATCH) as loader:
        found = []
        for number, batch in enumerate(loader):
            found += batch["y"].tolist()
            if number == 1:
                loader._joined().place.flush()
                assert any_client.setbit(ledger, 4, 0) == 1  # of the second entry, whose last batch is in hand
    assert found == list(range(COUNT))
    assert any_client.bitcount(ledger) == COUNT
