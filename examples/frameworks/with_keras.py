"""The Keras group of together.py."""

import digits
import keras

import penstock
import penstock.tensorflow

keras.utils.set_random_seed(0)
layers = [keras.layers.Rescaling(1 / 16), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile(keras.optimizers.Adam(3e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
with penstock.Loader("train", group="keras", batch_size=32, order="canonical") as loader:
    model.fit(penstock.tensorflow.dataset(loader, select=("x", "y")), epochs=12, verbose=0)
_, accuracy = model.evaluate(digits.test["x"], digits.test["y"], verbose=0)
print(f"keras: accuracy {accuracy:.3f}")
