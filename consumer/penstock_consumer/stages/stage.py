"""The base of stages, which choose and order samples between the reader and the loop, and do not change them.

Each stage has a file of its own. ``queue`` connects them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import ArrayPool, Batch


@dataclass(frozen=True, slots=True)
class StageContext:
    """The context of a stage: one epoch, read by one member."""

    spec: Spec
    pool: ArrayPool
    epoch: int
    batch_size: int
    is_ordered: bool


class Stage:
    """A stage that takes and gives the batches of one epoch, in the training loop's thread.

    As it stands here, it passes every batch on: what `put` has made ready leaves at the next `take`.
    """

    def __init__(self, setting: StageContext) -> None:
        self._setting = setting
        self._ready: deque[Batch] = deque()
        """The batches that `take` gives next."""

    def put(self, batch: Batch) -> None:
        """Take a batch in. The caller calls this only after `take` gave nothing."""
        self._ready.append(batch)

    def take(self) -> Batch | None:
        """Return the next batch, or None if the stage needs another batch first."""
        return self._ready.popleft() if self._ready else None

    def end(self) -> None:
        """Learn that nothing more will be put in. From now on `take` gives all that is left."""

    def starve(self) -> None:
        """Learn that nothing is coming for the time being."""

    def waiting(self) -> str | None:
        """Return what the stage waits for, if it holds samples back."""
        return None


StageMaker = Callable[[StageContext], Stage]
