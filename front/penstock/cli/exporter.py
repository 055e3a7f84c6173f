"""``penstock exporter``: metrics of streams for Prometheus, over HTTP."""

from __future__ import annotations

import argparse
import errno
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from penstock.cli import PORT, STREAM_NAME, add_jobs, add_url, queue_url_of, url_of
from penstock.cli.interrupts import end_by_signals
from penstock_common.errors import PenstockError, ServerUnavailable, StreamNotFound, Unauthorized
from penstock_common.settings import BadSettings

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.views.exporter import StreamMetrics
    from penstock_common.explain.monitor import StreamMonitor
    from penstock_common.explain.servers import ServerLooks
    from penstock_common.explain.snapshot import StreamSnapshot
    from penstock_common.stream.commands import Client

Answer = TypeVar("Answer")

DEFAULT_PORT = 9465
SNAPSHOT_EVERY_S = 2.0


EPILOG = (
    "example:\n  penstock exporter --port 9465 --bind 0.0.0.0\n  curl -s localhost:9465/metrics | grep lag\n\n"
    "It looks at the streams every 2 seconds, whether or not somebody scrapes, reads no payload, and goes on when\n"
    "the server comes back (penstock_up is 0 meanwhile). It has no login: whoever reaches the port can read it.\n"
    "docker/monitoring has alert rules and a Grafana dashboard; docs/metrics.md lists the metrics.\n\n"
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
    from penstock_common.explain.queues import queue_names, snapshot_queues
    from penstock_common.extras import needed
    from penstock_common.server.connection import may_keep_jobs

    with needed("prometheus_client", "penstock exporter"):
        from prometheus_client import CollectorRegistry, start_http_server

    end_by_signals()
    with (
        closing(StreamsServer(lambda: url_of(args), args.stream, console)) as streams,
        closing(WatchedServer(lambda: queue_url_of(args) or url_of(args), console)) as jobs,
    ):
        client = streams.connected()
        has_queue = queue_url_of(args) is not None or may_keep_jobs(client)
        metrics, registry = StreamMetrics(has_queue=has_queue), CollectorRegistry()

        def look_at_both() -> None:
            streams.look(metrics)
            if has_queue:  # its server may be away while that of the streams is not
                queues = queue_names(args.queue, metrics.snapshots)
                metrics.take_queues(jobs.ask(lambda client: snapshot_queues(client, queues)))

        look_at_both()
        registry.register(metrics)
        try:
            server, thread = start_http_server(args.port, args.bind, registry)
        except OSError as error:
            other = "--port" if error.errno == errno.EADDRINUSE else "--bind"
            raise PenstockError(f"port {args.port} of {args.bind}: {error.strerror}; give another {other}") from None
        console.line(f"metrics at http://{args.bind}:{server.server_port}/metrics; Ctrl-C ends it")
        try:
            while True:
                time.sleep(SNAPSHOT_EVERY_S)
                look_at_both()
        except KeyboardInterrupt:
            return 0
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


class WatchedServer:
    """A server that is looked at again and again. If it refuses the login after a while, each look connects anew.

    The address is read anew then, because its file may have a new password.
    """

    def __init__(self, url: Callable[[], str], console: Console) -> None:
        self._url, self._console = url, console
        self._client: Client | None = None
        self._has_answered = False
        self._refusal = ""

    def connected(self) -> Client:
        """Return a client of the server."""
        from penstock_common.stream.client import connect

        if self._client is None:
            self._client = connect(self._url())
        return self._client

    def ask(self, question: Callable[[Client], Answer]) -> Answer | None:
        """Return the answer, or None while the server is away, or refuses a login that it has taken before."""
        try:
            answer = question(self.connected())
        except ServerUnavailable:
            return None
        except (Unauthorized, BadSettings) as error:  # a file is empty for a moment while it is written
            if not self._has_answered:
                raise
            if self._refusal != str(error):
                again = f"The exporter itself reads the address anew and tries again every {SNAPSHOT_EVERY_S:g} seconds"
                self._console.notice(f"penstock: {error}. {again}")
            self._refusal = str(error)
            self.close()
            return None
        self._has_answered, self._refusal = True, ""
        return answer

    def close(self) -> None:
        """Close the connections. The next look connects anew."""
        if self._client is not None:
            self._client.close()
            self._client = None


class StreamsServer(WatchedServer):
    """The server of the streams."""

    def __init__(self, url: Callable[[], str], names: Sequence[str], console: Console) -> None:
        """``names`` are the streams to look at. Without one, all are."""
        super().__init__(url, console)
        self._wanted = names
        self._damaged: dict[str, str] = {}

    def connected(self) -> Client:
        """See WatchedServer."""
        from penstock_common.explain.servers import ServerLooks
        from penstock_common.stream.directory import StreamLister

        is_new = self._client is None
        client = super().connected()
        if is_new:
            self._names = (lambda: self._wanted) if self._wanted else StreamLister(client).names
            self._looks = ServerLooks(client)
            self._monitors: dict[str, StreamMonitor] = {}
        return client

    def look(self, metrics: StreamMetrics) -> None:
        """Take a snapshot of each stream."""
        damaged = self.ask(lambda client: look(client, self._names, self._monitors, self._looks, metrics))
        if damaged is None:
            metrics.take(None)
        before, self._damaged = self._damaged, damaged or {}
        for name, why in self._damaged.items():
            if before.get(name) != why:
                self._console.notice(f"penstock: stream {name!r} cannot be read, and its metrics are left out: {why}")


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

    streams.begin(client.where)
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
