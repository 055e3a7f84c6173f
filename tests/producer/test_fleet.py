"""A fleet from outside: what rq shows of it, epochs that follow the trainers, and as many workers as these need."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.stream.client import connect
from penstock_common.stream.groups.roster import GroupRecord, Roster, load_roster
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.reported_rates import load_reported_rates
from penstock_common.stream.streams import load_stream, read_counters
from penstock_producer.jobs.allowlist import ANYTHING
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import Fleet, WaitNotices
from penstock_producer.jobs.forking import fork
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production, fewest_unread
from penstock_producer.jobs.watchdog import CurrentWait
from penstock_producer.jobs.worker import QUEUE, WorkerOptions
from penstock_producer.sources.config import DatasetConfig
from tests.contracts.fork_server import ROOT
from tests.contracts.processes import child
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch

PATIENCE_S = 120.0
LARGE = 20_000


def test_ctrl_c_while_workers_start_leaves_none_of_them(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook kept a worker that nobody knew, and that took the jobs of its later productions."""
    started: list[BaseProcess] = []

    def start_and_interrupt(process: BaseProcess) -> None:
        started.append(process)
        fork(process)
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock_producer.jobs.fleet.fork", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        Fleet(options_of(any_url), 2)
    assert [process.is_alive() for process in started] == [False]


def many() -> range:
    """A dataset that outlasts a test."""
    return range(LARGE)


def patiently(number: int) -> dict[str, int]:
    """40 ms that take no processor: as many workers as are wished find room on any machine."""
    time.sleep(0.04)
    return {"n": number}


def options_of(url: str) -> WorkerOptions:
    """Streams and jobs on one server."""
    return WorkerOptions(url=url, queue_url=url, room_wait_s=1.0, allowlist=ANYTHING)


def plan(name: str, transform: str | None = None, **how: Any) -> ProductionPlan:
    """Return the plan for a dataset with this import name."""
    return ProductionPlan(stream="train", source=DatasetConfig(name=name, transform=transform), **how)


