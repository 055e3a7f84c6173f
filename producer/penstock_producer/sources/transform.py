"""The user's own functions, on every sample or on a block of many samples at once.

A failure becomes an error that names the sample and the user's line. ``jobs.fill`` decides which samples are in a
block, and how a failing block is treated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.hints import an
from penstock_common.wire.spec import SpecLike
from penstock_producer.sources.items import as_sample, flat
from penstock_producer.sources.names import blame, is_token, lookup, name_in_token, resolve_callable
from penstock_producer.sources.protocol import AnySource, Labelled, Sample, Source, SourceAround, draws
from penstock_producer.sources.seeding import Seeded, find_seeded, reseed


@dataclass(frozen=True)
class Transform:
    """The user's function, which takes an item, or an item and its random generator, and returns a sample."""

    name: str
    function: Callable[..., Any]
    takes_rng: bool
    """Whether the function has a second positional parameter without default, or one named ``rng``."""
    seeded: tuple[Seeded, ...] = ()
    """The objects in the function that are seeded for each sample. Of a function with ``rng`` only generators are."""

    @property
    def draws(self) -> bool:
        """Tell whether it uses the sample's generator (see `protocol.draws`)."""
        return self.takes_rng or bool(self.seeded)

    @classmethod
    def load(cls, name: str) -> Transform:
        """Return the transform behind ``module:function``, or behind the token of a registered function.

        Raises:
            SourceError: there is no such function, or its parameters do not fit.
        """
        return cls.of(lookup(name), name_in_token(name)) if is_token(name) else cls.of(resolve_callable(name), name)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str = "") -> Transform:
        """Return the transform of a function. Raises SourceError where its parameters do not fit."""
        shown = name or str(getattr(function, "__qualname__", type(function).__name__))
        if not callable(function):
            raise SourceError(f"transform {shown} is a {type(function).__name__}; expected a function of a sample")
        takes_rng = _takes_rng(function, shown)
        seeded = tuple(one for one in find_seeded(function, shown) if one.is_generator or not takes_rng)
        return cls(shown, function, takes_rng, seeded)

    def __call__(self, item: Any, rng: np.random.Generator, key: str) -> Sample:
        """Make a sample of an item. Raises SampleError with the sample, the exception and the user's line."""
        made = self.call(item, rng, key)
        if made is None:
            raise SampleError(f"{key}: transform {self.name} returned None; expected a dict of tensors")
        if isinstance(made, Iterator) or (isinstance(made, list) and made and isinstance(made[0], Mapping)):
            raise SampleError(
                f"{key}: transform {self.name} returned {an(made)}; expected a dict of tensors, because a transform "
                "makes exactly one sample: a source of the kind generator makes 0 to n samples of one input"
            )
        return as_sample(made, key)

    def call(self, item: Any, rng: np.random.Generator, key: str) -> Any:
        """Return the function's result as it is. Raises SampleError as above."""
        reseed(self.seeded, rng, key)
        try:
            return self.function(item, rng) if self.takes_rng else self.function(item)
        except SampleError as error:
            raise SampleError(f"{key}: {error}") from error
        except Exception as error:
            advice = _advice(item, error)
            if self.takes_rng and isinstance(error, (AttributeError, TypeError)):
                advice += "; a transform of two parameters is given (sample, rng): the sample and a random generator"
            raise SampleError(f"{key}: transform {self.name} failed: {blame(error)}{advice}") from error


def _advice(item: Any, error: Exception) -> str:
    """Return what to write where a transform takes its sample for something else; '' for any other failure."""
    if not isinstance(error, (AttributeError, TypeError, KeyError)) or not isinstance(item, Mapping):
        return ""
    is_for_the_sample = (
        "unhashable type: 'slice'" in str(error)
        or "'dict' object" in str(error)
        or " dict" in str(error)
        or isinstance(error, KeyError)
    )
    is_for_an_array = "'numpy.ndarray' object" in str(error)
    if not is_for_the_sample and not is_for_an_array:
        return ""
    names = ", ".join(f"sample[{name!r}]" for name in list(item)[:4])
    return f"; a sample is a dict of arrays, {names}: for an image write PIL.Image.fromarray(sample['x'])"


