"""The map of a cluster: which master holds which slot, and where to ask for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from redis import exceptions as foreign

from penstock_common.server.hosts import named_address
from penstock_common.server.pool import ask_once
from penstock_common.server.primary_watcher import QUICK, Address, Watcher
from penstock_common.server.slots import SLOTS, slot_of


class SlotMap:
    """Slot -> address of its master, as the cluster last told it. Threads share it.

    ``CLUSTER SLOTS`` is asked, because Redis 6.2 has no ``CLUSTER SHARDS``.
    """

    def __init__(self, seeds: Sequence[Address], connection_class: type[Any], settings: dict[str, Any]) -> None:
        """Take what a connection to any node needs. No node is asked yet.

        Args:
            seeds: Nodes of the address that the user wrote. They are asked where no known master answers.
            connection_class: redis-py's class of connections, for TLS or without.
            settings: Arguments of that class, without host and port.
        """
        self._seeds, self._connection_class, self._settings = list(seeds), connection_class, settings
        self._lock = threading.Lock()
        self._masters: list[Address | None] = [None] * SLOTS
        self.nodes: list[Address] = []
        """Every node, masters and replicas."""
        self.changes = 0
        """The number of times that a slot got another master. Each may have got several."""
        self._answered: list[Address] = []
        """The node that answered last. It is asked first, because each node that is silent costs `ASK_S`."""

    def masters(self) -> list[Address]:
        """Return every master that holds a slot, in the order of slots."""
        return list(dict.fromkeys(filter(None, self._masters)))

    def first_master(self) -> Address:
        """Return the master of the first slot that has one, or a seed if the cluster names none at the moment."""
        return next(filter(None, self._masters), self._seeds[0])

    def slots(self) -> list[list[range]]:
        """Return the slots of each master, in the order of `masters`."""
        found: dict[Address, list[range]] = {}
        for address, some in groupby(range(SLOTS), key=self._masters.__getitem__):
            together = list(some)
            if address is not None:
                found.setdefault(address, []).append(range(together[0], together[-1] + 1))
        return list(found.values())

    def master_of(self, key: bytes | str) -> Address:
        """Return the master that holds a key's slot, or a seed if the cluster names none at the moment."""
        return self.master_of_slot(slot_of(key))

    def master_of_slot(self, slot: int) -> Address:
        """Return the master that holds a slot, or a seed if the cluster names none at the moment."""
        return self._masters[slot] or self._seeds[0]

    def moved(self, slot: int, address: Address) -> None:
        """Note that a server redirected a request for a slot to this node."""
        if self._masters[slot] != address:
            self._masters[slot] = address
            self.changes += 1

    def refresh(self) -> None:
        """Ask the nodes in turn for the map, and take the first answer.

        Raises:
            redis.ConnectionError: No node answers.
        """
        with self._lock:
            found = []
            for address in dict.fromkeys([*self._answered, *self.masters(), *self.nodes, *self._seeds]):
                try:
                    self._take(self._ask(address), address)
                    self._answered = [address]
                    return
                except (foreign.RedisError, OSError) as error:
                    found.append(f"{address[0]}:{address[1]}: {error}")
            raise foreign.ConnectionError(f"no node of the cluster answers, {', '.join(found)}")

    def _ask(self, address: Address) -> list[Any]:
        connection = self._connection_class(host=address[0], port=address[1], **self._settings | QUICK)
        answer: list[Any] = ask_once(connection, "CLUSTER", "SLOTS")
        return answer

    def _take(self, answer: list[Any], asked: Address) -> None:
        """Take an answer: ranges of slots, each with its master and its replicas."""
        masters: list[Address | None] = [None] * SLOTS
        nodes: list[Address] = []
        try:
            for first, last, master, *replicas in answer:
                if not 0 <= int(first) <= int(last) < SLOTS:  # a list of that many addresses would take all memory
                    raise foreign.InvalidResponse(f"slots {first} to {last}, expected some of 0 to {SLOTS - 1}")
                there = [self._address(node, asked) for node in (master, *replicas)]
                masters[int(first) : int(last) + 1] = [there[0]] * (int(last) - int(first) + 1)
                nodes += there
        except (TypeError, ValueError) as error:
            raise foreign.InvalidResponse(f"CLUSTER SLOTS answered {answer!r:.80}, expected ranges of slots") from error
        is_other = masters != self._masters
        self._masters, self.nodes = masters, list(dict.fromkeys(nodes))
        self.changes += is_other  # after that: who sees the new number sees the new map

    @staticmethod
    def _address(node: Sequence[Any], asked: Address) -> Address:
        """Return a node's address. A node without a host name is at the host that was asked (the specification)."""
        host, port, *_ = node
        return named_address(asked[0] if host in (None, b"", b"?") else host, port)


class MapWatcher(Watcher):
    """A watcher of a cluster's map. It says which node holds no slot any more."""

    def __init__(self, slots: SlotMap, demoted: Callable[[Address], None], is_any_silent: Callable[[], bool]) -> None:
        """Begin.

        Args:
            slots: The map.
            demoted: Called at each look with every node that was a master and is none any more. A thread that had
                chosen the node a moment ago may have connected to it since the last look.
            is_any_silent: Returns whether a node owes an answer.
        """
        self._slots, self._demoted, self._is_any_silent = slots, demoted, is_any_silent
        self._seen = set(slots.masters())
        super().__init__("penstock-slots")

    def is_urgent(self) -> bool:
        """See Watcher."""
        return self._is_any_silent()

    def look(self) -> None:
        """See Watcher."""
        self._slots.refresh()
        now = set(self._slots.masters())
        self._seen |= now
        for address in self._seen - now:
            self._demoted(address)
