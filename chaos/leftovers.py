"""A run whose payloads lie in segments: who takes the files of the dead at once, and what is left or missing.

It goes by redis-py and the headers, not by what recycling believes of itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress

from penstock import PenstockError
from penstock_common.format.header import parse_header
from penstock_common.segments.folder import MARK, SegmentFolder
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.registry import registered_segments
from penstock_common.stream.streams import Stream, load_stream
from penstock_producer.keeping.recycling import recycle

EVERY_S = 0.5
GRACE_S = 0.5
"""Far less than in earnest: files are taken whose writers have just died, and those of some that live."""
PASSES = 3
"""As many as writers make in half a minute."""


class Sweeper:
    """Recycles in a thread, with hardly any grace, for as long as the run lasts."""

    def __init__(self, url: str, names: tuple[str, ...]) -> None:
        self._url, self._names = url, names
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-sweeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(EVERY_S):
            with suppress(PenstockError), connect(self._url, timeout_s=5) as client:
                for name in self._names:
                    recycle(client, load_stream(client, name), grace_s=GRACE_S)

    def close(self) -> None:
        """Returns when it is done."""
        self._stopping.set()
        self._thread.join(30)


def leftovers(client: Client, stream: Stream) -> list[str]:
    """What should not be so once nobody writes any more, one line each; empty where payloads travel in the entries."""
    folder = segments_of(stream)
    if folder is None:
        return []
    for _ in range(PASSES):
        recycle(client, stream, grace_s=0.0)
    refers: Counter[str] = Counter()
    known: Counter[str] = Counter()
    wrong: list[str] = []
    for partition in stream.partitions:
        for epoch in load_roster(client, partition).epochs:
            wrong += _count(client, stream, partition, epoch, folder, refers)
            known.update({n: found.entries for n, found in registered_segments(client, partition, epoch).items()})
    there, spare = set(folder.names()), set(folder.spare())
    wrong += [f"{name}: {known[name]} entries by the registry, {count} refer to it"
              for name, count in (known | refers).items() if known[name] != refers[name]]  # fmt: skip
    wrong += [f"{name}: nothing refers to it" for name in sorted(there - refers.keys())]
    others = {path.name for path in folder.path.iterdir()} - there - spare - {MARK}
    return [*wrong, *(f"{name}: neither a segment nor spare" for name in sorted(others))]


def _count(
    client: Client, stream: Stream, partition: PartitionKeys, epoch: int, folder: SegmentFolder, refers: Counter[str]
) -> list[str]:
    """Counts who refers to which file; what is missing."""
    assert stream.spec is not None
    wrong = []
    for entry_id, fields in client.xrange(partition.entries(epoch)):
        ref = parse_header(fields[b"meta"], stream.spec, takes_refs=True).ref
        if ref is None:
            wrong.append(f"entry {entry_id.decode()} of epoch {epoch} holds its payload itself")
            continue
        refers[ref.file] += 1
        path = folder.path / ref.file
        if not path.exists() or path.stat().st_size < ref.end:
            wrong.append(f"entry {entry_id.decode()} of epoch {epoch} refers to {ref.file}, which is not there")
    return wrong
