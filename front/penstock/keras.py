"""``penstock.keras.Acknowledge(loader)``: acknowledge when a step has ended. Importing this imports Keras."""

from __future__ import annotations

try:
    from penstock_consumer.adapters.keras import Acknowledge
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ModuleNotFoundError(
        'Keras is not installed here; pip install "penstock[tensorflow]"', name=error.name
    ) from None

__all__ = ["Acknowledge"]
