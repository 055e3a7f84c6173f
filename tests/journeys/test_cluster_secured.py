"""A cluster behind TLS with client certificates, and the users of docs/acl.md on a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.errors import ServerUnavailable, Unauthorized
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import find_servers, server_label
from tests.clusters import PASSWORD, Cluster, started_cluster
from tests.common.server.test_tls import made_certificate
from tests.journeys.test_acl_page import IGNORED, lines_for
from tests.journeys.test_cluster import (
    ALL,
    EACH,
    SHARDS,
    SPEC,
    assert_clean,
    numbers_of,
    require_every_way,
    sample,
    written,
    written_and_read,
)
from tests.sentinels import has_tls

TELLS_S = 5.0
"""The time in which a program says that a right is gone."""


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    return made_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls(certificate: tuple[Path, Path]) -> Iterator[Cluster]:
    """A cluster whose nodes ask clients for a certificate. The last test kills a master."""
    executable = next((one for one in find_servers() if has_tls(one, certificate)), None)
    if executable is None:
        pytest.skip("no redis-server here is built with TLS")
    with started_cluster(executable, replicas=1, certificate=certificate) as cluster:
        yield cluster


def test_a_client_without_a_certificate_is_told_which_option_to_write(tls: Cluster) -> None:
    """Each node refuses it, and the address has rediss already."""
    with pytest.raises(ServerUnavailable, match="ssl_certfile"):
        connect(tls.tls_url)


def test_a_fix_of_the_doctor_reaches_its_node_by_tls(tls: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A line without the certificate, or for another port, would be refused by the node."""
    main(["doctor", "--no-probe", "--json", "--url", tls.url])
    fixes = {
        one["fix"]
        for one in json.loads(capsys.readouterr().out)["findings"]
        if one["check"] == "min replicas" and one["severity"] == "warning"
    }
    assert len(fixes) == len(tls.masters)
    for fix in fixes:
        assert fix.startswith("redis-cli --tls --cacert ")
        answer = subprocess.check_output(fix, shell=True, env={**os.environ, "REDISCLI_AUTH": PASSWORD}, timeout=20)
        assert answer == b"OK\n"
    for node in tls.masters:
        tls.asked(node, "CONFIG", "SET", "min-replicas-to-write", 0)


def test_a_master_that_is_killed_costs_no_sample_behind_tls(tls: Cluster) -> None:
    """The map of slots names the ports of TLS, and each new connection needs the certificate again."""
    url = tls.url  # a killed node could not be asked for its port

    def kill(writer: penstock.Writer, number: int, read: Callable[[], None]) -> None:
        if number == 2:
            read()
            tls.lose_master_of(writer.stream.partitions[2].roster, "kill")

    assert sorted(written_and_read(url, kill)) == ALL
    canonical = penstock.Loader("train", group="ranks", batch_size=64, url=url, order=penstock.Canonical())
    with canonical as loader:
        assert [number for batch in loader for number in numbers_of(batch)] == ALL
    assert_clean(url, "train")


