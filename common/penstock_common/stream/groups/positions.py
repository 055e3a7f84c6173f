"""How far the ranks of an ordered group are: reporting a position, reading them, taking a rank back.

Positions count in the epoch's canonical order (shards in order, offsets in order, planned samples, holes included) over
all partitions, and lie in the first one alone: a report is one step, however many there are. Which samples that settles
is ``ledger``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import ResponseError

from penstock_common.errors import GroupNotFound, MemberReplaced, PenstockError, ReplayTruncated
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, decoded, is_script_error, readable, run_script
from penstock_common.stream.groups.roster import GroupRecord, Membership
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.stream.streams import Stream

_REPORT_POSITION = load_script("report_position")
_REWIND_POSITION = load_script("rewind_position")

FLOOR = "floor"
HEAD_STEPS = 2
"""One that a padded last step may need, and one more to find good samples in place of bad ones."""


@dataclass(frozen=True, slots=True)
class Positions:
    """One epoch's positions of a group."""

    floor: int = 0
    """Of ranks that reported none."""
    ranks: dict[int, int] = field(default_factory=dict)

    def of(self, rank: int) -> int:
        """Every batch of the rank below it is settled."""
        return self.ranks.get(rank, self.floor)

    def minimum(self, world: int) -> int:
        """Everything below it is settled for the group; 0 while nobody knows how many ranks there are."""
        return min((self.of(rank) for rank in range(world)), default=self.floor)


@readable(lambda client, stream, epoch, group: stream.partitions[0].positions(epoch, group))
def known_positions(client: Client, stream: Stream, epoch: int, group: str) -> Positions:
    """How far each rank is."""
    fields = decoded(client.hgetall(stream.partitions[0].positions(epoch, group)))
    ranks = {int(name): int(value) for name, value in fields.items() if name != FLOOR}
    floor = int(fields.get(FLOOR, 0))
    if min([floor, *ranks, *ranks.values()]) < 0:
        raise ValueError("a rank or a position is below 0")
    return Positions(floor, ranks)


def starts_of(manifest: Manifest, shards: range) -> dict[int, int]:
    """Shard -> position of its first sample, as far as it is known: in an open epoch, behind finished shards."""
    starts, at = {}, 0
    for shard in shards:
        starts[shard] = at
        if manifest.sizes is None and shard not in manifest.done:
            break
        at += manifest.shard_size(shard)
    return starts


def settled_below(minimum: int, start: int | None, lo: int, hi: int) -> NDArray[np.bool_]:
    """For each offset of [lo, hi) of a shard that begins at position ``start`` whether it lies below the minimum."""
    if start is None:
        return np.zeros(hi - lo, dtype=bool)
    return np.arange(start + lo, start + hi) < minimum


def kept_head(record: GroupRecord) -> int:
    """Positions at an epoch's start that are kept until the group has closed it: its last step is filled from them."""
    return HEAD_STEPS * record.world * record.batch


def report_arguments(manifest: Manifest, who: Membership, position: int) -> tuple[list[str], list[Arg]]:
    """Keys and arguments of _REPORT_POSITION: everything of this rank below ``position`` is settled."""
    return _arguments(who.stream.partitions[0], manifest, who, position)


def _arguments(
    partition: PartitionKeys, manifest: Manifest, who: Membership, position: int
) -> tuple[list[str], list[Arg]]:
    assert who.order is not None
    keys = [partition.roster, partition.state(manifest.epoch), partition.positions(manifest.epoch, who.group)]
    return keys, [manifest.live_state, who.group, who.order.rank, who.incarnation, position]


def report(client: Client, who: Membership, manifest: Manifest, position: int) -> None:
    """Reports a position; never lowers. Nothing happens where the epoch is no longer live.

    Raises MemberReplaced, GroupNotFound.
    """
    _run(client, who, _REPORT_POSITION, *report_arguments(manifest, who, position))


def rewind(client: Client, who: Membership, manifest: Manifest, position: int) -> None:
    """Sets this rank's position of an epoch, also below where it stands; the epoch is then open for the group again.

    Raises ReplayTruncated where the epoch was released, or what lies below the group's minimum may be removed already.
    """
    before = known_positions(client, who.stream, manifest.epoch, who.group)
    for look_only in (1, 0):  # look everywhere first: a rank is taken back in all partitions or in none
        settled = -1  # the first partition says what the group had settled when the rank was taken back there
        for partition in who.stream.partitions:
            keys, args = _arguments(partition, manifest, who, position)
            args[4:] = [manifest.epoch, position, look_only, settled]
            answer, settled = _run(client, who, _REWIND_POSITION, keys, args)
            if answer != b"ok":
                assert who.order is not None
                if not look_only:
                    report(client, who, manifest, before.of(who.order.rank))
                raise ReplayTruncated(_truncated(who, manifest, position, before))


def _truncated(who: Membership, manifest: Manifest, position: int, now: Positions) -> str:
    assert who.order is not None
    return (
        f"epoch {manifest.epoch} of {who.stream.name!r} cannot be read again from position {position}: group "
        f"{who.group!r} had settled all below {now.minimum(who.order.world)}, and retention has removed some of it; "
        "acknowledge at checkpoints, or give the stream a larger budget"
    )


def _run(client: Client, who: Membership, script: str, keys: list[str], args: list[Arg]) -> Any:
    try:
        return run_script(client, script, keys, args)
    except ResponseError as error:
        refusal = refusal_of(error, who)
        if refusal is None:
            raise
        raise refusal from None


def refusal_of(error: Exception, who: Membership) -> PenstockError | None:
    """Why a report was refused, in words; None if the error is about something else."""
    if is_script_error(error, "replaced"):
        return MemberReplaced(
            f"another process joined group {who.group!r} as {who.member!r}: this one stops; each rank is one process"
        )
    if is_script_error(error, "rank"):
        return MemberReplaced(
            f"group {who.group!r} is read by another number of ranks now: this one, {who.member!r}, stops"
        )
    if is_script_error(error, "gone"):
        return GroupNotFound(
            f"group {who.group!r} is no longer on the roster of {who.stream.name!r}: it was dropped, or the server "
            "lost its data; start again"
        )
    return None
