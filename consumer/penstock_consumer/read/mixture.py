"""Several loaders as one. Weight, seed and step choose the loader of each batch, which acknowledges its own batches.

Nothing is read here. A mixture is an adapter for its loaders, and a loader for adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from penstock_common.errors import GroupFinished, SpecMismatch, StateMismatch
from penstock_common.hints import Passing, explained, whole
from penstock_common.wire.spec import Spec
from penstock_consumer.read.ack import Acknowledger, Adapter, handed_over
from penstock_consumer.read.hooks import AlwaysTrue, hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.options import STATE_VERSION, State, check_state
from penstock_consumer.read.view import View
from penstock_consumer.stages.batch import Batch, BatchSpan
from penstock_consumer.stages.stats import Stats, StatsCounter, mixed

_Item = TypeVar("_Item")


@explained
def mix(
    loaders: Mapping[str, tuple[Loader, float]], *, seed: int = 0, ends: Literal["last", "first"] = "last"
) -> Mixture:
    """Return the batches of several loaders, mixed by weight.

    One iteration is each loader's next epoch. The choice of a step's loader depends on seed and step alone. If all
    loaders are in canonical order, the same batches come in the same order, and `Mixture.load_state_dict` is exact.

    Args:
        loaders: name -> (loader, weight). A loader with weight 0.7 of 1 gives seven batches of ten.
        seed: of the choice.
        ends: "last" ends an iteration with the last loader's epoch, "first" with the first one's. Then the rest of
            the others comes in the next iteration. A loader that has read all its epochs is passed over.

    Raises:
        ValueError: the loaders or weights are wrong.
        SpecMismatch: the streams have different tensors.

    Example:
        >>> mixture = penstock.mix({"a": (loader_a, 0.7), "b": (loader_b, 0.3)}, seed=7)
    """
    return Mixture(loaders, seed, ends)


def choice(weights: Mapping[str, float], seed: int, step: int) -> Iterator[str]:
    """Yield the names in the order in which the loaders are asked for a step's batch.

    The raw output of Philox decides, which numpy keeps stable. The first name does not depend on which epochs are
    over, so a mixture that learns it late and one that knew it from its state choose alike.
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


