"""Trains a small Keras model on the stream, tests it on digits that were held out, and exports it for a page."""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np

import penstock
import penstock.keras
import penstock.tensorflow

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--test", type=Path, required=True, metavar="FILE", help="the digits that were held out")
parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="where the exported model goes")
parser.add_argument("--epochs", type=int, required=True, help="epochs of the stream")
args = parser.parse_args()

keras.utils.set_random_seed(1)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((32, 32, 1), dtype="uint8"),
        layers.Rescaling(1 / 255),
        layers.Conv2D(16, 3, strides=2, activation="relu"),
        layers.Conv2D(32, 3, strides=2, activation="relu"),
        layers.Flatten(),
        layers.Dropout(0.3),
        layers.Dense(64, activation="relu"),
        layers.Dense(10, activation="softmax"),
    ]
)
model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
with penstock.Loader("train", group="page", batch_size=32) as loader:
    batches = penstock.tensorflow.dataset(loader, select=("x", "y"))
    model.fit(batches, epochs=args.epochs, verbose=2)

with np.load(args.test) as test:
    _, accuracy = model.evaluate(test["x"], test["y"], verbose=0)
print(f"accuracy on the held-out digits {accuracy:.3f}")
print(penstock.keras.to_tfjs(model, args.model, overwrite=True))
