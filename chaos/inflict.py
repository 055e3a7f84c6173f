"""Inflict one fault on the run: choose the process that it hits, and plan when and how it ends."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from chaos.actor import Actor, signal_if_there
from chaos.agenda import Agenda
from chaos.cast import Cast
from chaos.cluster import Later, ServerCluster
from chaos.links import Begun
from chaos.options import RANKS
from chaos.schedule import Fault
from chaos.stage import Stage

MOST_EXTRA = 2
"""The most trainers that a group may have beyond its number."""

AGAIN_S = 0.1
"""The pause before another look whether a trainer has left."""

One = TypeVar("One")


class Inflictor:
    """The faults that can hit the processes of one run. ``counts`` has the number of each that were done."""

    def __init__(self, stage: Stage, cast: Cast, agenda: Agenda) -> None:
        self._stage, self._cast, self._agenda = stage, cast, agenda
        self._lease_s = stage.options.lease_s
        self.counts: Counter[str] = Counter()
        cluster, links = stage.cluster, stage.links
        self._deeds: dict[str, Callable[[Fault], str]] = {
            "kill a worker": self._kill_worker,
            "stop a worker": self._stop_worker,
            "end a worker": self._end_worker,
            "kill the dispatcher": partial(self._kill_one, "dispatcher"),
            "stop the dispatcher": partial(self._stop_one, "dispatcher"),
            "kill the workers' host": partial(self._kill_one, "host"),
            "kill a trainer": self._kill_trainer,
            "stop a trainer briefly": partial(self._stop_trainer, 0.05, 0.6),
            "stop a trainer beyond its lease": partial(self._stop_trainer, 1.2, 2.5),
            "let a trainer leave": self._let_leave,
            "let a trainer join": self._let_join,
            "start a trainer twice": self._start_twice,
            "kill the feeder": partial(self._kill_one, "feeder"),
            "stop the feeder": partial(self._stop_one, "feeder"),
            "cut connections": self._cut_connections,
            "kill the server": partial(self._server_away, stage.kill_server, stage.start_server, 3.0),
            "restart the server": partial(self._server_away, stage.end_server, stage.start_server, 3.0),
            "stop the server": partial(
                self._server_away, stage.stop_server, stage.continue_server, 1.5 * self._lease_s
            ),
        }
        if cluster is not None:
            self._deeds |= {
                "kill a master": partial(self._hit_cluster, cluster, cluster.kill_master),
                "stop a master": partial(self._hit_cluster, cluster, cluster.stop_master),
                "fail a master over": partial(self._hit_cluster, cluster, cluster.fail_over),
                "cut a replica off": partial(self._hit_cluster, cluster, cluster.cut_replica),
                "tear a master": partial(self._hit_cluster, cluster, cluster.tear),
                "move a slot": partial(self._hit_cluster, cluster, cluster.move_slot),
            }
        if links is not None:
            self._deeds |= {
                "lose packets": partial(self._hit_link, links.lose),
                "cut a link": partial(self._hit_link, links.cut),
                "cut a link one way": partial(self._hit_link, links.cut_one_way),
                "unplug a host": partial(self._hit_link, links.unplug),
                "slow a link": partial(self._hit_link, links.slow),
            }

    def inflict(self, fault: Fault) -> str:
        """Inflict a fault and return the name of its victim, or '' if there is none now."""
        hit = self._deeds[fault.kind](fault)
        if hit:
            self.counts[fault.kind] += 1
        return hit

    # --- workers ---

    def _kill_worker(self, fault: Fault) -> str:
        return self._signal_worker(fault, signal.SIGKILL)

    def _end_worker(self, fault: Fault) -> str:
        return self._signal_worker(fault, signal.SIGTERM)

    def _stop_worker(self, fault: Fault) -> str:
        found = _picked(list(self._cast.workers()), fault)
        if found is None:
            return ""
        signal_if_there(found[1], signal.SIGSTOP)
        seconds = 0.2 + fault.length * 8
        self._agenda.later(seconds, partial(signal_if_there, found[1], signal.SIGCONT))
        return f"pid {found[1]} of {found[0].name} for {seconds:.1f} s"

    def _signal_worker(self, fault: Fault, number: signal.Signals) -> str:
        found = _picked(list(self._cast.workers()), fault)
        if found is None:
            return ""
        signal_if_there(found[1], number)
        return f"pid {found[1]} of {found[0].name}"

    # --- processes that exist once ---

    def _the(self, role: str) -> Actor | None:
        actor: Actor | None = getattr(self._cast, role)
        return actor if actor is not None and actor.process.poll() is None and not actor.is_stopped else None

    def _kill_one(self, role: str, fault: Fault) -> str:
        actor = self._the(role)
        if actor is None:
            return ""
        actor.kill()
        return actor.name

    def _stop_one(self, role: str, fault: Fault) -> str:
        actor = self._the(role)
        return "" if actor is None else self._stop(actor, 0.2 + fault.length * 8)

    def _stop(self, actor: Actor, seconds: float) -> str:
        actor.stop()
        self._agenda.later(seconds, actor.go_on)
        return f"{actor.name} for {seconds:.1f} s"

    # --- trainers ---

    def _trainer(self, fault: Fault) -> Actor | None:
        free = [a for a in self._cast.trainers if a.process.poll() is None and not a.is_stopped and not a.is_leaving]
        return _picked(free, fault)

    def _kill_trainer(self, fault: Fault) -> str:
        actor = self._trainer(fault)
        if actor is None:
            return ""
        actor.kill()
        return f"{actor.name}, back as {self._return(actor, fault)}"

    def _stop_trainer(self, shortest: float, longest: float, fault: Fault) -> str:
        actor = self._trainer(fault)
        if actor is None:
            return ""
        return self._stop(actor, self._lease_s * (shortest + (longest - shortest) * fault.length))

    def _let_leave(self, fault: Fault) -> str:
        actor = self._trainer(fault)
        if actor is None:
            return ""
        actor.terminate()
        return f"{actor.name}, back as {self._return(actor, fault)}"

    def _return(self, actor: Actor, fault: Fault) -> str:
        """Plan a trainer's return, under its own name or under a new one, as in a new container."""
        life = actor.life
        same = fault.coin or life.group == RANKS
        name = life.member if same else self._cast.new_name(life.group)
        self._agenda.later(0.1 + 3 * fault.length, partial(self._come_back, actor, name))
        return name

    def _come_back(self, gone: Actor, name: str) -> None:
        """Start the trainer that replaces ``gone``, once that has left: without a server it takes seconds."""
        if gone in self._cast.trainers and not self._cast.is_ending:
            self._agenda.later(AGAIN_S, partial(self._come_back, gone, name))
        else:
            self._cast.refill(gone.life.stream, gone.life.group, name)

    def _let_join(self, fault: Fault) -> str:
        stream, group = self._cast.groups()[int(fault.pick * len(self._cast.groups()))]
        if group == RANKS or self._cast.count(group) >= self._stage.options.members + MOST_EXTRA:
            return ""
        return self._cast.add_trainer(stream, group).name

    def _start_twice(self, fault: Fault) -> str:
        actor = self._trainer(fault)
        if actor is None or actor.life.replaced_ns or not actor.has_begun:
            return ""
        life = actor.life
        return f"{actor.name} as {self._cast.add_trainer(life.stream, life.group, life.member).name}"

    # --- the server ---

    def _cut_connections(self, fault: Fault) -> str:
        if not self._stage.is_up:
            return ""
        count = self._stage.cut_connections(fault.pick, 0.1 + 0.9 * fault.length)
        return f"{count} of them" if count else ""

    def _server_away(self, take: Callable[[], None], bring: Callable[[], None], longest_s: float, fault: Fault) -> str:
        if not self._stage.is_up:
            return ""
        take()
        seconds = fault.length * longest_s
        self._agenda.later(seconds, bring)
        return f"for {seconds:.1f} s"

    # --- a cluster, and links ---

    def _hit_cluster(
        self, cluster: ServerCluster, begin: Callable[[float, float], tuple[str, Later]], fault: Fault
    ) -> str:
        """Inflict one fault at a time: the next one waits until each master is followed by a replica again.

        It also waits for a feeder that starts, which does not know yet that a replica follows.
        """
        is_feeding = self._cast.feeder is None or self._cast.feeder.has_begun
        if not self._stage.is_up or not is_feeding or not cluster.is_well():
            return ""
        self._stage.begin_failover()
        hit, later = begin(fault.pick, fault.length)
        for seconds, action in later:
            self._agenda.later(seconds, action)
        self._agenda.later(max((seconds for seconds, _ in later), default=0.0) + AGAIN_S, self._await_well)
        return hit

    def _await_well(self) -> None:
        if self._stage.cluster is not None and not self._stage.cluster.is_well():
            time.sleep(AGAIN_S)
            self._agenda.later(AGAIN_S, self._await_well)
        else:
            self._stage.end_failover()

    def _hit_link(self, begin: Callable[[Fault], Begun], fault: Fault) -> str:
        begun = begin(fault)
        if begun is None:
            return ""
        hit, seconds, end = begun
        self._agenda.later(seconds, end)
        return hit


def _picked(those: Sequence[One], fault: Fault) -> One | None:
    return those[int(fault.pick * len(those))] if those else None
