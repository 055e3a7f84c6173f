"""Penstock by the peers' protocol. Modes: ``shared`` or ``ordered``, payloads ``inline`` or ``segments``.

The producer is one job's shard, which a supervisor starts again; the trainer acknowledges when it asks for the next
batch, or with its checkpoints. All guarantees are on.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from benchmarks.peers.protocol import BLOCK, SAMPLE_BYTES, Job, Report, begin, sample
from penstock_common.errors import GroupFinished
from penstock_common.stream.link.connection import connect
from penstock_common.stream.streams import set_plan
from penstock_consumer.loader import Loader
from penstock_producer.writing.writer import Writer

STREAM = "counted"


def _quiet(_: str) -> None:
    return None


def produce(job: Job, report: Report) -> None:
    """One epoch of one shard, going on where it stands."""
    import time

    room = job.room * 5 // 4 if job.mode == "ordered" else job.room  # a quarter must hold the steps of all ranks
    settings: dict[str, Any] = {"spec": {"x": ("uint8", (SAMPLE_BYTES,))}, "budget_bytes": room * SAMPLE_BYTES}
    if folder := job.extra.get("segments"):
        settings["payload"] = f"segments:{folder}"
        settings["budget_bytes"] = 32 << 20  # room in files, which are no smaller than a few megabytes
    with Writer(STREAM, url=job.place, block_bytes=BLOCK * SAMPLE_BYTES, notify=_quiet, **settings) as writer:
        client = connect(job.place)
        set_plan(client, writer.stream, 1)
        client.close()
        with writer.epoch(0, sizes=[job.samples]).shard(0) as shard:
            while shard.position < job.samples:
                time.sleep(job.make_s)
                shard.write({"x": sample(shard.position)})


def read(job: Job, report: Report) -> None:
    """One epoch."""
    settings: dict[str, Any] = {"member": job.member}
    if job.mode == "ordered":
        settings = {"order": "canonical", "rank": job.rank, "world_size": job.world}
    if job.checkpoint_every:
        settings["acknowledge"] = "on_checkpoint"
    with (
        Loader(
            STREAM, group=job.group, batch_size=job.batch, url=job.place, lease_s=job.lease_s, notify=_quiet, **settings
        ) as loader,
        suppress(GroupFinished),  # the other member may have the last of it
    ):
        if job.state is not None:
            loader.load_state_dict(job.state)
        for batch in loader:
            report.step(batch["x"], job.step_s)
            if report.is_checkpoint_due(job):
                state = loader.state_dict()
                loader.checkpointed(state)
                report.say("checkpoint", state=state)


def main() -> None:
    """A child process."""
    job, report = begin()
    report.say("ready")
    {"produce": produce, "read": read}[job.role](job, report)


if __name__ == "__main__":
    main()
