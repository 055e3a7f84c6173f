"""A function of the user's that takes many samples at once: numpy in, numpy out, every tensor with a leading dimension.

What is in a block, and what becomes of one that fails, is ``fill``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.items import as_sample, flat
from penstock_producer.sources.local import is_token, lookup
from penstock_producer.sources.protocol import AnySource, Sample, Source
from penstock_producer.sources.transform import Transform

BLOCK_SAMPLES = 64
"""Samples that a block transform is given at once: at 150 kB some 10 MB, which is little and long enough to pay."""


class Unequal(SampleError):
    """These samples are no block: their tensors differ in name, kind or shape."""


@dataclass(frozen=True)
class BlockTransform:
    """``f(block)`` or ``f(block, rng)``: takes a dict of tensors ``[n, ...]`` (bytes: a list of n), returns another."""

    transform: Transform

    @classmethod
    def load(cls, name: str) -> BlockTransform:
        """From ``module:function``, or the token of a registered function. Raises SourceError."""
        return cls(Transform.of(lookup(name)) if is_token(name) else Transform.load(name))

    def __call__(self, samples: Sequence[Sample], rng: np.random.Generator, key: str) -> list[Sample]:
        """As many samples as it was given, in their order. Raises Unequal, and SampleError naming what failed."""
        made = self.transform.call(_stacked(samples, key), rng, key)
        if not isinstance(made, Mapping) or not made:
            raise SampleError(f"{key}: block transform {self.transform.name} returned a {type(made).__name__}, no dict")
        made = flat(made, key)
        for name, values in made.items():
            count = len(values) if hasattr(values, "__len__") and np.ndim(values) else None
            if count != len(samples):
                raise SampleError(
                    f"{key}: block transform {self.transform.name} gave {count or 'no'} rows of {name!r} for "
                    f"{len(samples)} samples; it must give one for each"
                )
        return [as_sample({name: values[row] for name, values in made.items()}, key) for row in range(len(samples))]


class Alone:
    """A source seen through a block transform, one sample at a time: what tells a spec."""

    unit: Literal["sample"] = "sample"
    spec: SpecLike | None = None

    def __init__(self, source: Source, transform: BlockTransform) -> None:
        self._source, self._transform = source, transform

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """A block of one."""
        return self._transform([self._source.read(index, rng)], rng, self.key(index))[0]

    def key(self, index: int) -> str:
        """The source's."""
        return self._source.key(index)


def seen_through(source: AnySource, block_transform: str | None) -> Any:
    """What the source's samples become, for a look at the first one. Raises SourceError where there are no samples."""
    if block_transform is None:
        return source
    if source.unit != "sample":
        raise SourceError(
            f"block transform {block_transform} takes samples that have a number each, and this source gives each "
            f"{source.unit} as a whole: transform it there"
        )
    return Alone(source, BlockTransform.load(block_transform))


def _stacked(samples: Sequence[Sample], key: str) -> dict[str, Any]:
    first = samples[0]
    if any(sample.keys() != first.keys() for sample in samples):
        raise Unequal(f"{key}: samples of one block have tensors of different names")
    return {name: _column([sample[name] for sample in samples], name, key) for name in first}


def _column(values: list[Any], name: str, key: str) -> Any:
    if isinstance(values[0], (bytes, bytearray, memoryview)):
        return values
    arrays = [np.asarray(value) for value in values]
    if any(array.shape != arrays[0].shape or array.dtype != arrays[0].dtype for array in arrays):
        raise Unequal(f"{key}: tensor {name!r} has different shapes in samples of one block")
    return np.stack(arrays)
