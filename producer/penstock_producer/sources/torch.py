"""The sources for torch: a Dataset by index, an IterableDataset in its order, a DataLoader as batches.

No other source imports torch. Tensors become arrays without a copy where their memory allows it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.extras import needed
from penstock_common.wire.spec import as_array
from penstock_producer.sources.dataset import DatasetSource
from penstock_producer.sources.generator import Factory, GeneratorSource
from penstock_producer.sources.items import by_name, flat
from penstock_producer.sources.protocol import Sample
from penstock_producer.sources.transform import Transform

with needed("torch", "reading torch datasets"):
    import torch
    from torch.utils import data


def open_torch(
    found: Any, name: str, transform: Transform | None = None, limit: int | None = None
) -> DatasetSource | GeneratorSource:
    """Return the source of a torch Dataset, IterableDataset or DataLoader.

    Args:
        found: the object.
        name: its name in messages.
        transform: a function of an item that makes a sample.
        limit: the number of items after which a pass ends. A Dataset with a length takes none.

    Raises:
        SourceError: the object is none of these, or a Dataset got a limit.
    """
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)  # as in torch's own workers, because there is one process for each core already
    if isinstance(found, data.DataLoader):
        return TorchLoaderSource(found, name, transform, limit)
    if isinstance(found, data.IterableDataset):
        return GeneratorSource(_passes(found), name, transform, limit=limit, kind="torch")
    if not isinstance(found, data.Dataset):
        has_items = hasattr(type(found), "__getitem__") and hasattr(type(found), "__len__")
        hint = f"; `penstock produce dataset {name}` takes an object with len() and items by index" if has_items else ""
        raise SourceError(
            f"{name} is a {type(found).__name__}; expected a torch Dataset, IterableDataset or DataLoader, or a "
            f"function that returns one{hint}"
        )
    if limit is not None:
        raise SourceError(f"{name} has a length, so limit= has no meaning; use torch.utils.data.Subset")
    return TorchDatasetSource(found, name, transform)


class TorchDatasetSource(DatasetSource):
    """A Dataset with ``__len__`` and ``__getitem__``.

    Its ``__getitem__`` may draw from the global generators of torch, numpy and Python. `seeding` seeds them for each
    sample, so a job that is done again draws the same.
    """

    def __init__(self, dataset: Any, name: str, transform: Transform | None) -> None:
        super().__init__(dataset, name, transform)
        self._dataset = dataset
        self.info = {"source": "torch", "name": name}
        if isinstance(classes := getattr(dataset, "classes", None), list) and all(isinstance(c, str) for c in classes):
            self.info["classes"] = {"y": classes}  # the attribute's name in torchvision

    def _item(self, index: int) -> Any:
        return _plain(self._dataset[index])

    def column(self, name: str) -> Any:
        """Return the dataset's ``targets`` as values of ``y``, where it has them as in torchvision."""
        targets = getattr(self._dataset, "targets", None) if name == "y" else None
        return None if targets is None else np.asarray(_plain(targets))


class TorchLoaderSource(GeneratorSource):
    """The batches of a DataLoader in its order. One job reads them, with the DataLoader's own worker processes."""

    def __init__(self, found: Any, name: str, transform: Transform | None, limit: int | None) -> None:
        is_batched = found.batch_size is not None or found.batch_sampler is not None
        super().__init__(_passes(found), name, transform, batched=is_batched, limit=limit, kind="torch")

    def make(self, item: Any, position: int, rng: np.random.Generator) -> Sample:
        """Make a batch with the tensor names of the Dataset's items, or a sample of an item."""
        if self.batched and self._transform is None:
            item = _by_name(item, self.key(position))
        try:
            return super().make(item, position, rng)
        except SampleError as error:
            if self.batched or self._transform is not None or not isinstance(item, list):
                raise
            raise SampleError(
                f"{error}; a DataLoader without batches makes lists of tuples: give its Dataset itself"
            ) from error


def _by_name(batch: Any, key: str) -> Mapping[Any, Any]:
    parts = by_name(tuple(batch) if isinstance(batch, list) else batch, key)
    for name, part in parts.items():
        if isinstance(part, list | tuple) and part and isinstance(part[0], Mapping):
            raise SampleError(
                f"{key}: {name!r} is a {type(part).__name__} of dicts, expected one dict of stacked tensors: "
                "give the Dataset itself instead of its DataLoader"
            )
    return flat(parts, key)


def _passes(found: Iterable[Any]) -> Factory:
    def one() -> Iterable[Any]:
        _let_have_children()
        return map(_plain, found)

    return one


def _let_have_children() -> None:
    """Let this process have child processes, which Python forbids to daemons such as a penstock worker.

    A DataLoader's workers end with their parent.
    """
    cast("Any", multiprocessing.current_process())._config["daemon"] = False


def _plain(value: Any) -> Any:
    """Return tensors as arrays, at any depth, and a column of texts as a list of bytes."""
    if isinstance(value, torch.Tensor):
        return as_array(value.detach().cpu().resolve_conj().resolve_neg())
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_plain, value))
    if isinstance(value, list | tuple):
        if value and all(isinstance(part, str) for part in value):
            return [part.encode() for part in value]
        return type(value)(map(_plain, value))
    return value
