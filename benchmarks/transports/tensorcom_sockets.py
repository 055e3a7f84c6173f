"""tensorcom 0.1.0. Modes: ``pushpull`` and ``pubsub`` (each reader must see everything), each over ``tcp`` or ``ipc``.

The writer binds, and readers connect. A message is a batch, as in its examples, which is the fastest way. A batch that
arrives is an array over the message's memory, without a copy. ZeroMQ's queues get half of the space at either end.
PUB/SUB drops what a reader's queue cannot hold, so a turn is over when nothing has come for a while.
"""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.transports.protocol import Load, Turns, run

zmq: Any = importlib.import_module("zmq")
tensorcom: Any = importlib.import_module("tensorcom")
KINDS = {
    ("pushpull", "write"): (zmq.PUSH, "zrpush"),
    ("pushpull", "read"): (zmq.PULL, "zrpull"),
    ("pubsub", "write"): (zmq.PUB, "zpub"),
    ("pubsub", "read"): (zmq.SUB, "zsub"),
}
SILENCE_MS = 1000
SETTLE_S = 0.5
"""The pause for readers to connect, because a reader misses what was published before."""


def connection(load: Load) -> Any:
    """Return the connection of this role."""
    pattern, _, carrier = load.mode.partition(" ")
    kind, scheme = KINDS[pattern, load.role]
    messages = max(1, load.room_bytes // (load.batch * load.sample_bytes) // 2)
    found = tensorcom.Connection()
    found.socket = found.context.socket(kind)
    found.socket.setsockopt(zmq.SNDHWM, messages)
    found.socket.setsockopt(zmq.RCVHWM, messages)
    where = load.extra["address"] if carrier == "tcp" else f"{load.place}/socket"
    found.connect(f"{scheme}+{carrier}://{where}")
    if pattern == "pubsub":
        found.socket.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
    return found


def write(load: Load, turns: Turns) -> None:
    """Send a message for each batch."""
    to = connection(load)
    for samples in turns:
        for batch in load.batches(samples, load.batch):
            to.send([batch])


def read(load: Load, turns: Turns) -> None:
    """Read until all samples are there, or nothing comes any more."""
    source = connection(load)
    time.sleep(SETTLE_S)
    for samples in turns:
        while turns.samples < samples:
            try:
                turns.got(source.recv()[0])
            except zmq.Again:
                if turns.samples:
                    break


if __name__ == "__main__":
    run({"write": write, "read": read})
