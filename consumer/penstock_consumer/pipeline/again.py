"""The same epoch again and again, each pass in an order of its own: blocks permuted, samples drawn from a window.

Seed and the pass' number decide all of it. Where blocks come from is the reader's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock_consumer.pipeline.batch import Assembler
from penstock_consumer.pipeline.prefetch import Prefetch
from penstock_consumer.pipeline.stage import Setting
from penstock_consumer.pipeline.window import Window


@dataclass(frozen=True, slots=True)
class Shuffle:
    """How one pass is shuffled."""

    seed: int
    number: int
    """Of the pass."""
    samples: int | None
    """Of the window; None: as many as ``nbytes`` hold."""
    nbytes: int

    def blocks(self, count: int) -> NDArray[np.int64]:
        """The order in which this pass reads so many blocks."""
        keys = np.random.Philox(self._seeds()[0]).random_raw(count)
        return np.argsort(keys, kind="stable")

    def window(self, setting: Setting) -> Window:
        """The window its samples go through."""
        nbytes = self.nbytes if self.samples is None else None
        return Window(setting, self._seeds()[1], samples=self.samples, nbytes=nbytes)

    def _seeds(self) -> list[int]:
        state = np.random.SeedSequence([self.seed, self.number]).generate_state(2, np.uint64)
        return [int(word) for word in state]


class Outlet:
    """Batches on their way from the assembler into the queue, through the window if there is one."""

    def __init__(self, assembler: Assembler, queue: Prefetch, window: Window | None) -> None:
        self._assembler, self._queue, self._window = assembler, queue, window

    def drain(self) -> None:
        """Lets go what is complete."""
        while (batch := self._assembler.take()) is not None:
            if self._window is None:
                self._queue.put(batch)
            else:
                self._window.put(batch)
                self._give()

    def end(self) -> None:
        """Lets go all of it."""
        self._assembler.flush()
        self.drain()
        if self._window is not None:
            self._window.end()
            self._give()

    def _give(self) -> None:
        assert self._window is not None
        while (batch := self._window.take()) is not None:
            self._queue.put(batch)
