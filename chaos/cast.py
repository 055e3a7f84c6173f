"""All processes of a run: keep as many running in each role as there should be, whatever faults hit them.

`chaos.inflict` chooses the process that a fault hits. `chaos.conductor` decides when the run is over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count

from chaos.actor import Actor
from chaos.agenda import Agenda
from chaos.command import penstock
from chaos.journal import read_journal
from chaos.keys import ABANDONED, AWAY, PRODUCED, epochs
from chaos.lives import FAILED, NODE_TRAINER
from chaos.options import FEED, MAIN, RANKS
from chaos.stage import FEED_GROUP, Stage

RESTART_S = 0.5
UNAVAILABLE = "ServerUnavailable"
"""The name of the error of a process that found no server."""

Say = Callable[[str], None]


class Cast:
    """All processes of a run, living and dead."""

    def __init__(self, stage: Stage, agenda: Agenda, say: Say) -> None:
        self._stage, self._agenda, self._say = stage, agenda, say
        self.everyone: list[Actor] = []
        self.trainers: list[Actor] = []
        self.dispatcher: Actor | None = None
        self.host: Actor | None = None
        self.feeder: Actor | None = None
        self.own_ends: Counter[str] = Counter()
        """(role, error) -> the processes that ended without a fault."""
        self.violations: list[str] = []
        self.is_ending = False
        """Whether no new rounds and no new feed are started. What is begun is completed."""
        self.rounds = 0
        """The `penstock produce` commands that succeeded."""
        self._members = 0

    def enter(self) -> None:
        """Start every process for the first time."""
        self._start_dispatcher()
        self._start_host()
        self._start_feeder()
        for stream, group in self.groups():
            for _ in range(self._stage.options.members_of(group)):
                self.add_trainer(stream, group)

    def groups(self) -> list[tuple[str, str]]:
        """Return the (stream, group) pairs of all groups."""
        return [*((MAIN, group) for group in self._stage.options.groups_of_main()), (FEED, FEED_GROUP)]

    def live(self) -> list[Actor]:
        """Return all processes that run now."""
        return [actor for actor in self.everyone if actor.process.returncode is None]

    def new_name(self, group: str) -> str:
        """Return an unused member name; for a rank, the lowest number that is free."""
        if group == RANKS:
            taken = {actor.life.member for actor in self.trainers if actor.life.group == group}
            return next(str(rank) for rank in count() if str(rank) not in taken)
        self._members += 1
        return f"m{self._members}"

    def add_trainer(self, stream: str, group: str, member: str = "") -> Actor:
        """Start one more trainer, under a new name or under one that was used before."""
        member = member or self.new_name(group)
        for other in self.trainers:
            if (other.life.group, other.life.member) == (group, member) and other.process.poll() is None:
                other.life.replaced_ns = other.life.replaced_ns or time.monotonic_ns()
        # who comes back under a name may run in the other language than the one before it
        in_node = self._count_node(group) < self._stage.options.node
        actor = self._appear(self._stage.start_trainer(stream, group, member, in_node=in_node))
        self.trainers.append(actor)
        return actor

    def count(self, group: str) -> int:
        """Count the live trainers of a group."""
        return sum(actor.life.group == group for actor in self.trainers)

    def _count_node(self, group: str) -> int:
        return sum(actor.life.group == group and actor.life.role == NODE_TRAINER for actor in self.trainers)

    def refill(self, stream: str, group: str, member: str = "") -> None:
        """Add a trainer as `add_trainer` does, unless the group has as many as it should have."""
        if self.count(group) < self._stage.options.members_of(group):
            self.add_trainer(stream, group, member)

    def refill_all(self) -> None:
        """Give every group its full number of members again."""
        for stream, group in self.groups():
            while self.count(group) < self._stage.options.members_of(group):
                self.add_trainer(stream, group)

    # --- tending them ---

    def tend(self) -> None:
        """Notice the processes that ended, and plan their replacement."""
        for actor in list(self.trainers):
            if actor.poll() is not None:
                self.trainers.remove(actor)
                self._has_ended(actor)
                if actor.life.ending == FAILED and not actor.life.replaced_ns and not self.is_ending:
                    life = actor.life
                    self._agenda.later(RESTART_S, lambda life=life: self.refill(life.stream, life.group, life.member))  # type: ignore[misc]
        self._tend_dispatcher()
        if self.host is not None and self.host.poll() is not None:
            self._has_ended(self.host)
            self.host = None
            self._agenda.later(RESTART_S, self._start_host)
        if self.feeder is not None and self.feeder.poll() is not None:
            self._has_ended(self.feeder)
            self.feeder = None
            self._agenda.later(RESTART_S, self._start_feeder)

    def _tend_dispatcher(self) -> None:
        actor = self.dispatcher
        if actor is None or (code := actor.poll()) is None:
            return
        self.dispatcher = None
        self._has_ended(actor)
        if code == 0:
            self.rounds += 1
        if not (code == 0 and self.is_ending):
            self._agenda.later(0.0 if code == 0 else RESTART_S, self._start_dispatcher)

    def _has_ended(self, actor: Actor) -> None:
        if actor.life.ending != FAILED:
            return
        words = next((line.words for line in read_journal(actor.life.journal) if line.letter == "E"), None)
        error = words[0] if words else _kind(actor.last_words())
        role = actor.life.role
        self.own_ends[f"{role}: {error}"] += 1
        self._say(f"{actor.name} ended by itself: {actor.last_words(1) or actor.process.returncode}")
        is_too_late = self.is_ending and error == "WaitTimeout"  # no epoch came for a minute, so none will come
        if not is_too_late and not _is_fair(actor, error) and not self._is_undone(actor, error):
            self.violations.append(f"{actor.name} ended: {actor.last_words()[:500] or error}")

    def _is_undone(self, actor: Actor, error: str) -> bool:
        """Return whether a failover may have undone how this process took the name of another one.

        The successor then knows the one before it, so each of the two may take the other for its successor.
        """
        mine = actor.life
        same = [
            other.life for other in self.everyone if (other.life.group, other.life.member) == (mine.group, mine.member)
        ]
        is_shared = any(life.replaced_ns and life.replaced_ns <= mine.ended_ns for life in same)
        return self._stage.cluster is not None and error == "MemberReplaced" and is_shared

    # --- entrances ---

    def _appear(self, actor: Actor) -> Actor:
        self.everyone.append(actor)
        return actor

    def _start_dispatcher(self) -> None:
        if self.dispatcher is None:
            self.dispatcher = self._appear(self._stage.start_dispatcher())

    def _start_host(self) -> None:
        if self.host is None:
            self.host = self._appear(self._stage.start_host())

    def _start_feeder(self) -> None:
        """Start a feeder, after closing the epoch that a dead one left open, as an operator would.

        One that starts while a master has no replica takes it for one without, and keeps nothing for a failover.
        """
        if self.feeder is not None:
            return
        cluster = self._stage.cluster
        if (cluster is not None and not cluster.is_well()) or not self.close_feed():
            self._agenda.later(RESTART_S, self._start_feeder)
        elif not self.is_ending:
            self.feeder = self._appear(self._stage.start_feeder(self._fed()))

    def _fed(self) -> int:
        """Return how many samples were given to the feed so far, committed or not."""
        journals = [actor.life.journal for actor in self.everyone if actor.life.role == "feeder"]
        return max(
            (int(line.words[0]) for path in journals for line in read_journal(path) if line.letter == "W"), default=0
        )

    def close_feed(self) -> bool:
        """Close open epochs of the feed as they stand; return False if the server cannot be reached now."""
        if not self._stage.is_up:
            return False
        try:
            with self._stage.client() as client:
                found = epochs(client, FEED)
        except AWAY:
            return False
        for epoch in [number for number, state in found.items() if state not in (PRODUCED, ABANDONED)]:
            done = penstock(self._stage.url, "epochs", "close", FEED, epoch)
            if done.returncode and _kind(done.stderr) == UNAVAILABLE:
                return False
            if done.returncode:
                self.violations.append(f"closing epoch {epoch} of the feed failed: {done.stderr.strip()}")
        return True

    def workers(self) -> Iterator[tuple[Actor, int]]:
        """Yield the parent and the process id of every live worker."""
        for owner in (self.dispatcher, self.host):
            if owner is not None and not owner.is_stopped:
                for pid in owner.workers():
                    yield owner, pid


def _is_fair(actor: Actor, error: str) -> bool:
    """Return whether a process may end with this error.

    A process that has begun outlives every outage of a run, except the dispatcher and the host, which depend on rq. A
    process that was asked to leave does not wait long for a server.
    """
    if error == UNAVAILABLE:
        return actor.life.role in ("dispatcher", "host") or not actor.has_begun or actor.is_leaving
    return error == "MemberReplaced" and actor.life.replaced_ns > 0


def _kind(words: str) -> str:
    """Return the kind of error that ended a Penstock command. Its last output names no class."""
    away = (
        "closed the connection",
        "no Redis answers",
        "does not answer",
        "still loading",
        "does not serve these keys",
    )
    return UNAVAILABLE if any(text in words for text in away) else "unknown"
