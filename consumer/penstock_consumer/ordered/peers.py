"""Notices ranks that joined and never asked for a batch, as behind a framework that reads on rank 0 for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import Membership, rank_member, server_ms
from penstock_common.stream.watching.paces import Told, load_paces
from penstock_common.waiting import Notify

FIRST_BATCHES = 20
"""Ranks that train together cannot be so far apart; one that is still loading its model has not joined."""


def are_unused(peers: Sequence[Told | None], since_ms: int) -> bool | None:
    """Return True if all peers said after ``since_ms`` that they never asked for a batch.

    Args:
        peers: the last word of each other rank, None of one that was not heard of lately.
        since_ms: server time at which this rank had its first batches.

    Returns:
        False as soon as one of them has asked; None while that is not known.
    """
    if any(told is not None and (told.samples or told.shares) for told in peers):
        return False
    return True if all(told is not None and told.seen_ms > since_ms for told in peers) else None


class PeerWatch:
    """Rank 0's look at its peers after its first batches. It says at most once that they read nothing."""

    def __init__(self, client: Client, who: Membership, notify: Notify) -> None:
        assert who.order is not None
        self._client, self._who, self._notify, self._order = client.impatient(), who, notify, who.order
        self._since_ms: int | None = None
        self._is_over = self._order.rank != 0 or self._order.world == 1

    def look(self, samples: int) -> None:
        """Look, if ``samples`` trained on here make it due. No failure leaves this."""
        if self._is_over or samples < FIRST_BATCHES * self._order.batch:
            return
        with suppress(Exception):  # a damaged key, too: no notice is worth a training; the next beat looks again
            if self._since_ms is None:
                self._since_ms = server_ms(self._client)
                return
            trainers = load_paces(self._client, self._who.stream).trainers
            peers = [trainers.get((self._who.group, rank_member(rank))) for rank in range(1, self._order.world)]
            verdict = are_unused(peers, self._since_ms)
            self._is_over = verdict is not None
            if verdict:
                self._notify(self._said())

    def _said(self) -> str:
        world = self._order.world
        peers = "rank 1" if world == 2 else f"ranks 1 to {world - 1}"
        return (
            f"{peers} of group {self._who.group!r} joined and asked for no batch while rank 0 read {FIRST_BATCHES}: "
            f"1/{world} of each epoch is trained on. If Accelerate or the Hugging Face Trainer prepared the "
            "DataLoader, leave it out, accelerator.prepare(model, optimizer), so that every rank reads its own share"
        )
