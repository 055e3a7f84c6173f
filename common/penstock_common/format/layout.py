"""What a header says of tensors of fixed size: it depends on nothing but their spec and the number of samples.

So it is made once, for writers, and recognised byte by byte, by readers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from json import dumps

from penstock_common.format.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES
from penstock_common.format.spec import TensorSpec


@dataclass(frozen=True, slots=True)
class Layout:
    """Of blocks of one size."""

    json: str
    """The header's ``tensors``, as `wire.encode` writes them."""
    text: bytes
    """The same, as it travels."""
    fields: tuple[tuple[bytes, int], ...]
    """Names of the payload fields, in order, and their bytes."""
    is_allowed: bool
    """Whether a reader takes memory for it."""


@lru_cache(maxsize=256)
def layout_of(tensors: tuple[TensorSpec, ...], count: int) -> Layout | None:
    """None where tensors are ragged: then each block has shapes of its own."""
    if any(tensor.is_ragged for tensor in tensors):
        return None
    said = {t.name: {"dtype": t.dtype, "shape": [count, *t.shape]} for t in tensors}
    text = dumps(said, separators=(",", ":"))
    fields = tuple((t.name.encode(), count * t.sample_bytes) for t in tensors)
    sizes = [size for _, size in fields]
    is_allowed = max(sizes) <= MAX_FIELD_BYTES and sum(sizes) <= MAX_ENTRY_BYTES
    return Layout(text, text.encode(), fields, is_allowed)
