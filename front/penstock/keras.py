"""``penstock.keras.ModelCheckpoint(loader, path)``, ``Acknowledge(loader)``. Importing this imports Keras."""

from __future__ import annotations

try:
    from penstock_consumer.adapters.keras import Acknowledge, ModelCheckpoint
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        'Keras is not installed here; pip install "penstock[tensorflow]" for its TensorFlow backend, or keras with '
        '"penstock[torch]" for its torch backend',
        name=error.name,
    ) from None

__all__ = ["Acknowledge", "ModelCheckpoint"]
