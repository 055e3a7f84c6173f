"""Notes on compared checksums: readers of one host share them, and nothing under their name ends a reader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_common.segments.folder import NOTES
from penstock_common.segments.mapping import lies_in_memory
from penstock_common.segments.reader import SLOTS, CheckedBlocks

HEADER = b'{"v":1,"ref":["0-0-00112233aabb.seg",4096,[24]]}'


def needs_memory(path: Path) -> None:
    """Skip where there is no memory file system, because nothing is noted there."""
    if not lies_in_memory(path):
        pytest.skip("no memory file system here")


def test_what_one_process_has_compared_another_knows(memory_path: Path) -> None:
    """Each further trainer of a host would hash every byte again."""
    needs_memory(memory_path)
    one, other = CheckedBlocks(memory_path), CheckedBlocks(memory_path)
    assert not one.has(HEADER)
    one.note(HEADER)
    assert other.has(HEADER)
    assert not other.has(HEADER.replace(b"4096", b"4160"))


def test_a_newer_note_replaces_an_older_one(memory_path: Path) -> None:
    """A note of another block must never count for this one."""
    needs_memory(memory_path)
    checked, headers = CheckedBlocks(memory_path), [b"%d" % number for number in range(SLOTS)]
    for header in headers:
        checked.note(header)
    known = sum(map(checked.has, headers))
    assert SLOTS // 2 < known < SLOTS
    assert not any(checked.has(b"other %d" % number) for number in range(SLOTS))


def test_nothing_is_noted_on_a_disk(tmp_path: Path) -> None:
    """A file system of several hosts would carry one host's notes to another."""
    if lies_in_memory(tmp_path):
        pytest.skip("temporary files are in memory here")
    checked = CheckedBlocks(tmp_path)
    checked.note(HEADER)
    assert not checked.has(HEADER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/null"), lambda path: path.symlink_to("elsewhere")],
    ids=["folder", "pipe", "link", "dangling link"],
)
def test_what_is_no_file_of_notes_is_left_alone(memory_path: Path, make: Callable[[Path], object]) -> None:
    """Every block is compared then."""
    make(memory_path / NOTES)
    checked = CheckedBlocks(memory_path)
    checked.note(HEADER)
    assert not checked.has(HEADER)
    assert len(list(memory_path.iterdir())) == 1


def test_a_reader_without_the_right_to_write_knows_the_notes_of_others(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that shares the folder may only read there."""
    needs_memory(memory_path)
    CheckedBlocks(memory_path).note(HEADER)
    real = os.open

    def refusing(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(13, "Permission denied")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refusing)
    reader = CheckedBlocks(memory_path)
    assert reader.has(HEADER)
    reader.note(b"another")
    assert not reader.has(b"another")
