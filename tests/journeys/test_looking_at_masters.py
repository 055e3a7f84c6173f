"""Looking at a cluster: each server with memory, replicas and partitions, and since when one is away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import penstock
from penstock.__main__ import main
from penstock.cli.exporter import look
from penstock.views.doctor_nodes import check_nodes
from penstock.views.exporter import StreamMetrics
from penstock_common.errors import ServerUnavailable
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.explain.servers import PartitionsAway, ServerLooks
from penstock_common.server.channel import Command, Reply
from penstock_common.server.connection import open_channels
from penstock_common.server.nodes import look_at_nodes
from penstock_common.server.slots import slot_of
from penstock_common.stream.client import connect
from penstock_common.stream.directory import StreamLister
from penstock_common.stream.entries import raise_errors
from penstock_common.stream.groups.roster import note_wait
from penstock_common.stream.keys import STREAM_NAMES, StreamKeys
from penstock_common.stream.servers.embedded import find_servers, server_label
from penstock_common.stream.streams import load_stream
from tests.clusters import PASSWORD, Cluster, started_cluster, until

MAXMEMORY = 200 << 20


@pytest.fixture(scope="module", params=find_servers(), ids=server_label)
def lasting(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version found, with replicas."""
    with started_cluster(request.param, replicas=1, settings={"maxmemory": str(MAXMEMORY)}) as started:
        yield started


def written(url: str) -> None:
    """Write a stream of six partitions."""
    with penstock.Writer("train", url=url, partitions=6) as writer, writer.epoch() as epoch:
        for number in range(30):
            epoch.write({"x": np.full(1000, number, np.uint8)})


