"""Compare a folder of segments after a run with the keys and the headers: leftover files, and missing ones."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from chaos.keys import meta, partitions, rostered, segments
from chaos.sweeper import sweep

PASSES = 3
"""The cleaner's passes, as many as writers make in half a minute."""
OWN = {"stream", "stream.checked"}


def leftovers(url: str, stream: str) -> list[str]:
    """Return one line for each fault of the folder after all writing has ended, or none for inline payloads."""
    with redis.Redis.from_url(url) as client:
        of_stream = meta(client, stream)
        plane, _, root = of_stream.get("payload", "inline").partition(":")
        if plane == "inline":
            return []
        for _ in range(PASSES):
            sweep(url, stream, 0.0)
        folder = Path(root) / f"{stream}.{of_stream['id']}"
        refers: Counter[str] = Counter()
        known: Counter[str] = Counter()
        wrong: list[str] = []
        for partition in partitions(client, stream):
            for epoch in rostered(client, partition):
                wrong += _count(client, partition, epoch, folder, refers)
                known.update(segments(client, partition, epoch))
    names = {path.name for path in folder.iterdir()} - OWN
    spare = {name for name in names if name.startswith("free-") and name.endswith(".seg")}
    there = {name for name in names - spare if name.endswith(".seg") and not name.startswith("new-")}
    wrong += [f"{name}: {known[name]} entries by the registry, {count} refer to it"
              for name, count in (known | refers).items() if known[name] != refers[name]]  # fmt: skip
    wrong += [f"{name}: nothing refers to it" for name in sorted(there - refers.keys())]
    return [*wrong, *(f"{name}: neither a segment nor spare" for name in sorted(names - there - spare))]


def _count(client: Any, partition: str, epoch: int, folder: Path, refers: Counter[str]) -> list[str]:
    """Count the references to each file in ``refers``, and return one line for each missing payload."""
    wrong = []
    for entry_id, fields in client.xrange(f"{partition}:{epoch}:entries"):
        ref = json.loads(fields[b"meta"]).get("ref")
        if ref is None:
            wrong.append(f"entry {entry_id.decode()} of epoch {epoch} holds its payload itself")
            continue
        name, offset, sizes = ref
        refers[name] += 1
        path = folder / name
        if not path.exists() or path.stat().st_size < offset + sum(sizes):
            wrong.append(f"entry {entry_id.decode()} of epoch {epoch} refers to {name}, which is not there")
    return wrong
