"""The export to TensorFlow.js: what it refuses, what it says before it writes, and that a folder is whole or absent.

js/test/kerasExport.test.mjs compares what exported models predict, and how they train on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import penstock.keras


def small() -> Any:
    """Return a model of two layers."""
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, name="hidden"), layers.Dense(2, name="head")])


def of(*chain: Any, shape: tuple[int | None, ...] = (8, 8, 2), dtype: str = "float32") -> Any:
    """Return a Sequential of these layers."""
    return keras.Sequential([keras.Input(shape, dtype=dtype), *chain])


def called(layer: Any, **options: Any) -> Any:
    """Return a functional model that calls a layer with options of the call."""
    inputs = keras.Input((5, 3))
    return keras.Model(inputs, layer(inputs, **options))


class Doubled(layers.Dense):
    """A custom layer that has the name of none of Keras's."""

    def call(self, inputs: Any) -> Any:
        """Return twice the outputs."""
        return 2 * super().call(inputs)


class Dense(layers.Dense):
    """A custom layer with the name of one of Keras's."""


def twice_regularized() -> Any:
    """Return a model that calls a regularized layer twice."""
    inputs = keras.Input((3,))
    layer = layers.Dense(3, kernel_regularizer="l2", name="shared")
    return keras.Model(inputs, layer(layer(inputs)))


def attentive() -> Any:
    """Return a model that attends to its own inputs."""
    inputs = keras.Input((5, 3))
    return keras.Model(inputs, layers.MultiHeadAttention(1, 2)(inputs, inputs))


def same_name() -> Any:
    """Return a model with two layers of one name."""
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="dense_of_both")], name="inner")
    return keras.Sequential([keras.Input((3,)), inner, layers.Dense(3, name="dense_of_both")])


def own_backward() -> Any:
    """Return a Bidirectional with two kinds of layers."""
    backward = layers.LSTM(3, go_backwards=True, activation="relu")
    return layers.Bidirectional(layers.LSTM(3), backward_layer=backward)


def regularized() -> Any:
    """Return a layer with a regularizer that TensorFlow.js lacks."""
    return layers.Dense(2, kernel_regularizer=keras.regularizers.OrthogonalRegularizer())


