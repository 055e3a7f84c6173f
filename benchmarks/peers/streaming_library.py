"""mosaicml-streaming, imported without torchvision.

It imports torchvision for its own image datasets, which are not used here. If pip finds torch built for the CPU and
torchvision built for CUDA, that import is an error.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

WANTED = {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}


def load() -> Any:
    """Return the package ``streaming``."""
    for name in ("torchvision", "torchvision.transforms", *WANTED):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    for name, attribute in WANTED.items():
        setattr(sys.modules[name], attribute, type(attribute, (), {}))
    return importlib.import_module("streaming")
