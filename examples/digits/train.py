"""The example's trainer: a small Keras model fed by one group of the stream, tested on the digits held out.

Started again after a crash, it loads the last saved epoch. The stream continues after the last acknowledged step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np

import penstock
import penstock.tensorflow

BATCH = 16
CLASSES = 10
PATIENCE_S = 600.0
"""The longest wait for the first sample, because a trainer may start long before it is made."""


def main() -> None:
    """Train, save each epoch, and print one line for each epoch and one at the end."""
    args = arguments()
    model, done = load(args.models, args.group) or (build(args.filters), 0)
    with penstock.Loader(
        "digits", group=args.group, batch_size=BATCH, tuning=penstock.Tuning(timeout_s=PATIENCE_S)
    ) as loader:
        if done < args.epochs and has_more(loader):
            batches = penstock.tensorflow.dataset(loader, select=("x", "y"))
            saving = keras.callbacks.ModelCheckpoint(args.models / f"{args.group}-{{epoch}}.keras")
            model.fit(batches, initial_epoch=done, epochs=args.epochs, callbacks=[saving], verbose=2)
    with np.load(args.test) as test:
        _, accuracy = model.evaluate(test["x"], test["y"], verbose=0)
    print(f"{args.group}: {loader.stats(total=True).samples} samples, accuracy on the held-out digits {accuracy:.3f}")


def arguments() -> argparse.Namespace:
    """Return the arguments; see --help."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", required=True, help="every group sees every sample")
    parser.add_argument("--filters", type=int, default=16, help="of the first layer (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--models", type=Path, default=Path(), metavar="DIR", help="where models go (default: here)")
    parser.add_argument("--test", type=Path, required=True, metavar="FILE", help="what prepare.py held out")
    return parser.parse_args()


def has_more(loader: penstock.Loader) -> bool:
    """Return whether the group has more to read. It has not if a crash came between the last step and the last save."""
    try:
        _ = loader.samples
    except penstock.PenstockError as error:
        if type(error).__name__ != "GroupFinished":
            raise
        print(error)
        return False
    return True


def build(filters: int) -> Any:
    """Return a small convolutional classifier of [32, 32, 1] grey levels."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(filters, 3, strides=2, activation="relu"),
            layers.Conv2D(2 * filters, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def load(folder: Path, group: str) -> tuple[Any, int] | None:
    """Return the last saved model and its number of trained epochs, or None if there is none."""
    saved = {int(path.stem.removeprefix(f"{group}-")): path for path in folder.glob(f"{group}-*.keras")}
    return (keras.saving.load_model(saved[max(saved)]), max(saved)) if saved else None


if __name__ == "__main__":
    main()
