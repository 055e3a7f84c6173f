"""Penstock doing the job, all guarantees on: exactly-once commit, checksums at both ends, ledger, budget, retention.

Modes: ``inline`` and ``segments``. Several readers are groups, each of which gets everything.
"""

from __future__ import annotations

from benchmarks.transports.protocol import ROWS, Load, Turns, run
from penstock_consumer.loader import Loader
from penstock_producer.writing.writer import Writer

STREAM = "bench"


def write(load: Load, turns: Turns) -> None:
    """Each turn is an epoch."""
    payload = f"segments:{load.extra['folder']}" if load.mode == "segments" else "inline"
    spec = {"x": (load.dtype, load.shape)}
    with Writer(STREAM, url=load.place, spec=spec, budget_bytes=load.room_bytes, payload=payload) as writer:
        for samples in turns:
            with writer.epoch() as epoch:
                if load.by_batch:
                    for rows in load.batches(samples, ROWS):
                        epoch.write_batch({"x": rows})
                    continue
                for sample in load.samples(samples):
                    epoch.write({"x": sample})


def read(load: Load, turns: Turns) -> None:
    """Each turn is an epoch."""
    group = f"group{load.reader}"
    with Loader(STREAM, group=group, batch_size=load.batch, url=load.place) as loader:
        for _ in turns:
            for batch in loader:
                turns.got(batch["x"])


if __name__ == "__main__":
    run({"write": write, "read": read})
