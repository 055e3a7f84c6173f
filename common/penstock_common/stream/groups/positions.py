"""The positions of an ordered group's ranks: reporting one, reading them, and taking a rank back.

Positions count in the epoch's canonical order (shards in order, offsets in order, planned samples, with holes) over all
partitions. They are in the first partition alone, so a report is one step. `ledger` says which samples a position
acknowledges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import ResponseError

from penstock_common.errors import GroupNotFound, MemberReplaced, PenstockError, ReplayTruncated
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import (
    Arg,
    Client,
    ScriptCall,
    decoded,
    is_script_error,
    readable,
    run_script,
)
from penstock_common.stream.groups.roster import GroupRecord, Membership, rejoin, replaced
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream

_REPORT_POSITION = load_script("report_position")
_REWIND_POSITION = load_script("rewind_position")

FLOOR = "floor"
HEAD_STEPS = 2
"""One step that a padded last step may need, and one more to find good samples in place of bad ones."""


@dataclass(frozen=True, slots=True)
class Positions:
    """The positions of a group in one epoch."""

    floor: int = 0
    """The position of ranks that have reported none."""
    ranks: dict[int, int] = field(default_factory=dict)

    def of(self, rank: int) -> int:
        """Return the position of a rank: it is done with every batch below it."""
        return self.ranks.get(rank, self.floor)

    def minimum(self, world: int) -> int:
        """Return the position below which the group is done, or the floor while the number of ranks is not known."""
        return min((self.of(rank) for rank in range(world)), default=self.floor)

    def unread_below(self, record: GroupRecord, edges: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return for each of these positions how many samples below it wait for their rank, holes included.

        A rank's next step begins at its position, and each step has one batch of every rank.
        """
        world, batch = max(record.world, 1), max(record.batch, 1)
        found = np.zeros(len(edges), dtype=np.int64)
        for rank in range(world):
            steps, rest = np.divmod(np.maximum(edges - self.of(rank), 0), world * batch)
            found += steps * batch + np.clip(rest - rank * batch, 0, batch)
        return found


@readable(lambda client, stream, epoch, group: stream.partitions[0].positions(epoch, group))
def known_positions(client: Client, stream: Stream, epoch: int, group: str) -> Positions:
    """Return the position of each rank."""
    fields = decoded(client.hgetall(stream.partitions[0].positions(epoch, group)))
    ranks = {int(name): int(value) for name, value in fields.items() if name != FLOOR}
    floor = int(fields.get(FLOOR, 0))
    if min([floor, *ranks, *ranks.values()]) < 0:
        raise ValueError("a rank or a position is below 0")
    return Positions(floor, ranks)


def starts_of(manifest: Manifest, shards: range) -> dict[int, int]:
    """Return shard -> position of its first sample, if known.

    In an open epoch, a start is known only if all earlier shards are complete.
    """
    starts, at = {}, 0
    for shard in shards:
        starts[shard] = at
        if manifest.sizes is None and shard not in manifest.done:
            break
        at += manifest.shard_size(shard)
    return starts


def done_below(minimum: int, start: int | None, lo: int, hi: int) -> NDArray[np.bool_]:
    """Return for each offset of [lo, hi) whether it is below the minimum. The shard begins at position ``start``."""
    if start is None:
        return np.zeros(hi - lo, dtype=bool)
    return np.arange(start + lo, start + hi) < minimum


def done_by_ranks(positions: Positions, record: GroupRecord, start: int | None, length: int) -> NDArray[np.bool_]:
    """Return for each offset of a shard whether its rank has acknowledged it. The shard begins at ``start``."""
    if start is None:
        return np.zeros(length, dtype=bool)
    done: NDArray[np.bool_] = np.diff(positions.unread_below(record, np.arange(start, start + length + 1))) == 0
    return done


def kept_head(record: GroupRecord) -> int:
    """Return the positions at an epoch's start that stay until the group has closed it: they fill its last step."""
    return HEAD_STEPS * record.world * record.batch


