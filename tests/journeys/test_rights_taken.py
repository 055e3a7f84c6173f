"""A right is taken away in the middle of an epoch: an error says which one, nothing is lost, and a restart goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.errors import Unauthorized
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.clusters import until
from tests.journeys.test_acl_page import lines_for

SAMPLES = 600
TELLS_S = 5.0
"""The time in which a program says that a right is gone."""
QUIET = penstock.Tuning(notify=lambda _: None)
SMALL = penstock.Tuning(block_bytes=200, notify=lambda _: None)
DATA = """\
import time


class Rows:
    def __len__(self):
        return 600

    def __getitem__(self, index):
        time.sleep(0.003)
        return {"y": index}


train = Rows()
"""
Take = Callable[[str, str], None]


@pytest.fixture
def users(any_server: EmbeddedServer, any_client: redis.Redis) -> Iterator[dict[str, str]]:
    """Make the users of docs/acl.md, and return the address of each."""
    lines = lines_for(any_client)
    for user, *rules in lines:
        any_client.execute_command("ACL", "SETUSER", user, *rules)
    yield {user: f"redis://{user}:{rules[1][1:]}@127.0.0.1:{any_server.port}" for user, *rules in lines}
    any_client.execute_command("ACL", "DELUSER", *(user for user, *_ in lines))


@pytest.fixture
def set_right(any_client: redis.Redis) -> Take:
    """Return a function that changes a user's rights by a rule. The rule '' gives all of them back."""

    def change(user: str, rule: str) -> None:
        given = next(rules for name, *rules in lines_for(any_client) if name == user)
        any_client.execute_command("ACL", "SETUSER", user, *([rule] if rule else given))

    return change


def write_to_the_end(url: str, when: int, then: Callable[[], None]) -> None:
    """Write shard 0 of epoch 0 from its position on, and call ``then`` once ``when`` samples are written."""
    with penstock.Writer("train", url=url, spec={"y": ("int64", ())}, tuning=SMALL) as writer:
        epoch = writer.epoch(0, sizes=[SAMPLES])
        with epoch, epoch.shard(0) as shard:
            for number in range(shard.position, SAMPLES):
                if number == when:
                    then()
                shard.write({"y": number})


