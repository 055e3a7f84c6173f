"""Drop a group, or let it read again. Its acknowledgements go, too, in the right order.

Otherwise a new group of that name would take the samples that an earlier one acknowledged for its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from redis.exceptions import ResponseError

from penstock_common.errors import GroupBusy, GroupNotFound
from penstock_common.printable import readable_span
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, is_script_error, run_script, server_ms
from penstock_common.stream.groups.presence import GONE_AFTER, liveness_of
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import begun_shards, find_manifest, retained_epochs
from penstock_common.stream.streams import Stream

_DROP_GROUP = load_script("drop_group")
_RESET_GROUP = load_script("reset_group")


def refuse_living(client: Client, stream: Stream, group: str, advice: str, *, but: str = "") -> None:
    """Raise GroupBusy if members of the group, other than ``but``, may be at work. ``advice`` says what helps."""
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    members = liveness_of(rosters, server_ms(client, stream.partitions[0].roster))
    live = [
        f"{member} (seen {readable_span(liveness.unseen_s or 0)} ago)"
        for (name, member), liveness in sorted(members.items())
        if name == group and member != but and liveness.may_be_at_work
    ]
    if live:
        raise GroupBusy(f"group {group!r} of {stream.name!r} is read by {', '.join(live)}: {advice}; {GONE_AFTER}")


def reset_group(client: Client, stream: Stream, group: str, first: int) -> None:
    """Make the group read again from epoch ``first`` on. `refuse_living` comes first.

    Raises GroupNotFound if not every roster has the group.
    """
    # ledgers first: after a crash in between the audit finds missing bits, and no sample counts as read
    _forget(client, stream, group, [epoch for epoch in retained_epochs(client, stream) if epoch >= first])
    for partition in stream.partitions:
        epochs = list(load_roster(client, partition).epochs)
        keys = [partition.roster, *(partition.entries(epoch) for epoch in epochs)]
        try:
            run_script(client, _RESET_GROUP, keys, [group, first, *map(str, epochs)])
        except ResponseError as error:
            if not is_script_error(error, "no group"):
                raise
            raise GroupNotFound(
                f"partition {partition.number} of {stream.name!r} has no group {group!r}: its first member died while "
                "it joined, or a server came back older; start its trainer, which makes it whole, and reset it then"
            ) from None


def first_whole(client: Client, stream: Stream) -> int:
    """Return the first epoch after all that retention took entries of, in any partition: a new group begins there."""
    rosters = [load_roster(client, partition) for partition in stream.partitions]
    trimmed = max((epoch for roster in rosters for epoch in roster.trimmed), default=-1)
    return min((epoch for epoch in rosters[0].epochs if epoch > trimmed), default=trimmed + 1)


def drop_group(client: Client, stream: Stream, group: str) -> bool:
    """Remove a group from every roster, with its acknowledgements. Returns whether it existed."""
    found = False
    _forget(client, stream, group, retained_epochs(client, stream))
    for partition in reversed(stream.partitions):  # the first, by which a group is known, last: this may be repeated
        epochs = load_roster(client, partition).epochs
        keys = [partition.roster, *(partition.entries(epoch) for epoch in epochs)]
        found = bool(run_script(client, _DROP_GROUP, keys, [group])) or found
    _forget(client, stream, group, retained_epochs(client, stream))  # what its members acknowledged until now
    return found


def _forget(client: Client, stream: Stream, group: str, epochs: Iterable[int]) -> None:
    for epoch in epochs:
        manifest = find_manifest(client, stream, epoch)
        keys = [partition.dead(epoch, group) for partition in stream.partitions]
        keys += [partition.positions(epoch, group) for partition in stream.partitions]
        shards = begun_shards(client, stream, manifest) if manifest else range(0)
        keys += [stream.partition_of(shard).ledger(epoch, group, shard) for shard in shards]
        client.unlink(*keys)
