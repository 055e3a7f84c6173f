"""The demo's models: two Keras networks, and one in plain numpy for a machine without TensorFlow.

All train from the same two kinds of feed: a Penstock loader, or arrays made in this process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from penstock_consumer.loader import Loader

BATCH = 16
LEARNING_RATE = 3e-3
"""At the start; it falls to zero along a cosine over the planned steps, which steadies the last epoch's accuracy."""
CLASSES = 10
SIDE = 32

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Images float32 [n, 32, 32, 1], labels int64 [n]."""
OnStep = Callable[[], None]


class Model(Protocol):
    """What the trainer process needs of a model."""

    def train(self, loader: Loader, epochs: int, on_step: OnStep) -> None:
        """So many epochs of a loader."""

    def train_on(self, batches: Iterator[Arrays], on_step: OnStep) -> None:
        """Whatever the iterator yields, made in this process."""

    def accuracy(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Share of right answers."""


def build(name: str, steps: int, seed: int) -> Model:
    """A model of `NAMES`, for about ``steps`` training steps."""
    if name.startswith("numpy"):
        return NumpyModel(128 if name.endswith("small") else 256, steps, seed)
    from penstock.demo.keras_models import KerasModel

    return KerasModel(name, steps, seed)


class NumpyModel:
    """Two layers on the image reduced to 16 x 16, trained with Adam, nothing but numpy."""

    def __init__(self, hidden: int, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = (SIDE * SIDE // 4, hidden, CLASSES)
        self._weights = [
            (rng.standard_normal((m, n)) * math.sqrt(2 / m)).astype(np.float32) for m, n in itertools.pairwise(sizes)
        ]
        self._biases = [np.zeros(n, np.float32) for n in sizes[1:]]
        self._moments = [(np.zeros_like(p), np.zeros_like(p)) for p in (*self._weights, *self._biases)]
        self._steps, self._step = max(1, steps), 0

    def train(self, loader: Loader, epochs: int, on_step: OnStep) -> None:
        """See Model."""
        for _ in range(epochs):
            self.train_on(((batch["x"], batch["y"]) for batch in loader), on_step)

    def train_on(self, batches: Iterator[Arrays], on_step: OnStep) -> None:
        """See Model."""
        for images, labels in batches:
            self._learn(_reduced(images), labels)
            on_step()

    def accuracy(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """See Model."""
        _, scores = self._forward(_reduced(images))
        return float((scores.argmax(axis=1) == labels).mean())

    def _forward(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        hidden = np.maximum(inputs @ self._weights[0] + self._biases[0], 0)
        return hidden, hidden @ self._weights[1] + self._biases[1]

    def _learn(self, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        """One step of Adam on the cross-entropy."""
        hidden, scores = self._forward(inputs)
        scores -= scores.max(axis=1, keepdims=True)
        error = np.exp(scores)
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = (error @ self._weights[1].T) * (hidden > 0)
        gradients = [inputs.T @ back, hidden.T @ error, back.sum(axis=0), error.sum(axis=0)]
        self._step += 1
        rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._steps)))
        parameters = [*self._weights, *self._biases]
        rate *= math.sqrt(1 - 0.999**self._step) / (1 - 0.9**self._step)
        for parameter, gradient, moments in zip(parameters, gradients, self._moments, strict=True):
            _adam(parameter, gradient, moments, rate)


def _adam(
    parameter: NDArray[Any], gradient: NDArray[Any], moments: tuple[NDArray[Any], NDArray[Any]], rate: float
) -> None:
    first, second = moments
    first += 0.1 * (gradient - first)
    second += 0.001 * (gradient**2 - second)
    parameter -= rate * first / (np.sqrt(second) + 1e-7)


def _reduced(images: NDArray[Any]) -> NDArray[Any]:
    """[n, 32, 32, 1] to [n, 256]: the mean of each 2 x 2 pixels."""
    half = SIDE // 2
    reduced: NDArray[Any] = images.reshape(-1, half, 2, half, 2).mean(axis=(2, 4)).reshape(len(images), half * half)
    return reduced
