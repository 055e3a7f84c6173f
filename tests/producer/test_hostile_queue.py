"""Forged jobs, bombs, `rq info` and a plain `rq worker` on a shared queue cost no sample and end no process."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback, Queue
from rq.exceptions import NoSuchJobError
from rq.serializers import JSONSerializer

from penstock.__main__ import main
from penstock_common.stream.client import connect
from penstock_producer.jobs import production as productions
from penstock_producer.jobs import queue as queues
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.queue import FUNCTION, ShardJob, open_queue, read_notes
from penstock_producer.jobs.task import (
    META_BYTES,
    MOST_VALUES,
    ShardTask,
    UnreadableField,
    checked,
    inflated,
    readable_meta,
)
from penstock_producer.jobs.watchdog import WorkerDeath, note_crash
from penstock_producer.jobs.worker import QUEUE
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import PATIENCE_S, dataset, numbers_in, options_of
from tests.producer.test_trust import TASK

BOMB_BYTES = 256 << 20
Attack = Callable[[Any, str], object]


@pytest.fixture(autouse=True)
def _cares_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(productions, "CARE_S", 0.3)


def rq(*words: str) -> list[str]:
    """The real command."""
    return [str(Path(sys.executable).parent / "rq"), *words]


def bomb(nbytes: int = BOMB_BYTES) -> bytes:
    """Return a field that inflates to ``nbytes`` bytes."""
    packer, block = zlib.compressobj(1), b"[" * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(nbytes >> 20)), packer.flush()])


def set_field(name: str, value: bytes | str) -> Attack:
    """Overwrites one field of a job."""
    return lambda client, job_id: client.hset(f"rq:job:{job_id}", name, value)


def set_key(key: str) -> Attack:
    """Puts a string where rq keeps something else."""
    return lambda client, job_id: client.set(key.format(job_id), "x")


def end_in_text(client: Any, job_id: str) -> None:
    """Has the counters that rq keeps of each worker be none."""
    for worker in client.smembers("rq:workers:penstock"):
        client.hset(worker, mapping=dict.fromkeys(("successful_job_count", "total_working_time", "state"), b"\xff"))


def take_over_records(client: Any, job_id: str) -> None:
    """Puts a string where rq keeps what it knows of each worker."""
    for worker in client.smembers("rq:workers:penstock"):
        client.pipeline().delete(worker).set(worker, "x").execute()


def pretend_to_be_taken(first_seen: bytes | None) -> Attack:
    """A job that a worker just took, since a time that is none."""

    def attack(client: Any, job_id: str) -> None:
        key = f"rq:queue:penstock:intermediate:first_seen:{job_id}"
        if first_seen is None:
            client.pipeline().delete(key).lpush(key, "x").execute()  # a worker may have set it just now
        else:
            client.set(key, first_seen)
        client.lpush("rq:queue:penstock:intermediate", job_id)

    return attack


def pretend_to_have_failed(client: Any, job_id: str) -> None:
    """In the words of a worker."""
    verdict = {"told_by": "w", "error": "so says the attacker", "deaths": 99, "signature": "0" * 32}
    client.hset(f"rq:job:{job_id}", mapping={"status": "failed", "worker_name": "w", "meta": json.dumps(verdict)})
    client.lrem("rq:queue:penstock", 0, job_id)
    client.zadd("rq:failed:penstock", {job_id: 2e9})


ATTACKS: dict[str, Attack] = {
    "a verdict that no worker gave": pretend_to_have_failed,
    "a note that is a list": set_field("meta", "[1]"),
    "a note that is a string": set_field("meta", '"abc"'),
    "a note that is a pickle": set_field("meta", pickle.dumps({"at": 3})),
    "a note of wrong types": set_field("meta", json.dumps({"at": "x", "suspects": [1], "workers": 7, "deaths": 1e400})),
    "a note of deep lists": set_field("meta", "[" * 100_000),
    "a time that is none": set_field("created_at", "never"),
    "a status that is none": set_field("status", "\n\x1b[31mgone"),
    "a number that is none": set_field("retries_left", "9" * 5000),
    "bytes that are no text": set_field("origin", b"\xff\xfe"),
    "arguments that are none": set_field("data", b"\x00"),
    "arguments that are a bomb": set_field("data", bomb(128 << 20)),
    "a job that is a string": lambda client, job_id: (
        client.pipeline().delete(f"rq:job:{job_id}").set(f"rq:job:{job_id}", "x").execute()
    ),
    "running jobs that are a string": set_key("rq:wip:penstock"),
    "a queue that is a string": set_key("rq:queue:penstock"),
    "failed jobs that are a string": set_key("rq:failed:penstock"),
    "finished jobs that are a string": set_key("rq:finished:penstock"),
    "workers that are a string": set_key("rq:workers:penstock"),
    "taken jobs that are a string": set_key("rq:queue:penstock:intermediate"),
    "results that are a string": set_key("rq:results:{}"),
    "a queued name that is no job's": lambda client, job_id: client.lpush("rq:queue:penstock", b"\xff", "a:b:c", ""),
    "a running name that is no job's": lambda client, job_id: client.zadd(
        "rq:wip:penstock", {b"\xff": 1, "x": 1, f"{job_id}:y": 1, "a:b:c:d": 1}
    ),
    "a failure that nobody had": lambda client, job_id: client.zadd("rq:failed:penstock", {job_id: 2e9, b"\xff": 2e9}),
    "a worker whose name is no text": lambda client, job_id: client.sadd("rq:workers:penstock", b"\xff", "\x1b[1m\n"),
    "a job taken since a list": pretend_to_be_taken(None),
    "a job taken since no number": pretend_to_be_taken(b"nan"),
}


@pytest.mark.parametrize("part", range(4))
def test_nothing_that_is_written_into_the_queue_ends_a_production(
    any_url: str, part: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """One forged field used to end every worker and the producer, and again after each restart."""
    attacks = list(ATTACKS.items())[part::4]
    plan = ProductionPlan(stream="train", source=dataset("very_slowly"), shard_samples=6)
    told: list[str] = []
    left = list(attacks)
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=2, notify=told.append) as production,
    ):
        deadline = time.monotonic() + 2 * PATIENCE_S
        for look in production.run():
            assert time.monotonic() < deadline, (look, told)
            if look.done and left:
                jobs = [job for job in production._live_jobs() if client.exists(f"rq:job:{job}")]
                left.pop(0)[1](client, jobs[-1] if jobs else "none")
        assert production.summary().samples == SAMPLES
    assert not left, "all attacks were made while it ran"
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    for line in {line for line in [*told, *errors.splitlines()] if "refused job" in line}:
        assert errors.count(line) <= 2, "each worker says it once"
        assert "\x1b" not in line


RECORDS: dict[str, Attack] = {
    "counters that are no numbers": end_in_text,
    "records that are strings": take_over_records,
    "a list of all workers that is a string": lambda client, job_id: (
        client.pipeline().delete("rq:workers").set("rq:workers", "x").execute()
    ),
}


@pytest.mark.parametrize("attack", RECORDS)
def test_what_is_written_into_a_workers_record_costs_no_sample(
    any_url: str, attack: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each job that a worker of such a record had made counted as failed, and the epoch with it."""
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=20)
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=1) as production,
    ):
        deadline = time.monotonic() + PATIENCE_S
        while not client.exists("rq:workers:penstock"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        RECORDS[attack](client, "")
        list(production.run())
        assert production.summary().samples == SAMPLES
    assert "Traceback" not in capfd.readouterr().err
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_an_unreadable_job_is_named_once_and_others_are_done(any_url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Its sentence is all that a user has to find out who wrote it."""
    with redis.Redis.from_url(any_url) as client:
        client.hset("rq:job:forged", mapping={"data": b"[]", "status": "queued"})
        client.rpush("rq:queue:penstock", "forged", "forged", "forged")
        with Production(ProductionPlan(stream="train", source=dataset()), options_of(any_url), workers=1) as production:
            list(production.run())
        assert client.llen("rq:queue:penstock") == 0
    assert capfd.readouterr().err.count("refused job forged: its data is no call") == 1
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def noted(job_id: str, key: bytes) -> dict[str, Any]:
    """Notes that a supervisor signs, of ten samples of a job that killed their workers."""
    notes: dict[str, Any] = {}
    for offset in range(10):
        note_crash(notes, WorkerDeath("w", "died", offset=offset, deed="ate the data", weight=99, key=key), job_id)
    return notes


FORGED: dict[str, Callable[[str, bytes], dict[str, Any]]] = {
    "not signed": lambda job_id, key: {"suspects": {str(offset): [9, 99, "ate the data"] for offset in range(10)}},
    "signed by another": lambda job_id, key: noted(job_id, key + b"!"),
    "signed for another shard": lambda job_id, key: noted(job_id + "9", key),
}


@pytest.mark.parametrize("forged", FORGED)
def test_no_sample_is_left_out_for_what_others_note_of_it(any_url: str, forged: str) -> None:
    """A note of three crashes had any sample counted as bad, untried, with a reason of the attacker's choice."""
    options = replace(options_of(any_url), key=b"ours")
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=10)
    with redis.Redis.from_url(any_url) as client, Production(plan, options, workers=0) as production:
        looks = production.run()
        next(looks)
        for job_id in production._live_jobs():
            notes = FORGED[forged](job_id, options.key)
            assert len(notes["suspects"]) == 10
            client.hset(f"rq:job:{job_id}", "meta", json.dumps(notes))
        fleet = Fleet(options, 1)
        try:
            list(looks)
        finally:
            fleet.stop()
        summary = production.summary()
    assert (summary.samples, summary.bad) == (SAMPLES, 0)


# --- bombs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["data", "exc_info"])
def test_a_bomb_is_refused_before_it_takes_memory(any_url: str, field: str) -> None:
    """Two megabytes that inflate to four gigabytes would have the kernel kill worker after worker."""
    job = {"data": zlib.compress(json.dumps([FUNCTION, None, [], {}]).encode())} | {field: bomb()}
    with redis.Redis.from_url(any_url) as client:
        client.hset("rq:job:bomb", mapping=job)
        tracemalloc.start()
        try:
            if field == "data":
                with pytest.raises(NoSuchJobError, match="larger than 64 MiB"):
                    ShardJob.fetch("bomb", connection=client)
            else:
                assert ShardJob.fetch("bomb", connection=client, serializer=JSONSerializer).kwargs == {}
            assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES * 3 // 4
        finally:
            tracemalloc.stop()


LARGE_BYTES = 8 << 20
LARGE_JOBS = 24


@contextmanager
def bounded(most_bytes: int) -> Iterator[None]:
    """The block takes no more memory than this at any time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()


@pytest.fixture
def large_jobs(any_url: str) -> list[str]:
    """Valid jobs of a few kilobytes, each of which holds a long text."""
    arguments = TASK.model_dump(mode="json") | {"source": {"kind": "0" * LARGE_BYTES}}
    data = zlib.compress(json.dumps([FUNCTION, None, [], arguments]).encode())
    assert len(data) < 20_000
    job_ids = [f"m-{number}" for number in range(LARGE_JOBS)]
    with redis.Redis.from_url(any_url) as client:
        for job_id in job_ids:
            client.hset(f"rq:job:{job_id}", mapping={"data": data, "status": "failed"})
    return job_ids


@pytest.mark.parametrize("look", ["clean", "remove_forged", "failure", "streams", "fetch"])
def test_valid_jobs_that_inflate_are_never_held_together(any_url: str, large_jobs: list[str], look: str) -> None:
    """Four megabytes of Redis took gigabytes of each worker and of the producer, which read a thousand jobs at once."""
    tasks = [TASK.model_copy(update={"shard": shard}) for shard in range(LARGE_JOBS)]
    dispatcher = Dispatcher(any_url, QUEUE, lambda _: None)
    looks: dict[str, tuple[str, int, Callable[[], object]]] = {
        "clean": ("rq:queue:penstock:intermediate", 1, dispatcher.clean),
        "remove_forged": ("rq:queue:penstock", 8, lambda: dispatcher.remove_forged(tasks)),
        "failure": ("rq:failed:penstock", 8, lambda: dispatcher.failure(tasks)),
        "streams": ("rq:queue:penstock", 8, dispatcher.streams),
        "fetch": ("rq:queue:penstock", 8, lambda: all(dispatcher._queue.fetch_all(large_jobs))),
    }
    key, times, ask = looks[look]
    with redis.Redis.from_url(any_url) as client:
        if key == "rq:failed:penstock":
            client.zadd(key, dict.fromkeys(large_jobs, 2e9))
        else:
            client.rpush(key, *large_jobs)
    with bounded(times * LARGE_BYTES):
        ask()
    dispatcher.close()


def test_a_job_of_many_small_values_is_refused_before_it_is_parsed() -> None:
    """Python takes sixty bytes and more for an empty object of two characters."""
    data = json.dumps([FUNCTION, None, [], {"a": "?"}]).encode()
    few, many = (data.replace(b'"?"', b"[" + b"{}," * number + b"1]") for number in (1000, MOST_VALUES))
    assert b"{}, {}" in checked({"data": zlib.compress(few)}, FUNCTION)[b"data"]
    with bounded(6 * len(many)), pytest.raises(UnreadableField, match="holds more than 2097152 values"):
        checked({"data": zlib.compress(many)}, FUNCTION)


def test_a_job_of_a_long_watch_is_read(any_url: str) -> None:
    """The largest honest jobs name ten thousand files, and must pass each bound."""
    task = TASK.model_copy(update={"source": {"files": [f"{n:05}" + ", [x]" * 100 for n in range(10_000)]}})
    dispatcher = Dispatcher(any_url, QUEUE, lambda _: None)
    dispatcher.enqueue([task])
    job = dispatcher._queue.fetch(task.job_id)
    dispatcher.close()
    assert job is not None
    assert ShardTask.parse(job.kwargs) == task


def test_jobs_are_read_in_parts_that_fit_and_none_is_left_out(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that a program wrote without compression are as large on the server as in a worker."""
    monkeypatch.setattr(queues, "READ_BYTES", 5000)
    sizes = {"none": 0, **{f"job{number}": 1000 * number for number in range(1, 9)}}
    with redis.Redis.from_url(any_url) as client:
        for job_id, size in sizes.items():
            data = json.dumps([FUNCTION, None, [], {"a": "0" * size}])
            client.hset(
                f"rq:job:{job_id}", mapping={"data": data, "status": "queued", "meta": json.dumps({"at": size})}
            )
        found = open_queue(connect(any_url), QUEUE)
        wanted = ["gone", *sizes, "job1"]
        assert [(job.id, len(job.kwargs["a"])) for job in found.fetch_all(wanted)] == list(sizes.items())
        assert list(read_notes(found.connection, ["gone", *sizes])) == [{}, *({"at": size} for size in sizes.values())]


def test_a_job_that_cannot_be_read_leaves_the_taken_ones_after_a_minute(any_url: str) -> None:
    """Nothing would ever remove it, and each worker would look at it every five seconds."""
    key = "rq:queue:penstock:intermediate"
    with redis.Redis.from_url(any_url) as client:
        client.hset("rq:job:forged", mapping={"data": b"[]", "status": "queued"})
        client.rpush(key, "forged")
        taken = open_queue(connect(any_url), QUEUE)
        taken.clean_up()
        assert client.lrange(key, 0, -1) == [b"forged"], "it may have been taken just now"
        client.set(f"{key}:first_seen:forged", 1)
        taken.clean_up()
        assert not client.exists(key, f"{key}:first_seen:forged", "rq:queue:penstock")


def test_a_bomb_within_a_bomb_is_not_inflated() -> None:
    """Rq inflates what it is given; what comes out of our hands is JSON, which no second pass inflates."""
    inner = zlib.compress(json.dumps([FUNCTION, None, [], {}]).encode())
    with pytest.raises(UnreadableField, match="not JSON"):
        checked({"data": zlib.compress(inner)}, FUNCTION)
    assert zlib.decompressobj().decompress(zlib.compress(b"x" * 100), 10) == b"x" * 10
    with pytest.raises(UnreadableField):
        inflated(zlib.compress(b"x" * 100), 99)
    assert inflated(zlib.compress(b"x" * 100), 100) == b"x" * 100
    assert readable_meta(b'{"at": 1, "error": "' + b"x" * META_BYTES + b'"}') == {}
    assert readable_meta(b'{"at": 1, "deaths": true, "other": 2}') == {"at": 1}


# --- rq's own commands ------------------------------------------------------------------------------------------------


@contextmanager
def stopped(url: str, stage: Callable[[], bool]) -> Iterator[Fleet]:
    """A host of one worker that stands still, in the middle of a job, long enough to count as silent."""
    fleet = Fleet(replace(options_of(url), heartbeat_ttl_s=3), 1)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not stage():
            assert time.monotonic() < deadline
        os.kill(fleet.pids[0], signal.SIGSTOP)
        yield fleet
    finally:
        os.kill(fleet.pids[0], signal.SIGCONT)
        fleet.stop()


def expired(client: redis.Redis) -> list[bytes]:
    """Jobs whose workers are silent."""
    found: Any = client.zrangebyscore("rq:wip:penstock", 0, int(time.time()))  # as rq asks
    return found  # type: ignore[no-any-return]


def test_rq_info_beside_a_silent_host_costs_nothing(any_url: str) -> None:
    """An operator looks at the queue while a host stands still; rq then rewrites the job's notes by pickle."""
    plan = ProductionPlan(stream="train", source=dataset("very_slowly"), shard_samples=SAMPLES)
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=0) as production,
    ):
        looks = production.run()

        def is_noted() -> bool:
            next(looks)
            is_running = bool(client.zcard("rq:wip:penstock"))  # a late heartbeat may have sent it back
            return is_running and any(client.hexists(f"rq:job:{job}", "meta") for job in production._live_jobs())

        with stopped(any_url, is_noted):
            deadline = time.monotonic() + PATIENCE_S
            while not expired(client):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            subprocess.run(rq("info", "-u", any_url), check=True, capture_output=True)
            notes = [client.hget(f"rq:job:{job}", "meta") or b"" for job in production._live_jobs()]
            assert any(note.startswith(b"\x80") for note in notes), "rq has rewritten them"
            assert Dispatcher(any_url, QUEUE).reports(production._live_jobs()).nbytes == 0
            helper = Fleet(replace(options_of(any_url), burst=True), 1)
            try:
                for look in looks:
                    helper.poll()
                    assert time.monotonic() < deadline + PATIENCE_S, look
            finally:
                helper.stop()
            assert production.summary().samples == SAMPLES
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_a_plain_rq_worker_is_named_and_its_tries_count_against_nothing(
    any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain `rq worker` on the queue cannot do any job, and used to fail the epoch like a crash."""
    plan = ProductionPlan(stream="train", source=dataset("slowly"), shard_samples=10)
    told: list[str] = []
    stranger = subprocess.Popen(
        rq("worker", "-u", any_url, "--name", "stranger", QUEUE), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with redis.Redis.from_url(any_url) as client:
            deadline = time.monotonic() + PATIENCE_S
            while not client.exists("rq:worker:stranger"):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with Production(plan, options_of(any_url), workers=1, notify=told.append) as production:
                for look in production.run():
                    assert time.monotonic() < deadline + PATIENCE_S, (look, told)
                assert production.summary().samples == SAMPLES
                kept = open_queue(client, QUEUE)
                assert all(
                    (job := kept.fetch(each)) is None or "deaths" not in job.meta
                    for each in production._dispatcher.job_ids
                )
            capsys.readouterr()
            assert main(["doctor", "--no-probe", "--url", any_url]) == 0
            (line, *_) = [line for line in capsys.readouterr().out.splitlines() if "stranger" in line]
            failed = client.hget("rq:worker:stranger", "failed_job_count")
    finally:
        stranger.terminate()
        stranger.wait(30)
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    who = f"worker 'stranger' (process {stranger.pid} on "
    assert failed is not None
    assert line.startswith(f"warning  queue, workers: {who}")
    assert f"{int(failed)} failed so far; it is a plain `rq worker`" in line
    named = [line for line in told if "stranger" in line]
    assert len(named) == 1
    assert who in named[0]
    assert "a plain `rq worker`, so end it and start `penstock worker --allow tests.producer.made:numbers" in named[0]


def test_a_worker_that_is_ended_by_the_queue_says_so_in_its_exit_code(
    any_url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`penstock worker --burst` ended with 0 when 80 of 200 samples were made: a script went on to train on them."""
    from penstock_producer.jobs import worker as workers

    monkeypatch.setattr(workers.ShardWorker, "prepare_execution", _raises(TypeError("unforeseen")))
    plan = ProductionPlan(stream="train", source=dataset())
    with Production(plan, options_of(any_url), workers=0) as production:
        production.enqueue_all()
        fleet = Fleet(replace(options_of(any_url), burst=True), 1)
        try:
            process = fleet._members[0].process
            process.join(PATIENCE_S)
            assert process.exitcode == 1
        finally:
            fleet.stop()
    assert "worker: ended by TypeError: unforeseen" in capfd.readouterr().err


# --- callbacks, and jobs that run already -----------------------------------------------------------------------------


def test_no_callback_of_a_forged_job_runs(any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rq imports and calls what a job names, when it fails, succeeds or is stopped: that would be any function."""
    mark = tmp_path / "mark"
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    with redis.Redis.from_url(any_url) as client:
        queue = Queue(QUEUE, connection=client, serializer=JSONSerializer)
        trap = Callback("tests.producer.made.traps")
        queue.enqueue(FUNCTION, x=1, on_failure=trap, on_success=trap, on_stopped=trap, job_id="forged")
        fleet = Fleet(options_of(any_url), 1)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not client.zscore("rq:failed:penstock", "forged"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            fleet.stop()
        assert client.hexists(ShardJob.key_for("forged"), "success_callback_name")
        job = open_queue(client, QUEUE).fetch("forged")
    assert not mark.exists()
    assert job is not None
    assert (job.failure_callback, job.success_callback, job.stopped_callback) == (None, None, None)


def test_a_running_job_is_not_queued_again(any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only lost jobs are: a second worker would make every sample of the shard for nothing."""
    mark = tmp_path / "mark"
    mark.touch()
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
    plan = ProductionPlan(stream="train", source=dataset("takes_notes"), shard_samples=SAMPLES)
    with Production(plan, options_of(any_url), workers=2) as production:
        looks = list(production.run())
        assert len(looks) > 3
        assert production.summary().samples == SAMPLES
    workers = {str(pid) for pid in looks[0].pids}
    notes = [line.split() for line in mark.read_text().splitlines()]
    made = [int(number) for pid, number in notes if pid in workers]
    assert sorted(made) == list(range(SAMPLES)), "each sample was made once"


def _raises(error: Exception) -> Callable[..., None]:
    def raising(*_: object) -> None:
        raise error

    return raising


@pytest.mark.parametrize("call", [[FUNCTION, "os", [], {}], [FUNCTION, None, [1], {}], [FUNCTION, None, [], [1]]])
def test_a_call_of_anything_but_named_arguments_is_refused(call: list[object]) -> None:
    """An instance would be a method's object, and positional arguments would reach unchecked fields."""
    with pytest.raises(UnreadableField, match="an object or positional arguments"):
        checked({"data": zlib.compress(json.dumps(call).encode())}, FUNCTION)


# --- crowds -----------------------------------------------------------------------------------------------------------

CROWD = 3_000


@pytest.fixture
def taken(any_url: str) -> Iterator[tuple[Dispatcher, str]]:
    """A dispatcher, and the id of a job of its queue that a worker has taken."""
    dispatcher = Dispatcher(any_url, QUEUE)
    dispatcher.enqueue([TASK])
    with redis.Redis.from_url(any_url) as client:
        assert client.lpop("rq:queue:penstock") == TASK.job_id.encode()
    try:
        yield dispatcher, TASK.job_id
    finally:
        dispatcher.close()


@contextmanager
def few_round_trips(url: str) -> Iterator[None]:
    """Fails where the server read more often than once for 25 members; a round trip is at least one read."""
    with redis.Redis.from_url(url) as client:
        before: Any = client.info("stats")
        yield
        after: Any = client.info("stats")
    reads = after["total_reads_processed"] - before["total_reads_processed"]
    assert reads < CROWD // 25


@pytest.mark.parametrize("key", ["rq:wip:penstock", "rq:queue:penstock:intermediate"])
def test_a_crowd_of_forged_members_hides_no_lost_job(any_url: str, taken: tuple[Dispatcher, str], key: str) -> None:
    """Three round trips for each of 20,000 members held every worker and the producer up for more than a minute."""
    dispatcher, job_id = taken
    with redis.Redis.from_url(any_url) as client:
        forged = [f"forged{n}" for n in range(CROWD)]
        if key == "rq:wip:penstock":
            members = [f"{each}:x" for each in forged] + [f"{job_id}:x{n}" for n in range(CROWD)]
            client.zadd(key, {member: n for n, member in enumerate([*members, b"\xff", f"{job_id}:real"])})
        else:
            client.rpush(key, *forged, b"\xff", job_id)
            client.set(f"{key}:first_seen:{job_id}", 1)
        with few_round_trips(any_url):
            dispatcher.clean()
        assert client.lrange("rq:queue:penstock", 0, -1) == [job_id.encode()], "it is queued again, once"
        assert not client.exists(key)
        job = open_queue(client, QUEUE).fetch(job_id)
    assert job is not None
    assert job.meta.get("failures", 0) <= 1, "a crowd is one try that failed"


def test_a_crowd_of_forged_members_does_not_hold_up_the_job_of_a_dead_worker(
    any_url: str, taken: tuple[Dispatcher, str]
) -> None:
    """It goes back as soon as its worker is dead; a round trip for each member would come before."""
    dispatcher, job_id = taken
    with redis.Redis.from_url(any_url) as client:
        forged = [f"forged{n}:x" for n in range(CROWD)] + [f"{job_id}:x{n}" for n in range(CROWD)]
        client.zadd("rq:wip:penstock", dict.fromkeys([*forged, f"{job_id}:real"], 1000000000000.0))
        client.hset(f"rq:execution:{job_id}:real", "worker_name", "dead")
        client.set(f"rq:execution:{job_id}:x1", "no hash")
        with few_round_trips(any_url):
            dispatcher.return_jobs(WorkerDeath("dead", "it died"))
        assert client.lrange("rq:queue:penstock", 0, -1) == [job_id.encode()]
        assert client.zscore("rq:wip:penstock", f"{job_id}:real") is None
        assert dispatcher.running() == {job_id, *(each.partition(":")[0] for each in forged)}


def test_a_crowd_of_forged_jobs_is_removed_with_few_round_trips(any_url: str, taken: tuple[Dispatcher, str]) -> None:
    """The producer looks at all that is queued once a worker of its own met a job of others."""
    dispatcher, job_id = taken
    with redis.Redis.from_url(any_url) as client:
        client.rpush("rq:queue:penstock", *[f"forged{n}" for n in range(CROWD)], job_id)
        client.hset(f"rq:job:{job_id}", "data", json.dumps([FUNCTION, None, [], {}]))
        with few_round_trips(any_url):
            dispatcher.remove_forged([TASK])
        assert client.lindex("rq:queue:penstock", 0) == job_id.encode()
        job = open_queue(client, QUEUE).fetch(job_id)
    assert job is not None
    assert job.kwargs == TASK.model_dump(mode="json")
