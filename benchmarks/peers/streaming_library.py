"""mosaicml-streaming, imported without torchvision.

It wants that for its own image datasets, which nobody uses here; where pip finds torch built for the CPU and
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
    """The package ``streaming``."""
    for name in ("torchvision", "torchvision.transforms", *WANTED):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    for name, attribute in WANTED.items():
        setattr(sys.modules[name], attribute, type(attribute, (), {}))
    return importlib.import_module("streaming")
