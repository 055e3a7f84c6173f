"""Another user of the host cannot read or replace a stream's folder, and each refusal says what helps."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_common.errors import SegmentsUnseen
from penstock_common.segments.folder import MARK, NOTES, SegmentFolder, new_token
from penstock_common.segments.trust import FileUser, PathStep, walk, why_not_read, why_not_write
from penstock_common.wire.segment import SegmentInfo
from penstock_common.wire.spec import Spec
from tests.contracts.processes import within

STREAM = "5f1c0a9be2d4"
SPEC = Spec.of({"x": ("uint8", (4,))})
ALICE, BOB, CAROL, TRAINERS = 70001, 70002, 70003, 70050
"""Users and a group that this host does not have."""
Told = tuple[str, int, int] | tuple[str, int, int, int]
PRIVATE = {ALICE: ALICE, BOB: BOB, 0: 0}
HOME: list[Told] = [("/", 0, 0o755), ("/dev", 0, 0o755), ("/dev/shm", 0, 0o1777)]


def steps(*told: Told) -> list[PathStep]:
    """Return folders as (path, owner, mode and, unless it is the owner's own, group)."""
    return [
        PathStep(Path(path), uid, gid[0] if gid else PRIVATE.get(uid, uid), stat.S_IFDIR | mode)
        for path, uid, mode, *gid in told
    ]


def link(path: str, uid: int) -> PathStep:
    """Return a symlink."""
    return PathStep(Path(path), uid, uid, stat.S_IFLNK | 0o777)


@pytest.mark.parametrize(
    ("root", "folder", "found"),
    [
        ([*HOME, ("/dev/shm/p", ALICE, 0o700)], [], ""),
        ([*HOME, ("/dev/shm/p", ALICE, 0o700)], [("/dev/shm/p/s", ALICE, 0o700)], ""),
        (HOME, [("/dev/shm/s", ALICE, 0o700)], ""),
        (HOME, [("/dev/shm/s", BOB, 0o700)], "/dev/shm/s belongs to another user"),
        ([*HOME, ("/dev/shm/p", ALICE, 0o775)], [], ""),
        ([*HOME, ("/dev/shm/p", ALICE, 0o770, TRAINERS)], [], "every member of group 70050 can replace"),
        ([*HOME, ("/dev/shm/p", ALICE, 0o3770, TRAINERS)], [("/dev/shm/p/s", ALICE, 0o2750, TRAINERS)], ""),
        ([*HOME, ("/dev/shm/p", 0, 0o3770, TRAINERS)], [("/dev/shm/p/s", ALICE, 0o2750, TRAINERS)], ""),
        ([*HOME, ("/dev/shm/p", BOB, 0o1777)], [], "/dev/shm/p belongs to another user"),
        ([*HOME, ("/dev/shm/p", BOB, 0o777)], [], "/dev/shm/p belongs to another user"),
        ([*HOME[:2], ("/dev/shm", 0, 0o777), ("/dev/shm/p", ALICE, 0o700)], [], "every user can replace"),
        ([*HOME, ("/dev/shm/p", ALICE, 0o700)], [("/dev/shm/p/s", ALICE, 0o1777)], "every user can replace"),
        ([*HOME, ("/dev/shm/p", ALICE, 0o700)], [("/dev/shm/p/s", 0, 0o700)], "/dev/shm/p/s belongs to another"),
        ([("/", 65534, 0o755), ("/shm", 65534, 0o1777), ("/shm/p", ALICE, 0o700)], [], ""),
        ([("/", 0, 0o755), ("/home", 0, 0o755), ("/home/bob", BOB, 0o755)], [], "/home/bob belongs to another user"),
    ],
    ids=[
        "a root of one's own", "a folder of one's own", "no root of one's own", "made by another before",
        "a private group may write", "a group may write", "a sticky one of a group", "an administrator's",
        "another's sticky root", "another's open root", "memory of a pod", "a sticky folder of a stream",
        "root's stream", "root of another user namespace", "below another's home",
    ],
)  # fmt: skip
def test_a_writer_keeps_streams_only_where_nobody_else_can_replace_them(
    root: list[Told], folder: list[Told], found: str
) -> None:
    """A user who can rename a component chooses the files that a producer writes and a trainer reads."""
    reason = why_not_write(steps(*root), steps(*folder), FileUser(ALICE, frozenset({ALICE, TRAINERS})), PRIVATE.get)
    assert (reason is None) == (not found), reason
    assert found in (reason or "")


SHARED: list[Told] = [*HOME, ("/dev/shm/p", ALICE, 0o2750, TRAINERS)]
OPEN: list[Told] = [*HOME, ("/dev/shm/p", ALICE, 0o755)]
ALICES: list[Told] = [("/dev/shm/p/s", ALICE, 0o2750, TRAINERS)]


@pytest.mark.parametrize(
    ("root", "folder", "groups", "found"),
    [
        (SHARED, ALICES, {TRAINERS}, ""),
        (SHARED, ALICES, set(), "/dev/shm/p belongs to another user"),
        (OPEN, [("/dev/shm/p/s", ALICE, 0o755)], {TRAINERS}, "chgrp GROUP /dev/shm/p && chmod 2750 /dev/shm/p"),
        (HOME, [("/dev/shm/s", ALICE, 0o755)], {TRAINERS}, "/dev/shm/s belongs to another user"),
        ([*HOME, ("/dev/shm/p", 0, 0o3770, TRAINERS)], ALICES, {TRAINERS}, ""),
        ([*HOME, ("/dev/shm/p", 0, 0o2770, TRAINERS)], ALICES, {TRAINERS}, "every member of group 70050 can replace"),
        ([*HOME, ("/dev/shm/p", 0, 0o3777, TRAINERS)], ALICES, {TRAINERS}, "/dev/shm/p/s belongs to another user"),
        ([*HOME, ("/dev/shm/p", BOB, 0o700)], [("/dev/shm/p/s", BOB, 0o700)], set(), ""),
        (SHARED, [("/dev/shm/p/s", ALICE, 0o2770, TRAINERS)], {TRAINERS}, "every member of group 70050 can replace"),
        (SHARED, [("/dev/shm/p/s", 0, 0o755)], {TRAINERS}, ""),
        ([*HOME, ("/dev/shm/q", CAROL, 0o755), ("/dev/shm/q/p", ALICE, 0o2750, TRAINERS)], ALICES, {TRAINERS},
         "/dev/shm/q belongs to another user (user 70003"),
    ],
    ids=[
        "a setgid root of one's group", "of another group", "readable by all", "straight in shared memory",
        "an administrator's root", "members can replace", "strangers can make folders", "one's own",
        "members can write", "root's", "below a third user's folder",
    ],
)  # fmt: skip
def test_a_reader_trusts_another_users_folder_only_in_a_setgid_root_of_its_group(
    root: list[Told], folder: list[Told], groups: set[int], found: str
) -> None:
    """The owner of such a root shares it on purpose. A user who made a folder of that name first is not a producer."""
    reason = why_not_read(steps(*root), steps(*folder), FileUser(BOB, frozenset({BOB, *groups})), PRIVATE.get)
    assert (reason is None) == (not found), reason
    assert found in (reason or "")


def test_root_reads_in_the_setgid_root_of_any_user_and_nowhere_else_of_one() -> None:
    """Root has the rights of each group, and a replaced folder would give most to a process of root."""
    superuser = FileUser(0, frozenset({0}))
    assert why_not_read(steps(*SHARED), steps(*ALICES), superuser, PRIVATE.get) is None
    refused = why_not_read(steps(*OPEN), steps(("/dev/shm/p/s", ALICE, 0o755)), superuser, PRIVATE.get)
    assert "run as user 70001" in (refused or "")


@pytest.mark.parametrize(("owner", "is_fine"), [(ALICE, True), (0, True), (BOB, False)])
def test_a_symlink_counts_by_its_owner(owner: int, is_fine: bool) -> None:
    """Its mode is always 0777 and means nothing. Its owner decides where it leads."""
    way = [*steps(*HOME), link("/dev/shm/p", owner), *steps(("/mnt", 0, 0o755), ("/mnt/p", ALICE, 0o700))]
    reason = why_not_write(way, [], FileUser(ALICE, frozenset({ALICE})), PRIVATE.get)
    assert (reason is None) == is_fine
    assert is_fine or "/dev/shm/p belongs to another user" in str(reason)


def test_a_walk_names_every_component_links_and_their_targets_too(tmp_path: Path) -> None:
    """A component that is left out is not checked."""
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "relative").symlink_to("other/../real")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative" / "deep")
    found = [step.path for step in walk(tmp_path / "absolute" / "missing" / "more")]
    assert found[0] == Path("/")
    at = found.index(tmp_path / "absolute")
    assert {tmp_path / "relative", tmp_path / "other", tmp_path / "real"} <= set(found[at:])
    assert found[-1] == tmp_path / "real" / "deep"
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="levels of symbolic links"):
        walk(tmp_path / "one")


