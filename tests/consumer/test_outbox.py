"""Tests of what an outbox sends, and sends again, to a server that answers as each test says."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from redis.exceptions import NoScriptError, ReadOnlyError, ResponseError

from penstock_common.errors import DamagedKey, GroupNotFound, MemberReplaced, PenstockError, ServerUnavailable
from penstock_common.server.channel import REPLY_TIMEOUT_S, Command
from penstock_common.server.error_translation import ReplyError
from penstock_common.stream.commands import ScriptCall
from penstock_common.stream.groups import outbox as module
from penstock_common.stream.groups.outbox import (
    ASK_EVERY_S,
    ASK_MS,
    CONFIRM_MS,
    SHORTEST_S,
    UNANSWERED,
    Outbox,
    Outboxes,
    OutboxThread,
    Probe,
    is_confirmed,
    no_probe,
)
from penstock_common.stream.groups.roster import Membership
from penstock_common.waiting import LEAVE_S
from tests.clusters import until

SCRIPT = "return 1"


class Note:
    """An acknowledgement with a number, whose key is at a place."""

    def __init__(self, number: int, place: str = "a", script: str = SCRIPT) -> None:
        self.number, self.place, self.script = number, place, script

    def add(self, other: object) -> bool:
        """See `Due.add`."""
        return False

    def call(self) -> ScriptCall:
        """See `Due.call`."""
        return ScriptCall(self.script, [self.place], [self.number])


class Connection:
    """One connection to the server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.got: list[int | str] = []
        """The numbers of the acknowledgements, and the names of other commands."""
        self._unread: deque[Command] = deque()
        self.is_cut = self.is_closed = False

    def send(self, commands: Sequence[Command]) -> None:
        """See `Channel.send`."""
        if self.is_cut:
            raise ServerUnavailable("it is cut")
        self.got += [int(one[4]) if one[0] == b"EVALSHA" else bytes(one[0]).decode() for one in commands]
        self._unread += commands

    def read(self, timeout_s: float) -> Any:
        """See `Channel.read`."""
        self._server.timeouts.append(timeout_s)
        if self.is_cut or not self._unread:
            self.is_cut = True
            raise ServerUnavailable("it does not answer")
        command = self._unread.popleft()
        if command[0] == b"WAIT":
            return self._server.replicas
        if command[0] == b"EVALSHA":
            return self._server.answers.popleft() if self._server.answers else 1
        return self._server.written

    def close(self) -> None:
        """See `Channel.close`."""
        self.is_closed = True


