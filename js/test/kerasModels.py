"""Architectures of Keras for the tests of the export: each with weights like trained ones, inputs and outputs.

`python kerasModels.py FOLDER` exports all of them and writes cases.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import Input, Model, Sequential, layers

import penstock.keras

RANDOM = np.random.default_rng(2)
ACTIVATIONS = [
    *("linear", "relu", "relu6", "elu", "selu", "gelu", "sigmoid", "softmax"),
    *("log_softmax", "softplus", "softsign", "tanh", "mish", "silu"),
]


def dense_activations() -> Any:
    """Return a model with every activation, in series and in parallel."""
    inputs = x = Input((6,))
    branches = []
    for name in ACTIVATIONS:
        x = layers.Dense(6, activation=name)(x)
        branches.append(layers.Activation(name)(layers.Dense(3)(inputs)))
    return Model(inputs, layers.Concatenate()([x, *branches]))


def digits() -> Any:
    """The network of the example."""
    return Sequential(
        [
            Input((28, 28, 1), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(6, (3, 2), strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=5),
            layers.Dense(10, activation="softmax"),
        ]
    )


def mobile() -> Any:
    """Inverted residuals, as in MobileNetV2."""
    inputs = Input((12, 12, 3))
    x = layers.Conv2D(8, 3, strides=2, padding="same", use_bias=False)(inputs)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-3)(x)
    x = start = layers.ReLU(6.0)(x)
    x = layers.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU(6.0)(x)
    x = layers.Conv2D(8, 1, use_bias=False)(x)
    x = layers.Add()([start, layers.BatchNormalization()(x)])
    x = layers.ZeroPadding2D(((0, 1), (2, 1)))(x)
    x = layers.DepthwiseConv2D(3, strides=2, depth_multiplier=2, activation="elu")(x)
    return Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def separable() -> Any:
    """Separable convolutions with a regularizer."""
    inputs = Input((10, 9, 3))
    x = layers.SeparableConv2D(6, 3, padding="same", depth_multiplier=2, activation="swish")(inputs)
    x = layers.SeparableConv2D(5, 3, use_bias=False, pointwise_regularizer="l2")(x)
    x = layers.AveragePooling2D((3, 2), strides=2)(x)
    return Model(inputs, layers.GlobalMaxPooling2D()(x))


def autoencoder() -> Any:
    """Down and up again by transposed convolutions."""
    return Sequential(
        [
            Input((8, 8, 2)),
            layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2DTranspose(3, 3, strides=2, padding="same", activation="tanh"),
            layers.Cropping2D(((1, 2), (0, 3))),
            layers.Conv2DTranspose(2, (2, 3), strides=(1, 2), use_bias=False),
            layers.Conv2D(2, 3, kernel_regularizer=keras.regularizers.L1L2(1e-4, 1e-3)),
        ]
    )


def upsampled() -> Any:
    """Repeated pixels."""
    return Sequential(
        [
            Input((4, 3, 2)),
            layers.Conv2D(3, 2, activation="relu"),
            layers.UpSampling2D((2, 3)),
            layers.Conv2D(2, 3, padding="same"),
        ]
    )


def volumes() -> Any:
    """Convolutions of volumes."""
    return Sequential(
        [
            Input((5, 6, 6, 2)),
            layers.Conv3D(3, 2, activation="relu"),
            layers.MaxPooling3D((1, 2, 2)),
            layers.Conv3D(2, (1, 2, 2), padding="same"),
            layers.AveragePooling3D((2, 1, 1)),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def sequences() -> Any:
    """Convolutions over time."""
    return Sequential(
        [
            Input((12, 3)),
            layers.Conv1D(6, 3, padding="same", activation="gelu"),
            layers.SpatialDropout1D(0.2),
            layers.Conv1D(5, 3, strides=2, bias_regularizer="l1"),
            layers.MaxPooling1D(2),
            layers.AveragePooling1D(2, strides=1),
            layers.LayerNormalization(),
            layers.GlobalAveragePooling1D(),
            layers.Dense(2),
        ]
    )


def words() -> Any:
    """Word numbers into stacked LSTMs."""
    return Sequential(
        [
            Input((7,), dtype="int32"),
            layers.Embedding(20, 5),
            layers.LSTM(6, return_sequences=True, dropout=0.1),
            layers.LSTM(4, go_backwards=True, unit_forget_bias=False),
            layers.Dense(3, activation="softmax"),
        ]
    )


def gated() -> Any:
    """Gated units in the form that TensorFlow.js has."""
    return Sequential(
        [
            Input((6, 4)),
            layers.GRU(5, reset_after=False, return_sequences=True, recurrent_dropout=0.1),
            layers.GRU(4, reset_after=False, activation="relu", recurrent_activation="tanh", use_bias=False),
            layers.Dense(2),
        ]
    )


def simple_recurrent() -> Any:
    """A state as a second output."""
    inputs = Input((5, 3))
    x, state = layers.SimpleRNN(4, return_sequences=True, return_state=True)(inputs)
    return Model(inputs, [layers.GlobalMaxPooling1D()(x), layers.Dense(2)(state)])


def bidirectional() -> Any:
    """Each recurrent layer in both directions, merged in three ways."""
    inputs = Input((6, 3))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(inputs)
    x = layers.Bidirectional(layers.GRU(3, reset_after=False, return_sequences=True), merge_mode="sum")(x)
    x = layers.Bidirectional(layers.SimpleRNN(3), merge_mode="ave")(x)
    return Model(inputs, layers.Dense(2)(x))


def frames() -> Any:
    """A convolution at each time step."""
    return Sequential(
        [
            Input((4, 6, 6, 1)),
            layers.TimeDistributed(layers.Conv2D(3, 3, activation="relu")),
            layers.TimeDistributed(layers.Flatten()),
            layers.TimeDistributed(layers.Dense(5, activation="tanh")),
            layers.LSTM(3),
        ]
    )


def merges() -> Any:
    """Every merge of three inputs."""
    inputs = [Input((5,), name=f"side_{number}") for number in range(3)]
    a, b, c = (layers.Dense(4)(one) for one in inputs)
    merged = [
        layers.Add()([a, b, c]),
        layers.Multiply()([a, b]),
        layers.Average()([a, b, c]),
        layers.Maximum()([a, c]),
        layers.Minimum()([b, c]),
        layers.Dot(axes=1, normalize=True)([a, b]),
    ]
    return Model(inputs, layers.Dense(3)(layers.Concatenate(axis=1)(merged)))


def shared() -> Any:
    """One tower for two inputs, called at two depths."""
    left, right = Input((4,)), Input((4,))
    tower = layers.Dense(4, activation="relu")
    head = layers.Dense(2)
    return Model([left, right], [head(tower(left)), head(tower(tower(right)))])


def nested() -> Any:
    """Models in a model, one of them used twice and one inside another."""
    inner = Sequential([Input((6,)), layers.Dense(5, activation="tanh"), layers.LayerNormalization()], name="inner")
    x = Input((6,))
    middle = Model(x, layers.Concatenate()([inner(x), layers.Dense(2)(x)]), name="middle")
    left, right = Input((6,)), Input((6,))
    return Model([left, right], layers.Add()([middle(left), middle(right)]))


def sequential_of_models() -> Any:
    """A functional model as a layer of a Sequential."""
    x = Input((6, 6, 1))
    base = Model(x, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, activation="relu")(x)))
    return Sequential([Input((6, 6, 1)), base, layers.Dense(2)])


def dict_outputs() -> Any:
    """Inputs and outputs that are dicts."""
    inputs = {"zeta": Input((3,), name="zeta"), "alpha": Input((2,), name="alpha")}
    x = layers.Concatenate()([inputs["zeta"], inputs["alpha"]])
    return Model(inputs, {"second": layers.Dense(1)(x), "first": layers.Dense(2)(x)})


def tabular() -> Any:
    """Columns with large means, normalized in the model."""
    normalization = layers.Normalization(mean=[2020.0, -3.0, 1e4, 0.5], variance=[25.0, 0.01, 4.0, 1e-3])
    inputs = Input((4,))
    x = normalization(inputs)
    x = layers.PReLU()(layers.Dense(8)(x))
    x = layers.LeakyReLU(0.15)(layers.Dense(6)(x))
    x = layers.ELU()(layers.Dense(5)(x))
    return Model(inputs, layers.Softmax()(layers.Dense(3)(x)))


def shapes() -> Any:
    """Layers that only change shapes."""
    return Sequential(
        [
            Input((12,)),
            layers.Reshape((3, -1)),
            layers.Permute((2, 1)),
            layers.Flatten(),
            layers.RepeatVector(2),
            layers.LayerNormalization(axis=[1, 2], epsilon=1e-4),
            layers.Reshape((4, 6, 1)),
            layers.PReLU(shared_axes=[1, 2]),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )


def noise() -> Any:
    """Return a model with layers that are random in training and have no effect otherwise."""
    return Sequential(
        [
            Input((8,)),
            layers.GaussianNoise(0.1),
            layers.Dense(6, activation="selu"),
            layers.AlphaDropout(0.1),
            layers.GaussianDropout(0.1),
            layers.Dense(3),
        ]
    )


def frozen_base() -> Any:
    """Transfer learning: a frozen base, whose BatchNormalization must not adapt, under a head that is trained."""
    x = Input((8, 8, 2))
    y = layers.Conv2D(4, 3, activation="relu")(x)
    y = layers.BatchNormalization()(y)
    y = layers.BatchNormalization(scale=False)(layers.Conv2D(3, 3)(y))
    base = Model(x, layers.GlobalAveragePooling2D()(y), name="base")
    base.trainable = False
    return Sequential([Input((8, 8, 2)), base, layers.Dense(3)])


def large() -> Any:
    """Weights in several files."""
    return Sequential([Input((16,)), layers.Dense(1200, activation="relu"), layers.Dense(900), layers.Dense(2)])


ARCHITECTURES: list[Callable[[], Any]] = [
    *(dense_activations, digits, mobile, separable, autoencoder, upsampled, volumes, sequences, words, gated),
    *(
        simple_recurrent,
        bidirectional,
        frames,
        merges,
        shared,
        nested,
        sequential_of_models,
        dict_outputs,
        tabular,
        shapes,
        noise,
    ),
    *(frozen_base, large),
]


RANDOM_IN_TRAINING = (digits, sequences, words, gated, noise)


def flat(outputs: Any) -> list[Any]:
    """Return the arrays of a structure in Keras's order."""
    return list(keras.tree.flatten(outputs))


