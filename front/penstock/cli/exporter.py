"""``penstock exporter``: metrics of streams for Prometheus, over HTTP."""

from __future__ import annotations

import argparse
import errno
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Self

from penstock.cli import PORT, STREAM_NAME, add_jobs, add_url, queue_url_of, url_of
from penstock.cli.interrupts import end_by_signals

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.views.exporter import StreamMetrics
    from penstock_common.explain.monitor import StreamMonitor
    from penstock_common.explain.queues import QueueSnapshot
    from penstock_common.explain.servers import ServerLooks
    from penstock_common.explain.snapshot import StreamSnapshot
    from penstock_common.stream.commands import Client


DEFAULT_PORT = 9465
SNAPSHOT_EVERY_S = 2.0


EPILOG = (
    "example:\n  penstock exporter --port 9465 --bind 0.0.0.0\n  curl -s localhost:9465/metrics | grep lag\n\n"
    "It looks at the streams every 2 seconds, whether or not somebody scrapes, reads no payload, and goes on when\n"
    "the server comes back (penstock_up is 0 meanwhile). It has no login: whoever reaches the port can read it.\n"
    "docker/monitoring has alert rules and a Grafana dashboard; docs/monitoring.md lists the metrics.\n\n"
    "exit codes: 0 ended by Ctrl-C, SIGTERM or SIGHUP, 1 no server or no free port, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("--port", type=PORT, default=DEFAULT_PORT, help=f"0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument("--bind", default="127.0.0.1", metavar="ADDRESS", help="default: 127.0.0.1; 0.0.0.0 for all")
    parser.add_argument(
        "--stream",
        action="append",
        default=[],
        type=STREAM_NAME,
        metavar="NAME",
        help="may be repeated (default: all, also new ones)",
    )
    add_url(parser)
    add_jobs(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Serve metrics until Ctrl-C, SIGTERM or SIGHUP."""
    from penstock.views.exporter import StreamMetrics
    from penstock_common.errors import PenstockError
    from penstock_common.explain.servers import ServerLooks
    from penstock_common.extras import needed
    from penstock_common.server.connection import may_keep_jobs
    from penstock_common.stream.client import connect
    from penstock_common.stream.directory import StreamLister

    with needed("prometheus_client", "penstock exporter"):
        from prometheus_client import CollectorRegistry, start_http_server

    end_by_signals()
    queue_url = queue_url_of(args)
    with connect(url_of(args)) as client, QueueMetrics(queue_url or url_of(args), args.queue) as jobs:
        has_queue = queue_url is not None or may_keep_jobs(client)
        streams, registry = StreamMetrics(has_queue=has_queue), CollectorRegistry()
        names = (lambda: args.stream) if args.stream else StreamLister(client).names
        looks = ServerLooks(client)
        monitors: dict[str, StreamMonitor] = {}
        damaged = _report_damage(look(client, names, monitors, looks, streams), {}, console)
        streams.take_queues(jobs.look(streams.snapshots) if has_queue else None)
        registry.register(streams)
        try:
            server, thread = start_http_server(args.port, args.bind, registry)
        except OSError as error:
            other = "--port" if error.errno == errno.EADDRINUSE else "--bind"
            raise PenstockError(f"port {args.port} of {args.bind}: {error.strerror}; give another {other}") from None
        console.line(f"metrics at http://{args.bind}:{server.server_port}/metrics; Ctrl-C ends it")
        try:
            while True:
                time.sleep(SNAPSHOT_EVERY_S)
                damaged = _report_damage(look(client, names, monitors, looks, streams), damaged, console)
                streams.take_queues(jobs.look(streams.snapshots) if has_queue else None)
        except KeyboardInterrupt:
            return 0
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class QueueMetrics:
    """The connection to the queue's server, which may be away while the streams' server is not."""

    def __init__(self, url: str, queue: str) -> None:
        self._url, self._queue = url, queue
        self._client: Client | None = None

    def look(self, names: Iterable[str]) -> QueueSnapshot | None:
        """Count the jobs of the queues that these streams may have. Returns None while the server is away."""
        from penstock_common.errors import ServerUnavailable
        from penstock_common.explain.queues import queue_names, snapshot_queues
        from penstock_common.stream.client import connect

        try:
            self._client = self._client or connect(self._url)
            return snapshot_queues(self._client, queue_names(self._queue, names))
        except ServerUnavailable:
            return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()


def look(
    client: Client,
    names: Callable[[], Sequence[str]],
    monitors: dict[str, StreamMonitor],
    looks: ServerLooks,
    streams: StreamMetrics,
) -> dict[str, str]:
    """Take a snapshot of each stream. Missing and damaged streams are left out, and all of them if the server is away.

    Returns:
        Name of each damaged stream -> what is wrong.
    """
    from penstock_common.errors import ServerUnavailable, StreamNotFound
    from penstock_common.explain.monitor import StreamMonitor
    from penstock_common.explain.servers import PartitionsAway
    from penstock_common.stream.streams import look_at_each

    def snapshot(name: str) -> StreamSnapshot | None:
        try:
            return monitors.setdefault(name, StreamMonitor(client, name)).snapshot()
        except StreamNotFound:
            monitors.pop(name)
            return None
        except PartitionsAway:
            return None

    try:
        looks.look()
        found, damaged = look_at_each(names(), snapshot)
    except ServerUnavailable:
        streams.take(None, looks.servers())
        return {}
    streams.take({one.name: one for one in found}, looks.servers())
    for name in damaged:
        del monitors[name]  # it was deleted during the look
    return {name: str(error) for name, error in damaged.items()}


def _report_damage(damaged: dict[str, str], before: dict[str, str], console: Console) -> dict[str, str]:
    """Print what the round before did not print, and return what is wrong now."""
    for name, why in damaged.items():
        if before.get(name) != why:
            console.notice(f"penstock: stream {name!r} cannot be read, and its metrics are left out: {why}")
    return damaged
