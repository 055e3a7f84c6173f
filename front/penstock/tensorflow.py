"""``penstock.tensorflow.dataset(loader)``: a loader as a ``tf.data.Dataset``. Importing this imports TensorFlow."""

from __future__ import annotations

try:
    from penstock_consumer.adapters.tensorflow import acknowledging, dataset
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ModuleNotFoundError(
        'TensorFlow is not installed here; pip install "penstock[tensorflow]"', name=error.name
    ) from None

__all__ = ["acknowledging", "dataset"]
