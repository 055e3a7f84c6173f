"""``penstock.torch.dataset(loader)``: a loader as an IterableDataset of batches. Importing this imports PyTorch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock_common.extras import needed
from penstock_common.hints import no_such_name

with needed("torch", "penstock.torch"):
    from penstock_consumer.adapters.torch import acknowledging, dataset
    from penstock_consumer.adapters.torch_device import prefetch_to_device

__all__ = ["acknowledging", "dataset", "prefetch_to_device"]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name, __all__, sys._getframe(1))
