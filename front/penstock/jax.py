"""``penstock.jax.dataset(loader)``: a loader's batches as ``jax.Array``. Importing this imports JAX."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock_common.extras import needed
from penstock_common.hints import no_such_name

with needed("jax", "penstock.jax"):
    from penstock_consumer.adapters.jax import Dataset, dataset

__all__ = ["Dataset", "dataset"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name, __all__, sys._getframe(1))
