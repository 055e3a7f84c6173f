"""Kills a training with SIGKILL in the middle, starts it again, and compares it with an undisturbed one: the same
batches, the same losses, the same weights. `python crash.py`, in the folder of train.py
"""

# %% Two worker processes make eight epochs of digits
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import penstock

images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images.astype(np.uint8), labels, test_size=360, random_state=0)
server = penstock.EmbeddedServer()
os.environ["PENSTOCK_URL"] = server.url
production = penstock.produce({"x": x, "y": y}, stream="digits", epochs=8)
checkpoints = tempfile.TemporaryDirectory()


# %% A training that is killed leaves its last checkpoint, and the stream knows what is in it
def train(name: str, kill_after: int | None = None) -> list[str]:
    """Run a training and return the lines that it printed."""
    lines, command = [], [sys.executable, str(Path("train.py").absolute()), name]
    with subprocess.Popen(command, cwd=checkpoints.name, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith(f"step {kill_after}:"):
                process.kill()  # SIGKILL: no handler runs, and nothing is saved
    print(f"{name}: {'; '.join(lines[:3])}; ...; {lines[-1]}; ended with {process.returncode}")
    return lines


whole = train("whole")
before = train("killed", kill_after=250)
after = train("killed")

# %% The steps since that checkpoint came again, and every step is that of the undisturbed training
import torch


def steps(lines: list[str]) -> dict[str, str]:
    """Return step -> loss."""
    return dict(line.split(": ") for line in lines if line.startswith("step"))


first, second = (torch.load(Path(checkpoints.name, f"{name}.pt"))["model"] for name in ("whole", "killed"))
same: Any = steps(whole) == {**steps(before), **steps(after)}
again = len(steps(before).keys() & steps(after).keys())
print(f"the same losses, step for step: {same}; trained again: {again} steps")
print("the same weights, bit for bit:", all(torch.equal(first[name], second[name]) for name in first))
hidden = torch.relu(torch.tensor(x_test) / 16 @ second["0.weight"].T + second["0.bias"])
guesses = (hidden @ second["2.weight"].T + second["2.bias"]).argmax(dim=1).numpy()
print(f"accuracy on the held-out digits {(guesses == y_test).mean():.3f}")
server.close()
checkpoints.cleanup()
