"""Sentinels promote a replica in the middle of an epoch, and writer and loaders go on with the new primary."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
import pytest

import penstock
from chaos.cluster import low_port
from penstock_common.errors import ServerUnavailable
from penstock_common.server.connection import open_channel
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.servers.confirmed import Confirmer
from penstock_common.stream.servers.durability import Durability, ReplicaWatch
from penstock_common.stream.servers.embedded import find_servers, server_label
from penstock_common.stream.streams import create_stream
from tests.common.server.test_tls import made_certificate
from tests.sentinels import SENTINEL_PASSWORD, SERVER_PASSWORD, Service, asked, has_tls, started_service, until

EACH = 300
ALL = list(range(2 * EACH))
SPEC = {"x": ("int64", ())}
SOON_S = 20.0
"""A silent server is taken for an outage after 30 s. A failover, and the look that finds it, take a few."""


@pytest.fixture(autouse=True)
def _goes_on_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers go on soon where the next primary has no replica, which they wait for by default."""
    monkeypatch.setattr("penstock_common.stream.servers.durability.AUTO_S", 2.0)


@pytest.fixture(scope="module", params=find_servers(), ids=server_label)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of each version found. The last test kills its primary."""
    with started_service(request.param, tmp_path_factory.mktemp("service")) as made:
        yield made


def read_through_a_fault(service: Service, fault: Callable[[], object]) -> float:
    """Write an epoch and read it in both orders, with a fault in the middle, and return the seconds after that."""
    url = service.url
    with ExitStack() as stack:
        writer = stack.enter_context(penstock.Writer("train", url=url, spec=SPEC))
        epoch = stack.enter_context(writer.epoch(sizes=[EACH, EACH]))
        before = service.primary()
        with epoch.shard(0) as shard:
            for value in range(EACH):
                shard.write({"x": np.int64(value)})
        shared = stack.enter_context(penstock.Loader("train", group="shared", batch_size=50, url=url))
        canonical = stack.enter_context(
            penstock.Loader("train", group="ranks", batch_size=50, url=url, order=penstock.Canonical())
        )
        read: dict[str, list[int]] = {"shared": [], "ranks": []}
        readers = [
            threading.Thread(target=read_all, args=(loader, read[name]))
            for name, loader in (("shared", shared), ("ranks", canonical))
        ]
        for reader in readers:
            reader.start()
        until(lambda: all(len(numbers) >= EACH - 50 for numbers in read.values()))
        fault()  # the readers wait at the server
        began = time.monotonic()
        with epoch.shard(1) as shard:
            for value in range(EACH, 2 * EACH):
                shard.write({"x": np.int64(value)})
                if value == EACH + 50:
                    until(lambda: service.primary() is not before)
        for reader in readers:
            reader.join(2 * SOON_S)
        took_s = time.monotonic() - began
        assert sorted(set(read["shared"])) == ALL
        assert read["ranks"] == ALL
    with connect(url) as client:
        assert audit_stream(client, "train").findings == []
    return took_s


def read_all(loader: penstock.Loader, numbers: list[int]) -> None:
    """Read an epoch to its end."""
    for batch in loader:
        numbers += batch["x"].tolist()


def test_messages_name_the_service_and_no_password(service: Service) -> None:
    """The address of a server would be out of date after a failover."""
    with connect(service.url) as client, closing(open_channel(client)) as channel:
        channel.send([[b"PING"]])
        assert channel.read() == b"PONG"
        assert client.where.endswith("/feed")
        assert SERVER_PASSWORD not in client.where + repr(client)
        assert SENTINEL_PASSWORD not in client.where + repr(client)
    hosts = ",".join(f"127.0.0.1:{port}" for port in service.ports)
    with pytest.raises(ServerUnavailable) as caught:
        connect(service.url.replace("/feed", "/absent"))
    text = str(caught.value)
    assert text.startswith(f"the primary of service 'absent' (Sentinels {hosts}) does not answer")
    assert "knows no service 'absent'" in text
    assert text.endswith("the last part of the address is the service")
    assert SERVER_PASSWORD not in text
    assert SENTINEL_PASSWORD not in text


def test_the_last_number_of_an_address_is_the_database(service: Service) -> None:
    """Each new connection, to whichever primary, uses it. The Sentinels have none."""
    with connect(service.url.replace("/feed", "/feed/3")) as client, closing(open_channel(client)) as channel:
        assert client.set("here", "3")
        channel.send([[b"GET", b"here"]])
        assert channel.read() == b"3"
        assert asked(service.primary(), "EXISTS", "here") == 0, "there it is in database 0"
        assert client.delete("here")


def test_a_sentinel_that_is_away_is_passed_over(service: Service) -> None:
    """A user names several, because one of them may be away."""
    away = service.url.replace("@", f"@127.0.0.1:{low_port()},")
    with connect(away) as client:
        assert client.ping()


def test_a_sentinel_that_is_silent_costs_a_second_once(service: Service) -> None:
    """A stopped Sentinel still accepts connections, and each new connection of a process would wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = service.url.replace("@", f"@127.0.0.1:{mute.getsockname()[1]},")
        with connect(url) as client, closing(open_channel(client)):
            assert client.ping()
            mute.settimeout(0)
            asked_times = 0
            with suppress(BlockingIOError):
                while True:
                    mute.accept()[0].close()
                    asked_times += 1
    assert asked_times == 1, "the Sentinel that answered is asked from then on"


