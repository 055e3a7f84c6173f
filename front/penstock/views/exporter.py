"""The metrics of streams for Prometheus: a table in base units, filled from snapshots. The command serves it.

Labels are few: stream, group, the state of epochs, the host of workers. Members, and epochs by number, would grow
without limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.views.monitor import hosts, silent_hosts, waits
from penstock_common.explain.queues import QueueSnapshot
from penstock_common.explain.snapshot import GroupSnapshot, ServerSnapshot, StreamSnapshot
from penstock_common.extras import needed
from penstock_common.stall_detector import SILENCE_S, STALL_DETECTOR
from penstock_common.stream.groups.roster import WHYS
from penstock_producer.jobs.autoscaler import load_of, shown

with needed("prometheus_client", "penstock exporter"):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector

STATES = ("open", "sized", "produced", "abandoned")

Labels = tuple[str, ...]
Found = Iterable[tuple[Labels, float | None]]
"""Values by the labels after ``stream``. None is left out, because it is not known."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric."""

    name: str
    help: str
    values: Callable[[StreamSnapshot], Found]
    labels: Labels = ()
    is_counter: bool = False


def _one(value: Callable[[StreamSnapshot], float | None]) -> Callable[[StreamSnapshot], Found]:
    return lambda snapshot: [((), value(snapshot))]


def _of_groups(
    name: str, help_text: str, value: Callable[[GroupSnapshot], float], *, is_counter: bool = False
) -> MetricSpec:
    def values(snapshot: StreamSnapshot) -> Found:
        return [((group.name,), value(group)) for group in snapshot.groups]

    return MetricSpec(name, help_text, values, ("group",), is_counter)


def _states(snapshot: StreamSnapshot) -> Found:
    return [((state,), sum(epoch.state == state for epoch in snapshot.epochs)) for state in STATES]


def _hosts(kind: str) -> Callable[[StreamSnapshot], Found]:
    return lambda snapshot: [((one["host"],), one[kind]) for one in hosts(snapshot)]


def _silent_hosts(snapshot: StreamSnapshot) -> Found:
    return [((one["host"],), one["workers"]) for one in silent_hosts(snapshot)]


def _reasons(snapshot: StreamSnapshot) -> Found:
    whys = [waiter.why for waiter in snapshot.waiting.values()]
    return [((why,), whys.count(why)) for why in WHYS]


def _wished(snapshot: StreamSnapshot) -> float | None:
    return shown(load_of(snapshot.rates))


def _wait_ratios(snapshot: StreamSnapshot) -> Found:
    shares: dict[str, list[float]] = {group.name: [] for group in snapshot.groups}
    for (name, _), one in snapshot.rates.trainers.items():
        if name in shares and (part := waits(one)) is not None:
            shares[name].append(part)
    return [((name,), sum(parts) / len(parts) if parts else None) for name, parts in shares.items()]


