"""The control client: redis-py's client, which raises Penstock's errors and may wait for a lost server.

Plain refusals of one command (a script's own error, NOSCRIPT, WATCH) are raised as they are, for the caller.

**What may be repeated.** A patient client sends a command again if no answer came, though the server may have executed
it. So every command of a control connection must be safe to repeat. It is a query, an UNLINK, a removal that frees
nothing the second time, or a script or HSET that sets given values: opening, sizing, completing, joining, renewing,
leaving, abandoning. Taking a number is repeatable through the caller's token. An event may come twice. Entries are
appended on channels, which never repeat a command.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar
from weakref import WeakSet

import redis
from redis import exceptions as foreign
from redis.client import Pipeline
from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError, ServerUnavailable, Unauthorized
from penstock_common.server.error_translation import (
    UnknownCommand,
    address,
    is_denied,
    is_redirection,
    is_unknown_command,
    is_wrong_type,
    may_pass,
    translate,
)
from penstock_common.server.hosts import is_host
from penstock_common.server.pool import ClientPool
from penstock_common.server.primary_watcher import Address
from penstock_common.server.slots import SLOTS, Key, key_of
from penstock_common.server.topology import MapWatcher, SlotMap
from penstock_common.stall_detector import STALL_DETECTOR, PendingRequest
from penstock_common.waiting import Notify, Outage, to_stderr

Answer = TypeVar("Answer")

ANSWER_S: Final = 2.0
"""The time in which each server must answer, so that a command that looks at all of them ends in 5 s."""
REDIRECTIONS: Final = 8
"""The redirections that one request follows at once. Nodes that redirect to each other are an outage."""


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
    is_clear = may_pass(error) or is_denied(error) or is_unknown_command(error)
    return None if plain and not is_clear else translate(error, client)


def _bearing(
    client: ControlClient, key: Key, ask: Callable[[ControlClient], Answer], parts: Callable[[], Iterable[Any]]
) -> Answer:
    """Return what ``ask`` returns, repeated while the server is away and the client's retry policy lasts.

    ``ask`` is called with the client of the server that holds ``key``. ``parts`` gives all arguments of the commands.
    """
    outage, redirections = _OwnedOutage(client.patience), 0
    while True:
        node = client.node_of(key)
        try:
            answer: Answer = node.request().of(lambda node=node: ask(node))  # type: ignore[misc]
            outage.over()
            return answer
        except (redis.RedisError, OSError) as error:
            if client.follow(error) and (redirections := redirections + 1) <= REDIRECTIONS:
                continue
            failure = _failure(error, node)
            if failure is None:
                raise (client.explain_refusal(error, parts()) or error) from None
            if is_denied(error):
                failure = client.explain_refusal(error, parts()) or failure
            if not isinstance(failure, ServerUnavailable):
                raise failure from error
            failure.__cause__ = error
            client.look_around()
            outage.bear(failure)


class _Question:
    """A question that a thread asks a server, and the time that the server has for its answer."""

    def __init__(self, ask: Callable[[], object], seconds: float) -> None:
        self.since_s = time.monotonic()
        self._due_s = self.since_s + seconds
        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def has_answer(self) -> bool:
        """Return whether it is answered, as soon as it is or its time is over."""
        self._thread.join(max(0.0, self._due_s - time.monotonic()))
        return not self._thread.is_alive()


class ControlClient(redis.Redis):
    """A redis.Redis that raises translated errors, and repeats unanswered commands while ``patience`` lasts."""

    patience: RetryPolicy

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.patience = RetryPolicy()
        self.where = address(self)
        """The server's address without its password."""
        self.memory_bytes = 0
        """The memory of each server, as the address names it, or 0. It counts where the server names no maxmemory."""
        self._service: Any = self.connection_pool.connection_kwargs.get("service")
        """The `sentinel.SentinelService` whose primary answers, or None for a server of a fixed address."""
        self._slots: SlotMap | None = None
        """The map of a cluster, or None for one server."""
        self._nodes: dict[Address, Self] = {}
        """The client of each node that was asked."""
        self._owing: dict[Address, _Question] = {}
        """The last question of `at_once` to each server."""
        self._watcher: MapWatcher | None = None
        self._is_node = False
        """Whether it is the client of one node of a cluster."""
        self._has_read_only_scripts = True
        """Whether the server may know EVALSHA_RO."""
        self._channels: WeakSet[Closable] = WeakSet()
        """The channels to this server."""

    @property
    def server(self) -> str:
        """The address of the server that answers, without its password. Of a service it is the primary that answered
        the last new connection, where `where` names the service.
        """
        service = self._service
        return self.where if service is None else service.primary or self.where

    def request(self) -> PendingRequest:
        """Return a mark for the stall detector that an answer of the server is awaited."""
        return PendingRequest(self.where, self.patience.notify)

    def explain_refusal(self, error: Exception, parts: Iterable[Any]) -> PenstockError | None:
        """Return an error that a user can act on if the server refused a command with these arguments, or None.

        A subclass that knows what the keys hold overrides it.
        """
        return None

    # --- the servers of a cluster ---

    def spread(self, slots: SlotMap) -> None:
        """Send each command to the server that holds its key, by this map, from now on."""
        self._slots = slots
        self._watcher = MapWatcher(slots, partial(_drop_node, self._nodes), partial(_is_any_silent, self._nodes))

    def lead_to(self, where: Address) -> None:
        """Connect to this node from now on, with the same login."""
        self.connection_pool.connection_kwargs |= {"host": where[0], "port": where[1]}
        self.where = address(self)

    def limit_memory(self, nbytes: int) -> None:
        """Note that each server has this much memory."""
        self.memory_bytes = nbytes

    def join(self, slots: SlotMap | None, nodes: dict[Address, Self]) -> None:
        """Use the map and the connections of another client from now on."""
        self._slots, self._nodes = slots, nodes

    def note_node(self, is_node: bool) -> None:
        """Note whether this is the client of one node of a cluster."""
        self._is_node = is_node

    @property
    def is_of_cluster(self) -> bool:
        """Return whether its server is a node of a cluster."""
        return self._is_node or self.is_spread

    @property
    def is_spread(self) -> bool:
        """Return whether the keys are on several servers."""
        return self._slots is not None

    def node_of(self, key: Key) -> Self:
        """Return the client of the server that holds a key: this one if there is one server only.

        It raises every failure of its server. Send commands through the client that returned it instead, which finds
        the key's next server after a failover.
        """
        if self._slots is None:
            return self
        return self._node(self._slots.first_master() if key is None else self._slots.master_of(key))

    @property
    def moves(self) -> int:
        """Return a number that changes whenever keys move to other servers. It stays the same for one server."""
        return 0 if self._slots is None else self._slots.changes

    def holder_of(self, slot: int) -> str:
        """Return the address of the server of a cluster that holds a slot, as the cluster last told it."""
        assert self._slots is not None
        return self._node(self._slots.master_of_slot(slot)).where

    def holders(self) -> frozenset[str]:
        """Return the address of each server that holds keys."""
        masters = () if self._slots is None else self._slots.masters()
        return frozenset(self._node(where).where for where in masters) or frozenset((self.where,))

    def by_server(self, keys: Sequence[bytes | str]) -> list[list[int]]:
        """Return the numbers of these keys, one list for each server that holds some of them now.

        The lists are in the order of the keys.
        """
        together: dict[Address | None, list[int]] = {}
        for number, key in enumerate(keys):
            where = None if self._slots is None else self._slots.master_of(key)
            together.setdefault(where, []).append(number)
        return list(together.values())

    def on_each(self, ask: Callable[[Self], Answer]) -> list[Answer]:
        """Return what each server that holds keys answers. While one is away, they are asked like by one command."""
        outage = _OwnedOutage(self.patience)
        while self._slots is not None:
            try:
                return [ask(self._node(where)) for where in self._slots.masters()]
            except ServerUnavailable as failure:
                self.look_around()
                outage.bear(failure)
        return [ask(self)]

    def at_once(
        self, ask: Callable[[Self], Answer], seconds: float, *, has_replicas: bool = False
    ) -> list[tuple[Self, Answer | PenstockError | ResponseError]]:
        """Return each server that holds keys, with its answer or its error. They are asked in parallel.

        One server of its own is asked like by one command. Of several, a server that has not answered in this time is
        ServerUnavailable. As long as it owes that answer, later calls neither ask it nor wait for it. With
        ``has_replicas`` their replicas follow.
        """
        if self._slots is None:
            return [(self, ask(self))]
        addresses = dict.fromkeys([*self._slots.masters(), *(self._slots.nodes if has_replicas else ())])
        answers: dict[Address, Answer | PenstockError | ResponseError] = {}

        def run(where: Address, node: Self) -> None:
            try:
                answers[where] = ask(node)
            except (PenstockError, ResponseError) as error:
                answers[where] = error

        for where in addresses:
            if where not in self._owing or self._owing[where].has_answer():
                self._owing[where] = _Question(partial(run, where, self._node(where)), seconds)
        found: list[tuple[Self, Answer | PenstockError | ResponseError]] = []
        for where in addresses:
            self._owing[where].has_answer()
            node, silent_s = self._node(where), time.monotonic() - self._owing[where].since_s
            late = ServerUnavailable(f"{node.where} has not answered for {silent_s:.0f} s")
            found.append((node, answers.get(where, late)))
        return found

    def slots(self) -> list[list[range]]:
        """Return the slots of each server that holds keys, or nothing for one server, which has no slots."""
        return [] if self._slots is None else self._slots.slots()

    def follow(self, error: Exception) -> bool:
        """Return whether a server said which other one holds the key. The next `node_of` returns that one."""
        if self._slots is None or not isinstance(error, foreign.MovedError):
            return False
        if (error.host and not is_host(str(error.host))) or not 0 <= int(error.slot_id) < SLOTS:
            return False
        self._slots.moved(int(error.slot_id), (str(error.host), int(error.port)))
        return True

    def look_around(self) -> None:
        """Ask the cluster which server holds what, because one of them failed. It does nothing for one server."""
        if self._slots is not None:
            with suppress(redis.RedisError, OSError):  # the failure that led here says enough
                self._slots.refresh()

    def own(self, channel: Closable) -> None:
        """Close this channel to the server once the server holds no keys any more."""
        self._channels.add(channel)

    def drop_connections(self) -> None:
        """End every connection to this server, also those on which an answer is awaited."""
        if isinstance(self.connection_pool, ClientPool):
            self.connection_pool.shut()
        for channel in list(self._channels):
            channel.close()

    def _node(self, where: Address) -> Self:
        if where not in self._nodes:
            settings: dict[str, Any] = self.connection_pool.connection_kwargs | dict(
                zip(("host", "port"), where, strict=True)
            )
            pool = ClientPool(connection_class=self.connection_pool.connection_class, **settings)
            self._nodes.setdefault(where, self._alike(pool, is_node=True))
        return self._nodes[where]

    def _alike(self, pool: redis.ConnectionPool, *, is_node: bool) -> Self:
        """Return a client like this one, with these connections, that wants to see every failure."""
        client = type(self)(connection_pool=pool)
        client.patience.tell(self.patience.notify)
        client.limit_memory(self.memory_bytes)
        client.note_node(is_node)
        return client

    # --- times ---

    def impatient(self) -> Self:
        """Return a client with the same connections for a thread that wants to see every failure."""
        client = self._alike(self.connection_pool, is_node=self._is_node)
        client.join(self._slots, self._nodes)
        return client

    def limit_patience(self, patience_s: float, reply_s: float) -> None:
        """Wait for a lost server for at most ``patience_s`` from now on, and take a silence of ``reply_s`` for an
        outage.

        Channels that are opened from now on do the same. A request in progress keeps the time that it had.
        """
        self.patience.last(min(self.patience.seconds, patience_s))
        for pool in [self.connection_pool, *(node.connection_pool for node in list(self._nodes.values()))]:
            pool.disconnect(inuse_connections=False)
            for name in ("socket_timeout", "socket_connect_timeout"):
                pool.connection_kwargs[name] = min(pool.connection_kwargs.get(name) or reply_s, reply_s)
            pool.reset()  # otherwise it would hand out its old connections, with their old times, again

    def close(self) -> None:
        """Close every connection, unless another client has them, too (see `impatient`)."""
        if self.auto_close_connection_pool:
            if self._watcher is not None:
                self._watcher.close()
            for node in self._nodes.values():
                node.connection_pool.close()
            self.connection_pool.close()  # redis-py 5 disconnects it only
        super().close()

    # --- commands ---

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.Redis.

        A command without a key takes ``at=KEY``: the server that holds that key answers it. Otherwise any one does.
        """
        at: Key = options.pop("at", None)
        parent = redis.Redis.execute_command
        return _bearing(
            self,
            at if self._slots is None or at is not None else key_of(args),
            lambda node: parent(node, *args, **options),  # type: ignore[no-untyped-call]
            lambda: args,
        )

    def evalsha_ro(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """See redis.Redis. A server before 7.0, or a user without the right to it, is asked by EVALSHA."""
        return self._read_by_script("EVALSHA", sha, numkeys, *keys_and_args)

    def eval_ro(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        """See redis.Redis and `evalsha_ro`."""
        return self._read_by_script("EVAL", script, numkeys, *keys_and_args)

    def _read_by_script(self, command: str, *args: Any) -> Any:
        if not self._has_read_only_scripts:
            return self.execute_command(command, *args)
        try:
            return self.execute_command(f"{command}_RO", *args)
        except UnknownCommand:
            self._has_read_only_scripts = False
            return self.execute_command(command, *args)
        except Unauthorized as denied:
            try:
                return self.execute_command(command, *args)
            except Unauthorized:
                raise denied from None

    def script_load(self, script: Any) -> Any:
        """See redis.Redis. Every server gets the script, but one that is away: it will not know it, and say so."""
        digests = []
        for where in self._slots.masters() if self._slots is not None else ():
            with suppress(ServerUnavailable):
                digests.append(self._node(where).script_load(script))
        return digests[0] if digests else super().script_load(script)

    def unlink(self, *names: Any) -> Any:
        """See redis.Redis. The keys may be on several servers."""
        if self._slots is None:
            return super().unlink(*names)
        with self.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.unlink(name)
            return sum(pipe.execute())

    def scan_iter(self, *args: Any, **options: Any) -> Iterator[Any]:
        """See redis.Redis. The keys of every server are listed."""
        if self._slots is None:
            yield from super().scan_iter(*args, **options)
            return
        for found in self.on_each(lambda node: list(node.scan_iter(*args, **options))):
            yield from found

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        """See redis.Redis."""
        return ControlPipeline(self, transaction, shard_hint)


class Closable(Protocol):
    """The part of a channel that this module uses."""

    def close(self) -> None:
        """Close the connection. Any thread may do so."""


def _drop_node(nodes: Mapping[Address, ControlClient], address: Address) -> None:
    """End the connections to a node that is no master any more. One that is silent would not end them itself."""
    if (node := nodes.get(address)) is not None:
        node.drop_connections()


def _is_any_silent(nodes: Mapping[Address, ControlClient]) -> bool:
    return any(STALL_DETECTOR.silent_s(node.where) for node in list(nodes.values()))


class ControlPipeline(Pipeline):
    """A pipeline of redis-py that raises translated errors. It repeats like its client, except under WATCH.

    A transaction's keys are on one server. Other commands may have keys on several. One without a key goes where the
    command before it goes, or the next one if it is the first.
    """

    def __init__(self, client: ControlClient, transaction: bool, shard_hint: Any) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client, self._is_transaction = client, transaction

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """See redis.client.Pipeline."""
        commands = list(self.command_stack)

        def parts() -> list[Any]:
            return [part for command in commands for part in command[0]]

        if self.watching:
            return self._once(lambda: list(Pipeline.execute(self, raise_on_error)), parts)
        if self._client.is_spread and not self._is_transaction and not self.explicit_transaction:
            return self._spread(commands, raise_on_error)

        def ask(node: ControlClient) -> list[Any]:
            self.connection_pool = node.connection_pool
            self.command_stack = list(commands)  # an execute that failed has emptied it
            replies = list(Pipeline.execute(self, raise_on_error))
            self._raise_damage(replies, parts)
            return replies

        keys = (
            [key for command in commands if (key := key_of(command[0])) is not None] if self._client.is_spread else []
        )
        return _bearing(self._client, keys[0] if keys else None, ask, parts)

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.client.Pipeline."""
        parent = Pipeline.immediate_execute_command
        if self._client.is_spread and self.connection is None:
            self.connection_pool = self._client.node_of(key_of(args)).connection_pool
        return self._once(lambda: parent(self, *args, **options), lambda: args)  # type: ignore[no-untyped-call]

    def _once(self, ask: Callable[[], Answer], parts: Callable[[], Iterable[Any]]) -> Answer:
        try:
            return self._client.request().of(ask)
        except (redis.RedisError, OSError) as error:
            if self._client.follow(error):
                raise foreign.WatchError("the keys moved to another server") from None
            failure = _failure(error, self._client)
            if failure is None:
                raise (self._client.explain_refusal(error, parts()) or error) from None
            self._client.look_around()
            raise failure from error

    def _spread(self, commands: list[Any], raise_on_error: bool) -> list[Any]:
        """Send the commands to the servers that hold their keys, and return the replies in order."""
        request = _SpreadRequest(self._client, self.response_callbacks, commands, is_strict=raise_on_error)
        outage, redirections = _OwnedOutage(self._client.patience), 0
        while not request.ask():
            if request.is_moved and (redirections := redirections + 1) <= REDIRECTIONS:
                continue
            self._client.look_around()
            assert request.failure is not None
            outage.bear(request.failure)
        outage.over()
        self.reset()
        self._raise_damage(request.replies, lambda: [part for command in commands for part in command[0]])
        if raise_on_error:
            try:
                self.raise_first_error(commands, request.replies)  # type: ignore[no-untyped-call]
            except redis.RedisError as error:
                raise (_failure(error, self._client) or error) from None
        return request.replies

    def _raise_damage(self, replies: list[Any], parts: Callable[[], Iterable[Any]]) -> None:
        for reply in replies:  # even if a caller ignores other errors, no key of a stream may be of a wrong type
            if is_wrong_type(reply) and (damage := self._client.explain_refusal(reply, parts())) is not None:
                raise damage


