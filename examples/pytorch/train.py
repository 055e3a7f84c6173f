"""Trains a small network on a stream of digits, in one process or in several (DistributedDataParallel).

In this folder: `penstock run dataset digits:train --epochs 8 -- python train.py`
Two processes:  `penstock run dataset digits:train --epochs 8 -- torchrun --nproc-per-node 2 train.py`
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

EPOCHS, BATCH = 8, 32


def main() -> None:
    """Prints the accuracy on the digits held out after each epoch."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets them
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model: nn.Module = net
    if world > 1:
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    test = {name: torch.from_numpy(array).to(device) for name, array in digits.test.items()}

    with penstock.Loader(  # in canonical order every rank has the same number of steps
        "train", group="pytorch", batch_size=BATCH, order="canonical", rank=rank, world_size=world
    ) as loader:
        batches = penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), device)
        for epoch in range(EPOCHS):
            for batch in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch["x"] / 16), batch["y"]).backward()
                optimizer.step()
            if rank == 0:
                with torch.no_grad():
                    accuracy = (net(test["x"] / 16).argmax(dim=1) == test["y"]).float().mean().item()
                print(f"epoch {epoch}: accuracy {accuracy:.3f}", flush=True)
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
