"""Reconciliation carried out: each step of the plan, by scripts that change nothing but the epoch that was looked at.

``audit.reconciliation`` has the plan. Every step may run twice, and in several processes at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from penstock_common.server.client import RestartDetector
from penstock_common.stream.audit.reconciliation import (
    SETTLE_S,
    ReconcileStep,
    StepKind,
    merged_groups,
    plan_settled,
)
from penstock_common.stream.commands import Client
from penstock_common.stream.entries import index_ends
from penstock_common.stream.groups.losses import COMMITTED, Loss, losses_of_lost_epochs, note_loss, noted_losses
from penstock_common.stream.groups.roster import close_for_group, load_roster, restore_group
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import (
    Manifest,
    abandon_epoch,
    find_manifest,
    finish_shard,
    forget_manifest,
    raise_next_epoch,
    register_again,
    reopen_shard,
)
from penstock_common.stream.removal.deletion import unlink_epoch
from penstock_common.stream.streams import Stream, is_released
from penstock_common.waiting import Notify

RECONCILE_S = 60.0
"""The time for which a server that came back is looked at: longer than a lease, which some repairs wait for."""
PROBED = 64
"""Shards of a partition that are asked about at once where no manifest says how many there are."""


class ReconcileWindow:
    """The time after a server came back, in which it may still turn out what it lost."""

    def __init__(self, client: Client) -> None:
        self._restarts, self._until_s = RestartDetector(client), 0.0

    def is_open(self) -> bool:
        """Return whether another server came within the last `RECONCILE_S`."""
        self._restarts.check(self.open)
        return time.monotonic() < self._until_s

    def open(self) -> None:
        """Begin the window now, as after another server."""
        self._until_s = time.monotonic() + RECONCILE_S


def reconcile(
    client: Client,
    stream: Stream,
    notify: Notify,
    *,
    settle_s: float = SETTLE_S,
    clock: Callable[[], float] = time.time,
) -> list[ReconcileStep]:
    """Make a stream's slot and its partitions agree, and return the steps that were taken.

    It has nothing to do unless the server of one of them came back with an older state. Shards that a source can make
    again stay complete here. The production that has the source takes that back, see `reopen_lost`.

    Args:
        client: Control connection.
        stream: The stream.
        notify: Called with each step that was taken.
        settle_s: The time between two looks, which must agree.
        clock: Seconds since 1970.

    Raises:
        StreamDeleted: The stream is gone.
    """
    taken = []
    for step in plan_settled(client, stream, settle_s):
        if _take(client, stream, step, int(clock() * 1000)):
            taken.append(step)
            notify(f"{stream.name!r}: {step}: {_DONE[step.kind]}")
    return taken


_DONE = {
    StepKind.RAISE: "the number was raised",
    StepKind.RETIRE: "it was removed, and its samples are noted as lost",
    StepKind.RELEASE: "the release was completed",
    StepKind.FORGET: "the manifest was removed",
    StepKind.OPEN: "it was opened there again",
    StepKind.ABANDON: "it was abandoned again",
    StepKind.RESTORE: "it was put back",
    StepKind.CLOSE: "it was closed there again",
    StepKind.FINISH: "the shard was finished",
    StepKind.REOPEN: "the loss is noted; the source's `penstock produce`, or `penstock audit --repair`, makes it again",
    StepKind.NAME: "the loss is noted; these samples cannot be made again",
}


def _take(client: Client, stream: Stream, step: ReconcileStep, now_ms: int) -> bool:
    """Take one step. Returns False if there was nothing left to do."""
    if step.kind is StepKind.RAISE:
        raise_next_epoch(client, stream, step.epoch)
        return True
    if step.kind is StepKind.RESTORE:
        return _restore(client, stream, step)
    manifest = find_manifest(client, stream, step.epoch)
    if step.kind is StepKind.RETIRE:
        if manifest is None:
            _retire(client, stream, step, now_ms)
        return manifest is None
    if manifest is None or manifest.id != step.manifest:
        return False
    if step.kind in (StepKind.REOPEN, StepKind.NAME):
        return _note(client, stream, step, now_ms)
    _mend(client, stream, step, manifest)
    return True


def _mend(client: Client, stream: Stream, step: ReconcileStep, manifest: Manifest) -> None:
    """Take a step that concerns one epoch and loses nothing."""
    match step.kind:
        case StepKind.RELEASE:
            unlink_epoch(client, stream, step.epoch, step.manifest)
        case StepKind.FORGET:
            forget_manifest(client, stream, step.epoch, step.manifest)
        case StepKind.OPEN:
            register_again(client, stream, _lost(stream, step), step.epoch, step.manifest)
        case StepKind.ABANDON:
            abandon_epoch(client, stream, step.epoch, step.manifest)
        case StepKind.CLOSE:
            close_for_group(client, stream, step.group, step.epoch)
        case StepKind.FINISH:
            finish_shard(client, stream, manifest, step.shard, step.size)


def _lost(stream: Stream, step: ReconcileStep) -> list[PartitionKeys]:
    return [stream.partitions[number] for number in step.partitions]


def _restore(client: Client, stream: Stream, step: ReconcileStep) -> bool:
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    record = merged_groups(rosters).get(step.group)
    if record is None:  # it was dropped since
        return False
    closed = {epoch for roster in rosters for name, epoch in roster.closed if name == step.group}
    for partition in _lost(stream, step):
        restore_group(client, partition, step.group, record, closed)
    return True


# --- losses -----------------------------------------------------------------------------------------------------------


def _server_of(client: Client, partition: PartitionKeys) -> str:
    return f"the server {client.node_of(partition.roster).where}"


def _note(client: Client, stream: Stream, step: ReconcileStep, now_ms: int) -> bool:
    """Note a loss that is not noted yet. Returns whether it is new."""
    noted = noted_losses(client, stream, step.epoch)
    if any(loss.shard == step.shard and loss.was == COMMITTED and loss.end >= step.size for loss in noted):
        return False
    by = _server_of(client, stream.partition_of(step.shard))
    count = step.size - step.end
    note_loss(
        client, stream, Loss(step.epoch, step.manifest, step.shard, step.end, step.size, count, COMMITTED, by, now_ms)
    )
    return True


def _retire(client: Client, stream: Stream, step: ReconcileStep, now_ms: int) -> None:
    """Remove an epoch whose manifest the server lost, and note its samples unless it was released."""
    shards = list(_probed(client, stream, step.epoch))
    was_released = is_released(client, stream, step.epoch)
    if not was_released:
        noted = losses_of_lost_epochs(client, stream).get(step.epoch, [])
        known = {(loss.shard, loss.end) for loss in noted}
        for shard, end in shards:
            if end and (shard, end) not in known:
                by = _server_of(client, stream.partition_of(shard))
                loss = Loss(step.epoch, step.manifest, shard, 0, end, end, COMMITTED, by, now_ms)
                note_loss(client, stream, loss)
    # a failover took the manifest before anything was committed, so no group has lost the epoch
    is_unused = not was_released and not any(end for _, end in shards)
    unlink_epoch(client, stream, step.epoch, step.manifest, [shard for shard, _ in shards], is_unused=is_unused)


def _probed(client: Client, stream: Stream, epoch: int) -> Iterator[tuple[int, int]]:
    """Yield (shard, committed end) of every shard that an epoch without a manifest may have keys of.

    A partition's shards are begun about in order, so a range without any ends the search.
    """
    count = len(stream.partitions)
    for partition in stream.partitions:
        start, is_any = partition.number, True
        while is_any:
            ends = index_ends(client, stream, epoch, range(start, start + PROBED * count, count))
            yield from ends.items()
            start, is_any = start + PROBED * count, any(ends.values())


def reopen_lost(
    client: Client, stream: Stream, manifests: set[str], settle_s: float = SETTLE_S
) -> dict[int, list[int]]:
    """Reopen complete shards if a server lost a part of them, so that jobs make the rest.

    Args:
        client: Control connection.
        stream: The stream.
        manifests: Ids of the manifests of epochs whose source the caller has.
        settle_s: The time between two looks, which must agree.

    Returns:
        Epoch -> the shards that are to be made again.
    """
    reopened: dict[int, list[int]] = {}
    for step in plan_settled(client, stream, settle_s):
        if step.kind is StepKind.OPEN and step.manifest in manifests:
            _take(client, stream, step, 0)
        manifest = find_manifest(client, stream, step.epoch) if step.kind is StepKind.REOPEN else None
        if (
            manifest is not None
            and manifest.id == step.manifest
            and step.manifest in manifests
            and reopen_shard(client, stream, manifest, step.shard)
        ):
            reopened.setdefault(step.epoch, []).append(step.shard)
    return reopened
