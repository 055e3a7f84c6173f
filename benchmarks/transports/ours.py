"""Penstock with all guarantees on: exactly-once commit, checksums at both ends, ledger, budget, retention.

Modes: ``inline``, ``segments``, ``segments views``, in which a block is a batch that is yielded without a copy,
``inline 20 ms``, in which the acknowledgements of 20 ms are sent together, and ``inline 256000``, with blocks of
that number of bytes. Each of several readers is a group and gets everything.
"""

from __future__ import annotations

from typing import Any

from benchmarks.transports.protocol import ROWS, Load, Turns, run
from penstock import Loader, Writer

STREAM = "bench"
VIEWS, TOGETHER = "segments views", "inline 20 ms"
TOGETHER_S = 0.02


def write(load: Load, turns: Turns) -> None:
    """Write an epoch for each turn."""
    settings: dict[str, Any] = {"spec": {"x": (load.dtype, load.shape)}, "budget_bytes": load.room_bytes}
    if "segments" in load.mode:
        settings["payload"] = f"segments:{load.extra['folder']}"
    if load.mode == VIEWS:
        settings["block_bytes"] = load.batch * load.sample_bytes
    elif (size := load.mode.rpartition(" ")[2]).isdecimal():
        settings["block_bytes"] = int(size)
    with Writer(STREAM, url=load.place, **settings) as writer:
        for samples in turns:
            with writer.epoch() as epoch:
                if load.by_batch:
                    for rows in load.batches(samples, ROWS):
                        epoch.write_batch({"x": rows})
                    continue
                for sample in load.samples(samples):
                    epoch.write({"x": sample})


def read(load: Load, turns: Turns) -> None:
    """Read an epoch for each turn."""
    group = f"group{load.reader}"
    settings: dict[str, Any] = {"views": True} if load.mode == VIEWS else {}  # earlier commits have no views
    if load.mode == TOGETHER:
        settings["acknowledge_every_s"] = TOGETHER_S
    with Loader(STREAM, group=group, batch_size=load.batch, url=load.place, **settings) as loader:
        for _ in turns:
            for batch in loader:
                turns.got(batch["x"])


if __name__ == "__main__":
    run({"write": write, "read": read})
