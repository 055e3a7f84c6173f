"""The faults of a run: each group gets its trainers back, or the rest of the run would test less than it says."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from chaos.actor import Actor
from chaos.agenda import Agenda
from chaos.cast import Cast
from chaos.inflict import Inflictor
from chaos.lives import Life
from chaos.options import MAIN, RANKS, Options
from chaos.schedule import Fault
from chaos.stage import Stage

LEAVES_SLOWLY = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.6), os._exit(0)))
pathlib.Path({path!r}).write_text("B 1\\n")
time.sleep(60)
"""
LIMIT_S = 20.0


class SlowStage(Stage):
    """A stage on which trainers take their time to leave, as they do without a server."""

    def start_trainer(self, stream: str, group: str, member: str, *, in_node: bool) -> Actor:
        """Start a process that leaves 0.6 s after it was asked to."""
        number = len(list(self.directory.glob("*.journal")))
        journal = self.directory / f"{group}-{member}-{number}.journal"
        life = Life("trainer", stream, group, member, journal)
        return Actor(life, ["timeit", "-n1", "-r1", LEAVES_SLOWLY.format(path=str(journal))], {})


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Return a stage for one rank."""
    return SlowStage(Options(seed=1, minutes=1, ranks=1), tmp_path)


def test_a_trainer_that_takes_long_to_leave_comes_back(stage: Stage) -> None:
    """A rank that stays away holds up every group: nothing that it has not acknowledged is released."""
    agenda = Agenda()
    cast = Cast(stage, agenda, say=lambda text: None)
    try:
        first = cast.add_trainer(MAIN, RANKS)
        deadline = time.monotonic() + LIMIT_S
        while not first.has_begun and time.monotonic() < deadline:
            time.sleep(0.02)
        hit = Inflictor(stage, cast, agenda).inflict(Fault(0.0, "let a trainer leave", 0.0, 0.0, coin=True))
        assert hit.endswith("back as 0")
        while cast.trainers[:1] in ([first], []) and time.monotonic() < deadline:
            agenda.do_due()
            cast.tend()
            time.sleep(0.02)
        assert [actor.life.member for actor in cast.trainers] == ["0"]
        assert first.life.ending == "left"
    finally:
        for actor in cast.everyone:
            actor.end()
        stage.close()


def test_a_feeder_starts_once_every_master_has_its_replica_again(tmp_path: Path) -> None:
    """Without one, `auto` means `memory`. A torn master and a killed feeder then lose samples permanently.

    For the same reason no replica is cut off while a feeder starts.
    """
    stage, agenda = Stage(Options(seed=1, minutes=1, cluster=True, node=0), tmp_path), Agenda()
    cast = Cast(stage, agenda, say=lambda text: None)
    try:
        assert stage.cluster is not None
        _, later = stage.cluster.cut_replica(0.0, 0.0)
        cast._start_feeder()
        assert not cast.everyone
        for _, action in later:
            action()
        deadline = time.monotonic() + 3 * LIMIT_S
        while not cast.everyone and time.monotonic() < deadline:
            agenda.do_due()
            time.sleep(0.05)
        assert [actor.life.role for actor in cast.everyone] == ["feeder"]
        cut = Fault(0.0, "cut a replica off", 0.0, 0.0, coin=True)
        assert Inflictor(stage, cast, agenda).inflict(cut) == "", "the feeder has not seen a replica yet"
        while not cast.feeder.has_begun and time.monotonic() < deadline:  # type: ignore[union-attr]
            time.sleep(0.05)
        assert Inflictor(stage, cast, agenda).inflict(cut) != ""
        agenda.do_all()
    finally:
        for actor in cast.everyone:
            actor.end()
        stage.close()