TABLE = (
    MetricSpec(
        "penstock_stream_budget_bytes", "Payload bytes that the stream may hold.", _one(lambda g: g.budget_bytes)
    ),
    MetricSpec("penstock_stream_held_bytes", "Payload bytes that it holds.", _one(lambda g: g.held_bytes)),
    MetricSpec("penstock_stream_written_entries", "Entries written.", _one(lambda g: g.made_entries), is_counter=True),
    MetricSpec("penstock_stream_written_samples", "Samples written.", _one(lambda g: g.made_samples), is_counter=True),
    MetricSpec(
        "penstock_stream_written_bytes", "Payload bytes written.", _one(lambda g: g.made_bytes), is_counter=True
    ),
    MetricSpec(
        "penstock_stream_bad_samples",
        "Samples of retained epochs that could not be made.",
        _one(lambda g: sum(epoch.bad for epoch in g.epochs)),
    ),
    MetricSpec("penstock_stream_epochs", "Retained epochs by state.", _states, ("state",)),
    MetricSpec("penstock_stream_waiting_writers", "Writers that wait for space.", _reasons, ("why",)),
    MetricSpec(
        "penstock_stream_writer_wait_seconds", "How long the longest of them has waited.", _one(lambda g: g.waited_s)
    ),
    MetricSpec("penstock_workers", "Worker processes that work for the stream.", _hosts("workers"), ("host",)),
    MetricSpec(
        "penstock_silent_workers", "Those of hosts that went silent without signing off.", _silent_hosts, ("host",)
    ),
    MetricSpec("penstock_workers_wished", "Workers that its trainers would keep busy.", _one(_wished)),
    MetricSpec(
        "penstock_worker_busy_ratio", "What part of their time workers make samples.", _hosts("busy"), ("host",)
    ),
    MetricSpec("penstock_worker_room_wait_ratio", "What part of it they wait for space.", _hosts("room"), ("host",)),
    MetricSpec(
        "penstock_stream_partitions", "Partitions of the stream on each server.",
        lambda s: [((server.where,), float(len(server.partitions))) for server in s.servers], ("node",),
    ),
    MetricSpec("penstock_worker_idle_ratio", "What part of it they have no job.", _hosts("idle"), ("host",)),
    _of_groups(
        "penstock_group_given_samples", "Samples given to members.", lambda g: g.given_samples, is_counter=True
    ),
    _of_groups(
        "penstock_group_given_bytes", "Payload bytes given to members.", lambda g: g.given_bytes, is_counter=True
    ),
    _of_groups("penstock_group_lag_entries", "Entries that no member was given.", lambda g: g.lag_entries),
    _of_groups("penstock_group_lag_samples", "Samples that no member was given.", lambda g: g.lag_samples),
    _of_groups("penstock_group_lag_seconds", "Age of the oldest of them.", lambda g: g.lag_s),
    _of_groups(
        "penstock_group_pending_entries", "Entries given out and not acknowledged.", lambda g: g.pending_entries
    ),
    _of_groups(
        "penstock_group_redelivered_entries", "Of the oldest pending, those given out more than once.",
        lambda g: g.redelivered_entries,
    ),
    _of_groups(
        "penstock_group_orphaned_entries", "Pending entries of members that are silent.",
        lambda g: sum(member.pending_entries for member in g.members if member.is_silent),
    ),
    _of_groups("penstock_group_dead_letters", "Entries that the group could not read.", lambda g: g.dead_letters),
    _of_groups(
        "penstock_group_members", "Members heard of in the last 10 s.",
        lambda g: sum(member.is_live for member in g.members),
    ),
    _of_groups(
        "penstock_group_silent_members", "Members not heard of for longer.",
        lambda g: sum(member.is_silent for member in g.members),
    ),
    _of_groups("penstock_group_holds_data", "1 if what the group has not read is kept for it.", lambda g: g.holds),
    MetricSpec(
        "penstock_group_wait_ratio", "What part of their time its training loops wait for batches.", _wait_ratios,
        ("group",),
    ),
)  # fmt: skip


QUEUE_TABLE = {
    "waiting": ("penstock_queue_waiting_jobs", "Jobs that no worker has taken."),
    "running": ("penstock_queue_running_jobs", "Jobs that workers have taken."),
    "failed": ("penstock_queue_failed_jobs", "Jobs that failed for good, until their production ends."),
}
"""Kind of job -> metric and help."""


def queue_metrics(queues: QueueSnapshot | None) -> Iterator[Metric]:
    """Yield the facts about the queue's server, or None if it is away."""
    yield GaugeMetricFamily("penstock_queue_up", "1 if the queue's server answered last.", value=queues is not None)
    if queues is None:
        return
    memory = queues.memory
    yield GaugeMetricFamily("penstock_queue_used_bytes", "The queue's server's memory.", value=memory.used_bytes)
    yield GaugeMetricFamily("penstock_queue_limit_bytes", "Its maxmemory, 0 for none.", value=memory.limit_bytes)
    for kind, (name, help_text) in QUEUE_TABLE.items():
        family = GaugeMetricFamily(name, help_text, labels=["queue"])
        for queue, counts in queues.queues.items():
            if kind in counts:
                family.add_metric([queue], counts[kind])
        yield family


