"""Trains on a stream of digits and saves a checkpoint every 100 steps. Killed at any moment and started again, it
continues with the batch after its last checkpoint. `python train.py NAME`: name of the group and of the checkpoint's
file
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import penstock
import penstock.torch

EPOCHS, BATCH, EVERY = 8, 16, 100
name, checkpoint = sys.argv[1], Path(f"{sys.argv[1]}.pt")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)

began = time.perf_counter()
loader = penstock.Loader("digits", group=name, batch_size=BATCH, order="canonical", acknowledge="on_checkpoint")
batches = penstock.torch.dataset(loader)
step = first = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    batches.load_state_dict(saved["data"])  # small JSON: the next pass is the rest of this epoch
    step, first = saved["step"], saved["epoch"]
    print(f"goes on after step {step}")


def save(step: int, epoch: int) -> None:
    """Save a checkpoint: the file is complete or does not exist (os.fsync, if power may fail).

    Only then may the stream forget what is in it.
    """
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "data": batches.state_dict()}
    torch.save({**states, "step": step, "epoch": epoch}, f"{checkpoint}.new")
    Path(f"{checkpoint}.new").rename(checkpoint)
    loader.checkpointed()


for epoch in range(first, EPOCHS):
    for batch in batches:
        if began:
            print(f"first batch after {time.perf_counter() - began:.2f} s")
            began = 0.0
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch["x"] / 16), batch["y"])
        loss.backward()
        optimizer.step()
        step += 1
        print(f"step {step}: loss {loss.item():.9f}", flush=True)
        if step % EVERY == 0:
            save(step, epoch)
save(step, EPOCHS)
loader.close()
