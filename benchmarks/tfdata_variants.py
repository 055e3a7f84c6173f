"""Other ways for arrays of Python into a tf.data.Dataset. ``python -m benchmarks.tfdata --variants`` has no loader.

Each way gives the same existing arrays. It shows the CPU time of a batch relative to `from_generator`, in turns. Only
``tf.raw_ops`` is public here. A dataset of it needs a subclass of ``tf.data.Dataset`` with two private methods.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import progress
from benchmarks.spread import Spread, spread, table

BATCH, SHAPE = 64, (224, 224, 3)
ALIGNED = 64
"""The alignment in bytes, the same as of a loader's arrays."""
FROM_GENERATOR, NUMPY_FUNCTION, PY_FUNCTION, DLPACK = (
    "from_generator",
    "raw_ops.GeneratorDataset, numpy_function",
    "raw_ops.GeneratorDataset, py_function with arrays",
    "raw_ops.GeneratorDataset, py_function with DLPack",
)
VARIANTS = (FROM_GENERATOR, NUMPY_FUNCTION, PY_FUNCTION, DLPACK)


def measure(rounds: int, batches: int = 1000) -> dict[str, list[float]]:
    """Return variant -> the CPU s of this process for a batch, in each round."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    arrays = [(aligned((BATCH, *SHAPE), np.uint8), aligned((BATCH,), np.int64)) for _ in range(4)]

    def ready() -> Iterator[Any]:
        for number in range(batches):
            yield arrays[number % len(arrays)]

    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in VARIANTS[:: -1 if number % 2 else 1]:
            progress(f"round {number + 1} of {rounds}: {name}")
            found[name].append(_cpu(_made(name, ready), batches))
    return found


def _cpu(dataset: Any, expected: int) -> float:
    """Return the CPU s of a batch. The first one is not counted, because it includes the tracing.

    Nothing reads ahead, and one thread does tf.data's work, as behind Penstock's dataset.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.threading.private_threadpool_size = 1
    batches = iter(dataset.with_options(options))
    next(batches)
    began, count = time.process_time(), sum(1 for _ in batches)
    cpu_s = time.process_time() - began
    if count + 1 != expected:
        raise RuntimeError(f"a dataset gave {count + 1} batches, expected {expected}")
    return cpu_s / count


def _made(name: str, ready: Callable[[], Iterator[Any]]) -> Any:
    import tensorflow as tf

    spec = (tf.TensorSpec((None, *SHAPE), tf.uint8), tf.TensorSpec((None,), tf.int64))
    if name == FROM_GENERATOR:
        return tf.data.Dataset.from_generator(ready, output_signature=spec)

    return generated(name, ready(), spec)


def generated(name: str, batches: Iterator[Iterable[Any]], spec: tuple[Any, ...]) -> Any:
    """Return a dataset of one pass over tuples of arrays, by a variant other than `from_generator`."""
    import tensorflow as tf

    def imported() -> list[Any]:
        return [tf.experimental.dlpack.from_dlpack(array.__dlpack__()) for array in next(batches)]

    call, function = {
        NUMPY_FUNCTION: (tf.numpy_function, lambda: next(batches)),
        PY_FUNCTION: (tf.py_function, lambda: list(next(batches))),
        DLPACK: (tf.py_function, imported),
    }[name]
    return _generated(call, function, spec)


def _generated(call: Callable[..., Any], function: Callable[[], Iterable[Any]], spec: tuple[Any, ...]) -> Any:
    """Return a dataset whose next element is a call of ``function``. It ends with ``StopIteration``, as a generator."""
    import tensorflow as tf

    def element(state: Any) -> list[Any]:  # the argument's name is one of the graph's
        values = call(function, [], [one.dtype for one in spec])
        for value, one in zip(values, spec, strict=True):
            value.set_shape(one.shape)
        return list(values)

    number = tf.TensorSpec((), tf.int64)
    functions = {
        "init_func": tf.function(lambda: [tf.constant(0, tf.int64)]).get_concrete_function(),
        "next_func": tf.function(element).get_concrete_function(number),
        "finalize_func": tf.function(lambda one: [tf.identity(one)]).get_concrete_function(number),
    }
    none: dict[str, list[Any]] = {f"{name}_other_args": [] for name in functions}
    types = {"output_types": [one.dtype for one in spec], "output_shapes": [one.shape for one in spec]}
    variant = tf.raw_ops.GeneratorDataset(**functions, **none, **types)

    class Generated(tf.data.Dataset):
        kept = functions  # the graph refers to them by name only

        def __init__(self) -> None:
            super().__init__(variant)

        def _inputs(self) -> list[Any]:
            return []

        @property
        def element_spec(self) -> Any:
            return spec

    return Generated()


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Return zeros that begin at a multiple of 64 bytes."""
    nbytes = prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + ALIGNED, np.uint8)
    start = -memory.ctypes.data % ALIGNED
    array: NDArray[Any] = memory[start : start + nbytes].view(dtype).reshape(shape)
    return array


def ratios(found: dict[str, list[float]]) -> dict[str, Spread]:
    """Return variant -> its CPU time relative to `from_generator` in the same round."""
    return {
        name: spread(one / base for one, base in zip(costs, found[FROM_GENERATOR], strict=True))
        for name, costs in found.items()
    }


def shown(found: dict[str, list[float]]) -> str:
    """Return the results as a table."""
    rows = [(name, one.shown(), f"{min(found[name]) * 1e6:.0f}") for name, one in ratios(found).items()]
    return table((f"batches of {BATCH}", "CPU to from_generator", "least CPU µs of a batch"), rows)
