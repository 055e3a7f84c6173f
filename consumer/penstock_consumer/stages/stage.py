"""A stage between reading and handing out: it chooses and orders samples, and does not change them.

Each lies in a file of its own; ``chain`` puts them behind one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.buffers import ArrayPool


class Stage(Protocol):
    """One epoch's batches go in and come out, in the training loop's thread."""

    def put(self, batch: Batch) -> None:
        """Takes a batch in; called only when `take` had nothing."""

    def take(self) -> Batch | None:
        """The next batch, or None where more has to be put in first."""

    def end(self) -> None:
        """Learn that nothing more will be put in. From now on `take` gives all that is left."""

    def starve(self) -> None:
        """Learn that nothing is coming for the time being."""

    def waiting(self) -> str | None:
        """Return what it waits for, if it holds samples back."""


@dataclass(frozen=True, slots=True)
class StageContext:
    """The context of a stage: one epoch, read by one member."""

    spec: Spec
    pool: ArrayPool
    epoch: int
    batch_size: int
    is_ordered: bool


StageMaker = Callable[[StageContext], Stage]
