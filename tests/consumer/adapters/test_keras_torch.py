"""Keras on its torch backend: fit() on a DataLoader, in a separate process, because Keras has one backend."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.adapter import BATCH, SAMPLES, STREAM, acknowledged, delivered, loader_of
from tests.contracts.feed import produce
from tests.contracts.processes import child

# The child imports this module, too, and chooses Keras's backend before it imports Keras.
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None or find_spec("keras") is None, reason="wants Keras and PyTorch"
)


def train(shared_url: str, ordered_url: str, file: str) -> None:
    """Fit a shared group, and an ordered one with checkpoints. One process does both, because its imports take long."""
    os.environ["KERAS_BACKEND"] = "torch"
    fit(shared_url)
    fit(ordered_url, file, order="canonical", acknowledge="on_checkpoint")


def fit(url: str, file: str = "", **settings: Any) -> None:
    """Fit three epochs, and write a checkpoint after each if there is a file for it."""
    import keras
    from torch.utils.data import DataLoader

    import penstock.keras
    import penstock.torch

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    with loader_of(url, **settings) as loader:
        batches = DataLoader(penstock.torch.dataset(loader, select=("x", "y")), batch_size=None)
        steps: list[int | None] = []

        class Watch(keras.callbacks.Callback):
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                steps.append(self.params["steps"])

        callbacks: list[Any] = [Watch()]
        callbacks += [penstock.keras.ModelCheckpoint(loader, file)] if file else []
        seen = model.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
    assert keras.backend.backend() == "torch"
    assert len(seen.history["loss"]) == 3
    if file:
        keras.saving.load_model(file)
        assert steps == [-(-SAMPLES // BATCH)] * 3


@pytest.mark.slow
def test_fit_on_the_torch_backend_acknowledges_its_epochs(any_url: str, fresh_server: Any, tmp_path: Path) -> None:
    """With and without a known length, acknowledged by the step, or by the checkpoint that contains it."""
    urls = any_url, fresh_server().url
    for url in urls:
        produce(url, STREAM, SAMPLES, epochs=3)
    with child(train, *urls, tmp_path / "model.keras") as trainer:
        trainer.rest(timeout_s=200)
    for url in urls:
        assert delivered(url) == [SAMPLES] * 3
        assert acknowledged(url)
