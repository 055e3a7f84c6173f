"""A loader's batches for a plain loop: mapped, selected, collated, or one sample at a time. Numpy's adapter.

The loader decides which samples come in which batches. Frameworks have adapters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Protocol

from penstock_common.hints import Passing, an, callable_of, one_argument, whole
from penstock_consumer.read.hooks import AlwaysTrue, Hooked, Hooks, hooks_of
from penstock_consumer.read.options import State
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.selection import chosen, nested, shaped
from penstock_consumer.stages.stats import Stats

Step = Callable[[Iterator[Any]], Iterator[Any]]


class ViewSource(Hooked[Hooks], Protocol):
    """A loader or a mixture, as a view uses it. `Loader` describes the methods."""

    def __iter__(self) -> Iterator[Batch]: ...

    def __len__(self) -> int: ...

    def __enter__(self) -> object: ...

    def __exit__(self, *how: Any) -> None: ...

    def state_dict(self) -> State:
        """Return where training is."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge what a durable checkpoint contains."""

    def stats(self) -> Stats:
        """Return the statistics."""

    def close(self) -> None:
        """Close it."""


class View(AlwaysTrue, Passing):
    """The result of `Loader.view`. Each method returns a new view, and iterating over one reads the group's next epoch.

    A batch is acknowledged when the loop asks for the element after it; with single samples, after its last one.
    ``acknowledge='manual'`` works with `map` alone, whose results are batches.

    Example:
        >>> for x, y in loader.view().select("x", "y"):
        ...     train(x, y)
    """

    def __init__(self, source: ViewSource, steps: tuple[Step, ...] = (), *, count: int | None = 0) -> None:
        self._source, self._steps = source, steps
        self._count = count
        """The elements of a pass: 0 means as many as batches, None means unknown, else at most so many."""

    # --- verbs ---

    def map(self, function: Callable[[Batch], Mapping[str, Any]]) -> View:
        """Return the batches with other tensors.

        Each result stays a batch with its identities, while n rows stay n rows.

        Args:
            function: takes a batch and returns a dict of tensors, such as ``lambda b: {**b, "x": b["x"] /
                np.float32(255)}``.
        """
        callable_of("function", function, "lambda batch: {**batch, 'x': batch['x'] / 255}")
        one_argument("map", function, "batch", "select('x', 'y').collate(lambda pair: ...) gives tuples")

        def mapped(items: Iterator[Any]) -> Iterator[Any]:
            return (_remade(item, function(item)) for item in items)

        return self._then(mapped)

    def select(self, *names: str) -> View:
        """Return tuples, or bare arrays for one name. Raises ValueError for a name that is not there.

        Args:
            names: of the tensors, in the order of the tuple.
        """
        select = names[0] if len(names) == 1 else names

        def selected(items: Iterator[Any]) -> Iterator[Any]:
            for item in items:
                chosen(tuple(item), select)
                yield shaped(item, select)

        return self._then(selected, is_shown=False)

    def nested(self) -> View:
        """Return dicts within dicts for names like ``a/b``."""
        return self._then(lambda items: (nested(item) for item in items), is_shown=False)

    def collate(self, function: Callable[[Any], Any]) -> View:
        """Return whatever the function makes of each element.

        Args:
            function: takes a batch, or what an earlier method made of it.
        """
        callable_of("function", function, "lambda batch: (batch['x'], batch['y'])")
        return self._then(lambda items: (function(item) for item in items), is_shown=False)

    def samples(self) -> View:
        """Return single samples, dicts of ``[*shape]``. Read them with a large ``batch_size``."""

        def single(items: Iterator[Any]) -> Iterator[Any]:
            for item in items:
                size = item.size if isinstance(item, Batch) else len(next(iter(item.values())))  # no padding
                for row in range(size):
                    yield {name: value[row] for name, value in item.items()}

        source = self._shown_source()
        return View(
            source, (*self._steps, hooks_of(source).counter.around, single), count=None
        )  # no clock for each sample

    def take(self, count: int) -> View:
        """Return at most ``count`` elements a pass. The others are not acknowledged, and come in the next pass.

        Args:
            count: the elements of a pass, at least 1.
        """
        count = whole("count", count)
        known = None if self._count is None else min(self._count or count, count)
        return View(self._source, (*self._steps, lambda items: islice(items, count)), count=known)

    def skip(self, count: int) -> View:
        """Return each pass without its first ``count`` elements. They count as trained on.

        Args:
            count: the elements that are left out.
        """
        count = whole("count", count, 0)
        return View(self._source, (*self._steps, lambda items: islice(items, count, None)), count=None)

    # --- the loader's ---

    def __iter__(self) -> Iterator[Any]:
        items: Iterator[Any] = iter(self._source)
        for step in self._steps:
            items = step(items)
        hooks = hooks_of(self._source)
        around = hooks.counter.around
        return hooks.given(items if around in self._steps else around(items))

    def __len__(self) -> int:
        """Return the elements of a pass if the loader knows its batches. Raises TypeError otherwise."""
        if self._count is None:
            raise TypeError("after samples() or skip() the number of elements is not known")
        whole = len(self._source)
        return whole if self._count == 0 else min(whole, self._count)

    def state_dict(self) -> State:
        """Return the loader's state: what was delivered so far, in whole batches."""
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state into the loader; see `Loader.load_state_dict`.

        Args:
            state: a dict that `state_dict` returned.
        """
        self._source.load_state_dict(state)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge what a durable checkpoint contains; see `Loader.checkpointed`.

        Args:
            state: a state that `state_dict` returned. None means everything that was delivered.
        """
        self._source.checkpointed(state)

    def stats(self) -> Stats:
        """Return the loader's statistics. The time of this view's functions counts as waiting for this process."""
        return self._source.stats()

    def close(self) -> None:
        """Close the loader."""
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

    def _shown_source(self) -> ViewSource:
        if hooks_of(self._source).policy == "manual":
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
    return Batch(values, batch.epoch, batch.spans, batch.position, rows=batch.rows, source=batch.source)
