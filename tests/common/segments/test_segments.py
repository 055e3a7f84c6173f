"""Segment files without a server: written bytes are read back, damage is named, and files in use stay."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from penstock_common.errors import BadEntry, BadOption, BadSegment, SegmentGone, SegmentsUnseen
from penstock_common.segments import reader as readers
from penstock_common.segments.folder import SegmentFolder, new_token, open_segment, parse_payload
from penstock_common.segments.reader import SegmentReader, scan
from penstock_common.segments.writer import SegmentWriter
from penstock_common.wire.block import BlockBuilder
from penstock_common.wire.codec import Fields, decode, encode
from penstock_common.wire.header import ALIGN, SegmentRef, parse_header, parse_ref
from penstock_common.wire.segment import SegmentInfo, pack_record, parse_info, parse_record
from penstock_common.wire.spec import Spec

SPEC = Spec.of({"x": ("uint8", (5, 7)), "text": ("bytes", ()), "y": ("int64", ())})
STREAM = "5f1c0a9be2d4"


@pytest.fixture(params=["on a disk", "in memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, memory_path: Path) -> SegmentFolder:
    """Return the folder of a stream."""
    made = SegmentFolder(tmp_path if request.param == "on a disk" else memory_path, "train", STREAM)
    made.make()
    return made


def writer_in(folder: SegmentFolder, nbytes: int = 1 << 16) -> SegmentWriter:
    """Return the writer of epoch 3, partition 1."""
    return SegmentWriter(folder, ("train", STREAM), SPEC, 3, 1, segment_bytes=nbytes)


def entry(first: int, count: int = 3) -> Fields:
    """Return an entry in its inline form."""
    builder = BlockBuilder(SPEC, 1 << 20, 100)
    for number in range(first, first + count):
        builder.add({"x": np.full((5, 7), number, np.uint8), "text": b"t" * number, "y": number})
    block = builder.finish(first)
    fields = encode(block, stream=STREAM, epoch=3, shard=0)
    return [(name, bytes(value)) for name, value in fields]


def ref_of(fields: Fields) -> SegmentRef:
    """Return the place of an entry's payload."""
    header = parse_header(fields[0][1], SPEC, takes_refs=True)
    assert header.ref is not None
    return header.ref


def test_what_is_written_is_read_back_over_several_segments(folder: SegmentFolder) -> None:
    """Bytes and checksums come back unchanged from files that are 64-byte aligned."""
    writer, reader = writer_in(folder, 1 << 14), SegmentReader(folder)
    written = [(entry(first), writer.append(entry(first))) for first in range(0, 120, 3)]
    assert len(folder.names()) > 1
    for inline, (stored, name) in written:
        ref = ref_of(stored)
        assert ref.file == name
        assert all(at % ALIGN == 0 for at, _ in ref.spans())
        payload = reader.read(ref)
        assert payload == [value for _, value in inline[1:]]
        names = [name for name, _ in inline[1:]]
        header, block = decode([stored[0], *zip(names, payload, strict=True)], SPEC, takes_refs=True)
        assert header.count == block.count == 3
    reader.close()
    writer.close()
    assert set(writer.full) == set(folder.names())


def test_a_file_in_use_is_not_used_again(folder: SegmentFolder) -> None:
    """Neither its writer nor a reader may find other bytes there."""
    writer = writer_in(folder)
    _, name = writer.append(entry(0))
    assert not folder.is_unused(name)
    assert not folder.give_back(name, keep=False)
    assert folder.give_back(name, keep=True)
    assert not folder.give_back(name, keep=True), "it is gone"
    other = writer_in(folder)
    other.append(entry(3))
    assert len(folder.spare()) == 1, "the first writer is not done with it"
    writer.close()
    third = writer_in(folder)
    third.append(entry(6))
    assert not folder.spare()
    assert len(folder.names()) == 2


