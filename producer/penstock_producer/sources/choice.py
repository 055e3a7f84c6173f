"""Sources that choose among the samples of other sources: a split, balanced classes, several sources by weight.

- A split assigns each sample to a part by a hash of its name, so a sample never changes its part.
- A balanced source takes every class equally often in each epoch. It repeats small classes, and takes large ones in
  turns over the epochs.
- Each of several weighted sources has its share of every epoch and is passed through from epoch to epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_common.wire.spec import SpecLike
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.order import (
    ChoosingSource,
    Indices,
    apportion,
    blend,
    part_at,
    part_seed,
    walk,
)
from penstock_producer.sources.protocol import AnySource, BatchSource, Labelled, Sample, Source, SourceAround, draws


class SplitSource(SourceAround):
    """The samples of one part of a split. A file that is added or removed changes the part of no other file.

    Its spec is that of the whole source, so that all parts have the same.
    """

    def __init__(self, source: Source | BatchSource, parts: Sequence[tuple[str, float]], part: str, seed: int) -> None:
        super().__init__(source)
        fractions = [fraction for _, fraction in parts]
        wanted = [name for name, _ in parts].index(part)
        sides = (side_of(source.key(index), fractions, seed) for index in range(len(source)))
        self._kept = np.flatnonzero(np.fromiter(sides, np.int64, len(source)) == wanted)
        if not len(self._kept):
            raise SourceError(f"none of the {len(source)} items falls into {part!r}; give it a larger fraction")
        self.fingerprint = fingerprint(["split", source.fingerprint, [list(named) for named in parts], part, seed])
        self.info = {**source.info, "split": part}
        if "files" in source.info and len(source.info["files"]) == len(source):
            self.info["files"] = [source.info["files"][index] for index in self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def key(self, index: int) -> str:
        """Return the source's name of a sample."""
        return self.inner.key(int(self._kept[index]))

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return one item of the source."""
        return self.inner.read(int(self._kept[index]), rng)

    def column(self, name: str) -> Any:
        """Return the source's column, with the rows of this part only."""
        values = self.inner.column(name) if isinstance(self.inner, Labelled) else None
        return None if values is None else values[self._kept]


class BatchSplitSource(SplitSource):
    """The batches of one part of a split. A batch belongs to one part as a whole."""

    unit: Literal["batch"] = "batch"  # type: ignore[assignment]

    def size(self, item: int) -> int:
        """Return the number of samples in a batch."""
        assert self.inner.unit == "batch"
        return self.inner.size(int(self._kept[item]))


def split(source: AnySource, parts: Sequence[tuple[str, float]], part: str, seed: int) -> SplitSource:
    """Return one part of a source.

    Args:
        source: a source of samples or of batches.
        parts: name and fraction of every part, in order.
        part: the name of the part that is wanted.
        seed: the seed of the hash.

    Raises:
        SourceError: the source gives items in an order of its own, or no sample falls into the part.
    """
    if source.unit == "item":
        raise SourceError(
            "an iterable cannot be split: its items have no names that last; split the data that it reads"
        )
    return (BatchSplitSource if source.unit == "batch" else SplitSource)(source, parts, part, seed)