def test_every_server_is_shown_with_its_partitions_memory_and_replicas(
    lasting: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fullest master and the slowest replica limit a cluster, not their sum."""
    written(lasting.url)
    capsys.readouterr()
    assert main(["inspect", "train", "--json", "--url", lasting.url]) == 0
    servers = json.loads(capsys.readouterr().out)["servers"]
    assert sorted(number for one in servers for number in one["partitions"]) == list(range(6))
    assert [len(one["partitions"]) for one in servers] == [2, 2, 2]
    for one, master in zip(servers, lasting.masters, strict=True):
        assert one["server"] == f"redis://127.0.0.1:{master.port}"
        assert (one["role"], one["limit_bytes"], one["away"]) == ("master", MAXMEMORY, "")
        assert 0 < one["used_bytes"] < one["usable_bytes"] < MAXMEMORY
        (replica,) = one["replicas"]
        assert replica["is_online"]
        assert 0 <= replica["lag_bytes"] < 1 << 20
    for words in (["inspect", "train"], ["monitor", "train", "--once", "--every", "0.1"]):
        assert main([*words, "--url", lasting.url]) == 0
        told = capsys.readouterr().out
        assert all(f"redis://127.0.0.1:{master.port}" in told for master in lasting.masters)
        assert "replica lag" in told


def test_the_exporter_has_a_series_for_each_server(lasting: Cluster) -> None:
    """An alert on the mean of all masters comes too late."""
    written(lasting.url)
    streams, registry = StreamMetrics(), CollectorRegistry()
    with connect(lasting.url) as client:
        look(client, StreamLister(client).names, {}, ServerLooks(client), streams)
    registry.register(streams)
    text = generate_latest(registry).decode()
    found = {
        (one.name, *sorted(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }
    for master in lasting.masters:
        node = ("node", f"redis://127.0.0.1:{master.port}")
        assert found["penstock_node_up", node] == 1
        assert found["penstock_node_limit_bytes", node] == MAXMEMORY
        assert 0 < found["penstock_node_used_bytes", node] < MAXMEMORY
        assert found["penstock_node_replicas", node] == 1
        assert found["penstock_node_replica_lag_bytes", node] >= 0
        assert found["penstock_stream_partitions", node, ("stream", "train")] == 2


def test_a_half_moved_slot_is_seen_on_both_sides(lasting: Cluster) -> None:
    """A tool that dies leaves such a slot. Every request for its keys fails until an operator finishes the move."""
    first, second = lasting.masters[:2]
    ids = [lasting.asked(node, "CLUSTER", "MYID").decode() for node in (first, second)]
    lasting.asked(second, "CLUSTER", "SETSLOT", 7, "IMPORTING", ids[0])
    lasting.asked(first, "CLUSTER", "SETSLOT", 7, "MIGRATING", ids[1])
    try:
        with connect(lasting.url) as client:
            states = look_at_nodes(client)
    finally:
        for node in (first, second):
            lasting.asked(node, "CLUSTER", "SETSLOT", 7, "STABLE")
    found = [[(half.slot, half.is_leaving, half.other) for half in state.half_moved] for state in states]
    assert found == [[(7, True, ids[1])], [(7, False, ids[0])], []]
    assert all(abs(state.clock_ahead_s) < 1 + state.round_trip_s for state in states)


def examined(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """Return what the doctor says, as ``what/check`` -> finding."""
    capsys.readouterr()
    main(["doctor", "--no-probe", "--json", "--url", url])
    found = json.loads(capsys.readouterr().out)["findings"]
    return {f"{one['of'].removeprefix('server redis://127.0.0.1:')}/{one['check']}": one for one in found}


def test_the_doctor_examines_every_master_and_every_replica(
    lasting: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A replica that evicts, or has less memory, is found by a failover otherwise."""
    written(lasting.url)
    master, other = lasting.masters[:2]
    replica = next(
        node for node in lasting.replicas
        if lasting.asked(node, "INFO", "replication")["master_port"] == master.port
    )  # fmt: skip
    well = examined(lasting.url, capsys)
    checks = ("eviction", "coverage", "clocks", "node timeout", "memory", "replication", "replicas", "moving slots")
    assert {one["check"] for one in well.values()}.issuperset(checks)
    assert {key: one for key, one in well.items() if one["check"] in checks and one["severity"] != "ok"} == {}
    for node in lasting.masters:
        assert well[f"{node.port}/replicas"]["found"].startswith("1, the last one")
        assert well[f"{node.port}/version"]["severity"] == "ok"
    ids = [lasting.asked(node, "CLUSTER", "MYID").decode() for node in (master, other)]
    changed = {
        master: {"cluster-require-full-coverage": ("yes", "no"), "cluster-node-timeout": ("20000", "1000")},
        replica: {"maxmemory-policy": ("allkeys-lru", "noeviction"), "maxmemory": ("1000mb", str(MAXMEMORY))},
        other: {"maxmemory": (str(800 << 20), str(MAXMEMORY))},
    }
    for node, settings in changed.items():
        for name, (value, _) in settings.items():
            lasting.asked(node, "CONFIG", "SET", name, value)
    lasting.asked(other, "CLUSTER", "SETSLOT", 7, "IMPORTING", ids[0])
    lasting.asked(master, "CLUSTER", "SETSLOT", 7, "MIGRATING", ids[1])
    try:
        found = examined(lasting.url, capsys)
    finally:
        for node in (master, other):
            lasting.asked(node, "CLUSTER", "SETSLOT", 7, "STABLE")
        for node, settings in changed.items():
            for name, (_, value) in settings.items():
                lasting.asked(node, "CONFIG", "SET", name, value)
    at = f"redis-cli -h 127.0.0.1 -p {master.port} CONFIG SET cluster-"
    assert found[f"{master.port}/coverage"]["fix"] == f"{at}require-full-coverage no"
    assert found[f"{master.port}/node timeout"]["fix"] == f"{at}node-timeout 5000"
    assert "slot 7 to 127.0.0.1" in found[f"{master.port}/moving slots"]["found"]
    assert found[f"{other.port}/moving slots"]["fix"] == f"redis-cli --cluster fix 127.0.0.1:{other.port}"
    assert found[f"{replica.port}/eviction"]["severity"] == "error"
    others = next(
        node for node in lasting.replicas
        if lasting.asked(node, "INFO", "replication")["master_port"] == other.port
    )  # fmt: skip
    assert found[f"{others.port}/memory"]["fix"].endswith(f"CONFIG SET maxmemory {800 << 20}")


def test_a_stream_whose_slot_is_half_moved_hides_no_other_finding(
    lasting: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The doctor printed one line about the slot, and nothing about all else."""
    written(lasting.url)
    with penstock.Writer("other", url=lasting.url, partitions=1) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(8, np.uint8)})
    key = StreamKeys("train").meta
    finish = lasting.half_move_slot_of(key, keys_at_most=0)
    try:
        found = examined(lasting.url, capsys)
    finally:
        finish()
    slot = slot_of(key)
    assert any(f"half moved: slot {slot} to" in one["found"] for one in found.values())
    assert f"slot {slot} moves from" in found["stream train/reachable"]["found"]
    assert found["stream other/durability"]["severity"] == "ok"
    for node in lasting.masters:
        assert {f"{node.port}/{check}" for check in ("memory", "version", "replicas")} <= found.keys()


def test_a_slot_that_moves_is_said_of_the_node_that_has_it(lasting: Cluster) -> None:
    """The messages named the first node of the address, which was a replica after a failover."""
    there, missing = b"{moving}:there", b"{moving}:missing"
    old = lasting.master_of(there.decode())
    lasting.asked(old, "SET", there, 1)
    url = f"redis://:{PASSWORD}@127.0.0.1:{lasting.replicas[0].port},127.0.0.1:{old.port}"
    commands: list[Command] = [(b"GET", missing), (b"EVAL", b"return 1", b"2", there, missing)]
    with connect(url) as client:
        assert str(lasting.replicas[0].port) in client.where
        channel = open_channels(client)
        channel.send([(b"GET", there)])
        assert channel.read() == b"1"
        finish = lasting.half_move_slot_of(there.decode(), keys_at_most=0)
        try:
            channel.send(commands)
            replies = channel.read_all(2)
            cases: tuple[tuple[Reply, tuple[bytes, ...]], ...]
            cases = ((replies[0], ()), (replies[0], (missing,)), (replies[1], (there,)))
            for reply, keys in cases:
                with pytest.raises(ServerUnavailable) as caught:
                    raise_errors([reply], client, keys)
                assert f" from redis://127.0.0.1:{old.port} " in str(caught.value)
                assert f"redis-cli --cluster fix 127.0.0.1:{old.port}`" in str(caught.value)
        finally:
            finish()
        channel.close()
    lasting.asked(lasting.master_of(there.decode()), "DEL", there)


def test_the_doctor_asks_for_replicas_that_must_follow(lasting: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A master that is cut off takes writes that its successor lacks. A failover must not lose the setting either."""
    master = lasting.masters[0]
    replica = next(
        node for node in lasting.replicas
        if lasting.asked(node, "INFO", "replication")["master_port"] == master.port
    )  # fmt: skip
    found = examined(lasting.url, capsys)
    for node in lasting.masters:
        told = found[f"{node.port}/min replicas"]
        assert told["severity"] == "warning"
        assert "split brain" in told["found"]
        assert told["fix"] == f"redis-cli -h 127.0.0.1 -p {node.port} CONFIG SET min-replicas-to-write 1"
    assert all(found[f"{node.port}/min replicas"]["severity"] == "ok" for node in lasting.replicas)
    lasting.asked(master, "CONFIG", "SET", "min-replicas-to-write", "1")
    try:
        found = examined(lasting.url, capsys)
    finally:
        lasting.asked(master, "CONFIG", "SET", "min-replicas-to-write", "0")
    assert found[f"{master.port}/min replicas"]["severity"] == "ok"
    told = found[f"{replica.port}/min replicas"]
    assert told["severity"] == "warning"
    assert told["fix"] == f"redis-cli -h 127.0.0.1 -p {replica.port} CONFIG SET min-replicas-to-write 1"


def test_the_doctor_compares_the_clocks_of_nodes(lasting: Cluster) -> None:
    """After a failover, times that the old master noted are compared with the new one's clock."""
    with connect(lasting.url) as client:
        states = look_at_nodes(client, is_thorough=True)
    ahead = replace(states[-1], clock_ahead_s=states[-1].clock_ahead_s + 5)
    for nodes, severity in ((states, "ok"), ([*states[:-1], ahead], "warning")):
        (clocks,) = (one for _, one in check_nodes(nodes, []) if one.check == "clocks")
        assert clocks.severity == severity
    assert f"the clock of {ahead.where} is" in clocks.found


def pasted(line: str) -> str:
    """Return what a command prints that an operator pastes who set REDISCLI_AUTH."""
    environment = {**os.environ, "REDISCLI_AUTH": PASSWORD}
    return subprocess.check_output(line, shell=True, env=environment, text=True, timeout=20)


def test_a_backlog_that_fills_a_master_is_named_with_a_line_that_helps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor advised a backlog of 1 GiB for a master of 100 MB, and then blamed 136 bytes of other keys."""
    settings = {"maxmemory": "100mb", "repl-backlog-size": "1gb"}
    with started_cluster(find_servers()[0], replicas=1, settings=settings) as cluster:
        with penstock.Writer("train", url=cluster.url, partitions=3, budget_bytes=90 << 20) as writer:
            with writer.epoch() as epoch:
                for number in range(30):
                    epoch.write({"x": np.full(100_000, number, np.uint8)})
            partitions = writer.stream.partitions
        full = cluster.master_of(partitions[0].roster)
        key = next(f"k{number}" for number in count() if cluster.master_of(f"k{number}") is full)
        for _ in range(80):
            cluster.asked(full, "SET", key, bytes(1 << 20))
        told = examined(cluster.url, capsys)[f"{full.port}/memory"]
        held = r"\d+ MiB of 100 MiB are used, 8\d MiB by what is not payload of streams, "
        assert re.match(f"{held}8\\d MiB of it by the replication backlog and the buffers of replicas:", told["found"])
        assert told["fix"] == f"redis-cli -h 127.0.0.1 -p {full.port} CONFIG SET repl-backlog-size 5mb"

        with connect(cluster.url) as client:
            note_wait(client, partitions[0], 0, 0, waited_s=5, need_bytes=9, held_bytes=9, why="memory", is_next=True)
        monkeypatch.setenv("PENSTOCK_URL", cluster.url)
        capsys.readouterr()
        assert main(["monitor", "train", "--once", "--every", "0.1", "--json"]) == 0
        waits = json.loads(capsys.readouterr().out)[0]["bottleneck"]
        assert re.match(
            rf"the memory of redis://127.0.0.1:{full.port} is full: .* \d+ MiB of 100 MiB are used", waits["text"]
        )
        assert re.search(r" 8\d MiB by the replication backlog and the buffers of replicas, and writers", waits["text"])
        assert pasted(waits["remedy"]) == "OK\n"
        raised = int(cluster.asked(full, "INFO", "memory")["maxmemory"]) >> 20
        assert 100 < raised < 200, "the figures of one master, not of three"

        assert pasted(told["fix"]) == "OK\n"
        until(lambda: int(cluster.asked(full, "INFO", "memory")["used_memory"]) < 30 << 20)
        after = examined(cluster.url, capsys)
        assert after[f"{full.port}/memory"]["severity"] == "ok"
        assert after[f"{full.port}/replication backlog"]["severity"] == "ok"


def require_commands_to_list(
    urls: list[str], shown: str, others: list[str], lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Require that commands tell within 5 s of a stream that lies elsewhere, and of what the server ``lost`` has."""
    commands = (["inspect"], ["monitor", "--once", "--every", "0.1"], ["doctor", "--no-probe", "--all"])
    named = (["monitor", shown, "--once", "--every", "0.1"],)
    for number, words in enumerate((*commands, *named)):
        capsys.readouterr()
        began = time.monotonic()
        assert main([*words, "--url", urls[bool(number)]]) == (0 if words in named else 3 if "doctor" in words else 1)
        assert time.monotonic() - began < 5, words
        told = capsys.readouterr()
        assert shown in told.out, words
        for other in (lost, *others) if words in commands else ():
            assert other in told.out + told.err, words
    streams = StreamMetrics()
    with connect(urls[1]) as client:
        began, lister = time.monotonic(), StreamLister(client)
        look(client, lister.names, {}, ServerLooks(client), streams)
    assert list(lister.unseen) == [f"others at {lost}"]
    assert time.monotonic() - began < 5
    assert (list(streams.snapshots), streams.is_up) == ([shown], True)
    assert [server.where for server in streams.servers if server.failure] == [lost]


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_master_that_is_away_is_named_with_its_partitions_and_not_waited_for(
    fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that waits for one server would say nothing of all others during an outage."""
    with started_cluster(find_servers()[0]) as cluster:
        own = cluster.master_of(StreamKeys("train").meta)
        lost = cluster.master_of(STREAM_NAMES)
        assert lost is not own
        hosts = [f"127.0.0.1:{node.port}" for node in sorted(cluster.masters, key=lambda node: node is lost)]
        url, lost_first = (f"redis://:{PASSWORD}@{','.join(some)}" for some in (hosts, hosts[::-1]))
        names = (f"small{number}" for number in range(1000))
        small = next(name for name in names if cluster.master_of(StreamKeys(name).meta) not in (own, lost))
        written(url)
        with penstock.Writer(small, url=url, partitions=1) as writer, writer.epoch() as epoch:
            epoch.write({"x": np.zeros(8, np.uint8)})
        now = [100.0]
        with connect(url) as client:
            stream = load_stream(client, "train")
            numbers = [p.number for p in stream.partitions if cluster.master_of(p.roster) is lost]
            monitor = StreamMonitor(client, "train", clock=lambda: now[0])
            assert len(monitor.snapshot().servers) == 3
            pid = cluster.asked_pid(lost)
            if fault == "kill":
                lost.kill()
            else:
                os.kill(pid, signal.SIGSTOP)
            try:
                for now[0], said in ((101.0, ""), (104.0, "since 3 s ")):
                    began = time.monotonic()
                    with pytest.raises(PartitionsAway) as caught:
                        monitor.snapshot()
                    assert time.monotonic() - began < 5
                    named = ", ".join(map(str, numbers))
                    assert str(caught.value).startswith(f"{said}partitions {named} of stream 'train' have no master")
                    assert f"127.0.0.1:{lost.port}" in str(caught.value)
                    assert ("it is a node of the cluster: start it again" in str(caught.value)) == (fault == "kill")
                    assert "penstock server" not in str(caught.value), "a new server is no node of the cluster"
                address = f"redis://127.0.0.1:{lost.port}"
                of_train = f"partitions {named} of stream 'train' have no master"
                require_commands_to_list([lost_first, url], small, [of_train], address, capsys)
                if fault == "kill":
                    for words in (["inspect", "train"], ["monitor", "train", "--once", "--every", "0.1"]):
                        assert main([*words, "--url", url]) == 1
                        assert of_train in capsys.readouterr().err
                    told = examined(url, capsys)
                    assert told[f"{lost.port}/reachable"]["severity"] == "error"
                    others = [node for node in cluster.masters if node is not lost]
                    assert all("if the server is lost" in told[f"{node.port}/replicas"]["found"] for node in others)
                    assert all(told[f"{node.port}/version"]["severity"] == "ok" for node in others)
                looks = ServerLooks(client)
                looks.look()
                assert sorted(bool(server.failure) for server in looks.servers()) == [False, False, True]
            finally:
                if fault == "stop":
                    os.kill(pid, signal.SIGCONT)
        if fault == "stop":
            with connect(url) as client:
                again = StreamMonitor(client, "train")
                until(lambda: len(again.snapshot().servers) == 3)
