"""The peers: every system in every variant that matters to correctness, and why a question has no answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PRODUCER, TRAINER, SLOW, RESUME = "producer killed", "trainer killed", "one slowed", "resumed"
QUESTIONS = (PRODUCER, TRAINER, SLOW, RESUME)
RESUMES = "one process is the whole pipeline: its restart is the resume"


@dataclass(frozen=True)
class Peer:
    """One variant of one system."""

    name: str
    module: str
    """The module in ``benchmarks.peers``."""
    environment: str
    mode: str = ""
    backing: Literal["server", "folder", "socket", "service", "none"] = "none"
    """The other things that it needs: a server, a folder, sockets, a service or nothing."""
    crew: Literal["members", "ranks", "one"] = "members"
    """The trainers when one is killed: members that share (the others continue), ranks or one (started again)."""
    fan: Literal["groups", "ranks", "members"] = "groups"
    """The sharing of two trainers, one of them slow. Each must see everything, or they share by position, or by
    speed.
    """
    ends: bool = True
    """Whether a trainer notices the end of an epoch. Otherwise silence counts as the end."""
    segments: bool = False
    inside: bool = False
    """Whether the producers are the trainer's own worker processes."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Question -> the reason why it cannot be asked."""


PENSTOCK = tuple(
    Peer(
        f"Penstock, {mode}, {'segments' if segments else 'inline'}", "ours", "penstock", mode, "server",
        "members" if mode == "shared" else "ranks", "groups" if mode == "shared" else "ranks", segments=segments,
    )
    for mode in ("shared", "ordered") for segments in (False, True)
)  # fmt: skip
OTHERS = (
    Peer("redis-py, written well", "plain_redis", "redis", backing="server", ends=False),
    Peer("Redis, COUNT 1, NOACK, pickle", "noack", "redis", backing="server", ends=False),
    Peer("tensorcom PUSH/PULL", "tensorcom_sockets", "tensorcom", "pushpull", "socket", fan="members", ends=False),
    Peer("tensorcom PUB/SUB", "tensorcom_sockets", "tensorcom", "pubsub", "socket", crew="one", ends=False),
    Peer(
        "torch DataLoader", "torch_loaders", "torch", "torch", crew="one", fan="ranks", inside=True,
        reasons={TRAINER: RESUMES},
    ),
    Peer(
        "torchdata StatefulDataLoader", "torch_loaders", "torchdata", "torchdata", crew="one", fan="ranks", inside=True,
        reasons={TRAINER: RESUMES},
    ),
    Peer(
        "mosaicml-streaming", "mosaic", "mosaic", backing="folder", crew="one", fan="ranks",
        reasons={PRODUCER: "written before the training", TRAINER: RESUMES},
    ),
    Peer(
        "tf.data service, dynamic sharding", "tfdata_service", "tfdata", "sharing", "service",
        fan="members", reasons={RESUME: "its datasets have no state to save"},
    ),
    Peer(
        "tf.data service, cross-trainer cache", "tfdata_service", "tfdata", "caching", "service", crew="one",
        reasons={
            PRODUCER: "for data without an end",
            TRAINER: "for data without an end",
            RESUME: "its datasets have no state to save",
        },
    ),
)  # fmt: skip
EVERYONE = (*PENSTOCK, *OTHERS)