class MixturePosition:
    """The position of a mixture: its steps, and what its loaders gave of the running pass."""

    def __init__(self) -> None:
        self.pulled = self.trained = 0
        """The steps delivered, and those of them that no framework has in a buffer."""
        self.began: dict[str, int] = {}
        """The epochs of the running pass that gave a batch of it."""
        self.done: set[str] = set()
        """The loaders whose epoch of the running pass was read to its end."""
        self.is_over = True
        """Whether the next iteration begins a new pass."""

    def begin(self) -> None:
        """Begin a pass."""
        self.done, self.began, self.is_over = set(), {}, False

    def pull(self, batch: Batch, *, is_trained: bool) -> None:
        """Note that a batch is delivered, to a loop that trains on it, or to a framework."""
        self.began.setdefault(batch.source, batch.epoch)
        self.pulled += 1
        self.trained += is_trained

    def withdraw(self, pulled: int, trained: int) -> None:
        """Go back to these counts, because the loop did not get its batch."""
        self.pulled, self.trained = pulled, trained

    def train(self) -> None:
        """Note that a framework's step is done with a batch."""
        self.trained += 1

    def end(self) -> None:
        """End the pass."""
        self.is_over = True

    def go_back(self, left: list[Batch]) -> None:
        """Go back to the steps of batches that were never trained on."""
        self.pulled = self.trained
        self.is_over = self.is_over and not left
        for batch in left:
            if self.began.get(batch.source) == batch.epoch:
                self.done.discard(batch.source)

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Go where a state was taken."""
        self.pulled = self.trained = int(state["step"])
        self.done, self.began, self.is_over = set(state["done"]), dict(state["began"]), bool(state["is_over"])


class _Asked(NamedTuple):
    """A loader that is asked for a batch, and what was so before."""

    acknowledger: Acknowledger
    newest: Sequence[BatchSpan] | None
    """The spans of its newest batch."""
    pulled: int
    trained: int


class Mixture(AlwaysTrue, Passing):
    """The result of `mix`. ``batch.source`` is the name of the loader it came from.

    Example:
        >>> for batch in penstock.mix({"a": (loader_a, 0.7), "b": (loader_b, 0.3)}):
        ...     train(batch["x"], batch["y"])
    """

    def __init__(self, loaders: Mapping[str, tuple[Loader, float]], seed: int, ends: str) -> None:
        if not _is_mixable(loaders) or ends not in ("last", "first"):
            raise ValueError(
                f"got {loaders!r:.80}, ends={ends!r:.20}; "
                "mix() takes {name: (loader, weight above 0), ...} and ends='last' or 'first': "
                "write mix({'a': (loader_a, 0.7), 'b': (loader_b, 0.3)})"
            )
        self._loaders = {name: loader for name, (loader, _) in loaders.items()}
        if len({id(loader) for loader in self._loaders.values()}) < len(self._loaders):
            raise ValueError("mix() got one loader under two names: make a penstock.Loader for each")
        self._weights = {name: weight for name, (_, weight) in loaders.items()}
        self._seed, self._ends = whole("seed", seed, None), ends
        self._policy, *others = {hooks_of(loader).policy for loader in self._loaders.values()}
        if others:
            raise ValueError("the loaders of a mixture acknowledge alike: give them the same acknowledge=")
        self._at = MixturePosition()
        self._loads = 0
        """The number of states that were loaded. Each ends the running iteration."""
        self._adapter: Adapter | None = None
        self._is_one_spec = False
        """Whether the loaders were seen to give the same tensors."""
        self._counter = StatsCounter()
        self._asked: _Asked | None = None
        """The loader that the present request asked last."""

    # --- iterating ---

    def __iter__(self) -> Iterator[Batch]:
        """Yield each loader's next epoch, or the rest of it after a ``break``. Raises SpecMismatch before any batch."""
        if not self._is_one_spec:
            self._is_one_spec = bool(self.spec)
        goes_on, loads = not self._at.is_over, self._loads
        if self._at.is_over:
            self._at.begin()
        before = self._at.pulled
        yield from self._given(self._counter.counted(self._pass()))
        if goes_on and self._at.pulled == before and self._loads == loads:  # the one continued had ended
            self._at.begin()
            yield from self._given(self._counter.counted(self._pass()))

    def _given(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the same items. After Ctrl-C, or an error of a view's function, a batch that got lost is read again.

        See `Acknowledger.given`.
        """
        return handed_over(items, self._ask, self._withdraw)

    def _ask(self) -> None:
        self._asked = None

    def _withdraw(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and self._adapter is None and asked.acknowledger.newest is not asked.newest:
            asked.acknowledger.withdraw_newest()
            self._at.withdraw(asked.pulled, asked.trained)

    def _pass(self) -> Iterator[Batch]:
        loads = self._loads
        sources = {name: iter(loader) for name, loader in self._loaders.items() if name not in self._at.done}
        while (batch := self._next(sources)) is not None:
            self._at.pull(batch, is_trained=self._adapter is None)
            yield batch
            if self._loads != loads:
                return
            if self._adapter is None and self._policy == "on_next":
                self.acknowledge(batch)  # its loader may be asked only some steps later
        self._at.end()

    def _next(self, sources: Mapping[str, Iterator[Batch]]) -> Batch | None:
        """Return the next batch of the pass, or None at its end. Raises GroupFinished if every loader does."""
        finished: list[GroupFinished] = []
        for name in choice(self._weights, self._seed, self._at.pulled):
            if name not in self._at.done:
                acknowledger = hooks_of(self._loaders[name]).acknowledger
                self._asked = _Asked(acknowledger, acknowledger.newest, self._at.pulled, self._at.trained)
                try:
                    if (batch := next(sources[name], None)) is not None:
                        return batch.given_by(name)
                except GroupFinished as error:
                    finished.append(error)
                self._at.done.add(name)
            if self._ends == "first" and name in self._at.began:  # else it has read all its epochs
                return None
        if len(finished) == len(self._weights):
            raise finished[0]
        return None

    def __len__(self) -> int:
        """Return the batches of a pass that reads every loader's epoch.

        Raises TypeError if one does not know its number.
        """
        if self._ends == "first":
            raise TypeError("a mixture that ends with the first of its loaders does not know its number of batches")
        return sum(len(loader) for loader in self._loaders.values())

    def view(self) -> View:
        """Return a view of the mixture. See `view.View`."""
        return View(self)

    @property
    def spec(self) -> Spec:
        """Return the tensors of a sample, which are the same in every loader. Raises SpecMismatch otherwise."""
        (first, loader), *others = self._loaders.items()
        for name, other in others:
            if other.spec != loader.spec:
                raise SpecMismatch(
                    name, f"{other.spec}", f"{loader.spec} as in {first!r}", "mix streams whose tensors are the same"
                )
        return loader.spec

    @property
    def batch_size(self) -> int:
        """Return the largest batch size of its loaders."""
        return max(loader.batch_size for loader in self._loaders.values())

    # --- acknowledging ---

    def acknowledge(self, batch: Batch) -> None:
        """Acknowledge a batch; see `Loader.acknowledge`.

        Args:
            batch: a batch that this mixture gave.
        """
        self._loaders[batch.source].acknowledge(batch)

    def checkpointed(self, state: Mapping[str, Any] | None = None) -> None:
        """Acknowledge what a durable checkpoint contains; see `Loader.checkpointed`.

        Args:
            state: a state that `state_dict` returned. None means everything that was delivered.
        """
        states = None if state is None else self._checked(state)
        for name, loader in self._loaders.items():
            loader.checkpointed(None if states is None else states[name])

    # --- where the time goes ---

    def stats(self) -> Stats:
        """Return the statistics of all passes. ``streams`` has those of all epochs of each loader."""
        return mixed(
            self._counter.current(), {name: loader.stats(total=True) for name, loader in self._loaders.items()}
        )

    # --- state ---

    def state_dict(self) -> State:
        """Return each loader's state and the step. It is exact if all loaders are in canonical order."""
        states = {name: loader.state_dict() for name, loader in self._loaders.items()}
        reached = self._adapter.reached() if self._adapter is not None else []
        return {
            "version": STATE_VERSION,
            "mixture": self._identity(),
            "step": self._at.trained + len(reached),
            "done": sorted(name for name in self._weights if self._is_done(name, states[name])),
            "is_over": self._at.is_over and self._at.trained == self._at.pulled,
            "began": dict(self._at.began),
            "loaders": states,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken. A running iteration ends, and no loader moves if one refuses its state.

        Args:
            state: a dict that `state_dict` returned.

        Raises:
            StateMismatch: the names, weights or seed differ, or a loader refuses its part.
        """
        states = self._checked(state)
        for name, loader in self._loaders.items():
            hooks_of(loader).require_taken(states[name])
        for name, loader in self._loaders.items():
            loader.load_state_dict(states[name])
        self._loads += 1
        self._at.go_to(state)

    def _checked(self, state: object) -> Mapping[str, Mapping[str, Any]]:
        """Return each loader's state."""
        found = state.get("mixture") if isinstance(state, Mapping) else None
        if not isinstance(state, Mapping) or found != self._identity():
            raise StateMismatch("mixture", found, self._identity(), "mix the same names with the same weights and seed")
        for name, loader in self._loaders.items():
            check_state(state["loaders"][name], hooks_of(loader).identity())
        states: Mapping[str, Mapping[str, Any]] = state["loaders"]
        return states

    def _identity(self) -> State:
        return {"weights": self._weights, "seed": self._seed, "ends": self._ends}

    def _is_done(self, name: str, state: Mapping[str, Any]) -> bool:
        """Return whether training has reached the end of this loader's part of the pass."""
        if state["kind"] == "ordered" and name in self._at.began:
            return bool(state["epoch"] > self._at.began[name])
        return name in self._at.done

    # --- used by the hooks ---

    def _hooks(self) -> MixtureHooks:
        return MixtureHooks(self)

    def _next_name(self) -> str | None:
        """Return the loader of the next batch, or None if all are done."""
        order = choice(self._weights, self._seed, self._at.pulled)
        return next((name for name in order if name not in self._at.done), None)

    def _take_over(self, adapter: Adapter) -> None:
        self._adapter = adapter

    # --- the end ---

    def close(self) -> None:
        """Close all loaders, also after an error of one of them."""
        with ExitStack() as stack:
            for loader in reversed(self._loaders.values()):
                stack.callback(loader.close)

    def __enter__(self) -> Mixture:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: Any) -> None:
        with ExitStack() as stack:
            for loader in reversed(self._loaders.values()):
                stack.callback(loader.__exit__, kind, value, trace)


class MixtureHooks:
    """The inner side of a mixture: see `hooks.Hooks`."""

    order = None

    def __init__(self, mixture: Mixture) -> None:
        self._mixture, self._loaders = mixture, mixture._loaders
        self.policy, self.counter = mixture._policy, mixture._counter

    @property
    def adapter(self) -> Adapter | None:
        """See `hooks.Hooks`."""
        return self._mixture._adapter

    @property
    def rows(self) -> int | None:
        """Return the rows of every batch if they are the same in all loaders, else None."""
        (rows, *others) = {hooks_of(loader).rows for loader in self._loaders.values()}
        return None if others else rows

    @property
    def is_ready(self) -> bool:
        """See `hooks.Hooks`."""
        name = self._mixture._next_name()
        return name is not None and hooks_of(self._loaders[name]).is_ready

    def take_over(self, adapter: Adapter) -> None:
        """See `hooks.Hooks`."""
        for name, loader in self._loaders.items():
            hooks_of(loader).take_over(_MixturePart(adapter, name))
        self._mixture._take_over(adapter)

    def trained(self, batch: Batch) -> None:
        """See `hooks.Hooks`."""
        self._mixture._at.train()
        hooks_of(self._loaders[batch.source]).trained(batch)

    def given(self, items: Iterable[Any]) -> Iterator[Any]:
        """See `hooks.Hooks`."""
        return self._mixture._given(items)

    def return_batches(self, batches: Iterable[Batch]) -> None:
        """See `hooks.Hooks`. The steps that the batches were chosen for come again in the same order."""
        left = list(batches)
        for name, loader in self._loaders.items():
            hooks, mine = hooks_of(loader), [batch for batch in left if batch.source == name]
            hooks.counter.take_back(mine)
            hooks.return_batches(mine)
        self._mixture._at.go_back(left)


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

    def report(self) -> None:
        """Report what the training step is done with."""
        self._whole.report()

    def reached(self) -> list[Batch]:
        """Return what `report` would report now of this loader's batches."""
        return [batch for batch in self._whole.reached() if batch.source == self._name]
