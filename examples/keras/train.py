"""Trains a Keras model on a stream of digits, while two other processes make the samples. `python train.py`"""

# %% Two worker processes make the samples: noise here, and expensive decoding and augmentation in real use
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import penstock

EPOCHS, BATCH = 12, 32
images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split(images, labels, test_size=360, random_state=0)


def noisy(sample: Any, rng: np.random.Generator) -> Any:
    """Add noise: ``x`` [64] becomes uint8 [64].

    ``rng`` is seeded by epoch and sample, so a seed gives the same stream.
    """
    return {"x": (sample["x"] + rng.normal(0, 1, 64)).clip(0, 16).astype(np.uint8), "y": sample["y"]}


server = penstock.EmbeddedServer()  # or any Redis: its URL in PENSTOCK_URL
production = penstock.produce({"x": x, "y": y}, transform=noisy, stream="digits", epochs=EPOCHS, url=server.url)

# %% Keras reads it as a separate group: `fit` acknowledges each batch after its step
import keras

import penstock.tensorflow

keras.utils.set_random_seed(0)
layers = [keras.layers.Rescaling(1 / 16), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])

with penstock.Loader("digits", group="keras", batch_size=BATCH, url=server.url) as loader:
    batches = penstock.tensorflow.dataset(loader, select=("x", "y"))
    model.fit(batches, epochs=EPOCHS, verbose=2)

# %% Tested on the digits that were held out
_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"accuracy on the held-out digits {accuracy:.3f}")
server.close()
