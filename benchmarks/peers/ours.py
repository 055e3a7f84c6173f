"""Penstock with the peers' protocol. Modes: ``shared`` or ``ordered``, payloads ``inline`` or ``segments``.

The producer is one job's shard, which a supervisor starts again. The trainer acknowledges when it asks for the next
batch, or with its checkpoints. All guarantees are on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.peers.protocol import BLOCK, SAMPLE_BYTES, Job, Report, run, sample
from benchmarks.streams import expect_epochs
from penstock import Loader, PenstockError, Writer

STREAM = "counted"


def _quiet(_: str) -> None:
    return None


@contextmanager
def _finished_is_an_end() -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        if type(error).__name__ != "GroupFinished":
            raise


def produce(job: Job, report: Report) -> None:
    """Produce one epoch of one shard, from where it stands."""
    import time

    room = job.room * 5 // 4 if job.mode == "ordered" else job.room  # a quarter must hold the steps of all ranks
    # by the name that `between` needs
    settings: dict[str, Any] = {"block_bytes": BLOCK * SAMPLE_BYTES, "notify": _quiet}
    settings |= {"spec": {"x": ("uint8", (SAMPLE_BYTES,))}, "budget_bytes": room * SAMPLE_BYTES}
    if folder := job.extra.get("segments"):
        settings["payload"] = f"segments:{folder}"
        settings["budget_bytes"] = 32 << 20  # space in files, which are no smaller than a few megabytes
    with Writer(STREAM, url=job.place, **settings) as writer:
        expect_epochs(job.place, STREAM, 1)
        with writer.epoch(0, sizes=[job.samples]).shard(0) as shard:
            while shard.position < job.samples:
                time.sleep(job.make_s)
                shard.write({"x": sample(shard.position)})


def read(job: Job, report: Report) -> None:
    """Read one epoch."""
    settings: dict[str, Any] = {"member": job.member, "lease_s": job.lease_s, "notify": _quiet}
    if job.mode == "ordered":
        del settings["member"]
        settings |= {"order": "canonical", "rank": job.rank, "world_size": job.world}
    if job.checkpoint_every:
        settings["acknowledge"] = "on_checkpoint"
    with (
        Loader(STREAM, group=job.group, batch_size=job.batch, url=job.place, **settings) as loader,
        _finished_is_an_end(),  # the other member may have the last of it
    ):
        if job.state is not None:
            loader.load_state_dict(job.state)
        for batch in loader:
            report.step(batch["x"], job.step_s)
            if report.is_checkpoint_due(job):
                state = loader.state_dict()
                loader.checkpointed(state)
                report.say("checkpoint", state=state)


if __name__ == "__main__":
    run({"produce": produce, "read": read})
