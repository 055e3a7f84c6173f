"""The three shapes a source may have: samples by index, batches by index, or items one after the other.

A source makes samples and names them. Their order is ``order``'s, configs ``config``'s, opening ``open``'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from penstock_common.format.spec import SpecLike

Sample = Mapping[str, Any]
"""One sample: tensor name -> ndarray, Python number, (nested) list of numbers, or bytes."""


class _SourceInfo(Protocol):
    """What all sources tell about themselves."""

    @property
    def fingerprint(self) -> str:
        """16 hex digits; changes when what would be read changes: names, sizes, times, options.

        The code behind an import name is not part of it.
        """

    @property
    def repeatable(self) -> bool:
        """Whether an index is enough to make the same item again, so that missing samples can be repaired."""

    @property
    def info(self) -> dict[str, Any]:
        """JSON for the stream's meta, stored once: class names, file names where they are few."""

    @property
    def spec(self) -> SpecLike | None:
        """Declared tensors, or None: inferred from the first sample made."""

    def close(self) -> None:
        """Give back what is open. A closed source is not read again."""


class Source(_SourceInfo, Protocol):
    """Samples by index. Every method may be called in a process forked after opening, and from several threads."""

    unit: Literal["sample"]

    def __len__(self) -> int: ...

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Make one sample; ``rng`` is its own generator. Raises SampleError naming it when it cannot be made."""

    def key(self, index: int) -> str:
        """The sample's name in messages, like ``cat/0012.jpg``."""


def draws(source: Source | BatchSource) -> bool:
    """Whether the source's samples depend on the generator `read` is given: all do that do not say ``draws = False``.

    Those may be given None: making a generator takes as long as a small transform.
    """
    return getattr(source, "draws", True) is not False


@runtime_checkable
class Labelled(Protocol):
    """A source that knows some values of its samples without making them; what balancing classes needs."""

    def column(self, name: str) -> Any:
        """A tensor's values, one for each index, in an array; masked where they cannot be read. None: not known."""


class BatchSource(_SourceInfo, Protocol):
    """Items by index, each of a known number of samples: an item is read once and belongs to one shard whole."""

    unit: Literal["batch"]

    def __len__(self) -> int:
        """Number of items, not of samples."""

    def size(self, item: int) -> int:
        """Samples in this item, known without reading it: planning gives each sample its offset."""

    def read(self, item: int, rng: np.random.Generator) -> Sample:
        """Every tensor of one item with a leading dimension of ``size(item)``. Raises SampleError for all of it."""

    def key(self, item: int) -> str:
        """The item's name in messages, like ``data:train[12]``."""


class IterSource(_SourceInfo, Protocol):
    """Items in the order an iterator yields them: one job, no repair; done again, it leaves out what is committed.

    Going on to the next item and making a sample of it are two calls, because a bad sample must not end the pass.
    """

    unit: Literal["item"]

    @property
    def batched(self) -> bool:
        """Whether an item is a batch, every tensor having a leading dimension, rather than one sample."""

    def __iter__(self) -> Iterator[Any]:
        """One new pass over raw items. Raises SourceError when the user's iterator fails: nothing follows it."""

    def make(self, item: Any, position: int, rng: np.random.Generator) -> Sample:
        """A raw item as a sample (or a batch). Raises SampleError for this one; the pass may go on."""

    def key(self, position: int) -> str:
        """The item's name in messages, like ``data:feed[12]``."""


AnySource = Source | BatchSource | IterSource
"""Told apart by ``unit``."""