class _SpreadRequest:
    """A pipeline whose keys are on several servers. `ask` is repeated until each command has its reply."""

    def __init__(self, client: ControlClient, callbacks: Any, commands: list[Any], *, is_strict: bool) -> None:
        """``is_strict`` is whether a server that takes no writes now is asked again, instead of its error returned."""
        self._client, self._callbacks, self._commands, self._is_strict = client, callbacks, commands, is_strict
        self._keys, self._todo = _keys_of(commands), list(range(len(commands)))
        self.replies: list[Any] = [None] * len(commands)
        self.failure: ServerUnavailable | None = None
        """The reason why the last `ask` left commands without a reply."""
        self.is_moved = False
        """Whether the last `ask` learned of a key's new server."""

    def ask(self) -> bool:
        """Send what has no reply yet, and return whether all have one now. Raises what does not pass."""
        nodes: dict[ControlClient, list[int]] = {}
        for number in self._todo:
            nodes.setdefault(self._client.node_of(self._keys[number]), []).append(number)
        self._todo, self.failure, self.is_moved = [], None, False
        for node, numbers in nodes.items():
            pipe = Pipeline(node.connection_pool, self._callbacks, False, None)
            for args, options in [self._commands[number] for number in numbers]:
                pipe.execute_command(*args, **options)
            try:
                replies = node.request().of(lambda pipe=pipe: list(pipe.execute(raise_on_error=False)))  # type: ignore[misc]
            except (redis.RedisError, OSError) as error:
                self._again(numbers, node, error)
            else:
                self._take(numbers, node, replies)
        return not self._todo

    def _take(self, numbers: list[int], node: ControlClient, replies: list[Any]) -> None:
        for number, reply in zip(numbers, replies, strict=True):
            self.replies[number] = reply
            if isinstance(reply, Exception) and (is_redirection(reply) or (self._is_strict and may_pass(reply))):
                self.is_moved = self._client.follow(reply) or self.is_moved
                self._again([number], node, reply)

    def _again(self, numbers: list[int], node: ControlClient, error: Exception) -> None:
        failure = translate(error, node)
        if not isinstance(failure, ServerUnavailable):
            raise (failure or error) from None
        failure.__cause__ = error
        self.failure = failure
        self._todo = sorted([*self._todo, *numbers])


