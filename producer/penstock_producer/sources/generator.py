"""Generators and other iterables, alone or several in step: read once, in order, by one job, and never repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.items import as_sample, batch_tensors, row_count
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import Sample
from penstock_producer.sources.transform import Transform

Factory = Callable[[], Iterable[Any]]
_ENDED = object()


class GeneratorSource:
    """Items of one iterable."""

    unit: Literal["item"] = "item"
    repeatable = False
    spec: SpecLike | None = None

    def __init__(
        self,
        factory: Factory,
        name: str,
        transform: Transform | None = None,
        *,
        batched: bool = False,
        limit: int | None = None,
    ) -> None:
        self._factory, self._name, self._transform, self._limit = factory, name, transform, limit
        self.batched = batched
        self.fingerprint = fingerprint(["generator", name, batched, limit, transform and transform.name])
        self.info: dict[str, Any] = {"source": "generator", "name": name}

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._opened())
        return _guarded(islice(items, self._limit), self._name)

    def _opened(self) -> Iterable[Any]:
        try:
            return iter(self._factory())
        except SourceError:
            raise
        except Exception as error:
            raise SourceError(f"{self._name} gave nothing to iterate: {blame(error)}") from error

    def make(self, item: Any, position: int, rng: np.random.Generator) -> Sample:
        """An item as a sample or a batch, through the transform if there is one."""
        key = self.key(position)
        if self._transform:
            made = self._transform(item, rng, key)
        else:
            made = batch_tensors(item, key) if self.batched else as_sample(item, key)
        if self.batched:
            row_count(made, key)
        return made

    def key(self, position: int) -> str:
        """Like ``data:feed[12]``."""
        return f"{self._name}[{position}]"

    def close(self) -> None:
        """Generators close when they are dropped."""


def in_step(factories: Mapping[str, Factory], name: str) -> Factory:
    """One iterable of dicts whose n-th item holds the n-th item of each; ends that differ are a SourceError."""

    def paired() -> Iterator[dict[str, Any]]:
        iterators = {key: iter(factory()) for key, factory in factories.items()}
        position = 0
        while True:
            item = {key: next(iterator, _ENDED) for key, iterator in iterators.items()}
            ended = [key for key, value in item.items() if value is _ENDED]
            if len(ended) == len(item):
                return
            if ended:
                going = ", ".join(repr(key) for key in item if key not in ended)
                raise SourceError(
                    f"{name}: {ended[0]!r} ended after {position} items while {going} went on; pairs end together"
                )
            yield item
            position += 1

    return paired


def _guarded(items: Iterator[Any], name: str) -> Iterator[Any]:
    position = 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            if not position:
                raise SourceError(f"{name} gave no items") from None
            return
        except SourceError:
            raise
        except Exception as error:
            raise SourceError(f"{name} failed at item {position}: {blame(error)}") from error
        yield item
        position += 1
