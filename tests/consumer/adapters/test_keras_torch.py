"""Keras on its torch backend: fit() on a DataLoader, in a separate process, because Keras has one backend."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.adapter import BATCH, SAMPLES, STREAM, delivered, loader_of, settled
from tests.contracts.feed import produce
from tests.contracts.processes import child

# The child imports this module, too, and chooses Keras's backend before it imports Keras.
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("keras") is None, reason="wants Keras and PyTorch"
)


def fit(url: str, order: str, file: str) -> None:
    """Fit three epochs, with an order also with a checkpoint after each."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from torch.utils.data import DataLoader

    import penstock.keras
    import penstock.torch

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    settings = {"order": "canonical", "acknowledge": "on_checkpoint"} if order else {}
    with loader_of(url, **settings) as loader:
        batches = DataLoader(penstock.torch.dataset(loader, select=("x", "y")), batch_size=None)
        steps: list[int | None] = []

        class Watch(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                steps.append(self.params["steps"])

        callbacks: list[Any] = [Watch()]
        callbacks += [penstock.keras.ModelCheckpoint(loader, file)] if order else []
        seen = model.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
    assert keras.backend.backend() == "torch"
    assert len(seen.history["loss"]) == 3
    if order:
        keras.saving.load_model(file)
        assert steps == [-(-SAMPLES // BATCH)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("order", ["", "canonical"])
def test_fit_on_the_torch_backend_settles_its_epochs(order: str, any_url: str, tmp_path: Path) -> None:
    """With and without a known length, acknowledged by the step, or by the checkpoint that contains it."""
    produce(any_url, STREAM, SAMPLES, epochs=3)
    with child(fit, any_url, order, tmp_path / "model.keras") as trainer:
        trainer.rest(timeout_s=200)
    assert delivered(any_url) == [SAMPLES] * 3
    assert settled(any_url)
