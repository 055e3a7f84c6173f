"""An epoch's order found again from its manifest's sizes: what was planned is made, and another source is noticed."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock_producer.planning.order import EpochOrder
from penstock_producer.sources.protocol import BatchSource, Source


class Lines:
    """Samples by index."""

    unit = "sample"

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class Pages(Lines):
    """Batches of 3 to 7 samples."""

    unit = "batch"

    def size(self, item: int) -> int:
        """Known without reading."""
        return 3 + item % 5


def order(source: Lines, **how: Any) -> EpochOrder:
    """A shuffled epoch."""
    return EpochOrder(cast("Source | BatchSource", source), seed=5, epoch=1, shuffle=True, **how)


@pytest.mark.parametrize("source", [Lines(1000), Pages(300)], ids=["samples", "batches"])
@pytest.mark.parametrize("shard_samples", [1, 7, 20, 60, 5000])
def test_the_manifest_alone_says_how_an_epoch_is_cut(source: Lines, shard_samples: int) -> None:
    """Whoever makes, repairs or goes on with an epoch knows its sizes, not the number of workers it was planned for."""
    planned = order(source, shard_samples=shard_samples)
    again = order(source, planned=planned.sizes)
    assert again.sizes == planned.sizes
    for shard in range(len(planned.sizes)):
        assert again.items(shard).tolist() == planned.items(shard).tolist()


@pytest.mark.parametrize("other", [Lines(999), Lines(1001), Lines(0)], ids=["fewer", "more", "none"])
def test_sizes_of_another_source_do_not_fit(other: Lines) -> None:
    """Samples that the plan has not, or the source has not, must not pass unnoticed."""
    sizes = order(Lines(1000), shard_samples=30).sizes
    assert order(other, planned=sizes).sizes != sizes
