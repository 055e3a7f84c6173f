"""A loader or a replay as a PyTorch IterableDataset of batches. The training step acknowledges a loader's.

``torch_device`` moves tensors to a device. ``worker_shares`` decides what worker processes read.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import getattr_static
from types import FrameType
from typing import Any, Literal, NoReturn, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from penstock_common.errors import PenstockError, StateMismatch
from penstock_common.hints import (
    Answering,
    Lengthless,
    batch_attribute,
    explained,
    is_unpacking,
    not_tuples,
    unknown_tensor,
)
from penstock_common.wire.dtypes import BFLOAT16
from penstock_common.wire.ragged import Ragged
from penstock_consumer.adapters.step_tracking import StepTracker, require_loader
from penstock_consumer.read.hooks import AlwaysTrue, hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_consumer.read.options import State
from penstock_consumer.read.worker_shares import EpochPart, RemoteBatch, WorkerShares, read_share
from penstock_consumer.replay.passes import Passes
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.selection import Select, chosen, shaped

UNSEEN = (
    "batches are read in worker processes, and nothing here sees which of them the training process is done with: "
    "iterate penstock.torch.acknowledging(DataLoader(...)), or use num_workers=0, which is the fast way"
)
BATCHED = (
    "a DataLoader would make batches of what are batches already, and nothing could say which of them the step is done "
    "with: use DataLoader(dataset, batch_size=None)"
)
PREPARED = (
    "Accelerate prepared this DataLoader: it reads a batch ahead of the step, and with several ranks rank 0 reads for "
    "all. Leave the batches out, accelerator.prepare(model, optimizer), so that each rank reads its own share. In a "
    "Trainer of transformers, override get_train_dataloader"
)
REPLAYED = (
    "a replay gives each process all of its batches, so worker processes would repeat them: use num_workers=0, which "
    "is the fast way, since batches arrive decoded and a thread reads ahead"
)
FINISHED = "_iterator_finished"
"""The key in a StatefulDataLoader's state that says whether the loop has seen the end of the pass."""
Token = tuple[int, int]
"""A batch's token in the tracker, and its epoch."""

# Worker processes are forked, and must not collect the garbage that they inherit. It may need a thread when it is
# destroyed, and a fork copies no other threads. The destruction of an iterator of tf.data then waits for ever.
os.register_at_fork(after_in_child=gc.freeze)


@overload
def dataset(
    loader: Loader | Mixture, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "list"
) -> LoaderDataset: ...


@overload
def dataset(
    loader: Passes, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "list"
) -> ReplayDataset: ...


@explained
def dataset(
    loader: Loader | Mixture | Passes, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "list"
) -> LoaderDataset | ReplayDataset:
    """Return an IterableDataset of a loader's batches as tensors. Waits until the stream has a spec.

    Each iteration is the group's next epoch, or the rest of an epoch that was left early. Iterate it as it is, or
    through ``DataLoader(dataset, batch_size=None)`` or torchdata's StatefulDataLoader. Elements are batches already,
    and the loader reads ahead in a thread, so ``num_workers=0`` is the fast way. With ``num_workers`` above 0, which
    canonical order allows, iterate `acknowledging` of the DataLoader.

    With ``acknowledge='on_next'`` a batch is acknowledged when the loop asks for the next one. A tensor shares the
    batch's memory, which is never written again while anything refers to it.

    For a `penstock.Replay` or `penstock.Files` each iteration is the whole epoch, as a validation wants it. Nothing is
    acknowledged, and ``num_workers`` must be 0.

    Args:
        loader: a Loader, a mixture, a Replay or Files.
        select: None gives dicts ``name -> [n, *shape]``. ``("x", "y")`` gives tuples, and ``"x"`` gives bare tensors.
        nested: whether names like ``a/b`` become dicts within dicts.
        ragged: 'list' gives n tensors for a ragged tensor, and 'padded' gives one tensor that is filled with zeros.
            ``bytes`` are always a list of n.

    Returns:
        The dataset. It has ``state_dict`` and ``load_state_dict``, and in canonical order a length in batches.

    Raises:
        ValueError: ``select`` names a tensor that the stream lacks.

    Example:
        >>> dataset = penstock.torch.dataset(loader, select=("x", "y"))
        >>> for x, y in DataLoader(dataset, batch_size=None):
        ...     train(x, y)
    """
    if isinstance(loader, Passes):
        return ReplayDataset(loader, select, nested, ragged)
    require_loader(loader)
    return (LoaderDataset if hooks_of(loader).order is None else SizedTorchDataset)(loader, select, nested, ragged)


