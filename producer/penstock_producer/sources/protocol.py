"""The three shapes of a source: samples by index, batches by index, or items one after the other.

A source makes samples and names them. ``order`` puts them in order, ``config`` describes sources and ``open`` opens
them. A new kind of source inherits the test class of its shape in ``tests/contracts/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np

from penstock_common.wire.spec import SpecLike

Sample = Mapping[str, Any]
"""One sample: tensor name -> ndarray, Python number, list of numbers (also nested), or bytes."""


class _SourceInfo(Protocol):
    """The facts that every source states about itself."""

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that change when the source would read something else.

        Names, sizes, times and options count. The code behind an import name does not.
        """

    @property
    def repeatable(self) -> bool:
        """Tell whether an index is enough to make the same item again, as a repair needs it."""

    @property
    def info(self) -> dict[str, Any]:
        """Return JSON that the stream stores once, such as class names, and file names where they are few."""

    @property
    def spec(self) -> SpecLike | None:
        """Return the tensors, or None where the first sample decides."""

    def close(self) -> None:
        """Close what is open. A closed source is not read again."""


class Source(_SourceInfo, Protocol):
    """Samples by index.

    Every method may be called in a process that was forked after the source was opened, and from several threads.
    """

    unit: Literal["sample"]

    def __len__(self) -> int: ...

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Make one sample.

        Args:
            index: from 0 to ``len(self) - 1``.
            rng: the sample's own generator.

        Raises:
            SampleError: the sample cannot be made. The message names it.
        """

    def key(self, index: int) -> str:
        """Return the sample's name in messages, such as ``cat/0012.jpg``."""


def draws(source: Source | BatchSource) -> bool:
    """Tell whether a source uses the generator that `read` takes, as all do that do not say ``draws = False``.

    A source that says so may be given None, because making a generator takes as long as a small transform.
    """
    return getattr(source, "draws", True) is not False


@runtime_checkable
class Labelled(Protocol):
    """A source that knows some values of its samples without making them, as balancing classes needs it."""

    def column(self, name: str) -> Any:
        """Return an array with the value of a tensor for each index, or None where the values are not known.

        Values that cannot be read are masked.
        """


class SourceAround:
    """A source that is made of another one, and says of itself what that one says."""

    unit: Literal["sample"] = "sample"
    fingerprint: str
    info: dict[str, Any]

    def __init__(self, inner: Source | BatchSource) -> None:
        self.inner = inner
        """The other source."""
        self.repeatable, self.draws = inner.repeatable, draws(inner)

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def spec(self) -> SpecLike | None:
        """Return the other source's spec."""
        return self.inner.spec

    def key(self, index: int) -> str:
        """Return the other source's name of a sample."""
        return self.inner.key(index)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return the other source's sample."""
        return self.inner.read(index, rng)

    def close(self) -> None:
        """Close the other source."""
        self.inner.close()


class ObjectSource:
    """A source of the items of an object that its owner keeps. The first sample decides the spec."""

    spec: SpecLike | None = None
    _name: str

    def key(self, index: int) -> str:
        """Return a name such as ``data:train[12]``."""
        return f"{self._name}[{index}]"

    def close(self) -> None:
        """Do nothing: the object belongs to its owner, and nothing is open."""


class BatchSource(_SourceInfo, Protocol):
    """Items by index, each with a known number of samples. An item is read once and belongs to one shard as a whole."""

    unit: Literal["batch"]

    def __len__(self) -> int:
        """Return the number of items, not of samples."""

    def size(self, item: int) -> int:
        """Return the number of samples in an item without reading it, so that planning knows each sample's offset."""

    def read(self, item: int, rng: np.random.Generator) -> Sample:
        """Return the tensors of one item, each with a leading dimension of ``size(item)``.

        Raises:
            SampleError: the item cannot be made, and none of its samples.
        """

    def key(self, item: int) -> str:
        """Return the item's name in messages, such as ``data:train[12]``."""


class IterSource(_SourceInfo, Protocol):
    """Items in the order in which an iterator yields them.

    One job makes them, and nothing can be repaired. A job that is done again leaves out what is committed. Taking the
    next item and making a sample of it are two calls, because a bad sample must not end the pass.
    """

    unit: Literal["item"]

    @property
    def batched(self) -> bool:
        """Tell whether an item is a batch, whose tensors have a leading dimension, and not one sample."""

    def __iter__(self) -> Iterator[Any]:
        """Begin a new pass over the raw items.

        Raises:
            SourceError: the user's iterator failed, which ends the pass.
        """

    def make(self, item: Any, position: int, rng: np.random.Generator) -> Sample:
        """Make a sample (or a batch) of a raw item.

        Raises:
            SampleError: this item cannot be made. The pass may continue.
        """

    def key(self, position: int) -> str:
        """Return the item's name in messages, such as ``data:feed[12]``."""


AnySource = Source | BatchSource | IterSource
"""Any source. ``unit`` tells the three shapes apart."""


def can_make_again(source: AnySource) -> TypeGuard[Source | BatchSource]:
    """Tell whether single samples that a server lost can be made again. An iterator only goes forward."""
    return source.repeatable and source.unit != "item"
