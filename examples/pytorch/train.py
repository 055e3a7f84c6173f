"""Trains a PyTorch network on a stream of digits, while two other processes make the samples. `python train.py`"""

# %% Two worker processes make the samples: noise here, and expensive decoding and augmentation in real use
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import penstock

EPOCHS, BATCH = 12, 32
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, random_state=0)


def noisy(sample: Any, rng: np.random.Generator) -> Any:
    """Add noise: ``x`` [64] becomes uint8 [64].

    ``rng`` is seeded by epoch and sample, so a seed gives the same stream.
    """
    return {"x": (sample["x"] + rng.normal(0, 1, 64)).clip(0, 16).astype(np.uint8), "y": sample["y"]}


server = penstock.EmbeddedServer()  # or any Redis: its URL in PENSTOCK_URL
production = penstock.produce({"x": x, "y": y}, transform=noisy, stream="digits", epochs=EPOCHS, url=server.url)

# %% PyTorch reads it as a separate group; a batch is acknowledged when the loop asks for the next one
import torch
from torch import nn

import penstock.torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)

with penstock.Loader("digits", group="pytorch", batch_size=BATCH, url=server.url) as loader:
    batches = penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), device)
    for epoch in range(EPOCHS):
        for batch in batches:  # {"x": uint8 [32, 64], "y": int64 [32]}
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"] / 16), batch["y"])
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: last loss {loss.item():.3f}")

# %% Tested on the digits that were held out
with torch.no_grad():
    guesses = model(torch.tensor(x_test / 16, dtype=torch.float32, device=device)).argmax(dim=1).cpu().numpy()
print(f"accuracy on the held-out digits {(guesses == y_test).mean():.3f}")
server.close()