# --- users ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=find_servers(), ids=server_label)
def lasting(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version found, whose nodes have the page's users, with the rules for a cluster."""
    with started_cluster(request.param) as cluster:
        for node in cluster.masters:
            with redis.Redis.from_url(node.url) as client:
                is_old = node.version.startswith("6.")
                for user, *rules in lines_for(client):
                    more = ["+cluster"] if is_old else ["+cluster|slots"]
                    more += ["+cluster|nodes"] if user == "monitor" and not is_old else []
                    client.execute_command("ACL", "SETUSER", user, *rules, *(more if user != "queue" else []))
        yield cluster


@pytest.fixture
def cluster(lasting: Cluster) -> Cluster:
    """Return the module's cluster, without keys and refusals."""
    lasting.empty()
    for node in lasting.masters:
        lasting.asked(node, "ACL", "LOG", "RESET")
    return lasting


def url_of(cluster: Cluster, user: str) -> str:
    """The address of all masters for a user of the page."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in cluster.masters)
    return f"redis://{user}:{user}-password@{hosts}"


def refused(cluster: Cluster) -> list[str]:
    """Return what the nodes refused to the page's users."""
    found = set()
    for node in cluster.masters:
        with redis.Redis.from_url(node.url) as client:
            found |= {f"{one['username']}: {one['object']}" for one in client.acl_log() if one["object"] not in IGNORED}
    return sorted(found)


def test_the_users_of_the_page_do_their_work_on_a_cluster(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user that may not ask for the map of slots would find one node only."""
    producer, trainer, monitor = (url_of(cluster, user) for user in ("producer", "trainer", "monitor"))
    written(producer, "train")
    require_every_way(trainer)
    assert refused(cluster) == []
    monkeypatch.setenv("PENSTOCK_URL", monitor)
    for words in ("inspect", "monitor train --once", "partitions train", "audit train", "groups list train"):
        assert main(words.split()) == 0, (words, capsys.readouterr())
        assert refused(cluster) == [], words
    monkeypatch.setenv("PENSTOCK_URL", producer)
    for words in ("trim train", "groups drop train shared", "delete train --yes"):
        assert main(words.split()) == 0, (words, capsys.readouterr())
        assert refused(cluster) == [], words


SMALL = penstock.Tuning(block_bytes=80_000, notify=lambda _: None)
FEW = penstock.Tuning(lease_s=1.0, prefetch_bytes=160_000, notify=lambda _: None)
Then = Callable[[penstock.Writer], None]


def write_to_the_end(url: str, then: Then = lambda _: None) -> None:
    """Write the epoch from where it is, and call ``then`` in the middle of shard 1."""
    with penstock.Writer("train", url=url, spec=SPEC, partitions=3, tuning=SMALL) as writer:
        epoch = writer.epoch(0, sizes=[EACH] * SHARDS)
        for number in range(SHARDS):
            shard = epoch.shard(number)
            for offset in range(shard.position, EACH):
                if (number, offset) == (1, EACH // 2):
                    then(writer)
                shard.write(sample(number * EACH + offset))
            shard.close()


def read_to_the_end(cluster: Cluster, seen: list[int], then: Then = lambda _: None) -> None:
    """Read what the group has not trained on, and call ``then`` once it has a few batches."""
    with (
        penstock.Writer("train", url=cluster.url, tuning=SMALL) as writer,
        penstock.Loader("train", group="g", batch_size=10, url=url_of(cluster, "trainer"), tuning=FEW) as loader,
    ):
        for batch in loader:
            seen += numbers_of(batch)
            if len(seen) == 60:
                then(writer)


@pytest.mark.parametrize(("user", "right"), [("producer", "hincrby"), ("trainer", "xreadgroup")])
def test_a_right_that_one_node_takes_away_is_named_and_costs_no_sample(cluster: Cluster, user: str, right: str) -> None:
    """Each node has users of its own, so an operator can take a right away on one of them only."""
    taken: list[float] = []
    seen: list[int] = []

    def take(writer: penstock.Writer) -> None:
        taken.append(time.monotonic())
        cluster.asked(cluster.master_of(writer.stream.partitions[1].roster), "ACL", "SETUSER", user, f"-{right}")

    with pytest.raises(Unauthorized, match=rf"ACL SETUSER {user} \+{right}"):
        if user == "producer":
            write_to_the_end(url_of(cluster, user), take)
        else:
            write_to_the_end(url_of(cluster, "producer"))
            read_to_the_end(cluster, seen, take)
    assert time.monotonic() - taken[0] < TELLS_S
    for node in cluster.masters:
        cluster.asked(node, "ACL", "SETUSER", user, f"+{right}")
    write_to_the_end(url_of(cluster, "producer"))
    read_to_the_end(cluster, seen)
    assert sorted(set(seen)) == ALL
    assert_clean(cluster.url, "train")
