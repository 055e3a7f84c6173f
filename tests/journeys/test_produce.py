"""From a notebook's closure to samples in the stream: penstock.produce as its users call it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock_common.errors import EpochFailed, PenstockError, StreamConflict, WaitTimeout
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources import names
from penstock_producer.sources.config import LocalConfig
from penstock_producer.sources.names import register
from tests.contracts.processes import child
from tests.journeys.test_hostile_queue_beside import PATIENCE_S, running
from tests.journeys.test_hostile_queue_beside import penstock as penstock_command
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch


def test_a_closure_over_a_list_becomes_an_epoch(url: str) -> None:
    """In a notebook neither dataset nor transform has an import name; workers are forked and have them."""
    scale = 3
    words = ["penstock", "gate", "turbine", "weir"] * 10

    def counted(word: str) -> dict[str, object]:
        return {"x": np.full(3, len(word) * scale, np.float32), "word": word.encode(), "pid": os.getpid()}

    production = penstock.produce(
        words, transform=counted, workers=2, epochs=2, url=url, tuning=penstock.Tuning(shard_samples=4)
    )
    summary = production.wait(20)
    assert (summary.samples, summary.bad, summary.epochs) == (80, 0, (0, 1))
    for epoch in (0, 1):
        samples = read_epoch(url, epoch=epoch).values()
        assert sorted(int(s["x"][0]) // scale for s in samples) == sorted(map(len, words))
        assert os.getpid() not in {int(s["pid"]) for s in samples}
    assert production.is_done
    assert production.progress.done == 80


def test_a_generator_with_a_mistake_fails_at_once(any_url: str) -> None:
    """It was tried four more times, and for 8 s nothing said why."""

    def mistaken() -> Any:
        yield {"x": nowhere}  # type: ignore[name-defined]  # noqa: F821

    for broken, why in ((mistaken, "NameError"), (lambda: 3, "'int' object is not iterable")):
        production = penstock.produce(broken, url=any_url)
        with pytest.raises(EpochFailed, match=why):
            production.wait(5)


def test_a_generator_that_is_tried_again_says_why(any_url: str) -> None:
    """The job counts as running while its worker pauses, so nothing was said before the last try."""

    def away() -> Any:
        raise ConnectionError("the camera is away")
        yield

    said = r"a shard is tried again: .*the camera is away"
    with penstock.produce(away, url=any_url) as production, pytest.raises(WaitTimeout, match=said):
        production.wait(5)


def test_arrays_side_by_side_need_no_transform(any_url: str) -> None:
    """(x_train, y_train) is the shape most tutorials have."""
    x, y = np.arange(60, dtype=np.float32).reshape(20, 3), np.arange(20)
    penstock.produce((x, y), url=any_url, wait=True)
    samples = read_epoch(any_url).values()
    assert {int(s["y"]): s["x"].tolist() for s in samples} == {n: x[n].tolist() for n in range(20)}


def test_the_same_seed_augments_alike_whoever_does_it(any_url: str) -> None:
    """A sample's generator belongs to its identity, not to the process that happens to make it."""

    def noisy(number: int, rng: np.random.Generator) -> dict[str, object]:
        return {"x": rng.random(4), "n": number}

    made = []
    for workers, stream in ((1, "one"), (2, "two")):
        penstock.produce(
            range(40),
            transform=noisy,
            stream=stream,
            workers=workers,
            url=any_url,
            tuning=penstock.Tuning(shard_samples=5, seed=3),
            wait=True,
        )
        made.append({identity: s["x"].tolist() for identity, s in read_epoch(any_url, stream).items()})
    assert made[0] == made[1]


def test_stopping_ends_the_workers_and_tells_the_trainers(any_url: str) -> None:
    """An interrupted cell must leave no processes behind, and no trainers that wait for ever."""

    def slowly(number: int) -> int:
        time.sleep(0.05)
        return number

    with penstock.produce(
        range(1000), transform=slowly, workers=2, url=any_url, tuning=penstock.Tuning(shard_samples=10)
    ) as production:
        with pytest.raises(WaitTimeout, match="still at work"):
            production.wait(0.5)
        pids = production.progress.pids
        assert len(pids) == 2
    assert all(_has_ended(pid) for pid in pids)
    with pytest.raises(PenstockError, match="stopped before its end"):
        production.wait()


WORDS = ["penstock", "gate", "turbine", "weir"] * 10


def counted_slowly(word: str) -> dict[str, int]:
    """Take the time in which a test can kill a program."""
    time.sleep(0.05)
    return {"length": len(word)}


def _produce_words(url: str) -> None:
    production = penstock.produce(
        WORDS, transform=counted_slowly, epochs=3, url=url, tuning=penstock.Tuning(shard_samples=2)
    )
    while production.progress.done < 4:
        time.sleep(0.01)
    print("has begun", flush=True)
    production.wait()


def test_a_killed_program_goes_on_if_its_dataset_is_an_attribute_of_a_module(any_url: str) -> None:
    """It made three further epochs, and its trainer waited for the first one, which nobody completed."""
    with child(_produce_words, any_url) as program:
        assert program.line() == "has begun", program.errors()
        program.kill()
    told: list[str] = []
    tuning = penstock.Tuning(shard_samples=2, notify=told.append)
    again = penstock.produce(WORDS, transform=counted_slowly, epochs=3, url=any_url, tuning=tuning)
    summary = again.wait(60)
    assert summary.epochs == (0, 1, 2), told
    assert summary.made_before >= 4
    assert any(line.startswith("going on with epochs 0-2 of 'train', ") for line in told), told
    assert len(read_epoch(any_url).values()) == len(WORDS)


