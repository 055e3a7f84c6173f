"""A loader's batches as a plain loop wants them: mapped, selected, collated, one by one. Numpy's adapter.

Which samples come, in what batches, is the loader's (``verbs``); frameworks have adapters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock_common.hints import Passing, an, callable_of, whole
from penstock_consumer.adapters.selection import chosen, nested, shaped
from penstock_consumer.read.options import State
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.stats import Stats

if TYPE_CHECKING:
    from penstock_consumer.read.loader import Loader
    from penstock_consumer.read.mixture import Mixture

Step = Callable[[Iterator[Any]], Iterator[Any]]


class View(Passing):
    """The result of `Loader.view`. Each verb gives a new one; iterating over one gives the group's next epoch.

    A batch is acknowledged when the loop asks for what comes after it: with single samples, after the last of its
    batch. ``acknowledge='manual'`` goes with `map` alone, whose results are batches still.
    """

    def __init__(self, source: Loader | Mixture, steps: tuple[Step, ...] = (), *, count: int | None = 0) -> None:
        self._source, self._steps = source, steps
        self._count = count
        """Elements of a pass: 0 as many as batches, None unknown, else at most so many."""

    # --- verbs ---

    def map(self, function: Callable[[Batch], Mapping[str, Any]]) -> View:
        """Calls it with each batch: with ``lambda b: {**b, "x": b["x"] / np.float32(255)}`` uint8 travels.

        What it gives replaces the tensors; a batch stays one, with its identities, while n rows stay n rows.
        """
        callable_of("function", function, "lambda batch: {**batch, 'x': batch['x'] / 255}")

        def mapped(items: Iterator[Any]) -> Iterator[Any]:
            return (_remade(item, function(item)) for item in items)

        return self._then(mapped)

    def select(self, *names: str) -> View:
        """``select("x", "y")`` gives tuples, ``select("x")`` bare arrays. Raises ValueError for a name not there."""
        select = names[0] if len(names) == 1 else names

        def selected(items: Iterator[Any]) -> Iterator[Any]:
            for item in items:
                chosen(tuple(item), select)
                yield shaped(item, select)

        return self._then(selected, is_shown=False)

    def nested(self) -> View:
        """Names like ``a/b`` become dicts within dicts."""
        return self._then(lambda items: (nested(item) for item in items), is_shown=False)

    def collate(self, function: Callable[[Any], Any]) -> View:
        """Calls it with each element and gives whatever it returns."""
        callable_of("function", function, "lambda batch: (batch['x'], batch['y'])")
        return self._then(lambda items: (function(item) for item in items), is_shown=False)

    def samples(self) -> View:
        """Single samples: dicts of ``[*shape]``, as ``batch_size=None`` gives elsewhere. Read large batches."""

        def single(items: Iterator[Any]) -> Iterator[Any]:
            for item in items:
                size = item.size if isinstance(item, Batch) else len(next(iter(item.values())))  # no padding
                for row in range(size):
                    yield {name: value[row] for name, value in item.items()}

        source = self._shown_source()
        return View(source, (*self._steps, source.tally.around, single), count=None)  # no clock for each sample

    def take(self, count: int) -> View:
        """At most so many elements a pass; what was not taken is not acknowledged, and comes in the next pass."""
        count = whole("count", count)
        known = None if self._count is None else min(self._count or count, count)
        return View(self._source, (*self._steps, lambda items: islice(items, count)), count=known)

    def skip(self, count: int) -> View:
        """Leaves out the first so many elements of each pass: they count as trained on."""
        count = whole("count", count, 0)
        return View(self._source, (*self._steps, lambda items: islice(items, count, None)), count=None)

    # --- the loader's ---

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self._source)
        for step in self._steps:
            items = step(items)
        around = self._source.tally.around
        return items if around in self._steps else around(items)

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Elements of a pass, where the loader knows its batches; else a TypeError."""
        if self._count is None:
            raise TypeError("after samples() or skip() the number of elements is not known")
        whole = len(self._source)
        return whole if self._count == 0 else min(whole, self._count)

    def state_dict(self) -> State:
        """The loader's: what was handed out so far, in whole batches."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The loader's."""
        self._source.load_state_dict(state)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """The loader's."""
        self._source.checkpointed(state)

    def stats(self) -> Stats:
        """The loader's; what this view does to batches counts as waiting for this process, its ``reader``."""
        return self._source.stats()

    def close(self) -> None:
        """Closes the loader."""
        self._source.close()

    def __enter__(self) -> View:
        self._source.__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        self._source.__exit__(*how)

    # --- parts ---

    def _then(self, step: Step, *, is_shown: bool = True) -> View:
        source = self._source if is_shown else self._shown_source()
        return View(source, (*self._steps, step), count=self._count)

    def _shown_source(self) -> Loader | Mixture:
        if self._source.policy == "manual":
            raise ValueError(
                "acknowledge='manual' needs the batches, which this view hides: use map() alone, or 'on_next', or "
                "'on_checkpoint'"
            )
        return self._source


def _remade(batch: Any, values: Any) -> Any:
    if not isinstance(values, Mapping):
        raise ValueError(f"map's function gave {an(values)}, expected a dict; collate() takes anything")
    if not isinstance(batch, Batch):
        return values
    made = Batch(dict(values), batch.epoch, batch.spans, batch.position)
    made.rows, made.source = batch.rows, batch.source
    return made
