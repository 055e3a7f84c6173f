"""Files in memory stay mapped: files that are used again need no new pages, and any process may remove them."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from penstock_common.errors import SegmentGone
from penstock_common.segments import mapping
from penstock_common.segments.folder import SegmentFolder
from penstock_common.segments.mapping import SegmentMaps, maps_of
from penstock_common.segments.reader import SegmentReader
from penstock_common.segments.writer import SegmentWriter
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import Fields, encode, meta_bytes
from penstock_common.wire.header import SegmentRef, parse_header
from penstock_common.wire.spec import Spec
from tests.conftest import SHARED_MEMORY

SPEC = Spec.of({"x": ("uint8", (1000,)), "y": ("int64", ())})
STREAM = "5f1c0a9be2d4"
FILE_BYTES = 1 << 20

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="no file system in memory here: nothing is kept")


@pytest.fixture
def folder(memory_path: Path) -> SegmentFolder:
    """Return the folder of a stream."""
    made = SegmentFolder(memory_path, "train", STREAM)
    made.make()
    return made


def lane_of(folder: SegmentFolder) -> SegmentWriter:
    """Return the writer of epoch 3, partition 1."""
    return SegmentWriter(folder, ("train", STREAM), SPEC, 3, 1, segment_bytes=FILE_BYTES)


def lane_again(folder: SegmentFolder) -> SegmentWriter:
    """Return a writer whose first file was used before, because finding the pages of a new file would cost more."""
    lane = lane_of(folder)
    assert lane.place(100, [1000]) is None
    name = lane.name
    lane.close()
    assert folder.give_back(name, keep=True)
    return lane_of(folder)


def builder_in(lane: SegmentWriter, samples: int = 100) -> BlockBuilder:
    """Return a builder whose blocks are made in the writer's files."""

    def place(count: int) -> np.ndarray | None:
        return lane.place(meta_bytes(SPEC, count), [count * tensor.sample_bytes for tensor in SPEC])

    return BlockBuilder(SPEC, samples * 1008, samples, place)


def fields_of(builder: BlockBuilder, first: int, count: int) -> Fields:
    """Return a block of samples that show their number."""
    for number in range(first, first + count):
        builder.add({"x": np.full(1000, number % 251, np.uint8), "y": number})
    return encode(builder.finish(first), stream=STREAM, epoch=3, shard=0)


def ref_of(fields: Fields) -> SegmentRef:
    """Return the place of an entry's payload."""
    header = parse_header(fields[0][1], SPEC, takes_refs=True)
    assert header.ref is not None
    return header.ref


def numbers(payload: list[bytes]) -> list[int]:
    """Return the numbers of the samples, after checking the pixels of each."""
    found = np.frombuffer(payload[1], np.int64)
    pixels = np.frombuffer(payload[0], np.uint8).reshape(len(found), 1000)
    assert (pixels == (found % 251)[:, None]).all()
    return list(found.tolist())


def test_a_block_is_made_where_it_stays_whatever_its_number_of_samples(folder: SegmentFolder) -> None:
    """Full blocks, blocks cut short by a flush, whose columns then move together, and a block after a refused
    sample.
    """
    lane, reader = lane_again(folder), SegmentReader(folder)
    builder, stored, first = builder_in(lane), [], 0
    at = 4096
    for count in (100, 1, 37, 100, 99):
        if count == 37:
            with pytest.raises(ValueError, match="'x'"):
                builder.add({"x": np.zeros(3, np.uint8), "y": 0})
        fields = fields_of(builder, first, count)
        lies = np.frombuffer(fields[1][1], np.uint8).ctypes.data
        (entry, name) = lane.append(fields)
        ref = ref_of(entry)
        assert lane._mapped is not None
        assert lies == lane._mapped.ctypes.data + ref.at, "not copied"
        assert at < ref.at < at + 4096, "no room is lost between blocks"
        at = ref.end
        stored.append((entry, first, count))
        first += count
        assert name == lane.name
    for entry, begin, count in stored:
        assert numbers(reader.read(ref_of(entry))) == list(range(begin, begin + count))


def test_a_block_that_is_kept_is_never_overwritten(folder: SegmentFolder) -> None:
    """A commit that was refused because its writer was taken for dead is sent again, from the same arrays."""
    lane = lane_again(folder)
    builder = builder_in(lane)
    fields = fields_of(builder, 0, 100)
    _, name = lane.append(fields)
    lane.close()
    assert folder.give_back(name, keep=True)
    again, _ = lane.append(fields)
    assert len(folder.spare()) == 1, "the arrays are looked at yet"
    assert numbers(SegmentReader(folder).read(ref_of(again))) == list(range(100))
    lane.close()
    fields.clear()
    del builder
    gc.collect()
    lane.append(fields_of(BlockBuilder(SPEC, 1 << 20, 100), 0, 100))
    assert not folder.spare()


