"""`rq info`, `rq worker`, forged jobs and a bomb lose nothing and end no process of a running `penstock produce`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_producer.jobs.queue import FUNCTION, RETRIES
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch
from tests.producer.test_hostile_queue import bomb, rq
from tests.producer.test_trust import forge

ROOT = Path(__file__).parents[2]
PATIENCE_S = 90.0
EPOCHS = 3


@contextmanager
def running(words: list[str], cwd: Path, errors: Path) -> Iterator[subprocess.Popen[str]]:
    """A command, whose words on stderr go to a file; killed at the end if it is still there."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("common", "producer", "consumer", "front", "."))
    environment = {**os.environ, "PYTHONPATH": paths, "PENSTOCK_TEST_MARK": str(cwd / "hold")}
    with errors.open("w") as said:
        process = subprocess.Popen(words, cwd=cwd, env=environment, stdout=said, stderr=said, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait(30)


def penstock(*words: object) -> list[str]:
    """A command line of ours."""
    return [sys.executable, "-m", "penstock", *map(str, words)]


def awaited(look: Callable[[], Any]) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("own_workers", [2, 0], ids=["own workers", "a shared queue"])
def test_an_epoch_is_complete_whatever_others_do_to_its_queue(any_url: str, tmp_path: Path, own_workers: int) -> None:
    """One curious operator, one wrong worker or one hostile user used to end every worker and the producer."""
    folder, mark = tmp_path / "photos", tmp_path / "mark"
    folder.mkdir()
    (folder / "$(touch mark).jpg").write_bytes(b"")
    evil = {"kind": "images", "path": str(folder), "files": ["$(touch mark).jpg"], "label": "os:system"}
    produce = penstock(
        "produce", "dataset", "tests.producer.made:numbers", "--transform", "tests.producer.made:held_up", "--url",
        any_url, "--workers", own_workers, "--epochs", EPOCHS, "--shard-samples", 10,
    )  # fmt: skip
    allowed = ("--allow", "tests.producer.made", "--root", folder)
    helper = penstock("worker", "--processes", 2, "--url", any_url, *allowed)
    ours, theirs, hold = tmp_path / "produce.txt", tmp_path / "worker.txt", tmp_path / "hold"
    job = {"data": bomb(128 << 20), "exc_info": bomb(128 << 20)}
    with redis.Redis.from_url(any_url) as client, running(produce, tmp_path, ours) as producer:
        at = -1 if own_workers else 0  # one that is not taken yet, or the one that is taken next
        first = awaited(lambda: client.lindex("rq:queue:penstock", at)).decode()
        client.hset("rq:job:bomb", mapping=job)
        client.hset("rq:job:garbage", mapping={"data": zlib.compress(json.dumps(["os.system", None, [], {}]).encode())})
        forge(client, first, evil)
        forge(client, first, evil, copy="forged")
        client.lpush("rq:queue:penstock", "bomb", "garbage")
        for place, note in enumerate(("[1]", '"abc"', b"\x80\x04N."), 2):
            client.hset(f"rq:job:{client.lindex('rq:queue:penstock', -place).decode()}", "meta", note)
        with running(helper if not own_workers else ["sleep", "600"], tmp_path, theirs) as helping:
            awaited(lambda: f"refused job {first}: somebody else changed it" in ours.read_text())
            hold.touch()
            awaited(lambda: client.zcard("rq:wip:penstock"))
            client.delete("rq:wip:penstock")
            client.set("rq:wip:penstock", "x")
            wip = "key 'rq:wip:penstock'"
            awaited(lambda: wip in ours.read_text() + theirs.read_text())  # rq's worker ends where it finds the key
            stranger = rq("worker", "-u", any_url, "--name", "stranger", "penstock")
            with running(stranger, tmp_path, tmp_path / "rq.txt") as taking:
                awaited(lambda: "worker 'stranger'" in ours.read_text())
                subprocess.run(rq("info", "-u", any_url), check=True, capture_output=True)
                taking.send_signal(signal.SIGTERM)  # killed, it would keep its last job for 90 s
                hold.unlink()  # before it ends, because it may have a job that is held up
                taking.wait(30)
            assert producer.wait(PATIENCE_S) == 0, ours.read_text()
            subprocess.run(rq("info", "-u", any_url), check=True, capture_output=True)
            if not own_workers:
                helping.send_signal(signal.SIGTERM)
                assert helping.wait(30) == 0, theirs.read_text()
    assert not mark.exists(), "a stranger's command was run"
    for epoch in range(EPOCHS):
        assert sorted(int(s["x"][0]) for s in read_epoch(any_url, epoch=epoch).values()) == list(range(SAMPLES))
    with connect(any_url) as control:
        assert audit_stream(control, "train").is_clean
    said = ours.read_text() + theirs.read_text()
    assert "Traceback" not in said
    told = {f"refused job {first}: somebody else changed it": 1, "worker 'stranger'": 1, "key 'rq:wip:penstock'": 1}
    if own_workers:
        told["refused job forged: this production never planned it"] = 1
    else:
        told["(job forged): os:system is not allowed in this worker"] = RETRIES + 1  # another worker may be allowed to
    told["refused job bomb: its data is larger than 64 MiB"] = 2  # once from each worker that looked
    told["refused job garbage: it names the function"] = 2
    for sentence, most in told.items():
        assert 1 <= said.count(sentence) <= most, (sentence, said)
    assert FUNCTION in said
