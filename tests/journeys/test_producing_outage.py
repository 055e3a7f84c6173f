"""Servers killed under `penstock produce` and `penstock worker`: an outage is borne, a long one named."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from socket import gethostname

import pytest

from penstock.__main__ import main
from penstock_common.errors import EpochFailed
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_producer.jobs import production
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import QUEUE
from tests.contracts.processes import Child, child
from tests.journeys.trouble import _bear_outages_for
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch
from tests.producer.test_jobs import dataset, options_of

Server = Callable[..., EmbeddedServer]
EPOCHS = 2
AWAY_S = 2.5
"""The seconds for which a killed server stays away."""


def command(outage_s: str, *words: str) -> None:
    """The `penstock` command in a process of its own, which bears an outage for so long."""
    _bear_outages_for(float(outage_s))
    sys.exit(main(list(words)))


def produce_words(stream_url: str, queue_url: str, workers: int, transform: str = "very_slowly") -> list[object]:
    """A command line that takes some seconds."""
    return [
        "produce", "dataset", "tests.producer.made:numbers", "--transform", f"tests.producer.made:{transform}", "--url",
        stream_url, "--queue-url", queue_url, "--workers", workers, "--epochs", EPOCHS, "--shard-samples", 30,
    ]  # fmt: skip


def worker_words(stream_url: str, queue_url: str) -> list[object]:
    """A worker on another host."""
    return ["worker", "--url", stream_url, "--queue-url", queue_url, "--processes", 1, "--allow", "tests.producer"]


def committed(url: str) -> int:
    """Samples, of all epochs."""
    with connect(url) as client:
        try:
            return audit_stream(client, "train").produced
        except LookupError:
            return 0


def await_committed(url: str, count: int, process: Child) -> None:
    """Return once ``count`` samples are committed."""
    deadline = time.monotonic() + 60
    while committed(url) < count:
        assert time.monotonic() < deadline, process.errors()
        assert process.process.poll() is None, process.errors()
        time.sleep(0.05)


def require_exactly_once(url: str) -> None:
    """Every sample of every epoch, and nothing twice."""
    for epoch in range(EPOCHS):
        assert sorted(int(s["x"][0]) for s in read_epoch(url, epoch=epoch).values()) == list(range(SAMPLES))
    with connect(url) as client:
        report = audit_stream(client, "train")
    assert report.is_clean, report
    assert report.produced == EPOCHS * SAMPLES


def restarted(server: EmbeddedServer, fresh_server: Server, directory: Path) -> EmbeddedServer:
    """Kill -9, some seconds without a server, and a new one on the same port with the same files."""
    server.kill()
    time.sleep(AWAY_S)
    return fresh_server(appendonly=True, directory=directory, port=server.port)


@pytest.mark.parametrize("which", ["both", "streams", "jobs"])
def test_an_epoch_is_complete_once_though_its_servers_were_killed_while_it_was_made(
    fresh_server: Server, tmp_path: Path, which: str
) -> None:
    """Redis restarted at night must not cost the day's epochs: dispatcher and workers wait, and go on."""
    servers, places = {}, {}
    for name in ["streams"] if which == "both" else ["streams", "jobs"]:
        places[name] = tmp_path / name
        places[name].mkdir()
        servers[name] = fresh_server(appendonly=True, directory=places[name])
    streams, jobs = servers["streams"].url, servers.get("jobs", servers["streams"]).url
    hit = "jobs" if which == "jobs" else "streams"
    with (
        child(command, 60, *worker_words(streams, jobs)) as helper,
        child(command, 60, *produce_words(streams, jobs, 1)) as process,
    ):
        for enough in (20, SAMPLES + 20):
            await_committed(streams, enough, process)
            servers[hit] = restarted(servers[hit], fresh_server, places[hit])
        process.rest(120)
        assert "trying again for 60 s" in process.errors()
        assert helper.process.poll() is None, helper.errors()
    require_exactly_once(streams)


def test_a_busy_worker_tells_of_an_outage_and_is_listed_again_after_a_loss(fresh_server: Server) -> None:
    """Its job was silent, and only its record came back: no worker was counted, and `penstock health` failed."""
    server = fresh_server()
    with (
        child(command, 60, *worker_words(server.url, server.url)) as helper,
        child(command, 60, *produce_words(server.url, server.url, 0)) as process,
    ):
        await_committed(server.url, 10, process)
        server.kill()
        await_true(lambda: "trying again for 60 s" in helper.errors(), 5, helper)
        fresh_server(port=server.port, password=server.password)
        with closing(Dispatcher(server.url, QUEUE)) as dispatcher:
            await_true(lambda: dispatcher.count_workers() == 1, 15, helper)
            assert dispatcher.heard_of(gethostname())
        assert helper.process.poll() is None, helper.errors()


def await_true(is_so: Callable[[], bool], limit_s: float, process: Child) -> None:
    """Return once something is so."""
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, process.errors()
        time.sleep(0.05)


@pytest.mark.parametrize("which", ["streams", "jobs"])
def test_an_outage_that_lasts_too_long_ends_both_commands_with_what_to_do(
    fresh_server: Server, tmp_path: Path, which: str
) -> None:
    """A command that waits for ever hides that nothing is made; the same one, later, makes what is missing."""
    (tmp_path / which).mkdir()
    servers = {which: fresh_server(appendonly=True, directory=tmp_path / which)}
    other = "jobs" if which == "streams" else "streams"
    servers[other] = fresh_server()
    streams, jobs = servers["streams"].url, servers["jobs"].url
    with (
        child(command, 2, *worker_words(streams, jobs)) as helper,
        child(command, 2, *produce_words(streams, jobs, 1)) as process,
    ):
        await_committed(streams, 20, process)
        servers[which].kill()
        for one in (process, helper):
            one.finish(60)
            assert one.process.returncode == 1, one.errors()
            last = one.errors().splitlines()[-1]
            assert re.search(r"what is committed stands, and the same command goes on from there$", last), one.errors()
            assert "Traceback" not in one.errors()
    fresh_server(appendonly=True, directory=tmp_path / which, port=servers[which].port)
    with child(command, 60, *produce_words(streams, jobs, 2)) as again:
        again.rest(90)
    require_exactly_once(streams)


def test_the_first_reason_is_the_one_that_is_told(fresh_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed cleanup must not hide why the epoch failed."""
    monkeypatch.setattr(production, "LEAVE_S", 1.0)
    server = fresh_server()
    asked = ProductionPlan(stream="train", source=dataset("slowly"))
    with (
        pytest.raises(EpochFailed, match="the reason"),
        Production(asked, options_of(server.url), workers=1, notify=lambda _: None) as producing,
    ):
        next(producing.run())
        server.kill()
        raise EpochFailed("the reason")
