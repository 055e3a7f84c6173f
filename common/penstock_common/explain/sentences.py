"""Sentences that explain a wait: what a stream holds, for which groups, what an operator can do, why no epoch comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from penstock_common.errors import PenstockError
from penstock_common.explain.backlog import Missing, absent_groups, hold_of, missing_members, unacknowledged_bytes
from penstock_common.printable import listed, readable_bytes, readable_span
from penstock_common.stream.commands import Client, server_ms
from penstock_common.stream.groups.presence import Liveness
from penstock_common.stream.groups.roster import SHARED, Roster, load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.payloads import plane_of
from penstock_common.stream.ranges import format_ranges, merge_ranges
from penstock_common.stream.streams import Stream

CLOSE_AFTER_S = 20.0
"""The wait after which the command is named that ends an epoch without its producer. Workers import for some seconds
before their first sample, and the trainer of `penstock run` starts beside them."""
SHOWN = 4
"""The missing members that a sentence names."""


def why_no_room(client: Client, stream: Stream) -> str:
    """Return why the awaited shard's writer waits for space: what is held, and which groups hold it.

    Return '' if it does not wait.
    """
    with suppress(PenstockError):  # an explanation must not fail
        for partition in stream.partitions:
            roster = load_roster(client, partition)
            # a full folder holds up every writer
            awaited = [waiter for waiter in roster.waiting.values() if waiter.is_next or waiter.why == "folder"]
            if awaited:
                return _sentence(client, stream, partition, roster, awaited[0].why)
    return ""


def explain_spare(nbytes: int) -> str:
    """Return what the spare files in a full folder of segments wait for, or '' if there are none.

    A writer uses them again or removes them before it waits, so another process has these open.
    """
    if not nbytes:
        return ""
    return (
        f"{readable_bytes(nbytes)} are spare files that a process has open: a loader with views=True holds them while "
        "it keeps batches, so let it copy what it keeps, or end it"
    )


def _sentence(client: Client, stream: Stream, partition: PartitionKeys, roster: Roster, why: str) -> str:
    if why == "memory":
        return "its writer waits for space in the server's memory, which others fill"
    if why == "folder":
        spare = explain_spare(plane_of(stream).spare_bytes)
        return (
            f"its writer waits for space in the full folder of its payloads ({stream.payload.partition(':')[2]})"
            f"{spare and '. '}{spare}"
        )
    share = f"partition {partition.number}'s share of " if len(stream.partitions) > 1 else ""
    budget = f"{share}the budget, {readable_bytes(stream.partition_budget)},"
    parts = [f"{readable_bytes(roster.bytes)} of {budget} is held"]
    now_ms = server_ms(client, partition.roster)
    kept = unacknowledged_bytes(client, stream, partition, roster)
    absent = absent_groups(roster, kept, now_ms)
    for name, nbytes in sorted(kept.items(), key=lambda one: -one[1]):
        is_shared = roster.groups[name].kind == SHARED
        given = hold_of(client, stream, partition, roster, name, with_freed=False).nbytes if is_shared else 0
        # an ordered one also keeps an epoch's first steps, which fill its last one
        need = "has yet to read" if is_shared else "reads in order and needs"
        amounts = [f"{need} {readable_bytes(nbytes - given)}"] if nbytes > given else []
        amounts += [f"has {readable_bytes(given)} unacknowledged"] if given else []
        without = " without a trainer" if name in absent else ""
        parts.append(f"group {name!r}{without} {' and '.join(amounts)}")
    if missing := missing_members(client, partition, roster, roster.groups, now_ms):
        parts.append(f"last seen a while ago: {explain_missing(missing)}")
    return f"its writer waits for space ({'; '.join(parts)})"


def producer_hint(stream: str, epoch: int, seconds: float) -> str:
    """Return what to look at, and in time what to do, if no sample of an epoch came for these seconds."""
    asked = f"Is a producer running (`penstock inspect {stream}`)?"
    if seconds < CLOSE_AFTER_S:
        return f"{asked} Its workers may still be starting"
    return f"{asked} If none will: `penstock epochs close {stream} {epoch}`"


def why_no_epoch(
    stream: str, group: str, roster: Roster, *, first: int, begun: int, given: Iterable[int], half_open: int | None,
    is_feed: bool = False,
) -> str:  # fmt: skip
    """Return why a group has no epoch to read now, and which command makes one.

    Args:
        stream: Name of the stream.
        group: Name of the group.
        roster: Roster of the first partition.
        first: The first epoch that the group reads.
        begun: The number of epochs of the stream that were begun.
        given: Epochs that a member was given to their end. The group may have samples of them to acknowledge.
        half_open: An epoch that a producer is opening, if there is one.
        is_feed: Whether the newest epoch that was given is one of a feed.
    """
    maker = "a `penstock.Writer`" if is_feed else "`penstock produce`"
    if half_open is not None:
        died = f"`penstock epochs abandon {stream} {half_open}` if that died, `penstock trim {stream}` if a server did"
        return f"epoch {half_open} of {stream!r} is being opened by a producer; {died}"
    record = roster.groups.get(group)
    closed = [epoch for name, epoch in roster.closed if name == group]
    released = [(record.first, record.read)] if record and record.read >= record.first else []
    read = merge_ranges([*released, *((epoch, epoch) for epoch in (*closed, *given))])
    if read:
        epochs = "epoch" if read == [(read[0][0], read[0][0])] else "epochs"
        return (
            f"group {group!r} has read {epochs} {format_ranges(read)} of {stream!r}; there is no other: "
            f"{maker} makes one; start='earliest' or penstock.Replay reads the retained again"
        )
    is_before_whole = first - 1 in roster.epochs and first - 1 not in roster.trimmed
    if first > begun or (first == begun and is_before_whole):
        return (
            f"group {group!r} is to begin with epoch {first} of {stream!r}, of which {begun} were begun (0 is the "
            f"first): it is not there yet; `penstock produce` makes epoch {begun} next"
        )
    if first == begun > 0:
        return (
            f"group {group!r} came after epoch {first - 1} of {stream!r}, which is not whole any more, and begins "
            f"with epoch {first}: it is not there yet; `penstock produce` makes epoch {begun} next"
        )
    which = "has no other epoch" if begun else "has no epoch yet"
    return f"stream {stream!r} {which} for group {group!r}: `penstock produce` makes one"


def explain_unacknowledged(held: Mapping[str, int]) -> str:
    """Return what becomes of entries that other members hold. '' without any.

    Args:
        held: Member -> number of its entries.
    """
    if not held:
        return ""
    each = [f"{count} by member {name!r}" for name, count in sorted(held.items(), key=lambda one: -one[1])]
    return (
        f"; blocks of samples held and not acknowledged: {listed(each, SHOWN)}. A new loader of the group gets those "
        "of a member that ends"
    )


def explain_holds(stream: str, roster: Roster, blockers: Iterable[str], now_ms: int, silent_ms: int) -> str:
    """Return what an operator can do about a wait; '' if only time helps.

    Args:
        stream: Name of the stream.
        roster: Roster of the partition.
        blockers: Groups that keep the bytes.
        now_ms: The server's clock.
        silent_ms: Silence after which data is no longer kept for an undeclared group. For a declared one it always is.
    """
    parts = [
        _absent(stream, name, ms, None if roster.groups[name].declared else silent_ms)
        for name, ms in absent_groups(roster, blockers, now_ms).items()
    ]
    pinned = {epoch: roster.epoch_bytes.get(epoch, 0) for epoch in sorted(roster.pinned) if epoch in roster.epochs}
    if held := sum(pinned.values()):
        which = f"epoch{'s' if len(pinned) > 1 else ''} {', '.join(map(str, pinned))}"
        are = "are" if len(pinned) > 1 else "is"
        parts.append(
            f"{which} {are} pinned, with {readable_bytes(held)}: `penstock epochs unpin {stream} {next(iter(pinned))}`"
        )
    return "; ".join(parts)


def _absent(stream: str, name: str, unseen_ms: int, silent_ms: int | None) -> str:
    own = (
        "it is declared, so data is kept for it"
        if silent_ms is None
        else f"it lets go after {readable_span(silent_ms / 1000)}"
    )
    return (
        f"no trainer of group {name!r} was seen for {readable_span(unseen_ms / 1000)} ({own}): start one, or give the "
        f"group up with `penstock groups drop {stream} {name}`"
    )


def explain_missing(missing: Missing) -> str:
    """Return the missing members for people, the first few by name."""
    each = [f"{member} of group {group} ({_last_seen(one)})" for (group, member), one in missing.items()]
    return listed(each, SHOWN)


def _last_seen(one: Liveness) -> str:
    if one.unseen_s is None:
        return "not there"
    return "its process has ended" if one.has_ended else f"{readable_span(one.unseen_s)} ago"