# --- folders that are there -------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o077], ids=["umask 000", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask of the process."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def rights(path: Path) -> int:
    """Return the mode of a file or folder."""
    return stat.S_IMODE(path.stat().st_mode)


def folder_in(root: Path) -> SegmentFolder:
    """Make and return the folder of a stream."""
    folder = SegmentFolder(root, "train", STREAM)
    folder.make()
    return folder


def segment_in(folder: SegmentFolder) -> Path:
    """Make a file as a writer does."""
    opened = folder.take(SegmentInfo(STREAM, "train", 0, 0, new_token(), SPEC), 1 << 13)
    opened.release()
    return folder.path / opened.name


@pytest.mark.usefixtures("umask")
def test_a_streams_folder_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask is, payloads are private data."""
    root = tmp_path / "new" / "segments"
    folder = folder_in(root)
    folder.require()
    folder.require_own()
    assert [rights(path) for path in (root, folder.path)] == [0o700, 0o700]
    assert not rights(root.parent) & 0o022


@pytest.mark.usefixtures("umask")
def test_a_setgid_root_keeps_its_group(tmp_path: Path) -> None:
    """The owner can let trainers of other users read: each file belongs to the group, and no group may write."""
    root = tmp_path / "segments"
    root.mkdir()
    group = TRAINERS if os.geteuid() == 0 else os.getegid()
    os.chown(root, -1, group)
    root.chmod(0o2750)
    folder = folder_in(root)
    file = segment_in(folder)
    assert rights(folder.path) == 0o2750
    assert [rights(path) for path in (file, folder.path / MARK)] == [0o640, 0o640]
    assert {path.stat().st_gid for path in (folder.path, file, folder.path / MARK)} == {group}


def test_a_folder_of_an_earlier_release_is_closed_by_its_next_writer(tmp_path: Path) -> None:
    """It was made with the umask, readable for all users."""
    folder = folder_in(tmp_path)
    folder.path.chmod(0o755)
    folder.require_own()
    assert rights(folder.path) == 0o700


@pytest.mark.parametrize("which", ["ancestor", "root", "folder"])
def test_a_folder_that_others_may_write_to_is_refused_by_both_sides(tmp_path: Path, which: str) -> None:
    """They could rename the files there, and put their own in their place."""
    root = tmp_path / "above" / "segments"
    folder = folder_in(root)
    path = {"ancestor": root.parent, "root": root, "folder": folder.path}[which]
    path.chmod(0o777)
    told = rf"every user can replace the files in {path} \(user \w+, group \w+, mode 0777\).*chmod go-w {path}"
    for refuses in (folder.require, folder.require_own, folder.make):
        with pytest.raises(SegmentsUnseen, match=told):
            refuses()
        with pytest.raises(SegmentsUnseen, match=r"chmod \+t" if which != "folder" else rf"chmod go-w {path}\)\Z"):
            refuses()
    assert not folder.remove()
    assert folder.path.exists()
    path.chmod(0o755)
    folder.require()
    path.chmod(0o1777)  # in a sticky folder they cannot replace files, but they could add files to a stream's folder
    if which != "folder":
        folder.require_own()
    else:
        with pytest.raises(SegmentsUnseen, match="every user"):
            folder.require_own()


def test_links_of_ones_own_lead_to_the_segments(tmp_path: Path) -> None:
    """A root that was moved to another disk, and a stream's folder that was moved."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "segments").symlink_to("disk")
    folder = folder_in(tmp_path / "segments")
    (tmp_path / "disk" / folder.path.name).rename(tmp_path / "moved")
    folder.path.symlink_to(tmp_path / "moved")
    folder.require()
    folder.require_own()
    assert segment_in(folder).resolve().parent == tmp_path / "moved"


