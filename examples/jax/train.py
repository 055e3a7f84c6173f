"""Trains a small network on a stream of digits, in plain JAX, on all devices. `python train.py`"""

# %% Two worker processes make the samples; they are started before JAX is imported, because they are forked
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import penstock

EPOCHS, BATCH = 15, 32
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, random_state=0)


def noisy(sample: Any, rng: np.random.Generator) -> Any:
    """Add noise: ``x`` [64] becomes uint8 [64].

    ``rng`` is seeded by epoch and sample, so a seed gives the same stream.
    """
    return {"x": (sample["x"] + rng.normal(0, 1, 64)).clip(0, 16).astype(np.uint8), "y": sample["y"]}


server = penstock.EmbeddedServer()  # or any Redis: its URL in PENSTOCK_URL
production = penstock.produce({"x": x, "y": y}, transform=noisy, stream="digits", epochs=EPOCHS, url=server.url)

# %% A network, and a step of gradient descent with momentum
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock.jax


def logits(params: Any, x: Any) -> Any:
    """Return [n, 10] of pixels [n, 64]. They arrive as uint8, and become floats on the device."""
    return jax.nn.relu(x / 16.0 @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


@jax.jit
def step(params: Any, speed: Any, batch: Any) -> Any:
    """Return the parameters after one batch, and their momentum."""

    def loss(params: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(logits(params, batch["x"]))[jnp.arange(len(batch["y"])), batch["y"]])

    speed = jax.tree.map(lambda speed, slope: 0.9 * speed - 0.05 * slope, speed, jax.grad(loss)(params))
    return jax.tree.map(jnp.add, params, speed), speed


# %% Each batch is cut over the devices, and acknowledged when the loop asks for the next one
first, second = jax.random.split(jax.random.key(0))
params = {"w1": jax.random.normal(first, (64, 64)) / 8, "b1": jnp.zeros(64)}
params |= {"w2": jax.random.normal(second, (64, 10)) / 8, "b2": jnp.zeros(10)}
speed = jax.tree.map(jnp.zeros_like, params)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
with penstock.Loader("digits", group="jax", batch_size=BATCH, url=server.url) as loader:
    batches = penstock.jax.dataset(loader, sharding=rows)
    for _ in range(EPOCHS):
        for batch in batches:  # {"x": uint8 [32, 64], "y": int32 [32]}
            params, speed = step(params, speed, batch)
accuracy = float(jnp.mean(logits(params, x_test).argmax(axis=1) == y_test))
print(f"accuracy on the held-out digits {accuracy:.3f}")
server.close()