def randomize(model: Any) -> None:
    """Give every weight a value of the size that training gives it, moving means and variances too."""
    for weight in model.weights:
        value = RANDOM.normal(0, 0.5 / max(1, np.prod(weight.shape[:-1])) ** 0.5, weight.shape)
        if "variance" in weight.name:
            value = RANDOM.uniform(0.3, 2, weight.shape)
        elif weight.name in {"gamma", "moving_mean", "beta", "bias", "alpha"}:
            value = RANDOM.normal(weight.name == "gamma", 0.3, weight.shape)
        weight.assign(value.astype("float32"))


def sample(tensor: Any) -> np.ndarray[Any, Any]:
    """Return 4 rows for an input."""
    shape = (4, *tensor.shape[1:])
    if tensor.dtype != "float32":
        return RANDOM.integers(0, 255 if tensor.dtype == "uint8" else 20, shape, "int32")
    return RANDOM.normal(0, 1, shape).astype("float32")


def plain(array: Any) -> dict[str, Any]:
    """Return an array as JSON."""
    array = np.asarray(array)
    return {"shape": array.shape, "dtype": str(array.dtype), "values": array.ravel().tolist()}


def case(build: Callable[[], Any], folder: Path) -> dict[str, Any]:
    """Export one architecture, and return its inputs and what Keras predicts."""
    keras.utils.set_random_seed(1)
    model = build()
    randomize(model)
    penstock.keras.to_tfjs(model, folder / build.__name__)
    inputs = [sample(tensor) for tensor in model.inputs]
    if build is tabular:
        inputs = [(inputs[0] * [5, 0.1, 2, 0.03] + [2020, -3, 1e4, 0.5]).astype("float32")]
    given: Any = inputs if len(inputs) > 1 else inputs[0]
    if build is dict_outputs:
        given = dict(zip((one.name for one in model.inputs), inputs, strict=True))
    outputs = model(given)
    # The first loss is so large that no noise hides that it falls.
    offset = 1 if build is noise else 0.1
    wanted = keras.tree.map_structure(lambda one: 0.7 * np.asarray(one) + offset, outputs)
    found = {"inputs": inputs, "outputs": flat(outputs), "wanted": flat(wanted)}
    if build not in RANDOM_IN_TRAINING:
        losses = keras.tree.map_structure(lambda _: "mse", outputs)
        model.compile(optimizer=keras.optimizers.SGD(0.1), loss=losses, run_eagerly=True)
        model.train_on_batch(given, wanted)
        found["trained"] = flat(model(given))
    tensors = {name: list(map(plain, arrays)) for name, arrays in found.items()}
    steps = 2 if build is large else 100 if build in RANDOM_IN_TRAINING else 8
    return {"name": build.__name__, "trainable": len(model.trainable_weights), "steps": steps, **tensors}


if __name__ == "__main__":
    target = Path(sys.argv[1])
    (target / "cases.json").write_text(json.dumps([case(build, target) for build in ARCHITECTURES]))
