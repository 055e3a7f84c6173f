"""CPU seconds per GB of Penstock's channel and of redis-py, for writing and for reading, on one real server.

    python -m benchmarks.channel [--nbytes 150528] [--mb 400] [--rounds 5] [--json]

Every round runs all channels in turn on the same server, so that both sides of a ratio within one round have equal
load. Payloads come from and go to 64 MB of memory, as in a real job. With a small buffer, copies would look free.

It needs an internal part, the channel, and the tests' plain channel, so it measures only its own tree.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import redis
from redis._parsers import _RESP2Parser
from redis.connection import PythonRespSerializer

from benchmarks.spread import spread, table
from penstock import EmbeddedServer
from penstock_common.server.channel import Channel, Command, Skip
from penstock_common.server.connection import _dedicated, open_channel
from penstock_common.stream.client import StreamClient, connect
from tests.contracts.plain_channel import open_plain_channel

READ_BYTES = 512_000
"""The bytes that determine the COUNT of a read, as in the reader."""

ROOM_BYTES = 64 << 20
META = b'{"v":1,"stream":"0123456789abcdef","epoch":1,"shard":12,"first":345,"count":1}' * 3


class BatchSink:
    """A sink that does a loader's work without decoding: meta as bytes, tensors into one reused array."""

    def __init__(self, room: memoryview, nbytes: int) -> None:
        self._room, self._last = room, len(room) - 2 * nbytes
        self._used = 0

    def begin(self, entry_id: bytes) -> None:
        """Wrap around when the array is full."""
        if self._used > self._last:
            self._used = 0

    def target(self, name: bytes, nbytes: int) -> Sequence[memoryview] | Skip | None:
        """Return the next free bytes."""
        if name == b"meta":
            return None
        start = self._used
        self._used = start + nbytes
        return (self._room[start : start + nbytes],)

    def value(self, name: bytes, data: bytes) -> None:
        """Do nothing, because nothing is decoded here."""

    def end(self) -> None:
        """Do nothing."""


def redis_py_alone(client: redis.Redis) -> Channel:
    """Return redis-py alone: its Python parser, and its Python packer, which does not copy large arguments."""
    connection = _dedicated(client)
    connection.set_parser(_RESP2Parser)
    connection._command_packer = PythonRespSerializer(connection._buffer_cutoff, connection.encoder.encode)
    return open_plain_channel(client, connection)


def python_packer(client: redis.Redis) -> Channel:
    """Return the best combination of redis-py: hiredis parses, Python packs."""
    connection = _dedicated(client)
    connection._command_packer = PythonRespSerializer(connection._buffer_cutoff, connection.encoder.encode)
    return open_plain_channel(client, connection)


WAYS: dict[str, Callable[[StreamClient], Channel]] = {
    "penstock": open_channel,
    "redis-py + hiredis": open_plain_channel,
    "redis-py + hiredis, python packer": python_packer,
    "redis-py alone": redis_py_alone,
}


def write(channel: Channel, source: memoryview, nbytes: int, count: int) -> None:
    """Append `count` entries, and read each reply eight entries later."""
    for number in range(count):
        start = number * nbytes % (len(source) - nbytes)
        payload = source[start : start + nbytes]
        channel.send([[b"XADD", b"bench", b"*", b"meta", META, b"x", payload, b"y", b"12345678"]])
        if number >= 8:
            channel.read()
    for _ in range(min(8, count)):
        channel.read()


def read(channel: Channel, room: memoryview, nbytes: int, count: int) -> None:
    """Read `count` entries of the group. Each request is sent before the reply to the one before is taken."""
    per_read = b"%d" % max(READ_BYTES // nbytes, 1)
    ask: Command = [b"XREADGROUP", b"GROUP", b"g", b"me", b"COUNT", per_read, b"NOACK", b"STREAMS", b"bench", b">"]
    sink, got = BatchSink(room, nbytes), 0
    channel.send([ask])
    while got < count:
        channel.send([ask])
        got += channel.read_entries(sink)
    channel.read()


def measure(client: redis.Redis, channel: Channel, nbytes: int, total: int) -> dict[str, float]:
    """Write `total` bytes and read them back. Return seconds per GB, of this process's CPU and of the clock."""
    room, count = memoryview(bytearray(b"\x55") * ROOM_BYTES), max(total // nbytes, 1)
    client.delete("bench")
    client.xgroup_create("bench", "g", id="0", mkstream=True)
    found = {}
    for name, run in (("write", write), ("read", read)):
        cpu, wall = time.process_time(), time.perf_counter()
        run(channel, room, nbytes, count)
        found[f"{name}_cpu"], found[f"{name}_wall"] = time.process_time() - cpu, time.perf_counter() - wall
    return {name: value / (count * nbytes) * 1e9 for name, value in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each channel: seconds per GB of its best round, and ratios to Penstock's within rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nbytes", type=int, default=150_528)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with EmbeddedServer() as server, connect(server.url) as client:
        for _ in range(options.rounds):
            for name, open_way in WAYS.items():
                with closing(open_way(client)) as channel:
                    rounds[name].append(measure(client, channel, options.nbytes, options.mb * 1_000_000))
    if options.json:
        print(json.dumps({"nbytes": options.nbytes, "seconds_per_gb": rounds}))
        return
    print(f"Payloads of {options.nbytes:,} bytes, {options.rounds} rounds\n")
    print(shown(rounds))


def shown(rounds: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return the rounds as a Markdown table."""
    head = ["", "write, CPU s/GB", "to Penstock's", "read, CPU s/GB", "to Penstock's"]
    rows = []
    for name, found in rounds.items():
        row = [name]
        for kind in ("write_cpu", "read_cpu"):
            row.append(f"{min(one[kind] for one in found):.2f}")
            pairs = zip(found, rounds["penstock"], strict=True)
            row.append("1" if name == "penstock" else spread(one[kind] / ours[kind] for one, ours in pairs).shown())
        rows.append(row)
    return table(head, rows)


if __name__ == "__main__":
    main()
