"""CPU seconds per GB of the channels, writing and reading apart, on one real server: a micro benchmark.

    python -m benchmarks.channel [--nbytes 150528] [--mb 1500] [--rounds 3]

Every round runs all the ways in turn on the same server, so ratios hold where absolute figures drift.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import redis
from redis._parsers import _RESP2Parser
from redis.connection import PythonRespSerializer

from penstock_common.stream.channel import Channel, Command, PlainChannel, Skip
from penstock_common.stream.connection import _dedicated, connect, open_channel
from penstock_common.stream.server import EmbeddedServer

BATCH_BYTES = 512_000


class BatchSink:
    """What a loader does, less the decoding: meta as bytes, tensors into one reused array."""

    def __init__(self, nbytes: int) -> None:
        self._room = memoryview(bytearray(max(nbytes, BATCH_BYTES) + nbytes))
        self._used = 0

    def begin(self, entry_id: bytes) -> None:
        """Wrap around when the array is full."""
        if self._used > BATCH_BYTES:
            self._used = 0

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """The next free bytes."""
        if name == b"meta":
            return None
        start = self._used
        self._used = start + nbytes
        return (self._room[start : start + nbytes],)

    def value(self, name: bytes, data: bytes) -> None:
        """Not decoded here."""

    def end(self) -> None:
        """Nothing to do."""

    def missing(self, entry_id: bytes) -> None:
        """Cannot happen here."""
        raise AssertionError(entry_id)


def plain_without_hiredis(client: redis.Redis) -> Channel:
    """redis-py alone: its Python parser, and its Python packer, which sends large arguments untouched."""
    connection = _dedicated(client)
    connection.set_parser(_RESP2Parser)
    connection._command_packer = PythonRespSerializer(connection._buffer_cutoff, connection.encoder.encode)
    connection.connect()
    return PlainChannel(connection, "here")


def plain_python_packer(client: redis.Redis) -> Channel:
    """The best mixture of redis-py: hiredis parses, Python packs."""
    connection = _dedicated(client)
    connection._command_packer = PythonRespSerializer(connection._buffer_cutoff, connection.encoder.encode)
    connection.connect()
    return PlainChannel(connection, "here")


WAYS: dict[str, Callable[[redis.Redis], Channel]] = {
    "fast": open_channel,
    "plain+hiredis": lambda client: open_channel(client, fast=False),
    "plain+hiredis, python packer": plain_python_packer,
    "plain": plain_without_hiredis,
}


def measure(
    client: redis.Redis, open_way: Callable[[redis.Redis], Channel], nbytes: int, total: int
) -> dict[str, float]:
    """Write `total` bytes in chunks that fit the server, read each back; CPU of this process, writing and reading."""
    payload, meta = (
        memoryview(bytearray(nbytes)),
        b'{"v":1,"stream":"0123456789abcdef","epoch":1,"shard":12,"first":345,"count":1}' * 3,
    )
    per_chunk, per_read = max(64_000_000 // nbytes, 1), max(BATCH_BYTES // nbytes, 1)
    sums = {"write_cpu": 0.0, "read_cpu": 0.0, "write_s": 0.0, "read_s": 0.0}
    add: Command = [b"XADD", b"bench", b"*", b"meta", meta, b"x", payload, b"y", b"\0" * 8]
    read: Command = [
        b"XREADGROUP",
        b"GROUP",
        b"g",
        b"me",
        b"COUNT",
        b"%d" % per_read,
        b"NOACK",
        b"STREAMS",
        b"bench",
        b">",
    ]
    done = 0
    with closing(open_way(client)) as channel:
        sink = BatchSink(nbytes)
        while done < total:
            client.delete("bench")
            client.xgroup_create("bench", "g", id="0", mkstream=True)
            cpu, wall = time.process_time(), time.perf_counter()
            pending = 0
            for _ in range(per_chunk):
                channel.send([add])
                pending += 1
                if pending == 8:
                    channel.read()
                    pending -= 1
            for _ in range(pending):
                channel.read()
            sums["write_cpu"] += time.process_time() - cpu
            sums["write_s"] += time.perf_counter() - wall
            cpu, wall = time.process_time(), time.perf_counter()
            got = 0
            channel.send([read])
            while got < per_chunk:
                channel.send([read])
                got += channel.read_entries(sink)
            channel.read()
            sums["read_cpu"] += time.process_time() - cpu
            sums["read_s"] += time.perf_counter() - wall
            done += per_chunk * nbytes
    return {name: value / done * 1e9 for name, value in sums.items()}


def main() -> None:
    """Print one line per way: the median over the rounds, and its ratio to the fast channel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nbytes", type=int, default=150_528)
    parser.add_argument("--mb", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with EmbeddedServer() as server, connect(server.url) as client:
        for _ in range(options.rounds):
            for name, open_way in WAYS.items():
                rounds[name].append(measure(client, open_way, options.nbytes, options.mb * 1_000_000))
    medians = {
        name: {key: statistics.median(one[key] for one in found) for key in found[0]} for name, found in rounds.items()
    }
    if options.json:
        print(json.dumps({"nbytes": options.nbytes, "seconds_per_gb": medians}))
        return
    for name, found in medians.items():
        against = {key: found[key] / medians["fast"][key] for key in found}
        print(f"{name:30}", "  ".join(f"{key} {value:.3f} ({against[key]:.1f}x)" for key, value in found.items()))


if __name__ == "__main__":
    main()
