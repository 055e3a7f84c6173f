"""The user's own function on every sample, and its failures as errors that name the sample and the user's line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.items import as_sample
from penstock_producer.sources.names import blame, resolve_callable
from penstock_producer.sources.protocol import Labelled, Sample, Source, draws
from penstock_producer.sources.seeded import Seeded, find_seeded, reseed


@dataclass(frozen=True)
class Transform:
    """A function of an item, or of an item and its random generator, that gives a sample."""

    name: str
    function: Callable[..., Any]
    takes_rng: bool
    """Whether the function has a second positional parameter without default, or one named ``rng``."""
    seeded: tuple[Seeded, ...] = ()
    """What it holds that has to be seeded for each sample; nothing where it takes the generator to do so itself."""

    @property
    def draws(self) -> bool:
        """Whether it needs the generator; see `protocol.draws`."""
        return self.takes_rng or bool(self.seeded)

    @classmethod
    def load(cls, name: str) -> Transform:
        """From ``module:function``; raises SourceError."""
        return cls.of(resolve_callable(name), name)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Transform:
        """From a function of this process."""
        shown = name or str(getattr(function, "__qualname__", type(function).__name__))
        if not callable(function):
            raise SourceError(f"transform {shown} is a {type(function).__name__}; expected a function of a sample")
        takes_rng = _takes_rng(function, shown)
        return cls(shown, function, takes_rng, () if takes_rng else find_seeded(function, shown))

    def __call__(self, item: Any, rng: np.random.Generator, key: str) -> Sample:
        """The sample made of an item. Raises SampleError naming sample, exception and the user's line."""
        made = self.call(item, rng, key)
        if made is None:
            raise SampleError(f"{key}: transform {self.name} returned None; expected a dict of tensors")
        return as_sample(made, key)

    def call(self, item: Any, rng: np.random.Generator, key: str) -> Any:
        """What the function returns. Raises SampleError as above."""
        reseed(self.seeded, rng, key)
        try:
            return self.function(item, rng) if self.takes_rng else self.function(item)
        except SampleError as error:
            raise SampleError(f"{key}: {error}") from error
        except Exception as error:
            raise SampleError(f"{key}: transform {self.name} failed: {blame(error)}") from error


def _takes_rng(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False  # some builtins have no signature: they take the item
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in positional if p.default is p.empty]
    keyword_only = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters)
    takes_none = not positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(needed) > 2 or takes_none or keyword_only:
        shown = ", ".join(p.name for p in parameters)
        raise SourceError(f"transform {name}({shown}) cannot be called; expected f(sample) or f(sample, rng)")
    return len(positional) >= 2 and (len(needed) == 2 or positional[1].name == "rng")


class Transformed:
    """A source whose samples go through a transform."""

    unit: Literal["sample"] = "sample"
    spec: SpecLike | None = None

    def __init__(self, source: Source, transform: Transform) -> None:
        self._source, self._transform = source, transform
        self.fingerprint = source.fingerprint
        self.repeatable = source.repeatable
        self.info: dict[str, Any] = {**source.info, "transform": transform.name}
        self.draws = transform.draws or draws(source)
        """See `protocol.draws`."""

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """The source's sample, transformed."""
        return self._transform(self._source.read(index, rng), rng, self._source.key(index))

    def key(self, index: int) -> str:
        """The source's name of the sample."""
        return self._source.key(index)

    def column(self, name: str) -> Any:
        """The source's, as it is before the transform; see `Labelled`."""
        return self._source.column(name) if isinstance(self._source, Labelled) else None

    def close(self) -> None:
        """Close the source."""
        self._source.close()
