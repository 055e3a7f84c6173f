"""Streams on a real cluster of three masters: every way of reading and every command, and a master that dies."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.errors import DurabilityLost, PenstockError, ServerUnavailable, ServerUnsuitable
from penstock_common.server.channel import REPLY_TIMEOUT_S
from penstock_common.server.primary_watcher import LOOK_S, Address
from penstock_common.server.topology import SlotMap
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.durability import Durability, make_safe
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.stream.streams import load_stream
from penstock_producer.write.writer import WriterHooks
from tests.clusters import PASSWORD, Cluster, Promotion, started_cluster
from tests.front.gateway.clients import gateway_for
from tests.front.test_every_command import LEAVES

SPEC = {"x": ("int64", (1000,))}
SHARDS, EACH = 6, 100
ALL = list(range(SHARDS * EACH))
AGAIN_S = 1.5
"""The time from a failover until a writer goes on: a look at the map, and a connection."""
LOAD_S = 1.5
"""The time that a loaded machine may add."""


def sample(number: int) -> dict[str, Any]:
    """A sample that shows whose payload it is, also if its first value arrived alone."""
    return {"x": np.arange(number, number + 1000)}


def numbers_of(batch: penstock.Batch) -> list[int]:
    """Return the numbers of a batch's samples, whose payloads must be whole."""
    rows = batch["x"]
    assert (rows == rows[:, :1] + np.arange(1000)).all()
    return [int(number) for number in rows[:, 0]]


def written(url: str, name: str, partitions: int = 3, payload: str | None = None) -> None:
    """Write an epoch of several shards, which are spread over all partitions."""
    with (
        penstock.Writer(name, url=url, spec=SPEC, partitions=partitions, payload=payload) as writer,
        writer.epoch(sizes=[EACH] * SHARDS) as epoch,
    ):
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                for offset in range(EACH):
                    shard.write(sample(number * EACH + offset))


def assert_clean(url: str, name: str) -> None:
    """Fail unless the audit, with payloads, finds nothing."""
    with connect(url) as client:
        assert audit_stream(client, name).findings == []


def written_and_read(url: str, then: Callable[[penstock.Writer, int, Callable[[], None]], None]) -> Counter[int]:
    """Write an epoch while a group reads it, and return how often each sample came.

    In the middle of each shard ``then`` gets the writer, the shard's number, and a function that reads a batch.
    """
    seen: Counter[int] = Counter()
    with (
        penstock.Writer("train", url=url, spec=SPEC, partitions=3) as writer,
        writer.epoch(sizes=[EACH] * SHARDS) as epoch,
        penstock.Loader("train", group="g", batch_size=50, url=url) as loader,
    ):
        batches = iter(loader)
        for number in range(SHARDS):
            with epoch.shard(number) as shard:
                for offset in range(EACH):
                    shard.write(sample(number * EACH + offset))
                    if offset == EACH // 2:
                        then(writer, number, lambda: seen.update(numbers_of(next(batches))))
        for batch in batches:
            seen.update(numbers_of(batch))
    return seen


def require_every_way(url: str) -> None:
    """Require that a group, a rank in canonical order and a replay each get every sample once."""
    with penstock.Loader("train", group="shared", batch_size=64, url=url) as loader:
        assert sorted(number for batch in loader for number in numbers_of(batch)) == ALL
    canonical = penstock.Loader("train", group="ranks", batch_size=64, url=url, order=penstock.Canonical())
    with canonical as loader:
        assert [number for batch in loader for number in numbers_of(batch)] == ALL
    with penstock.Replay("train", url=url, epoch=0, batch_size=64) as replay:
        assert [number for batch in replay for number in numbers_of(batch)] == ALL


