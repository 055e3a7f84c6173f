"""Penstock feeds training jobs through Redis Streams: ``penstock.Writer`` on one side, ``penstock.Loader`` on another.

Public names only, each loaded when first used: importing the package loads nothing else.
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
    from penstock_common.errors import PenstockError
    from penstock_common.stream.servers.embedded import EmbeddedServer
    from penstock_consumer.read.loader import Loader
    from penstock_consumer.read.mixture import mix
    from penstock_consumer.replay.files import Files
    from penstock_consumer.replay.replay import Replay
    from penstock_producer.notebook import produce
    from penstock_producer.write.writer import Writer

    __version__: str

__all__ = ["EmbeddedServer", "Files", "Loader", "PenstockError", "Replay", "Writer", "__version__", "mix", "produce"]

_HOMES = {
    "EmbeddedServer": "penstock_common.stream.servers.embedded",
    "Files": "penstock_consumer.replay.files",
    "Loader": "penstock_consumer.read.loader",
    "PenstockError": "penstock_common.errors",
    "Replay": "penstock_consumer.replay.replay",
    "Writer": "penstock_producer.write.writer",
    "mix": "penstock_consumer.read.mixture",
    "produce": "penstock_producer.notebook",
}

_ADAPTERS = ("jax", "keras", "tensorflow", "torch")
"""``penstock.tensorflow.dataset`` without an import of its own; who does not use it has no framework loaded."""


def __getattr__(name: str) -> object:
    if name in _ADAPTERS:
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
    """Import a module without garbage collection: beside a framework one takes 0.1 s, and finds nothing here."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if was_enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
