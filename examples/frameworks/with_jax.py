"""The JAX group of together.py."""

from typing import Any

import digits
import jax
import jax.numpy as jnp

import penstock
import penstock.jax


def logits(params: Any, x: Any) -> Any:
    """Return [n, 10] of pixels [n, 64]."""
    return jax.nn.relu(x / 16.0 @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


@jax.jit
def step(params: Any, speed: Any, x: Any, y: Any) -> Any:
    """Return the parameters after one batch, and their momentum."""
    slopes = jax.grad(lambda params: -jnp.mean(jax.nn.log_softmax(logits(params, x))[jnp.arange(len(y)), y]))(params)
    speed = jax.tree.map(lambda speed, slope: 0.9 * speed - 0.05 * slope, speed, slopes)
    return jax.tree.map(jnp.add, params, speed), speed


first, second = jax.random.split(jax.random.key(0))
params = {"w1": jax.random.normal(first, (64, 64)) / 8, "b1": jnp.zeros(64)}
params |= {"w2": jax.random.normal(second, (64, 10)) / 8, "b2": jnp.zeros(10)}
speed = jax.tree.map(jnp.zeros_like, params)
with penstock.Loader("train", group="jax", batch_size=32, order="canonical") as loader:
    batches = penstock.jax.dataset(loader, select=("x", "y"))
    for _ in range(12):
        for x, y in batches:
            params, speed = step(params, speed, x, y)
accuracy = float(jnp.mean(logits(params, digits.test["x"]).argmax(axis=1) == digits.test["y"]))
print(f"jax: accuracy {accuracy:.3f}")
