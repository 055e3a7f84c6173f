"""An iterable without an end fed into a stream: it waits for trainers, stops when told to, and says how far it came."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import redis

import penstock
from penstock_common.stream.audit import audit_stream
from tests.front.test_cli_produce import awaited, ended, start

CODE = """
import itertools, time
import numpy as np

def numbers():
    for n in itertools.count():
        yield {"x": np.full(1000, n, np.int64)}

def pairs():
    for n in itertools.count():
        yield np.arange(3 * n, 3 * n + 3), np.arange(3)

def hangs():
    yield from range(5)
    open("hanging", "w").close()
    try:
        time.sleep(1000)
    except Exception:
        pass
    yield 5

def breaks():
    yield from range(7)
    raise OSError("the camera was unplugged")

def acted():
    from multiprocessing import get_context
    for _ in range(2):
        get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True).start()
    yield from range(5)
    open("acting", "w").close()
    time.sleep(1000)

def uneven(n):
    if n % 3 == 0:
        raise ValueError(f"{n} is bad")
    return {"x": n}

def walks_out(n):
    if n == 3:
        raise SystemExit("enough")
    return {"x": n}

def worsens():
    for n in range(300):
        yield {"x": n if n < 20 else n + 0.5}
    raise OSError("the camera was unplugged")

def dies():
    import os
    yield 1
    time.sleep(1.5)
    os._exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder in which the commands run, with the user's module."""
    (tmp_path / "live.py").write_text(CODE)
    return tmp_path


def feed(folder: Path, url: str, *arguments: str) -> subprocess.Popen[str]:
    """`penstock produce generator live:... --endless`."""
    return start("produce", "generator", *arguments, "--endless", "--url", url, cwd=folder)


def produced(url: str) -> int:
    """Samples that are in the stream; nothing is lost or twice."""
    with redis.Redis.from_url(url) as client:
        report = audit_stream(client, "train")
    assert not report.duplicate
    return report.produced


def test_it_waits_for_a_slow_trainer_and_stops_at_a_sample_it_names(any_url: str, folder: Path) -> None:
    """A camera or a simulation never ends: it must not fill the server, nor lose what trainers were promised."""
    seen: list[int] = []
    with penstock.Loader(
        "train", group="slow", batch_size=10, url=any_url, tuning=penstock.Tuning(timeout_s=30)
    ) as loader:
        process = feed(folder, any_url, "live:numbers", "--budget", "4mb")
        batches = (batch for _ in itertools.count() for batch in loader)
        while len(seen) < 1000:  # twice what the budget holds
            seen.extend(next(batches)["x"][:, 0].tolist())
        with redis.Redis.from_url(any_url) as client:
            assert client.info("memory")["used_memory_dataset"] < 24 << 20
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code, _, err = ended(process)
        assert code == 130, err
        assert time.monotonic() - began < 8
        assert "Traceback" not in err
        said = re.search(r"stopped at item ([\d,]+) of live:numbers: ([\d,]+) samples of this run are in 'train'", err)
        assert said is not None, err
        item, there = (int(number.replace(",", "")) for number in said.groups())
        while len(seen) < there:
            seen.extend(next(batches)["x"][:, 0].tolist())
    assert item - 600 < there <= item
    assert seen == list(range(there))


def test_a_generator_that_hangs_is_stopped_in_its_place(any_url: str, folder: Path) -> None:
    """It may wait for its camera for ever; SIGTERM must end it there, with all that it gave committed."""
    process = feed(folder, any_url, "live:hangs")
    awaited((folder / "hanging").exists)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code, _, err = ended(process)
    assert (code, time.monotonic() - began < 8) == (130, True), err
    assert "stopped at item 5 of live:hangs: 5 samples of this run are in 'train'" in err
    assert produced(any_url) == 5


def test_processes_of_a_generator_end_without_a_word(any_url: str, folder: Path) -> None:
    """Actors are forked, and inherit the handlers of the process that feeds: each printed a traceback."""
    process = feed(folder, any_url, "live:acted")
    awaited((folder / "acting").exists)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert (code, "Traceback" in err) == (130, False), err
    assert "stopped at item 5 of live:acted: 5 samples of this run are in 'train'" in err
    assert produced(any_url) == 5


def test_batches_and_bad_items_are_fed_too(any_url: str, folder: Path) -> None:
    """A feed follows the rules of an epoch: a bad item is named and counted, in its position."""
    code, out, err = ended(feed(folder, any_url, "live:pairs", "--batched", "--limit", "20"))
    assert (code, "60 samples, 0 bad" in out) == (0, True), err
    code, out, err = ended(feed(folder, any_url, "live:breaks", "--transform", "live:uneven", "--stream", "uneven"))
    assert code == 1
    assert "bad sample: live:breaks[0]: transform live:uneven failed: ValueError: 0 is bad" in err
    last = err.splitlines()[-1]
    assert "live:breaks failed at item 7: OSError: the camera was unplugged" in last
    assert "at item 7 of live:breaks: 4 samples of this run are in 'uneven', 3 bad" in last
    with redis.Redis.from_url(any_url) as client:
        report = audit_stream(client, "uneven")
    assert (report.produced, report.bad) == (4, 3)


def test_a_transform_that_calls_exit_costs_its_sample(any_url: str, folder: Path) -> None:
    """It ended the feed, where a job leaves out the sample."""
    code, _, err = ended(feed(folder, any_url, "live:breaks", "--transform", "live:walks_out"))
    assert code == 1
    assert "bad sample: live:breaks[3]: called sys.exit('enough')" in err
    assert "at item 7 of live:breaks: 6 samples of this run are in 'train', 1 bad" in err.splitlines()[-1]


def test_of_many_bad_items_the_first_few_are_named(any_url: str, folder: Path) -> None:
    """A camera that broke for good must not fill the log, nor look as if its samples were there."""
    code, _, err = ended(feed(folder, any_url, "live:worsens", "--spec", '{"x": ["int64", []]}'))
    assert code == 1
    named = [line for line in err.splitlines() if "bad sample: " in line]
    assert err.count("more bad samples: `penstock bad list train`") == 1
    assert [re.findall(r"live:worsens\[(\d+)\]", line) for line in named] == [[f"{n}"] for n in range(20, 25)]
    assert "at item 300 of live:worsens: 20 samples of this run are in 'train', 280 bad" in err.splitlines()[-1]
    with redis.Redis.from_url(any_url) as client:
        report = audit_stream(client, "train")
    assert (report.produced, report.bad) == (20, 280)


def test_what_cannot_be_fed_is_one_line(any_url: str, folder: Path) -> None:
    """This holds also for a process that dies of what it imports."""
    code, _, err = ended(feed(folder, any_url, "live:dies"))
    assert code == 1
    assert "the process that feeds it ended with exit code 3; at item 1 of live:dies" in err
    code, _, err = ended(feed(folder, any_url, "live:nothing"))
    assert (code, "live has no 'nothing'" in err) == (1, True)
    code, _, err = ended(feed(folder, any_url, "live:numbers", "--no-workers"))
    assert (code, "is written by this command itself" in err) == (1, True)