def test_a_file_that_was_used_again_is_named_and_never_read(folder: SegmentFolder) -> None:
    """A reader that had it open, and one that opens it by its old name, both get an error and no other samples."""
    writer, reader = writer_in(folder), SegmentReader(folder)
    stored, name = writer.append(entry(0))
    reader.read(ref_of(stored))
    writer.close()
    assert folder.give_back(name, keep=True)
    again = writer_in(folder)
    other, other_name = again.append(entry(60))
    assert other_name != name
    assert len(folder.names()) == 1, "the same file"
    for stale in (reader, SegmentReader(folder)):
        with pytest.raises(SegmentGone, match=f"{name}, which"):
            stale.read(ref_of(stored))
    assert reader.read(ref_of(other))[-1] == np.array([60, 61, 62]).tobytes()


@pytest.mark.parametrize("trouble", ["short", "gone", "head"])
def test_a_damaged_file_is_an_error_and_no_signal(folder: SegmentFolder, trouble: str) -> None:
    """A file may be cut, removed or overwritten by another process."""
    writer = writer_in(folder)
    stored, name = writer.append(entry(0))
    reader, path = SegmentReader(folder), folder.path / name
    reader.read(ref_of(stored))
    if trouble == "short":
        os.truncate(path, ref_of(stored).at + 10)
    elif trouble == "gone":
        path.unlink()
        reader.close()
    else:
        with path.open("r+b") as file:
            file.write(b"nonsense")
    with pytest.raises(SegmentGone, match=name):
        reader.read(ref_of(stored))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE])
