"""``python -m benchmarks.hosts``: the share of a link that a stream reaches between hosts, by payload and compression.

A producer, a server and two trainers have a network namespace each, and a link each to a router (`chaos.networks`).
Both ways of each link are limited by tbf. Plain sockets between the producer's host and the server's show first what
such a link carries. Each trainer has a group of its own, so the server sends each byte twice. With ``--shared`` both
are members of one group, and the server sends each byte once.

A run writes without an end. It is measured for some seconds once both trainers have batches. Then the producer stops,
the trainers read the rest, and the audit must be clean.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.arguments import whole_number
from benchmarks.command import penstock
from benchmarks.compression import kinds
from benchmarks.cpu import running_seconds
from benchmarks.machine import describe_machine, progress
from benchmarks.spread import spread, table
from benchmarks.trainers import QUIET
from chaos.networks import Network, why_not
from penstock import EmbeddedServer, Loader, Tuning, Writer

PRODUCER, SERVER = "producer", "server"
TRAINERS: Final = ("first", "second")
COMPRESSIONS: Final = ("none", "zstd", "blosc2")
SAMPLE_BYTES, BATCH = 150_528, 64
BUDGET_BYTES = 64 << 20
WARM_S = 1.0
"""The time from the first batches to the start of the clock. Connections are at their rate then."""
PATIENCE_S = 60.0
QUEUE_MS = 20
"""The queue of a link: packets beyond it are lost."""
BURST_S, LEAST_BURST_BYTES = 0.001, 256 << 10
"""A burst holds what the link carries in a millisecond, and several packets of 64 kB, as veth has them."""
RECEIVED_BYTES = 1 << 20


@dataclass(frozen=True)
class LinkedCase:
    """One row of the table."""

    gigabits: int
    payload: str
    compression: str


@dataclass(frozen=True)
class LinkedRun:
    """The figures of one run, in its seconds on the clock."""

    producer_bits_per_s: float
    """All bits that left the producer's host."""
    server_bits_per_s: float
    """All bits that left the server's host."""
    trainer_samples_per_s: tuple[float, ...]
    producer_cpu: float
    """CPU s for each GB of tensors that were written."""
    trainer_cpu: float
    """CPU s for each GB of tensors that were read."""
    busy: float
    """The share of all cores that was in use, by processes and by the kernel."""


@contextmanager
def hosts(gigabits: int) -> Iterator[Network]:
    """Provide the hosts, with links of one rate."""
    with Network(PRODUCER, SERVER, *TRAINERS) as network:
        for host in network.hosts:
            rate = gigabits * 10**9
            burst = max(LEAST_BURST_BYTES, int(rate / 8 * BURST_S))
            network.slow(host, rate, burst_bytes=burst, queue_ms=QUEUE_MS)
        yield network


# --- plain sockets ---


def plain(network: Network, seconds: float) -> tuple[float, float]:
    """Return the bits that a plain socket carries from the producer's host to the server's, and the busy cores."""
    context = multiprocessing.get_context("fork")
    with network.inside(SERVER), socket.create_server((network.address(SERVER), 0)) as listener:
        address = listener.getsockname()
        receiver = context.Process(target=_receive, args=(listener,), daemon=True)
        receiver.start()
    with network.inside(PRODUCER):
        sender = context.Process(target=_send, args=(address,), daemon=True)
        sender.start()
    try:
        time.sleep(min(WARM_S, seconds))
        before, began = _Counters(network), time.monotonic()
        time.sleep(seconds)
        after, ended = _Counters(network), time.monotonic()
    finally:
        for process in (sender, receiver):
            process.kill()
            process.join()
    return (after.sent[PRODUCER] - before.sent[PRODUCER]) * 8 / (ended - began), _busy(before, after)


def _receive(listener: socket.socket) -> None:
    link, _ = listener.accept()
    memory = bytearray(RECEIVED_BYTES)
    while link.recv_into(memory):
        pass


def _send(address: tuple[str, int]) -> None:
    payload = bytes(RECEIVED_BYTES)
    with socket.create_connection(address) as link:
        while True:
            link.sendall(payload)


# --- a stream ---


