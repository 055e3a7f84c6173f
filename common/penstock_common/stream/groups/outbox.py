"""Sends acknowledgements without making the training loop wait for each answer.

An acknowledgement sets bits and removes pending ids, so after a broken connection it is sent again. An answered one is
kept until a replica has it, because a replica that takes over may lack it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

from redis.exceptions import NoScriptError, ResponseError

from penstock_common.errors import PenstockError, ServerUnavailable
from penstock_common.server.channel import REPLY_TIMEOUT_S, Channel, Command, Reply
from penstock_common.server.connection import open_channels
from penstock_common.server.error_translation import translate_reply
from penstock_common.server.slots import key_of
from penstock_common.stream.commands import Client, ScriptCall, sha_of
from penstock_common.stream.groups.losses import ServerRuns
from penstock_common.stream.groups.positions import has_lost_place, refusal_of
from penstock_common.stream.groups.roster import Membership, rejoin
from penstock_common.waiting import LEAVE_S, OUTAGE_S, Notify, Outage, to_stderr

UNANSWERED = 8
"""Acknowledgements under way at once. Those that a crash of the server loses are delivered again."""
SHORTEST_S = 0.3
"""The shortest wait for an answer, so that the answer of a live server is read even when no time is left."""
KEPT = 1024
"""Answered acknowledgements that are kept. A server loses its newest writes, so the newest ones are enough."""
ASK_EVERY_S = 1.0
"""The time between two questions whether a replica has the acknowledgements."""
ASK_MS = 20
"""The longest time that such a question holds up the acknowledgements behind it."""
LOOK_S = 0.5
"""The interval at which a thread checks whether its connection broke. The loop may be in a long step at the time."""
CONFIRM_MS = 1000
"""The longest wait for a replica at the end of an epoch, and when a member leaves."""

Probe: TypeAlias = Callable[[int], Sequence[Command]]
"""Returns a write and a WAIT that lasts this many milliseconds, or nothing where no replica is needed."""


def no_probe(limit_ms: int) -> Sequence[Command]:
    """Ask for no replica. Acknowledgements are kept as long as there is space."""
    return ()


def is_confirmed(wait: Command, reply: Reply) -> bool:
    """Return whether as many replicas as a WAIT asked for have everything that its connection wrote before it."""
    return isinstance(reply, int) and reply >= int(bytes(wait[1]))


class Due(Protocol):
    """An acknowledgement that may be sent together with others."""

    def add(self, other: object) -> bool:
        """Take over what another one acknowledges. Return False if one call cannot do both."""

    def call(self) -> ScriptCall:
        """Return the call. It may be sent twice."""


class Outboxes:
    """The outboxes of one member, one for each server. A server that is away delays only its own acknowledgements.

    Partitions that move to another server get an outbox of their own.
    """

    def __init__(
        self,
        client: Client,
        who: Membership,
        servers: Sequence[Sequence[int]],
        *,
        notify: Notify = to_stderr,
        probe_of: Callable[[Sequence[int]], Probe] = lambda _: no_probe,
        runs: ServerRuns | None = None,
        every_s: float = 0.0,
    ) -> None:
        """``servers`` has the numbers of the partitions on each server, and ``probe_of`` gives the probe for one.

        ``runs`` names the server of a refusal that came back older. What comes within ``every_s`` is sent together.
        """
        self._client, self._who, self._notify = client, who, notify
        self._probe_of, self._runs, self._every_s = probe_of, runs, every_s
        self._servers, self._moves, self._is_hurried = list(servers), client.moves, False
        self._splitting = threading.Lock()
        boxes = [self._box(numbers) for numbers in servers]
        is_plain = len(boxes) == 1 and not every_s
        self._boxes: list[Outbox | OutboxThread] = (
            [*boxes] if is_plain else [OutboxThread(box, every_s) for box in boxes]
        )
        self._of_partitions = {number: box for box, group in zip(self._boxes, servers, strict=True) for number in group}

    def _box(self, numbers: Sequence[int]) -> Outbox:
        what, probe = self._who.stream.named(numbers), self._probe_of(numbers)
        return Outbox(self._client, self._who, notify=self._notify, what=what, probe=probe, runs=self._runs)

    def send(self, partition: int, due: Due) -> None:
        """Send a script whose keys are of a partition. See `Outbox.send`."""
        if self._client.moves != self._moves:
            self._split()
        self._of_partitions[partition].send(due)

    @property
    def is_empty(self) -> bool:
        """True once every acknowledgement was answered."""
        return all(box.is_empty for box in self._boxes)

    def is_empty_for(self, partition: int) -> bool:
        """Return whether the server of a partition has answered every acknowledgement."""
        return self._of_partitions[partition].is_empty

    def attend(self) -> None:
        """See that what was lost with a connection is sent again, without a wait for a server among several."""
        for box in self._boxes:
            box.attend()
        self._split()

    def flush(self) -> None:
        """Return once every acknowledgement is on its server."""
        for box in self._boxes:
            box.flush()

    def confirm(self) -> None:
        """Flush, and wait for a limited time until a replica of each server has everything."""
        for box in self._boxes:
            box.confirm()

    def forget(self) -> None:
        """Send nothing of what was answered again, because what it says is taken back."""
        for box in self._boxes:
            box.forget()

    def limit_patience(self, patience_s: float) -> None:
        """Repeat a request to a lost server for this time at most, from now on.

        A server that answers, and owes the answer to an acknowledgement, was away a moment ago. It has `LEAVE_S`.
        """
        self._is_hurried = True
        for box, numbers in zip(self._boxes, self._servers, strict=True):
            roster = self._who.stream.partitions[numbers[0]].roster
            is_back = patience_s < LEAVE_S and not box.is_empty and self._answers(roster)
            box.limit_patience(LEAVE_S if is_back else patience_s)

    def _split(self) -> None:
        """Give partitions that moved to other servers outboxes of their own."""
        if self._is_hurried or (moves := self._client.moves) == self._moves:
            return
        with self._splitting:
            for at, numbers in enumerate([*self._servers]):
                _, *others = self._client.by_server([self._who.stream.partitions[one].roster for one in numbers])
                for some in others:
                    if not self._split_off(at, [numbers[one] for one in some]):
                        return
            self._moves = moves

    def _split_off(self, at: int, some: Sequence[int]) -> bool:
        """Give some partitions of an outbox another one. Return False while that outbox is at work."""
        old, new = self._boxes[at], self._box(some)
        if isinstance(old, Outbox):
            old.flush()  # the next acknowledgement would wait for the same servers
        left = [number for number in self._servers[at] if number not in some]
        where = self._client.node_of(self._who.stream.partitions[some[0]].roster).where
        if not old.hand_over(new, lambda sent: self._client.node_of(sent[3]).where == where, self._probe_of(left)):
            return False
        thread = OutboxThread(new, self._every_s)
        thread.attend()
        if isinstance(old, Outbox):  # from now on the loop waits for no server
            old = OutboxThread(old, self._every_s)
        self._boxes[at], self._servers[at] = old, left
        self._boxes.append(thread)
        self._servers.append(some)
        self._of_partitions |= dict.fromkeys(left, old) | dict.fromkeys(some, thread)
        return True

    def _answers(self, key: str) -> bool:
        try:
            self._client.node_of(key).ping()
        except PenstockError:
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        for box in self._boxes:
            box.close()


class Outbox:
    """A sender of one member's acknowledgements, in order, on a connection of its own.

    `flush` waits until all are answered.
    """

    def __init__(
        self,
        client: Client,
        who: Membership,
        *,
        notify: Notify = to_stderr,
        what: str = "",
        probe: Probe = no_probe,
        clock: Callable[[], float] = time.monotonic,
        runs: ServerRuns | None = None,
    ) -> None:
        """Begin. Messages name what is acknowledged as ``what``, or as the whole stream if it is ''."""
        self._client, self._who, self._probe, self._clock = client, who, probe, clock
        self._runs = runs or ServerRuns(client, who.stream, [])
        self._asked_s = clock()
        self._outage = Outage(notify, OUTAGE_S, "acknowledging", clock, what=what)
        self._channel: Channel | None = None
        self._unanswered: deque[Command] = deque()
        """The requests under way, in order: acknowledgements and probes."""
        self._answered: deque[Command] = deque(maxlen=KEPT)
        """The newest acknowledgements that were answered and are not known to be on a replica."""
        self._scripts: dict[str, bool] = {}
        """Script -> whether it was loaded since the connection was made."""
        self._is_touched = False
        """Whether the last probe wrote something, so that its WAIT means something."""

    def send(self, due: Due) -> None:
        """Send a script that may run twice; raises ServerUnavailable if the server stays away.

        A later call raises its refusal: MemberReplaced, GroupNotFound, DamagedKey, or ReplyError for any other cause.
        """
        call = due.call()
        self._scripts.setdefault(call.script, False)
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in (*call.keys, *call.arguments)]
        command = (b"EVALSHA", sha_of(call.script), b"%d" % len(call.keys), *parts)
        commands: list[Command] = [command]
        if self._clock() - self._asked_s >= ASK_EVERY_S:
            self._asked_s = self._clock()
            commands += self._probe(ASK_MS)
        self._send(commands)
        while len(self._unanswered) >= UNANSWERED:  # last, because it raises the refusal of an earlier one
            self._read_one()

    def _send(self, commands: Sequence[Command]) -> None:
        try:
            self._unanswered += commands
            # a connection that is cut shows when it is used
            if self._channel is None and (self._answered or len(self._unanswered) > len(commands)):
                self._send_again(None)
                return
            try:
                self._connected().send(commands)
            except ServerUnavailable as error:
                self._send_again(error)
        except PenstockError:
            raise
        except BaseException:  # Ctrl-C may have come before all was sent, so all is sent again
            self.close()
            raise

    @property
    def is_empty(self) -> bool:
        """True once every acknowledgement was answered, and no connection broke since that may have lost it."""
        return not self._unanswered and not self._is_forgetful

    @property
    def _is_forgetful(self) -> bool:
        """Return whether the server that has the kept acknowledgements may be gone, or is not connected to."""
        return bool(self._answered) and (self._channel is None or self._channel.is_cut)

    def attend(self) -> None:
        """See that what was lost with a connection is sent again. It reads every answer, which shows what was lost."""
        self.flush()

    def flush(self) -> None:
        """Return once every acknowledgement is on the server."""
        if self._is_forgetful:
            self._send_again(None)
        while self._unanswered:
            self._read_one()

    def confirm(self) -> None:
        """Flush, and wait for a limited time until a replica has everything."""
        self.flush()
        # at least 1: WAIT takes 0 for ever, and a caller in a hurry waits for the answer, too
        limit_ms = max(1, min(CONFIRM_MS, int(self._outage.patience_s * 500)))
        if self._answered and (probe := self._probe(limit_ms)):
            self._send(probe)
            self.flush()

    def forget(self) -> None:
        """Send nothing of what was answered again, because what it says is taken back."""
        self._answered.clear()

    def hand_over(self, other: Outbox, is_others: Callable[[Command], bool], probe: Probe) -> bool:
        """Let another, unused outbox send some of what is kept again. Return False while this outbox is at work.

        ``probe`` is this outbox's from now on.
        """
        if not self.is_empty:
            return False
        other.take_over([sent for sent in self._answered if is_others(sent)], self._scripts)
        self._answered = deque([sent for sent in self._answered if not is_others(sent)], maxlen=KEPT)
        self._probe = probe
        return True

    def take_over(self, sent: Sequence[Command], scripts: Iterable[str]) -> None:
        """Keep these acknowledgements, of some of these scripts. They are sent again, because it costs little."""
        self._answered.extend(sent)
        self._scripts |= dict.fromkeys(scripts, False)

    def limit_patience(self, patience_s: float) -> None:
        """Repeat a request to a lost server for this time at most, from now on."""
        self._outage.forget()  # an outage that lasts already would leave no time
        self._outage.limit_patience(patience_s)

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _read_one(self) -> None:
        try:
            self._take_reply()
        except PenstockError:
            raise
        except BaseException:  # Ctrl-C may have come after the reply was read, so all is sent again
            self.close()
            raise

    def _take_reply(self) -> None:
        sent = self._unanswered[0]
        if self._channel is None:  # abandoned in an outage: nothing is under way on a new connection
            self._send_again(None)
        try:
            reply = self._connected().read(min(REPLY_TIMEOUT_S, max(self._outage.patience_s, SHORTEST_S)))
        except ServerUnavailable as error:
            self._send_again(error)
            return
        if not _is_acknowledgement(sent):
            self._unanswered.popleft()
            self._take_probed(sent, reply)
            return
        if isinstance(reply, ResponseError):
            self._take_refusal(reply)
            return
        self._unanswered.popleft()
        # below 0 the epoch has ended, and nothing of it is acknowledged any more
        if isinstance(reply, int) and reply >= 0:
            self._answered.append(sent)
        self._outage.over()

    def _take_refusal(self, reply: ResponseError) -> None:
        """Send again what another try may let through. Else raise the error of the refusal."""
        if isinstance(reply, NoScriptError) or "NOSCRIPT" in str(reply):  # restarted, or SCRIPT FLUSH
            self._send_again(None)
            return
        # only a rank's report is refused so, and that goes to the first partition
        if has_lost_place(reply) and self._rejoins():
            self._send_again(None)
            return
        failure = self._failure_of(reply)
        if not isinstance(failure, ServerUnavailable):
            self._unanswered.popleft()  # it is answered, though with a refusal
            raise failure
        self._send_again(failure)

    def _rejoins(self) -> bool:
        """Return whether the member is on the first roster again, or False if it must end."""
        while True:
            try:
                return rejoin(self._client, self._who, self._who.stream.partitions[0], self._runs.is_replaced)
            except ServerUnavailable as error:
                self._outage.bear(error)

    def _failure_of(self, reply: ResponseError) -> PenstockError:
        """Return the error of a refused acknowledgement."""
        damage: PenstockError | None = self._client.explain_refusal(reply, self._unanswered[0])
        if damage is not None:
            return damage
        if refusal := refusal_of(reply, self._who):
            return self._runs.explained(refusal, self._who.stream.partitions[0])
        return translate_reply(reply, self._client.node_of(key_of(self._unanswered[0])))

    def _take_probed(self, sent: Command, reply: Reply) -> None:
        """Take an answer to a probe. After a refusal the acknowledgements are kept, and a replica is asked again."""
        if sent[0] != b"WAIT":
            self._is_touched = reply == 1
        elif self._is_touched and is_confirmed(sent, reply):
            self._answered.clear()

    def _connected(self) -> Channel:
        if self._channel is None:
            self._scripts = dict.fromkeys(self._scripts, False)
            self._channel = open_channels(self._client)
        if not all(self._scripts.values()):
            # where they go: another server may be away, and after a move some go to a server that lacks the script
            keys = [command[3] for command in self._unanswered if _is_acknowledgement(command)]
            nodes = {(node := self._client.node_of(key)).where: node for key in keys}
            for script in [script for script, is_loaded in self._scripts.items() if not is_loaded]:
                for node in nodes.values():
                    node.script_load(script)
                self._scripts[script] = True
        return self._channel

    def _send_again(self, error: ServerUnavailable | None) -> None:
        """Send everything unanswered once more, on a new connection, and before it what the server may have lost."""
        self._unanswered = deque([*self._answered, *filter(_is_acknowledgement, self._unanswered)])
        self._answered.clear()  # after that: Ctrl-C may come between them
        while True:
            self.close()
            if error is not None:
                self._outage.bear(error)
            try:
                if self._unanswered:
                    self._connected().send(list(self._unanswered))
                return
            except ServerUnavailable as again:
                error = again


def _is_acknowledgement(command: Command) -> bool:
    """Return whether a command is an acknowledgement, and no part of a probe."""
    return command[0] == b"EVALSHA"


class OutboxThread:
    """An outbox that a thread of its own empties, from the first acknowledgement on.

    The caller does not wait for its server.
    """

    def __init__(self, outbox: Outbox, every_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Send together what comes within ``every_s`` after something was sent, unless a caller waits for it."""
        self._outbox, self._every_s, self._clock = outbox, every_s, clock
        self._changed = threading.Condition()
        self._calls: deque[Due] = deque()
        self._is_busy = self._is_closed = self._is_asked = self._is_hurried = False
        self._next_s = clock()
        """The time from which the next one may be sent."""
        self._error: Exception | None = None
        """The error that a later call raises. The thread continues after it."""
        self._limit_s: float | None = None
        """The longest wait of `flush`, in seconds. None is for ever."""
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """True once every acknowledgement was answered."""
        with self._changed:
            return not self._is_busy and not self._calls and self._outbox.is_empty

    def send(self, due: Due) -> None:
        """Send a script that may run twice. A later call raises its refusal, or that its server stays away."""
        with self._changed:
            self._raise()
            if self._every_s and self._calls and self._calls[-1].add(due):
                return
            self._calls.append(due)
            self._begin()
            if not self._is_early:  # else the thread wakes without a notice
                self._changed.notify_all()

    def attend(self) -> None:
        """See `Outbox.attend`. The thread does it, at once."""
        with self._changed:
            self._raise()
            self._is_hurried = bool(self._calls)
            if not self._outbox.is_empty:
                self._begin()
            self._changed.notify_all()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="penstock-outbox", daemon=True)
            self._thread.start()

    def hand_over(self, other: Outbox, is_others: Callable[[Command], bool], probe: Probe) -> bool:
        """See `Outbox.hand_over`."""
        with self._changed:
            is_idle = not (self._is_busy or self._calls or self._is_asked)
            return is_idle and self._outbox.hand_over(other, is_others, probe)

    def confirm(self) -> None:
        """See `Outbox.confirm`."""
        with self._changed:
            self._is_asked = self._thread is not None
        self.flush()

    def forget(self) -> None:
        """See `Outbox.forget`."""
        self.flush()
        self._outbox.forget()

    def flush(self) -> None:
        """Return once every acknowledgement is on the server."""
        with self._changed:
            self._is_hurried = bool(self._calls)
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: self._is_done or self._error is not None, self._limit_s)
            self._raise()
        if not is_over:
            raise ServerUnavailable("a server has not answered all acknowledgements yet, and nobody waits any longer")

    def limit_patience(self, patience_s: float) -> None:
        """Repeat a request to a lost server for this time at most, from now on. Wait as long for an answer."""
        self._limit_s = patience_s + SHORTEST_S
        self._outbox.limit_patience(patience_s)

    def close(self) -> None:
        """End the thread soon, and close the connection."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._outbox.close()

    @property
    def _is_early(self) -> bool:
        return not self._is_hurried and self._clock() < self._next_s

    @property
    def _is_done(self) -> bool:
        is_idle = not (self._is_busy or self._calls or self._is_asked)
        return self._is_closed or (is_idle and self._outbox.is_empty)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._is_closed and (self._error is not None or self._is_done or self._is_early):
                    early_s = self._next_s - self._clock()
                    self._changed.wait(early_s if early_s > 0 else LOOK_S)
                if self._is_closed:
                    break
                self._is_busy = True
                due = self._calls.popleft() if self._calls else None
                self._is_hurried &= bool(self._calls)
                self._next_s = self._clock() + self._every_s
                is_asked, self._is_asked = self._is_asked and not self._calls, self._is_asked and bool(self._calls)
            try:
                if due is not None:
                    self._outbox.send(due)
                if is_asked:
                    self._outbox.confirm()
                elif not self._calls:
                    self._outbox.flush()
            except Exception as error:
                with self._changed:
                    self._error = error
        self._outbox.close()  # it may have connected again
