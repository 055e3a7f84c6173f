"""The plan of a production: its options, the numbers of its epochs, and the shards of each epoch.

A new run takes the next epochs, a repeated run continues an unfinished one. A worker cuts an epoch into the same shards
as the dispatcher did. `production` carries out the plan; `sources/order` has the order of a source.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest, find_manifest, retained_epochs
from penstock_common.stream.streams import Stream, read_counters
from penstock_common.tuning import Tuning
from penstock_common.waiting import Notify
from penstock_common.wire.limits import MAX_SHARD_SAMPLES
from penstock_common.wire.spec import Spec, SpecLike
from penstock_producer.jobs.task import MakingOptions, ShardTask
from penstock_producer.jobs.watchdog import SAMPLE_LIMIT_S
from penstock_producer.sources.config import LocalConfig, SourceConfig
from penstock_producer.sources.names import name_in_token
from penstock_producer.sources.open import config_for_jobs, open_source, require_iterable
from penstock_producer.sources.order import ChoosingSource, order_of
from penstock_producer.sources.protocol import BatchSource, Source
from penstock_producer.sources.transform import seen_through
from penstock_producer.write.writer import Writer

EPOCHS_AT_ONCE = 2
"""Epochs produced at once: the second keeps workers busy while the first one's last shards end."""


class ProductionPlan(MakingOptions):
    """The options of a production, as the user gives them."""

    stream: str
    source: SourceConfig
    epochs: Annotated[int, Field(gt=0)] = 1
    seed: Annotated[int, Field(ge=0)] = 0
    shard_samples: Annotated[int, Field(gt=0, le=1 << 20)] | None = None
    """The samples in a shard. None: `default_shard_samples`."""
    sample_limit_s: Annotated[float, Field(ge=0)] = SAMPLE_LIMIT_S
    """A sample that takes longer hangs: its worker is replaced, and in the end it is a bad one. 0: no limit."""
    ahead: Annotated[int, Field(gt=0)] = EPOCHS_AT_ONCE
    follow: bool = False
    """Whether to begin an epoch only when the group that has read most has fewer than `ahead` left."""
    is_endless: bool = False
    """Whether the last epoch is not known: one follows the other, and trainers wait for it."""
    numbers: tuple[int, ...] | None = None
    """Exactly these epochs, begun or not. None: the next ones, or those that an earlier run left unfinished."""
    spec: Mapping[str, Any] | None = None
    """The declared tensors. None takes the source's, or the first sample's."""
    partitions: int | None = None
    budget_bytes: int | None = None
    block_bytes: int | None = None
    retention: str | None = None
    """Which acknowledged epochs are kept (policy.py). None takes the stream's."""
    durability: str | None = None
    """The condition for a write to count as committed (stream/servers/durability.py). None takes the stream's."""
    payload: str | None = None
    """The place of payloads (segments/folder.py). None takes the stream's. Jobs need not name it, because the stream
    knows.
    """
    compression: str | Mapping[str, str] | None = None
    """The codecs of tensors (wire/compression.py). None takes the stream's, as with ``payload``."""


def open_writer(
    plan: ProductionPlan,
    url: str,
    notify: Notify,
    *,
    spec: SpecLike | Spec | None = None,
    info: Mapping[str, Any] | None = None,
) -> Writer:
    """Open the plan's stream, and make it if it does not exist. ``spec`` holds where the plan has none."""
    return Writer(
        plan.stream, url=url, spec=plan.spec if plan.spec is not None else spec, partitions=plan.partitions,
        budget_bytes=plan.budget_bytes, retention=plan.retention, payload=plan.payload, info=info,
        tuning=Tuning(
            block_bytes=plan.block_bytes, durability=plan.durability, compression=plan.compression, notify=notify
        ),
    )  # fmt: skip


def plan_fingerprint(fingerprint: str, shuffle: bool, block_transform: str | None = None) -> str:
    """Return the manifest's fingerprint: of the source, its order, and the function that transforms blocks."""
    ordered = fingerprint if shuffle else f"{fingerprint}-in-order"
    return f"{ordered}-{block_transform}" if block_transform else ordered


