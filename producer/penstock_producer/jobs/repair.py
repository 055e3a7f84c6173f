"""Repair: make exactly the samples again that an audit found missing or damaged, from the source they were made of.

The audit finds the samples. The transaction is in ``penstock_common.stream.mending.repairs``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock_common.errors import PenstockError, SampleError
from penstock_common.stream.audit import find_missing_ranges
from penstock_common.stream.audit.accounts import MissingRange
from penstock_common.stream.commands import Client
from penstock_common.stream.feeds import FEED
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import ABANDONED, PRODUCED, Manifest, load_manifest
from penstock_common.stream.mending.repairs import RepairBlock, balance_bytes, commit_patch, find_patch, holder_of
from penstock_common.stream.streams import Stream
from penstock_common.waiting import Notify, to_stderr
from penstock_common.wire.block import Block, BlockBuilder
from penstock_common.wire.codec import encode
from penstock_common.wire.limits import MAX_HOLES
from penstock_common.wire.spec import SHAPES_SUFFIX
from penstock_producer.jobs.fill import EpochSeed, with_name
from penstock_producer.jobs.plan import EpochOrder, plan_fingerprint
from penstock_producer.sources.protocol import AnySource, Sample, can_make_again
from penstock_producer.write.shard import MAX_BLOCK_SAMPLES

WHOLE = 1 << 62
"""The block size for a block that must not be cut, because it takes the place of one entry."""

_Made = tuple[int, Sample | SampleError | None]
"""(offset, its sample or the reason why there is none). None stands for a known bad sample."""


@dataclass
class RepairResult:
    """The result of one repair of an epoch."""

    epoch: int
    made: int = 0
    """Samples that were made again."""
    found: int = 0
    """Samples that existed, and were only missing from the index."""
    bad: int = 0
    """Samples that could not be made, in ranges whose content was not known."""
    waiting: list[str] = field(default_factory=list)
    """The reasons why some ranges were left alone, one line each."""

    def count(self, *, made: int = 0, found: int = 0, bad: int = 0) -> None:
        """Add samples by what became of them."""
        self.made += made
        self.found += found
        self.bad += bad


def repair_epoch(
    client: Client, stream: Stream, epoch: int, source: AnySource, *, deep: bool = False, notify: Notify = to_stderr
) -> RepairResult:
    """Put back what the audit of a complete epoch finds missing, and nothing else. It may be repeated at any time.

    An entry that cannot be read is replaced. Only ``deep`` reads payloads, and so finds those that are damaged.
    ``source`` must be the one the epoch was made of. Raises PenstockError if it is not, or cannot make an item by its
    number; EpochNotFound; SampleError for a sample that was good and cannot be made now.
    """
    manifest = load_manifest(client, stream, epoch)
    if manifest.state == ABANDONED:
        raise PenstockError(f"epoch {epoch} of {stream.name!r} was abandoned: no group waits for its samples")
    done = RepairResult(epoch)
    missing = find_missing_ranges(client, stream, epoch, deep=deep)
    if any(not lost.found for lost in missing):
        order = _order(stream, manifest, source)
    for lost in missing:
        if lost.found:
            _put_found(client, stream, manifest, lost, done)
        elif not _is_held(client, stream, epoch, lost, done):
            _make(client, stream, manifest, lost, _samples(source, order, manifest, lost), done)
    if missing and manifest.state == PRODUCED:
        balance_bytes(client, stream, manifest)
    for line in done.waiting:
        notify(line)
    return done


def _order(stream: Stream, manifest: Manifest, source: AnySource) -> EpochOrder:
    """Return the epoch's order. Raises PenstockError unless it is exactly the one that was planned."""
    what = f"epoch {manifest.epoch} of {stream.name!r}"
    without = f"go on without what is missing: `penstock bad drop {stream.name} {manifest.epoch} --all-groups`"
    if manifest.kind == FEED or not manifest.fingerprint or manifest.sizes is None:
        raise PenstockError(
            f"{what} cannot be made again: it was written by a program or comes from an endless feed, not from a "
            f"source that makes an item by its number; {without}"
        )
    if not can_make_again(source):
        raise PenstockError(f"{what} cannot be repaired from this source: an iterator only goes forward; {without}")
    shuffles = [s for s in (True, False) if plan_fingerprint(source.fingerprint, s) == manifest.fingerprint]
    if not shuffles:
        raise PenstockError(
            f"{what} was made from another source: its fingerprint is {manifest.fingerprint}, of this one "
            f"{source.fingerprint}; name the source as `penstock produce` was given it, with the same files and options"
        )
    order = EpochOrder(
        source, seed=manifest.seed, epoch=manifest.epoch, shuffle=shuffles[0], planned=manifest.sizes
    )  # fmt: skip
    if tuple(order.sizes) != manifest.sizes:
        raise PenstockError(f"{what} is cut into {len(manifest.sizes)} shards otherwise than this source: it changed")
    return order