class WorkerBatch(RemoteBatch):
    """A batch on its way out of a worker process."""

    def pin_memory(self) -> WorkerBatch:
        """Return the batch in pinned memory, for ``DataLoader(pin_memory=True)``."""
        return replace(self, element=mapped(self.element, torch.Tensor.pin_memory))


@dataclass(frozen=True, slots=True)
class ElementCollate:
    """A user's ``collate_fn`` for worker processes. It is given the element, as it is with ``num_workers=0``."""

    collate: Callable[[Any], Any]

    def __call__(self, batch: WorkerBatch) -> WorkerBatch:
        """Return the batch with what the user's function makes of its element."""
        return replace(batch, element=self.collate(batch.element))


class LoaderDataset(AlwaysTrue, Answering, IterableDataset):
    """The result of `dataset`."""

    __len__ = Lengthless()

    def __init__(self, loader: Loader | Mixture, select: Select, nested: bool, ragged: RaggedAs) -> None:
        """Raise ValueError for unknown tensors, and for a loader with ``acknowledge="manual"``."""
        self._element = _element_of(loader, select, nested, ragged)
        self.loader, self.tracker = loader, StepTracker.of(loader)
        """Both are for the training process. A copy of this dataset in a worker process must not use them."""
        self.waiting: deque[Token] = deque()
        """The batches that were pulled and are not reported to have arrived."""
        self._is_led = False
        """Whether `AcknowledgingIterable` reports what arrives."""
        self._epoch: int | None = None
        """The epoch of the last batch that arrived, while its pass lasts."""
        self._is_at_end = False
        """Whether a state was loaded that was taken at the end of its pass."""
        self._part: EpochPart | None = None
        """The share that worker processes read."""
        self._identity: State = {}
        """The loader that the states of worker processes belong to."""
        self._done = 0
        """The batches of its share that a worker process has given."""
        self._is_over = False

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, or PenstockError if Accelerate prepares a DataLoader with ``dispatch_batches=False``.

        It asks for the generator then, and fails before it asks for a batch.
        """
        if name == "generator" and _is_prepared(sys._getframe(1)):
            raise PenstockError(PREPARED)
        super().__getattr__(name)

    def __iter__(self) -> Iterator[Any]:
        """Return one pass.

        Raises ValueError in a DataLoader that would make batches of batches, and PenstockError in one that Accelerate
        prepared.
        """
        if _makes_batches(sys._getframe(1).f_locals.get("self")):
            raise ValueError(BATCHED)
        if _is_prepared(sys._getframe(1)):
            raise PenstockError(PREPARED)
        worker = get_worker_info()
        if worker is None:
            return self._pass()
        return self._share(worker.id, worker.num_workers)

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError("a stream has no items by number: iterate the dataset, or read kept samples by penstock.Replay")

    # --- in the training process ---

    def _pass(self) -> Iterator[Any]:
        if self.take_end_mark():
            return
        tracker = self.tracker
        rounds = tracker.passes(is_ordered=True, is_drained=False)
        next(rounds)
        mine, batches = tracker.running, tracker.batches()
        self.waiting.clear()
        try:
            while True:
                if tracker.running is not mine:
                    return  # another pass took over
                if not self._is_led:
                    tracker.report()  # before waiting: a writer may wait for just this space
                batch, token = next(batches, (None, 0))
                if batch is None:
                    break
                element = self._element(batch)
                self.waiting.append((token, batch.epoch))
                if not self._is_led:
                    self.arrive(self.waiting.popleft())
                yield element
                del element
            if not self._is_led:
                self.finish()
        finally:
            rounds.close()

    @contextmanager
    def led(self) -> Iterator[None]:
        """Let the caller report what arrives until the block ends."""
        self._is_led = True
        try:
            yield
        finally:
            self._is_led = False

    def arrive(self, token: Token) -> None:
        """Note that the step is given a batch."""
        self.tracker.arrive([token[0]])
        self._epoch = token[1]

    def finish(self) -> None:
        """Note that the loop has seen the end of the pass."""
        self.tracker.report()
        self._epoch = None

    def assign(self, part: EpochPart | None, identity: State) -> None:
        """Set what worker processes read from now on, and the loader that their states belong to."""
        self._part, self._identity = part, identity

    def take_end_mark(self) -> bool:
        """Return True, once, if a state was loaded that was taken at the end of its pass. Then this pass is empty."""
        was, self._is_at_end = self._is_at_end, False
        return was

    def state_dict(self) -> State:
        """Return the position of the step, and whether the pass has given its last batch."""
        if get_worker_info() is not None:
            return self._share_state()
        state, loader, part, epoch = self.tracker.state_dict(), self.loader, self._part, self._epoch
        if isinstance(loader, Mixture):
            return {**state, "is_at_end": self._is_at_end}
        hooks = hooks_of(loader)
        if part is not None and state["epoch"] == part.epoch:
            manifest = hooks.manifest_of(part.epoch)
            if manifest is not None and part.is_end(state["position"], manifest.samples):
                state = {**state, "epoch": part.epoch + 1, "position": 0}  # workers read this, unseen by the loader
        ended = epoch is not None and "position" in state and state["epoch"] > epoch and not hooks.runs_on(epoch)
        return {**state, "is_at_end": self._is_at_end or ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the rest of the pass that the state was taken in. Raises StateMismatch, ReplayTruncated."""
        if get_worker_info() is not None:
            self._load_share_state(state)
            return
        self.tracker.load_state_dict(state)
        self._epoch, self._is_at_end = None, bool(state.get("is_at_end"))

    # --- in a worker process ---

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the connection, which a worker process that is not forked must not share either."""
        return {**self.__dict__, "loader": None, "tracker": None, "waiting": deque()}

    def _share(self, number: int, workers: int) -> Iterator[WorkerBatch]:
        if self._part is None:
            raise PenstockError(UNSEEN)
        for batch in read_share(self._part.after(self._done * workers), (number, workers)):
            element = self._element(batch)
            self._done += 1
            yield WorkerBatch(element, batch.epoch, batch.position, batch.size, batch.nbytes)
        self._is_over = True

    def _share_state(self) -> State:
        if self._part is None:
            return {}
        epoch, start = self._part.epoch, self._part.start
        return {
            "of": self._identity, "epoch": epoch, "start": start, "done": self._done, "is_over": self._is_over,
        }  # fmt: skip

    def _load_share_state(self, state: Mapping[str, Any]) -> None:
        if self._part is not None and state:
            self._part = replace(self._part, epoch=state["epoch"], start=state["start"])
            self._done, self._is_over = state["done"], state["is_over"]


class SizedTorchDataset(LoaderDataset):
    """A dataset of an ordered group. Other datasets must have no ``__len__``, because Keras would call it and fail."""

    def __len__(self) -> int:  # type: ignore[override]
        """Return the batches of an epoch. Raises TypeError while it is not known."""
        return len(self.loader)


class ReplayDataset(AlwaysTrue, IterableDataset):
    """A replay as an IterableDataset. Each iteration is the whole epoch, and nothing is acknowledged."""

    def __init__(self, replay: Passes, select: Select, nested: bool, ragged: RaggedAs) -> None:
        """Raise ValueError for unknown tensors."""
        self._element = _element_of(replay, select, nested, ragged)
        self._replay: Passes | None = replay
        self._steps = len(replay)

    def __len__(self) -> int:
        """Return the batches of an iteration."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """Return one pass. Raises ValueError in a DataLoader that makes batches of batches, or has worker processes."""
        if _makes_batches(sys._getframe(1).f_locals.get("self")):
            raise ValueError(BATCHED)
        if self._replay is None or get_worker_info() is not None:
            raise ValueError(REPLAYED)
        return map(self._element, self._replay)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the replay. A worker process then refuses to read."""
        return {**self.__dict__, "_replay": None}