def test_what_this_process_cannot_open_is_no_bad_entry(
    folder: SegmentFolder, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without rights or descriptors is not a damaged entry: a dead letter would cost good samples."""
    stored, name = writer_in(folder).append(entry(0))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    reader = SegmentReader(folder)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(SegmentsUnseen, match=f"{name}, which this process cannot open.*ulimit"):
            reader.look(ref_of(stored))
    reader.look(ref_of(stored))


def test_a_folder_that_is_not_seen_is_said_at_once(tmp_path: Path) -> None:
    """A trainer on another host must not find this out entry by entry."""
    with pytest.raises(SegmentsUnseen, match="PENSTOCK_SEGMENTS"):
        SegmentFolder(tmp_path, "train", STREAM).require()
    SegmentFolder(tmp_path, "train", STREAM).make()
    SegmentFolder(tmp_path, "train", STREAM).require()


def test_a_full_disk_is_an_error_before_anything_is_written(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Space is allocated when the file is made, and a failed write leaves nothing behind."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        writer_in(folder).append(entry(0))
    assert not folder.names()
    assert not folder.unfinished()


@pytest.mark.parametrize(
    "value",
    [
        None, {}, [], ["a", 4096, [1]], ["../../etc/passwd", 4096, [1]], ["3-1-0123456789ab.seg/../x", 4096, [1]],
        ["3-1-0123456789ab.seg", 4097, [1]], ["3-1-0123456789ab.seg", 0, [1]], ["3-1-0123456789ab.seg", 1 << 50, [1]],
        ["3-1-0123456789ab.seg", 4096, [-1]], ["3-1-0123456789ab.seg", 4096, [1.0]],
        ["3-1-0123456789ab.seg", 4096, [1 << 40]], ["3-1-0123456789ab.seg", True, [1]],
        ["3-1-0123456789ab.seg\n", 4096, [1]],
    ],
)  # fmt: skip
def test_a_hostile_ref_opens_nothing(value: object) -> None:
    """Every client that can write to the stream names files, so only bare names within bounds are accepted."""
    with pytest.raises(BadEntry):
        parse_ref(value)


def test_a_link_under_a_segments_name_is_not_followed(folder: SegmentFolder, tmp_path: Path) -> None:
    """It would read another file as samples."""
    secret = tmp_path / "secret"
    secret.write_bytes(secrets.token_bytes(10_000))
    name = f"3-1-{new_token()}.seg"
    (folder.path / name).symlink_to(secret)
    with pytest.raises(SegmentGone):
        SegmentReader(folder).read(SegmentRef(name, 4096, (1,)))


@pytest.mark.parametrize("text", ["", "segments", "segments:", "segments:relative", "segment:/dev/shm", "Inline"])
def test_a_payload_setting_that_means_nothing_is_refused(text: str) -> None:
    """It is refused before a stream is made with it, because it cannot be changed later."""
    with pytest.raises(BadOption, match="expected 'inline' or 'segments:'"):
        parse_payload(text)


def test_a_head_that_lies_is_no_segment() -> None:
    """The folder's writers are trusted, disks are not."""
    from penstock_common.wire.segment import pack_info

    head = pack_info(SegmentInfo(STREAM, "train", 3, 1, "0123456789ab", SPEC))
    assert parse_info(head).file == "3-1-0123456789ab.seg"
    for damaged in (b"", head[:20], b"x" + head[1:], head[:30] + b"!" + head[31:], head[:8] + b"\x02" + head[9:]):
        with pytest.raises(BadSegment):
            parse_info(damaged)


@pytest.mark.parametrize("text", [b"[" * 10_000, b'{"stream": "s", "name": "n", "epoch": 1e999}', b"[]", b"1"])
def test_a_head_of_any_json_is_no_segment(text: bytes) -> None:
    """The files of an export may come from anywhere, and a head of deep lists ended its reader with RecursionError."""
    from penstock_common.wire import segment

    digest = xxhash.xxh3_64_intdigest(text)
    head = segment._FILE.pack(segment.FILE_MAGIC, segment.SEGMENT_VERSION, len(text), digest) + text
    with pytest.raises(BadSegment, match="the head says"):
        parse_info(head.ljust(segment.info_bytes(head), b"\0"))


# --- who may write or read what, and when -----------------------------------------------------------------------------


def test_a_block_made_in_place_is_on_the_disk_before_its_entry_is_told(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut must not leave an entry without its samples, as with a block that is copied."""
    done: list[str] = []
    sync, write = os.fdatasync, os.pwritev

    def synced(fd: int) -> None:
        done.append("synced")
        sync(fd)

    def written(fd: int, parts: list[memoryview], at: int) -> int:
        done.append("written")
        return write(fd, parts, at)

    monkeypatch.setattr(os, "fdatasync", synced)
    monkeypatch.setattr(os, "pwritev", written)
    writer = SegmentWriter(folder, ("train", STREAM), SPEC, 3, 1, segment_bytes=1 << 16, is_synced=True)
    first, second = entry(0), entry(3)
    for fields, is_placed in ((first, True), (second, False)):
        done.clear()
        writer.append(in_place(writer, fields) if is_placed else fields)
        assert done[-1] == "synced", "after the last byte"
        assert done.count("synced") == 1
    writer.close()


def in_place(writer: SegmentWriter, fields: Fields) -> Fields:
    """Make the same entry in the space that the writer has reserved for it."""
    sizes = [memoryview(value).nbytes for _, value in fields[1:]]
    room, made, at = writer.reserve(len(fields[0][1]) + 64, sizes), [fields[0]], 0
    for (name, value), size in zip(fields[1:], sizes, strict=True):
        room[at : at + size] = np.frombuffer(value, np.uint8)
        made.append((name, room[at : at + size].data))
        at += -(-size // ALIGN) * ALIGN
    return made


@pytest.mark.parametrize("how", ["another block", "dropped", "reserved again"])
def test_where_somebody_may_still_write_nothing_else_is_put(folder: SegmentFolder, how: str) -> None:
    """Reserved arrays belong to the user until the process ends: a late write must not change a committed block."""
    writer, reader = writer_in(folder), SegmentReader(folder)
    fields = entry(0)
    room = writer.reserve(len(fields[0][1]) + 64, [memoryview(value).nbytes for _, value in fields[1:]])
    first = writer.name
    if how == "dropped":
        writer.drop_reserved()
    elif how == "reserved again":
        fields = in_place(writer, fields)
    stored, name = writer.append(fields)
    room[:] = 255  # the owner of the reserved arrays writes late
    assert name != first
    assert reader.read(ref_of(stored)) == [bytes(value) for _, value in entry(0)[1:]]
    reader.close()
    writer.close()


def test_a_file_is_locked_while_it_is_copied_from(folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it is used again during the copy, and the batch has samples of two blocks."""
    writer, reader = writer_in(folder), SegmentReader(folder)
    stored, name = writer.append(entry(0))
    writer.close()
    seen: list[bool] = []

    def watched(copy: Callable[..., None]) -> Callable[..., None]:
        def copied(*args: object) -> None:
            seen.append(folder.is_unused(name) or folder.give_back(name, keep=False))
            copy(*args)

        return copied

    for copy in ("_copy_all", "_read_all"):
        monkeypatch.setattr(readers, copy, watched(getattr(readers, copy)))
    assert reader.read(ref_of(stored)) == [value for _, value in entry(0)[1:]]
    assert seen
    assert not any(seen)
    assert folder.is_unused(name), "and given back afterwards"


def test_a_file_is_not_used_again_while_a_part_of_it_is_in_sight(folder: SegmentFolder) -> None:
    """A view is the file itself: another block written there would change a batch in training."""
    writer, reader = writer_in(folder), SegmentReader(folder, gives_views=True)
    stored, name = writer.append(entry(0))
    writer.close()
    assert folder.is_unused(name)
    views = reader.views(ref_of(stored))
    assert not folder.is_unused(name)
    reader.close()
    assert not folder.give_back(name, keep=False)
    assert [bytes(view) for view in views] == [value for _, value in entry(0)[1:]]
    del views
    assert folder.is_unused(name), "and given back with the last view"


def test_a_file_that_is_taken_away_between_two_locks_is_not_written_to(
    folder: SegmentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing a lock takes two steps, and a cleaner may remove an unregistered file between them."""
    first = writer_in(folder)
    _, name = first.append(entry(0))
    first.close()
    assert folder.give_back(name, keep=True)
    (spare,) = folder.spare()
    real = fcntl.flock
    removed: list[str] = []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not removed and not folder.spare():  # it has its new name, and no lock
            real(fd, fcntl.LOCK_UN)
            (taken,) = folder.names()
            removed.append(taken)
            assert folder.give_back(taken, keep=False)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    writer = writer_in(folder)
    stored, name = writer.append(entry(3))
    monkeypatch.undo()
    assert removed, f"{spare} was not taken"
    assert set(folder.names()) == {name}
    assert SegmentReader(folder).read(ref_of(stored)) == [value for _, value in entry(3)[1:]]
    writer.close()


@pytest.mark.parametrize("how", ["close", "leave"])
def test_a_file_that_another_host_took_keeps_its_end(folder: SegmentFolder, how: str) -> None:
    """A host that sees no locks of this one takes a silent writer for dead, and its file for a spare one."""
    writer = writer_in(folder)
    _, name = writer.append(entry(0))
    path, nbytes = folder.path / name, (folder.path / name).stat().st_size
    if how == "close":
        path = path.rename(folder.path / f"3-1-{'7' * 32}.seg")
    getattr(writer, how)()
    assert path.stat().st_size == nbytes


def test_records_of_an_earlier_life_of_a_file_are_not_read(folder: SegmentFolder) -> None:
    """A file that is used again has them after its own records, and intact: samples of another epoch."""
    writer = writer_in(folder)
    _, name = writer.append(entry(0))
    for first in (3, 6):
        writer.append(entry(first))
    writer.close()
    assert folder.give_back(name, keep=True)
    again = writer_in(folder)
    _, name = again.append(entry(0))
    assert len(folder.names()) == 1, "the same file"
    opened = open_segment(folder.path, name)
    assert [found.header.first for found in scan(opened)] == [0]
    opened.close()
    again.close()


def test_a_record_is_one_by_its_mark_and_by_the_life_of_its_file() -> None:
    """Neither is enough alone: payload bytes may look like a mark, and an earlier life has the other."""
    head = pack_record(b"{}", 128, "0123456789ab")
    assert parse_record(head, "0123456789ab") is not None
    assert parse_record(head, "0123456789ac") is None
    assert parse_record(b"PSRD" + head[4:], "0123456789ab") is None
    assert parse_record(head[:20], "0123456789ab") is None
