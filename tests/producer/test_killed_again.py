"""Workers killed again and again: what gets on goes on to its end, and what kills every worker ends by name."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
import warnings
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from penstock_common.errors import EpochFailed
from penstock_producer.jobs import queue
from penstock_producer.jobs.progress import ProductionProgress
from penstock_producer.jobs.queue import RETRIES
from penstock_producer.jobs.watchdog import CurrentSample, WorkerWatchdog
from penstock_producer.sources.config import GeneratorConfig
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import dataset, numbers_in, produce

KILLS = RETRIES + 2


def test_a_shard_that_gets_on_outlives_any_number_of_killed_workers(any_url: str) -> None:
    """Preempted hosts take workers away all day long: only runs that get nowhere may end an epoch."""
    killed: list[int] = []
    seen = [0]

    def kill(look: ProductionProgress) -> None:
        if len(killed) < KILLS and look.done > seen[0] and look.pids and look.pids[0] not in killed:
            seen[0] = look.done
            killed.append(look.pids[0])
            os.kill(look.pids[0], signal.SIGKILL)

    summary = produce(
        any_url,
        dataset("very_slowly"),
        workers=1,
        shard_samples=SAMPLES,
        block_bytes=100,
        patience_s=120,
        each=kill,
    )
    assert len(killed) == KILLS
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert (summary.samples, summary.bad) == (SAMPLES, 0)


def test_a_sample_that_kills_every_worker_is_left_out_by_name(any_url: str) -> None:
    """One that eats all memory looks like an operator's kill -9: it is tried more often than one that crashes."""
    named: list[str] = []
    summary = produce(
        any_url, dataset("always_kills_its_worker"), workers=1, shard_samples=SAMPLES, shuffle=False,
        block_bytes=240, patience_s=120, each=lambda look: named.extend(look.new_bad),
    )  # fmt: skip
    assert (summary.samples, summary.bad) == (SAMPLES, 1)
    assert named == ["tests.producer.made:numbers[60]: killed its worker by SIGKILL, 6 times"]
    assert 60 not in numbers_in(any_url)


def test_what_kills_every_worker_and_is_no_sample_fails_its_epoch_and_says_where(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator that crashes must not eat workers for ever; shard, place and cause are what its author needs."""
    assert queue.DEATHS > RETRIES + 1  # a machine short of memory kills some by chance
    monkeypatch.setattr(queue, "DEATHS", RETRIES + 2)
    with pytest.raises(
        EpochFailed,
        match=r"shard 0 of epoch 0 of 'train': worker process \d+ was killed by SIGKILL, the last of 6 .*"
        r"committed no more than 60 samples of this shard",
    ):
        produce(any_url, GeneratorConfig(name="tests.producer.made:deadly_feed"), workers=1, block_bytes=240,
                patience_s=300)  # fmt: skip


def _waits(current: CurrentSample, stage: str, pipe: Connection) -> None:
    faulthandler.disable()  # the signal is sent on purpose: no stacks among the results
    if stage != "opening":
        current.begin(7, 0)
    if stage == "between":
        current.end()
    pipe.send_bytes(b"ready")
    time.sleep(60)


@pytest.mark.parametrize(
    ("stage", "number", "is_to_blame"),
    [
        ("opening", signal.SIGKILL, True),
        ("making", signal.SIGKILL, True),
        ("between", signal.SIGKILL, False),
        ("between", signal.SIGSEGV, True),
    ],
)
def test_a_worker_killed_while_it_waits_for_room_costs_its_shard_nothing(
    stage: str, number: signal.Signals, is_to_blame: bool
) -> None:
    """Trainers may be slow for hours, and hosts preempted all the while: no shard has a part in that."""
    watchdog = WorkerWatchdog(None)
    ours, theirs = get_context("fork").Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process = get_context("fork").Process(target=_waits, args=(watchdog.current, stage, theirs), daemon=True)
        process.start()
    assert process.pid is not None
    assert ours.recv_bytes() == b"ready"
    os.kill(process.pid, number)
    process.join(20)
    death = watchdog.death("w", process.pid, process.exitcode or 0)
    assert death is not None
    assert death.is_to_blame is is_to_blame
    assert death.offset == (7 if stage == "making" else None)
