"""The inner side of loaders and mixtures, for adapters, views and worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

from penstock_common.stream.groups.roster import RankOrder
from penstock_consumer.read.ack import Acknowledge, Adapter
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.stats import StatsCounter


class AlwaysTrue:
    """A base of loaders and of what is made of them. ``if loader:`` asks whether there is one, not for its length."""

    def __bool__(self) -> bool:
        return True


class Hooks(Protocol):
    """The inner side of a loader or a mixture. `hooks_of` gives it."""

    @property
    def policy(self) -> Acknowledge:
        """The policy that says when batches are acknowledged."""

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that reports what was trained on, for a framework that reads ahead."""

    @property
    def counter(self) -> StatsCounter:
        """The counts behind `Loader.stats`."""

    @property
    def rows(self) -> int | None:
        """The rows of every batch, or None if the last batch of an epoch may be smaller."""

    @property
    def order(self) -> RankOrder | None:
        """Rank, world size and batch size, or None in shared order and of a mixture."""

    @property
    def is_ready(self) -> bool:
        """True once the next batch of the epoch being read has arrived."""

    def take_over(self, adapter: Adapter) -> None:
        """Let ``adapter`` say from now on what was trained on, because a framework pulls batches ahead of its step."""

    def trained(self, batch: Batch) -> None:
        """Note that the training step is done with a batch that an adapter had pulled."""

    def return_batches(self, batches: Iterable[Batch]) -> None:
        """Hand batches that were never trained on out again, when the next iteration starts."""

    def given(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield what a view made of the batches of one iteration. After an error on the way, a batch is read again."""


Hooks_co = TypeVar("Hooks_co", bound=Hooks, covariant=True)


class Hooked(Protocol[Hooks_co]):
    """A loader or a mixture."""

    def _hooks(self) -> Hooks_co: ...


def hooks_of(source: Hooked[Hooks_co]) -> Hooks_co:
    """Return the inner side of a loader or a mixture. Each call makes a new one, so it keeps no loader alive."""
    return source._hooks()
