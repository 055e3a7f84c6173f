"""Generators and other iterables as a source: one job reads them once, in order, and nothing can be repaired."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.items import as_sample, batch_tensors, row_count
from penstock_producer.sources.names import blame, is_ctrl_c
from penstock_producer.sources.protocol import ObjectSource, Sample
from penstock_producer.sources.transform import Transform

Factory = Callable[[], Iterable[Any]]
_ENDED = object()
GAVE_NOTHING = "gave no items"
"""The end of the error of an empty iterable."""
_MISTAKES = (ArithmeticError, AttributeError, NameError, TypeError)
"""The errors of code that fails alike each time. Others may come from files or connections."""


class BrokenIterable(SourceError):
    """An iterable fails in a way that another try does not cure."""


class GeneratorSource(ObjectSource):
    """The items of one iterable, in its order."""

    unit: Literal["item"] = "item"
    repeatable = False

    def __init__(
        self,
        factory: Factory,
        name: str,
        transform: Transform | None = None,
        *,
        batched: bool = False,
        limit: int | None = None,
        kind: str = "generator",
    ) -> None:
        """Make a source. ``kind`` says in its info what the iterable is."""
        self._factory, self._name, self._transform, self._limit = factory, name, transform, limit
        self.batched = batched
        self.fingerprint = fingerprint(["generator", name, batched, limit, transform and transform.name])
        self.info: dict[str, Any] = {"source": kind, "name": name}

    def __iter__(self) -> Iterator[Any]:
        try:
            items = iter(self._factory())
        except SourceError:
            raise
        except Exception as error:
            raise _error_of(error)(f"{self._name} gave nothing to iterate: {blame(error)}") from error
        return _guarded(islice(items, self._limit), self._name)

    def make(self, item: Any, position: int, rng: np.random.Generator) -> Sample:
        """Make a sample or a batch of an item, by the transform if there is one."""
        key = self.key(position)
        if self._transform:
            made = self._transform(item, rng, key)
        else:
            made = batch_tensors(item, key) if self.batched else as_sample(item, key)
        if self.batched:
            row_count(made, key)
        return made


def in_step(factories: Mapping[str, Factory], name: str) -> Factory:
    """Return an iterable of dicts, whose n-th item holds the n-th item of each iterable.

    Args:
        factories: tensor name -> a function that begins a pass.
        name: the name of all of them in messages.

    Raises:
        SourceError: one of them ended before the others, which is found when the pass gets there.
    """

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
                raise BrokenIterable(f"{name} {GAVE_NOTHING}") from None
            return
        except SourceError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if is_ctrl_c(error):
                raise
            raise _error_of(error)(f"{name} failed at item {position}: {blame(error)}") from error
        yield item
        position += 1


def _error_of(error: BaseException) -> type[SourceError]:
    return BrokenIterable if isinstance(error, _MISTAKES) else SourceError
