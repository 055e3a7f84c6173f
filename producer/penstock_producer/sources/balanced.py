"""Every class equally often in each epoch, however many samples it has: small ones come again, large ones in turns."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.choice import Indices, apportion, blend, order_of, part_seed, walk
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.protocol import AnySource, Labelled, Sample, Source, draws

MAX_CLASSES = 100_000
"""More different values are no classes."""


class Balanced:
    """A source's samples, chosen by class. Samples whose class is unknown are never chosen; ``info`` counts them."""

    unit: Literal["sample"] = "sample"

    def __init__(self, source: AnySource, by: str = "y", samples: int | None = None) -> None:
        if source.unit != "sample":
            raise SourceError(f"only samples by number can be balanced; this source gives each {source.unit} whole")
        self._source: Source = source
        labels, known = _labels(source, by)
        self.classes, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes) > min(MAX_CLASSES, max(1, len(labels))):
            raise SourceError(f"tensor {by!r} has {len(self.classes)} different values; expected classes")
        self._members = [known[numbers == number] for number in range(len(self.classes))]
        self.chosen = samples or len(source)
        if self.chosen < len(self.classes):
            raise SourceError(f"{self.chosen} samples an epoch are too few for {len(self.classes)} classes")
        self.repeatable, self.draws = source.repeatable, draws(source)
        chosen_by = [str(value) for value in self.classes] + [len(members) for members in self._members]
        self.fingerprint = fingerprint(["balanced", source.fingerprint, by, self.chosen, chosen_by])
        self.info: dict[str, Any] = {**source.info, "balanced": by}
        if len(known) < len(source):
            self.info["unlabelled"] = len(source) - len(known)

    @property
    def inner(self) -> Source:
        """What it chooses from."""
        return self._source

    def __len__(self) -> int:
        return len(self._source)

    def choose(self, seed: int, epoch: int, shuffle: bool, samples: int | None = None) -> Indices:
        """Each class's next samples, where the epoch before ended."""
        counts = apportion(samples or self.chosen, [1.0] * len(self.classes))
        parts = []
        for number, (members, count) in enumerate(zip(self._members, counts, strict=True)):
            pass_of = partial(self._pass, number, part_seed(seed, f"class {number}"), shuffle)
            parts.append(walk(pass_of, len(members), epoch * count, count))
        return blend(parts, seed, epoch, shuffle)

    def _pass(self, number: int, seed: int, shuffle: bool, epoch: int) -> Indices:
        members = self._members[number]
        found: Indices = members[order_of(None, len(members), seed, epoch, shuffle)]
        return found

    @property
    def spec(self) -> SpecLike | None:
        """The source's."""
        return self._source.spec

    def key(self, index: int) -> str:
        """The source's name of it."""
        return self._source.key(index)

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """The source's sample."""
        return self._source.read(index, rng)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _labels(source: Source, by: str) -> tuple[Any, Indices]:
    """The classes that are known, and whose they are."""
    found = source.column(by) if isinstance(source, Labelled) else None
    if found is None:
        raise SourceError(
            f"the classes of tensor {by!r} are not known without making every sample; balanced sources are images, "
            "tars with .cls, arrays, torch datasets with `targets`, and sources with a method `column`"
        )
    values = np.ma.asarray(found)
    if values.ndim != 1 or values.dtype.kind not in "biuUS" or len(values) != len(source):
        raise SourceError(
            f"tensor {by!r} is {values.dtype}{list(values.shape)}; a class is one whole number or text per sample"
        )
    known = np.flatnonzero(~np.ma.getmaskarray(values)).astype(np.int64)
    if not len(known):
        raise SourceError(f"not one of {len(source)} samples has a readable class in {by!r}")
    return values.data[known], known
