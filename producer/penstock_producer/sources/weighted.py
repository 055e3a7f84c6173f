"""Several sources as one: each has its share of every epoch, and is walked through from epoch to epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from penstock_common.errors import SourceError
from penstock_common.format.spec import SpecLike
from penstock_producer.sources.choice import Choosing, Indices, apportion, blend, order_of, part_seed, walk
from penstock_producer.sources.files import fingerprint
from penstock_producer.sources.protocol import AnySource, Sample, Source, draws


class Weighted:
    """The samples of all parts, one part's behind the other's; an epoch is a choice of them."""

    unit: Literal["sample"] = "sample"

    def __init__(self, parts: Sequence[AnySource], weights: Sequence[float], samples: int | None = None) -> None:
        self.parts: list[Source] = [_sampled(part, number) for number, part in enumerate(parts)]
        self._ends = np.cumsum([len(part) for part in self.parts])
        lengths = [part.chosen if isinstance(part, Choosing) else len(part) for part in self.parts]
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
        """Each part's next samples, where the epoch before ended; all in one order."""
        counts = self._counts if samples is None else apportion(samples, self._weights)
        chosen = []
        for number, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            own, start = part_seed(seed, f"part {number}"), int(self._ends[number]) - len(part)
            if isinstance(part, Choosing):
                chosen.append(start + part.choose(own, epoch, shuffle, count))
            else:
                pass_of = partial(_pass, len(part), own, shuffle)
                chosen.append(start + walk(pass_of, len(part), epoch * count, count))
        return blend(chosen, seed, epoch, shuffle)

    def _at(self, index: int) -> tuple[int, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, index - (int(self._ends[number - 1]) if number else 0)

    @cached_property
    def spec(self) -> SpecLike | None:
        """What the parts' specs have in common; a size that differs is free. None where a part declares none."""
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
        """The part's number and its name of the sample, like ``1/cat/0012.jpg``."""
        number, own = self._at(index)
        return f"{number}/{self.parts[number].key(own)}"

    def read(self, index: int, rng: np.random.Generator) -> Sample:
        """The part's sample."""
        number, own = self._at(index)
        return self.parts[number].read(own, rng)

    def close(self) -> None:
        """Close all parts."""
        for part in self.parts:
            part.close()


def _pass(length: int, seed: int, shuffle: bool, number: int) -> Indices:
    return order_of(None, length, seed, number, shuffle)


def _sampled(part: AnySource, number: int) -> Source:
    if part.unit != "sample":
        raise SourceError(f"part {number} gives each {part.unit} whole; only sources of samples by number are mixed")
    return part


def _require_same_classes(parts: Sequence[Source]) -> None:
    """Class 0 of one folder must not be another animal than class 0 of the next."""
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
    """Without what is long, or stands above."""
    return {name: value for name, value in info.items() if name not in ("files", "classes")}
