"""The times of a loader that a DataLoader reads through, in this process and in others."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock_consumer.adapters.torch import acknowledging, dataset
from tests.contracts.ordered import plan, rank_of


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_dataloader_hands_out_and_waits_for_is_counted(any_url: str, workers: int) -> None:
    """The numbers are the loader's, whichever process reads, and a slow step is not waiting."""
    plan(any_url, [160] * 2)
    said: list[str] = []
    with rank_of(any_url, notify=said.append) as loader:
        batches: Any = DataLoader(dataset(loader), batch_size=None, num_workers=workers)
        for _ in acknowledging(batches) if workers else batches:
            time.sleep(0.05)
        stats = loader.stats()
    assert (stats.epoch, stats.batches, stats.samples) == (0, 40, 320)
    assert 0 < stats.waited_s < stats.elapsed_s - 40 * 0.05, stats.as_dict()
    assert stats.producers_s + stats.server_s + stats.reader_s == pytest.approx(stats.waited_s, rel=0.01)
    assert [line.partition(",")[0] for line in said if "epoch 0: 320 samples" in line] == [said[-1].partition(",")[0]]
