"""A server that is stopped: every wait names it within five seconds, and continues when it answers again."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock.cli import COMMANDS, load_command
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.contracts.feed import produce
from tests.contracts.processes import child
from tests.front.test_cli_produce import start
from tests.front.test_every_command import LEAVES, STREAMS, arguments
from tests.journeys.trouble import StandingProxy, stopped
from tests.tuned import tuned

Fresh = Callable[..., EmbeddedServer]
PROMISED_S = 5.0
LATE_S = 1.5
"""The extra seconds after which a test on a busy machine may see a message."""
SPEC = {"y": ("int64", ())}
COUNT = 400


@dataclass
class Heard:
    """The lines that one process printed, with their times."""

    lines: list[tuple[float, str]] = field(default_factory=list)

    def __call__(self, text: str) -> None:
        """Its ``notify``."""
        self.lines.append((time.monotonic(), text))

    def since(self, when_s: float) -> list[tuple[float, str]]:
        """Lines from then on, without reports of a pass that ended: a replay's last batches may have come before."""
        return [line for line in list(self.lines) if line[0] >= when_s and f": {COUNT} samples in " not in line[1]]


def require_named(heard: dict[str, Heard], where: str, since_s: float) -> None:
    """All of them name the server in time, and nothing else."""
    deadline = since_s + PROMISED_S + LATE_S
    while silent := [name for name, one in heard.items() if not one.since(since_s)]:
        assert time.monotonic() < deadline, (silent, heard)
        time.sleep(0.02)
    for name, one in heard.items():
        said = [text for _, text in one.since(since_s)]
        assert all(text.startswith(f"waiting: no answer from {where} for ") for text in said), (name, said)


# --- in one process ---------------------------------------------------------------------------------------------------


class Users:
    """Run a writer, a feed and readers of every kind, each in a thread, until the test ends them."""

    def __init__(self, url: str) -> None:
        self._url, self.ending = url, threading.Event()
        self.heard: dict[str, Heard] = {}
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="user")
        self.results: dict[str, Future[list[int]]] = {}

    def begin(self, name: str, act: Callable[[str, Heard], list[int]]) -> None:
        """One more; what it returns is its result."""
        self.heard[name] = Heard()
        self.results[name] = self._pool.submit(act, self._url, self.heard[name])

    def result(self, name: str) -> list[int]:
        """Return what it wrote or read, once it has ended."""
        return self.results[name].result(30)

    def __enter__(self) -> Users:
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self._pool.shutdown()

    # --- what they do ---

    def write(self, url: str, notify: Heard) -> list[int]:
        """An epoch of one shard."""
        with (
            penstock.Writer("t", url=url, spec=SPEC, tuning=penstock.Tuning(notify=notify)) as writer,
            writer.epoch(sizes=[COUNT]).shard(0) as shard,
        ):
            for number in range(COUNT):
                shard.write({"y": number})
                shard.commit_all()
                time.sleep(0.01)
        return list(range(COUNT))

    def feed(self, url: str, notify: Heard) -> list[int]:
        """An endless feed."""
        written = 0
        with penstock.Writer("f", url=url, spec=SPEC, tuning=penstock.Tuning(notify=notify)) as writer:
            while not self.ending.is_set():
                writer.write({"y": written})
                writer.flush()
                written += 1
                time.sleep(0.01)
        return list(range(written))

    def read(self, order: Any) -> Callable[[str, Heard], list[int]]:
        """The writer's epoch."""

        def act(url: str, notify: Heard) -> list[int]:
            settings: dict[str, Any] = {"group": f"g-{order}", "batch_size": 4, "url": url, "notify": notify}
            with penstock.Loader("t", order=order, **tuned("Loader", settings)) as loader:
                return [number for batch in loader for number in batch["y"].tolist()]

        return act

    def wait(self, url: str, notify: Heard) -> list[int]:
        """For a stream that comes later."""
        with penstock.Loader(
            "later", group="g", batch_size=4, url=url, tuning=penstock.Tuning(notify=notify)
        ) as loader:
            return [number for batch in loader for number in batch["y"].tolist()]

    def replay(self, url: str, notify: Heard) -> list[int]:
        """An older epoch, again and again."""
        seen: list[int] = []
        with penstock.Replay(
            "old", epoch=0, batch_size=4, url=url, tuning=penstock.Tuning(prefetch_bytes=500, notify=notify)
        ) as replay:
            while not self.ending.is_set():
                seen = [number for batch in replay for number in batch["y"].tolist()]
        return seen


