"""The demo's two Keras networks, fed by `penstock.tensorflow.dataset` as any Keras model would be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from numpy.typing import NDArray

from penstock.demo.models import CLASSES, LEARNING_RATE, SIDE, Arrays, OnStep
from penstock.tensorflow import dataset

if TYPE_CHECKING:
    from penstock_consumer.loader import Loader


def _convolutions() -> list[Any]:
    return [
        keras.layers.Conv2D(24, 5, strides=2, activation="relu"),
        keras.layers.Conv2D(48, 3, strides=2, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
    ]


def _dense() -> list[Any]:
    return [
        keras.layers.AveragePooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(128, activation="relu"),
    ]


LAYERS = {"convnet": _convolutions, "dense": _dense}


class _Steps(keras.callbacks.Callback):
    def __init__(self, on_step: OnStep) -> None:
        super().__init__()
        self._on_step = on_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._on_step()


class KerasModel:
    """A Keras model of `LAYERS`."""

    def __init__(self, name: str, steps: int, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        tf.config.threading.set_intra_op_parallelism_threads(1)  # the other model and the workers need the cores too
        self._model = keras.Sequential(
            [keras.Input((SIDE, SIDE, 1)), *LAYERS[name](), keras.layers.Dense(CLASSES)], name=name
        )
        rate = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, max(1, steps))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])

    def train(self, loader: Loader, epochs: int, on_step: OnStep) -> None:
        """`fit` over the group's epochs."""
        batches = dataset(loader, select=("x", "y"))
        self._model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=[_Steps(on_step)])

    def train_on(self, batches: Iterator[Arrays], on_step: OnStep) -> None:
        """The usual way: a tf.data.Dataset over a Python generator."""
        first = next(batches)
        signature = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in first)
        every = tf.data.Dataset.from_generator(lambda: itertools.chain([first], batches), output_signature=signature)
        self._model.fit(every, epochs=1, verbose=0, shuffle=False, callbacks=[_Steps(on_step)])

    def accuracy(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Keras's own."""
        return float(self._model.evaluate(images, labels, verbose=0)[1])
