"""The hosts of a run with networks: who is on which, the faults of their links, and a trainer far from the server."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from types import TracebackType
from typing import Final, Self

from chaos.networks import Network
from chaos.schedule import Fault

OPERATOR, SERVER, FAR = "operator", "server", "far"
OF_ROLE: Final = {"dispatcher": "makers", "host": "helper", "feeder": "feeder"}
"""Role -> the host of its processes."""
TRAINERS: Final = ("first", "second", FAR)
"""The hosts of trainers, in turn."""
FAULTY: Final = (SERVER, *OF_ROLE.values(), *TRAINERS)
"""The hosts whose links are faulty. The operator's is not."""
RELAY_PORT, RELAY_DELAY_MS = 7000, 20
SETTLED_NS: Final = 1_000_000_000
"""The time after a fault of a link and its length again, in which TCP may still wait to send something again."""

Begun = tuple[str, float, Callable[[], None]] | None
"""The name of a fault that was begun, its length in s and what ends it, or None if no host is free."""


class Links:
    """The network of a run. ``cuts`` has the times in which each host may have been without the server."""

    def __init__(self) -> None:
        self.network = Network(OPERATOR, *FAULTY)
        self.cuts: dict[str, list[tuple[int, int]]] = {host: [] for host in (OPERATOR, *FAULTY)}
        self._faulty: dict[str, int] = {}
        """Host -> when its fault began."""
        self._turns = cycle(TRAINERS)
        self._relay: subprocess.Popen[str] | None = None

    def next_host(self) -> str:
        """Return the host of the next trainer."""
        return next(self._turns)

    def start_relay(self, port: int) -> None:
        """Start the relay to the server, through which trainers on the far host connect."""
        target = f"{self.network.address(SERVER)}:{port}"
        command = [sys.executable, "-m", "chaos.relay", str(RELAY_PORT), target, str(RELAY_DELAY_MS)]
        with self.network.inside(FAR):
            self._relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        self._relay.stdout.readline()

    def relayed(self, url: str) -> str:
        """Return the address of the relay, for the server's own address."""
        return f"{url.rpartition(':')[0]}:{RELAY_PORT}"

    # --- faults ---

    def lose(self, fault: Fault) -> Begun:
        """Lose one to five of a hundred packets of a host. TCP sends them again, so this excuses nothing."""
        host, share = self._free(fault), 0.01 + 0.04 * fault.length
        if not host:
            return None
        self.network.lose(host, share)
        self._faulty[host] = 0
        return f"{share:.1%} of {host}", 5 + 5 * fault.length, partial(self._end, host)

    def cut(self, fault: Fault) -> Begun:
        """Lose all packets of a host."""
        return self._begin(fault, "", self.network.cut)

    def cut_one_way(self, fault: Fault) -> Begun:
        """Lose all packets that a host sends, or all that it should receive."""
        if fault.coin:
            return self._begin(fault, ", what it sends", partial(self.network.cut, way="out"))
        return self._begin(fault, ", what it receives", partial(self.network.cut, way="in"))

    def unplug(self, fault: Fault) -> Begun:
        """Take the link of a host down."""
        return self._begin(fault, "", self.network.unplug)

    def slow(self, fault: Fault) -> Begun:
        """Limit the rate of a host."""
        rate = 4_000_000 if fault.coin else 500_000
        return self._begin(fault, f" to {rate / 1e6:g} Mbit/s", partial(self.network.slow, bits_per_s=rate))

    def _begin(self, fault: Fault, what: str, do: Callable[[str], None]) -> Begun:
        if not (host := self._free(fault)):
            return None
        do(host)
        self._faulty[host] = time.monotonic_ns()
        seconds = 0.3 + 7 * fault.length
        return f"{host}{what} for {seconds:.1f} s", seconds, partial(self._end, host)

    def _end(self, host: str) -> None:
        self.network.heal(host)
        began, now = self._faulty.pop(host), time.monotonic_ns()
        if began:
            self.cuts[host].append((began, 2 * now - began + SETTLED_NS))

    def _free(self, fault: Fault) -> str:
        free = [host for host in FAULTY if host not in self._faulty]
        return free[int(fault.pick * len(free))] if free else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
        self.network.close()
