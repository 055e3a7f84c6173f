"""``penstock.jax.dataset(loader)``: a loader's batches as ``jax.Array``. Importing this imports JAX."""

from __future__ import annotations

from penstock_common.extras import needed

with needed("jax", "penstock.jax"):
    from penstock_consumer.adapters.jax import Dataset, dataset

__all__ = ["Dataset", "dataset"]
