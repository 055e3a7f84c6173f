"""Any object with a length and items by index as a source: lists, arrays, Hugging Face datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_common.hints import an
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.items import TUPLE_NAMES, as_sample
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import ObjectSource, Sample
from penstock_producer.sources.seeding import find_seeded, reseed
from penstock_producer.sources.transform import Transform


class DatasetSource(ObjectSource):
    """An object's items by index. Without a transform they must be samples already (see ``items``)."""

    unit: Literal["sample"] = "sample"
    repeatable = True

    def __init__(self, dataset: Any, name: str, transform: Transform | None = None) -> None:
        self._name, self._transform = name, transform
        self._items = _as_columns(dataset, name)
        self._length = _length(self._items, name)
        self.fingerprint = fingerprint(["dataset", name, self._length, transform and transform.name])
        self.info: dict[str, Any] = {"source": "dataset", "name": name}
        self._seeded = find_seeded(dataset, name)
        self.draws = bool(self._seeded) or (transform is not None and transform.draws)
        """Whether `read` uses its generator (see `protocol.draws`)."""

    def __len__(self) -> int:
        return self._length

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Make a sample of one item, by the transform if there is one."""
        key = self.key(index)
        reseed(self._seeded, rng, key)
        try:
            item = self._item(index)
        except Exception as error:
            raise SampleError(f"{key}: the dataset failed: {blame(error)}") from error
        return self._transform(item, rng, key) if self._transform else as_sample(item, key)

    def _item(self, index: int) -> Any:
        item = self._items[index]
        # a view would let a transform that works in place change the dataset
        return np.array(item) if isinstance(self._items, np.ndarray) else item

    def column(self, name: str) -> Any:
        """Return all values of one tensor where the dataset is arrays side by side, else None."""
        return self._items.arrays.get(name) if isinstance(self._items, ParallelArrays) else None


class ParallelArrays:
    """Arrays of one length side by side, as in ``(x_train, y_train)`` or ``{"x": ..., "y": ...}``."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        # rows are copied, because transforms may change them in place
        return {name: np.array(array[index]) for name, array in self.arrays.items()}


def _as_columns(dataset: Any, name: str) -> Any:
    """Return a tuple or dict of arrays as one dataset with a row of each, and other objects as they are."""
    require_rows(dataset, name)
    arrays = dataset if isinstance(dataset, Mapping) else None
    if isinstance(dataset, tuple) and 1 <= len(dataset) <= len(TUPLE_NAMES) and all(map(_is_array, dataset)):
        arrays = dict(zip(TUPLE_NAMES, dataset, strict=False))
    if arrays is None:
        return dataset
    if not arrays or not all(map(_is_array, arrays.values())):
        raise SourceError(f"{name} is a {type(dataset).__name__} of other objects than arrays; expected items by index")
    for key, array in arrays.items():
        require_rows(array, f"{key!r} of {name}")
    lengths = {key: len(array) for key, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise SourceError(f"{name}: arrays of different lengths: {lengths}; each needs one row per sample")
    return ParallelArrays(arrays)


def require_rows(found: Any, name: str) -> None:
    """Raise SourceError for a table of pandas, which gives columns or labels by number, and for splits of datasets.

    The classes are known by name, so neither package is imported.
    """
    classes = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(found).__mro__}
    if ("pandas", "DataFrame") in classes:
        raise SourceError(
            f"{name} is a pandas DataFrame, whose items are columns; expected rows by number: give "
            'df.to_dict("records") for a tensor of each column, or df.to_numpy() for one tensor'
        )
    if ("pandas", "Series") in classes:
        raise SourceError(
            f"{name} is a pandas Series, whose items have labels; expected rows by number: give series.to_numpy()"
        )
    if not classes.isdisjoint({("datasets", "DatasetDict"), ("datasets", "IterableDatasetDict")}):
        splits = list(found)
        raise SourceError(
            f"{name} is a {type(found).__name__} of the splits {', '.join(map(str, splits)) or '(none)'}; expected one "
            f'split: give ds["{splits[0] if splits else "train"}"]'
        )


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "__getitem__") and bool(value.shape)


def _length(dataset: Any, name: str) -> int:
    if not hasattr(type(dataset), "__getitem__") or not hasattr(type(dataset), "__len__"):
        hint = "; an iterable is read with kind generator" if hasattr(type(dataset), "__iter__") else ""
        raise SourceError(
            f"{name} is {an(dataset)}; expected an object with len() and items by index (__len__, __getitem__){hint}"
        )
    try:
        length = len(dataset)
    except Exception as error:
        raise SourceError(f"len({name}) failed: {blame(error)}") from error
    if not length:
        raise SourceError(f"{name} is empty: its length is 0")
    return length