def stand_still_by_signal(server: EmbeddedServer) -> Any:
    """The process is stopped."""
    return stopped(server)


@contextmanager
def stand_still_by_pause(server: EmbeddedServer) -> Iterator[None]:
    """CLIENT PAUSE: it takes commands, and does none of them for a while, not even CLIENT UNPAUSE."""
    with connect(server.url) as client:
        client.client_pause(int((PROMISED_S + LATE_S) * 1000))
    yield


@pytest.mark.parametrize("stand_still", [stand_still_by_signal, stand_still_by_pause])
def test_all_who_wait_for_a_server_that_stands_still_name_it_and_lose_nothing(
    fresh_server: Fresh, stand_still: Callable[[EmbeddedServer], Any]
) -> None:
    """They said nothing for half a minute, and then that no producer was running."""
    server = fresh_server()
    where = f"redis://127.0.0.1:{server.port}"
    produce(server.url, "old", COUNT)
    with Users(server.url) as users:
        users.begin("writer", users.write)
        users.begin("feed", users.feed)
        users.begin("shared", users.read(None))
        users.begin("ordered", users.read("canonical"))
        users.begin("waiting", users.wait)
        users.begin("replay", users.replay)
        time.sleep(1.5)  # all are at it
        with stand_still(server):
            stopped_s = time.monotonic()
            require_named(users.heard, where, stopped_s)
        went_on_s = time.monotonic()
        produce(server.url, "later", 8)
        assert users.result("writer") == list(range(COUNT))
        for name in ("shared", "ordered"):
            assert sorted(users.result(name)) == list(range(COUNT)), name
        assert sorted(users.result("waiting")) == list(range(8))
        users.ending.set()
        assert sorted(users.result("replay")) == list(range(COUNT))
        fed = users.result("feed")
        assert len(fed) > 20
        for name, one in users.heard.items():
            said = [text for _, text in one.since(went_on_s)]
            assert any(text.startswith(f"{where} answers again, after ") for text in said), (name, one)
    with penstock.Loader(
        "f", group="g", batch_size=1, url=server.url, tuning=penstock.Tuning(timeout_s=5, notify=lambda _: None)
    ) as loader:
        batches = iter(loader)
        assert sorted(int(next(batches)["y"][0]) for _ in fed) == fed


@pytest.mark.parametrize("order", [None, "canonical"])
def test_a_loader_names_a_server_that_stops_at_any_moment_of_its_start(any_url: str, order: Any) -> None:
    """Stream, group and epoch are not known at that time, so the message can name only the server."""
    produce(any_url, "t", 8)
    moments = [0, 1, 2, 3, 5, 7, 9, 12, 15, 18]

    def begin(proxy: StandingProxy, moment: int, notify: Heard) -> list[int]:
        group = f"g-{moment}"
        with penstock.Loader(
            "t", group=group, order=order, batch_size=4, url=proxy.url, tuning=penstock.Tuning(notify=notify)
        ) as loader:
            return [number for batch in loader for number in batch["y"].tolist()]

    with ExitStack() as stack, ThreadPoolExecutor(len(moments)) as pool:
        proxies = {moment: stack.enter_context(StandingProxy(any_url, moment)) for moment in moments}
        heard = {moment: Heard() for moment in moments}
        results = {moment: pool.submit(begin, proxy, moment, heard[moment]) for moment, proxy in proxies.items()}
        for moment, proxy in proxies.items():
            deadline = time.monotonic() + PROMISED_S + LATE_S
            while not (said := [line for line in heard[moment].lines if not line[1].startswith("new group")]):
                assert time.monotonic() < deadline, (moment, proxy.stood_s)
                time.sleep(0.01)
            proxy.go_on()
            at_s, text = said[0]
            assert proxy.stood_s is not None
            assert at_s - proxy.stood_s < PROMISED_S + LATE_S
            assert text.startswith(f"waiting: no answer from {proxy.where} for "), text
        for moment, result in results.items():
            assert sorted(result.result(30)) == list(range(8)), moment


