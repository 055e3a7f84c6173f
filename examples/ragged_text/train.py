"""Classifies lines as prose or program code: samples of different lengths, in batches without padding. The lines are
from Python's own standard library, so nothing is downloaded. `python train.py`
"""

# %% Lines of the standard library, as many from docstrings (1) as from elsewhere (0)
import ast
import importlib
import inspect
import random
from typing import Any

import numpy as np

import penstock

MODULES = ["_pydecimal", "argparse", "difflib", "doctest", "inspect", "ipaddress", "imaplib", "mailbox", "optparse"]
MODULES += ["pickle", "shutil", "smtplib", "statistics", "subprocess", "typing", "unittest.mock", "urllib.request"]
EPOCHS, BATCH = 4, 32
prose, code = set(), set()
for name in MODULES:
    source = inspect.getsource(importlib.import_module(name))
    documented = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    words = {line.strip() for node in documented for line in (ast.get_docstring(node) or "").splitlines()}
    lines = {line for line in map(str.strip, source.splitlines()) if len(line) >= 10 and line.isascii()}
    prose |= lines & words
    code |= {line for line in lines - words if not line.startswith("#")}
rng = random.Random(0)
prose_or_code = [(line, 1) for line in sorted(prose)] + [(line, 0) for line in rng.sample(sorted(code), len(prose))]
rng.shuffle(prose_or_code)
test, train = prose_or_code[:1000], prose_or_code[1000:]


# %% Two worker processes make tokens of them; None in the spec is a size that differs from sample to sample
def tokens(item: Any) -> Any:
    """Return a line's n characters as n - 1 pairs of neighbours, each one of 128 * 128."""
    line, label = item
    letters = np.frombuffer(line.encode(), np.uint8).astype(np.int32)
    return {"tokens": letters[:-1] * 128 + letters[1:], "y": label}


server = penstock.EmbeddedServer()  # or any Redis: its URL in PENSTOCK_URL
spec = {"tokens": ("int32", (None,)), "y": ("int64", ())}
production = penstock.produce(train, transform=tokens, spec=spec, stream="lines", epochs=EPOCHS, url=server.url)

# %% A batch's tokens are a list of tensors; EmbeddingBag takes them joined together and gives each line's mean vector
import torch
from torch import nn

import penstock.torch

torch.manual_seed(0)
vectors, head = nn.EmbeddingBag(128 * 128, 16), nn.Linear(16, 2)
optimizer = torch.optim.Adam([*vectors.parameters(), *head.parameters()], 1e-2)


def logits(ragged: list[torch.Tensor]) -> torch.Tensor:
    """Return [n, 2] of n lines."""
    starts = torch.tensor([0, *map(len, ragged[:-1])]).cumsum(0)
    return head(vectors(torch.cat(ragged), starts))


with penstock.Loader("lines", group="bag", batch_size=BATCH, url=server.url) as loader:
    batches = penstock.torch.dataset(loader, select=("tokens", "y"))
    for epoch in range(EPOCHS):
        for ragged, y in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(logits(ragged), y)
            loss.backward()
            optimizer.step()
        lengths = sorted(map(len, ragged))
        print(f"epoch {epoch}: last loss {loss.item():.3f}, of lines of {lengths[0]} to {lengths[-1]} tokens")

# %% Tested on the 1,000 lines that were held out
with torch.no_grad():
    guesses = logits([torch.from_numpy(tokens(item)["tokens"]) for item in test]).argmax(dim=1).tolist()
accuracy = sum(guess == label for guess, (_, label) in zip(guesses, test, strict=True)) / len(test)
print(f"{len(train)} lines; accuracy on those held out {accuracy:.3f}")
server.close()
