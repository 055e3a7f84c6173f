"""Which run of a server a client speaks to: a restart and a failover show as another ``run_id``.

The id is asked for only after a connection was made, so a client whose connections last pays one request in its life.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from penstock_common.errors import Unauthorized
from penstock_common.stream.link.commands import Client


class Connections:
    """Counts the connections that are made with a client's settings, its data channels included."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, connection: Any) -> None:
        """Logs in, as redis-py would; redis-py calls this for each new connection."""
        connection.on_connect()
        self.made += 1


def connections_of(client: Client) -> Connections:
    """Return the counter of a client's pool. From the first call on, new connections count, also when made again."""
    settings: dict[str, Any] = client.connection_pool.connection_kwargs
    found = settings.get("redis_connect_func")
    if not isinstance(found, Connections):
        found = settings["redis_connect_func"] = Connections()
    return found


def read_run_id(client: Client) -> str | None:
    """Return the id of the server's present run; None where this user may not ask for it."""
    try:
        return str(client.info("server").get("run_id", "")) or None
    except (Unauthorized, ResponseError):
        return None


class RunWatch:
    """Notices that a client's connections reach another run of the server than before."""

    def __init__(self, client: Client) -> None:
        self._client, self._connections = client, connections_of(client)
        self._made = -1
        """Connections when the run was last looked at; -1 before the first look."""
        self._run_id: str | None = None

    def check(self, compare: Callable[[], None]) -> None:
        """Call ``compare`` once for each run but the first; where the id is hidden, once for each reconnection.

        Costs nothing while no connection was made. What ``compare`` raises is passed on, and the next check calls it
        again.
        """
        made = self._connections.made
        if made == self._made:
            return
        run_id = read_run_id(self._client)
        is_first = self._made < 0
        if not is_first and (run_id is None or run_id != self._run_id):
            compare()
        self._made, self._run_id = made, run_id