def side_of(key: str, fractions: Sequence[float], seed: int) -> int:
    """Return the number of the part that a sample belongs to, by its name alone.

    A 64-bit hash of name and seed is compared with the sums of the fractions. Other samples make no difference.

    Args:
        key: the sample's name.
        fractions: the fractions of the parts, in order.
        seed: the seed of the hash.

    Returns:
        The part's position among ``fractions``, or ``len(fractions)`` for a sample that is in no part.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8, key=b"split %d" % seed).digest()
    at, end = int.from_bytes(digest, "big") / 2**64, 0.0
    for part, fraction in enumerate(fractions):
        end += fraction
        if at < end or end > 1 - 1e-9:  # 0.7 + 0.2 + 0.1 is a little less than 1
            return part
    return len(fractions)


MAX_CLASSES = 100_000
"""The most classes. A tensor with more different values does not hold classes."""


class BalancedSource(SourceAround):
    """A choice of samples that takes every class equally often in each epoch.

    Samples of an unknown class are never chosen. ``info`` counts them.
    """

    def __init__(self, source: AnySource, by: str = "y", samples: int | None = None) -> None:
        if source.unit != "sample":
            raise SourceError(f"only samples by number can be balanced; this source gives each {source.unit} whole")
        super().__init__(source)
        labels, known = _labels(source, by)
        self.classes, numbers = np.unique(labels, return_inverse=True)
        if len(self.classes) > min(MAX_CLASSES, max(1, len(labels))):
            raise SourceError(f"tensor {by!r} has {len(self.classes)} different values; expected classes")
        self._members = [known[numbers == number] for number in range(len(self.classes))]
        self.chosen = samples or len(source)
        if self.chosen < len(self.classes):
            raise SourceError(f"{self.chosen} samples an epoch are too few for {len(self.classes)} classes")
        chosen_by = [str(value) for value in self.classes] + [len(members) for members in self._members]
        self.fingerprint = fingerprint(["balanced", source.fingerprint, by, self.chosen, chosen_by])
        self.info = {**source.info, "balanced": by}
        if len(known) < len(source):
            self.info["unlabelled"] = len(source) - len(known)

    def choose(self, seed: int, epoch: int, shuffle: bool, samples: int | None = None) -> Indices:
        """Return the next samples of each class, beginning where the epoch before ended."""
        counts = apportion(samples or self.chosen, [1.0] * len(self.classes))
        parts = []
        for number, (members, count) in enumerate(zip(self._members, counts, strict=True)):
            own = part_seed(seed, f"class {number}")
            parts.append(members[walk(len(members), epoch * count, count, own, shuffle)])
        return blend(parts, seed, epoch, shuffle)


def _labels(source: Source, by: str) -> tuple[Any, Indices]:
    """Return the classes that are known, and the indices of their samples."""
    found = source.column(by) if isinstance(source, Labelled) else None
    if found is None and source.spec is not None and by not in source.spec:
        raise SourceError(
            f"there is no tensor {by!r} to balance by: images have one from their class folders (photos/cat/1.png), "
            "--labels or --label, and tars from .cls"
        )
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


class WeightedSource:
    """Several sources as one. The indices of one part follow those of the part before; an epoch is a choice of them."""

    unit: Literal["sample"] = "sample"

    def __init__(self, parts: Sequence[AnySource], weights: Sequence[float], samples: int | None = None) -> None:
        self.parts: list[Source] = [_sampled(part, number) for number, part in enumerate(parts)]
        self._ends = np.cumsum([len(part) for part in self.parts])
        lengths = [part.chosen if isinstance(part, ChoosingSource) else len(part) for part in self.parts]
        self.chosen, self._weights = samples or sum(lengths), list(weights)
        self._counts = apportion(self.chosen, weights)
        if 0 in self._counts:
            number = self._counts.index(0)
            raise SourceError(
                f"part {number} has a share of {weights[number] / sum(weights):.2g} of {self.chosen} samples: none; "
                "give it a larger weight, or the epoch more samples"
            )
        _require_same_classes(self.parts)
        self.repeatable = all(part.repeatable for part in self.parts)
        self.draws = any(map(draws, self.parts))
        self.fingerprint = fingerprint(
            ["weighted", [part.fingerprint for part in self.parts], self._counts, self.chosen]
        )
        shares = [{**part.info, "samples": count} for part, count in zip(self.parts, self._counts, strict=True)]
        self.info: dict[str, Any] = {"source": "weighted", "parts": [_short(info) for info in shares]}
        if classes := self.parts[0].info.get("classes"):
            self.info["classes"] = classes

    def __len__(self) -> int:
        return int(self._ends[-1])

    def choose(self, seed: int, epoch: int, shuffle: bool, samples: int | None = None) -> Indices:
        """Return the next samples of each part, beginning where the epoch before ended, in one order."""
        counts = self._counts if samples is None else apportion(samples, self._weights)
        chosen = []
        for number, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            own, start = part_seed(seed, f"part {number}"), int(self._ends[number]) - len(part)
            if isinstance(part, ChoosingSource):
                chosen.append(start + part.choose(own, epoch, shuffle, count))
            else:
                chosen.append(start + walk(len(part), epoch * count, count, own, shuffle))
        return blend(chosen, seed, epoch, shuffle)

    @cached_property
    def spec(self) -> SpecLike | None:
        """Return the spec that all parts have in common, or None where a part declares none.

        A size that differs between the parts is None.
        """
        specs = [part.spec for part in self.parts]
        first = specs[0]
        if first is None or any(spec is None for spec in specs):
            return None
        common = dict(first)
        for number, spec in enumerate(specs[1:], 1):
            assert spec is not None
            common = {name: _common(name, common, dict(spec), number) for name in {**common, **spec}}
        return common

    def key(self, index: int) -> str:
        """Return the part's number and its name of the sample, such as ``1/cat/0012.jpg``."""
        number, own = part_at(self._ends, index)
        return f"{number}/{self.parts[number].key(own)}"

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """Return one sample of its part."""
        number, own = part_at(self._ends, index)
        return self.parts[number].read(own, rng)

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()


def _sampled(part: AnySource, number: int) -> Source:
    if part.unit != "sample":
        raise SourceError(f"part {number} gives each {part.unit} whole; only sources of samples by number are mixed")
    return part


def _require_same_classes(parts: Sequence[Source]) -> None:
    """Raise SourceError where class 0 of one part is another class than class 0 of the next."""
    named = [(number, part.info["classes"]) for number, part in enumerate(parts) if part.info.get("classes")]
    for number, classes in named[1:]:
        first, known = named[0]
        differing = next((name for name in classes if name in known and classes[name] != known[name]), None)
        if differing:
            raise SourceError(
                f"parts {first} and {number} have other classes in {differing!r}: {_some(known[differing])} and "
                f"{_some(classes[differing])}; give both the same (--classes)"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _common(name: str, one: dict[str, Any], other: dict[str, Any], number: int) -> tuple[str, tuple[int | None, ...]]:
    if name not in one or name not in other:
        raise SourceError(
            f"tensor {name!r} is not in all parts: part {number} has {', '.join(other)}, others {', '.join(one)}"
        )
    (dtype, shape), (its_dtype, its_shape) = one[name], other[name]
    if dtype != its_dtype or len(shape) != len(its_shape):
        raise SourceError(
            f"tensor {name!r} is {its_dtype}{list(its_shape)} in part {number} and {dtype}{list(shape)} in others; "
            "a transform can make them alike"
        )
    return dtype, tuple(a if a == b else None for a, b in zip(shape, its_shape, strict=True))


def _short(info: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is long, and what the info of the whole source says."""
    return {name: value for name, value in info.items() if name not in ("files", "classes")}
