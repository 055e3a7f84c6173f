"""Hosts in network namespaces of their own, joined by a router: packets that are lost, links that are cut, slow links.

Each host has one link to the router. All faults are made at the router, so that a host sees what it would see of a real
network. It needs root, ``ip``, ``iptables`` and ``tc``. `why_not` says what is missing.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

Way = Literal["both", "out", "in"]
"""The packets that a fault of a link hits: those that its host sends (out), those that it should receive, or both."""

PREFIX: Final = "penstock"
"""Namespaces are named by it, the process that made them, a number and the host."""
ROUTER: Final = "router"
LEAST_RATE_BITS: Final = 64_000
_CLONE_NEWNET: Final = 0x40000000
_NAME = re.compile(rf"{PREFIX}-(\d+)-\d+-\w+")
_PATH = os.pathsep.join([*os.get_exec_path(), "/usr/sbin", "/sbin"])
_numbers = count()


class Network:
    """Hosts, each in a namespace of its own, until `close`. Also namespaces that dead processes left are removed."""

    def __init__(self, *hosts: str) -> None:
        remove_leftovers()
        self.hosts = hosts
        self._base = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self._rules: dict[str, list[list[str]]] = {host: [] for host in hosts}
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        router = self._namespace(ROUTER)
        _run("ip", "netns", "add", router)
        with self.inside(ROUTER):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for host in self.hosts:
            name, link = self._namespace(host), self._link(host)
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", link, "netns", router)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            gateway = self.address(host).rpartition(".")[0] + ".1"
            _run("ip", "-n", router, "address", "add", f"{gateway}/24", "dev", link)
            _run("ip", "-n", router, "link", "set", link, "up")
            _run("ip", "-n", name, "route", "add", "default", "via", gateway)

    def address(self, host: str) -> str:
        """Return a host's address."""
        return f"10.77.{self.hosts.index(host)}.2"

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """Let this thread be on a host. Its new sockets, and processes and threads that it starts, belong there."""
        with Path("/proc/thread-self/ns/net").open() as here, Path("/run/netns", self._namespace(host)).open() as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def sent_bytes(self, host: str) -> int:
        """Return the bytes that a host has sent, with the headers of its packets."""
        with self.inside(host):
            listed = Path("/proc/thread-self/net/dev").read_text()
        (line,) = (line for line in listed.splitlines() if line.strip().startswith("eth0:"))
        return int(line.split(":")[1].split()[8])

    # --- faults ---

    def lose(self, host: str, share: float, way: Way = "both") -> None:
        """Lose a share of a host's packets, chosen at random."""
        self._drop(host, way, ["-m", "statistic", "--mode", "random", "--probability", f"{share:.6f}"])

    def cut(self, host: str, way: Way = "both") -> None:
        """Lose all packets of a host. No host gets a notice, as if a cable of a distant switch were cut."""
        self._drop(host, way, [])

    def unplug(self, host: str) -> None:
        """Take a host's link down. The router then tells others that the host cannot be reached."""
        _run("ip", "-n", self._namespace(ROUTER), "link", "set", self._link(host), "down")

    def slow(self, host: str, bits_per_s: int, *, burst_bytes: int = 4096, queue_ms: int = 400) -> None:
        """Limit what a host sends, and what it receives.

        ``burst_bytes`` may leave at once. Packets beyond a queue of ``queue_ms`` are lost.
        """
        for name, link in ((self._namespace(host), "eth0"), (self._namespace(ROUTER), self._link(host))):
            rate = f"{max(LEAST_RATE_BITS, bits_per_s)}bit"
            shape = ["rate", rate, "burst", f"{burst_bytes}b", "latency", f"{queue_ms}ms"]
            _run("tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", *shape)

    def heal(self, host: str) -> None:
        """End all faults of a host's link."""
        for rule in self._rules[host]:
            self._iptables("-D", rule)
        self._rules[host].clear()
        _run("ip", "-n", self._namespace(ROUTER), "link", "set", self._link(host), "up")
        for name, link in ((self._namespace(host), "eth0"), (self._namespace(ROUTER), self._link(host))):
            with suppress(OSError):  # it was not slow
                _run("tc", "-n", name, "qdisc", "del", "dev", link, "root")

    def lost(self, host: str) -> int:
        """Return how many of a host's packets were lost since its last `heal`."""
        listed = _run("ip", "netns", "exec", self._namespace(ROUTER), "iptables", "-w", "-nvxL", "FORWARD")
        lines = [line.split() for line in listed.splitlines() if self.address(host) in line.split()]
        return sum(int(words[0]) for words in lines)

    def _drop(self, host: str, way: Way, match: list[str]) -> None:
        ends = {"out": ["-s"], "in": ["-d"], "both": ["-s", "-d"]}[way]
        for end in ends:
            rule = [end, self.address(host), *match, "-j", "DROP"]
            self._iptables("-A", rule)
            self._rules[host].append(rule)

    def _iptables(self, action: str, rule: list[str]) -> None:
        _run("ip", "netns", "exec", self._namespace(ROUTER), "iptables", "-w", action, "FORWARD", *rule)

    # --- the end ---

    def close(self) -> None:
        """Kill the processes of all hosts, but not this one, and remove the namespaces and links."""
        for host in (*self.hosts, ROUTER):
            _remove(self._namespace(host))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _namespace(self, host: str) -> str:
        return f"{self._base}-{host}"

    def _link(self, host: str) -> str:
        return f"to-{self.hosts.index(host)}"


@functools.cache
def why_not() -> str:
    """Return why this process cannot make networks, or '' if it can."""
    if not Path("/proc/thread-self/ns/net").exists():
        return "network namespaces are of Linux"
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "iptables", "tc") if shutil.which(tool, path=_PATH) is None]:
        return f"network namespaces need {', '.join(missing)}, which are not installed"
    try:
        with Network("first", "second") as network:
            network.lose("first", 0.5)
            network.slow("first", 1_000_000)
            network.heal("first")
    except OSError as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


def remove_leftovers() -> None:
    """Remove the namespaces whose process has died."""
    listed = Path("/run/netns")
    for path in sorted(listed.iterdir()) if listed.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not Path("/proc", match[1]).exists():
            _remove(path.name)


def _remove(namespace: str) -> None:
    if not Path("/run/netns", namespace).exists():
        return
    with suppress(OSError):  # another process removes it, too
        for pid in map(int, _run("ip", "netns", "pids", namespace).split()):
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _run("ip", "netns", "del", namespace)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*command: str) -> str:
    """Return what a command printed. Raises OSError with its words if it failed."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=30, env={**os.environ, "PATH": _PATH}
    )
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