def test_a_pipe_instead_of_a_mark_holds_nobody_up(tmp_path: Path) -> None:
    """A process that examines a folder must not wait for other users who may write to it."""
    folder = folder_in(tmp_path)
    (folder.path / MARK).unlink()
    os.mkfifo(folder.path / MARK)
    with within(20), pytest.raises(SegmentsUnseen, match="no file"):
        folder.require()


@pytest.mark.parametrize("mark", ["another's", "none", "a pipe"])
def test_a_deletion_removes_nothing_from_a_folder_whose_mark_names_another_stream(tmp_path: Path, mark: str) -> None:
    """A user who may write to the keys of a stream chooses the folder, in which other programs may keep their files."""
    folder = SegmentFolder(tmp_path, "conf", "d")
    folder.path.mkdir(0o700)
    names = {"stream.py", "stream.pem", "stream.checked", "0-0-aabbccddeeff.seg"}
    for name in names:
        (folder.path / name).write_text("another's")
    if mark == "another's":
        (folder.path / MARK).write_text("another")
    elif mark == "a pipe":
        os.mkfifo(folder.path / MARK)
    before = {path.name for path in folder.path.iterdir()}
    with within(20):
        assert not folder.remove()
    assert {path.name for path in folder.path.iterdir()} == before
    assert {(folder.path / name).read_text() for name in names} == {"another's"}


def test_a_deletion_keeps_files_that_penstock_does_not_make_and_can_be_run_again(tmp_path: Path) -> None:
    """The mark goes last, because without it the rest would be nobody's for ever."""
    folder = folder_in(tmp_path)
    segment_in(folder)
    folder.give_back(segment_in(folder).name, keep=True)
    for name in (NOTES, f"{MARK}.{new_token()}", "stream.py", "streams"):
        (folder.path / name).touch()
    assert not folder.remove()
    assert {path.name for path in folder.path.iterdir()} == {MARK, "stream.py", "streams"}
    for name in ("stream.py", "streams"):
        (folder.path / name).unlink()
    assert folder.remove()
    assert not folder.path.exists()


def test_a_deletion_that_was_killed_behind_the_mark_is_ended_by_the_next(tmp_path: Path) -> None:
    """An empty folder is all that it leaves."""
    folder = folder_in(tmp_path)
    (folder.path / MARK).unlink()
    assert folder.remove()
    assert not folder.path.exists()
