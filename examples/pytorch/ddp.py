"""Trains a network on a stream of digits in two processes (DistributedDataParallel) with equally many steps.

In this folder: `penstock run dataset digits:train --epochs 8 -- torchrun --nproc-per-node 2 ddp.py`
"""

from __future__ import annotations

import os

import digits
import torch
import torch.distributed as distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock
import penstock.torch

EPOCHS, BATCH = 8, 16


def main() -> None:
    """Train. Rank 0 prints the accuracy on the digits held out after each epoch."""
    has_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if has_gpu else "gloo")  # torchrun has set which rank this is
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    test = {name: torch.from_numpy(array).to(device) for name, array in digits.test.items()}

    # in canonical order every rank has the same number of steps, so no rank waits for a gradient that never comes;
    # after a kill, load one state in all ranks (docs/pytorch.md), because they may have stopped a step apart
    order = penstock.Canonical(rank=rank, world_size=world)
    with penstock.Loader("train", group="ddp", batch_size=BATCH, order=order) as loader:
        batches = penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), device)
        for epoch in range(EPOCHS):
            steps = 0
            for batch in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch["x"] / 16), batch["y"]).backward()
                optimizer.step()
                steps += 1
            with torch.no_grad():
                accuracy = (net(test["x"] / 16).argmax(dim=1) == test["y"]).float().mean().item()
            print(f"rank {rank}, epoch {epoch}: {steps} steps, accuracy {accuracy:.3f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
