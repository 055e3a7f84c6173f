"""Conduct a run: inflict faults for its time, watch for progress, then let every process end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import redis

from chaos.agenda import Agenda
from chaos.cast import Cast, Say
from chaos.inflict import Inflictor
from chaos.keys import AWAY, PRODUCED, epochs, partitions, rostered, settled
from chaos.lives import FAILED
from chaos.options import Options
from chaos.schedule import Fault, faults
from chaos.stage import Stage

TICK_S = 0.05
LOOK_S = 0.5
LEAVE_S = 60.0
"""The longest time that a process may take to leave."""
STACKS_S = 2.0
ENOUGH = 10
"""The violations after which a run ends, because it would show nothing more."""


class BrokenOff(Exception):
    """A run that ended early: nothing moved for too long, or there were too many violations.

    If nothing moved, the stacks of all processes are in their files.
    """


class Conductor:
    """The sequence of one run on one stage."""

    def __init__(self, options: Options, directory: Path, stage: Stage, say: Say) -> None:
        self._options, self._directory, self._stage, self._say = options, directory, stage, say
        self._agenda = Agenda()
        self.cast = Cast(stage, self._agenda, say)
        self.inflictor = Inflictor(stage, self.cast, self._agenda)
        self._began = time.monotonic()
        self._size = -1
        self._moved = self._looked = time.monotonic()

    def run(self) -> None:
        """Do the whole run. Raises BrokenOff."""
        self.cast.enter()
        self._play(lambda: all(actor.has_begun for actor in self.cast.trainers))
        self._began = time.monotonic()
        self._make_trouble()
        self._say(f"{time.monotonic() - self._began:.0f} s: no more faults; everything may end now")
        self._make_peace()
        self._drain()
        self._dismiss()

    def _make_trouble(self) -> None:
        options = self._options
        planned = faults(
            options.seed, options.seconds, options.pause_s,
            server_kills=options.server_kills, networks=options.networks, cluster=options.cluster,
        )  # fmt: skip
        for fault in planned:
            self._play(lambda fault=fault: self._elapsed() >= fault.at_s)  # type: ignore[misc]
            self._inflict(fault)
        self._play(lambda: self._elapsed() >= options.seconds)

    def _inflict(self, fault: Fault) -> None:
        hit = self.inflictor.inflict(fault)
        self._say(f"{self._elapsed():6.1f} s  {fault.kind}: {hit or '(nobody there)'}")

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _play(self, is_over: Callable[[], bool]) -> None:
        """Tend the processes and do what is due until ``is_over`` returns True."""
        while not is_over():
            self._agenda.do_due()
            self.cast.tend()
            self._watch()
            time.sleep(TICK_S)

    # --- the end ---

    def _make_peace(self) -> None:
        """End all faults: every process runs, the server answers, and each group has its members.

        The feeder is asked to leave. The last round of the dispatcher begins, or continues.
        """
        self.cast.is_ending = True
        self._agenda.do_all()
        self.cast.refill_all()
        if self.cast.feeder is not None:
            self.cast.feeder.terminate()

    def _drain(self) -> None:
        """Wait until everything is produced and every group has closed every epoch.

        A trainer that was leaving when the faults ended is replaced.
        """
        self._play(self._is_drained)

    def _is_drained(self) -> bool:
        if time.monotonic() - self._looked < LOOK_S:
            return False
        self._looked = time.monotonic()
        self.cast.refill_all()
        return self.cast.dispatcher is None and self.cast.feeder is None and self._is_all_settled()

    def _is_all_settled(self) -> bool:
        try:
            with self._stage.client() as client:
                return all(_is_settled(client, stream, group) for stream, group in self.cast.groups())
        except AWAY:
            return False

    def _dismiss(self) -> None:
        """Make every process leave; one that does not leave is a violation."""
        leaving = self.cast.live()
        for actor in leaving:
            actor.terminate()
        deadline = time.monotonic() + LEAVE_S
        while time.monotonic() < deadline and any(actor.poll() is None for actor in leaving):
            time.sleep(TICK_S)
        for actor in leaving:
            if actor.poll() is None:
                actor.show_stacks()
                time.sleep(STACKS_S)
                self.cast.violations.append(f"{actor.name} did not leave within {LEAVE_S:.0f} s: {actor.errors_file}")
            elif actor.life.ending == FAILED:
                self.cast.violations.append(f"{actor.name} left with {actor.process.returncode}: {actor.last_words()}")

    def close(self) -> None:
        """End every process that still runs."""
        for actor in self.cast.everyone:
            actor.end()

    # --- the watchdog ---

    def _watch(self) -> None:
        """Raise BrokenOff if no journal has grown for too long. Journals grow as long as anything moves."""
        if len(self.cast.violations) >= ENOUGH:
            raise BrokenOff("too many violations to go on")
        size = sum(path.stat().st_size for path in self._directory.glob("*.journal"))
        if size != self._size:
            self._size, self._moved = size, time.monotonic()
        elif time.monotonic() - self._moved > self._options.patience_s:
            for actor in self.cast.live():
                actor.show_stacks()
            time.sleep(STACKS_S)
            raise BrokenOff(
                f"nothing moved for {self._options.patience_s:.0f} s; stacks of all processes are in their .err"
            )


def _is_settled(client: redis.Redis, name: str, group: str) -> bool:
    first = partitions(client, name)[0]
    states, known, done = epochs(client, name), rostered(client, first), settled(client, first, group)
    # an epoch that is not on the roster has a release that a dead writer began; the next writer that needs quota ends
    # it
    there = {epoch: state for epoch, state in states.items() if epoch in known or state != PRODUCED}
    return all(state == PRODUCED and epoch in done for epoch, state in there.items())
