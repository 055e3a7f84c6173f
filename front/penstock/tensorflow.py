"""``penstock.tensorflow.dataset(loader)``: a loader as a ``tf.data.Dataset``. Importing this imports TensorFlow."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock_common.extras import needed
from penstock_common.hints import no_such_name

with needed("tensorflow", "penstock.tensorflow"):
    from penstock_consumer.adapters.tensorflow import acknowledging, dataset

__all__ = ["acknowledging", "dataset"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name, __all__, sys._getframe(1))