NODE_TABLE: tuple[tuple[str, str, Callable[[ServerSnapshot], float | None]], ...] = (
    ("penstock_node_up", "1 if this server of the streams answered last.", lambda node: float(not node.failure)),
    ("penstock_node_takes_writes", "0 if it refuses writes because it cannot write its disk.",
     lambda node: None if node.failure else float(not node.refusal)),
    ("penstock_node_used_bytes", "Its memory.", lambda node: None if node.failure else node.memory.used_bytes),
    ("penstock_node_limit_bytes", "Its maxmemory, 0 for none.",
     lambda node: None if node.failure else node.memory.limit_bytes),
    ("penstock_node_replicas", "Replicas that follow it.",
     lambda node: None if node.failure else sum(one.is_online for one in node.replicas)),
    ("penstock_node_replica_lag_bytes", "What the last of its replicas has not confirmed.",
     lambda node: max((one.lag_bytes for one in node.replicas), default=None)),
)  # fmt: skip
"""Metric, help and value of each server that holds keys."""


def node_metrics(servers: Sequence[ServerSnapshot]) -> Iterator[Metric]:
    """Yield the facts about each server."""
    for name, help_text, value in NODE_TABLE:
        family = GaugeMetricFamily(name, help_text, labels=["node"])
        for server in servers:
            if (found := value(server)) is not None:
                family.add_metric([server.where], found)
        yield family


class StreamMetrics(Collector):
    """The metrics of the last snapshots."""

    def __init__(self, *, has_queue: bool = True) -> None:
        """``has_queue`` is whether there is a queue's server to tell of."""
        self._has_queue = has_queue
        self.snapshots: Mapping[str, StreamSnapshot] = {}
        """The snapshots, replaced as a whole after each round, and empty while the server is away."""
        self.is_up = False
        self._asked = ""
        self.servers: Sequence[ServerSnapshot] = ()
        """The servers of the streams at the last round."""
        self.queues: QueueSnapshot | None = None
        """The queue's server, replaced at each look, or None while it is away."""

    def begin(self, where: str) -> None:
        """Note that the server at this address is asked for a round of snapshots."""
        self._asked = where

    def take(self, snapshots: Mapping[str, StreamSnapshot] | None, servers: Sequence[ServerSnapshot] = ()) -> None:
        """Take a round of snapshots by stream, or None while the server is away, and of the servers."""
        self.snapshots, self.is_up, self.servers = snapshots or {}, snapshots is not None, servers

    def take_queues(self, queues: QueueSnapshot | None) -> None:
        """Take a snapshot of the queues, or None while their server is away."""
        self.queues = queues

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        is_silent = STALL_DETECTOR.silent_s(self._asked) > SILENCE_S
        snapshots = [] if is_silent else list(self.snapshots.values())
        is_up = float(self.is_up and not is_silent)
        yield GaugeMetricFamily("penstock_up", "1 if the server of the streams answered last.", value=is_up)
        if self._has_queue:
            yield from queue_metrics(self.queues)
        yield from node_metrics(() if is_silent else self.servers)
        if snapshots:
            memory = snapshots[0].memory
            yield GaugeMetricFamily("penstock_server_used_bytes", "The server's memory.", value=memory.used_bytes)
            yield GaugeMetricFamily(
                "penstock_server_limit_bytes", "Its maxmemory, 0 for none.", value=memory.limit_bytes
            )
        for line in TABLE:
            family = (CounterMetricFamily if line.is_counter else GaugeMetricFamily)(
                line.name, line.help, labels=["stream", *line.labels]
            )
            for snapshot in snapshots:
                for labels, value in line.values(snapshot):
                    if value is not None:
                        family.add_metric([snapshot.name, *labels], float(value))
            yield family
