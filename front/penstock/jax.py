"""``penstock.jax.dataset(loader)``: a loader's batches as ``jax.Array``. Importing this imports JAX."""

from __future__ import annotations

try:
    from penstock_consumer.adapters.jax import Dataset, dataset
except ModuleNotFoundError as error:
    if error.name != "jax":
        raise
    raise ModuleNotFoundError('JAX is not installed here; pip install "penstock[jax]"', name=error.name) from None

__all__ = ["Dataset", "dataset"]
