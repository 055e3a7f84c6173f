"""Trains a small network on a stream of digits, in plain JAX, on all devices there are.

In this folder: `penstock run dataset digits:train --epochs 8 -- python train.py`
"""

from __future__ import annotations

from typing import Any

import digits
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock
import penstock.jax

EPOCHS, BATCH, RATE = 8, 32, 0.1


def logits(params: Any, x: Any) -> Any:
    """[n, 10] of pixels [n, 64]: uint8 travels, floats are made on the device."""
    hidden = jax.nn.relu(x / 16.0 @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


@jax.jit
def step(params: Any, batch: Any) -> Any:
    """One step of gradient descent."""

    def loss(params: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(logits(params, batch["x"]))[jnp.arange(len(batch["y"])), batch["y"]])

    return jax.tree.map(lambda value, slope: value - RATE * slope, params, jax.grad(loss)(params))


def main() -> None:
    """Prints the accuracy on the digits held out after each epoch."""
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (64, 64)) / 8, "b1": jnp.zeros(64),
        "w2": jax.random.normal(second, (64, 10)) / 8, "b2": jnp.zeros(10),
    }  # fmt: skip
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with penstock.Loader("train", group="jax", batch_size=BATCH) as loader:
        batches = penstock.jax.dataset(loader, sharding=rows)
        for epoch in range(EPOCHS):
            for batch in batches:
                params = step(params, batch)
            accuracy = jnp.mean(logits(params, digits.test["x"]).argmax(axis=1) == digits.test["y"])
            print(f"epoch {epoch}: accuracy {float(accuracy):.3f}", flush=True)


if __name__ == "__main__":
    main()
