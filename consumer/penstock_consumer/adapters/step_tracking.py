"""Track which batches a training step has provably finished with, behind a framework that reads ahead.

Nothing here uses a framework. Each adapter tells a `StepTracker` what its framework lets it see. docs/decisions/ has
the reasons.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock_common.errors import PenstockError
from penstock_common.hints import an
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_consumer.read.options import State
from penstock_consumer.read.view import View
from penstock_consumer.replay.passes import Passes
from penstock_consumer.stages.batch import Batch

UNSEEN = (
    "nobody sees which batches of this dataset reach the training step, so none could be acknowledged: give the "
    "tf.function iter(ds) and loop over that, under a tf.distribute strategy loop in Python and hand each replica its "
    "share (docs/tensorflow.md), and elsewhere, as for zip or sample_from_datasets, loop over "
    "penstock.tensorflow.acknowledging(made, ds)"
)


def require_loader(loader: object) -> None:
    """Raise TypeError if an adapter is given something else, such as a stream's name, a batch or a view."""
    if isinstance(loader, View):
        raise TypeError(
            "dataset() got a View, expected its loader: write dataset(loader, select=('x', 'y')) for tuples"
        )
    if not isinstance(loader, Loader | Mixture | Passes):
        name = repr(loader) if isinstance(loader, str) else "'train'"
        raise TypeError(
            f"dataset() got {an(loader)}, expected a loader: write "
            f"dataset(penstock.Loader({name}, group='resnet', batch_size=64))"
        )


def require_fed(call: str, loader: object, more: str = "") -> None:
    """Raise TypeError if a callback is given something else, such as the dataset or only a file's name."""
    if not isinstance(loader, Loader | Mixture):
        raise TypeError(f"{call}() got {an(loader)}, expected the loader of the dataset: write {call}(loader{more})")


@dataclass(eq=False)
class TrackedIteration:
    """One pass of the framework over its dataset."""

    is_ordered: bool
    """Whether batches arrive in the order of pulling. Then a batch that never arrives was dropped on purpose."""
    is_drained: bool
    """Whether the pass ends only after everything pulled has arrived or been dropped; not so behind ``take``."""
    has_read_all: bool = False
    """Whether the loader's epoch was read to its end."""
    is_over: bool = False
    pulled: int = 0
    arrived: int = 0
    in_hand: list[int] = field(default_factory=list)
    """The tokens of batches that the step was given and is not known to be done with."""

    def pull(self) -> None:
        """Note that the framework pulled a batch."""
        self.pulled += 1

    def read_all(self) -> None:
        """Note that the loader's epoch was read to its end."""
        self.has_read_all = True

    def arrive(self, tokens: Sequence[int]) -> None:
        """Note that the step was given an element made of these batches."""
        self.arrived += 1
        self.in_hand.extend(tokens)

    def let_go(self) -> None:
        """Note that the step is done with all it was given."""
        self.in_hand = []

    def end(self) -> None:
        """Note that the framework asks for no more."""
        self.is_over = True


