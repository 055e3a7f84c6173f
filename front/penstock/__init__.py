"""Penstock feeds training jobs through Redis Streams: ``penstock.Writer`` on one side, ``penstock.Loader`` on another.

It has public names only. Each is loaded at its first use, and importing the package loads nothing else.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

try:
    import fcntl  # noqa: F401 - Windows has none, and what needs it is imported later
except ModuleNotFoundError:
    raise ImportError("Penstock runs on Linux and macOS; on Windows, use it in WSL 2 or in a container") from None

if TYPE_CHECKING:
    from penstock import errors as errors
    from penstock_common.errors import PenstockError
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_common.tuning import Canonical, Tuning
    from penstock_common.wire.ragged import Ragged
    from penstock_consumer.read.loader import Loader
    from penstock_consumer.read.mixture import mix
    from penstock_consumer.read.view import View
    from penstock_consumer.replay.files import Files
    from penstock_consumer.replay.replay import Replay
    from penstock_consumer.stages.batch import Batch
    from penstock_consumer.stages.stats import Stats
    from penstock_producer.notebook import produce
    from penstock_producer.write.writer import Writer

    __version__: str

__all__ = [
    "Batch",
    "Canonical",
    "EmbeddedServer",
    "Files",
    "Loader",
    "PenstockError",
    "Ragged",
    "Replay",
    "Stats",
    "Tuning",
    "View",
    "Writer",
    "__version__",
    "errors",
    "mix",
    "produce",
]

_HOMES = {
    "Batch": "penstock_consumer.stages.batch",
    "Canonical": "penstock_common.tuning",
    "EmbeddedServer": "penstock_common.stream.servers.embedded",
    "Files": "penstock_consumer.replay.files",
    "Loader": "penstock_consumer.read.loader",
    "PenstockError": "penstock_common.errors",
    "Ragged": "penstock_common.wire.ragged",
    "Replay": "penstock_consumer.replay.replay",
    "Stats": "penstock_consumer.stages.stats",
    "Tuning": "penstock_common.tuning",
    "View": "penstock_consumer.read.view",
    "Writer": "penstock_producer.write.writer",
    "mix": "penstock_consumer.read.mixture",
    "produce": "penstock_producer.notebook",
}

_MODULES = ("errors", "jax", "keras", "tensorflow", "torch")
"""Modules that need no import of their own, such as ``penstock.tensorflow.dataset``. They load a framework at their
first use.
"""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    if name == "__version__":
        value: object = import_module("importlib.metadata").version("penstock")
    elif name in _HOMES:
        value = getattr(_imported(_HOMES[name]), name)
    else:
        from penstock_common.hints import no_such_name

        raise no_such_name("penstock", name, __all__, sys._getframe(1))
    globals()[name] = value
    return value


def _imported(module: str) -> ModuleType:
    """Import a module without garbage collection, which takes 0.1 s if a framework is loaded, and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
