"""Penstock doing the job, all guarantees on: exactly-once commit, checksums at both ends, ledger, budget, retention."""

from __future__ import annotations

from benchmarks.cases import Case

STREAM, GROUP = "bench", "bench"
BUDGET_BYTES = 256 << 20


def prepare(url: str, case: Case) -> None:
    """Makes stream and group before the clock starts."""
    from penstock_common.stream.groups.roster import Membership, join_group
    from penstock_common.stream.link.connection import connect
    from penstock_producer.writing.writer import Writer

    with Writer(STREAM, url=url, spec={"x": (case.dtype, case.shape)}, budget_bytes=BUDGET_BYTES) as writer:
        client = connect(url)
        join_group(client, Membership(writer.stream, GROUP, "", ""), declared=True)


def write(url: str, case: Case) -> None:
    """The writer's process."""
    from penstock_producer.writing.writer import Writer

    with Writer(STREAM, url=url) as writer, writer.epoch() as epoch:
        if case.by_batch:
            for rows in case.writes():
                epoch.write_batch({"x": rows})
        else:
            for sample in case.writes():
                epoch.write({"x": sample})


def read(url: str, case: Case) -> int:
    """The reader's process; returns the samples it got in batches."""
    from penstock_consumer.loader import Loader

    with Loader(STREAM, group=GROUP, batch_size=case.batch_size, url=url) as loader:
        for _ in loader:
            pass
        return loader.stats().samples
