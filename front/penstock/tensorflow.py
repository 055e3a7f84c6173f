"""``penstock.tensorflow.dataset(loader)``: a loader as a ``tf.data.Dataset``. Importing this imports TensorFlow."""

from __future__ import annotations

from penstock_common.extras import needed

with needed("tensorflow", "penstock.tensorflow"):
    from penstock_consumer.adapters.tensorflow import acknowledging, dataset

__all__ = ["acknowledging", "dataset"]
