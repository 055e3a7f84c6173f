"""One part of a source, by a hash of each sample's name: the same samples are always on the same side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.choice import side_of
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.protocol import AnySource, BatchSource, Labelled, Sample, Source, draws


class Split:
    """The samples (or batches) of one part. Files that are added or taken away move no other."""

    unit: Literal["sample"] = "sample"

    def __init__(self, source: Source | BatchSource, parts: Sequence[tuple[str, float]], part: str, seed: int) -> None:
        self._source = source
        fractions = [fraction for _, fraction in parts]
        wanted = [name for name, _ in parts].index(part)
        sides = (side_of(source.key(index), fractions, seed) for index in range(len(source)))
        self._kept = np.flatnonzero(np.fromiter(sides, np.int64, len(source)) == wanted)
        if not len(self._kept):
            raise SourceError(f"none of the {len(source)} items falls into {part!r}; give it a larger fraction")
        self.repeatable, self.draws = source.repeatable, draws(source)
        self.fingerprint = fingerprint(["split", source.fingerprint, [list(named) for named in parts], part, seed])
        self.info: dict[str, Any] = {**source.info, "split": part}
        if "files" in source.info and len(source.info["files"]) == len(source):
            self.info["files"] = [source.info["files"][index] for index in self._kept]

    @property
    def inner(self) -> Source | BatchSource:
        """What it is a part of."""
        return self._source

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def spec(self) -> SpecLike | None:
        """The whole source's, so that all parts have the same."""
        return self._source.spec

    def key(self, index: int) -> str:
        """The source's name of it."""
        return self._source.key(int(self._kept[index]))

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """The source's item."""
        return self._source.read(int(self._kept[index]), rng)

    def column(self, name: str) -> Any:
        """The source's, of this part."""
        values = self._source.column(name) if isinstance(self._source, Labelled) else None
        return None if values is None else values[self._kept]

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class BatchSplit(Split):
    """The same of a source of batches, each of which is on one side whole."""

    unit: Literal["batch"] = "batch"  # type: ignore[assignment]

    def size(self, item: int) -> int:
        """Samples in this batch."""
        assert self._source.unit == "batch"
        return self._source.size(int(self._kept[item]))


def split(source: AnySource, parts: Sequence[tuple[str, float]], part: str, seed: int) -> Split:
    """The part of a source; raises SourceError for one whose items have no names that last."""
    if source.unit == "item":
        raise SourceError(
            "an iterable cannot be split: its items are known by their place alone; split where they come from"
        )
    return (BatchSplit if source.unit == "batch" else Split)(source, parts, part, seed)