@dataclass(frozen=True, slots=True)
class Element:
    """A function that gives a batch's chosen tensors in the form that the user wants."""

    select: Select
    nested: bool
    ragged: RaggedAs

    def __call__(self, batch: Batch) -> Any:
        """Return the element of a batch."""
        names = chosen(tuple(batch), self.select)
        values = {name: value_of(batch[name], self.ragged) for name in names}
        element = shaped(values, self.select, is_nested=self.nested)
        return NamedTensors(element) if self.select is None else element


def _element_of(loader: Loader | Mixture | Passes, select: Select, nested: bool, ragged: RaggedAs) -> Element:
    if ragged not in ("list", "padded"):
        raise ValueError(f"ragged is {ragged!r}, expected 'list' or 'padded'")
    chosen(loader.spec.names, select)
    return Element(select, nested, ragged)


# --- reports of what arrives ------------------------------------------------------------------------------------------


def acknowledging(batches: Any) -> AcknowledgingIterable:
    """Return the same batches, acknowledged by this process. A DataLoader with worker processes needs it.

    The worker processes only read. Each opens a connection of its own and takes every n-th batch of this rank, so the
    order is the same for any number of them. This process acknowledges a batch when the loop asks for the next one, or
    at `Loader.checkpointed`. After a crash, the batches in queues are read again.

    Args:
        batches: the result of `dataset`, or a DataLoader or StatefulDataLoader of it with ``batch_size=None``.

    Returns:
        An iterable with ``state_dict`` and ``load_state_dict``.

    Raises:
        TypeError: ``batches`` is neither, or comes from a replay.
        ValueError: a shared group has workers, or ``persistent_workers`` or ``in_order=False`` would break the order.

    Example:
        >>> workers = DataLoader(penstock.torch.dataset(loader), batch_size=None, num_workers=2)
        >>> for batch in penstock.torch.acknowledging(workers):
        ...     train(batch["x"], batch["y"])
    """
    return AcknowledgingIterable(batches)


