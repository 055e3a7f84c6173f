"""What a production is to make, and which epochs that is: a new run takes the next ones, a repeated run goes on.

Carrying it out is ``production``'s; the order within an epoch is ``order``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from penstock_common.errors import PenstockError
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.streams import Stream, read_counters
from penstock_producer.sources.config import SourceConfig
from penstock_producer.sources.names import is_token
from penstock_producer.sources.transform import BLOCK_SAMPLES
from penstock_producer.working.oversight import SAMPLE_LIMIT_S
from penstock_producer.working.task import MaxBad, OnError

AHEAD = 2
"""Epochs produced at once: the second keeps workers busy while the first one's last shards end."""


class EpochFailed(PenstockError, RuntimeError):
    """An epoch cannot be completed; it was abandoned, and the text names the shard and the reason."""


class ProductionPlan(BaseModel):
    """What the user asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stream: str
    source: SourceConfig
    epochs: Annotated[int, Field(gt=0)] = 1
    seed: Annotated[int, Field(ge=0)] = 0
    shuffle: bool = True
    shard_samples: Annotated[int, Field(gt=0, le=1 << 20)] | None = None
    """None: order.default_shard_samples."""
    on_error: OnError = "quarantine"
    max_bad: MaxBad = "50%"
    sample_limit_s: Annotated[float, Field(ge=0)] = SAMPLE_LIMIT_S
    """A sample that takes longer hangs: its worker is replaced, and in the end it is a bad one. 0: no limit."""
    block_transform: str | None = None
    """``module:function``, or a token, of a function of many samples at once."""
    block_samples: Annotated[int, Field(gt=0, le=1 << 16)] = BLOCK_SAMPLES
    """How many it is given."""
    ahead: Annotated[int, Field(gt=0)] = AHEAD
    follow: bool = False
    """Begins an epoch only when fewer than `ahead` are left to read for the group that is furthest."""
    is_endless: bool = False
    """Nobody knows the last epoch: one follows the other, and trainers wait for it."""
    numbers: tuple[int, ...] | None = None
    """Exactly these epochs, begun or not; None: the next ones, or those that an earlier run left unfinished."""
    spec: Mapping[str, Any] | None = None
    """Declared tensors; None takes the source's, or the first sample's."""
    partitions: int | None = None
    budget_bytes: int | None = None
    block_bytes: int | None = None
    retention: str | None = None
    """What is kept of settled epochs (policy.py); None takes the stream's."""
    durability: str | None = None
    """What must have happened to a write (stream/servers/durability.py); None takes the stream's."""
    payload: str | None = None
    """Where payloads lie (segments/plane.py); None takes the stream's. Jobs need no word of it: the stream knows."""


def plan_fingerprint(fingerprint: str, shuffle: bool, block_transform: str | None = None) -> str:
    """What the manifest carries: of the source, of its order, and of what transforms it by the block."""
    ordered = fingerprint if shuffle else f"{fingerprint}-in-order"
    return f"{ordered}-{block_transform}" if block_transform and not is_token(block_transform) else ordered


def find_epochs(
    client: Client, stream: Stream, fingerprint: str, plan: ProductionPlan
) -> tuple[list[int], Manifest | None]:
    """The numbers of the epochs to produce, and the manifest of the one to go on with, if there is one.

    An earlier run of the same source and seed that was broken off is continued up to the number of epochs it had
    announced; so the same command started again does what it would have done.
    """
    seed, epochs = plan.seed, 1 if plan.is_endless else plan.epochs
    if plan.numbers is not None:
        return list(plan.numbers), find_manifest(client, stream, plan.numbers[0])
    following, final, _ = read_counters(client, stream)
    states = retained_epochs(client, stream)
    unfinished = [
        manifest
        for epoch, state in states.items()
        if state not in (PRODUCED, ABANDONED)
        and (manifest := find_manifest(client, stream, epoch)) is not None
        and _is_same(manifest, fingerprint, seed)
    ]
    if unfinished:
        last = max(final or 0, unfinished[-1].epoch + 1)
        mine = {manifest.epoch for manifest in unfinished}
        return [e for e in range(unfinished[0].epoch, last) if e in mine or e >= following], unfinished[0]
    newest = find_manifest(client, stream, following - 1) if following else None
    if newest and final and final > following and newest.state == PRODUCED and _is_same(newest, fingerprint, seed):
        return list(range(following, final)), newest
    return list(range(following, following + epochs)), None


def _is_same(manifest: Manifest, fingerprint: str, seed: int) -> bool:
    return manifest.kind == "epoch" and manifest.fingerprint == fingerprint and manifest.seed == seed
