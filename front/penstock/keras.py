"""``penstock.keras.ModelCheckpoint(loader, path)``, ``Acknowledge(loader)``. Importing this imports Keras."""

from __future__ import annotations

from penstock_common.extras import needed

with needed("keras", "penstock.keras", "for its torch backend: pip install keras 'penstock[torch]'"):
    from penstock_consumer.adapters.keras import Acknowledge, ModelCheckpoint

__all__ = ["Acknowledge", "ModelCheckpoint"]