def _takes_rng(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False  # some builtins have no signature, and take the item alone
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    keyword_only = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    takes_none = not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 2 or takes_none or keyword_only:
        shown = ", ".join(p.name for p in parameters)
        raise SourceError(f"transform {name}({shown}) cannot be called; expected f(sample) or f(sample, rng)")
    return len(positional) >= 2 and (len(needed) == 2 or positional[1].name == "rng")


class TransformedSource(SourceAround):
    """A source whose samples go through a transform."""

    spec: SpecLike | None = None

    def __init__(self, source: Source, transform: Transform) -> None:
        super().__init__(source)
        self._transform = transform
        self.fingerprint = source.fingerprint
        self.info = {**source.info, "transform": transform.name}
        self.draws = transform.draws or draws(source)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return the source's sample, transformed."""
        return self._transform(self.inner.read(index, rng), rng, self.inner.key(index))

    def column(self, name: str) -> Any:
        """Return the source's column as it is before the transform (see `Labelled`)."""
        return self.inner.column(name) if isinstance(self.inner, Labelled) else None


BLOCK_SAMPLES = 64
"""The samples of one block. At 150 kB each that is 10 MB, which fits in memory and is enough for one call to pay."""


def transform_block(
    transform: Transform, samples: Sequence[Sample], rng: np.random.Generator, key: str
) -> list[Sample]:
    """Return one sample for each sample of a block, in their order.

    Args:
        transform: the user's ``f(block)`` or ``f(block, rng)``. It takes a dict of tensors of shape [n, ...], or lists
            of n bytes, and returns another such dict.
        samples: the block, at least one.
        rng: the generator of the block's first sample.
        key: the name of the block's first sample, for errors.

    Raises:
        SampleError: the samples differ in names, kinds or shapes of tensors, so they cannot be stacked. Or the
            function failed, or did not return one row for each sample.
    """
    made = transform.call(_stacked(samples, key), rng, key)
    if not isinstance(made, Mapping) or not made:
        what = "an empty dict" if isinstance(made, Mapping) else f"a {type(made).__name__}"
        raise SampleError(f"{key}: block transform {transform.name} returned {what}; expected a dict of tensors")
    made = flat(made, key)
    for name, values in made.items():
        count = len(values) if hasattr(values, "__len__") and np.ndim(values) else None
        if count != len(samples):
            raise SampleError(
                f"{key}: block transform {transform.name} gave {count or 'no'} rows of {name!r} for "
                f"{len(samples)} samples; it must give one for each"
            )
    return [as_sample({name: values[row] for name, values in made.items()}, key) for row in range(len(samples))]


class OneSampleBlocks(TransformedSource):
    """A source whose samples go through a block transform one at a time, to learn the spec."""

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return one sample, made as a block of one."""
        return transform_block(self._transform, [self.inner.read(index, rng)], rng, self.key(index))[0]


def seen_through(source: AnySource, block_transform: str | None) -> Any:
    """Return the source as its block transform changes it, so that the first sample gives the spec.

    Raises:
        SourceError: the source gives batches or an iterable's items, which a block transform does not take.
    """
    if block_transform is None:
        return source
    if source.unit != "sample":
        raise SourceError(
            f"block transform {block_transform} takes samples that have a number each, and this source gives each "
            f"{source.unit} as a whole: transform it there"
        )
    return OneSampleBlocks(source, Transform.load(block_transform))


def _stacked(samples: Sequence[Sample], key: str) -> dict[str, Any]:
    first = samples[0]
    if any(sample.keys() != first.keys() for sample in samples):
        raise SampleError(f"{key}: samples of one block have tensors of different names")
    return {name: _column([sample[name] for sample in samples], name, key) for name in first}


def _column(values: list[Any], name: str, key: str) -> Any:
    if isinstance(values[0], (bytes, bytearray, memoryview)):
        return values
    arrays = [np.asarray(value) for value in values]
    if any(array.shape != arrays[0].shape or array.dtype != arrays[0].dtype for array in arrays):
        raise SampleError(f"{key}: tensor {name!r} has different shapes in samples of one block")
    return np.stack(arrays)