class AcknowledgingIterable(AlwaysTrue):
    """The result of `acknowledging`. Iterate over it, and save and load its state."""

    def __init__(self, batches: Any) -> None:
        batches = batches.batches if isinstance(batches, AcknowledgingIterable) else batches
        found = batches if isinstance(batches, LoaderDataset) else getattr(batches, "dataset", None)
        if is_replayed(batches):
            raise TypeError("a replay's batches are not acknowledged: iterate the dataset, or its DataLoader, as it is")
        if not isinstance(found, LoaderDataset):
            raise TypeError(
                f"got a {type(batches).__name__}, expected what penstock.torch.dataset returned, or a DataLoader of it"
            )
        self.batches: Any = batches
        self.dataset = found
        self._shares = _shares_of(found.loader) if _checked_workers(batches) else None
        if self._shares is not None and not isinstance(batches.collate_fn, ElementCollate):
            batches.collate_fn = ElementCollate(batches.collate_fn)
        self._begun: tuple[EpochPart, int, bool] | None = None
        """A pass that was prepared because a state was asked for before the first batch."""
        self._has_begun = False
        """Whether worker processes were ever told what to read. From then on the DataLoader has a state of its own."""

    def __len__(self) -> int:
        """Return the length of the dataset or DataLoader."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        tracker = self.dataset.tracker
        for element, token in self.elements():
            self.dataset.arrive(token)
            mine = tracker.running
            yield element
            del element
            if tracker.running is not mine:
                return  # another pass took over
            tracker.report()
        self.dataset.finish()

    @property
    def is_ready(self) -> bool:
        """Return whether the next batch comes without waiting. False if that is not known."""
        return self._shares is None and self.dataset.tracker.is_ready

    def elements(self) -> Iterator[tuple[Any, Token]]:
        """Yield the batches of one pass, each with its token. The caller must report the arrival of each."""
        if self._shares is not None:
            yield from self._shared_out(self._shares)
            return
        with self.dataset.led():
            for element in self.batches:
                yield element, self.dataset.waiting.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Return the DataLoader's state if it has one, else the dataset's. It is the position of the loop.

        A state that was loaded and not used yet is returned as it is.
        """
        if not hasattr(self.batches, "state_dict"):
            return self.dataset.state_dict()
        if self._shares is not None and (loaded := self._loaded()) is not None:
            return dict(loaded)
        if self._shares is not None and not self._has_begun:
            self._begun = self._begin(self._shares, is_first=True)
        found: dict[str, Any] = self.batches.state_dict()
        return found

    def _loaded(self) -> Mapping[str, Any] | None:
        """Return the state that a StatefulDataLoader was given for its next pass."""
        state: Mapping[str, Any] | None = getattr(self.batches, "next_iter_state", None)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the rest of the pass that the state was taken in. Raises StateMismatch, ReplayTruncated."""
        if not hasattr(self.batches, "load_state_dict"):
            self.dataset.load_state_dict(state)
            return
        _require_workers(state, getattr(self.batches, "num_workers", None))
        self.batches.load_state_dict(state)

    # --- worker processes ---

    def _shared_out(self, shares: WorkerShares) -> Iterator[tuple[Any, Token]]:
        tracker = self.dataset.tracker
        rounds = tracker.passes(is_ordered=True, is_drained=False)
        next(rounds)
        mine, is_empty = tracker.running, True
        try:
            while not self.dataset.take_end_mark():
                begun, self._begun = self._begun, None
                if begun is None or self._loaded() is not None:
                    begun = self._begin(shares, is_first=is_empty)
                if begun is None:
                    return
                part, last, is_resumed = begun
                for carried in self.batches:
                    if tracker.running is not mine:
                        return
                    token = tracker.pulled(shares.take(part, carried))
                    last, is_empty = carried.position, False
                    yield carried.element, (token, part.epoch)
                    shares.flush()
                goes_on = shares.end(part, last)
                if not goes_on and (is_resumed or not is_empty):
                    return
        finally:
            self.dataset.assign(None, {})
            rounds.close()

    def _begin(self, shares: WorkerShares, *, is_first: bool) -> tuple[EpochPart, int, bool] | None:
        """Return what the workers are to read, the position up to which it was read, and whether it is from a state.

        The state's own position may be earlier: a StatefulDataLoader skips what it gave since its last snapshot.
        """
        loaded = self._loaded()
        states = _share_states(loaded)
        _require_workers(loaded, self.batches.num_workers)  # the DataLoader itself may have loaded it
        has_ended = bool(states) and _has_ended(loaded, states)
        part, position = self._resumed(shares, states, has_ended=has_ended) if states else (None, 0)
        is_resumed = part is not None
        if part is None:
            part = shares.begin(is_first=is_first)
            position = 0 if part is None else part.start
        if has_ended:  # StatefulDataLoader would start workers on the ended epoch, only to stop them
            self.batches.next_iter_state = None
        self.dataset.assign(part, shares.identity)
        self._has_begun = True
        return None if part is None else (part, position, is_resumed)

    def _resumed(
        self, shares: WorkerShares, states: list[Mapping[str, Any]], *, has_ended: bool
    ) -> tuple[EpochPart | None, int]:
        """Return the part that these states share, or None if its pass had ended, and the position."""
        epoch, start = int(states[0]["epoch"]), int(states[0]["start"])
        position = start + sum(int(state["done"]) for state in states) * shares.step
        where = {"epoch": epoch + 1, "position": 0} if has_ended else {"epoch": epoch, "position": position}
        self.dataset.loader.load_state_dict({**states[0]["of"], **where})
        return (None, 0) if has_ended else (shares.part(epoch, start), position)


def is_replayed(batches: Any) -> bool:
    """Return whether these are a replay's batches, or a DataLoader of them."""
    return isinstance(batches, ReplayDataset) or isinstance(getattr(batches, "dataset", None), ReplayDataset)


