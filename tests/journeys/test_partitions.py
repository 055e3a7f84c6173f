"""`penstock partitions`: where partitions lie, and printed commands that even them out on a real cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock.views.partitions import PlacedPartition, view_partitions
from penstock_common.server.nodes import NodeState
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label
from penstock_common.stream.streams import load_stream
from tests.clusters import PASSWORD, Cluster, started_cluster, until

SHARDS, EACH = 6, 60


@pytest.fixture(scope="module", params=find_servers(), ids=server_label)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster of each version found."""
    with started_cluster(request.param) as started:
        yield started


def looked_at(url: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON of the command."""
    capsys.readouterr()
    assert main(["partitions", "train", "--url", url, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def carried_out(commands: list[str]) -> None:
    """Run the printed commands as an operator does."""
    assert shutil.which("redis-cli"), "no redis-cli on PATH"
    here = {**os.environ, "REDISCLI_AUTH": PASSWORD}
    for command in commands:
        done = subprocess.run(
            ["sh", "-c", command], env=here, capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
        assert done.returncode == 0, (command, done)
        assert "ERR" not in done.stdout, (command, done)


def test_the_printed_commands_even_out_a_stream_that_is_written_and_read(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new master changes which server has which partition, and a correction must not stop a training."""
    url = cluster.url
    with penstock.Writer("train", url=url, spec={"x": ("int64", (500,))}, partitions=6) as writer:
        keys = [writer.stream.partitions[number].roster for number in (1, 4, 2, 5)]
        while len({cluster.master_of(key).port for key in keys}) > 1:  # by the next master in turn
            alone = next(key for key in keys if cluster.master_of(key) is not cluster.master_of(keys[0]))
            cluster.move_slot_of(alone)
        seen: Counter[int] = Counter()

        def read() -> None:
            with penstock.Loader("train", group="g", batch_size=20, url=url) as loader:
                for batch in loader:
                    seen.update(int(row[0]) for row in batch["x"])

        with writer.epoch(sizes=[EACH] * SHARDS) as epoch:
            reader = threading.Thread(target=read)
            for number in range(SHARDS):
                with epoch.shard(number) as shard:
                    for offset in range(EACH):
                        shard.write({"x": np.full(500, number * EACH + offset)})
                if number == 1:
                    reader.start()
                    before = looked_at(url, capsys)
                    carried_out(before["commands"])
        reader.join(60)
    assert max(one["partitions"] for one in before["servers"]) >= 4
    assert before["moves"]
    until(lambda: {one["partitions"] for one in looked_at(url, capsys)["servers"]} == {2})
    after = looked_at(url, capsys)
    assert after["commands"] == []
    assert [one["partition"] for one in after["partitions"]] == list(range(6))
    assert sum(one["bytes"] for one in after["servers"]) == SHARDS * EACH * 4000
    with connect(url) as client:
        ports = {p.roster: cluster.master_of(p.roster).port for p in load_stream(client, "train").partitions}
        assert Counter(ports.values()) == dict.fromkeys((node.port for node in cluster.masters), 2)
        assert audit_stream(client, "train").findings == []
    assert seen == dict.fromkeys(range(SHARDS * EACH), 1)


def test_one_server_has_all_partitions_and_no_command(
    any_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Most users have one."""
    with penstock.Writer("train", url=any_server.url, partitions=3) as writer, writer.epoch() as epoch:
        epoch.write({"x": np.zeros(1000, np.uint8)})
    found = looked_at(any_server.url, capsys)
    assert [(one["partitions"], one["bytes"]) for one in found["servers"]] == [(3, 1000)]
    assert (found["moves"], found["commands"]) == ([], [])
    assert main(["partitions", "train", "--url", any_server.url]) == 0
    assert "1000 bytes" in (told := capsys.readouterr().out)
    assert "redis-cli" not in told


NODES = {
    "valkey": {"valkey_version": "9.1.2", "redis_version": "7.2.4"},
    "redis": {"redis_version": "8.4.0"},
    "older": {"redis_version": "8.2.1"},
}


@pytest.mark.parametrize(
    ("kind", "commands"),
    [
        ("valkey", ["redis-cli -h h0 -p 70 --tls CLUSTER MIGRATESLOTS SLOTSRANGE 8 8 9 9 NODE id1"]),
        ("redis", ["redis-cli -h h1 -p 71 --tls CLUSTER MIGRATION IMPORT 8 8 9 9"]),
        (
            "older",
            [
                "redis-cli -h h1 -p 71 --tls CLUSTER SETSLOT 8 IMPORTING id0",
                "redis-cli -h h0 -p 70 --tls CLUSTER SETSLOT 8 MIGRATING id1",
                "redis-cli --tls --cluster fix h0:70",
            ],
        ),
    ],
)
def test_the_commands_are_those_of_the_servers_version(kind: str, commands: list[str]) -> None:
    """An old server knows no atomic move, and a new one needs no key-by-key one, whose large keys are left."""
    nodes = [NodeState(f"w{at}", f"h{at}", 70 + at, id=f"id{at}", info=NODES[kind]) for at in range(2)]
    sizes = [10, 20, 500_000_000, 600_000_000]
    placed = [PlacedPartition(at, 7 + at, "w0", size, size) for at, size in enumerate(sizes)]
    view = view_partitions("train", placed, nodes, " --tls")
    if kind == "older":
        assert view.commands[:3] == tuple(commands)
        assert [move.slot for move in view.plan.moves] == [8, 7]
        assert view.explain_large() == ""
        stuck = view_partitions("train", placed[2:], nodes)
        assert stuck.commands == ()
        assert "not moved: partition 2 (477 MiB), 3 (572 MiB). A key is above 400 MB" in stuck.explain_large()
    else:
        assert view.commands == tuple(commands)


def test_a_user_who_may_not_ask_for_ids_is_told_why_there_are_no_commands() -> None:
    """An empty answer would look like partitions that are even."""
    nodes = [NodeState(f"w{at}", f"h{at}", 70 + at, info=NODES["valkey"]) for at in range(2)]
    view = view_partitions("train", [PlacedPartition(at, 7 + at, "w0", 1, 1) for at in range(2)], nodes)
    assert (len(view.plan.moves), view.commands) == (1, ())
    assert "+cluster|nodes" in view.explain_no_commands()


def test_no_move_is_proposed_while_a_server_is_away() -> None:
    """Without its partitions, a dead master would look like an emptier server."""
    nodes = [
        NodeState("w0", "h0", 70, id="id0", info=NODES["valkey"]), NodeState("w1", "h1", 71, failure="away"),
        NodeState("w2", "h2", 72, id="id2", info=NODES["valkey"]),
    ]  # fmt: skip
    placed = [PlacedPartition(at, 7 + at, "w0", 1, 1) for at in range(4)]
    view = view_partitions("train", placed, nodes)
    assert (view.plan.moves, view.commands) == ((), ())
    assert [one["away"] for one in view.servers()] == ["", "away", ""]
