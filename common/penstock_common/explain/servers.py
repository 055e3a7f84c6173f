"""The servers of streams, looked at again and again: what each holds, and since when one does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from penstock_common.errors import ServerUnavailable
from penstock_common.explain.snapshot import ServerSnapshot
from penstock_common.server.nodes import NodeState, look_at_nodes
from penstock_common.stream.commands import Client
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.servers.suitability import ServerMemory, memory_of
from penstock_common.stream.streams import Stream


class PartitionsAway(ServerUnavailable):
    """A server with partitions of a stream does not answer, while the others may answer."""


class ServerLooks:
    """Repeated looks at all servers that hold keys.

    A server that does not answer is named, and not waited for. One server of its own raises its failures.
    """

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._states: list[NodeState] = []
        self._since_s: dict[str, float] = {}
        """Address of each server that does not answer -> the time of the first look that found it so."""
        self._addresses: dict[str, dict[int, str]] = {}
        """Stream -> partition -> address, as last seen."""

    def look(self) -> Sequence[NodeState]:
        """Ask every server now."""
        self._states = []  # nothing is known while one server of its own is away
        self._states, now = look_at_nodes(self._client), self._clock()
        away = [state.where for state in self._states if state.failure]
        self._since_s = {where: self._since_s.get(where, now) for where in away}
        return self._states

    def require(self, name: str) -> None:
        """Raise PartitionsAway if the stream's own keys, or partitions of it, are on a server that is away."""
        if not self._since_s:
            return
        own = self._client.node_of(StreamKeys(name).meta).where
        for state in self._states:
            lost = [partition for partition, where in self._addresses.get(name, {}).items() if where == state.where]
            if state.failure and (lost or state.where == own):
                raise PartitionsAway(self._explain(name, state, lost))

    def servers_of(self, stream: Stream) -> tuple[ServerSnapshot, ...]:
        """Return the servers as they were at the last look, with this stream's partitions.

        Raises:
            PartitionsAway: One of them is away.
        """
        self._addresses[stream.name] = {
            partition.number: self._client.node_of(partition.roster).where for partition in stream.partitions
        }
        self.require(stream.name)
        return self.servers(self._addresses[stream.name])

    def servers(self, addresses: dict[int, str] | None = None) -> tuple[ServerSnapshot, ...]:
        """Return the servers as they were at the last look, with the partitions at these addresses."""
        now = self._clock()
        return tuple(
            ServerSnapshot(
                where=state.where,
                role=str((state.info or {}).get("role", "")),
                memory=memory_of(state.info, self._client.memory_bytes)
                if state.info is not None
                else ServerMemory(0, 0, ""),
                replicas=state.replicas,
                partitions=tuple(number for number, where in (addresses or {}).items() if where == state.where),
                failure=state.failure,
                away_s=now - self._since_s.get(state.where, now),
                refusal=state.refusal,
            )
            for state in self._states
        )

    def _explain(self, name: str, state: NodeState, lost: list[int]) -> str:
        away_s = self._clock() - self._since_s[state.where]
        numbers = f"partition{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))} of " if lost else ""
        verb = "have" if len(lost) > 1 else "has"
        since = f"since {away_s:.0f} s " if away_s >= 1 else ""  # a first look does not know since when
        return f"{since}{numbers}stream {name!r} {verb} no master that answers: {state.failure}"
