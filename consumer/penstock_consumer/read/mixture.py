"""Several loaders as one: each batch from one of them, chosen by weight, seed and step. Each acknowledges its own.

Nothing is read here; a mixture speaks to its loaders as an adapter does, and to adapters as a loader does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, islice
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SpecMismatch, StateMismatch
from penstock_common.hints import Passing, explained, whole
from penstock_common.wire.spec import Spec
from penstock_consumer.read.ack import Acknowledge, Adapter
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.options import State, check_state
from penstock_consumer.read.view import View
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.stats import Stats, StatsCounter, mixed

VERSION = 1


@explained
def mix(
    loaders: Mapping[str, tuple[Loader, float]], *, seed: int = 0, ends: Literal["last", "first"] = "last"
) -> Mixture:
    """``mix({"a": (loader_a, 0.7), "b": (loader_b, 0.3)}, seed=7)``: batches of both, seven of ten from the first.

    One iteration is each loader's next epoch; it ends with the ``last`` of them, the others' weights counting alone
    once one has ended, or with the ``first``, the rest of the others coming in the next iteration. Which loader gives
    a step's batch depends on seed and step alone, so where all are ordered the same batches come in the same order,
    and `Mixture.load_state_dict` goes on exactly. Raises ValueError, SpecMismatch.
    """
    return Mixture(loaders, seed, ends)


def choice(weights: Mapping[str, float], seed: int, step: int) -> Iterator[str]:
    """In which order the loaders are asked for a step's batch: whose epoch is over passes it on to the next.

    By words of Philox, whose raw output numpy keeps stable. Who comes first does not depend on who is over, so a
    mixture that learns it late and one that knew it from its state choose alike.
    """
    left = dict(weights)
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, 0], dtype=np.uint64)
    for attempt in range(len(weights)):
        counter = np.array([step, attempt, 0, 0], dtype=np.uint64)
        point = int(np.random.Philox(key=key, counter=counter).random_raw()) / 2**64 * sum(left.values())
        ends = zip(left, accumulate(left.values()), strict=True)
        name = next((name for name, end in ends if point < end), next(reversed(left)))  # rounding
        del left[name]
        yield name


class Mixture(Passing):
    """The result of `mix`. ``batch.source`` is the name of the loader it came from."""

    def __init__(self, loaders: Mapping[str, tuple[Loader, float]], seed: int, ends: str) -> None:
        if not _is_mixable(loaders) or ends not in ("last", "first"):
            raise ValueError(
                f"got {loaders!r:.80}, ends={ends!r:.20}; "
                "mix() takes {name: (loader, weight above 0), ...} and ends='last' or 'first': "
                "write mix({'a': (loader_a, 0.7), 'b': (loader_b, 0.3)})"
            )
        self._loaders = {name: loader for name, (loader, _) in loaders.items()}
        self._weights = {name: weight for name, (_, weight) in loaders.items()}
        self._seed, self._ends = whole("seed", seed, None), ends
        if len({loader.policy for loader in self._loaders.values()}) > 1:
            raise ValueError("the loaders of a mixture acknowledge alike: give them the same acknowledge=")
        self._pulled = self._trained = 0
        """Steps: handed out, and of them those that no framework has in a buffer."""
        self._began: dict[str, int] = {}
        """Epochs of the pass under way, of those that gave a batch of it."""
        self._done: set[str] = set()
        """Loaders whose epoch of the pass under way was read to its end."""
        self._is_over = True
        """Whether the next iteration begins a new pass."""
        self._loads = 0
        """States that were loaded: each ends the iteration under way."""
        self.adapter: Adapter | None = None
        self.tally = StatsCounter()

    # --- iterating ---

    def __iter__(self) -> Iterator[Batch]:
        """Each loader's next epoch, or what is left of it after a ``break``."""
        goes_on, loads = not self._is_over, self._loads
        if self._is_over:
            self._begin()
        before = self._pulled
        yield from self.tally.counted(self._pass())
        if goes_on and self._pulled == before and self._loads == loads:  # what was gone on with had ended already
            self._begin()
            yield from self.tally.counted(self._pass())

    def _begin(self) -> None:
        self._done, self._began, self._is_over = set(), {}, False

    def _pass(self) -> Iterator[Batch]:
        loads = self._loads
        sources = {name: iter(loader) for name, loader in self._loaders.items() if name not in self._done}
        while (batch := self._next(sources)) is not None:
            self._began.setdefault(batch.source, batch.epoch)
            self._pulled += 1
            if self.adapter is None:
                self._trained += 1
            yield batch
            if self._loads != loads:
                return
            if self.adapter is None and self.policy == "on_next":
                self.acknowledge(batch)  # though its loader may be asked only some steps later
        self._is_over = True

    def _next(self, sources: Mapping[str, Iterator[Batch]]) -> Batch | None:
        for name in choice(self._weights, self._seed, self._pulled):
            if name not in self._done:
                if (batch := next(sources[name], None)) is not None:
                    batch.source = name
                    return batch
                self._done.add(name)
            if self._ends == "first":
                return None
        return None

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch has arrived."""
        order = choice(self._weights, self._seed, self._pulled)
        return any(self._loaders[name].is_ready for name in islice((n for n in order if n not in self._done), 1))

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        """Batches of a pass in which every loader's epoch is read; a TypeError where one does not know its own."""
        if self._ends == "first":
            raise TypeError("a mixture that ends with the first of its loaders does not know its number of batches")
        return sum(len(loader) for loader in self._loaders.values())

    def view(self) -> View:
        """Return a view of the mixture. See `view.View`."""
        return View(self)

    @property
    def spec(self) -> Spec:
        """The tensors of a sample, the same in every loader; raises SpecMismatch."""
        (first, loader), *others = self._loaders.items()
        for name, other in others:
            if other.spec != loader.spec:
                raise SpecMismatch(
                    name, f"{other.spec}", f"{loader.spec} as in {first!r}", "mix streams whose tensors are the same"
                )
        return loader.spec

    @property
    def batch_size(self) -> int:
        """The largest of its loaders'."""
        return max(loader.batch_size for loader in self._loaders.values())

    @property
    def rows(self) -> int | None:
        """Rows of every batch, where they are alike in all loaders; else None."""
        (rows, *others) = {loader.rows for loader in self._loaders.values()}
        return None if others else rows

    # --- acknowledging ---

    @property
    def policy(self) -> Acknowledge:
        """When batches are acknowledged."""
        return next(iter(self._loaders.values())).policy

    def acknowledge(self, batch: Batch) -> None:
        """Settles a batch."""
        self._loaders[batch.source].acknowledge(batch)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """A checkpoint is durable: see `Loader.checkpointed`."""
        states = None if state is None else self._checked(state)
        for name, loader in self._loaders.items():
            loader.checkpointed(None if states is None else states[name])

    def take_over(self, adapter: Adapter) -> None:
        """See `Loader.take_over`."""
        for name, loader in self._loaders.items():
            loader.take_over(_MixturePart(adapter, name))
        self.adapter = adapter

    def trained(self, batch: Batch) -> None:
        """See `Loader.trained`."""
        self._trained += 1
        self._loaders[batch.source].trained(batch)

    def hand_back(self, batches: Iterable[Batch]) -> None:
        """See `Loader.hand_back`; the steps they were chosen for come again, in the same order."""
        left = list(batches)
        for name, loader in self._loaders.items():
            loader.hand_back([batch for batch in left if batch.source == name])
        self._pulled = self._trained
        self._is_over = self._is_over and not left
        for batch in left:
            if self._began.get(batch.source) == batch.epoch:
                self._done.discard(batch.source)

    # --- where the time goes ---

    def stats(self) -> Stats:
        """All passes; in ``streams`` all epochs of each loader, which says a line at the end of its epoch."""
        return mixed(self.tally.current(), {name: loader.stats(total=True) for name, loader in self._loaders.items()})

    # --- state ---

    def state_dict(self) -> State:
        """Each loader's state, and the step: exact where all of them are ordered; see `Loader.state_dict`."""
        states = {name: loader.state_dict() for name, loader in self._loaders.items()}
        reached = self.adapter.reached() if self.adapter is not None else []
        return {
            "version": VERSION,
            "mixture": self._identity(),
            "step": self._trained + len(reached),
            "done": sorted(name for name in self._weights if self._is_done(name, states[name])),
            "is_over": self._is_over and self._trained == self._pulled,
            "began": dict(self._began),
            "loaders": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on there; an iteration under way ends. Raises StateMismatch for other names, weights or seed.

        And for what a loader refuses; none of them has moved then.
        """
        states = self._checked(state)
        for name, loader in self._loaders.items():
            loader.load_state_dict(states[name])
        self._loads += 1
        self._pulled = self._trained = int(state["step"])
        self._done, self._began, self._is_over = set(state["done"]), dict(state["began"]), bool(state["is_over"])

    def _checked(self, state: object) -> Mapping[str, Mapping[str, Any]]:
        """Each loader's state."""
        found = state.get("mixture") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or found != self._identity():
            raise StateMismatch("mixture", found, self._identity(), "mix the same names with the same weights and seed")
        for name, loader in self._loaders.items():
            check_state(state["loaders"][name], loader._identity())
        states: Mapping[str, Mapping[str, Any]] = state["loaders"]
        return states

    def _identity(self) -> State:
        return {"weights": self._weights, "seed": self._seed, "ends": self._ends}

    def _is_done(self, name: str, state: Mapping[str, Any]) -> bool:
        """Return whether training has reached the end of this loader's part of the pass."""
        if state["kind"] == "ordered" and name in self._began:
            return bool(state["epoch"] > self._began[name])
        return name in self._done

    # --- the end ---

    def close(self) -> None:
        """Closes all loaders."""
        for loader in self._loaders.values():
            loader.close()

    def __enter__(self) -> Mixture:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: Any) -> None:
        for loader in self._loaders.values():
            loader.__exit__(kind, value, trace)


def _is_mixable(loaders: object) -> bool:
    pairs = list(loaders.values()) if isinstance(loaders, Mapping) else []
    return bool(pairs) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], Loader)
        and isinstance(pair[1], (int, float))
        and pair[1] > 0
        for pair in pairs
    )


class _MixturePart:
    """A mixture's adapter as one of its loaders sees it."""

    def __init__(self, whole: Adapter, name: str) -> None:
        self._whole, self._name = whole, name

    def settle(self) -> None:
        """Reports what the training step is done with."""
        self._whole.settle()

    def reached(self) -> list[Batch]:
        """Return what `settle` would report now of this loader's batches."""
        return [batch for batch in self._whole.reached() if batch.source == self._name]
