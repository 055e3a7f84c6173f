"""A Keras Sequence or PyDataset, which gives batches by index, as a source. Keras itself is not imported.

Its order is the plan's: ``on_epoch_end``, where some shuffle, is not called. Its batches are cut up by the writer.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SampleError, SourceError
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.items import batch_tensors, row_count
from penstock_producer.sources.names import blame
from penstock_producer.sources.protocol import ObjectSource, Sample
from penstock_producer.sources.seeding import find_seeded, reseed


def is_keras(value: Any) -> bool:
    """Tell by the names of its classes whether an object is a Keras Sequence or PyDataset."""
    return any(
        kind.__name__ in ("PyDataset", "Sequence")
        and kind.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow")
        for kind in type(value).__mro__
    )


class KerasSource(ObjectSource):
    """Batches by index. All but the last hold as many samples as the first, as Keras cuts them."""

    unit: Literal["batch"] = "batch"
    repeatable = True

    def __init__(self, dataset: Any, name: str, sizes: tuple[int, int] | None = None, *, seeds: bool = True) -> None:
        self._dataset, self._name, self._given = dataset, name, sizes
        self._length = _batches(dataset, name)
        self._seeded = find_seeded(dataset, name) if seeds else ()
        self.info: dict[str, Any] = {"source": "keras", "name": name}

    def __len__(self) -> int:
        return self._length

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Return the samples of every batch but the last, and of the last. If not given, both batches are read once."""
        if self._given:
            return self._given
        first = self._probed(0)
        last = self._probed(self._length - 1) if self._length > 1 else first
        return first, last

    def _probed(self, item: int) -> int:
        try:
            return row_count(self._batch(item), self.key(item))
        except SampleError as error:
            raise SourceError(
                f"cannot learn the batch size: {error}; what gives single samples is read by the source kind dataset"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of name, length and batch sizes."""
        return fingerprint(["keras", self._name, self._length, *self.sizes])

    def size(self, item: int) -> int:
        """Return the number of samples in a batch."""
        return self.sizes[item == self._length - 1]

    def read(self, item: int, rng: np.random.Generator) -> Sample:
        """Return one batch as arrays of ``size(item)`` rows each."""
        key = self.key(item)
        reseed(self._seeded, rng, key)
        batch = self._batch(item)
        count = row_count(batch, key)
        if count != self.size(item):
            raise SampleError(f"{key}: {count} samples, {self.size(item)} planned; only the last may differ")
        return batch

    def unseeded(self) -> KerasSource:
        """Return the same source without seeds, for a user's own process, which may draw from the same generators."""
        return KerasSource(self._dataset, self._name, self.sizes, seeds=False)

    def _batch(self, item: int) -> dict[str, Any]:
        key = self.key(item)
        try:
            batch = self._dataset[item]
        except Exception as error:
            raise SampleError(f"{key}: the dataset failed: {blame(error)}") from error
        return batch_tensors(batch, key)


def _batches(dataset: Any, name: str) -> int:
    try:
        # Keras 3 lets a dataset override num_batches, and a Sequence has a length only
        length = dataset.num_batches if hasattr(type(dataset), "num_batches") else len(dataset)
    except Exception as error:
        raise SourceError(
            f"the number of batches of {name} is unknown: {blame(error)}; a Keras PyDataset has a length, and what has "
            "none is read by the source kind generator (--batched)"
        ) from error
    if not length or not hasattr(type(dataset), "__getitem__"):
        raise SourceError(f"{name} has {length} batches; expected a finite number of them, by index")
    return int(length)
