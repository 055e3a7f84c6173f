"""Groups that are dropped or read again: nothing that they settled outlives that, whoever asks for it."""

from __future__ import annotations

from typing import Any

from penstock_common.stream.forgetting import drop_group, reset_group
from tests.contracts.feed import loader_of, numbers, open_stream, produce


def test_a_group_made_anew_under_a_dropped_ones_name_reads_everything(any_url: str, any_client: Any) -> None:
    """One call drops it: a caller that forgot the ledgers would lose an epoch to the next group of that name."""
    produce(any_url, "t", 100)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))
    assert drop_group(any_client, open_stream(any_client, "t"), "g")
    assert not [key for key in any_client.keys("*") if b":ledger:" in key or b":dead:" in key]
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))


def test_a_group_that_is_reset_reads_everything_again(any_url: str, any_client: Any) -> None:
    """The same for start=: what was settled before must not be left out."""
    produce(any_url, "t", 100)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))
    reset_group(any_client, open_stream(any_client, "t"), "g", 0)
    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == list(range(100))