class Server:
    """A server, its client, and an outbox of it."""

    where = "here"
    moves = 0
    partitions = (SimpleNamespace(number=0, roster="a"), SimpleNamespace(number=1, roster="b"))
    stream = SimpleNamespace(name="t", partitions=partitions, named=lambda numbers: f"partitions {numbers}")
    who = Membership(cast(Any, stream), "g", "m", "i")
    connection_pool = SimpleNamespace(connection_kwargs={"host": "here"}, connection_class=object)

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.away = 0
        """The number of connections that are refused from now on."""
        self.away_s = 0.0
        """The time that each of them takes."""
        self.answers: deque[Any] = deque()
        """The answers to the next acknowledgements. Later ones are answered with 1."""
        self.written: Any = 1
        self.replicas: Any = 1
        self.timeouts: list[float] = []
        self.silent: set[str] = set()
        """The places that answer no ping."""
        self.pinged: list[str] = []
        self.loaded: list[tuple[str, str]] = []
        """Place and text of each script that was loaded."""
        self.limits: list[int] = []
        self.said: list[str] = []
        self.now_s = 0.0
        self.damage: PenstockError | None = None
        self.explained: list[int] = []
        """The partition of each refusal that was explained by the runs of the servers."""
        self.runs: Any = SimpleNamespace(is_replaced=lambda _: True, explained=self._explained)
        self.box = self.new_box()

    def new_box(self, probe: Probe | None = None) -> Outbox:
        """Return an outbox."""
        return Outbox(
            self, self.who, notify=self.said.append, what="partition 0", probe=probe or self.probe,
            clock=lambda: self.now_s, runs=self.runs,
        )  # fmt: skip

    def boxes(self, servers: Sequence[Sequence[int]]) -> Outboxes:
        """Return the outboxes of a member."""
        return Outboxes(self, self.who, servers, notify=self.said.append, probe_of=lambda _: self.probe, runs=self.runs)

    def _explained(self, error: PenstockError, partition: Any) -> PenstockError:
        self.explained.append(partition.number)
        return error

    def probe(self, limit_ms: int) -> Sequence[Command]:
        """See `Probe`."""
        self.limits.append(limit_ms)
        return [(b"HSET", b"key", b"field", b"value"), (b"WAIT", b"1", b"%d" % limit_ms)]

    def connect(self, client: object) -> Connection:
        """See `open_channels`."""
        assert client is self
        if self.away > 0:
            self.away -= 1
            self.now_s += self.away_s
            raise ServerUnavailable("nobody is here")
        self.connections.append(Connection(self))
        return self.connections[-1]

    def cut(self) -> None:
        """Cut the newest connection."""
        self.connections[-1].is_cut = True

    def node_of(self, key: bytes | str) -> Any:
        """See `StreamClient.node_of`."""
        place = key.decode() if isinstance(key, bytes) else key

        def ping() -> None:
            self.pinged.append(place)
            if place in self.silent:
                raise ServerUnavailable("it does not answer")

        return SimpleNamespace(
            where=place, script_load=lambda script: self.loaded.append((place, script)), ping=ping,
            connection_pool=self.connection_pool,
        )  # fmt: skip

    def explain_refusal(self, error: Exception, command: Command) -> PenstockError | None:
        """See `StreamClient.explain_refusal`."""
        return self.damage

    def send(self, *numbers: int) -> None:
        """Send acknowledgements."""
        for number in numbers:
            self.box.send(Note(number))

    @property
    def got(self) -> list[list[int | str]]:
        """Return what each connection got."""
        return [one.got for one in self.connections]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """Return a server whose outbox has sent nothing. A thread looks at nothing that it is not told of."""
    made = Server()
    monkeypatch.setattr(module, "open_channels", made.connect)
    monkeypatch.setattr(module, "LOOK_S", 3600.0)
    return made