def _keys_of(commands: list[Any]) -> list[Key]:
    """Return the key whose server answers each command; see `ControlPipeline`."""
    keys = [key_of(command[0]) for command in commands]
    last = next((key for key in keys if key is not None), None)
    found: list[Key] = []
    for key in keys:
        last = key if key is not None else last
        found.append(last)
    return found


class ConnectionCounter:
    """Counts the connections that are made with a client's settings, data channels included."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, connection: Any) -> None:
        """Log in as redis-py does. redis-py calls this for each new connection."""
        try:
            connection.on_connect()
        except BaseException:  # redis-py keeps the connection after Ctrl-C, and would use it without a login
            connection.disconnect()
            raise
        self.made += 1


def connections_of(client: Any) -> ConnectionCounter:
    """Return the counter of a client's pool. It counts each connection that is made after the first call."""
    settings: dict[str, Any] = client.connection_pool.connection_kwargs
    found = settings.get("redis_connect_func")
    if not isinstance(found, ConnectionCounter):
        found = settings["redis_connect_func"] = ConnectionCounter()
    return found


def read_run_id(client: Any, at: Key = None) -> str | None:
    """Return the id of the server's present run, or None if this user may not ask for it.

    For a cluster these are the ids of all servers that hold keys, or of the one that holds the key ``at``. So another
    id follows a failover.
    """
    try:
        if at is not None:
            return str(client.info("server", at=at).get("run_id", "")) or None
        return ",".join(client.on_each(lambda node: str(node.info("server").get("run_id", "")))) or None
    except (Unauthorized, ResponseError):
        return None


