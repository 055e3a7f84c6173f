"""The segments of a partition's entries: a commit registers one at its first use, and it is removed when it is free.

``segments.folder`` has the files. The producer's cleaner decides when one may be used again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_common.server.channel import Command
from penstock_common.server.scripts import load_script
from penstock_common.stream.commands import Client, Run, readable, run_script
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import Manifest

_FREE_SEGMENTS = load_script("free_segments")
_SEAL_SEGMENTS = load_script("seal_segments")

SEALED = "s:"


@dataclass(frozen=True, slots=True)
class Registered:
    """One segment as the server knows it."""

    entries: int
    """The number of existing entries with a payload in it."""
    is_sealed: bool
    """Whether its writer declared that it gets no more entries."""


@readable(lambda client, partition, epoch: partition.segments(epoch))
def registered_segments(client: Client, partition: PartitionKeys, epoch: int) -> dict[str, Registered]:
    """Return the segments of one epoch in one partition, by name."""
    fields = {name.decode(): int(value) for name, value in client.hgetall(partition.segments(epoch)).items()}
    return {
        name: Registered(count, SEALED + name in fields)
        for name, count in fields.items()
        if not name.startswith(SEALED)
    }


def seal_segments(
    client: Client, partition: PartitionKeys, manifest: Manifest, names: Iterable[str], *, for_the_dead: bool = False,
    run: Run | None = None,
) -> None:  # fmt: skip
    """Declare that these segments get no more entries. A commit that names one is refused from then on.

    Nothing happens if the epoch was released. With ``for_the_dead`` another process declares it for a dead writer, also
    for segments without a commit: that writer's commit may still wait in a socket's buffer. ``run`` runs the script,
    which may run twice. None leaves it to the client.
    """
    if wanted := list(names):
        keys, args = _keys_of(partition, manifest), [manifest.id, 2 if for_the_dead else 1, *wanted]
        if run is None:
            run_script(client, _SEAL_SEGMENTS, keys, args)
        else:
            run(_SEAL_SEGMENTS, keys, args)


def seal_command(partition: PartitionKeys, manifest: Manifest, names: Iterable[str]) -> Command:
    """Return the command by which their own writer seals segments. It is sent with others, and may be repeated."""
    told = ["2", *_keys_of(partition, manifest), manifest.id, "1", *names]
    return (b"EVAL", _SEAL_SEGMENTS.encode(), *[text.encode() for text in told])


def _keys_of(partition: PartitionKeys, manifest: Manifest) -> list[str]:
    return [partition.segments(manifest.epoch), partition.state(manifest.epoch)]


def free_segments(client: Client, partition: PartitionKeys, epoch: int, names: Iterable[str]) -> list[str]:
    """Remove sealed and empty segments from the registry, and return them: their files may be used again.

    Segments that were sealed for a dead writer and never registered are returned, too.
    """
    wanted = list(names)
    if not wanted:
        return []
    return [name.decode() for name in run_script(client, _FREE_SEGMENTS, [partition.segments(epoch)], wanted)]