# --- every command ----------------------------------------------------------------------------------------------------

MOMENTS = {"before its first answer": 0, "in the middle": 4}
ENDLESS = {"penstock exporter"}
MAY_FAIL = {"penstock bad drop", "penstock bad retry", "penstock bad show", "penstock health trainer"}
"""They want something bad, or a member, which is not there."""


@dataclass
class Task:
    """A command of the test."""

    prog: str
    argv: list[str]
    folder: Path

    @property
    def said(self) -> str:
        """All on its stderr."""
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""


def prepare(url: str, folder: Path) -> list[Task]:
    """Every command that speaks to a server which is given to it, each with a stream of its own to work on."""
    np.save(folder / "y.npy", np.arange(8))
    tasks = []
    for number, prog in enumerate(sorted({*STREAMS, *ENDLESS, "penstock worker", "penstock produce arrays"})):
        name, mine = f"s{number}", folder / str(number)
        mine.mkdir()
        if prog in STREAMS:
            produce(url, name, 8)
            assert main(["groups", "declare", name, "resnet", "--url", url]) == 0
        if prog == "penstock epochs unpin":
            assert main(["epochs", "pin", name, "0", "--url", url]) == 0
        if prog == "penstock import":
            assert main(["export", name, str(mine / "copy"), "--url", url]) == 0
            name += "-again"
        argv = arguments(LEAVES[prog], stream=name, directory=str(mine / "copy"))
        argv += {
            "penstock epochs abandon": ["--force"],
            "penstock exporter": ["--port", "0"],
            "penstock worker": ["--burst", "--processes", "1", "--queue", name, "--allow-any"],
            "penstock produce arrays": [str(folder / "y.npy"), "--stream", name, "--queue", name, "--workers", "1"],
        }.get(prog, [])
        tasks.append(Task(prog, argv, mine))
    return tasks


def run_commands(path: str) -> None:
    """Runs each command in a process of its own, forked so that all of it is imported once; prints pids and codes."""
    for name in COMMANDS:
        load_command(name)
    for module in ("penstock_consumer.replay.replay", "penstock_producer.jobs.production"):
        importlib.import_module(module)
    running = {}
    for number, (argv, url, folder) in enumerate(json.loads(Path(path).read_text())):
        pid = os.fork()
        if pid == 0:
            os.environ["PENSTOCK_URL"] = url
            for descriptor, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
            code = 70
            try:
                code = main(argv)
                sys.stdout.flush()
            finally:
                os._exit(code)
        running[pid] = number
        print("pid", number, pid, flush=True)
    while running:
        pid, status = os.wait()
        print("end", running.pop(pid), os.waitstatus_to_exitcode(status), flush=True)


def numbers(lines: Iterable[str]) -> dict[int, int]:
    """The two numbers of each line."""
    return {int(first): int(second) for _, first, second in map(str.split, lines)}


