"""The header's part that describes fixed-size tensors, which depends on spec and number of samples alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from json import dumps

from penstock_common.format.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES
from penstock_common.format.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """The header's ``tensors`` of blocks of one size: made once by writers, recognised byte for byte by readers."""

    json: str
    """The header's ``tensors``, as `codec.encode` writes them."""
    text: bytes
    """The same as UTF-8 bytes."""
    fields: tuple[tuple[bytes, int], ...]
    """(name, bytes) of each payload field, in order."""
    is_allowed: bool
    """Whether the sizes are within the limits of the wire format."""


@lru_cache(maxsize=256)
def layout_of(tensors: tuple[TensorSpec, ...], count: int) -> Layout | None:
    """Return the layout of blocks of ``count`` samples, or None where a tensor is ragged."""
    if any(tensor.is_ragged for tensor in tensors):
        return None
    said = {t.name: {"dtype": t.dtype, "shape": [count, *t.shape]} for t in tensors}
    text = dumps(said, separators=(",", ":"))
    fields = tuple((t.name.encode(), count * t.sample_bytes) for t in tensors)
    sizes = [size for _, size in fields]
    is_allowed = max(sizes) <= MAX_FIELD_BYTES and sum(sizes) <= MAX_ENTRY_BYTES
    return Layout(text, text.encode(), fields, is_allowed)
