"""Keras callbacks that acknowledge at each checkpoint, or after each step where ``fit`` alone does not show its end.

Usually ``fit`` acknowledges steps without a callback (see ``tensorflow``, ``torch``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras

from penstock_common.hints import explained
from penstock_common.segments.folder import sync
from penstock_consumer.adapters.step_tracking import StepTracker, require_fed
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture


class Acknowledge(keras.callbacks.Callback):
    """A callback by which a batch counts as trained on when its step has ended.

    Only ``fit`` with ``steps_per_execution`` above 1 needs it. Such a ``fit`` asks for the batches of one call before
    the call's first step has ended. For ``acknowledge='on_checkpoint'`` use `ModelCheckpoint`.

    Args:
        loader: the Loader or mixture whose dataset ``fit`` is given.

    Raises:
        ValueError: the loader has ``acknowledge='on_checkpoint'``.

    Example:
        >>> dataset = penstock.tensorflow.dataset(loader, select=("x", "y"))
        >>> model.fit(dataset, callbacks=[penstock.keras.Acknowledge(loader)])
    """

    @explained
    def __init__(self, loader: Loader | Mixture) -> None:
        super().__init__()
        require_fed("Acknowledge", loader)
        if hooks_of(loader).policy == "on_checkpoint":
            raise ValueError(
                "Acknowledge acknowledges steps, and this loader has acknowledge='on_checkpoint': "
                "use penstock.keras.ModelCheckpoint(loader, path)"
            )
        self._tracker = StepTracker.of(loader)

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over the reports. From here on an arrival alone does not prove that a step has ended."""
        self._tracker.begin_reports()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report that the step, or all steps of the call, are done."""
        self._tracker.report()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the reports, because other code may iterate the dataset now."""
        self._tracker.end_reports()


class ModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keras's ModelCheckpoint for a loader with ``acknowledge='on_checkpoint'``: a save acknowledges what it contains.

    ``fit`` is given the loader's ``penstock.tensorflow.dataset``, or with Keras's torch backend a DataLoader of its
    ``penstock.torch.dataset``. What was trained on after the last save is delivered again to a training job that
    continues from it.

    A save is written to a second file, synced to disk, renamed, and only then acknowledged. So a crash at any moment
    leaves the last whole checkpoint under its name, and nothing is acknowledged that a power cut could remove from it.
    The order of callbacks does not matter, because a save acknowledges what the step had been given when it ended. With
    ``save_best_only`` a save that is left out acknowledges nothing.

    Args:
        loader: the Loader or mixture whose dataset ``fit`` is given.
        filepath: the file, as for Keras's own.
        settings: all other arguments of Keras's own.

    Raises:
        ValueError: the loader has another policy than 'on_checkpoint', or ``fit`` is given no dataset of this loader.

    Example:
        >>> loader = penstock.Loader("train", group="a", batch_size=64, acknowledge="on_checkpoint")
        >>> dataset = penstock.tensorflow.dataset(loader, select=("x", "y"))
        >>> model.fit(dataset, callbacks=[penstock.keras.ModelCheckpoint(loader, "model.keras")])
    """

    def __init__(self, loader: Loader | Mixture, *args: Any, **settings: Any) -> None:
        """Raise ValueError for a loader with another policy than 'on_checkpoint'."""
        require_fed("ModelCheckpoint", loader, ", 'model.keras'")
        if not args and "filepath" not in settings:
            raise TypeError("ModelCheckpoint() needs filepath: write ModelCheckpoint(loader, 'model.keras')")
        super().__init__(*args, **settings)
        policy = hooks_of(loader).policy
        if policy != "on_checkpoint":
            raise ValueError(
                f"this loader has acknowledge={policy!r}: a checkpoint would acknowledge nothing. Make it with "
                "acknowledge='on_checkpoint', or use keras.callbacks.ModelCheckpoint"
            )
        self._loader = loader

    def set_model(self, model: Any) -> None:
        """Wrap the model that Keras gives before training."""
        super().set_model(_SaveWatcher(model, self._loader.checkpointed))

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise ValueError if the training data does not report what arrives."""
        super().on_train_begin(logs)
        if hooks_of(self._loader).adapter is None:
            raise ValueError(
                "fit() was given no dataset of this loader: Keras reads ahead, so what a checkpoint contains would not "
                "be known; give it penstock.tensorflow.dataset(loader), or with Keras's torch backend "
                "DataLoader(penstock.torch.dataset(loader), batch_size=None)"
            )


class _SaveWatcher:
    """A model that reports when a save has ended."""

    def __init__(self, model: Any, saved: Callable[[], None]) -> None:
        self._model, self._saved = model, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the whole model. It is on disk when this returns."""
        _durable(filepath, lambda path: self._model.save(path, *args, **settings))
        self._saved()

    def save_weights(self, filepath: Any, *args: Any, **settings: Any) -> None:
        """Save the weights. They are on disk when this returns."""
        _durable(filepath, lambda path: self._model.save_weights(path, *args, **settings))
        self._saved()


def _durable(filepath: Any, save: Callable[[str], None]) -> None:
    """Let ``save`` write a new file next to the old one, then replace it, so that the save is complete or absent."""
    if "://" in str(filepath):  # a bucket keeps a file once it is closed
        save(str(filepath))
        return
    path = Path(filepath)
    fresh = path.with_name(f".new-{path.name}")  # Keras tells formats by the suffix
    try:
        save(str(fresh))
        sync(fresh)
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise
    sync(path.parent)