def test_a_user_who_may_not_ask_for_the_role_connects(service: Service) -> None:
    """ROLE is an administrator's command, and the users of docs/redis-in-production.md are none."""
    asked(service.primary(), "ACL", "SETUSER", "trainer", "on", ">pw", "resetkeys", "~penstock:*", "+@all", "-@admin")
    with connect(service.url.replace(f":{SERVER_PASSWORD}@", "trainer:pw@")) as client:
        assert client.ping()


def test_one_thread_watches_while_a_connection_is_open(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have many clients of one service."""
    for pause in ("LOOK_S", "SOON_S"):
        monkeypatch.setattr(f"penstock_common.server.primary_watcher.{pause}", 0.05)

    def watching() -> int:
        return sum(thread.name == "penstock-sentinels" for thread in threading.enumerate())

    until(lambda: watching() == 0)
    with connect(service.url) as first, connect(service.url) as second:
        assert first.ping()
        assert second.ping()
        assert watching() == 1
    until(lambda: watching() == 0)


def test_a_forked_process_watches_its_own_connections_only(service: Service) -> None:
    """A watcher of the parent does not run in it, and the parent's connections are not its own."""
    with connect(service.url) as client, closing(open_channel(client)) as channel:
        if (child := os.fork()) == 0:
            with suppress(BaseException), connect(service.url) as own:
                os._exit(
                    0
                    if own.ping()
                    and len([one for one in threading.enumerate() if one.name == "penstock-sentinels"]) == 1
                    else 1
                )
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        channel.send([[b"PING"]])
        assert channel.read() == b"PONG"


def test_a_primary_that_is_killed_in_the_middle_of_an_epoch_costs_no_sample(service: Service) -> None:
    """The replica has all that was written before, and the rest is written to it."""
    assert read_through_a_fault(service, lambda: service.fail("kill")) < SOON_S


def test_a_primary_that_stands_still_is_left_once_another_one_is_named(tmp_path: Path) -> None:
    """It does not close its connections, and readers would wait at it for 30 s; here all speak TLS."""
    certificate = made_certificate(tmp_path)
    executable = next((one for one in find_servers() if has_tls(one, certificate)), None)
    if executable is None:
        pytest.skip("no redis-server here is built with TLS")
    with started_service(executable, tmp_path / "service", replicas=2, certificate=certificate) as service:
        pid = int(asked(service.primary(), "INFO", "server")["process_id"])
        try:
            assert read_through_a_fault(service, lambda: service.fail("stop")) < SOON_S
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def test_a_primary_that_took_over_does_not_answer_for_what_another_one_was_told(tmp_path: Path) -> None:
    """Its address is that of the service, too. It may lack the write, and may have no replica itself."""
    with started_service(find_servers()[0], tmp_path) as service, connect(service.url) as client:
        former = service.primary()
        stream = create_stream(client, "train", durability="auto")
        watch = ReplicaWatch(client)
        confirmer = Confirmer(client, stream, lambda _: None, watch=watch)
        before = confirmer.question(confirmer.everywhere)
        assert client.server == f"redis://127.0.0.1:{former.port}"
        assert before.lacking() == {}
        service.fail("kill")
        until(lambda: service.primary() is not former)
        (now,) = (server for server in service.servers if server is not former)
        until(lambda: answers(client))
        assert client.server == f"redis://127.0.0.1:{now.port}"
        moved = f"the keys have moved from redis://127.0.0.1:{former.port} to {client.server}"
        assert set(before.lacking().values()) == {moved}
        assert str(watch.level(Durability.parse("auto"), stream.keys.meta)) == "memory"
        assert confirmer.question(confirmer.everywhere).lacking() == {}


def answers(client: Client) -> bool:
    """Whether the primary answers by now."""
    try:
        return bool(client.ping())
    except ServerUnavailable:
        return False


def test_a_failover_that_an_operator_orders_costs_no_sample(tmp_path: Path) -> None:
    """The former primary goes on for a while. By min-replicas-to-write it takes nothing that would be lost with it."""
    with started_service(find_servers()[0], tmp_path) as service:
        former = service.primary()
        asked(former, "CONFIG", "SET", "min-replicas-to-write", "1")

        def fault() -> None:
            service.fail("failover")
            until(lambda: service.primary() is not former)

        assert read_through_a_fault(service, fault) < SOON_S
