"""What a Loader can be told about which samples it hands out, and the way from it to views. Its base class.

The stages themselves are ``pipeline``'s; what a batch is made to look like for a plain loop is ``view``'s.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Self

from penstock_common.hints import callable_of, explained
from penstock_consumer.membership.reading import Options, Reading
from penstock_consumer.stages.filter import Filter, Keep
from penstock_consumer.stages.shuffle import Window

if TYPE_CHECKING:
    from penstock_consumer.view import View


class Verbs:
    """Said before the first batch; they change the loader itself and return it, so that any adapter takes it."""

    _options: Options
    _reading: Reading | None

    @explained
    def shuffle(self, *, samples: int | None = None, bytes: int | None = None, seed: int = 0) -> Self:
        """Draws each batch at random from a window of so many samples, or bytes of payload. Shared reading only.

        Nothing is handed out before the window is full, or nothing came for 2 s: writers may wait for the room it
        takes. What it holds is leased, not acknowledged: after a crash, and at `close`, it is handed out again. A
        sample is acknowledged with the batch it left in. Memory: the window and one batch, beside ``prefetch_bytes``.
        The same arrivals and seed give the same batches; arrivals of shared reading are no two times the same.
        """
        if (samples is None) == (bytes is None) or (samples or bytes or 0) < 1:
            raise ValueError(f"shuffle(samples={samples}, bytes={bytes}): expected one of them, at least 1")
        if self._options.order is not None:
            raise ValueError(
                "shuffle() is for shared reading: canonical order is a seeded permutation already, another one for "
                "each epoch, if its producer shuffles (--seed)"
            )
        self._options.stages.append(partial(Window, seed=seed, samples=samples, nbytes=bytes))
        return self._told("shuffle")

    def filter(self, keep: Keep) -> Self:
        """Leaves out samples: ``keep`` is given a batch of n and gives n booleans. They count as trained on, at once.

        In shared reading batches are filled up again from the next ones; in ordered reading they come out smaller, and
        ``world_size`` must be 1, since every rank has the same steps. What filters should be a function of the sample.
        """
        callable_of("keep", keep, "lambda batch: batch['y'] != 3")
        order = self._options.order
        if order is not None and order.world > 1:
            raise ValueError(
                f"filter() would give {order.world} ranks different numbers of steps; leave samples out where they are "
                "made (a transform that raises SampleError), or weigh them with zero"
            )
        self._options.stages.append(partial(Filter, keep=keep))
        return self._told("filter")

    @property
    def rows(self) -> int | None:
        """Rows of every batch, where ``remainder`` makes all alike; else None."""
        options = self._options
        if options.remainder == "keep" or (options.order is not None and options.stages):  # a filter makes them smaller
            return None
        return options.batch_size

    def view(self) -> View:
        """The batches for a plain loop, to be mapped, selected, taken apart: see `view.View`."""
        from penstock_consumer.view import View

        return View(self)  # type: ignore[arg-type]  # every Loader is one of these

    def _told(self, verb: str) -> Self:
        if self._reading is not None and self._reading.has_begun:
            self._options.stages.pop()
            raise ValueError(f"{verb}() says how this loader reads, so it comes before its first batch")
        return self