class StepTracker:
    """A tracker of one loader's batches in a framework. Each has a token until it is acknowledged.

    The framework pulls from `batches`, perhaps in a thread far ahead. `arrive` is called when the training step asks
    for an element, which proves that the step is done with the one before.
    """

    def __init__(self, loader: Loader | Mixture) -> None:
        self.loader, self._hooks = loader, hooks_of(loader)
        self._tokens = itertools.count()
        self._outstanding: dict[int, Batch] = {}
        """The pulled and unacknowledged batches by token, in the order of pulling."""
        self._current: TrackedIteration | None = None
        self._lock = threading.RLock()
        self._pulling = threading.Lock()
        self._is_reported = False
        """Whether a callback calls `report` after each step. Otherwise an arrival reports the step before."""

    @classmethod
    def of(cls, loader: Loader | Mixture) -> StepTracker:
        """Return the tracker of a loader, which acknowledges for it from now on."""
        hooks = hooks_of(loader)
        if isinstance(hooks.adapter, cls):
            return hooks.adapter
        tracker = cls(loader)
        hooks.take_over(tracker)
        return tracker

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch of the epoch being read has arrived."""
        return self._hooks.is_ready

    def state_dict(self) -> State:
        """Return the loader's state, which is the position of the step, however far the framework has read ahead."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """End the pass under way. The next one begins where the state was taken. See `Loader.load_state_dict`."""
        self.loader.load_state_dict(state)
        self.report()
        self._current = None

    # --- the loader's end ---

    def batches(self) -> Iterator[tuple[Batch, int]]:
        """Yield the rest of the epoch, or the next one, with tokens. End when another pass takes over."""
        iteration = self._current
        if iteration is None or iteration.is_over:
            raise PenstockError(UNSEEN)
        batches = iter(self.loader)
        while True:
            with self._pulling:
                batch = next(batches, None) if self._current is iteration else None
                if batch is not None:
                    token = self.pulled(batch)
                if self._current is not iteration:
                    return  # the pass that took over gives this batch again
            if batch is None:
                iteration.read_all()
                return
            iteration.pull()
            yield batch, token
            batch.clear()  # the framework has the arrays, and only the identities are still needed

    def asked(self) -> Iterator[Batch]:
        """Yield the same as `batches` directly to the step, whose request for a batch is its report."""
        iteration = self._current
        for batch, token in self.batches():
            with self._lock:
                if self._current is not iteration:
                    return  # another pass took over, and gives this batch again
                self.arrive([token])
            yield batch

    def pulled(self, batch: Batch) -> int:
        """Note that a batch is on its way. Return the token that reports it."""
        with self._lock:
            token = next(self._tokens)
            self._outstanding[token] = batch
        return token

    # --- the step's end ---

    def passes(self, *, is_ordered: bool, is_drained: bool) -> Generator[int, None, None]:
        """Drive one pass. The caller asks for the next number once all of the last one has reached the step.

        A pass in which nothing arrived continues with the next epoch, as a loop over the loader does.
        """
        iteration = TrackedIteration(is_ordered, is_drained)
        self._begin(iteration)
        try:
            while True:
                pulled = iteration.pulled
                yield 0
                self._end(iteration)
                if iteration.arrived or iteration.pulled == pulled:
                    return
        finally:
            iteration.end()

    @property
    def running(self) -> TrackedIteration | None:
        """Return the pass under way. It is another object once another pass takes over."""
        return self._current

    def begin_reports(self) -> None:
        """Expect a call of `report` after each step. From here on an arrival does not prove that a step has ended."""
        self._is_reported = True

    def end_reports(self) -> None:
        """Take arrivals as proof again, because other code may iterate the dataset now."""
        self._is_reported = False

    def arrive(self, tokens: Sequence[int]) -> None:
        """Note that the step gets an element made of these batches. No tokens means that they are not known."""
        with self._lock:
            iteration = self._current
            if iteration is None:
                return
            if not self._is_reported:
                self.report()
            iteration.arrive(tokens)

    def report(self) -> None:
        """Report that the step is done with all it was given. The loader asks for this too."""
        with self._lock:
            done = self._done()
            if done and self._current is not None:
                self._current.let_go()
                self._report(done)

    def reached(self) -> list[Batch]:
        """Return the batches that `report` would report now."""
        with self._lock:
            return [self._outstanding[token] for token in self._done() if token in self._outstanding]

    def _done(self) -> list[int]:
        iteration = self._current
        if iteration is None or not iteration.in_hand:
            return []
        if iteration.is_ordered:  # filter and skip have dropped earlier batches that did not arrive
            return [token for token in self._outstanding if token <= max(iteration.in_hand)]
        return iteration.in_hand

    # --- beginnings and ends of passes ---

    def _begin(self, iteration: TrackedIteration) -> None:
        self.report()  # a request for a new pass, as for a batch, shows that the last is done
        self._current = iteration
        with self._pulling, self._lock:
            left = list(self._outstanding.values())
            self._outstanding.clear()
            self._hooks.counter.take_back(left)
            self._hooks.return_batches(left)

    def _end(self, iteration: TrackedIteration) -> None:
        """Note that all of a pass has reached the step."""
        if self._current is not iteration:
            return
        if not self._is_reported:
            self.report()
        if iteration.has_read_all and iteration.is_drained:
            with self._lock:  # the callback reports what the step still has
                self._report([token for token in self._outstanding if token not in iteration.in_hand])

    def _report(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            batch = self._outstanding.pop(token, None)
            if batch is not None:
                self._hooks.trained(batch)
