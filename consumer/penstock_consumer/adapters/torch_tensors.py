"""Batches as PyTorch tensors without a copy. Which batch is given, and what is acknowledged, is ``torch``'s."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from penstock_common.hints import batch_attribute, is_unpacking, not_tuples, unknown_tensor
from penstock_common.wire.dtypes import BFLOAT16
from penstock_common.wire.ragged import Ragged

RaggedAs = Literal["list", "padded"]


class NamedTensors(dict[str, Any]):
    """A batch as a dict of torch tensors, which says what to write where it is mistaken for a tuple or a tensor."""

    def __iter__(self) -> Iterator[str]:
        """Tensor names. Raises TypeError for ``x, y = batch``, which would give two names instead of two tensors."""
        if is_unpacking(sys._getframe(1)):
            raise TypeError(not_tuples(self.keys(), "penstock.torch.dataset(loader, select=({}))"))
        return super().__iter__()

    def __missing__(self, name: object) -> NoReturn:
        raise KeyError(unknown_tensor(name, self.keys()))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(batch_attribute(name, self.keys(), "torch"))


def tensor_of(array: NDArray[Any]) -> torch.Tensor:
    """The array's own memory as a tensor; bfloat16, which numpy does not know, through 16-bit integers."""
    if not array.flags.writeable:  # PyTorch has no read-only tensors; only what never was a batch's own array is
        array = array.copy()
    if array.dtype.name == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def value_of(value: Any, ragged: RaggedAs) -> Any:
    """One entry of a batch: a tensor ``[n, *shape]``; of byte strings a list of bytes.

    Ragged: a list of n tensors, views of one flat one, or with 'padded' one tensor filled up with zeros.
    """
    if not isinstance(value, Ragged):
        return tensor_of(value)
    if value.is_bytes:
        return list(value)
    if ragged == "padded":
        return tensor_of(value.padded())
    flat = tensor_of(value.values)
    sizes = np.prod(value.shapes, axis=1).tolist()
    return [part.view(shape) for part, shape in zip(flat.split(sizes), value.shapes.tolist(), strict=True)]


def mapped(element: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return the same element with every tensor changed."""
    if isinstance(element, torch.Tensor):
        return change(element)
    if isinstance(element, dict):
        return type(element)({name: mapped(value, change) for name, value in element.items()})
    if isinstance(element, list | tuple):
        return type(element)(mapped(value, change) for value in element)
    return element


def nbytes_of(element: Any) -> int:
    """Bytes of all its tensors."""
    sizes: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    mapped(element, count)
    return sum(sizes)