class SharedCounts:
    """Samples that processes have written and read, in memory that they share."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.written = context.Value("q", 0, lock=False)
        self.read = [context.Value("q", 0, lock=False) for _ in TRAINERS]
        self.has_ended = context.Event()


def stream(network: Network, case: LinkedCase, pool: NDArray[Any], seconds: float, *, is_shared: bool) -> LinkedRun:
    """Run a stream, measure it, and require that its audit is clean."""
    context, counts = multiprocessing.get_context("fork"), SharedCounts()
    with ExitStack() as stack:
        with network.inside(SERVER):
            server = stack.enter_context(EmbeddedServer(extra={"bind": "*"}))
            url = server.url.replace("127.0.0.1", network.address(SERVER))
            tuning = Tuning(compression=case.compression, **QUIET)
            spec = {"x": (pool.dtype.name, pool.shape[1:])}
            with Writer("t", url=url, spec=spec, budget_bytes=BUDGET_BYTES, tuning=tuning):
                pass

        def started(host: str, function: Callable[..., None], *arguments: object) -> multiprocessing.Process:
            with network.inside(host):
                process = context.Process(target=function, args=(url, counts, *arguments), daemon=True)
                process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
            return process  # type: ignore[return-value]

        trainers = [started(host, _train, number, "all" if is_shared else host) for number, host in enumerate(TRAINERS)]
        producer = started(PRODUCER, _produce, tuning, pool)
        everyone = [producer, *trainers]
        _await(lambda: all(read.value for read in counts.read), everyone)
        time.sleep(WARM_S)
        pids = [process.pid or 0 for process in everyone]
        before = _Counters(network, counts, pids)
        time.sleep(seconds)
        after = _Counters(network, counts, pids)
        counts.has_ended.set()
        _await(lambda: not any(process.is_alive() for process in everyone), everyone)
        with network.inside(SERVER):
            penstock("audit", "t", "--url", url)
    return _figures(before, after, pool[0].nbytes)


def _produce(url: str, counts: SharedCounts, tuning: Tuning, pool: NDArray[Any]) -> None:
    with Writer("t", url=url, tuning=tuning) as writer, writer.epoch() as epoch:
        while not counts.has_ended.is_set():
            epoch.write({"x": pool[counts.written.value % len(pool)]})
            counts.written.value += 1


def _train(url: str, counts: SharedCounts, number: int, group: str) -> None:
    with Loader("t", url=url, group=group, batch_size=BATCH, tuning=Tuning(**QUIET)) as loader:
        for batch in loader:
            counts.read[number].value += len(batch["x"])


def _await(is_so: Callable[[], bool], processes: Sequence[multiprocessing.Process]) -> None:
    """Wait for a fact. Raises RuntimeError if a process fails first, or if it takes too long."""
    until = time.monotonic() + PATIENCE_S
    while not is_so():
        if any(process.exitcode for process in processes) or time.monotonic() > until:
            raise RuntimeError(f"the processes of a run ended with {[process.exitcode for process in processes]}")
        time.sleep(0.01)


# --- what is counted ---


class _Counters:
    """All counters at one moment."""

    def __init__(self, network: Network, counts: SharedCounts | None = None, pids: Sequence[int] = ()) -> None:
        self.at = time.monotonic()
        self.sent = {host: network.sent_bytes(host) for host in network.hosts}
        self.cpu = [running_seconds([pid]) for pid in pids]
        self.samples = [counts.written.value, *(read.value for read in counts.read)] if counts else []
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        self.idle, self.all = ticks[3] + ticks[4], sum(ticks)


def _busy(before: _Counters, after: _Counters) -> float:
    return 1 - (after.idle - before.idle) / max(1, after.all - before.all)


def _figures(before: _Counters, after: _Counters, sample_bytes: int) -> LinkedRun:
    seconds = after.at - before.at
    sent = {host: (after.sent[host] - before.sent[host]) * 8 / seconds for host in after.sent}
    samples = [late - early for early, late in zip(before.samples, after.samples, strict=True)]
    cpu = [late - early for early, late in zip(before.cpu, after.cpu, strict=True)]
    return LinkedRun(
        sent[PRODUCER],
        sent[SERVER],
        tuple(count / seconds for count in samples[1:]),
        cpu[0] * 1e9 / max(1, samples[0] * sample_bytes),
        sum(cpu[1:]) * 1e9 / max(1, sum(samples[1:]) * sample_bytes),
        _busy(before, after),
    )


# --- the command ---


def pools(names: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Return samples of about 150 kB of each kind of `benchmarks.compression`, or of those named."""
    found = {}
    for name, array in kinds().items():
        if not names or any(part in name for part in names):
            size = SAMPLE_BYTES // array.itemsize
            flat = array.reshape(-1)
            found[name] = np.ascontiguousarray(flat[: len(flat) // size * size].reshape(-1, size))
    return found


@dataclass
class LinkRuns:
    """The runs on links of one rate."""

    gigabits: int
    plain: tuple[float, float]
    """The bits per second of a plain socket, and the busy cores."""
    runs: dict[LinkedCase, list[LinkedRun]]


def measure(
    gigabits: int, payloads: dict[str, NDArray[Any]], compressions: Sequence[str], rounds: int, seconds: float, *,
    is_shared: bool = False,
) -> LinkRuns:  # fmt: skip
    """Run all payloads and compressions in turn, with plain sockets first."""
    with hosts(gigabits) as network:
        found = LinkRuns(gigabits, plain(network, seconds), {})
        for number in range(rounds):
            for payload, pool in payloads.items():
                for compression in compressions:
                    progress(f"{gigabits} Gb/s, round {number + 1} of {rounds}: {payload}, {compression}")
                    case = LinkedCase(gigabits, payload, compression)
                    run = stream(network, case, pool, seconds, is_shared=is_shared)
                    found.runs.setdefault(case, []).append(run)
    return found


def shown(links: Sequence[LinkRuns]) -> str:
    """Return the results as text: a line for plain sockets on each rate, and the table."""
    lines = [
        f"One plain socket on a link of {link.gigabits} Gb/s: {link.plain[0] / 1e9:.2f} Gb/s, "
        f"with {link.plain[1]:.0%} of the cores in use."
        for link in links
    ]
    head = (
        "link", "payload", "compression", "producer to plain socket", "server to plain socket",
        "server to nominal rate", "samples/s of each trainer", "MB/s of each trainer", "producer, CPU s/GB",
        "trainer, CPU s/GB", "cores in use",
    )  # fmt: skip
    rows = [_row(link, case, runs) for link in links for case, runs in link.runs.items()]
    return "\n".join([*lines, "", table(head, rows)])


def _row(link: LinkRuns, case: LinkedCase, runs: Sequence[LinkedRun]) -> Sequence[str]:
    def median(of: Callable[[LinkedRun], float]) -> float:
        return statistics.median(of(run) for run in runs)

    samples = [median(lambda run: run.trainer_samples_per_s[number]) for number in range(len(TRAINERS))]  # noqa: B023
    return (
        f"{case.gigabits} Gb/s",
        case.payload,
        case.compression,
        spread(run.producer_bits_per_s / link.plain[0] for run in runs).shown(),
        spread(run.server_bits_per_s / link.plain[0] for run in runs).shown(),
        f"{median(lambda run: run.server_bits_per_s) / case.gigabits / 1e9:.2f}x",
        ", ".join(f"{each:,.0f}" for each in samples),
        ", ".join(f"{each * SAMPLE_BYTES / 1e6:,.0f}" for each in samples),
        f"{median(lambda run: run.producer_cpu):.2f}",
        f"{median(lambda run: run.trainer_cpu):.2f}",
        f"{median(lambda run: run.busy):.0%}",
    )


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    parser.add_argument("--gigabits", type=whole_number(1), nargs="+", default=[1, 10], help="of the links")
    parser.add_argument("--payload", nargs="+", default=[], help="parts of payloads' names, such as tokens")
    parser.add_argument("--compression", nargs="+", choices=COMPRESSIONS, default=COMPRESSIONS)
    parser.add_argument("--shared", action="store_true", help="let both trainers be members of one group")
    parser.add_argument("--rounds", type=whole_number(1), default=2, help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, help="on the clock, of each run (default %(default)s)")
    args = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"this benchmark puts hosts into network namespaces. {reason}")
    if not (payloads := pools(args.payload)):
        parser.error(f"no payload {', '.join(args.payload)}: there are {', '.join(kinds())}")
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(
        shown([
            measure(rate, payloads, args.compression, args.rounds, args.seconds, is_shared=args.shared)
            for rate in args.gigabits
        ])
    )  # fmt: skip


if __name__ == "__main__":
    main()