class TestSendingAgain:
    """An acknowledgement that a server may have lost is sent again."""

    def test_what_was_answered_comes_again_before_the_rest_after_a_cut(self, server: Server) -> None:
        """A server that takes over may lack it. It is sent once on each connection, in order."""
        assert server.box.is_empty
        server.send(1, 2)
        assert not server.box.is_empty
        server.box.flush()
        assert server.box.is_empty
        server.cut()
        assert not server.box.is_empty
        server.send(3)
        server.box.flush()
        assert (server.got, server.box.is_empty) == ([[1, 2], [1, 2, 3]], True)
        server.cut()
        server.box.attend()
        assert (server.got[2:], server.box.is_empty) == ([[1, 2, 3]], True)
        assert [one.is_closed for one in server.connections] == [True, True, False]
        server.box.forget()
        server.cut()
        server.box.attend()
        assert (len(server.got), server.box.is_empty) == (3, True)

    def test_what_was_not_answered_comes_again_and_a_question_does_not(self, server: Server) -> None:
        """The answer to an old question says nothing of what is sent again."""
        server.send(1)
        server.now_s = ASK_EVERY_S
        server.send(2)
        server.cut()
        server.box.flush()
        assert server.got == [[1, 2, "HSET", "WAIT"], [1, 2]]

    def test_a_closed_outbox_that_is_used_again_sends_all(self, server: Server) -> None:
        """A cleanup may acknowledge after the end."""
        server.send(1)
        server.box.flush()
        server.box.close()
        server.box.close()
        assert server.connections[0].is_closed
        server.send(2)
        assert server.got == [[1], [1, 2]]

    def test_an_epoch_that_has_ended_needs_nothing_again(self, server: Server) -> None:
        """The epoch takes no more acknowledgements. The answer 0 only says that the server knew one."""
        server.answers += [-1, 0, 5]
        server.send(1, 2, 3)
        server.box.flush()
        server.cut()
        server.box.flush()
        assert server.got == [[1, 2, 3], [2, 3]]

    def test_a_server_that_is_away_gets_all_once_it_is_back(self, server: Server) -> None:
        """The training goes on. One line says what it waits for, and another one that it waits no more."""
        server.send(1)
        server.cut()
        server.away = 2
        server.box.flush()
        assert (server.got, server.box.is_empty) == ([[1], [1]], True)
        away, back = server.said
        assert "while acknowledging partition 0" in away
        assert "answers again" in back
        assert "(acknowledging partition 0)" in back

    def test_a_server_that_stays_away_is_an_error_and_nothing_is_forgotten(self, server: Server) -> None:
        """A later call tries again. Each outage has its own time."""
        server.send(1)
        server.box.flush()
        server.send(2)
        server.box.limit_patience(0.0)
        server.cut()
        server.away = 100
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="partition 0"):
                server.box.flush()
            assert not server.box.is_empty
        server.away = 0
        server.box.limit_patience(60.0)
        server.box.flush()
        assert (server.got, server.box.is_empty) == ([[1, 2], [1, 2]], True)

    @pytest.mark.parametrize("way", ["an answer", "a hurry"])
    def test_an_outage_has_its_own_time(self, server: Server, way: str) -> None:
        """Each of several short outages is waited for. So is one that lasts when a caller gets into a hurry."""
        server.box.limit_patience(10.0)
        server.away_s = 6.0
        server.send(1)
        server.cut()
        server.away = 1 if way == "an answer" else 100
        if way == "an answer":
            server.box.flush()
        else:
            with pytest.raises(ServerUnavailable):
                server.box.flush()
            server.box.limit_patience(10.0)
        server.cut()
        server.away = 1
        server.box.flush()
        assert server.box.is_empty

    def test_a_send_that_fails_is_tried_again_at_once(self, server: Server) -> None:
        """Its caller goes on, and need not know of it."""
        server.away = 1
        server.send(1)
        server.cut()
        server.send(2)
        assert server.got == [[1], [1, 2]]

    def test_some_are_under_way_at_once(self, server: Server) -> None:
        """The loop waits for no answer while the server is fast enough. A crash must not lose more than these."""
        server.send(*range(UNANSWERED - 1))
        assert server.timeouts == []
        server.send(UNANSWERED - 1)
        assert server.timeouts == [REPLY_TIMEOUT_S]

    @pytest.mark.parametrize(
        ("patience_s", "timeout_s"), [(60.0, REPLY_TIMEOUT_S), (5.0, 5.0), (SHORTEST_S / 2, SHORTEST_S)]
    )
    def test_an_answer_is_waited_for_as_long_as_an_outage_is(
        self, server: Server, patience_s: float, timeout_s: float
    ) -> None:
        """A silent server is as bad as one that is gone. What has arrived is read in any case."""
        server.box.limit_patience(patience_s)
        server.send(1)
        server.box.flush()
        assert server.timeouts == [timeout_s]

    @pytest.mark.parametrize("is_first", [True, False])
    @pytest.mark.parametrize("moment", ["send", "read"])
    def test_ctrl_c_leaves_no_answer_to_wait_for(
        self, server: Server, monkeypatch: pytest.MonkeyPatch, moment: str, is_first: bool
    ) -> None:
        """It may come before a request is sent, or when its answer has just been read. Nobody knows which."""
        if not is_first:
            server.send(1)
            server.box.flush()
        whole = getattr(Connection, moment)

        def interrupted(connection: Connection, *arguments: Any) -> None:
            if moment == "read":
                whole(connection, *arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Connection, moment, interrupted)
            server.send(2)
            server.box.flush()
        server.send(3)
        server.box.flush()
        assert server.got[-1][-2:] == [2, 3]
        assert server.box.is_empty
        assert not any(one.is_cut for one in server.connections), "it waited for an answer that does not come"