@pytest.fixture(scope="module", params=find_servers(), ids=server_label)
def lasting(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version found."""
    with started_cluster(request.param) as cluster:
        yield cluster


@pytest.fixture
def cluster(lasting: Cluster) -> Cluster:
    """Return the module's cluster, without keys."""
    lasting.empty()
    return lasting


class Told:
    """Runs commands on the cluster, and knows which."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.commands: set[str] = set()

    def __call__(self, *words: str, code: int = 0) -> str:
        """Run a command, and return its output."""
        self._capsys.readouterr()
        found = main(list(words))
        text = self._capsys.readouterr()
        assert found == code, (words, text)
        self.commands |= {f"penstock {words[0]}", f"penstock {' '.join(words[:2])}"}
        return text.out


@pytest.fixture
def told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return what runs commands on the cluster."""
    monkeypatch.setenv("PENSTOCK_URL", cluster.url)
    return Told(capsys)


def test_a_command_without_a_key_lists_no_masters(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looked at each of 16,384 slots, which took longer than the command. Other threads may list them."""
    listing, masters = list[int](), SlotMap.masters

    def listed(slots: SlotMap) -> list[Address]:
        listing.append(threading.get_ident())
        return masters(slots)

    with connect(cluster.url) as client:
        client.ping()
        monkeypatch.setattr(SlotMap, "masters", listed)
        assert client.ping()
        assert client.node_of(None).where in client.holders()
    assert listing.count(threading.get_ident()) == 1  # holders() lists them


# --- one epoch, read in every way -------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_every_way_of_reading_gives_every_sample_once(cluster: Cluster, partitions: int) -> None:
    """The keys of partitions are on several servers, and one script may use the keys of one slot only."""
    written(cluster.url, "train", partitions)
    require_every_way(cluster.url)
    assert_clean(cluster.url, "train")


def test_payloads_may_lie_in_segments(cluster: Cluster, memory_path: Path) -> None:
    """Then a master holds headers only."""
    written(cluster.url, "train", payload=f"segments:{memory_path}")
    with penstock.Loader("train", group="g", batch_size=50, url=cluster.url) as loader:
        assert sorted(number for batch in loader for number in numbers_of(batch)) == ALL
    assert_clean(cluster.url, "train")


def test_partitions_lie_on_every_master(cluster: Cluster) -> None:
    """A stream on one master would have the memory and the speed of one."""
    written(cluster.url, "train", 3)
    with connect(cluster.url) as client:
        stream = load_stream(client, "train")
    assert len({cluster.master_of(partition.roster).port for partition in stream.partitions}) == 3


def test_two_streams_are_mixed_though_they_lie_apart(cluster: Cluster) -> None:
    """Each stream's own keys are in a separate slot."""
    for name in ("a", "b"):
        written(cluster.url, name)
    with (
        penstock.Loader("a", group="g", batch_size=50, url=cluster.url) as a,
        penstock.Loader("b", group="g", batch_size=50, url=cluster.url) as b,
    ):
        mixed = penstock.mix({"a": (a, 0.5), "b": (b, 0.5)}, seed=1)
        assert Counter(number for batch in mixed for number in numbers_of(batch)) == dict.fromkeys(ALL, 2)


def test_a_reader_that_stops_goes_on_where_it_was(cluster: Cluster) -> None:
    """Each partition stores the reader's position in it."""
    written(cluster.url, "train")
    seen: list[int] = []
    with penstock.Loader("train", group="g", batch_size=50, url=cluster.url) as loader:
        for batch in loader:
            seen += numbers_of(batch)
            if len(seen) >= 200:
                break
    with penstock.Loader("train", group="g", batch_size=50, url=cluster.url) as loader:
        seen += [number for batch in loader for number in numbers_of(batch)]
    assert sorted(set(seen)) == ALL
    assert len(seen) <= len(ALL) + 50, "only the batch that the loop did not finish comes again"


def test_workers_fill_a_stream_from_a_queue_on_one_server(
    cluster: Cluster, any_server: EmbeddedServer, tmp_path: Path
) -> None:
    """A cluster takes no queue of rq, so the queue has a server of its own."""
    (tmp_path / "rows.py").write_text("data = range(600)\n")
    command = [sys.executable, "-m", "penstock", "produce", "dataset", "rows:data", "--workers", "2"]

    here = {**os.environ, "PENSTOCK_URL": cluster.url, "PENSTOCK_QUEUE_URL": any_server.url}
    done = subprocess.run(command, check=False, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    with penstock.Loader("train", group="g", batch_size=50, url=cluster.url) as loader:
        assert sorted(int(x) for batch in loader for x in batch["x"]) == list(range(600))
    here.pop("PENSTOCK_QUEUE_URL")
    refused = subprocess.run(command, check=False, cwd=tmp_path, env=here, capture_output=True, text=True, timeout=100)
    assert refused.returncode == 1
    assert "set PENSTOCK_QUEUE_URL" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr


ROWS = """\
import numpy as np


class Rows:
    def __len__(self):
        return 300

    def __getitem__(self, index):
        return {"x": np.arange(index, index + 1000)}


train = Rows()
"""
ELSEWHERE = {
    "penstock completion": "asks no server",
    "penstock demo": "starts a server of its own",
    "penstock run dataset": "starts a server of its own",
    "penstock server": "starts a server of its own",
    "penstock bench dataset": "starts a server of its own",
    "penstock exporter": "test_looking_at_masters.py",
    "penstock gateway": "runs until it is ended, below",
    "penstock health worker": "is about the server of jobs",
    "penstock worker": "test_workers_fill_a_stream_from_a_queue_on_one_server",
}


def test_every_command_answers(
    told: Told, cluster: Cluster, tmp_path: Path, any_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that asks one server for all would show a part, or fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PENSTOCK_QUEUE_URL", any_server.url)
    (tmp_path / "rows.py").write_text(ROWS)
    source = ("dataset", "rows:train")
    told("produce", *source, "--epochs", "3", "--workers", "1", "--partitions", "3", "--shard-samples", "100",
         "--stream", "train")  # fmt: skip
    told("groups", "declare", "train", "g")
    told("groups", "reset", "train", "g", "1")
    told("epochs", "pin", "train", "1")
    told("epochs", "retain", "train", "budget")
    with connect(cluster.url) as client:
        there = [p for p in load_stream(client, "train").partitions if client.xlen(p.entries(2))]
        damaged = client.xadd(there[0].entries(1), {"meta": "no header"}).decode()
        client.xdel(there[-1].entries(2), client.xrange(there[-1].entries(2), count=1)[0][0])
    with penstock.Loader("train", group="g", batch_size=50, url=cluster.url) as loader:
        batches = iter(loader)
        seen = numbers_of(next(batches))
        told("health", "trainer", "train", "--group", "g")
        assert sorted(seen + [number for batch in batches for number in numbers_of(batch)]) == list(range(300))
    told("audit", "train", code=1)
    told("audit", "train", "--repair", *source, code=1)  # the forged entry is left
    assert damaged in told("bad", "list", "train")
    told("bad", "show", "train", "1", damaged)
    told("bad", "retry", "train")
    told("bad", "drop", "train", "1", damaged, "--all-groups")
    assert "clean" in told("audit", "train", "--deep")
    with penstock.Replay("train", url=cluster.url, epoch=2, batch_size=64) as replay:
        assert sorted(number for batch in replay for number in numbers_of(batch)) == list(range(300))
    assert json.loads(told("inspect", "--json"))[0]["name"] == "train"
    assert "300" in told("epochs", "list", "train")
    assert "g" in told("groups", "list", "train")
    assert "x" in told("show", "train")
    assert "x" in told("stat", "train")
    assert "train" in told("partitions", "train", "--json")
    ended = r"epoch 2 shard \d \[\d+, 100\)"  # the last entry ends a shard; a slow machine cuts it into several
    assert re.search(ended, told("tail", "train", "-n", "3", "--once"))
    told("monitor", "train", "--once")
    told("doctor", "--no-probe", "--all")
    with gateway_for(cluster.url) as gateway, closing((reader := gateway.client()).socket):
        assert reader.batch() is not None
    told("export", "train", "kept", "--epoch", "0")
    told("import", "kept", "again")
    with penstock.Replay("again", url=cluster.url, epoch=0, batch_size=64) as replay:
        assert sorted(number for batch in replay for number in numbers_of(batch)) == list(range(300))
    for number, end in ((3, "close"), (4, "abandon")):
        with penstock.Writer("train", url=cluster.url) as writer:
            writer.epoch(number).write(sample(0))
        told("epochs", end, "train", str(number))
    told("groups", "drop", "train", "g")
    told("epochs", "unpin", "train", "1")
    told("trim", "train", "--keep", "1")
    told("delete", "train", "--yes")
    told("delete", "again", "--yes")
    assert sum(cluster.asked(node, "DBSIZE") for node in cluster.masters) == 0
    kinds = {name for name in LEAVES if name.split()[1] in ("produce", "run", "bench") and name.split()[2] != "dataset"}
    assert {*LEAVES} - told.commands - kinds == {*ELSEWHERE}


# --- addresses --------------------------------------------------------------------------------------------------------


def test_one_node_is_address_enough(cluster: Cluster) -> None:
    """The map of slots comes from any node."""
    written(cluster.url, "train")
    for node in cluster.masters:
        with penstock.Replay("train", url=node.url, epoch=0, batch_size=64) as replay:
            assert [number for batch in replay for number in numbers_of(batch)] == ALL


def test_a_host_that_is_away_is_passed_over(cluster: Cluster) -> None:
    """A user names several hosts because one of them may be away."""
    away = cluster.url.replace("@", "@127.0.0.1:1,")
    with connect(away) as client:
        assert client.set("k", "v")


@pytest.mark.parametrize("number", ["/3", "/3?"])
def test_a_number_of_a_database_is_refused_with_what_to_write(cluster: Cluster, number: str) -> None:
    """A cluster has database 0 only, and another one was meant."""
    with pytest.raises(ServerUnsuitable, match="has database 0 only: leave out the number"):
        connect(cluster.masters[0].url + number)


def test_several_hosts_are_of_a_cluster(any_server: EmbeddedServer) -> None:
    """On servers that know nothing of each other, a part of the readers would see nothing."""
    url = any_server.url
    several = f"{url},{url.rpartition('@')[2]}"
    with pytest.raises(ServerUnsuitable, match="only a cluster has several hosts"):
        connect(several)


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("place", ["stream", "partition", "both"])
def test_a_master_that_is_lost_in_the_middle_of_an_epoch_costs_no_sample(place: str, fault: str) -> None:
    """Its replica has everything that was written before, and the rest is written to that.

    The masters that are left must be the greater part, or no replica may take over.
    """
    with started_cluster(find_servers()[0], masters=5 if place == "both" else 3, replicas=1) as cluster:
        url = cluster.url
        with (
            penstock.Writer("train", url=url, spec=SPEC, partitions=3) as writer,
            writer.epoch(sizes=[EACH] * SHARDS) as epoch,
            penstock.Loader("train", group="g", batch_size=50, url=url) as loader,
        ):
            seen: Counter[int] = Counter()
            batches, began, back_s = iter(loader), 0.0, 0.0
            for number in range(SHARDS):
                with epoch.shard(number) as shard:
                    for offset in range(EACH):
                        shard.write(sample(number * EACH + offset))
                        if (number, offset) == (2, 50):
                            seen.update(numbers_of(next(batches)))
                            stream = writer.stream
                            keys = {"stream": [stream.keys.meta], "partition": [stream.partition_of(number).roster]}
                            lost = keys.get(place) or [*keys["stream"], *keys["partition"]]
                            assert len({cluster.master_of(key) for key in lost}) == len(lost)
                            promotions = [Promotion(cluster, key) for key in lost]
                            began = time.monotonic()
                            cluster.lose_master_of(lost[0], fault, *lost[1:])
                if number == 2:
                    back_s = time.monotonic()
            for batch in batches:
                seen.update(numbers_of(batch))
            assert back_s < max(promotion.at_s for promotion in promotions) + AGAIN_S + LOAD_S
            assert time.monotonic() - began < 20, "a silent server is waited for until another has its slots, no longer"
        assert sorted(seen) == ALL
        assert_clean(url, "train")


def test_a_connection_that_was_made_late_to_a_former_master_is_ended() -> None:
    """A thread may choose a master a moment before another one has its slots, and connect a moment after."""
    with started_cluster(find_servers()[0], replicas=1) as cluster:
        client = connect(cluster.url)
        node = client.node_of("key")
        cluster.lose_master_of("key", "stop")
        while client.node_of("key").where == node.where:
            time.sleep(0.1)
        time.sleep(2 * LOOK_S)  # its connections have been ended by now
        began = time.monotonic()
        with pytest.raises(ServerUnavailable):
            node.impatient().ping()
        assert time.monotonic() - began < REPLY_TIMEOUT_S / 2
        client.close()


def test_connections_that_are_ended_while_they_are_used_fail_as_lost_ones(cluster: Cluster) -> None:
    """A thread that looks at the map ends connections under the threads that ask, at any moment of a request."""
    with connect(cluster.url) as client:
        node, is_over = client.node_of("key").impatient(), threading.Event()

        def drop() -> None:
            while not is_over.is_set():
                client.node_of("key").drop_connections()

        dropping = threading.Thread(target=drop)
        dropping.start()
        asked = lost = 0
        ends_s = time.monotonic() + 60
        try:
            while (asked < 1500 or not lost) and time.monotonic() < ends_s:
                asked += 1
                try:
                    node.ping()
                except ServerUnavailable:
                    lost += 1
        finally:
            is_over.set()
            dropping.join()
        assert lost
        assert node.ping()


def test_a_write_is_as_safe_as_its_own_master_says() -> None:
    """A replica of the stream's master knows nothing of a block that another master took, nor does a connection that
    has written nothing.
    """
    with started_cluster(find_servers()[0], replicas=1) as cluster:
        tuning = penstock.Tuning(durability="replicas=1")
        with penstock.Writer("train", url=cluster.url, spec=SPEC, partitions=3, tuning=tuning) as writer:
            epoch = writer.epoch(sizes=[EACH] * SHARDS)
            away = next(
                number
                for number, partition in enumerate(writer.stream.partitions)
                if cluster.master_of(partition.roster) is not cluster.master_of(writer.stream.keys.meta)
            )
            master = cluster.master_of(writer.stream.partitions[away].roster)
            replica = cluster.replicas[cluster.masters.index(master)]
            shard = epoch.shard(away)
            shard.write(sample(0))
            shard.flush()
            level = Durability.parse("replicas=1")
            with connect(cluster.url) as client:
                make_safe(client, writer.stream, level, print)
                os.kill(replica.pid, signal.SIGSTOP)
                try:
                    with pytest.raises(DurabilityLost, match="0 of 1 replicas"):
                        make_safe(client, writer.stream, level, print, should_stop=lambda: True)
                    WriterHooks(writer).stop_when(lambda: True)
                    with (
                        pytest.raises(DurabilityLost, match=r"'replicas=1': (0 of 1 replicas|the connection broke)"),
                        epoch.shard(away) as shard,
                    ):
                        shard.write(sample(1))
                        cluster.asked(master, "CLIENT", "KILL", "TYPE", "normal")
                finally:
                    os.kill(replica.pid, signal.SIGCONT)


def test_slots_that_move_under_load_cost_no_sample(cluster: Cluster) -> None:
    """An operator adds a master while trainings run."""

    def move(writer: penstock.Writer, number: int, read: Callable[[], None]) -> None:
        keys = [writer.stream.keys.meta, *(p.roster for p in writer.stream.partitions)]
        cluster.move_slot_of(keys[number % len(keys)])
        if number:  # there is something to read
            read()

    assert written_and_read(cluster.url, move) == dict.fromkeys(ALL, 1)
    assert_clean(cluster.url, "train")


def test_a_cluster_that_is_gone_ends_a_loader_in_words() -> None:
    """A raw error of redis-py would name a node that the user did not write."""
    with started_cluster(find_servers()[0]) as cluster:
        written(cluster.url, "train")
        url = cluster.url
    with pytest.raises(ServerUnavailable) as caught:
        penstock.Loader("train", group="g", batch_size=50, url=url)
    assert PASSWORD not in str(caught.value)
    assert isinstance(caught.value, PenstockError)
