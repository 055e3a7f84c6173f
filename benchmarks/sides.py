"""The transports: every system in every variant that matters, and why one cannot carry something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

INLINE, SEGMENTS, PLAIN = "Penstock inline", "Penstock segments", "plain redis-py + hiredis"
VIEWS = "Penstock segments, views"
TFDATA = "tf.data service"
TORCH = "torch DataLoader"
IPC = ("tensorcom PUSH/PULL ipc", "tensorcom PUB/SUB ipc")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the fast lane itself


@dataclass(frozen=True)
class Side:
    """One variant of one transport."""

    name: str
    module: str
    """The module in ``benchmarks.transports``."""
    environment: str
    """The environment in ``benchmarks.peers.environments``."""
    mode: str = ""
    has_server: bool = False
    """Whether Redis is started for each round."""
    is_stock: bool = False
    """Whether that server's memory allocator has the settings of its distribution, not Penstock's."""
    has_writer: bool = True
    """Whether a separate process writes, or serves. Otherwise readers have workers."""
    package: str = ""
    """The package whose version is printed."""
    path: str = ""
    """The folders to import from first, as PYTHONPATH: another commit's packages."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Case -> the reason why it cannot carry that."""

    @property
    def is_ours(self) -> bool:
        """Return whether it is Penstock's."""
        return self.module == "ours"


OURS = (
    Side(INLINE, "ours", "penstock", "inline", has_server=True),
    Side(SEGMENTS, "ours", "penstock", "segments", has_server=True),
)
IN_PLACE = Side(VIEWS, "ours", "penstock", "segments views", has_server=True)
"""A block is a batch, and is trained on in its place."""
TOGETHER = Side("Penstock inline, 20 ms", "ours", "penstock", "inline 20 ms", has_server=True)
"""The acknowledgements of 20 ms are sent together. It runs where `--side` has this name."""
BASELINE = Side(PLAIN, "plain_redis", "penstock", has_server=True)
NAIVE = Side("naive redis-py loop", "naive_redis", "penstock", has_server=True)
"""It is a side of `benchmarks.blocks`."""
ONE_READER = (
    *OURS,
    IN_PLACE,
    BASELINE,
    Side("Redis, COUNT 1, NOACK, pickle", "noack", "penstock", has_server=True),
    *(
        Side(f"tensorcom {name} {carrier}", "tensorcom_sockets", "tensorcom", f"{mode} {carrier}", package="tensorcom")
        for mode, name in (("pushpull", "PUSH/PULL"), ("pubsub", "PUB/SUB"))
        for carrier in ("tcp", "ipc")
    ),
    Side(TFDATA, "tfdata_service", "tfdata", "plain", package="tensorflow"),
    Side(TORCH, "torch_loader", "torch", has_writer=False, package="torch"),
    Side("mosaicml-streaming", "mosaic", "mosaic", has_writer=False, package="mosaicml-streaming"),
)
"""The sides of the transport's comparison."""
BROADCAST = (
    *OURS,
    IN_PLACE,
    Side("tensorcom PUB/SUB ipc", "tensorcom_sockets", "tensorcom", "pubsub ipc", package="tensorcom"),
    Side("tf.data service, cross-trainer cache", "tfdata_service", "tfdata", "caching", package="tensorflow"),
    Side("torch DataLoaders", "torch_loader", "torch", has_writer=False, package="torch"),
)
"""The sides that give everything to each of several trainers."""


def ours(parts: Sequence[str]) -> list[Side]:
    """Return Penstock's own sides whose name contains one of these, or all if there is none.

    Views are included only by name.
    """
    every = here((*OURS, IN_PLACE) if any("views" in part for part in parts) else OURS)
    return [side for side in every if not parts or any(part in side.name for part in parts)]


def here(sides: tuple[Side, ...]) -> list[Side]:
    """Return the sides without segments if there is no memory for them."""
    return [side for side in sides if "segments" not in side.mode or SHARED_MEMORY.is_dir()]