def test_files_that_are_used_again_need_no_new_pages(folder: SegmentFolder) -> None:
    """Allocating a page costs twice what copying it costs, and a view costs neither."""
    lane, reader, views = lane_of(folder), SegmentReader(folder), SegmentReader(folder)
    builder = builder_in(lane)
    faults = []
    for life in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for block in range(8):
            entry, name = lane.append(fields_of(builder, (life * 8 + block) * 100, 100))
            target = bytearray(100_000), bytearray(800)
            reader.read_into(ref_of(entry), [[memoryview(part)] for part in target])
            found = views.views(ref_of(entry))
            assert bytes(found[1]) == bytes(target[1])
            assert not found[0].flags.writeable
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        lane.close()
        del found
        views.close()
        gc.collect()
        assert folder.give_back(name, keep=True)
    assert min(faults[2:]) < FILE_BYTES / 4096 / 4, faults
    assert len({key[1] for key in maps_of(folder.path)._kept}) == 1, "one file, six times"


def test_a_file_without_its_unused_end_is_used_again(folder: SegmentFolder) -> None:
    """It is as large as its use needs, and a process keeps one map of it, however often its size changes."""
    reader = SegmentReader(folder)
    for count in (100, 300, 1, 200):
        lane = lane_of(folder)
        entry, name = lane.append(fields_of(builder_in(lane, count), 0, count))
        lane.close()
        assert numbers(reader.read(ref_of(entry))) == list(range(count))
        assert folder.names()[name].st_size < count * 1008 + FILE_BYTES / 4 + 8 * 4096
        reader.close()
        gc.collect()
        assert folder.give_back(name, keep=True)
    assert len(folder.spare()) == 1
    assert len(maps_of(folder.path)._kept) <= 2, "one to read, and one to write"


def test_what_was_removed_or_cut_short_is_an_error_and_its_memory_is_given_back(folder: SegmentFolder) -> None:
    """An operator's rm, and a truncated file: reading a map of it would end the trainer by a signal."""
    lane = lane_again(folder)
    entry, name = lane.append(fields_of(builder_in(lane), 0, 100))
    reader = SegmentReader(folder)
    reader.read(ref_of(entry))
    lane.close()
    with (folder.path / name).open("r+b") as file:
        os.ftruncate(file.fileno(), 8192)
    with pytest.raises(SegmentGone, match="8192 of"):
        reader.read(ref_of(entry))
    with pytest.raises(SegmentGone, match="ends before it"):
        SegmentReader(folder).views(ref_of(entry))


def test_views_are_given_only_of_what_is_still_there(folder: SegmentFolder) -> None:
    """A file is cut between two batches: the yielded arrays stay valid, and the next read is an error."""
    lane = lane_again(folder)
    builder = builder_in(lane)
    (first, name), (second, _) = (lane.append(fields_of(builder, at, 100)) for at in (0, 100))
    reader = SegmentReader(folder, gives_views=True)
    assert numbers([bytes(view) for view in reader.views(ref_of(first))]) == list(range(100))
    os.truncate(folder.path / name, ref_of(first).end)
    with pytest.raises(SegmentGone, match="ends before it"):
        reader.views(ref_of(second))
    assert numbers([bytes(view) for view in reader.views(ref_of(first))]) == list(range(100))


@pytest.mark.parametrize("trouble", ["gone", "short"])
def test_a_writer_whose_file_is_removed_or_cut_goes_on_in_another(folder: SegmentFolder, trouble: str) -> None:
    """After files were removed, later commits must have a payload, and no process may die of a mapped file."""
    lane, reader = lane_again(folder), SegmentReader(folder)
    _, name = lane.append(fields_of(builder_in(lane), 0, 100))
    if trouble == "gone":
        (folder.path / name).unlink()
    else:
        os.truncate(folder.path / name, 5000)
    for first in (100, 200):
        entry, other = lane.append(fields_of(builder_in(lane), first, 100))
        assert other != name
        assert numbers(reader.read(ref_of(entry))) == list(range(first, first + 100))
    assert lane.full == [name]


def test_no_more_is_kept_than_is_said_and_dead_files_make_room(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file beyond the limit is still read, and a removed file does not count."""
    monkeypatch.setattr(mapping, "MAPPED_BYTES", 3 * FILE_BYTES)
    lanes = [lane_of(folder) for _ in range(4)]
    stored = [lane.append(fields_of(BlockBuilder(SPEC, 1 << 20, 100), 0, 100)) for lane in lanes]
    maps = SegmentMaps()
    reader = SegmentReader(folder, maps=maps)
    for entry, _ in stored:
        assert numbers(reader.read(ref_of(entry))) == list(range(100))
    assert len(maps._kept) == 3
    for lane, (_, name) in zip(lanes[:3], stored, strict=False):
        lane.close()
        assert folder.give_back(name, keep=False)
    fresh = SegmentReader(folder, maps=maps)
    assert numbers(fresh.read(ref_of(stored[3][0]))) == list(range(100))
    assert len(maps._kept) == 1


def test_maps_are_given_back_with_the_last_reader_and_writer(folder: SegmentFolder) -> None:
    """Otherwise a folder could not be unmounted while the trainer's process lives."""
    lane = lane_again(folder)
    entry, _ = lane.append(fields_of(builder_in(lane), 0, 100))
    reader = SegmentReader(folder, maps=maps_of(folder.path))
    reader.read(ref_of(entry))

    def mapped() -> bool:
        return str(folder.path) in Path("/proc/self/maps").read_text()

    assert mapped()
    reader.close()
    lane.close()
    del lane, reader
    gc.collect()
    assert not mapped()