def test_a_deletion_that_is_refused_changes_nothing(
    any_client: redis.Redis, users: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It marked the stream first. All others were told that it is being deleted, and its owner could only delete it."""
    write_to_the_end(users["producer"], -1, lambda: None)
    assert main(["delete", "train", "--yes", "--url", users["trainer"]]) == 1
    assert "ACL SETUSER trainer" in capsys.readouterr().err
    with penstock.Loader("train", group="net", batch_size=50, url=users["trainer"], tuning=QUIET) as loader:
        assert sum(len(batch["y"]) for batch in loader) == SAMPLES
    assert main(["delete", "train", "--yes", "--force", "--url", users["producer"]]) == 0
    assert not any_client.keys("penstock:{train}*")


def test_a_program_without_a_right_is_refused_as_it_starts(
    any_client: redis.Redis, users: dict[str, str], set_right: Take
) -> None:
    """Some rights are needed late: a renewal of a lease, or an entry that is taken back."""
    set_right("producer", "-xdel")
    with pytest.raises(Unauthorized, match=r"run `ACL SETUSER producer \+xdel` there"):
        penstock.Writer("train", url=users["producer"], tuning=QUIET)
    assert list(any_client.scan_iter("penstock:*")) == []
    set_right("producer", "")
    write_to_the_end(users["producer"], -1, lambda: None)
    set_right("trainer", "-xclaim")
    with (
        pytest.raises(Unauthorized, match=r"run `ACL SETUSER trainer \+xclaim` there"),
        penstock.Loader("train", group="net", batch_size=10, url=users["trainer"], tuning=QUIET) as loader,
    ):
        next(iter(loader))


def test_a_trainer_is_told_the_right_that_was_taken_and_no_other(users: dict[str, str], set_right: Take) -> None:
    """A line with the rights of a producer would let a trainer append samples."""
    write_to_the_end(users["producer"], -1, lambda: None)
    with (
        pytest.raises(Unauthorized, match=r"run `ACL SETUSER trainer \+xack` there"),
        penstock.Loader("train", group="net", batch_size=10, url=users["trainer"], tuning=QUIET) as loader,
    ):
        for number, _ in enumerate(loader):
            if number == 0:
                set_right("trainer", "-xack")


WRITERS_RIGHTS = [
    "-xadd",
    "-hincrby",
    "-xrevrange",
    "-get",
    "-eval",
    "-exec",
    "-xgroup",
    "-xinfo",
    "-multi",
    "resetkeys",
]


@pytest.mark.parametrize("rule", WRITERS_RIGHTS)
def test_a_writer_without_a_right_says_so_and_loses_nothing(
    any_url: str, any_client: redis.Redis, users: dict[str, str], set_right: Take, rule: str
) -> None:
    """A commit whose script fails in its middle must leave neither a sample that counts twice nor one that is lost."""
    taken = 0.0

    def take() -> None:
        nonlocal taken
        taken = time.monotonic()
        set_right("producer", rule)

    with pytest.raises(Unauthorized, match=r"ACL SETUSER producer (~penstock|\+)") as refused:
        write_to_the_end(users["producer"], SAMPLES // 2, take)
    assert time.monotonic() - taken < TELLS_S
    if rule.startswith("-"):
        assert f"+{rule[1:]}" in str(refused.value)
    set_right("producer", "")
    write_to_the_end(users["producer"], -1, lambda: None)
    with penstock.Loader("train", group="net", batch_size=50, url=any_url, tuning=QUIET) as loader:
        assert sorted(int(y) for batch in loader for y in batch["y"]) == [*range(SAMPLES)]
    report = audit_stream(any_client, "train")
    assert report.is_clean, report.findings


SHARED = ["-xreadgroup", "-setbit", "-setrange", "-xack", "-evalsha", "-hset", "resetkeys"]
CANONICAL = ["-xrange", "-evalsha", "-hset", "resetkeys"]


@pytest.mark.parametrize(
    ("is_ordered", "rule"), [*((False, rule) for rule in SHARED), *((True, rule) for rule in CANONICAL)]
)
def test_a_loader_without_a_right_says_so_and_loses_nothing(
    any_url: str, any_client: redis.Redis, users: dict[str, str], set_right: Take, is_ordered: bool, rule: str
) -> None:
    """A training that goes on without its acknowledgements would train on everything again."""
    write_to_the_end(users["producer"], -1, lambda: None)
    few = penstock.Tuning(lease_s=1.0, prefetch_bytes=1000, notify=lambda _: None)
    order = penstock.Canonical(0, 1) if is_ordered else None

    def loader() -> penstock.Loader:
        return penstock.Loader("train", group="net", batch_size=10, url=users["trainer"], order=order, tuning=few)

    seen: list[int] = []
    with pytest.raises(Unauthorized, match=r"ACL SETUSER trainer (~penstock|\+)"), loader() as first:
        for batch in first:
            seen += batch["y"].tolist()
            if len(seen) == 100:
                taken = time.monotonic()
                set_right("trainer", rule)
            time.sleep(0.1 if len(seen) >= 100 else 0)  # a step
    assert time.monotonic() - taken < TELLS_S
    assert len(seen) < SAMPLES
    set_right("trainer", "")
    with loader() as second:
        again = [int(y) for batch in second for y in batch["y"]]
    assert {*seen, *again} == {*range(SAMPLES)}
    assert len(again) == len(set(again))
    report = audit_stream(any_client, "train")
    assert report.is_clean, report.findings


@pytest.mark.parametrize("rule", ["-hincrby", "resetkeys"])
def test_a_worker_without_a_right_says_so_and_loses_nothing(
    any_url: str, any_client: redis.Redis, users: dict[str, str], set_right: Take, rule: str, tmp_path: Path
) -> None:
    """A production that waits for a right shows no progress and no reason."""
    (tmp_path / "mydata.py").write_text(DATA)
    paths = os.pathsep.join([*sys.path, str(tmp_path)])
    env = {**os.environ, "PENSTOCK_URL": users["producer"], "PENSTOCK_QUEUE_URL": users["queue"], "PYTHONPATH": paths}
    command = "-m penstock produce dataset mydata:train --epochs 1 --workers 1 --stream train --shard-samples 300"
    arguments = [sys.executable, *command.split()]
    production = subprocess.Popen(arguments, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: any(any_client.xlen(key) for key in any_client.scan_iter("*:0:entries")))
        taken = time.monotonic()
        set_right("producer", rule)
        _, said = production.communicate(timeout=60)
        assert time.monotonic() - taken < TELLS_S
        assert production.returncode == 1
        assert "ACL SETUSER producer" in said
    finally:
        production.kill()
    set_right("producer", "")
    again = subprocess.run(arguments, cwd=tmp_path, env=env, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    with penstock.Loader("train", group="net", batch_size=50, url=any_url, tuning=QUIET) as loader:
        assert sorted(int(y) for batch in loader for y in batch["y"]) == [*range(SAMPLES)]
    report = audit_stream(any_client, "train")
    assert report.is_clean, report.findings


def start(folder: Path, users: dict[str, str], command: str, **url: str) -> subprocess.Popen[str]:
    """Start a command of one who uses the module `mydata`, with the addresses of the users."""
    (folder / "mydata.py").write_text(DATA)
    paths = os.pathsep.join([*sys.path, str(folder)])
    env = {"PENSTOCK_URL": users["producer"], "PENSTOCK_QUEUE_URL": users["queue"], "PYTHONPATH": paths, **url}
    arguments = [sys.executable, "-m", "penstock", *command.split()]
    return subprocess.Popen(arguments, cwd=folder, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True)


def ended(command: subprocess.Popen[str]) -> tuple[int, str]:
    """Return a command's exit code and what it said."""
    try:
        _, said = command.communicate(timeout=60)
    finally:
        command.kill()
    return command.returncode, said


WORKER = "worker --processes 1 --allow mydata"
PRODUCE = "produce dataset mydata:train --epochs 1 --workers 0 --stream train --shard-samples 300"


def test_a_worker_that_could_not_write_ends_before_it_takes_a_job(
    users: dict[str, str], set_right: Take, tmp_path: Path
) -> None:
    """It failed a shard at once, and with it the epoch of a production that was configured well."""
    wrong = users["producer"].replace("producer-password", "wrong")
    code, said = ended(start(tmp_path, users, WORKER, PENSTOCK_URL=wrong))
    assert (code, len(said.splitlines()), "refused the login" in said) == (1, 1, True), said
    set_right("producer", "-xadd")
    code, said = ended(start(tmp_path, users, WORKER))
    assert (code, "run `ACL SETUSER producer +xadd` there" in said) == (1, True), said


def test_a_worker_waits_for_a_streams_server_that_is_away(
    any_client: redis.Redis, users: dict[str, str], tmp_path: Path
) -> None:
    """The servers and the workers of a fleet start in any order."""
    worker = start(tmp_path, users, WORKER, PENSTOCK_URL="redis://127.0.0.1:1")
    try:
        until(lambda: any_client.scard("rq:workers:penstock") == 1)
        worker.terminate()
        _, said = worker.communicate(timeout=30)
        assert worker.returncode == 0, said
    finally:
        worker.kill()


def test_a_worker_whose_login_is_refused_later_gives_its_job_to_another(
    any_url: str, any_client: redis.Redis, users: dict[str, str], tmp_path: Path
) -> None:
    """A password that is changed must cost no epoch, though some workers do not know the new one."""
    old = start(tmp_path, users, WORKER)
    processes = [old]
    try:
        until(lambda: any_client.scard("rq:workers:penstock") == 1)
        any_client.execute_command("ACL", "SETUSER", "producer", "resetpass", ">newer")
        newer = {**users, "producer": users["producer"].replace("producer-password", "newer")}
        processes.append(production := start(tmp_path, newer, PRODUCE))
        _, said = old.communicate(timeout=60)
        assert (old.returncode, "refused the login" in said) == (1, True), said
        processes.append(start(tmp_path, newer, WORKER))
        _, said = production.communicate(timeout=60)
        assert production.returncode == 0, said
    finally:
        for process in processes:
            process.terminate()
            process.communicate(timeout=30)
    with penstock.Loader("train", group="net", batch_size=50, url=any_url, tuning=QUIET) as loader:
        assert sorted(int(y) for batch in loader for y in batch["y"]) == [*range(SAMPLES)]


@pytest.mark.parametrize("rule", ["-blmove", "-zrangebyscore"])
def test_a_worker_that_may_not_take_jobs_says_so(
    users: dict[str, str], set_right: Take, tmp_path: Path, rule: str
) -> None:
    """It was replaced for ever without a word, and its production waited for workers."""
    set_right("queue", rule)
    code, said = ended(start(tmp_path, users, WORKER))
    assert (code, f"run `ACL SETUSER queue +{rule[1:]}` there" in said) == (1, True), said
