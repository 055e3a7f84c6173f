"""``penstock.torch.dataset(loader)``: a loader as an IterableDataset of batches. Importing this imports PyTorch."""

from __future__ import annotations

from penstock_common.extras import needed

with needed("torch", "penstock.torch"):
    from penstock_consumer.adapters.torch import acknowledging, dataset
    from penstock_consumer.adapters.torch_device import prefetch_to_device

__all__ = ["acknowledging", "dataset", "prefetch_to_device"]