def _makes_batches(asking: object) -> bool:
    """Return whether a DataLoader with a ``batch_size`` asks for the dataset's iterator.

    A DataLoader tells its dataset nothing about itself, and does not exist in a worker process. The fetcher, which
    asks for the iterator, knows.
    """
    return getattr_static(asking, "auto_collation", False) is True


def _is_prepared(frame: FrameType | None) -> bool:
    """Return whether Accelerate's own DataLoader, or what makes one, calls from this frame or from one above.

    The DataLoader that skips the batches before a checkpoint reads nothing ahead.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") == "accelerate.data_loader":
            return type(frame.f_locals.get("self")).__name__ != "SkipDataLoader"
        frame = frame.f_back
    return False


def _checked_workers(batches: Any) -> int:
    """Return the worker processes of a DataLoader. Raises ValueError for options that break the order."""
    workers = int(getattr(batches, "num_workers", 0))
    if getattr(batches, "batch_size", None) is not None:
        raise ValueError(BATCHED)
    if workers and batches.persistent_workers:
        raise ValueError("persistent_workers=True would go on where workers had read ahead, not where training is")
    if workers and not getattr(batches, "in_order", True):
        raise ValueError("in_order=False would break the order that positions are acknowledged in")
    return workers


def _shares_of(loader: Loader | Mixture) -> WorkerShares:
    if isinstance(loader, Mixture):
        raise ValueError(
            "worker processes cannot read for a mixture, whose streams are chosen step by step; use num_workers=0, "
            "which is the fast way: batches arrive decoded, and every loader reads ahead in a thread"
        )
    return WorkerShares(hooks_of(loader))


def _has_ended(loaded: Any, states: list[Mapping[str, Any]]) -> bool:
    """Return whether the loop had seen the end of the pass that a StatefulDataLoader's state was taken in.

    The workers' own states need not say so: StatefulDataLoader keeps those that came with the last batch.
    """
    return bool(loaded.get(FINISHED)) or all(state["is_over"] for state in states)


def _require_workers(state: Any, workers: int | None) -> None:
    """Raise StateMismatch for a StatefulDataLoader's state of another number of workers: torchdata only asserts it.

    A pass that had ended needs no worker's state, so the next one may have any number of workers.
    """
    states = _share_states(state)
    found = len(states) if states else 0 if _has_dataset_state(state) else workers
    if workers is None or found == workers or (workers and states and _has_ended(state, states)):
        return
    hint = f"use num_workers={found}, or save and load the dataset's own state_dict(), which fits any number"
    raise StateMismatch("num_workers", found, workers, hint)


def _has_dataset_state(state: Any) -> bool:
    """Return whether a StatefulDataLoader's state has that of the dataset in the training process."""
    inner = [value for value in state.values() if isinstance(value, Mapping)] if isinstance(state, Mapping) else []
    return any("is_at_end" in value or _has_dataset_state(value) for value in inner)


