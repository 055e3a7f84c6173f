"""The PyTorch group of together.py."""

import digits
import torch
from torch import nn

import penstock
import penstock.torch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
with penstock.Loader("train", group="torch", batch_size=32, order="canonical") as loader:
    batches = penstock.torch.dataset(loader, select=("x", "y"))
    for _ in range(12):
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x / 16), y).backward()
            optimizer.step()
with torch.no_grad():
    guesses = model(torch.from_numpy(digits.test["x"]) / 16).argmax(dim=1).numpy()
print(f"torch: accuracy {(guesses == digits.test['y']).mean():.3f}")