# A model, and what the refusal says of it.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a layer that is not there": (lambda: of(layers.GroupNormalization(2)), "GroupNormalization .*is not in TensorF"),
    "attention": (attentive, "MultiHeadAttention .*is not in TensorFlow.js"),
    "an operator": (lambda: called(lambda x: x * 2.0), "Multiply .*is not in TensorFlow.js"),
    "a custom layer": (lambda: of(Doubled(3)), "Doubled .*is not in TensorFlow.js"),
    "a custom layer of a known name": (lambda: of(Dense(3)), "Dense .*is not in TensorFlow.js"),
    "a lambda": (lambda: of(layers.Lambda(lambda x: x)), "Lambda .*is not in TensorFlow.js"),
    "no model": (lambda: layers.Dense(3), "neither a Sequential nor a functional model"),
    "no input shape": (lambda: keras.Sequential([layers.Dense(3)]), "begin it with keras.Input"),
    "channels first": (lambda: of(layers.Conv2D(2, 2, data_format="channels_first")), "data_format='channels_first'"),
    "causal padding": (lambda: of(layers.Conv1D(2, 3, padding="causal"), shape=(8, 2)), "has padding='causal'"),
    "groups": (lambda: of(layers.Conv2D(2, 3, groups=2)), "has groups=2"),
    "dilation": (lambda: of(layers.Conv2D(2, 3, dilation_rate=2)), r"has dilation_rate=\(2, 2\)"),
    "dilated depthwise": (lambda: of(layers.DepthwiseConv2D(3, dilation_rate=2)), "has dilation_rate"),
    "output padding": (lambda: of(layers.Conv2DTranspose(2, 3, 2, output_padding=1)), "has output_padding"),
    "bilinear": (
        lambda: of(layers.UpSampling2D(2, interpolation="bilinear")),
        "interpolation='bilinear'.*'nearest' only",
    ),
    "padded averages": (lambda: of(layers.AveragePooling2D(3, padding="same")), "padding='valid' only"),
    "keepdims": (lambda: of(layers.GlobalAveragePooling2D(keepdims=True)), "has keepdims=True"),
    "another slope": (lambda: of(layers.ReLU(negative_slope=0.1)), "has negative_slope=0.1"),
    "another elu": (lambda: of(layers.ELU(0.5)), "has alpha=0.5"),
    "hard sigmoid": (lambda: of(layers.Dense(2, activation="hard_sigmoid")), "has the activation 'hard_sigmoid'"),
    "a function": (lambda: of(layers.Dense(2, activation=keras.ops.sin)), "has the activation"),
    "a constraint": (lambda: of(layers.Dense(2, kernel_constraint="max_norm")), "has kernel_constraint=MaxNorm"),
    "another regularizer": (lambda: of(regularized()), "has kernel_regularizer=Orthogonal"),
    "regularized steps": (
        lambda: of(layers.LSTM(2, kernel_regularizer="l2"), shape=(4, 2)),
        "has kernel_regularizer=L2",
    ),
    "a regularizer counted twice": (twice_regularized, "shared.*is called more than once"),
    "activity": (lambda: of(layers.Dense(2, activity_regularizer="l2")), "has activity_regularizer=L2"),
    "reset after": (lambda: of(layers.GRU(2), shape=(4, 2)), r"write GRU\(..., reset_after=False\)"),
    "a state kept": (
        lambda: keras.Sequential([keras.Input((4, 2), batch_size=2), layers.LSTM(2, stateful=True)]),
        "stateful",
    ),
    "an initial state": (
        lambda: called(layers.SimpleRNN(3), initial_state=keras.ops.zeros((1, 3))),
        "is called with initial_state",
    ),
    "a backward layer": (lambda: of(own_backward(), shape=(4, 2)), "backward_layer of its own"),
    "states both ways": (lambda: called(layers.Bidirectional(layers.LSTM(2, return_state=True))), "return_state=True"),
    "a wrapped model": (lambda: of(layers.TimeDistributed(of(layers.Flatten())), shape=(3, 8, 8, 2)), "does not wrap"),
    "steps normalized": (lambda: of(layers.TimeDistributed(layers.BatchNormalization())), "does not wrap"),
    "a mask": (lambda: of(layers.Embedding(5, 2, mask_zero=True), shape=(3,), dtype="int32"), "has mask_zero=True"),
    "another axis": (lambda: of(layers.BatchNormalization(axis=1)), "has axis=1; TensorFlow.js needs the last"),
    "no gamma": (lambda: of(layers.BatchNormalization(scale=False)), "center=True and scale=True only"),
    "no beta": (lambda: of(layers.LayerNormalization(center=False)), "center=True and scale=True only"),
    "softmax of columns": (lambda: of(layers.Softmax(axis=1)), "has axis=1"),
    "unknown length": (lambda: of(layers.Flatten(), shape=(None, 3)), "at least two known dimensions"),
    "half precision": (lambda: of(layers.Dense(2, dtype="mixed_float16")), "dtype policy mixed_float16"),
    "long integers": (lambda: of(layers.Embedding(5, 2), shape=(3,), dtype="int64"), "has dtype int64"),
    "integers into a layer": (lambda: of(layers.Dense(2), shape=(3,), dtype="int32"), "reads integers"),
    "one name twice": (same_name, "dense_of_both: two layers have this name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tensorflow_js_cannot_do_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """A page must not predict, or go on training, differently from Keras without a word."""
    build, said = REFUSED[name]
    with pytest.raises(ValueError, match=said) as refusal:
        penstock.keras.to_tfjs(build(), tmp_path / "model")
    assert "onnxruntime-web" in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_names_every_layer_at_once() -> None:
    """A user would learn of the next layer only after training the model again."""
    model = of(layers.GroupNormalization(2, name="first"), layers.ELU(0.5, name="second"))
    with pytest.raises(ValueError, match=r"(?s)'first': is not in.*'second': has alpha=0.5.*Its layers are Dense, Act"):
        penstock.keras.describe_tfjs(model)


def test_weights_that_are_not_finite_are_refused() -> None:
    """A model that diverged predicts nothing, and JSON in the place of weights would not say so."""
    model = small()
    model.layers[0].bias.assign([0, np.nan, 0])
    with pytest.raises(ValueError, match="hidden/bias: has values that are not finite"):
        penstock.keras.describe_tfjs(model)


def test_names_and_sizes_are_known_before_anything_is_written() -> None:
    """The author of a page wants to know what its readers download."""
    described = penstock.keras.describe_tfjs(small())
    assert [(one.name, one.shape, one.nbytes) for one in described.weights] == [
        ("hidden/kernel", (4, 3), 48),
        ("hidden/bias", (3,), 12),
        ("head/kernel", (3, 2), 24),
        ("head/bias", (2,), 8),
    ]
    assert described.nbytes == 92
    assert str(described).splitlines()[0] == "hidden/kernel  4x3  48"
    assert str(described).splitlines()[-1] == "4 weights of float32, 92 bytes"


def test_the_files_hold_what_was_described(tmp_path: Path) -> None:
    """The manifest, the files and the return value must be about the same bytes."""
    model = small()
    written = penstock.keras.to_tfjs(model, tmp_path / "model")
    assert written == penstock.keras.describe_tfjs(model)
    (group,) = json.loads((tmp_path / "model/model.json").read_text())["weightsManifest"]
    data = b"".join((tmp_path / "model" / path).read_bytes() for path in group["paths"])
    assert data == b"".join(np.asarray(weight).astype("<f4").tobytes() for weight in model.get_weights())
    assert [(one["name"], tuple(one["shape"])) for one in group["weights"]] == [
        (one.name, one.shape) for one in written.weights
    ]


def test_large_weights_lie_in_files_of_four_megabytes(tmp_path: Path) -> None:
    """A browser caches each file, and an interrupted download repeats one file only."""
    written = penstock.keras.to_tfjs(of(layers.Dense(1_100_000, use_bias=False), shape=(2,)), tmp_path / "model")
    sizes = [path.stat().st_size for path in sorted((tmp_path / "model").glob("*.bin"))]
    assert sizes == [4 << 20, 4 << 20, written.nbytes - (8 << 20)]


def test_an_existing_folder_is_kept_unless_it_is_an_export_to_replace(tmp_path: Path) -> None:
    """A typing error in the path would delete a folder of the user's own work."""
    folder = tmp_path / "model"
    penstock.keras.to_tfjs(of(layers.Dense(1_100_000), shape=(2,)), folder)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        penstock.keras.to_tfjs(small(), folder)
    penstock.keras.to_tfjs(small(), folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == ["group1-shard1of1.bin", "model.json"]
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(FileExistsError, match=r"holds 'notes.txt'"):
        penstock.keras.to_tfjs(small(), folder, overwrite=True)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(FileExistsError, match="is not a folder"):
        penstock.keras.to_tfjs(small(), tmp_path / "link", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk must not leave a page with half a model."""
    folder = tmp_path / "model"
    penstock.keras.to_tfjs(small(), folder)
    before = (folder / "model.json").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dumps", full)
    with pytest.raises(OSError, match="No space left"):
        penstock.keras.to_tfjs(of(layers.Dense(3)), folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "model.json").read_bytes() == before


def test_a_frozen_normalization_becomes_layers_that_cannot_adapt() -> None:
    """TensorFlow.js goes on adapting a frozen BatchNormalization, which would change what the rest was trained on."""
    model = of(layers.BatchNormalization(name="norm"), layers.Dense(2, name="head"))
    model.layers[0].trainable = False
    assert [one.name for one in penstock.keras.describe_tfjs(model).weights] == ["head/kernel", "head/bias"]
