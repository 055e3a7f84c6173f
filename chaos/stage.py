"""The stage of a run: servers, streams, and how each process is started. `chaos.conductor` decides what happens on
it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import redis

from chaos.actor import Actor
from chaos.cluster import ServerCluster
from chaos.command import penstock
from chaos.links import FAR, OF_ROLE, OPERATOR, SERVER, Links
from chaos.lives import Life
from chaos.options import FEED, MAIN, RANKS, Options
from chaos.payload import spec
from chaos.sweeper import Sweeper
from penstock import EmbeddedServer, Tuning, Writer

AOF = {"appendfsync": "always", "auto-aof-rewrite-min-size": "256mb"}
"""Settings by which an answered write survives SIGKILL of the server."""
EPOCHS_A_ROUND = 2
"""The epochs of one `penstock produce`, after which the next is started."""
FEED_GROUP = "feeders"


class Stage:
    """The servers and streams of a run; it starts the processes."""

    def __init__(self, options: Options, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.is_up = True
        self.outages: list[tuple[int, int]] = []
        """The times [down, up) in ns in which no process could reach the server."""
        self.failovers: list[tuple[int, int]] = []
        """Those of a cluster, in which one of its masters was away or was replaced."""
        self._down_ns = 0
        self._counts: dict[str, int] = {}
        self._port: int | None = None
        self._stack = ExitStack()
        self.links = self._stack.enter_context(Links()) if options.networks else None
        self._stack.enter_context(self._on(OPERATOR))
        self.cluster = ServerCluster(directory / "servers") if options.cluster else None
        self._server = None if options.cluster else self._started()
        self._port = None if self._server is None else self._server.port
        self._queue = self._started_queue() if options.own_queue or options.cluster else None
        if self.links is not None:
            self.links.start_relay(self.server.port)
        self._make_streams()
        self._sweeper = Sweeper(self.url, (MAIN, FEED)) if options.payload != "inline" else None

    @property
    def server(self) -> EmbeddedServer:
        """Return the one server of the streams."""
        assert self._server is not None
        return self._server

    def _on(self, host: str) -> AbstractContextManager[None]:
        """Return what lets this process be on a host, if there are several."""
        return nullcontext() if self.links is None else self.links.network.inside(host)

    def _started(self) -> EmbeddedServer:
        extra = AOF if self.links is None else {**AOF, "bind": "*"}
        with self._on(SERVER):
            return EmbeddedServer(appendonly=True, directory=self.directory / "server", port=self._port, extra=extra)

    def _started_queue(self) -> EmbeddedServer:
        with self._on(SERVER):
            return EmbeddedServer(extra={} if self.links is None else {"bind": "*"})

    def _make_streams(self) -> None:
        options = self.options
        groups = {MAIN: options.groups_of_main(), FEED: [FEED_GROUP]}
        for name, members in groups.items():
            with Writer(
                name,
                url=self.url,
                spec=spec(options.sample_bytes),
                partitions=options.partitions,
                budget_bytes=options.budget_bytes,
                tuning=Tuning(block_bytes=options.block_bytes),
                payload=self._payload,
            ):
                pass
            for group in members:  # declared, so that unread data is also kept while the group has no member
                kind = ["--ordered"] if group == RANKS else []
                penstock(self.url, "groups", "declare", name, group, *kind).check_returncode()

    @property
    def _payload(self) -> str:
        return "inline" if self.options.payload == "inline" else f"segments:{self.directory / 'segments'}"

    @property
    def url(self) -> str:
        """Return the address of the server that holds the streams, or of the nodes of its cluster."""
        return self._placed(self.server.url) if self.cluster is None else self.cluster.url

    @property
    def queue_url(self) -> str:
        """Return the address of the server that holds the jobs."""
        return self._placed(self._queue.url) if self._queue else self.url

    def _placed(self, url: str) -> str:
        return url if self.links is None else url.replace("127.0.0.1", self.links.network.address(SERVER))

    def client(self) -> Any:
        """Return a connection. Raises one of `chaos.keys.AWAY`."""
        if self.cluster is not None:
            return self.cluster.client()
        return redis.Redis.from_url(self.url, socket_timeout=10, socket_connect_timeout=10)

    # --- faults of the server ---

    def kill_server(self) -> None:
        """Kill the server with SIGKILL. Its file has everything that it had answered."""
        self._went_down()
        self.server.kill()

    def end_server(self) -> None:
        """End the server like an operator who restarts it."""
        self._went_down()
        self.server.close()

    def start_server(self) -> None:
        """Start the server again on the same port and the same file."""
        self.server.close()
        self._server = self._started()
        self._came_up()

    def stop_server(self) -> None:
        """Send SIGSTOP to the server."""
        self._went_down()
        os.kill(self.server.pid, signal.SIGSTOP)

    def continue_server(self) -> None:
        """Send SIGCONT to the server."""
        os.kill(self.server.pid, signal.SIGCONT)
        self._came_up()

    def begin_failover(self) -> None:
        """Note that a master of the cluster may be away from now on."""
        self._went_down()

    def end_failover(self) -> None:
        """Note that the cluster is well again."""
        self._came_up()
        self.failovers.append(self.outages[-1])

    def _went_down(self) -> None:
        self.is_up, self._down_ns = False, time.monotonic_ns()

    def _came_up(self) -> None:
        self.outages.append((self._down_ns, time.monotonic_ns()))
        self.is_up = True

    def cut_connections(self, pick: float, share: float) -> int:
        """Close some of the connections by CLIENT KILL, and return their number."""
        if self.cluster is not None:
            return self.cluster.cut_connections(pick, share)
        cut = 0
        with suppress(redis.RedisError), redis.Redis.from_url(self.url, socket_timeout=5) as client:
            listed = client.client_list()
            for place, info in enumerate(listed):
                if (place * 0.618 + pick) % 1 < share:
                    cut += client.client_kill_filter(_id=info["id"])
        return cut

    def cuts_of(self, host: str) -> list[tuple[int, int]]:
        """Return the times in which a fault of a link may have kept a host from the server."""
        return [] if self.links is None else [*self.links.cuts[host], *self.links.cuts[SERVER]]

    def end_sweeping(self) -> None:
        """Stop the sweeper, so that the folder no longer changes without a writer."""
        if self._sweeper is not None:
            self._sweeper.close()

    # --- processes ---

    def start_dispatcher(self) -> Actor:
        """Start `penstock produce` with all workers but one."""
        options = self.options
        arguments = [
            "produce", "dataset", "chaos.source:items", "--transform", "chaos.source:make", "--stream", MAIN, "--json",
            "--epochs", EPOCHS_A_ROUND, "--seed", options.seed, "--shard-samples", options.shard_samples,
            "--workers", max(1, options.workers - 1),
        ]  # fmt: skip
        return self._start("dispatcher", "chaos.process", arguments)

    def start_host(self) -> Actor:
        """Start `penstock worker`, as on another host."""
        return self._start("host", "chaos.process", ["worker", "--processes", 1, "--allow", "chaos.source"])

    def start_feeder(self, first: int) -> Actor:
        """Start a plain Writer that continues at sample ``first`` of the feed."""
        return self._start("feeder", "chaos.feeder", [first], stream=FEED)

    def start_trainer(self, stream: str, group: str, member: str, *, in_node: bool) -> Actor:
        """Start one more member of a group."""
        policy = self.options.group_policies().get(group, "on_next")
        arguments = [stream, group, member, policy]
        module = "chaos.node_trainer" if in_node else "chaos.trainer"
        return self._start(f"{group}-{member}", module, arguments, stream, group, member)

    def _start(
        self, role: str, module: str, arguments: Sequence[object], stream: str = MAIN, group: str = "", member: str = ""
    ) -> Actor:
        number = self._counts[role] = self._counts.get(role, 0) + 1
        journal = self.directory / f"{role}-{number}.journal"
        given = [str(argument) for argument in arguments]
        given += [] if module == "chaos.process" else [str(journal)]
        life = Life(module.partition(".")[2] if group else role, stream, group, member, journal)
        # not in the arguments: every user of the host can list those, and the URLs hold passwords
        urls = {"PENSTOCK_URL": self.url, "PENSTOCK_QUEUE_URL": self.queue_url}
        if self.links is not None:
            life.host = OF_ROLE.get(role) or self.links.next_host()
            if life.host == FAR:
                urls["PENSTOCK_URL"] = self.links.relayed(self.server.url)
        with self._on(life.host):
            return Actor(life, [module, *given], {**self.options.environment(), **urls})

    def close(self) -> None:
        """End the servers."""
        self.end_sweeping()
        if self.cluster is not None:
            self.cluster.close()
        if self._server is not None:
            if not self.is_up:
                with suppress(ProcessLookupError):
                    os.kill(self.server.pid, signal.SIGCONT)
            self.server.close()
        if self._queue:
            self._queue.close()
        self._stack.close()
