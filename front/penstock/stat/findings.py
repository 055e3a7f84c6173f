"""What someone who knows training data would point at, from the summaries alone. Pure; one sentence each.

The thresholds are rules of thumb: networks are initialised for inputs of mean 0 and deviation 1, and classes that
differ tenfold in number are where plain accuracy begins to mislead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.stat.summary import TensorSummary

LARGE = 10.0
"""Mean or deviation of floating-point inputs above which they are called unnormalised."""
IMBALANCE = 10.0
"""The largest class has so many times the samples of the smallest."""
ENOUGH_EACH = 20
"""Samples for each class name, from which on one that was never drawn is worth a word."""


def findings(summary: TensorSummary, names: Sequence[str] = ()) -> list[str]:
    """``names`` are the class names of this tensor, if the stream has some."""
    told = [*_lost(summary), *_constant(summary), *_range(summary)]
    counts = summary.classes()
    return [*told, *_classes(summary, counts, names)] if counts else told


def _lost(summary: TensorSummary) -> list[str]:
    nan, infinite = int(summary.moments.nan.sum()), int(summary.moments.infinite.sum())
    if not nan + infinite:
        return []
    what = " and ".join(f"{count} {kind}" for count, kind in ((nan, "NaN"), (infinite, "infinite")) if count)
    return [f"{summary.spec.name}: {what} among its numbers, first in sample {summary.nan_first}: the loss becomes NaN"]


def _constant(summary: TensorSummary) -> list[str]:
    bounds, name = summary.bounds(), summary.spec.name
    if bounds is None or summary.samples < 2 or summary.of == "length":
        return []
    if bounds[0] == bounds[1]:
        return [f"{name}: every {summary.of} is {bounds[0]:g}: there is nothing to learn from it"]
    told = []
    flat = [channel for channel, std in enumerate(summary.moments.std) if std == 0 and summary.axis is not None]
    if flat:
        told.append(f"{name}: channel {', '.join(map(str, flat))} has the same value everywhere")
    if summary.constant_samples:
        share = summary.constant_samples / summary.samples
        told.append(
            f"{name}: {summary.constant_samples} of {summary.samples} samples ({share:.1%}) have one value throughout "
            f"(empty?), the first is {summary.constant_first}"
        )
    return told


def _range(summary: TensorSummary) -> list[str]:
    spec, whole = summary.spec, summary.whole()
    if spec.shape == () or "float" not in spec.dtype or not whole.count[0]:
        return []
    mean, std = float(whole.mean[0]), float(whole.std[0])
    if abs(mean) <= LARGE and std <= LARGE:
        return []
    is_pixels = whole.low[0] >= 0 and 1 < whole.high[0] <= 255
    advice = "pixels from 0 to 255: divide by 255" if is_pixels else "normalise it, e.g. by the line to paste"
    return [f"{spec.name}: mean {mean:.4g} and deviation {std:.4g} are not normalised ({advice})"]


def _classes(summary: TensorSummary, counts: Mapping[int, int], names: Sequence[str]) -> list[str]:
    def named(number: int) -> str:
        return repr(names[number]) if 0 <= number < len(names) else str(number)

    spec, told = summary.spec, []
    if names and (strange := [number for number in counts if not 0 <= number < len(names)]):
        told.append(f"{spec.name}: {strange[0]} is no class: the stream has {len(names)} class names")
    if names and summary.samples >= ENOUGH_EACH * len(names):
        absent = [names[number] for number in range(len(names)) if number not in counts]
        if absent:
            told.append(f"{spec.name}: no sample of class {', '.join(map(repr, absent[:5]))} was seen")
    if 2 <= len(counts) <= max(len(names), summary.samples // ENOUGH_EACH):
        most, least = max(counts, key=lambda n: counts[n]), min(counts, key=lambda n: counts[n])
        if counts[most] >= IMBALANCE * counts[least]:
            told.append(
                f"{spec.name}: class {named(most)} has {counts[most]} samples, {named(least)} {counts[least]}: "
                "balance them (--balance), or weigh the loss"
            )
    return told
