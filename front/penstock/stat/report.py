"""A summary as JSON has it, and the lines to paste into a training script. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.stat.findings import findings
from penstock.stat.summary import TensorSummary

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
PIXEL = 255.0


def as_json(summary: TensorSummary, names: Sequence[str] = ()) -> dict[str, Any]:
    """Everything, with null where there is no number (JSON has neither NaN nor infinities)."""
    whole, bounds, spec = summary.whole(), summary.bounds(), summary.spec
    low, high = bounds if bounds is not None else (None, None)
    edges, counts = summary.histogram()
    classes = summary.classes()
    known = bool(whole.count[0])
    return {
        "tensor": spec.name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "shapes_seen": None if summary.least is None or summary.greatest is None
        else {"least": summary.least.tolist(), "greatest": summary.greatest.tolist()},
        "of": summary.of,
        "samples": summary.samples,
        "numbers": int(whole.count[0] + whole.nan[0] + whole.infinite[0]),
        "bytes": summary.nbytes,
        "min": _number(low),
        "max": _number(high),
        "mean": _number(float(whole.mean[0])) if known else None,
        "std": _number(float(whole.std[0])) if known else None,
        "nan": int(whole.nan[0]),
        "infinite": int(whole.infinite[0]),
        "quantiles": {f"{q:g}": _number(v) for q, v in zip(QUANTILES, summary.quantiles(QUANTILES), strict=True)},
        "quantiles_of": len(summary.draw.values) if not summary.is_exact else int(whole.count[0]),
        "histogram": {"edges": edges, "counts": [round(count) for count in counts]},
        "classes": None if classes is None
        else [{"class": number, "name": _name(number, names), "samples": count} for number, count in classes.items()],
        "channels": None if summary.axis is None or not known
        else {"axis": summary.axis, "mean": _numbers(summary.moments.mean), "std": _numbers(summary.moments.std)},
        "constant_samples": summary.constant_samples,
        "paste": paste_lines(summary),
        "findings": findings(summary, names),
    }  # fmt: skip


def paste_lines(summary: TensorSummary) -> dict[str, str]:
    """Framework -> one line of Python that normalises the tensor to mean 0 and deviation 1; empty where none would."""
    spec, moments = summary.spec, summary.moments if summary.axis is not None else summary.whole()
    if spec.shape == () or summary.of != "value" or spec.dtype == "bool":
        return {}
    std = moments.std
    if not all(math.isfinite(float(one)) and one > 0 for one in std):
        return {}
    axis = {None: None, -1: -1, 0: 1}[summary.axis]  # with the batch in front
    mean = [float(one) for one in moments.mean]
    variance = [float(one) ** 2 for one in std]
    shown = (_list(mean), _list(variance)) if axis is not None else (_short(mean[0]), _short(variance[0]))
    lines = {"keras": f"keras.layers.Normalization(axis={axis}, mean={shown[0]}, variance={shown[1]})"}
    if summary.axis is not None and len(spec.shape) == 3:
        scale, why = (PIXEL, "  # after ToTensor(), which divides by 255") if spec.dtype == "uint8" else (1.0, "")
        means, stds = _list([one / scale for one in mean]), _list([float(one) / scale for one in std])
        lines["torchvision"] = f"torchvision.transforms.Normalize(mean={means}, std={stds}){why}"
    return lines


def _name(number: int, names: Sequence[str]) -> str | None:
    return names[number] if 0 <= number < len(names) else None


def _short(number: float) -> str:
    return f"{number:.6g}"


def _list(numbers: list[float]) -> str:
    return f"[{', '.join(map(_short, numbers))}]"


def _number(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) or math.isfinite(value) else None


def _numbers(values: Any) -> list[float | None]:
    return [_number(float(value)) for value in values]