class RestartDetector:
    """Notices that the server of a client was restarted or replaced: its connections reach another run."""

    def __init__(self, client: Any) -> None:
        """Look at every server of the client."""
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


NEVER_PROMOTED: Final = -1
"""INFO's ``second_repl_offset`` of a server that never took another one's place."""


class _Sighting(NamedTuple):
    """The server of a key, as it was found last."""

    node: ControlClient
    run_id: str | None
    holders: frozenset[str]
    """The servers that held keys then."""


class FailoverDetector:
    """Notices that the server of a key may lack its newest writes, because it was restarted or replaced.

    A key that moved to another server took everything along, and is not such a key. Any thread may use it, one thread
    at a time for each key.
    """

    def __init__(self, client: ControlClient) -> None:
        """Look at no key yet. Failures of ``client`` are not waited for."""
        self._client, self._connections = client, connections_of(client)
        self._looks: dict[str, tuple[int, int]] = {}
        """Key -> what has changed since, if it is another pair now: the connections and the moves."""
        self._at_s: dict[str, float] = {}
        """Key -> when it was looked at last."""
        self._seen: dict[str, _Sighting] = {}

    def check(self, keys: Sequence[str], compare: Callable[[list[int]], None]) -> None:
        """Call ``compare`` once with the numbers of the keys that may lack writes, if there are any.

        The first call only learns the servers of its keys. While no connection was made and no key moved, it costs
        nothing. Where the id of a run is hidden, each reconnection and each move counts. An error of ``compare`` is
        raised, and the next check calls it again. Raises ServerUnavailable.
        """
        now, at_s = (self._connections.made, self._client.moves), time.monotonic()
        if set(map(self._looks.get, keys)) != {now}:
            found = self._sightings(keys)
            lost = [number for number, key in enumerate(keys) if self._may_lack(key, found[number])]
            if lost:
                compare(lost)
            self._seen.update(zip(keys, found, strict=True))
            self._looks.update(dict.fromkeys(keys, now))
        self._at_s.update(dict.fromkeys(keys, at_s))

    def _sightings(self, keys: Sequence[str]) -> list[_Sighting]:
        holders, runs, found = self._client.holders(), dict[str, str | None](), []
        for key in keys:
            node = self._client.node_of(key)
            if node.where not in runs:
                runs[node.where] = read_run_id(self._client, key)
            found.append(_Sighting(node, runs[node.where], holders))
        return found

    def _may_lack(self, key: str, now: _Sighting) -> bool:
        if (before := self._seen.get(key)) is None:
            return False
        if now.run_id is None or before.run_id is None:
            return True
        if before.node.where == now.node.where:
            return before.run_id != now.run_id
        return not self._moved_whole(before, now, time.monotonic() - self._at_s[key])

    def _moved_whole(self, before: _Sighting, now: _Sighting, since_s: float) -> bool:
        """Return whether a key moved from one server to another, and neither was replaced or restarted since.

        Nor may a server that had it in between have failed over, which would have left fewer of the ``holders``.
        """
        if not before.holders <= now.holders:
            return False
        old, new = _info_of(before.node), _info_of(now.node)
        if not all(info.get("role") == "master" for info in (old, new)):
            return False
        if [str(info.get("run_id")) for info in (old, new)] != [before.run_id, now.run_id]:
            return False
        # a replica that took over was no holder before
        was_master = now.node.where in before.holders or new.get("second_repl_offset") == NEVER_PROMOTED
        return was_master and int(new.get("uptime_in_seconds", 0)) > since_s


def _info_of(node: ControlClient) -> dict[str, Any]:
    """Return a server's answer to INFO, or nothing if it does not answer in time."""
    infos: list[dict[str, Any]] = []

    def ask() -> None:
        with suppress(PenstockError, ResponseError):
            infos.append(node.info())

    return infos[0] if _Question(ask, ANSWER_S).has_answer() and infos else {}
