"""The rule for a queue of jobs: no other program takes its jobs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.checkup.findings import Finding, ok
from penstock_common.explain.queues import ForeignWorker


def only_own_workers(found: Sequence[ForeignWorker]) -> list[Finding]:
    """Return a finding for each plain `rq worker`, which can do no job, and delays each job that it takes."""
    if not found:
        return [ok("workers", "no other program takes jobs")]
    return [
        Finding(
            "workers", "warning",
            f"worker {one.name!r} (process {one.pid} on {one.host}) takes jobs of queue {one.queue!r} and can do none: "
            f"{one.failed} failed so far; it is a plain `rq worker`",
            f"kill {one.pid} on {one.host}, and start `penstock worker --allow NAME --root DIR` as `penstock produce` "
            "says",
        )
        for one in found
    ]  # fmt: skip
