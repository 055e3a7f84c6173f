"""Trains the same network with Keras, PyTorch, JAX and NumPy at once on one stream. Each framework is a separate group.
Every sample is made once, and each group gets all of them in canonical order, so all four train on the same batches.

In this folder: `penstock run dataset digits:train --transform digits:noisy --epochs 12 -- python together.py`
"""

import subprocess
import sys

FRAMEWORKS = ["keras", "torch", "jax", "numpy"]

trainers = [subprocess.Popen([sys.executable, f"with_{name}.py"]) for name in FRAMEWORKS]
failed = [name for name, trainer in zip(FRAMEWORKS, trainers, strict=True) if trainer.wait() != 0]
sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