class PlannedSource:
    """The open source of a plan, the order of its epochs, and the jobs that make their shards."""

    def __init__(self, plan: ProductionPlan) -> None:
        """Open the source. Raises SourceError if it cannot be read."""
        self._plan = plan
        self.source = open_source(plan.source)
        require_iterable(plan.source)
        self.fingerprint = plan_fingerprint(self.source.fingerprint, plan.shuffle, plan.block_transform)
        """The fingerprint that the manifests of its epochs have."""
        self.transformed = seen_through(self.source, plan.block_transform)
        """The source after the transform of blocks."""
        self._config = config_for_jobs(plan.source, self.source).model_dump(mode="json")

    @property
    def samples_per_epoch(self) -> int | None:
        """The samples of an epoch, or None if only reading the source can tell."""
        return None if self.source.unit == "item" else count_samples(self.source)

    def shard_samples(self, earlier: Manifest | None, workers: int) -> int:
        """Return the samples of a full shard, as the plan or an ``earlier`` epoch has them, or by the ``workers``."""
        if self._plan.shard_samples:
            return self._plan.shard_samples
        if earlier is not None and earlier.sizes:
            return max(earlier.sizes)
        samples = self.samples_per_epoch
        return 1 if samples is None else default_shard_samples(samples, workers)

    def shard_sizes(self, epoch: int, shard_samples: int, earlier: Manifest | None) -> list[int] | None:
        """Return the sizes of an epoch's shards, or None if only reading the source can tell.

        An epoch that has an ``earlier`` manifest stays as it was cut.
        """
        plan, planned = self._plan, None if earlier is None else earlier.sizes
        if self.source.unit == "item":
            return None
        return EpochOrder(
            self.source, seed=plan.seed, epoch=epoch, shuffle=plan.shuffle,
            shard_samples=shard_samples, planned=planned,
        ).sizes  # fmt: skip

    def tasks(self, stream_id: str, manifest: Manifest) -> list[ShardTask]:
        """Return the jobs of all shards of an epoch."""
        plan = self._plan
        options = {name: getattr(plan, name) for name in MakingOptions.model_fields}
        return [
            ShardTask(
                stream=plan.stream,
                stream_id=stream_id,
                epoch=manifest.epoch,
                manifest_id=manifest.id,
                shard=shard,
                source=self._config,
                fingerprint=self.source.fingerprint,
                seed=plan.seed,
                sample_limit_s=plan.sample_limit_s,
                spec_is_declared=plan.spec is not None,
                **options,
            )
            for shard in range(1 if self.source.unit == "item" else len(manifest.sizes or ()))
        ]


def find_epochs(
    client: Client, stream: Stream, fingerprint: str, plan: ProductionPlan
) -> tuple[list[int], Manifest | None]:
    """Return the numbers of the epochs to produce, and the manifest of the epoch to continue, if there is one.

    An unfinished run of the same source and seed is continued up to the number of epochs it had announced. So the same
    command, started again, does what it would have done.
    """
    seed, epochs = plan.seed, 1 if plan.is_endless else plan.epochs
    if plan.numbers is not None:
        return list(plan.numbers), find_manifest(client, stream, plan.numbers[0])
    following, final, _ = read_counters(client, stream)
    unfinished = [one for one in _unfinished(client, stream) if is_same(one, fingerprint, seed)]
    if unfinished:
        last = max(final or 0, unfinished[-1].epoch + 1)
        mine = {manifest.epoch for manifest in unfinished}
        return [e for e in range(unfinished[0].epoch, last) if e in mine or e >= following], unfinished[0]
    newest = find_manifest(client, stream, following - 1) if following else None
    if newest and final and final > following and newest.state == PRODUCED and is_same(newest, fingerprint, seed):
        return list(range(following, final)), newest
    return list(range(following, following + epochs)), None


def unfinished_of_others(client: Client, stream: Stream, fingerprint: str, seed: int) -> list[Manifest]:
    """Return the unfinished epochs of other productions, which a production of this source and seed never completes."""
    return [one for one in _unfinished(client, stream) if one.fingerprint and not is_same(one, fingerprint, seed)]


def begun_otherwise(plan: ProductionPlan) -> str:
    """Return how an unfinished epoch began that a run of this plan does not complete, and what becomes of it."""
    if isinstance(plan.source, LocalConfig) and not name_in_token(plan.source.token):
        return (
            "in another run, which may have had the same dataset: a later run continues only datasets and functions "
            "that are attributes of an imported module. Unless that run is still at work, end the epoch as it is"
        )
    return (
        "with another source, transform or seed: unless its command still runs, run it again, or end the epoch as it is"
    )


def _unfinished(client: Client, stream: Stream) -> list[Manifest]:
    states = retained_epochs(client, stream)
    found = (
        find_manifest(client, stream, epoch) for epoch, state in states.items() if state not in (PRODUCED, ABANDONED)
    )
    return [manifest for manifest in found if manifest is not None]


def ids_of_source(client: Client, stream: Stream, fingerprint: str, seed: int) -> set[str]:
    """Return the ids of the manifests of retained epochs that a source made."""
    found = (find_manifest(client, stream, epoch) for epoch in retained_epochs(client, stream))
    return {manifest.id for manifest in found if manifest is not None and is_same(manifest, fingerprint, seed)}


def is_same(manifest: Manifest, fingerprint: str, seed: int) -> bool:
    """Return whether a production of this source and seed made the epoch."""
    return manifest.kind == "epoch" and manifest.fingerprint == fingerprint and manifest.seed == seed


TAPER_SHARDS = 4
"""The rule below expects one worker for every ``2 * TAPER_SHARDS`` full shards."""
SMALLEST_PART = 8
"""The last shards of an epoch have this part of a full one: its end then waits for one worker an eighth as long."""
MOST_HELPERS = 64
"""The limit of small shards, if shards are small for another reason than many workers."""
SHARDS_PER_WORKER = 8
"""Workers end an epoch together if each has several shards. With fewer, the last one runs alone."""
LARGEST_DEFAULT = 4096
"""The largest default, in samples: a job of some seconds at 1 to 10 ms each. It is the most that is made again when a
worker dies before a commit.
"""


