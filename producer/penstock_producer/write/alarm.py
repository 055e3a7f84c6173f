"""Explanations of a wait: groups without trainers and pinned epochs that keep bytes from being freed."""

from __future__ import annotations

from collections.abc import Iterable

from penstock_common.stream.groups.presence import liveness_of
from penstock_common.stream.groups.roster import Roster
from penstock_common.stream.servers.suitability import readable_bytes


def absent_groups(roster: Roster, groups: Iterable[str], now_ms: int) -> dict[str, int]:
    """Return those of the groups that have no live member, with the milliseconds since they were last seen."""
    living = {group for group, _ in _live_members(roster, now_ms)}
    return {
        name: now_ms - roster.groups[name].seen_ms for name in groups if name in roster.groups and name not in living
    }


def idle_groups(roster: Roster, now_ms: int) -> dict[str, int]:
    """Return groups whose live members all wait for a batch, with the bytes they have not acknowledged."""
    living = _live_members(roster, now_ms)
    busy = {who[0] for who in living if who not in roster.idle}
    found: dict[str, int] = {}
    for who in living:
        if who[0] not in busy:
            found[who[0]] = found.get(who[0], 0) + roster.idle[who].handed_bytes
    return found


def _live_members(roster: Roster, now_ms: int) -> list[tuple[str, str]]:
    return [who for who, liveness in liveness_of([roster], now_ms).items() if liveness.may_be_at_work]


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
    own = "it is declared, so data is kept for it" if silent_ms is None else f"it lets go after {_span(silent_ms)}"
    return (
        f"no trainer of group {name!r} was seen for {_span(unseen_ms)} ({own}): start one, or give the group up with "
        f"`penstock groups drop {stream} {name}`"
    )


def _span(span_ms: int) -> str:
    seconds = max(0, span_ms) / 1000
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
