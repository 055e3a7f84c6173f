"""``penstock.torch.dataset(loader)``: a loader as an IterableDataset of batches. Importing this imports PyTorch."""

from __future__ import annotations

try:
    from penstock_consumer.adapters.torch import acknowledging, dataset
    from penstock_consumer.adapters.torch_device import prefetch_to_device
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError('PyTorch is not installed here; pip install "penstock[torch]"', name=error.name) from None

__all__ = ["acknowledging", "dataset", "prefetch_to_device"]
