"""The control client: redis-py's client, which raises Penstock's errors and may wait for a lost server.

Plain refusals of one command (a script's own error, NOSCRIPT, WATCH) are raised as they are, for the caller.

**What may be repeated.** A patient client sends a command again if no answer came, though the server may have executed
it. So every command of a control connection must be safe to repeat. It is a query, an UNLINK, a removal that frees
nothing the second time, or a script or HSET that sets given values: opening, sizing, completing, joining, renewing,
leaving, abandoning. Taking a number is repeatable through the caller's token. An event may come twice. Entries are
appended on channels, which never repeat a command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import redis
from redis import exceptions as foreign
from redis.client import Pipeline
from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError, ServerUnavailable, Unauthorized
from penstock_common.server.error_translation import address, is_denied, is_wrong_type, may_pass, translate
from penstock_common.stall_detector import PendingRequest
from penstock_common.waiting import Notify, Outage, to_stderr

Answer = TypeVar("Answer")


class RetryPolicy:
    """A retry policy that the clients of one owner share: how long they repeat what a lost server did not answer."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """The seconds for which a command is repeated; 0 is not at all. Any thread may change it, also during a
        wait.
        """
        self.notify: Notify = to_stderr
        """Called with a line for each outage that a client waits for, and for a server that does not answer."""

    def tell(self, notify: Notify) -> None:
        """Report outages and silences to this function from now on."""
        self.notify = notify

    def last(self, seconds: float) -> None:
        """Repeat commands for this time from now on."""
        self.seconds = seconds


class _OwnedOutage(Outage):
    """An outage that lasts as long as its owner's retry policy allows, which may change during the outage."""

    def __init__(self, patience: RetryPolicy) -> None:
        super().__init__(patience.notify, patience.seconds, "asking the server")
        self._patience = patience

    def bear(self, error: ServerUnavailable) -> None:
        """See Outage."""
        self.patience_s = self._patience.seconds
        if not self.patience_s:
            raise error
        super().bear(error)


def _failure(error: Exception, client: redis.Redis) -> PenstockError | None:
    """Return an error that a user can act on, or None for a plain refusal, which the caller understands better."""
    plain = type(error) in (ResponseError, foreign.NoScriptError, foreign.WatchError)
    return None if plain and not (may_pass(error) or is_denied(error)) else translate(error, client)


def _bearing(client: ControlClient, ask: Callable[[], Answer], parts: Callable[[], Iterable[Any]]) -> Answer:
    """Return what ``ask`` returns, repeated while the server is away and the client's retry policy lasts.

    ``parts`` gives all arguments of the commands.
    """
    outage = _OwnedOutage(client.patience)
    while True:
        try:
            return client.request().of(ask)
        except (redis.RedisError, OSError) as error:
            failure = _failure(error, client)
            if failure is None:
                raise (client.explain_refusal(error, parts()) or error) from None
            if not isinstance(failure, ServerUnavailable):
                raise failure from error
            failure.__cause__ = error
            outage.bear(failure)


class ControlClient(redis.Redis):
    """A redis.Redis that raises translated errors, and repeats unanswered commands while ``patience`` lasts."""

    patience: RetryPolicy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.patience = RetryPolicy()
        self._where: str | None = None

    @property
    def where(self) -> str:
        """The server's address without its password."""
        if self._where is None:
            self._where = address(self)
        return self._where

    def request(self) -> PendingRequest:
        """Return a mark for the stall detector that an answer of the server is awaited."""
        return PendingRequest(self.where, self.patience.notify)

    def explain_refusal(self, error: Exception, parts: Iterable[Any]) -> PenstockError | None:
        """Return an error that a user can act on if the server refused a command with these arguments, or None.

        A subclass that knows what the keys hold overrides it.
        """
        return None

    def impatient(self) -> Self:
        """Return a client with the same connections for a thread that wants to see every failure."""
        client = type(self)(connection_pool=self.connection_pool)
        client.patience.tell(self.patience.notify)
        return client

    def hurry(self, patience_s: float, reply_s: float) -> None:
        """Wait for a lost server for at most ``patience_s`` from now on, and take a silence of ``reply_s`` for an
        outage.

        Channels that are opened from now on do the same. A request in progress keeps the time that it had.
        """
        self.patience.last(min(self.patience.seconds, patience_s))
        pool = self.connection_pool
        pool.disconnect(inuse_connections=False)
        for name in ("socket_timeout", "socket_connect_timeout"):
            pool.connection_kwargs[name] = min(pool.connection_kwargs.get(name) or reply_s, reply_s)
        pool.reset()  # otherwise it would hand out its old connections, with their old times, again

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.Redis."""
        parent = redis.Redis.execute_command
        return _bearing(self, lambda: parent(self, *args, **options), lambda: args)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        """See redis.Redis."""
        return ControlPipeline(self, transaction, shard_hint)


class ControlPipeline(Pipeline):
    """A pipeline of redis-py that raises translated errors. It repeats like its client, except under WATCH."""

    def __init__(self, client: ControlClient, transaction: bool, shard_hint: Any) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """See redis.client.Pipeline."""
        commands = list(self.command_stack)

        def parts() -> list[Any]:
            return [part for command in commands for part in command[0]]

        if self.watching:
            return self._once(lambda: list(Pipeline.execute(self, raise_on_error)), parts)

        def ask() -> list[Any]:
            self.command_stack = list(commands)  # an execute that failed has emptied it
            replies = list(Pipeline.execute(self, raise_on_error))
            for reply in replies:  # even if a caller ignores other errors, no key of a stream may be of a wrong type
                if is_wrong_type(reply) and (damage := self._client.explain_refusal(reply, parts())) is not None:
                    raise damage
            return replies

        return _bearing(self._client, ask, parts)

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.client.Pipeline."""
        parent = Pipeline.immediate_execute_command
        return self._once(lambda: parent(self, *args, **options), lambda: args)  # type: ignore[no-untyped-call]

    def _once(self, ask: Callable[[], Answer], parts: Callable[[], Iterable[Any]]) -> Answer:
        try:
            return self._client.request().of(ask)
        except (redis.RedisError, OSError) as error:
            failure = _failure(error, self._client)
            if failure is None:
                raise (self._client.explain_refusal(error, parts()) or error) from None
            raise failure from error


class ConnectionCounter:
    """Counts the connections that are made with a client's settings, data channels included."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, connection: Any) -> None:
        """Log in as redis-py does. redis-py calls this for each new connection."""
        connection.on_connect()
        self.made += 1


def connections_of(client: Any) -> ConnectionCounter:
    """Return the counter of a client's pool. It counts each connection that is made after the first call."""
    settings: dict[str, Any] = client.connection_pool.connection_kwargs
    found = settings.get("redis_connect_func")
    if not isinstance(found, ConnectionCounter):
        found = settings["redis_connect_func"] = ConnectionCounter()
    return found


def read_run_id(client: Any) -> str | None:
    """Return the id of the server's present run, or None if this user may not ask for it."""
    try:
        return str(client.info("server").get("run_id", "")) or None
    except (Unauthorized, ResponseError):
        return None


class RestartDetector:
    """Notices that the server of a client was restarted or replaced: its connections reach another run."""

    def __init__(self, client: Any) -> None:
        self._client, self._connections = client, connections_of(client)
        self._made = -1
        """Count of connections when the run was last asked for; -1 before the first time."""
        self._run_id: str | None = None

    def check(self, compare: Callable[[], None]) -> None:
        """Call ``compare`` once for each run but the first. If the id is hidden, call it once for each reconnection.

        It costs nothing while no connection was made. An error of ``compare`` is raised, and the next check calls it
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