def _put_found(client: Client, stream: Stream, manifest: Manifest, lost: MissingRange, done: RepairResult) -> None:
    """Write a record again for an entry whose record is gone. Groups were given the entry as it is."""
    patch = find_patch(client, stream, manifest.epoch, lost)
    if patch is None:
        done.waiting.append(
            f"shard {lost.shard} offsets {lost.first}-{lost.end - 1}: entry {lost.found} claims them and cannot be "
            f"decoded; `penstock bad drop {stream.name} {manifest.epoch} {lost.found} --all-groups` deletes it once a "
            "group was given it, then repair again"
        )
    elif commit_patch(client, stream, manifest, lost, patch, ()):
        done.count(found=patch.count)


def _is_held(client: Client, stream: Stream, epoch: int, lost: MissingRange, done: RepairResult) -> bool:
    """Return whether a live member holds the samples. If they were made again now, they would be delivered twice."""
    if not lost.entry:
        return False
    held = holder_of(client, stream.partition_of(lost.shard), epoch, lost.entry)
    if held is not None:
        group, member = held
        done.waiting.append(
            f"shard {lost.shard} offsets {lost.first}-{lost.end - 1}: member {member!r} of group {group!r} was given "
            f"entry {lost.entry} before it was lost and may be training on it; repair again when it is done"
        )
    return held is not None


def _make(
    client: Client, stream: Stream, manifest: Manifest, lost: MissingRange, samples: Iterator[_Made], done: RepairResult
) -> None:
    """Make one range again: in one block if it takes the place of an entry, otherwise in blocks as writers cut them."""
    groups = list(load_roster(client, stream.partition_of(lost.shard)).groups)
    assert stream.spec is not None
    for block, bad in _blocks(stream, manifest.epoch, lost, samples):
        fields = []
        if block.count:
            fields = encode(
                block, stream=stream.id, epoch=manifest.epoch, shard=lost.shard, is_repair=True,
                compression=stream.compression,
            )  # fmt: skip
        nbytes = sum(len(value) for name, value in fields[1:] if not name.endswith(SHAPES_SUFFIX.encode()))
        patch = RepairBlock(block.first, block.count, nbytes, tuple(block.holes), fields, bad)
        if commit_patch(client, stream, manifest, lost, patch, groups):
            done.count(made=block.count, bad=len(bad))


def _blocks(
    stream: Stream, epoch: int, lost: MissingRange, samples: Iterator[_Made]
) -> Iterator[tuple[Block, dict[int, str]]]:
    """Yield the range as blocks, each with the reasons of holes that are new."""
    assert stream.spec is not None
    is_one = bool(lost.entry)
    builder = BlockBuilder(
        stream.spec, WHOLE if is_one else stream.block_bytes, lost.end - lost.first if is_one else MAX_BLOCK_SAMPLES
    )
    first, holes, bad = lost.first, list[int](), dict[int, str]()
    for offset, made in samples:
        if made is None:
            holes.append(offset)
        elif not isinstance(made, SampleError):
            builder.add(made)
        elif is_one:
            raise SampleError(
                f"shard {lost.shard} offset {offset} of epoch {epoch} was good when it was first made and "
                f"cannot be made now: {made}"
            )
        else:
            holes.append(offset)
            bad[offset] = str(made)
        is_full = not is_one and (builder.is_full or len(holes) >= MAX_HOLES)
        if is_full or offset == lost.end - 1:
            yield builder.finish(first, holes), bad
            first, holes, bad = offset + 1, [], {}


def _samples(source: AnySource, order: EpochOrder, manifest: Manifest, lost: MissingRange) -> Iterator[_Made]:
    """Yield what becomes of each offset of a range. An item is made with the seed that the jobs made it with."""
    assert source.unit != "item"
    seed, known, start = EpochSeed(manifest.seed, manifest.epoch), set(lost.holes), 0
    for item in map(int, order.items(lost.shard)):
        first, start = start, start + (source.size(item) if source.unit == "batch" else 1)
        wanted = range(max(lost.first, first), min(lost.end, start))
        if known.issuperset(wanted):
            yield from ((offset, None) for offset in wanted)
            continue
        made: Sample | SampleError
        try:
            made = source.read(item, seed.of(lost.shard, first))
        except SampleError as error:
            made = with_name(error, source.key(item))
        for offset in wanted:
            if offset in known:
                yield offset, None
            elif source.unit == "batch" and not isinstance(made, SampleError):
                yield offset, {name: values[offset - first] for name, values in made.items()}
            else:
                yield offset, made
