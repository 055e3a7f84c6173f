"""Which keys may lack their newest writes: those whose server was replaced, and not those that moved as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock_common.server.client import FailoverDetector
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers
from tests.clusters import Cluster, started_cluster, until

KEY, BESIDE = "k", "{k}:beside"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Three masters, each with a replica."""
    with started_cluster(find_servers()[0], replicas=1) as found:
        yield found


def move(cluster: Cluster) -> None:
    """Move the key's slot to another master."""
    old = cluster.master_of(KEY)
    cluster.half_move_slot_of(KEY, next(node for node in cluster.masters if node is not old))()


def take_over(cluster: Cluster) -> None:
    """Let a replica of the key's master take its place, whatever it lacks."""
    replica = cluster.replica_of(cluster.master_of(KEY))
    cluster.asked(replica, "CLUSTER", "FAILOVER", "TAKEOVER")
    nodes: list[EmbeddedServer] = [*cluster.masters, *cluster.replicas]
    until(lambda: all(replica.port in {one[2][1] for one in cluster.asked(node, "CLUSTER", "SLOTS")} for node in nodes))
    place = cluster.masters.index(next(node for node in cluster.masters if cluster.asked(node, "ROLE")[0] == b"slave"))
    cluster.masters[place], cluster.replicas[cluster.replicas.index(replica)] = replica, cluster.masters[place]


def compared(client: Client, detector: FailoverDetector) -> list[int]:
    """Return the numbers of the keys that may lack writes."""
    client.look_around()
    found: list[int] = []
    detector.check([KEY, BESIDE], found.extend)
    return found


@pytest.mark.parametrize(
    ("steps", "may_lack"),
    [
        ([move], False),
        ([move, move], False),
        ([take_over], True),
        ([move, take_over], True),
        ([take_over, move], True),
    ],
    ids=lambda value: "-".join(step.__name__ for step in value) if isinstance(value, list) else "",
)
def test_a_key_that_moved_lacks_nothing_unless_a_replica_took_over(
    cluster: Cluster, steps: list[Callable[[Cluster], None]], may_lack: bool
) -> None:
    """A trainer that doubts what a server has waits for seconds, and one that does not may train twice."""
    with connect(cluster.url) as client:
        client.set(KEY, 1)
        detector = FailoverDetector(client.impatient())
        assert compared(client, detector) == []
        for step in steps:
            step(cluster)
        assert compared(client, detector) == ([0, 1] if may_lack else [])
        assert compared(client, detector) == []
