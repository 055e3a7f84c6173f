"""Export of a Keras model as a layers model of TensorFlow.js, which a page or Node predicts with and trains further.

`describe_tfjs` reads the model's configuration and weights. `to_tfjs` also writes the files. A layer is written only if
TensorFlow.js 4 computes the same outputs and trains in the same way. The table `OPTIONS` says which options of a layer
TensorFlow.js reads. An option that it would ignore must have its neutral value.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SHARD_BYTES = 4 << 20  # as TensorFlow.js itself writes them, so that browsers can cache each file
FILE_NAMES = ("model.json", "group1-shard*of*.bin")

_REGULARIZED = "kernel_regularizer bias_regularizer"
_CONV = f"filters kernel_size strides padding activation use_bias {_REGULARIZED}"
_POOL = "pool_size strides padding"
# TensorFlow.js accepts regularizers of recurrent layers, and ignores them.
_RNN = "units activation use_bias dropout recurrent_dropout return_sequences return_state go_backwards"
_NORM = "axis epsilon center scale beta_regularizer gamma_regularizer"
OPTIONS: dict[str, frozenset[str]] = {
    name: frozenset(options.split())
    for name, options in {
        "InputLayer": "batch_shape",
        "Dense": f"units activation use_bias {_REGULARIZED}",
        "Activation": "activation",
        "Embedding": "input_dim output_dim embeddings_regularizer",
        "Conv1D": _CONV,
        "Conv2D": _CONV,
        "Conv3D": _CONV,
        "Conv2DTranspose": _CONV,
        "DepthwiseConv2D": "kernel_size strides padding activation use_bias depth_multiplier depthwise_regularizer "
        "bias_regularizer",
        "SeparableConv2D": "filters kernel_size strides padding activation use_bias depth_multiplier "
        "depthwise_regularizer pointwise_regularizer bias_regularizer",
        "MaxPooling1D": _POOL,
        "MaxPooling2D": _POOL,
        "MaxPooling3D": _POOL,
        "AveragePooling1D": _POOL,
        "AveragePooling2D": _POOL,
        "AveragePooling3D": _POOL,
        "GlobalMaxPooling1D": "",
        "GlobalMaxPooling2D": "",
        "GlobalAveragePooling1D": "",
        "GlobalAveragePooling2D": "",
        "ZeroPadding2D": "padding",
        "Cropping2D": "cropping",
        "UpSampling2D": "size interpolation",
        "BatchNormalization": f"{_NORM} momentum",
        "LayerNormalization": _NORM,
        "Normalization": "axis mean variance",
        "Rescaling": "scale offset",
        "SimpleRNN": _RNN,
        "GRU": f"{_RNN} recurrent_activation",
        "LSTM": f"{_RNN} recurrent_activation unit_forget_bias",
        "Bidirectional": "layer backward_layer merge_mode",
        "TimeDistributed": "layer",
        "Add": "",
        "Average": "",
        "Maximum": "",
        "Minimum": "",
        "Multiply": "",
        "Concatenate": "axis",
        "Dot": "axes normalize",
        "ReLU": "max_value",
        "LeakyReLU": "negative_slope",
        "PReLU": "shared_axes alpha_regularizer",
        "ELU": "alpha",
        "Softmax": "axis",
        "Dropout": "rate noise_shape",
        "SpatialDropout1D": "rate",
        "AlphaDropout": "rate noise_shape",
        "GaussianDropout": "rate",
        "GaussianNoise": "stddev",
        "Flatten": "",
        "Reshape": "target_shape",
        "Permute": "dims",
        "RepeatVector": "n",
    }.items()
}
MODELS = ("Functional", "Sequential")
LAYERS = tuple(name for name in OPTIONS if name != "InputLayer")

# The same functions in both. hard_sigmoid is not: Keras 3 has another slope.
ACTIVATIONS = {
    **{name: name for name in ("linear", "relu", "relu6", "elu", "selu", "gelu", "sigmoid", "softmax", "log_softmax")},
    **{name: name for name in ("softplus", "softsign", "tanh", "mish")},
    "silu": "swish",
    "swish": "swish",
}
# An option that TensorFlow.js does not read must be off, at its default, or one of these values.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "data_format": ("channels_last",),
    "dilation_rate": (1, (1,), (1, 1), (1, 1, 1)),
    "zero_output_for_mask": (True,),
    "unroll": (True,),
}
# The only values that some options may have.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "padding": ("valid", "same"),
    "interpolation": ("nearest",),
    "alpha": (1,),
}
_INPUT_DTYPES = {
    **{name: name for name in ("float32", "int32", "bool")},
    **dict.fromkeys(("uint8", "int8", "uint16", "int16"), "int32"),  # every value is an int32
}
_READ_INTEGERS = ("Embedding", "Rescaling", "Normalization", "Flatten", "Reshape", "Permute", "RepeatVector")
_DISPOSABLE = ("_initializer", "seed")


@dataclass(frozen=True)
class TfjsWeight:
    """A weight of an exported model, which is float32.

    Args:
        name: its name in TensorFlow.js, such as ``dense/kernel``.
        shape: its shape.
        nbytes: its size in bytes.

    Example:
        >>> max(penstock.keras.describe_tfjs(model).weights, key=lambda weight: weight.nbytes).name
        'dense/kernel'
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class TfjsModel:
    """The weights that an export writes. Its text is a table of them.

    Args:
        weights: the weights, in the order of the files.

    Example:
        >>> penstock.keras.to_tfjs(model, "model").nbytes
        2600
    """

    weights: tuple[TfjsWeight, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes that a page downloads for the weights."""
        return sum(weight.nbytes for weight in self.weights)

    def __str__(self) -> str:
        rows = [(one.name, "x".join(map(str, one.shape)), f"{one.nbytes:,}") for one in self.weights]
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{name:<{wide[0]}}  {shape:<{wide[1]}}  {size:>{wide[2]}}" for name, shape, size in rows]
        return "\n".join([*lines, f"{len(rows)} weights of float32, {self.nbytes:,} bytes"])


def describe_tfjs(model: Any) -> TfjsModel:
    """Return names, shapes and sizes of the weights that `to_tfjs` would write. Nothing is written.

    Args:
        model: a built Sequential or functional model of Keras 3.

    Returns:
        The weights. ``print(describe_tfjs(model))`` shows them as a table.

    Raises:
        ValueError: TensorFlow.js cannot express the model. The text names each layer and the reason.

    Example:
        >>> print(penstock.keras.describe_tfjs(model))
        dense/kernel  64x10  2,560
        dense/bias    10        40
        2 weights of float32, 2,600 bytes
    """
    return _described(_converted(model).weights)


def to_tfjs(model: Any, folder: str | os.PathLike[str], *, overwrite: bool = False) -> TfjsModel:
    """Write a Keras model as a layers model of TensorFlow.js: ``model.json`` and its weights, in files of up to 4 MB.

    ``tf.loadLayersModel`` of TensorFlow.js 4 loads the folder from any static server. The model predicts there what it
    predicts here, and ``compile`` and ``fit`` train it further. The folder appears complete or not at all.

    A frozen BatchNormalization is written as two Rescaling layers, because TensorFlow.js would go on adapting it.
    Initializers, seeds, the optimizer and the loss are not exported.

    Args:
        model: a built Sequential or functional model of Keras 3, float32, of the layers in docs/model-in-a-browser.md.
        folder: the folder to make. Its parent exists.
        overwrite: replace a folder that holds an exported model and nothing else.

    Returns:
        The weights that were written, with names, shapes and sizes.

    Raises:
        ValueError: TensorFlow.js cannot express the model. The text names each layer and the reason.
        FileExistsError: the folder exists, and ``overwrite`` is not set or the folder holds other files.

    Example:
        >>> penstock.keras.to_tfjs(model, "page/model")
        >>> # in the page: const model = await tf.loadLayersModel("model/model.json");
    """
    target = Path(folder)
    converted = _converted(model)
    _refuse_existing(target, overwrite)
    fresh = target.with_name(f".new-{target.name}-{os.getpid()}")
    fresh.mkdir()
    try:
        _write(fresh, converted)
        _replace(target, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return _described(converted.weights)


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass
class _Conversion:
    """A model on its way: its topology, its weights by name, and what is wrong with it."""

    topology: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def refuse(self, layer: str, problem: str) -> None:
        self.problems.append(f"{layer}: {problem}")

    def add_weight(self, name: str, weight: Any) -> None:
        value = _array(weight)
        if not np.isfinite(value).all():
            self.refuse(name, "has values that are not finite")
        if name in self.weights:
            self.refuse(name.rsplit("/", 1)[0], "two layers have this name; give one of them another name")
        self.weights[name] = np.ascontiguousarray(value, "<f4")


def _described(weights: dict[str, np.ndarray[Any, Any]]) -> TfjsModel:
    return TfjsModel(tuple(TfjsWeight(name, value.shape, value.nbytes) for name, value in weights.items()))


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise FileExistsError(f"{target} exists; write to_tfjs(model, {str(target)!r}, overwrite=True) to replace it")
    if target.is_symlink() or not target.is_dir():
        raise FileExistsError(f"{target} is not a folder; remove it, or name another folder")
    strange = [path.name for path in target.iterdir() if not any(path.match(name) for name in FILE_NAMES)]
    if strange:
        raise FileExistsError(f"{target} holds {strange[0]!r}, which no export wrote; name another folder")


def _write(folder: Path, converted: _Conversion) -> None:
    data = b"".join(value.tobytes() for value in converted.weights.values())
    shards = [data[start : start + SHARD_BYTES] for start in range(0, len(data), SHARD_BYTES)]
    paths = [f"group1-shard{number}of{len(shards)}.bin" for number in range(1, len(shards) + 1)]
    for path, shard in zip(paths, shards, strict=True):
        (folder / path).write_bytes(shard)
    manifest = [
        {"name": name, "shape": list(value.shape), "dtype": "float32"} for name, value in converted.weights.items()
    ]
    content = {
        "format": "layers-model",
        "generatedBy": "keras",
        "convertedBy": "penstock",
        "modelTopology": {"backend": "tensorflow", "model_config": converted.topology},
        "weightsManifest": [{"paths": paths, "weights": manifest}] if shards else [],
    }
    (folder / "model.json").write_text(json.dumps(content, allow_nan=False))


def _replace(target: Path, fresh: Path) -> None:
    """Give the new folder its name. An old export is moved away first and removed afterwards."""
    old = target.with_name(f".old-{target.name}-{os.getpid()}")
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


# --- models -----------------------------------------------------------------------------------------------------------


def _converted(model: Any) -> _Conversion:
    conversion = _Conversion()
    if not _is_keras(model, MODELS):
        conversion.refuse(_label(model), "neither a Sequential nor a functional model of Keras 3")
    elif not model.built or not model.layers or not hasattr(model, "inputs") or model.inputs is None:
        conversion.refuse(_label(model), "has no input shape yet; begin it with keras.Input(shape)")
    else:
        conversion.topology.update(_model(model, conversion))
    if conversion.problems:
        reasons = "\n".join(f"  {problem}" for problem in dict.fromkeys(conversion.problems))
        raise ValueError(
            f"TensorFlow.js cannot express this model:\n{reasons}\nIts layers are {', '.join(LAYERS)}. To predict "
            "with any model in a page, write model.export('model.onnx', format='onnx') and use onnxruntime-web, as "
            "docs/model-in-a-browser.md shows."
        )
    return conversion


def _is_keras(thing: Any, names: Iterable[str]) -> bool:
    """Return True for Keras's own class of such a name. A subclass may compute something else."""
    return type(thing).__module__.split(".")[0] == "keras" and type(thing).__name__ in names


def _label(layer: Any) -> str:
    return f"{type(layer).__name__} {getattr(layer, 'name', '')!r}"


def _model(model: Any, conversion: _Conversion) -> dict[str, Any]:
    config = model.get_config()
    layers = {layer.name: layer for layer in model.layers}
    if type(model).__name__ == "Sequential":
        return {"class_name": "Sequential", "config": _sequential(config, layers, conversion)}
    return {"class_name": "Functional", "config": _functional(config, layers, conversion)}


def _sequential(config: dict[str, Any], layers: dict[str, Any], conversion: _Conversion) -> dict[str, Any]:
    chain, reads_integers = [], False
    for spec in config["layers"]:
        name = spec["config"]["name"]
        if spec["class_name"] == "InputLayer":
            reads_integers = spec["config"]["dtype"] != "float32"
        elif reads_integers:
            _check_integers(spec["class_name"], name, conversion)
            reads_integers = spec["class_name"] not in {"Embedding", "Rescaling", "Normalization"}
        chain += _layer(spec, layers.get(name), conversion)
    return {"name": config["name"], "layers": chain}


def _functional(config: dict[str, Any], layers: dict[str, Any], conversion: _Conversion) -> dict[str, Any]:
    # In TensorFlow.js, call 0 of a model is the one that made it.
    first_calls = {name: int(_is_keras(layer, MODELS)) for name, layer in layers.items()}
    written = []
    for spec in config["layers"]:
        nodes = [_node(spec, node, first_calls, conversion) for node in spec["inbound_nodes"]]
        # A layer that becomes several passes its calls on: call i of one reads call i of the one before it.
        parts = _layer(spec, layers.get(spec["name"]), conversion)
        if len(nodes) > 1 and "L1L2" in json.dumps(parts):
            label = f"{spec['class_name']} {spec['name']!r}"
            conversion.refuse(label, "is called more than once; TensorFlow.js counts its regularizers at each call")
        for part in parts:
            name = part["config"]["name"]
            written.append({**part, "name": name, "inbound_nodes": nodes})
            nodes = [[[name, index, 0, {}]] for index in range(len(nodes))]
    return {
        "name": config["name"],
        "trainable": config["trainable"],
        "layers": written,
        "input_layers": list(_tensors(config["input_layers"], first_calls)),
        "output_layers": list(_tensors(config["output_layers"], first_calls)),
    }


def _tensors(structure: Any, first_calls: dict[str, int]) -> Iterator[list[Any]]:
    """Yield the [layer, call, output] of each tensor, in the order in which Keras flattens dicts and lists."""
    if isinstance(structure, dict):
        structure = [structure[name] for name in sorted(structure)]
    if len(structure) == 3 and isinstance(structure[0], str):
        layer, call, output = structure
        yield [layer, call + first_calls.get(layer, 0), output]
    else:
        for part in structure:
            yield from _tensors(part, first_calls)


def _node(
    spec: dict[str, Any], node: dict[str, Any], first_calls: dict[str, int], conversion: _Conversion
) -> list[list[Any]]:
    """Return one call of a layer as Keras 2 and TensorFlow.js write it."""
    label = f"{spec['class_name']} {spec['name']!r}"
    args = node["args"][0] if len(node["args"]) == 1 else node["args"]
    args = args if isinstance(args, list) else [args]
    # fit() and predict() override a recorded training=False, as TensorFlow.js does.
    used = {name for name, value in node["kwargs"].items() if value is not None and value is not False}
    if used or not all(isinstance(one, dict) and one.get("class_name") == "__keras_tensor__" for one in args):
        named = ", ".join(sorted(used)) or "a dict or constants"
        conversion.refuse(label, f"is called with {named}; call it with one tensor or a list of tensors")
        return []
    for one in args:
        if one["config"]["dtype"] != "float32" and spec["class_name"] not in MODELS:
            _check_integers(spec["class_name"], spec["name"], conversion)
    histories = [one["config"]["keras_history"] for one in args]
    return [[layer, call + first_calls.get(layer, 0), output, {}] for layer, call, output in histories]


def _check_integers(kind: str, name: str, conversion: _Conversion) -> None:
    if kind not in _READ_INTEGERS:
        conversion.refuse(
            f"{kind} {name!r}", "reads integers, and TensorFlow.js computes in float32; add Rescaling(1.0)"
        )


# --- layers -----------------------------------------------------------------------------------------------------------


def _layer(spec: dict[str, Any], layer: Any, conversion: _Conversion) -> list[dict[str, Any]]:
    """Return the layers of TensorFlow.js that do what this one does, and note its weights."""
    kind, config = spec["class_name"], spec["config"]
    if kind == "InputLayer":
        return [_input(config, conversion)]
    if layer is not None and _is_keras(layer, MODELS):
        return [_model(layer, conversion)]
    if layer is None or not _is_keras(layer, OPTIONS):
        conversion.refuse(f"{kind} {spec.get('name', config.get('name'))!r}", "is not in TensorFlow.js")
        return []
    written = _options(layer, config, conversion)
    if kind == "Normalization" or (kind == "BatchNormalization" and not layer.trainable):
        return _frozen_normalization(layer, conversion)
    if kind in {"Bidirectional", "TimeDistributed"}:
        _wrapped(layer, written, conversion)
    else:
        _check_layer(layer, written, conversion)
        for weight in layer.weights:
            conversion.add_weight(f"{layer.name}/{_weight_name(layer, weight)}", weight)
    return [{"class_name": kind, "config": written}]


def _input(config: dict[str, Any], conversion: _Conversion) -> dict[str, Any]:
    label = f"InputLayer {config['name']!r}"
    dtype = _INPUT_DTYPES.get(config["dtype"])
    if dtype is None:
        conversion.refuse(label, f"has dtype {config['dtype']}; write keras.Input(..., dtype='float32' or 'int32')")
    if config.get("sparse") or config.get("ragged") or config.get("optional"):
        conversion.refuse(label, "is sparse, ragged or optional; TensorFlow.js has dense inputs only")
    shape = list(config["batch_shape"])
    written = {"batch_input_shape": shape, "dtype": dtype, "sparse": False, "name": config["name"]}
    return {"class_name": "InputLayer", "config": written}


def _options(layer: Any, config: dict[str, Any], conversion: _Conversion) -> dict[str, Any]:
    """Return what TensorFlow.js reads of a layer's options, and refuse what it would ignore."""
    kind, label = type(layer).__name__, _label(layer)
    written: dict[str, Any] = {"name": layer.name, "trainable": layer.trainable}
    for name, value in config.items():
        if name in {"name", "trainable"} or name.endswith(_DISPOSABLE):
            continue
        if name == "dtype":
            _check_dtype(label, value, conversion)
        elif name not in OPTIONS[kind]:
            _check_ignored(layer, name, value, conversion)
        elif name.endswith("activation"):
            written[name] = _activation(label, value, conversion)
        elif name.endswith("_regularizer"):
            written[name] = _regularizer(label, name, value, conversion)
        elif name in _ALLOWED and isinstance(value, str | int | float) and value not in _ALLOWED[name]:
            conversion.refuse(label, f"has {name}={value!r}; TensorFlow.js computes {_ALLOWED[name][0]!r} only")
        else:
            written[_RENAMED.get((kind, name), name)] = value
    return written


def _check_ignored(layer: Any, name: str, value: Any, conversion: _Conversion) -> None:
    """Refuse a value of an option that TensorFlow.js does not read, unless the option then does nothing."""
    if name == "reset_after" and value:
        conversion.refuse(_label(layer), "has reset_after=True; write GRU(..., reset_after=False) and train again")
        return
    default = inspect.signature(type(layer).__init__).parameters.get(name)
    neutral = (None, False, *_NEUTRAL.get(name, ()), *([] if default is None else [default.default]))
    if (tuple(value) if isinstance(value, list) else value) not in neutral:
        conversion.refuse(_label(layer), f"has {name}={_shown(value)}, which TensorFlow.js does not have")


_RENAMED = {("LeakyReLU", "negative_slope"): "alpha"}


def _shown(value: Any) -> str:
    return str(value["class_name"]) if isinstance(value, dict) and "class_name" in value else repr(value)


def _check_dtype(label: str, policy: Any, conversion: _Conversion) -> None:
    name = policy["config"].get("name") if isinstance(policy, dict) else policy
    if name != "float32":
        conversion.refuse(label, f"has the dtype policy {name}; TensorFlow.js computes in float32")


def _activation(label: str, value: Any, conversion: _Conversion) -> str | None:
    if isinstance(value, str) and value in ACTIVATIONS:
        return ACTIVATIONS[value]
    conversion.refuse(label, f"has the activation {_shown(value)}; those of both are {', '.join(ACTIVATIONS)}")
    return None


def _regularizer(label: str, name: str, value: Any, conversion: _Conversion) -> dict[str, Any] | None:
    if value is None:
        return None
    kind = value["class_name"] if value.get("module") == "keras.regularizers" else None
    if kind not in {"L1", "L2", "L1L2"}:
        conversion.refuse(label, f"has {name}={_shown(value)}; TensorFlow.js has L1, L2 and L1L2")
    factors = {"l1": 0.0, "l2": 0.0} | {one: float(value["config"].get(one, 0.0)) for one in ("l1", "l2")}
    return {"class_name": "L1L2", "config": factors}


def _weight_name(layer: Any, weight: Any) -> str:
    if type(layer).__name__ == "DepthwiseConv2D" and weight.name == "kernel":
        return "depthwise_kernel"
    return str(weight.name)


def _array(variable: Any) -> np.ndarray[Any, Any]:
    value = variable.numpy() if hasattr(variable, "numpy") else variable
    return np.asarray(value, np.float32)


def _check_layer(layer: Any, written: dict[str, Any], conversion: _Conversion) -> None:
    """Refuse what depends on the shape of the inputs, or on more than one option."""
    kind, label = type(layer).__name__, _label(layer)
    shapes = _input_shapes(layer)
    if kind == "Reshape":  # TensorFlow.js does not infer a -1
        written["target_shape"] = list(layer.compute_output_shape(shapes[0])[1:])
    if kind == "Flatten" and any(len(shape) < 3 or None in shape[1:] for shape in shapes):
        conversion.refuse(label, "TensorFlow.js flattens inputs of at least two known dimensions")
    if kind.startswith("AveragePooling") and layer.padding != "valid":
        conversion.refuse(label, "has padding='same'; TensorFlow.js trains it with padding='valid' only")
    if kind == "Softmax":
        _check_last_axis(layer, shapes, conversion)
    if kind in {"BatchNormalization", "LayerNormalization"}:
        if any(len(shape) > 4 for shape in shapes):
            conversion.refuse(label, "TensorFlow.js normalizes inputs of at most three dimensions")
        if not (layer.center and layer.scale):
            conversion.refuse(label, "TensorFlow.js trains it with center=True and scale=True only")
    if kind == "BatchNormalization":
        _check_last_axis(layer, shapes, conversion)


def _input_shapes(layer: Any) -> Sequence[tuple[int | None, ...]]:
    """Return the shapes of a layer's inputs with the batch dimension, one a call."""
    return [tensor.shape for node in layer._inbound_nodes for tensor in node.input_tensors]


def _check_last_axis(layer: Any, shapes: Sequence[tuple[int | None, ...]], conversion: _Conversion) -> None:
    axis = layer.axis if isinstance(layer.axis, int) else layer.axis[0] if len(layer.axis) == 1 else None
    if any(axis not in {-1, len(shape) - 1} for shape in shapes):
        conversion.refuse(_label(layer), f"has axis={layer.axis}; TensorFlow.js needs the last one here")


def _frozen_normalization(layer: Any, conversion: _Conversion) -> list[dict[str, Any]]:
    """Return two Rescaling layers: one subtracts the mean, one scales. Together they lose no digits to a large mean."""
    if type(layer).__name__ == "Normalization":
        mean, deviation = _array(layer.mean).ravel(), np.sqrt(_array(layer.variance).ravel())
        scale, offset = 1 / np.maximum(deviation, np.float32(1e-7)), None
        if layer.axis not in (None, ()):
            _check_last_axis(layer, _input_shapes(layer), conversion)
    else:
        _check_last_axis(layer, _input_shapes(layer), conversion)
        mean = _array(layer.moving_mean)
        scale = 1 / np.sqrt(_array(layer.moving_variance) + np.float32(layer.epsilon))
        scale = scale * _array(layer.gamma) if layer.scale else scale
        offset = _array(layer.beta).tolist() if layer.center else None
    first = {"name": f"{layer.name}_centered", "trainable": False, "scale": 1.0, "offset": (-mean).tolist()}
    second = {"name": layer.name, "trainable": False, "scale": scale.tolist(), "offset": offset or 0.0}
    return [{"class_name": "Rescaling", "config": config} for config in (first, second)]


def _wrapped(layer: Any, written: dict[str, Any], conversion: _Conversion) -> None:
    """Put the inner layer into a wrapper's options, and note its weights under the wrapper's name."""
    if type(layer).__name__ == "TimeDistributed":
        inner, name = layer.layer, layer.layer.name
        parts = [(inner, layer.name)]
        allowed = set(OPTIONS) - {"BatchNormalization", "Normalization", "Bidirectional", "TimeDistributed"}
    else:
        written.pop("backward_layer")
        inner, name = layer.forward_layer, layer.forward_layer.name.removeprefix("forward_")
        parts = [(inner, f"{layer.name}/forward_{name}"), (layer.backward_layer, f"{layer.name}/backward_{name}")]
        allowed = {"SimpleRNN", "GRU", "LSTM"}
        _check_directions(layer, conversion)
        if inner.return_state:
            conversion.refuse(_label(layer), "has return_state=True, which TensorFlow.js does not compute")
    if not _is_keras(inner, allowed):
        conversion.refuse(_label(layer), f"wraps {_label(inner)}, which TensorFlow.js does not wrap")
        return
    options = _options(inner, inner.get_config(), conversion) | {"name": name}
    written["layer"] = {"class_name": type(inner).__name__, "config": options}
    for part, scope in parts:
        for weight in part.weights:
            conversion.add_weight(f"{scope}/{_weight_name(part, weight)}", weight)


def _check_directions(layer: Any, conversion: _Conversion) -> None:
    """Refuse a backward layer of its own kind, because TensorFlow.js makes it from the forward one."""
    forward, backward = layer.forward_layer.get_config(), layer.backward_layer.get_config()
    for config in (forward, backward):
        config.pop("name")
    backward["go_backwards"] = not backward["go_backwards"]
    if type(layer.forward_layer) is not type(layer.backward_layer) or forward != backward:
        conversion.refuse(_label(layer), "has a backward_layer of its own, which TensorFlow.js does not have")
