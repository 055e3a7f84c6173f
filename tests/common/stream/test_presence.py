"""A rule of values decides whether a process has ended, and this host's kernel answers for real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock_common.explain.sentences import explain_missing
from penstock_common.stream.groups import presence
from penstock_common.stream.groups.presence import (
    ALIVE_MS,
    MEMBER_SILENT_MS,
    Liveness,
    ended_members,
    liveness_of,
    new_incarnation,
    process_of,
    start_time,
)
from penstock_common.stream.groups.roster import UNSEEN_MS, Roster

HERE, ELSEWHERE = "0123456789abcdef", "fedcba9876543210"
WHO = ("g", "m")
INCARNATION = f"a1@{HERE}.4711.900"
INCARNATE = "from penstock_common.stream.groups.presence import *; print(new_incarnation())"


def judged(incarnation: str, started: int | None, *, here: str = HERE, silent_ms: int = MEMBER_SILENT_MS) -> bool:
    """Return whether a member of this incarnation counts as ended, if its pid is found to have started at that time."""
    roster = Roster("0", members={WHO: 1000}, incarnations={WHO: incarnation})
    return WHO in ended_members(roster, 1000 + silent_ms, here=here, started=lambda pid: started)


class TestRule:
    """Only certainty ends a lease early."""

    @pytest.mark.parametrize("started", [0, 901])
    def test_a_process_that_is_gone_or_whose_pid_was_given_again_has_ended(self, started: int) -> None:
        """Pids are used again, and the start time tells one process from the next."""
        assert judged(INCARNATION, started)

    @pytest.mark.parametrize(
        ("incarnation", "started", "here", "silent_ms"),
        [
            (INCARNATION, 900, HERE, 60_000),  # it exists, however silent it is
            (INCARNATION, None, HERE, 60_000),  # its pid is unknown
            (INCARNATION, 0, ELSEWHERE, 60_000),  # another host, or another pid namespace of this one
            (INCARNATION, 0, "", 60_000),  # the judging process does not know its own namespace
            (INCARNATION, 0, HERE, MEMBER_SILENT_MS - 1),  # it has just renewed
            ("a1", 0, HERE, 60_000),  # from an older version, or from a system without /proc
        ],
    )
    def test_whoever_may_live_is_left_to_its_lease(
        self, incarnation: str, started: int | None, here: str, silent_ms: int
    ) -> None:
        """A wrong verdict would yield samples again that a live trainer trains on."""
        assert not judged(incarnation, started, here=here, silent_ms=silent_ms)

    @pytest.mark.parametrize(
        "nonsense",
        ["", "@", f"a@{HERE}.-1.5", f"a@{HERE}.0.5", f"a@{HERE}.1.5\n", f"a@{HERE}.99999999.5", f"a@{HERE}.١.5",
         f"a@{HERE}.1.{'9' * 400}", f"a@{HERE[:-1]}.1.5", f"{'a' * 4000}@{HERE}.1.5", f"a@{HERE}.1.5.6"],
    )  # fmt: skip
    def test_nonsense_on_the_roster_names_no_process(self, nonsense: str) -> None:
        """Anyone who may write the keys may write this: no pid of it reaches the kernel."""
        assert process_of(nonsense) is None


class TestLiveness:
    """One value describes the liveness of a member, and every command reads it."""

    @pytest.mark.parametrize(
        ("liveness", "is_silent", "may_be_at_work"),
        [
            (Liveness(0), False, True),
            (Liveness(UNSEEN_MS), False, True),
            (Liveness(UNSEEN_MS + 1), True, True),
            (Liveness(ALIVE_MS - 1), True, True),
            (Liveness(ALIVE_MS), True, False),
            (Liveness(MEMBER_SILENT_MS, has_ended=True), True, False),
            (Liveness(), True, False),
        ],
    )
    def test_a_member_is_silent_before_it_is_taken_for_dead(
        self, liveness: Liveness, is_silent: bool, may_be_at_work: bool
    ) -> None:
        """Silence is only shown. A group is reset, or a stream deleted, once no process may be training."""
        assert (liveness.is_silent, liveness.may_be_at_work) == (is_silent, may_be_at_work)

    def test_the_latest_heartbeat_in_any_partition_counts(self) -> None:
        """A member renews one partition after another."""
        rosters = [Roster("0", members={WHO: 1000, ("g", "n"): 2000}), Roster("0", members={WHO: 4000})]
        assert liveness_of(rosters, 5000) == {WHO: Liveness(1000), ("g", "n"): Liveness(3000)}

    def test_a_member_that_ended_on_this_host_is_silent_at_once(self) -> None:
        """A process that waits for this member learns so after three seconds, not after ten."""
        with subprocess.Popen([sys.executable, "-c", INCARNATE], stdout=-1, text=True) as child:
            assert child.stdout is not None
            incarnation = child.stdout.read().strip()
        roster = Roster("0", members={WHO: 1000}, incarnations={WHO: incarnation})
        found = liveness_of([roster], 1000 + MEMBER_SILENT_MS)
        assert found == {WHO: Liveness(MEMBER_SILENT_MS, has_ended=True)}
        assert explain_missing(found) == "m of group g (its process has ended)"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that does nothing, and is not reaped before the test ends."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


class TestKernel:
    """The answers of Linux identify a process and its lifetime."""

    def test_an_incarnation_names_the_process_that_made_it(self) -> None:
        """Two incarnations of one process differ, too: the older one stops."""
        first, second = process_of(new_incarnation()), process_of(new_incarnation())
        assert first == second
        assert first is not None
        assert (first.pid, first.started) == (os.getpid(), start_time(os.getpid()))
        assert new_incarnation() != new_incarnation()

    def test_a_stopped_process_lives_and_a_killed_one_does_not_even_unreaped(
        self, sleeper: subprocess.Popen[bytes]
    ) -> None:
        """A debugger or a full disk stops processes for minutes.

        A parent that does not wait for its children leaves zombies.
        """
        began = start_time(sleeper.pid)
        assert began
        sleeper.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        assert start_time(sleeper.pid) == began
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert start_time(sleeper.pid) == 0
        sleeper.wait()
        assert start_time(sleeper.pid) == 0

    @pytest.mark.parametrize("stat", [None, "", "12 (a b) S 1", "12 (x) S" + " y" * 30])
    def test_a_process_that_proc_does_not_show_is_unknown(
        self, stat: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """/proc may hide other users' processes, or belong to another namespace."""
        monkeypatch.setattr(presence, "_PROC", tmp_path)
        if stat is not None:
            (tmp_path / str(os.getpid())).mkdir()
            (tmp_path / str(os.getpid()) / "stat").write_text(stat)
        assert start_time(os.getpid()) is None

    def test_a_zombie_with_other_threads_lives(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its main thread has ended, but the other threads continue to train."""
        monkeypatch.setattr(presence, "_PROC", tmp_path)
        (tmp_path / str(os.getpid())).mkdir()
        stat = tmp_path / str(os.getpid()) / "stat"
        for threads, expected in (("2", 900), ("1", 0)):
            stat.write_text(f"1 (a) b) Z {'0 ' * 16}{threads} 0 900 0")
            assert start_time(os.getpid()) == expected

    def test_an_incarnation_names_no_process_where_proc_is_anothers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A container with its host's /proc would look for its pids among the host's."""
        monkeypatch.setattr(presence, "_PROC", tmp_path)
        (tmp_path / "self").symlink_to("1")
        assert process_of(new_incarnation()) is None
        (tmp_path / "self").unlink()
        assert process_of(new_incarnation()) is None

    def test_another_boot_or_pid_namespace_is_another_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Containers of one host have a pid 7 each, and a host has one again after each boot."""
        me = tmp_path / str(os.getpid())
        (me / "ns").mkdir(parents=True)
        (me / "stat").write_text(f"1 (a) S {'0 ' * 16}1 0 900 0")
        (tmp_path / "self").symlink_to(me.name)
        boot = tmp_path / "sys/kernel/random/boot_id"
        boot.parent.mkdir(parents=True)
        monkeypatch.setattr(presence, "_PROC", tmp_path)

        def place(boot_id: str, namespace: str) -> Any:
            boot.write_text(boot_id)
            (me / "ns/pid").unlink(missing_ok=True)
            (me / "ns/pid").symlink_to(f"pid:[{namespace}]")
            process = process_of(new_incarnation())
            assert process is not None
            return process.where

        assert len({place("one", "1"), place("one", "2"), place("two", "1")}) == 3
        assert place("one", "1") == place("one", "1")
