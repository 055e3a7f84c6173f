"""The feeds of a trainer without Penstock: torch's DataLoader, or a process pool without torch.

A feed is an iterator without an end that yields the number of samples of each batch. Workers are forked, so that an
open source need not be opened again.
"""

from __future__ import annotations

import itertools
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

from penstock_common.errors import PenstockError, SampleError
from penstock_producer.sources.order import order_of
from penstock_producer.sources.protocol import AnySource

Feed = Callable[[AnySource, int, int], Iterator[int]]
"""Source, samples of a batch, worker processes -> the samples of each batch."""
BATCHES_AHEAD = 2
"""Batches that each worker makes in advance, as DataLoader's ``prefetch_factor``."""

OWNER_S = 0.5
"""The time between two checks whether the owner of a process lives."""


def from_dataloader(source: AnySource, batch: int, workers: int) -> Iterator[int]:
    """Yield the batches of a DataLoader as a user would write it: shuffled, persistent workers, tensors."""
    from torch.utils.data import DataLoader, IterableDataset

    settings: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork", "persistent_workers": True}
    if source.unit == "item":

        class Items(IterableDataset):  # type: ignore[misc] # untyped here
            """A class, because DataLoader asks for one."""

            def __iter__(self) -> Iterator[Any]:
                return made(source)

        dataset: Any = Items()
        settings["num_workers"] = 1  # each further worker would repeat what the first one reads
    else:
        dataset = _SourceSamples(source)
        settings["sampler"] = _EndlessOrder(source)
    is_whole = _gives_batches(source)
    collate = _as_tensors if is_whole else _stacked_tensors
    loader = DataLoader(dataset, batch_size=None if is_whole else batch, collate_fn=collate, **settings)
    for values in loader:
        yield _count(values)


def from_pool(source: AnySource, batch: int, workers: int) -> Iterator[int]:
    """Yield the batches of a pool of processes, as arrays. Raises PenstockError for an iterable."""
    if source.unit == "item":
        raise PenstockError(
            'an iterable is compared with a DataLoader only, and torch is not installed: pip install "penstock[torch]"'
        )
    order = iter(_EndlessOrder(source))
    size = 1 if source.unit == "batch" else batch
    pool = ProcessPoolExecutor(workers, get_context("fork"), _keep_source, (source, os.getpid()))
    waiting: deque[Future[Any]] = deque()
    try:
        while True:
            while len(waiting) < BATCHES_AHEAD * workers:
                waiting.append(pool.submit(_make_batch, list(itertools.islice(order, size))))
            yield _count(waiting.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)


def has_torch() -> bool:
    """Return whether torch can be imported.

    Importing it here saves each turn the seconds that this takes.
    """
    try:
        import torch.utils.data  # noqa: F401
    except ImportError:
        return False
    return True


class _SourceSamples:
    """A source as a map-style dataset.

    A sample that cannot be made is None, and is left out of its batch.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._rng: np.random.Generator | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Mapping[str, Any] | None:
        if self._rng is None:  # in the worker: two workers must not draw the same
            self._rng = np.random.default_rng()
        try:
            found: Mapping[str, Any] = self._source.read(index, self._rng)
        except SampleError:
            return None
        return found


class _EndlessOrder:
    """Indices without an end: the source's own epochs, one after another."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __iter__(self) -> Iterator[int]:
        for epoch in itertools.count():
            yield from order_of(self._source, len(self._source), 0, epoch, True).tolist()


def end_with(owner: int, folder: str = "") -> None:
    """Have this process end when its parent ``owner`` ends, even by SIGKILL, and remove the owner's folder."""

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(OWNER_S)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="penstock-bench-owner", daemon=True).start()


def made(source: AnySource, complain: Callable[[SampleError], None] = lambda _: None) -> Iterator[Mapping[str, Any]]:
    """Yield the source's samples without an end. ``complain`` is called with each sample that cannot be made."""
    rng = np.random.default_rng()
    while True:
        for number, item in enumerate(source if source.unit == "item" else _EndlessOrder(source)):
            try:
                yield source.make(item, number, rng) if source.unit == "item" else source.read(item, rng)
            except SampleError as error:
                complain(error)


def samples_in(source: AnySource, values: Mapping[str, Any]) -> int:
    """Return how many samples of the source these values are."""
    return _count(values) if _gives_batches(source) else 1


def _gives_batches(source: AnySource) -> bool:
    return source.unit == "batch" or (source.unit == "item" and source.batched)


# --- in a worker of the pool ------------------------------------------------------------------------------------------

_KEPT: list[_SourceSamples] = []


def _keep_source(source: AnySource, owner: int) -> None:
    end_with(owner)
    _KEPT.append(_SourceSamples(source))


def _make_batch(indices: Sequence[int]) -> Mapping[str, Any]:
    samples = [sample for index in indices if (sample := _KEPT[0][index]) is not None]
    if len(indices) == 1 and _gives_batches(_KEPT[0]._source):
        return samples[0] if samples else {}
    return _columns(samples, _stacked_arrays)


# --- batches ----------------------------------------------------------------------------------------------------------


def _count(values: Mapping[str, Any]) -> int:
    return len(next(iter(values.values()), ()))


def _columns(samples: Sequence[Mapping[str, Any]], stack: Callable[[list[Any]], Any]) -> dict[str, Any]:
    return {name: stack([sample[name] for sample in samples]) for name in (samples[0] if samples else ())}


def _stacked_tensors(samples: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    return _columns([sample for sample in samples if sample is not None], _stacked)


def _stacked(values: list[Any]) -> Any:
    from torch.utils.data import default_collate

    if isinstance(values[0], bytes):
        return values
    arrays = [np.asarray(value, order="C") for value in values]
    try:
        return default_collate(arrays)  # into shared memory, in a worker
    except (RuntimeError, TypeError):  # different shapes, or a dtype that torch does not know
        return arrays


def _stacked_arrays(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def _as_tensors(values: Mapping[str, Any] | None) -> dict[str, Any]:
    import torch

    return {name: torch.as_tensor(np.asarray(value, order="C")) for name, value in (values or {}).items()}
