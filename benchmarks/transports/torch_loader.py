"""PyTorch's DataLoader with one worker process, as a transport: the worker makes samples, collates them into shared
memory, and hands over tensors. Several readers have a loader, and a worker that makes everything, each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.transports.protocol import ROWS, Load, Turns, make, run


class Samples(Dataset):
    """By place; a list of places at once where whoever makes them has many at once."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.pool = torch.from_numpy(load.pool())

    def __getitem__(self, place: Any) -> Any:
        if self.load.by_batch:
            start = place[0] % ROWS
            return self.pool[start : start + len(place)]
        make(self.load.make_s)
        return self.pool[place % len(self.pool)]


class Order:
    """Batches of places; how many, each turn says."""

    def __init__(self, batch: int) -> None:
        self.batch, self.samples = batch, 0

    def __iter__(self) -> Iterator[range]:
        return (range(start, start + self.batch) for start in range(0, self.samples, self.batch))


def read(load: Load, turns: Turns) -> None:
    """The workers are started by the first turn, which warms up, and stay."""
    order = Order(load.batch)
    how = {"sampler": order, "batch_size": None} if load.by_batch else {"batch_sampler": order}
    loader: Any = DataLoader(Samples(load), num_workers=1, persistent_workers=True, **how)
    for samples in turns:
        order.samples = samples
        for batch in loader:
            turns.got(batch)


if __name__ == "__main__":
    run({"read": read})
