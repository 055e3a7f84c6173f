"""Entries of a newer wire format: nobody's fault, so no dead letter. This reader stops; one that is updated gets them.

What else may be wrong with an entry, and what becomes of it then, is ``shared``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock_common.errors import BadEntry, UnsupportedVersion
from penstock_common.stream.groups.roster import Membership
from penstock_common.stream.keys import PartitionKeys
from penstock_consumer.receiving.receive import Received
from penstock_consumer.shared.place import Place
from penstock_consumer.stages.batch import Lease


def is_newer(one: Received) -> bool:
    """Whether an entry is refused for its version alone."""
    return isinstance(one.error, UnsupportedVersion)


def refuse_newer(place: Place, partition: PartitionKeys, epoch: int, received: Sequence[Received]) -> None:
    """Raises UnsupportedVersion if any entry is of a newer format.

    They stay pending: held like any other, so that leaving hands them back at once, and a death after a lease.
    """
    newer = [one for one in received if is_newer(one)]
    for one in newer:
        place.holdings.add(Lease(partition.number, epoch, shard=-1, entry_id=one.entry_id, owed=0))
    if newer:
        raise too_old(place.who, epoch, newer[0].entry_id, newer[0].error)


def too_old(who: Membership, epoch: int, entry_id: bytes, error: BadEntry | None) -> UnsupportedVersion:
    """What a reader says that meets such an entry; it has taken nothing of it."""
    return UnsupportedVersion(
        f"entry {entry_id.decode()} of epoch {epoch} of {who.stream.name!r} is too new for this process: {error}, then "
        f"start again; it is kept for group {who.group!r}"
    )