def _share_states(state: Any) -> list[Mapping[str, Any]]:
    """Return the states that worker processes put into a StatefulDataLoader's state, in any place."""
    if not isinstance(state, Mapping):
        return []
    if "of" in state and "is_over" in state:
        return [state]
    return [found for value in state.values() for found in _share_states(value)]


# --- batches as tensors -----------------------------------------------------------------------------------------------


RaggedAs = Literal["list", "padded"]


class NamedTensors(dict[str, Any]):
    """A batch as a dict of torch tensors. If it is taken for a tuple or a tensor, an error says what to write."""

    def __iter__(self) -> Iterator[str]:
        """Yield names. Raises TypeError for ``x, y = batch``, which would give two names instead of two tensors."""
        if is_unpacking(sys._getframe(1)):
            raise TypeError(not_tuples(self.keys(), "penstock.torch.dataset(loader, select=({}))"))
        return super().__iter__()

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(unknown_tensor(name, self.keys()))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(batch_attribute(name, self.keys(), "torch"))


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory. bfloat16, which numpy lacks, goes through 16-bit integers."""
    if not array.flags.writeable:  # PyTorch has no read-only tensors. A batch's own arrays are writeable.
        array = array.copy()
    if array.dtype.name == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def value_of(value: Any, ragged: RaggedAs) -> Any:
    """Return a tensor of a batch as torch has it: ``[n, *shape]``, or for byte strings a list of bytes.

    A ragged tensor becomes a list of n views of one flat tensor, or with 'padded' one tensor that is filled with zeros.
    """
    if not isinstance(value, Ragged):
        return tensor_of(value)
    if value.is_bytes:
        return list(value)
    if ragged == "padded":
        return tensor_of(value.padded())
    flat = tensor_of(value.values)
    sizes = np.prod(value.shapes, axis=1).tolist()
    return [part.view(shape) for part, shape in zip(flat.split(sizes), value.shapes.tolist(), strict=True)]


def mapped(element: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same element with every tensor changed."""
    if isinstance(element, torch.Tensor):
        return change(element)
    if isinstance(element, dict):
        return type(element)({name: mapped(value, change) for name, value in element.items()})
    if isinstance(element, list | tuple):
        return type(element)(mapped(value, change) for value in element)
    return element