class TestRefusals:
    """A refusal is raised once, unless another try may help."""

    @pytest.mark.parametrize(
        "refusal", [NoScriptError("No matching script."), ResponseError("ERR NOSCRIPT of a proxy"), ReadOnlyError("x")]
    )
    def test_a_server_that_restarted_or_took_over_gets_all_again(self, server: Server, refusal: Exception) -> None:
        """It lacks the script, or is a replica yet."""
        server.send(1)
        server.box.flush()
        server.answers += [refusal]
        server.send(2)
        server.box.flush()
        assert server.got == [[1, 2], [1, 2]]
        assert server.loaded == [("a", SCRIPT)] * 2
        assert (server.box.is_empty, len(server.timeouts)) == (True, 4), "no answer is waited for that does not come"

    @pytest.mark.parametrize(
        ("refusal", "damage", "expected"),
        [
            (ResponseError("PENSTOCK replaced"), None, MemberReplaced),
            (ResponseError("PENSTOCK gone"), None, GroupNotFound),
            (ResponseError("ERR something else"), None, ReplyError),
            (ResponseError("WRONGTYPE of a key"), DamagedKey("it is a string"), DamagedKey),
        ],
    )
    def test_a_refusal_ends_one_acknowledgement_and_no_other(
        self, server: Server, monkeypatch: pytest.MonkeyPatch,
        refusal: Exception, damage: PenstockError | None, expected: type[PenstockError],
    ) -> None:  # fmt: skip
        """An error that repeats without end would hide that the rest is on the server."""
        monkeypatch.setattr(module, "rejoin", lambda *_: False)
        server.damage = damage
        server.answers += [1, refusal]
        server.send(1, 2, 3)
        with pytest.raises(expected):
            server.box.flush()
        server.box.flush()
        server.cut()
        server.box.flush()
        assert server.got == [[1, 2, 3], [1, 3]]
        assert server.explained == ([0] if "PENSTOCK" in str(refusal) else []), "the first partition has the positions"

    def test_a_member_that_a_roster_lost_joins_again_and_goes_on(
        self, server: Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The roster's server came back with older data, and may be away again while the member joins."""
        asked = list[Any]()

        def rejoin(client: object, who: Any, partition: Any, is_replaced: Callable[[Any], bool]) -> bool:
            asked.append((client, partition, is_replaced(partition)))
            if len(asked) == 1:
                raise ServerUnavailable("it is away")
            return True

        monkeypatch.setattr(module, "rejoin", rejoin)
        server.answers += [ResponseError("PENSTOCK gone")]
        server.send(1)
        server.box.flush()
        assert server.got == [[1], [1]]
        partition = asked[0][1]
        assert partition.number == 0
        assert asked == [(server, partition, True)] * 2
        assert (server.box.is_empty, len(server.timeouts)) == (True, 2)
        assert "it is away" in server.said[0]


class TestReplicas:
    """An outbox no longer keeps the acknowledgements that a replica has."""

    @pytest.mark.parametrize(
        ("wait", "reply", "found"),
        [(b"1", 1, True), (b"1", 2, True), (b"2", 1, False), (b"1", ResponseError("NOPERM"), False)],
    )
    def test_as_many_replicas_confirm_as_were_asked_for(self, wait: bytes, reply: Any, *, found: bool) -> None:
        """A server without the right, or without replicas, confirms nothing."""
        assert is_confirmed((b"WAIT", wait, b"20"), reply) is found

    def test_a_replica_is_asked_for_once_a_second(self, server: Server) -> None:
        """The question takes a little of the time of the acknowledgements behind it."""
        for now_ms in (0, 999, 1000, 1500, 1999, 2000):
            server.now_s = now_ms / 1000
            server.send(now_ms)
        assert server.got == [[0, 999, 1000, "HSET", "WAIT", 1500, 1999, 2000, "HSET", "WAIT"]]
        assert server.limits == [ASK_MS, ASK_MS]

    @pytest.mark.parametrize(
        ("written", "replicas", "is_kept"),
        [
            (1, 1, False),
            (1, 0, True),
            (0, 1, True),
            (ResponseError("OOM"), 1, True),
            (1, ResponseError("NOPERM"), True),
        ],
    )
    def test_an_acknowledgement_is_kept_until_a_replica_has_a_write_behind_it(
        self, server: Server, written: Any, replicas: Any, *, is_kept: bool
    ) -> None:
        """A WAIT without a write on its connection says nothing."""
        server.written, server.replicas = written, replicas
        server.send(1)
        server.box.confirm()
        assert server.got == [[1, "HSET", "WAIT"]]
        assert server.box.is_empty
        server.cut()
        server.box.flush()
        assert server.got[1:] == ([[1]] if is_kept else [])

    @pytest.mark.parametrize(("patience_s", "limit_ms"), [(60.0, CONFIRM_MS), (1.0, 500), (0.0, 1)])
    def test_an_end_waits_for_a_replica_for_half_of_its_patience(
        self, server: Server, patience_s: float, limit_ms: int
    ) -> None:
        """The other half is for the answer. Where nothing is kept, no replica is asked."""
        server.box.limit_patience(patience_s)
        server.box.confirm()
        server.send(1)
        server.box.confirm()
        server.box.confirm()
        assert server.limits == [limit_ms]

    def test_a_question_that_meets_a_cut_is_not_repeated(self, server: Server) -> None:
        """The acknowledgements that it asks about are sent again, which is enough."""
        server.send(1)
        server.box.flush()
        probe = server.probe

        def cut_then(limit_ms: int) -> Sequence[Command]:
            server.cut()
            return probe(limit_ms)

        assert server.box.hand_over(server.new_box(), lambda _: False, cut_then)
        server.box.confirm()
        assert server.got == [[1], [1]]
        assert server.box.is_empty


class TestServers:
    """Partitions may move to another server, which gets an outbox of its own."""

    @pytest.mark.parametrize(
        ("patience_s", "has_unanswered", "is_silent", "timeout_s"),
        [(0.5, True, False, LEAVE_S), (0.5, True, True, 0.5), (0.5, False, False, 0.5), (5.0, True, False, 5.0)],
    )
    def test_an_end_gives_a_server_that_is_back_the_time_to_answer(
        self, server: Server, patience_s: float, timeout_s: float, *, has_unanswered: bool, is_silent: bool
    ) -> None:
        """It was away a moment ago, and what it owes an answer would be delivered twice."""
        boxes, server.silent = server.boxes([[1]]), {"b"} if is_silent else set()
        boxes.send(1, Note(1, "b"))
        if not has_unanswered:
            boxes.flush()
            server.timeouts.clear()
        boxes.limit_patience(patience_s)
        boxes.send(1, Note(2, "b"))
        boxes.flush()
        assert set(server.timeouts) == {timeout_s}
        assert set(server.pinged) <= {"b"}
        boxes.close()

    def test_each_server_is_asked_and_waited_for_alone(self, server: Server) -> None:
        """One that lost its connection says nothing of the others."""
        boxes = server.boxes([[0], [1]])
        for number, place in enumerate("ab"):
            boxes.send(number, Note(number, place))
            boxes.flush()
        assert server.got == [[0], [1]]
        assert boxes.is_empty
        server.replicas = 0
        boxes.confirm()
        assert server.got == [[0, "HSET", "WAIT"], [1, "HSET", "WAIT"]]
        server.connections[0].is_cut = True
        assert not boxes.is_empty
        assert [boxes.is_empty_for(number) for number in (0, 1)] == [False, True]
        boxes.attend()
        until(lambda: boxes.is_empty)
        assert server.got[2:] == [[0]]
        boxes.forget()
        for connection in server.connections:
            connection.is_cut = True
        assert boxes.is_empty
        boxes.close()
        until(lambda: all(connection.is_closed for connection in server.connections))

    def test_an_outbox_without_replicas_asks_for_none(self, server: Server) -> None:
        """Most streams need none, and all that is kept is sent again after a failover."""
        box = server.new_box(no_probe)
        for server.now_s in (0.0, 5.0):
            box.send(Note(int(server.now_s)))
        box.confirm()
        assert server.got == [[0, 5]]

    def test_an_outbox_hands_over_what_another_server_has_now(self, server: Server) -> None:
        """The other one sends it again, because its server may lack it. The first keeps the rest."""
        other, probes = server.new_box(), list[int]()
        for number, place in ((1, "a"), (2, "b"), (3, "a")):
            server.box.send(Note(number, place))
        assert not server.box.hand_over(other, lambda _: True, lambda _: ())
        server.box.flush()

        def is_others(sent: Command) -> bool:
            return sent[3] == b"b"

        def probe(limit_ms: int) -> Sequence[Command]:
            probes.append(limit_ms)
            return ()

        server.loaded.clear()
        assert server.box.hand_over(other, is_others, probe)
        assert not other.is_empty
        other.attend()
        assert server.got == [[1, 2, 3], [2]]
        assert server.loaded == [("b", SCRIPT)]
        assert other.is_empty
        server.connections[0].is_cut = True
        server.box.confirm()
        assert server.got[2:] == [[1, 3]]
        assert (probes, server.limits) == ([CONFIRM_MS], [])

    def test_a_script_is_loaded_where_it_goes_and_once_for_each_connection(self, server: Server) -> None:
        """Another server may be away, and would hold up those that are there."""
        server.box.send(Note(1, "a"))
        server.box.send(Note(2, "a"))
        server.box.send(Note(3, "a", "return 2"))
        assert server.loaded == [("a", SCRIPT), ("a", "return 2")]
        server.loaded.clear()
        server.box.flush()
        server.cut()
        server.box.send(Note(4, "b"))
        server.box.flush()
        assert sorted(server.loaded) == sorted((place, text) for place in "ab" for text in (SCRIPT, "return 2"))


class Box:
    """An outbox that notes what its thread does with it, and waits where a test says."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_empty = True
        self.may_go = threading.Event()
        self.may_go.set()
        self.errors: deque[Exception] = deque()
        """The errors that the next calls raise."""

    def send(self, due: Any) -> None:
        """See `Outbox.send`."""
        self._note(f"send {due.number}")

    def flush(self) -> None:
        """See `Outbox.flush`."""
        self._note("flush")
        self.is_empty = True

    def confirm(self) -> None:
        """See `Outbox.confirm`."""
        self._note("confirm")

    def forget(self) -> None:
        """See `Outbox.forget`."""
        self._note("forget")

    def hand_over(self, *_: object) -> bool:
        """See `Outbox.hand_over`."""
        self._note("hand over")
        return self.is_empty

    def limit_patience(self, patience_s: float) -> None:
        """See `Outbox.limit_patience`."""
        self._note(f"limit_patience {patience_s}")

    def close(self) -> None:
        """See `Outbox.close`."""
        self._note("close")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        self.may_go.wait(20)
        if self.errors:
            raise self.errors.popleft()


def thread_of(box: Box, every_s: float = 0.0) -> OutboxThread:
    """Return a thread that empties a box."""
    outbox: Any = box
    return OutboxThread(outbox, every_s)


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """Return a box, whose thread ends afterwards. The thread looks at nothing that it is not told of."""
    monkeypatch.setattr(module, "LOOK_S", 3600.0)
    made = Box()
    yield made
    made.may_go.set()
    until(lambda: not [one for one in threading.enumerate() if one.name == "penstock-outbox"])


def joined(*numbers: int) -> list[SimpleNamespace]:
    """Return acknowledgements that are sent as one, whose number is their sum."""

    def adder(one: SimpleNamespace) -> Callable[[Any], bool]:
        def add(other: Any) -> bool:
            one.number += other.number
            return True

        return add

    made = [SimpleNamespace(number=number) for number in numbers]
    for one in made:
        one.add = adder(one)
    return made


class TestThread:
    """A thread sends, and its caller waits only where it asks for it."""

    def test_an_outbox_without_work_needs_no_thread(self, box: Box) -> None:
        """A member with one server in view, and nothing to say, costs nothing."""
        thread, before = thread_of(box), threading.active_count()
        assert thread.is_empty
        thread.attend()
        thread.confirm()
        thread.flush()
        assert (threading.active_count(), box.calls) == (before, [])
        thread.close()
        assert box.calls == ["close"]

    def test_what_is_sent_is_flushed_and_confirmed_where_it_is_asked_for(self, box: Box) -> None:
        """A replica is asked once, after the last of them."""
        thread = thread_of(box)
        thread.send(Note(1))
        assert all(one.daemon for one in threading.enumerate() if one.name == "penstock-outbox")
        thread.flush()
        assert box.calls == ["send 1", "flush"]
        thread.confirm()
        assert box.calls == ["send 1", "flush", "confirm"]
        thread.send(Note(2))
        thread.forget()
        assert box.calls[3:] == ["send 2", "flush", "forget"]
        thread.send(Note(3))
        until(lambda: box.calls[6:] == ["send 3", "flush"])
        thread.close()

    def test_a_replica_is_asked_after_all_that_was_sent_before(self, box: Box) -> None:
        """The confirmation of a replica covers everything that the caller sent."""
        thread = thread_of(box)
        box.may_go.clear()
        for number in (1, 2, 3):
            thread.send(Note(number))
        until(lambda: box.calls == ["send 1"])
        asking = threading.Thread(target=thread.confirm)
        asking.start()
        until(lambda: thread._is_asked)
        box.may_go.set()
        asking.join(20)
        assert box.calls == ["send 1", "send 2", "send 3", "confirm"]
        thread.close()

    def test_an_outbox_that_lost_its_connection_is_emptied_by_its_thread(self, box: Box) -> None:
        """The loop is in a long step, and does nothing for it."""
        thread = thread_of(box)
        box.is_empty = False
        assert not thread.is_empty
        thread.attend()
        until(lambda: box.is_empty)
        assert box.calls == ["flush"]
        thread.close()

    def test_an_error_is_raised_once_and_the_thread_goes_on(self, box: Box) -> None:
        """The acknowledgements after a refused one must still be sent."""
        thread = thread_of(box)
        box.errors.append(MemberReplaced("by another"))
        thread.send(Note(1))
        until(lambda: thread._error is not None)
        with pytest.raises(MemberReplaced):
            thread.send(Note(2))
        thread.send(Note(3))
        thread.flush()
        assert box.calls == ["send 1", "send 3", "flush"]
        for call in (thread.flush, thread.attend):
            box.errors.append(MemberReplaced("by another"))
            thread.send(Note(4))
            until(lambda: thread._error is not None)
            with pytest.raises(MemberReplaced):
                call()
        thread.close()

    def test_what_comes_soon_after_something_was_sent_is_sent_together(self, box: Box) -> None:
        """An acknowledgement waits until its time, or until a caller waits for it. Then the next has its own time."""
        thread, notes = thread_of(box, 600.0), joined(1, 2, 4, 8, 16, 32)
        thread.send(notes[0])
        until(lambda: box.calls == ["send 1", "flush"])
        for note in notes[1:4]:
            thread.send(note)
            time.sleep(0.01)  # the loop's step
        assert not thread.is_empty
        thread.flush()
        assert box.calls[2:] == ["send 14", "flush"]
        for note in notes[4:]:
            thread.send(note)
            time.sleep(0.01)
        thread.attend()
        until(lambda: box.calls[4:] == ["send 48", "flush"])
        thread.close()

    def test_what_waits_for_its_time_is_sent_though_nobody_waits(self, box: Box) -> None:
        """The loop's next step may be long, and the quota of writers may depend on it."""
        thread = thread_of(box, 0.05)
        for number in (1, 2):
            thread.send(Note(number))
        until(lambda: "send 2" in box.calls)
        thread.close()

    @pytest.mark.parametrize("every_s", [0.0, 600.0])
    def test_what_cannot_be_joined_is_sent_one_by_one(self, box: Box, every_s: float) -> None:
        """Each is of another epoch or partition, for example."""
        thread = thread_of(box, every_s)
        for number in (1, 2, 3):
            thread.send(Note(number))
        thread.flush()
        assert [call for call in box.calls if call != "flush"] == ["send 1", "send 2", "send 3"]
        thread.close()

    def test_a_caller_in_a_hurry_waits_for_its_time_and_a_little(self, box: Box) -> None:
        """The answer of a live server is read in any case."""
        thread = thread_of(box)
        thread.limit_patience(0.0)
        assert box.calls == ["limit_patience 0.0"]
        box.may_go.clear()
        thread.send(Note(1))
        began_s = time.monotonic()
        with pytest.raises(ServerUnavailable, match="has not answered all acknowledgements yet"):
            thread.flush()
        assert time.monotonic() - began_s >= SHORTEST_S
        box.may_go.set()
        thread.flush()
        assert thread.is_empty
        thread.close()
        thread.flush()

    def test_an_outbox_at_work_is_not_handed_over(self, box: Box) -> None:
        """Two senders of one acknowledgement could send an older one last."""
        other: Any = None
        thread = thread_of(box)
        assert thread.hand_over(other, bool, no_probe)
        box.may_go.clear()
        thread.send(Note(1))
        until(lambda: box.calls == ["hand over", "send 1"])
        assert not thread.is_empty
        assert not thread.hand_over(other, bool, no_probe)
        box.may_go.set()
        thread.flush()
        box.is_empty = False
        assert not thread.hand_over(other, bool, no_probe)
        assert box.calls[-1] == "hand over"
        thread.close()

    def test_a_thread_ends_with_its_outbox_and_closes_it_behind_itself(self, box: Box) -> None:
        """The outbox may have connected again since its first close."""
        thread = thread_of(box)
        box.may_go.clear()
        thread.send(Note(1))
        until(lambda: box.calls == ["send 1"])
        closing = threading.Thread(target=thread.close)
        closing.start()
        until(lambda: box.calls == ["send 1", "close"])
        box.may_go.set()
        closing.join(20)
        until(lambda: box.calls == ["send 1", "close", "flush", "close"])
