"""The Keras callback that acknowledges after each training step; needed only where one call runs several steps.

``fit`` acknowledges by itself (see ``tensorflow``); with ``steps_per_execution`` above 1 it asks for the batches of one
call before the call's first step has ended.
"""

from __future__ import annotations

from typing import Any

import keras

from penstock_consumer.adapters.settling import Feed
from penstock_consumer.loader import Loader


class Acknowledge(keras.callbacks.Callback):
    """``fit(ds, callbacks=[penstock.keras.Acknowledge(loader)])``: batches count as read when their step has ended."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._feed = Feed.of(loader)

    def on_train_begin(self, logs: Any = None) -> None:
        """From here on an arrival alone proves nothing."""
        self._feed.reporter = self

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """The step, or the call's steps, are done."""
        self._feed.settle()

    def on_train_end(self, logs: Any = None) -> None:
        """Others may iterate the dataset now."""
        self._feed.reporter = None