def default_shard_samples(samples: int, workers: int) -> int:
    """Return the samples in a shard if the user does not say."""
    return min(max(1, math.ceil(samples / (max(1, workers) * SHARDS_PER_WORKER))), LARGEST_DEFAULT)


def count_samples(source: Source | BatchSource) -> int:
    """Return the samples of one epoch."""
    if source.unit == "batch":
        return sum(source.size(item) for item in range(len(source)))
    return source.chosen if isinstance(source, ChoosingSource) else len(source)


class EpochOrder:
    """The items of each shard: cut by ``shard_samples``, or as the ``planned`` sizes of a manifest say.

    If the source does not have what was planned, `sizes` differ from it.
    """

    def __init__(
        self,
        source: Source | BatchSource,
        *,
        seed: int,
        epoch: int,
        shuffle: bool,
        shard_samples: int = 1,
        planned: Sequence[int] | None = None,
    ) -> None:
        self._source, self._shard_samples, self._planned = source, shard_samples, planned
        self._order = order_of(source, len(source), seed, epoch, shuffle)

    @cached_property
    def _item_sizes(self) -> list[int] | None:
        source = self._source
        return [source.size(int(item)) for item in self._order] if source.unit == "batch" else None

    @cached_property
    def _counts(self) -> list[int]:
        """Return the items of each shard."""
        if self._planned is not None:
            return self._counts_of(self._planned)
        if self._item_sizes is None:
            return cut(len(self._order), self._shard_samples)
        return cut_batches(self._item_sizes, self._shard_samples)

    def _counts_of(self, planned: Sequence[int]) -> list[int]:
        """Return the items that make shards of these sizes. If the source has more, they are one more shard."""
        sizes = np.ones(len(self._order), np.int64) if self._item_sizes is None else np.array(self._item_sizes)
        ends = np.searchsorted(np.cumsum(sizes), np.cumsum(np.array(planned, np.int64)), side="right").tolist()
        if not ends or ends[-1] < len(sizes):
            ends.append(len(sizes))
        return [end - start for start, end in zip([0, *ends], ends, strict=False) if end > start]

    @cached_property
    def sizes(self) -> list[int]:
        """The samples of each shard, as the manifest plans them."""
        if self._item_sizes is None:
            return self._counts
        ends = np.cumsum(self._counts)
        starts = [0, *ends[:-1]]
        return [sum(self._item_sizes[a:b]) for a, b in zip(starts, ends, strict=True)]

    def first(self, count: int) -> NDArray[np.int64]:
        """Return the source's first indices of the epoch."""
        return self._order[:count]

    def items(self, shard: int) -> NDArray[np.int64]:
        """Return the source's indices in one shard, in order."""
        start = sum(self._counts[:shard])
        return self._order[start : start + self._counts[shard]]


def shard_size(left: int, n: int, shard_samples: int) -> int:
    """Return the samples of the next shard when ``left`` of the epoch's ``n`` are not cut yet.

    Shards are full ones first, then ever smaller. It is guided self-scheduling (Polychronopoulos and Kuck, 1987). The
    rest is divided by twice the number of workers that the epoch seems planned for, so that all workers end together.
    """
    shares = min(MOST_HELPERS, n // (TAPER_SHARDS * shard_samples))
    if shares < 2:  # with so few shards a smaller one would only be one more
        return shard_samples
    return max(-(-shard_samples // SMALLEST_PART), min(shard_samples, -(-left // shares)))


def cut(n: int, shard_samples: int) -> list[int]:
    """Return the sizes of the shards of n samples; see `shard_size`."""
    _check(shard_samples)
    sizes: list[int] = []
    left = n
    while left:
        sizes.append(min(left, shard_size(left, n, shard_samples)))
        left -= sizes[-1]
    return sizes


def cut_batches(sizes: Sequence[int] | NDArray[np.int64], shard_samples: int) -> list[int]:
    """Return the items of each shard, for items of these sizes in epoch order.

    A shard takes as many items as fit its size, and at least one.
    """
    _check(shard_samples)
    counts: list[int] = []
    left = n = int(sum(sizes))
    held = limit = 0
    for item, size in enumerate(map(int, sizes)):
        if size > MAX_SHARD_SAMPLES:
            raise ValueError(f"batch {item} holds {size} samples; a shard takes at most {MAX_SHARD_SAMPLES}")
        if not counts or held + size > limit:
            counts.append(0)
            held, limit = 0, shard_size(left, n, shard_samples)
        counts[-1] += 1
        held += size
        left -= size
    return counts


def _check(shard_samples: int) -> None:
    if not 1 <= shard_samples <= MAX_SHARD_SAMPLES:
        raise ValueError(f"a shard of {shard_samples} samples; expected 1 to {MAX_SHARD_SAMPLES}")