@dataclass(slots=True)
class PositionReport:
    """The report that everything of a rank below a position of one epoch is done."""

    manifest: Manifest
    who: Membership
    position: int

    def add(self, other: object) -> bool:
        """Take over another report. Return False if one call cannot do both."""
        if not isinstance(other, PositionReport) or other.manifest.epoch != self.manifest.epoch:
            return False
        self.position = max(self.position, other.position)
        return True

    def call(self) -> ScriptCall:
        """Return the call. It may be sent twice."""
        partition = self.who.stream.partitions[0]
        return ScriptCall(_REPORT_POSITION, *_arguments(partition, self.manifest, self.who, self.position))


def _arguments(
    partition: PartitionKeys, manifest: Manifest, who: Membership, position: int
) -> tuple[list[str], list[Arg]]:
    assert who.order is not None
    keys = [partition.roster, partition.state(manifest.epoch), partition.positions(manifest.epoch, who.group)]
    return keys, [manifest.live_state, who.group, who.order.rank, who.incarnation, position]


def report(client: Client, who: Membership, manifest: Manifest, position: int) -> None:
    """Report a position. It never falls. Nothing happens if the epoch is no longer live.

    Raises MemberReplaced, GroupNotFound.
    """
    _run(client, who, who.stream.partitions[0], *PositionReport(manifest, who, position).call())


def rewind(client: Client, who: Membership, manifest: Manifest, position: int) -> None:
    """Set this rank's position of an epoch, also to a lower one. The group then reads the epoch again.

    Raises ReplayTruncated if the epoch was released, or if entries below the group's minimum may be removed already.
    """
    before = known_positions(client, who.stream, manifest.epoch, who.group)
    for look_only in (1, 0):  # look everywhere first: a rank is taken back in all partitions or in none
        acknowledged = -1  # the first partition says what the group had acknowledged when the rank was taken back there
        for partition in who.stream.partitions:
            keys, args = _arguments(partition, manifest, who, position)
            args[4:] = [manifest.epoch, position, look_only, acknowledged]
            answer, acknowledged = _run(client, who, partition, _REWIND_POSITION, keys, args)
            if answer != b"ok":
                assert who.order is not None
                if not look_only:
                    report(client, who, manifest, before.of(who.order.rank))
                raise ReplayTruncated(_truncated(who, manifest, position, before))


def _truncated(who: Membership, manifest: Manifest, position: int, now: Positions) -> str:
    assert who.order is not None
    return (
        f"epoch {manifest.epoch} of {who.stream.name!r} cannot be read again from position {position}: group "
        f"{who.group!r} had acknowledged all below {now.minimum(who.order.world)}, and retention has removed some of "
        "it; acknowledge at checkpoints, or give the stream a larger budget"
    )


def _run(
    client: Client, who: Membership, partition: PartitionKeys, script: str, keys: list[str], args: list[Arg]
) -> Any:
    while True:
        try:
            return run_script(client, script, keys, args)
        except ResponseError as error:
            refusal = refusal_of(error, who)
            if refusal is None:
                raise
            if not (has_lost_place(error) and rejoin(client, who, partition)):
                raise refusal from None


def has_lost_place(error: Exception) -> bool:
    """Return whether the roster has another member, or none, or other ranks: `roster.rejoin` may help."""
    return any(is_script_error(error, word) for word in ("replaced", "gone", "rank"))


def refusal_of(error: Exception, who: Membership) -> PenstockError | None:
    """Return why a report was refused, in words, or None if the error has another cause."""
    if is_script_error(error, "replaced"):
        return replaced(who)
    if is_script_error(error, "rank"):
        return MemberReplaced(
            f"group {who.group!r} is read by another number of ranks now: this one, {who.member!r}, stops; start all "
            "ranks with one world_size"
        )
    if is_script_error(error, "gone"):
        return GroupNotFound(
            f"group {who.group!r} is no longer on the roster of {who.stream.name!r}: it was dropped, or the server "
            "lost its data; start again"
        )
    return None