def test_a_run_of_objects_without_names_says_that_no_run_continues_the_epoch(any_url: str) -> None:
    """It was told to run the same command again, which it had just done."""
    options = WorkerOptions(url=any_url, queue_url=any_url)

    def plan() -> ProductionPlan:
        return ProductionPlan(stream="train", source=LocalConfig(token=register(range(8))))

    with Production(plan(), options, workers=0) as production:
        next(production.run())
    told: list[str] = []
    with Production(plan(), options, workers=0, notify=told.append):
        pass
    (said,) = [line for line in told if "is unfinished" in line]
    assert said.endswith(
        "began in another run, which may have had the same dataset: a later run continues only datasets and functions "
        "that are attributes of an imported module. Unless that run is still at work, end the epoch as it is: "
        "`penstock epochs close train 0`"
    )


def test_what_fails_is_raised_where_it_is_waited_for(any_url: str) -> None:
    """A notebook shows the exception of the cell that waits, naming sample and line."""

    def picky(number: int) -> int:
        return 10 // (number % 20)

    with pytest.raises(PenstockError, match=r"range local-\w+\[\d+\].*ZeroDivisionError.*test_produce.py:\d+"):
        penstock.produce(range(100), transform=picky, url=any_url, tuning=penstock.Tuning(on_error="fail"), wait=True)


def _has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_cell_that_runs_twice_is_told_of_the_production_that_is_at_work(any_url: str) -> None:
    """Both planned the same epochs, one of them failed, and trainers waited for ever."""

    def slow(number: int) -> dict[str, object]:
        time.sleep(0.02)
        return {"n": number}

    with penstock.produce(range(400), transform=slow, url=any_url, epochs=3) as first:
        registered = len(names._OBJECTS)
        for _ in range(2):
            with pytest.raises(StreamConflict, match=r"<production of 'train', running: .*wait\(\) for that"):
                penstock.produce(range(400), transform=slow, url=any_url, epochs=3)
        assert len(names._OBJECTS) == registered
        penstock.produce(range(4), transform=slow, url=any_url, stream="other", wait=True)
        first.stop()
        penstock.produce(range(4), transform=slow, url=any_url, wait=True)
    assert repr(first).startswith("<production of 'train', ended: ")


def test_a_forked_child_does_not_wait_for_the_production_of_its_parent(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the object and no thread, so a `with` block that it left would never end."""
    with penstock.produce(range(4), transform=lambda n: {"n": n}, url=any_url) as production:
        production.wait(20)
        production._ended.clear()
        monkeypatch.setattr(production, "_owner", production._owner + 1)
        production.stop()
        assert production.is_done


def test_an_interrupted_wait_ends_the_workers(any_url: str) -> None:
    """Nobody has the object, so workers made all epochs behind the back of the notebook."""

    def slow(number: int) -> dict[str, object]:
        time.sleep(0.05)
        return {"n": number}

    interrupt = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        penstock.produce(range(4000), transform=slow, url=any_url, wait=True)
    interrupt.join()
    assert not [child for child in multiprocessing.active_children() if child.is_alive()]
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-produce"]


_SLOW_FIRST = """
import sys, time, penstock
def slow(number):
    print("making", flush=True)
    time.sleep(60)
try:
    penstock.produce(range(4), transform=slow, url=sys.argv[1], wait=True)
except KeyboardInterrupt:
    print("interrupted", multiprocessing.active_children(), flush=True)
"""


def test_an_interrupted_first_sample_says_nothing_and_ends_its_process(any_url: str) -> None:
    """A kernel's interrupt reaches all of its processes, and each printed a traceback."""
    code = f"import multiprocessing\n{_SLOW_FIRST}"
    program = subprocess.Popen(
        [sys.executable, "-c", code, any_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == b"making\n"
    os.killpg(program.pid, signal.SIGINT)
    out, err = program.communicate(timeout=20)
    assert (out, b"Traceback" in err, program.returncode) == (b"interrupted []\n", False, 0)


def test_the_same_command_in_two_terminals_makes_an_epoch_once_and_both_end_well(any_url: str, tmp_path: Path) -> None:
    """One removed the jobs of a produced epoch while the other looked at them, and ended with a traceback of rq's."""
    words = penstock_command(
        "produce", "dataset", "tests.producer.made:numbers", "--transform", "tests.producer.made:with_pid", "--url",
        any_url, "--workers", 1, "--shard-samples", 3,
    )  # fmt: skip
    said = [tmp_path / "first.txt", tmp_path / "second.txt"]
    with running(words, tmp_path, said[0]) as first, running(words, tmp_path, said[1]) as second:
        codes = [first.wait(PATIENCE_S), second.wait(PATIENCE_S)]
    told = [each.read_text() for each in said]
    assert codes == [0, 0], told
    assert "Traceback" not in "".join(told)
    samples = read_epoch(any_url).values()
    assert sorted(int(sample["x"][0]) for sample in samples) == list(range(SAMPLES))