def awaited(look: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@contextmanager
def command(*words: str) -> Iterator[subprocess.Popen[str]]:
    """`penstock ...` in a process of its own, ended with SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *words], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=90)
        finally:
            process.kill()


# --- rq info ----------------------------------------------------------------------------------------------------------


def test_rq_info_shows_the_truth(any_url: str) -> None:
    """Users of rq look there first, and must see queued jobs, running jobs and workers, but nothing that ended."""

    def info() -> list[str]:
        rq = [str(Path(sys.executable).parent / "rq"), "info", "-u", any_url, "--raw"]
        return subprocess.run(rq, capture_output=True, text=True, check=True).stdout.splitlines()

    dispatcher = Dispatcher(any_url, QUEUE)
    fleet = Fleet(options_of(any_url), 2, on_death=dispatcher.return_jobs)
    try:
        asked = plan("tests.producer.test_fleet:many", "tests.producer.test_fleet:patiently", shard_samples=250)
        with Production(asked, options_of(any_url), workers=0) as production:
            looks = production.run()

            def running() -> int:
                next(looks)
                return len(dispatcher.running())

            awaited(lambda: running() == 2)
            queue, *workers = info()
            assert ", 2 executing, 0 finished, 0 failed" in queue
            queued = int(queue.split()[2].rstrip(","))
            assert queued + 2 == len(production._runs[0].tasks)
            assert len(workers) == 2
            assert all(" busy penstock." in line for line in workers)
            killed = fleet.pids[0]
            os.kill(killed, signal.SIGKILL)
            awaited(lambda: killed not in fleet.pids)
            fleet.poll()  # as `penstock worker` does five times a second
            awaited(lambda: dispatcher.count_workers() == 2)
            queue, *workers = info()
            assert len(workers) == 2, workers
            assert not [line for line in workers if f" {killed})" in line]
            assert fleet.size == 2
            fleet.stop()
        assert info() == []
        with redis.Redis.from_url(any_url) as client:
            assert [
                key for key in client.scan_iter("rq:*") if not 0 < client.ttl(key) <= 60
            ] == []  # rq's own obituaries
    finally:
        fleet.stop()
        dispatcher.close()


def test_sources_and_connections_stay_open_from_job_to_job(any_url: str) -> None:
    """Opening a dataset of a million files for every job would cost more than the job."""
    asked = plan("tests.producer.test_fleet:Opened", shard_samples=5)
    with redis.Redis.from_url(any_url) as client:
        before = int(client.info("stats")["total_connections_received"])
        with Production(asked, options_of(any_url), workers=1) as production:
            list(production.run())
        assert int(client.info("stats")["total_connections_received"]) - before < 60  # a shard has one for its data
    opened = {int(sample["opened"]) for sample in read_epoch(any_url).values()}
    assert len(opened) == 1


_OPENED = itertools.count()


class Opened:
    """A dataset that knows how often it was opened in this process."""

    def __init__(self) -> None:
        self._number = next(_OPENED)

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"n": index, "opened": self._number}


# --- following the trainers -------------------------------------------------------------------------------------------


def test_as_many_epochs_as_asked_lie_ahead_of_the_furthest_group() -> None:
    """A slow group must not starve a fast one; what the slow one has not read is the budget's business."""
    epochs = [3, 4, 5]

    def roster_of(closed: Iterable[tuple[str, int]] = (), **first: int) -> Roster:
        groups = {name: GroupRecord(epoch, False, name != "left", 0, -1, None) for name, epoch in first.items()}
        return Roster("1", groups=groups, closed=frozenset(closed))

    assert fewest_unread(epochs, roster_of()) == 3
    assert fewest_unread(epochs, roster_of({("fast", 3), ("fast", 4)}, slow=0, fast=0)) == 1
    assert fewest_unread(epochs, roster_of(late=5)) == 1
    assert fewest_unread(epochs, roster_of(slow=0, left=5)) == 3
    assert fewest_unread([], roster_of(a=0)) == 0


def test_following_keeps_epochs_ahead_and_goes_on_for_ever(any_url: str) -> None:
    """--follow --ahead 2: two epochs wait for the trainer, never three; each one read is followed by a new one."""
    asked = plan("tests.producer.made:numbers", follow=True, is_endless=True, ahead=2)
    with Production(asked, options_of(any_url), workers=1) as production, connect(any_url) as client:
        looks = production.run()

        def produced() -> int:
            next(looks)
            stream = load_stream(client, "train")
            assert read_counters(client, stream)[1] is None  # no last epoch is announced
            return sum(state == "produced" for state in retained_epochs(client, stream).values())

        awaited(lambda: produced() == 2)
        waits = awaited(lambda: next(looks).waits)
        assert waits == "trainers have 2 epochs to read, and --ahead is 2"
        assert produced() == 2
        with penstock.Loader(
            "train", group="g", batch_size=40, url=any_url, tuning=penstock.Tuning(notify=lambda line: None)
        ) as loader:
            for done in range(1, 4):
                assert sum(batch.size for batch in loader) == 120
                awaited(lambda upto=done: produced() == 2 + upto)  # type: ignore[misc]
    with connect(any_url) as client:
        again = plan("tests.producer.made:numbers", follow=True, is_endless=True, ahead=2)
        with Production(again, options_of(any_url), workers=0) as production:  # started again it goes on
            assert production.epochs == (5,)
            assert list(retained_epochs(client, load_stream(client, "train"))) == [0, 1, 2, 3, 4]


# --- as many workers as needed ----------------------------------------------------------------------------------------


def test_a_fleet_follows_what_its_trainer_needs(any_url: str) -> None:
    """Steps of 16 samples in 0.2 s want 80 samples/s, 40 ms a sample are at most 25/s a worker: 4 workers, or 5."""
    produce = ("produce", "dataset", "tests.producer.test_fleet:many", "--transform",
               "tests.producer.test_fleet:patiently", "--workers", "0", "--url", any_url)  # fmt: skip
    follow = ("worker", "--auto", "--max", "9", "--allow", "tests.producer", "--url", any_url)
    history: list[int] = []
    with command(*produce), command(*follow), penstock.Loader("train", group="g", batch_size=16, url=any_url) as loader:
        steady_s, deadline = None, time.monotonic() + 2 * PATIENCE_S
        with connect(any_url) as client:
            for _ in loader:
                time.sleep(0.2)
                paces = load_reported_rates(client, loader.stream)
                history += [fleet.now for fleet in paces.fleets.values()]
                if steady_s is None and history and history[-1] > 1:
                    steady_s = time.monotonic()
                if steady_s is not None and time.monotonic() - steady_s > 8:
                    break
                assert time.monotonic() < deadline, history
            rates = load_reported_rates(client, loader.stream)
    assert history[0] == 1
    assert 3 <= history[-1] <= 6, history
    assert len(rates.workers) == history[-1]
    assert [round(told.rate or 0) for told in rates.trainers.values()] == [pytest.approx(80, abs=8)]
    with connect(any_url) as client:  # all signed off
        awaited(lambda: not load_reported_rates(client, load_stream(client, "train")).workers)
        assert not load_reported_rates(client, load_stream(client, "train")).fleets


# --- what its writers wait for ----------------------------------------------------------------------------------------


def works(*words: str) -> None:
    """`penstock worker` in a process of its own."""
    sys.exit(main(["worker", *words]))


def test_workers_tell_once_what_fills_the_budget_and_that_they_go_on(any_url: str) -> None:
    """Their log held nothing but the start, so an operator took a full budget for a broken worker."""
    asked = ProductionPlan(
        stream="train", source=DatasetConfig(name="tests.producer.made:numbers"), budget_bytes=600, block_bytes=40,
        shard_samples=15, shuffle=False,
    )  # fmt: skip
    with Production(asked, options_of(any_url), workers=0) as production:
        production.enqueue_all()
        production.leave()
    words = ("--processes", "2", "--allow", "tests.producer", "--url", any_url)
    with child(works, *words) as worker, connect(any_url) as client:
        partition = load_stream(client, "train").partitions[0]
        awaited(lambda: len(load_roster(client, partition).waiting) == 2)
        awaited(lambda: "waiting: " in worker.errors(), 5.0)
        with penstock.Loader("train", group="g", batch_size=10, url=any_url) as loader:
            assert sum(batch.size for batch in loader) == SAMPLES
        awaited(lambda: "no longer" in worker.errors())
        told, *after = [line for line in worker.errors().splitlines() if "wait" in line]
    without_a_group = r"waiting: the budget of 'train' is full \(.*\) and no group reads it: .*"
    assert re.fullmatch(without_a_group, told)
    # on a busy machine they may also wait for the trainer
    assert not any(re.fullmatch(without_a_group, line) for line in after), after
    assert any(re.fullmatch(r"writers of 'train' no longer wait, after \d+ s", line) for line in after), after


def test_waits_are_told_once_a_stream_and_reason_until_they_are_over() -> None:
    """In a budget that stays nearly full each worker waits again and again, for a moment or for long."""
    now, told = [100.0], list[str]()
    notices = WaitNotices(told.append, lambda: now[0])
    notes = [CurrentWait() for _ in range(3)]
    for note, stream in zip(notes, ("train", "train", "val"), strict=True):
        note.explain(stream, f"the budget of '{stream}' is full (1.0 of 1.0 MiB)")

    def look(at_s: float, *waits: tuple[int, float]) -> list[str]:
        """Return what is told at this time of the waits of these workers, which began then."""
        now[0], before = at_s, len(told)
        found = {number: notes[number].look() for number, _ in waits}
        notices.look([replace(wait, since_s=since_s) for n, since_s in waits if (wait := found[n]) is not None])
        return told[before:]

    full = "the budget of 'train' is full (1.0 of 1.0 MiB)"
    assert look(102, (0, 100.0), (1, 101.5)) == []
    assert look(103, (0, 100.0), (1, 101.5)) == [full]
    notes[1].explain("train", "the budget of 'train' is full (0.9 of 1.0 MiB)")
    assert look(105, (1, 101.5)) == []
    assert look(107, (0, 106.0)) == []
    notes[0].explain("train", "the server uses 9 MiB")
    assert look(109, (0, 106.0), (2, 106.0)) == ["the server uses 9 MiB", full.replace("train", "val")]
    assert look(111.9) == []
    assert look(112) == [
        "writers of 'train' no longer wait, after 9 s",
        "writers of 'val' no longer wait, after 3 s",
    ]
    assert look(113, (0, 112.5)) == []
    assert look(117) == []  # nothing was told of this wait
    notes[0].end()
    assert notes[0].look() is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_a_job_that_may_use_one_core_of_its_host_has_one_worker() -> None:
    """A job of Slurm on a quarter of a node started four times as many workers as it had cores."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from penstock_producer.jobs.fleet import usable_cores; print(usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
