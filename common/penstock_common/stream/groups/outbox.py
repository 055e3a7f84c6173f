"""Sends acknowledgements without making the training loop wait for each answer.

An acknowledgement sets bits and removes pending ids, so after a broken connection it is sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from redis.exceptions import NoScriptError, ResponseError

from penstock_common.errors import ServerUnavailable
from penstock_common.server.channel import REPLY_TIMEOUT_S, Channel, Command
from penstock_common.server.connection import open_channel
from penstock_common.server.error_translation import translate_reply
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Arg, Client, sha_of
from penstock_common.stream.damage import damage_of
from penstock_common.stream.groups.ledger import Ranges, acknowledgement
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest
from penstock_common.waiting import OUTAGE_S, Notify, Outage, to_stderr

_ACKNOWLEDGE = load_script("acknowledge")

UNANSWERED = 8
"""Acknowledgements under way at once. Those that a crash of the server loses are delivered again."""
SHORTEST_S = 0.3
"""The shortest wait for an answer, so that the answer of a live server is read even when no time is left."""


class Outbox:
    """A sender of acknowledgements, in order, on a connection of its own. `flush` waits until all are answered."""

    def __init__(self, client: Client, *, notify: Notify = to_stderr) -> None:
        self._client = client
        self.patience_s = OUTAGE_S
        """The seconds for which a request to a lost server is repeated."""
        self._outage = Outage(notify, doing="acknowledging")
        self._channel: Channel | None = None
        self._unanswered: deque[Command] = deque()
        self._scripts: dict[str, bool] = {}
        """Script -> whether it was loaded since the connection was made."""

    def acknowledge(
        self,
        partition: PartitionKeys,
        manifest: Manifest,
        group: str,
        ids: Sequence[bytes],
        ranges: Mapping[int, Ranges],
    ) -> None:
        """Send what `ledger.acknowledge` does; raises ServerUnavailable if the server stays away."""
        self.send(_ACKNOWLEDGE, *acknowledgement(partition, manifest, group, ids, ranges))

    def send(self, script: str, keys: Sequence[str], args: Sequence[Arg]) -> None:
        """Send a script that may run twice. A later call raises its refusal, as ReplyError or DamagedKey."""
        self._scripts.setdefault(script, False)
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in (*keys, *args)]
        command = (b"EVALSHA", sha_of(script), b"%d" % len(keys), *parts)
        while len(self._unanswered) >= UNANSWERED:
            self._read_one()
        self._unanswered.append(command)
        try:
            self._connected().send([command])
        except ServerUnavailable as error:
            self._send_again(error)

    @property
    def is_empty(self) -> bool:
        """True once every acknowledgement was answered."""
        return not self._unanswered

    def flush(self) -> None:
        """Return once every acknowledgement is on the server."""
        while self._unanswered:
            self._read_one()

    def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _read_one(self) -> None:
        if self._channel is None:  # abandoned in an outage: nothing is under way on a new connection
            self._send_again(None)
        try:
            reply = self._connected().read(min(REPLY_TIMEOUT_S, max(self.patience_s, SHORTEST_S)))
        except ServerUnavailable as error:
            self._send_again(error)
            return
        if type(reply) is int:  # the usual case
            self._unanswered.popleft()
            self._outage.over()
            return
        if isinstance(reply, NoScriptError) or "NOSCRIPT" in str(reply):  # restarted, or SCRIPT FLUSH
            self._send_again(None)
            return
        if isinstance(reply, ResponseError):
            failure = damage_of(self._client, reply, self._unanswered[0]) or translate_reply(reply, self._client)
            if not isinstance(failure, ServerUnavailable):
                self._unanswered.popleft()  # it is answered, though with a refusal
                raise failure
            self._send_again(failure)
            return
        self._unanswered.popleft()
        self._outage.over()

    def _connected(self) -> Channel:
        if self._channel is None:
            self._scripts = dict.fromkeys(self._scripts, False)
            self._channel = open_channel(self._client)
        if not all(self._scripts.values()):
            for script in [script for script, is_loaded in self._scripts.items() if not is_loaded]:
                self._client.script_load(script)
                self._scripts[script] = True
        return self._channel

    def _send_again(self, error: ServerUnavailable | None) -> None:
        """Send everything unanswered once more, on a new connection."""
        while True:
            self.close()
            if error is not None:
                self._outage.patience_s = self.patience_s
                self._outage.bear(error)
            try:
                if self._unanswered:
                    self._connected().send(list(self._unanswered))
                return
            except ServerUnavailable as again:
                error = again