@pytest.mark.parametrize("moment", MOMENTS)
def test_every_command_names_a_server_that_stops_at_any_moment(
    any_url: str, tmp_path: Path, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who sees no progress must learn that the server is the cause, and which server."""
    tasks = prepare(any_url, tmp_path)
    with ExitStack() as stack:
        proxies = [stack.enter_context(StandingProxy(any_url, MOMENTS[moment])) for _ in tasks]
        table = [(task.argv, proxy.url, str(task.folder)) for task, proxy in zip(tasks, proxies, strict=True)]
        (tmp_path / "table").write_text(json.dumps(table))
        all_of_them = stack.enter_context(child(run_commands, str(tmp_path / "table")))
        pids = numbers(all_of_them.line() for _ in tasks)
        todo, deadline = list(range(len(tasks))), time.monotonic() + 60
        while todo:
            assert time.monotonic() < deadline, [tasks[number] for number in todo]
            for number in list(todo):
                task, proxy = tasks[number], proxies[number]
                if f"waiting: no answer from {proxy.where} for " not in (said := task.said):
                    assert proxy.stood_s is None or time.monotonic() - proxy.stood_s < PROMISED_S + LATE_S, (task, said)
                    continue
                proxy.go_on()
                todo.remove(number)
                if task.prog in ENDLESS:
                    os.kill(pids[number], signal.SIGTERM)
            time.sleep(0.02)
        codes = numbers(all_of_them.rest(60))
    for number, task in enumerate(tasks):
        may_fail = {130} if task.prog in ENDLESS else {1} if task.prog in MAY_FAIL else set()
        assert codes[number] in {0} | may_fail, (task, codes[number], task.said)


# --- processes that make data -----------------------------------------------------------------------------------------

SLOW = """
import itertools, time

def data():
    return range(200)

def endless():
    return itertools.count()

def step(n):
    time.sleep(0.02)
    return {"n": n}
"""
TRAINER = """
import os, penstock

with penstock.Loader("train", group="g", batch_size=4, url=os.environ["PENSTOCK_URL"]) as loader:
    found = [n for batch in loader for n in batch["n"].tolist()]
assert sorted(found) == list(range(200)), found
"""


class Told:
    """The lines that a process writes to stderr, as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.heard = process, Heard()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.heard(line.rstrip("\n"))

    def end(self, timeout_s: float = 60) -> str:
        """Waits for its end; what it wrote to stdout."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        self.process.wait(timeout_s)
        self._thread.join(timeout_s)
        self.process.stdout.close()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return out


def servers_below(pid: int) -> list[int]:
    """Redis servers that a process has started, or a process that it has started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    words = [line.split(None, 2) for line in listed.splitlines()]
    parents = {int(own): int(parent) for own, parent, _ in words}
    found = []
    for own, _, name in words:
        above = int(own)
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and name.startswith(("redis-server", "valkey-server")):
            found.append(int(own))
    return found


def test_producers_and_workers_name_a_server_that_stands_still_and_make_all_samples(
    fresh_server: Fresh, tmp_path: Path
) -> None:
    """They named no cause for half a minute, or a wrong one. Each kind of process that makes data is here."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "train.py").write_text(TRAINER)
    server = fresh_server()
    made = ["--transform", "slow:step", "--url", server.url]
    commands = {
        "produce": ["produce", "dataset", "slow:data", *made, "--workers", "1", "--stream", "a", "--queue", "a"],
        "queue": ["produce", "dataset", "slow:data", *made, "--workers", "0", "--stream", "b", "--queue", "b"],
        "worker": ["worker", "--processes", "1", "--queue", "b", "--url", server.url, "--allow-any"],
        "feed": ["produce", "generator", "slow:endless", *made, "--endless", "--stream", "c", "--queue", "c"],
        "run": [
            "run", "dataset", "slow:data", "--transform", "slow:step", "--workers", "1", "--",
            sys.executable, "train.py",
        ],
    }  # fmt: skip
    told = {name: Told(start(*argv, cwd=tmp_path)) for name, argv in commands.items()}
    try:
        with connect(server.url) as client:
            deadline = time.monotonic() + 60
            while len(client.keys("*:entries")) < 3 or not (own := servers_below(told["run"].process.pid)):
                assert time.monotonic() < deadline, {name: one.heard for name, one in told.items()}
                time.sleep(0.05)
        time.sleep(1)
        servers = [server.pid, *own]
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            wanted = f"no answer from redis://127.0.0.1:{server.port} for "
            while True:
                silent = [
                    name
                    for name, one in told.items()
                    if not any((wanted if name != "run" else "no answer from redis://127.0.0.1:") in text
                               for _, text in one.heard.since(stopped_s))
                ]  # fmt: skip
                if not silent:
                    break
                assert time.monotonic() - stopped_s < PROMISED_S + LATE_S, (silent, told[silent[0]].heard)
                time.sleep(0.02)
        finally:
            for pid in servers:
                os.kill(pid, signal.SIGCONT)
        for name in ("produce", "queue", "run"):
            out = told[name].end()
            assert told[name].process.returncode == 0, (name, told[name].heard)
            assert "200 samples, 0 bad" in out or name == "run", (name, out)  # its training has counted
        for name, code in (("worker", 0), ("feed", 130)):
            told[name].process.terminate()
            told[name].end()
            assert told[name].process.returncode == code, (name, told[name].heard)
        for name, one in told.items():
            assert not any("producer running" in text for _, text in one.heard.since(stopped_s)), (name, one.heard)
    finally:
        for one in told.values():
            one.process.kill()
