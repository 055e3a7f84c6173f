"""PyTorch's DataLoader with one worker process, as a transport: the worker makes samples, collates them into shared
memory, and passes tensors on.

Each of several readers has a loader, and a worker that makes everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.transports.protocol import ROWS, Load, Turns, make, run


class Samples(Dataset):
    """Samples by position, or by a list of positions at once if the maker has many at once."""

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
    """Batches of positions. Each turn sets their number."""

    def __init__(self, batch: int) -> None:
        self.batch, self.samples = batch, 0

    def __iter__(self) -> Iterator[range]:
        return (range(start, start + self.batch) for start in range(0, self.samples, self.batch))


def read(load: Load, turns: Turns) -> None:
    """Read turns. The first turn, which warms up, starts the workers, and they stay."""
    order = Order(load.batch)
    how = {"sampler": order, "batch_size": None} if load.by_batch else {"batch_sampler": order}
    loader: Any = DataLoader(Samples(load), num_workers=1, persistent_workers=True, **how)
    for samples in turns:
        order.samples = samples
        for batch in loader:
            turns.got(batch)


if __name__ == "__main__":
    run({"read": read})
