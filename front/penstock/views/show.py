"""Samples as `show` and `stat` show them: the tensor that is the picture, the labels, and values in a few letters."""

from __future__ import annotations

import difflib
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import PenstockError
from penstock_common.printable import spaced
from penstock_common.wire.dtypes import BYTES
from penstock_common.wire.spec import Spec, TensorSpec

if TYPE_CHECKING:
    from penstock_common.stream.streams import Stream
    from penstock_consumer.replay.samples import Sample

MOST_LABELS = 3
LONGEST = 24
"""The letters of a byte string that are shown next to a picture."""


def class_names(stream: Stream) -> dict[str, list[str]]:
    """Return the class names of each tensor by number, as the stream's producer gave them."""
    given = stream.info.get("classes")
    if not isinstance(given, dict):
        return {}
    return {tensor: [spaced(str(name)) for name in names] for tensor, names in given.items() if isinstance(names, list)}


def picture_tensor(spec: Spec, wanted: str | None = None) -> TensorSpec:
    """Return the tensor to draw: the named one, else the first with dimensions or of bytes, else the first."""
    if wanted is not None:
        if wanted not in spec.names:
            raise PenstockError(f"no tensor {wanted!r}; the stream has {', '.join(spec.names)}")
        return spec[wanted]
    return next((tensor for tensor in spec if tensor.shape or tensor.dtype == BYTES), spec.tensors[0])


def label_tensors(spec: Spec, picture: TensorSpec) -> list[TensorSpec]:
    """Return the tensors shown next to the picture: those of one number or one byte string a sample."""
    return [tensor for tensor in spec if tensor.shape == () and tensor != picture][:MOST_LABELS]


def class_of(names: dict[str, list[str]], spec: Spec, wanted: str) -> tuple[str, int]:
    """Return the tensor and the number of a class. Raises PenstockError, which names the classes."""
    whole = [t.name for t in spec if t.shape == () and t.dtype.startswith(("int", "uint", "bool"))]
    for tensor, known in names.items():
        is_label = tensor in whole or (tensor in spec.names and spec[tensor].shape == (len(known),))
        if wanted in known and is_label:
            return tensor, known.index(wanted)
    labels = [name for name in names if name in whole] or whole
    if wanted.lstrip("-").isdecimal() and labels:
        return labels[0], int(wanted)
    every = [name for known in names.values() for name in known]
    near = difflib.get_close_matches(wanted, every, 1)
    if not every:
        what = f"the numbers of {labels[0]!r} are classes" if labels else "no tensor is one integer for each sample"
        raise PenstockError(f"no class {wanted!r}: the stream has no class names; {what}")
    there = ", ".join(every[:10]) + (", ..." if len(every) > 10 else "")
    raise PenstockError(
        f"no class {wanted!r}; classes there: {there}" + (f"; did you mean {near[0]!r}?" if near else "")
    )


def is_of(values: NDArray[Any], number: int) -> NDArray[np.bool_]:
    """Return a mask of the labels ``[n]`` that equal the class, or of the rows ``[n, classes]`` that have it."""
    found: NDArray[np.bool_] = values == number if values.ndim == 1 else values[:, number] > 0
    return found


def label_text(tensor: TensorSpec, value: Any, names: Sequence[str] = ()) -> str:
    """Return a label as text, such as ``y=cat``, ``score=0.25`` or ``text=hello``."""
    if isinstance(value, bytes):
        return f"{tensor.name}={text_of(value)[:LONGEST]}"
    number = np.asarray(value).item() if tensor.dtype != "bfloat16" else float(value)
    if isinstance(number, int) and 0 <= number < len(names):
        return f"{tensor.name}={names[number]}"
    return f"{tensor.name}={number:.4g}" if isinstance(number, float | complex) else f"{tensor.name}={number}"


def text_of(data: bytes) -> str:
    """Return bytes as printable text: decoded if they are UTF-8, else in hex."""
    try:
        text = data[:1000].decode("utf-8", errors="strict" if len(data) <= 1000 else "ignore")
    except UnicodeDecodeError:
        text = data[:200].hex(" ")
    return spaced(text)


@dataclass(slots=True)
class ShownSample:
    """A sample with the tensor that is drawn and its labels."""

    sample: Sample
    tensor: TensorSpec
    """The tensor that is drawn."""
    labels: list[str]
    note: str = ""
    """The changes to the values for drawing, known once it is drawn."""

    def picture(self, decode: Callable[[bytes], Any] | None) -> Any:
        """Return ``uint8 [h, w, 3]`` or None. ``decode`` decodes an encoded image."""
        from penstock.views.pictures import picture_of

        value = self.sample.tensors[self.tensor.name]
        if isinstance(value, bytes):
            rgb = None if decode is None or not value else decode(value)
            self.note = "" if rgb is None else f"{rgb.shape[0]}x{rgb.shape[1]}, {len(value)} bytes"
            return rgb
        picture = picture_of(value)
        self.note = "" if picture is None else picture.note
        return None if picture is None else picture.rgb

    def words(self) -> list[str]:
        """Return the lines in place of a picture: the value itself, or the text of a byte string."""
        value = self.sample.tensors[self.tensor.name]
        if isinstance(value, bytes):
            return textwrap.wrap(text_of(value), LONGEST) or ["(empty)"]
        if value.ndim == 0:
            return [label_text(self.tensor, value)]
        return [f"{self.tensor.name}: {list(value.shape)}"]

    def captions(self) -> list[str]:
        """Return the identity, then the labels, then the range of the drawn values."""
        return [
            str(self.sample.identity),
            *([" ".join(self.labels)] if self.labels else []),
            *filter(None, [self.note]),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the identity, the labels, and each tensor in short."""
        identity = self.sample.identity
        tensors = {name: _summary(value) for name, value in self.sample.tensors.items()}
        return {"id": str(identity), **identity._asdict(), "labels": self.labels, "tensors": tensors}


def image_decoder() -> Callable[[bytes], Any] | None:
    """Return the decoder of encoded images, or None without Pillow. They are then shown as bytes."""
    try:
        from penstock.views.png import decode
    except PenstockError:
        return None
    return decode


def _summary(value: Any) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"bytes": len(value), "text": text_of(value)[:LONGEST]}
    summary: dict[str, Any] = {"shape": list(value.shape)}
    if value.ndim == 0:
        number = value.item() if value.dtype.kind != "V" else float(value)
        summary["value"] = number if isinstance(number, int) or _is_finite(number) else str(number)
    elif value.size:
        real = np.abs(value) if value.dtype.kind == "c" else value.astype(np.float64)
        finite = real[np.isfinite(real)]
        summary |= {"min": float(finite.min()), "max": float(finite.max())} if len(finite) else {}
    return summary


def _is_finite(number: Any) -> bool:
    """Return True for a number that JSON can hold. It has neither NaN nor complex numbers."""
    return isinstance(number, float) and math.isfinite(number)


def shown_of(stream: Stream, samples: Sequence[Sample], wanted: str | None) -> list[ShownSample]:
    """Return each sample with its labels, by name if the stream has class names."""
    if stream.spec is None or not samples:
        return []
    names, tensor = class_names(stream), picture_tensor(stream.spec, wanted)
    labels = label_tensors(stream.spec, tensor)

    def lines(one: Sample) -> list[str]:
        return [label_text(label, one.tensors[label.name], names.get(label.name, ())) for label in labels]

    return [ShownSample(one, tensor, lines(one)) for one in samples]
