"""Another user of the host reads and writes nothing of a stream in segments, and its traps are refused.

Where root runs the tests that user is real, a child process that becomes ``nobody``. Else the same rights are looked at
from outside; the rules for owners are tried with made-up users in tests/common/segments/test_trust.py.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import stat
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import SegmentsUnseen
from penstock_common.segments.folder import MARK
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import ABANDONED, load_manifest
from penstock_common.stream.payloads import plane_of, segments_of
from penstock_common.stream.streams import load_stream
from tests.contracts.feed import SPEC, loader_of, numbers, open_stream, produce, replayed, sample, writer_of
from tests.contracts.processes import within

IS_ROOT = os.geteuid() == 0
NOBODY = pwd.getpwnam("nobody")
TRAINERS = 70050
"""A group that this host need not have."""


def as_nobody(act: Callable[[], Any], groups: Sequence[int] = ()) -> Any:
    """Return the result of ``act`` in a child that has become ``nobody``, a member of these groups."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.setgroups(groups)
            os.setgid(NOBODY.pw_gid)
            os.setuid(NOBODY.pw_uid)
            answer = json.dumps(act())
        except BaseException:
            answer = json.dumps(traceback.format_exc())
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    told = b""
    while part := os.read(read, 1 << 16):
        told += part
    os.close(read)
    os.waitpid(pid, 0)
    return json.loads(told)


def refused(*attacks: Callable[[], object]) -> list[str]:
    """Return for each attack the error's name, or what it got."""
    met = []
    for attack in attacks:
        try:
            met.append(f"got {attack()!r}")
        except OSError as error:
            met.append(type(error).__name__)
    return met


@pytest.fixture
def shared(memory_path: Path) -> Path:
    """A folder that every user of the host reaches and may make folders in, as ``/dev/shm`` itself."""
    memory_path.chmod(0o1777)
    return memory_path


def test_another_user_neither_reads_nor_changes_a_stream(any_url: str, any_client: redis.Redis, shared: Path) -> None:
    """Samples may be anybody's medical images; and a payload that is replaced is what a trainer learns."""
    root = shared / "segments"
    produce(any_url, "t", 100, payload=f"segments:{root}")
    folder = segments_of(open_stream(any_client, "t"))
    assert folder is not None
    files = [folder.path / name for name in folder.names()]
    assert files
    rights = [stat.S_IMODE(path.stat().st_mode) for path in (root, folder.path)]
    assert rights == [0o700, 0o700], "nobody else gets in"
    if IS_ROOT:
        attacks: list[Callable[[], object]] = [
            lambda: list(root.iterdir()),
            lambda: list(folder.path.iterdir()),
            *(lambda file=file: file.read_bytes() for file in (*files, folder.path / MARK)),
            *(lambda file=file: os.open(file, os.O_WRONLY) for file in files),
            lambda: os.truncate(files[0], 0),
            lambda: (folder.path / "free-0123456789ab.seg").write_bytes(b"x"),
            lambda: folder.path.rename(root / "away"),
            lambda: root.rename(shared / "away"),
            lambda: (root / "new").mkdir(),
            lambda: os.link(files[0], shared / "link"),
            lambda: root.chmod(0o777),
        ]
        assert set(as_nobody(lambda: refused(*attacks))) == {"PermissionError"}
    assert replayed(any_url) == [*range(100)]


@pytest.mark.parametrize("trap", ["root", "link", "folder above"])
def test_a_producer_keeps_nothing_where_another_user_was_first(any_url: str, shared: Path, trap: str) -> None:
    """A user who makes ``/dev/shm/penstock`` first must not get others' samples, nor redirect writers."""
    victim, planted = shared / "victim", shared / "planted"
    victim.mkdir(0o700)
    root = planted / "segments" if trap == "folder above" else planted

    def plant() -> str:
        if trap == "link":
            planted.symlink_to(victim)
        else:
            root.mkdir(parents=True)
            planted.chmod(0o755)
        return "planted"

    if IS_ROOT:
        assert as_nobody(plant) == "planted"
        told = rf"{planted} belongs to another user \(user nobody.*name a folder of user root, or run as user nobody"
    else:  # this user cannot make folders of another one; he can make one that another may replace
        plant()
        planted.chmod(0o777)
        told = rf"every user can replace the files in {planted.resolve()} "
    with pytest.raises(SegmentsUnseen, match=told):
        produce(any_url, "t", 10, payload=f"segments:{root}")
    assert not list(victim.iterdir())
    assert not list(root.iterdir())


def test_a_trainer_of_another_user_reads_in_a_setgid_root_and_only_as_a_member_of_its_group(
    any_url: str, any_client: redis.Redis, shared: Path
) -> None:
    """Producers and trainers may be different users, and the owner of the root decides if a group may read."""
    root = shared / "segments"
    root.mkdir(0o700)
    group = TRAINERS if IS_ROOT else os.getegid()
    os.chown(root, -1, group)
    root.chmod(0o2750)
    produce(any_url, "t", 100, payload=f"segments:{root}")
    folder = segments_of(open_stream(any_client, "t"))
    assert folder is not None
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o2750
    assert {(folder.path / name).stat().st_gid for name in folder.names()} == {group}

    def train() -> list[int] | str:
        try:
            with loader_of(any_url, group="other") as loader:
                return sorted(numbers(loader))
        except SegmentsUnseen as error:
            return str(error)

    with loader_of(any_url) as loader:
        assert sorted(numbers(loader)) == [*range(100)]
    if IS_ROOT:
        told = as_nobody(train)
        assert f"permission denied ({root}: user root, group {TRAINERS}, mode 2750); run as that user" in told
        assert as_nobody(lambda: refused(lambda: (folder.path / "x").mkdir()), [TRAINERS]) == ["PermissionError"]
        assert as_nobody(train, [TRAINERS]) == [*range(100)]
    else:
        assert train() == [*range(100)]


def as_user(act: Callable[[], Any]) -> Any:
    """Return the result of ``act`` as a user whom rights bind: root's child becomes ``nobody``."""
    return as_nobody(act) if IS_ROOT else act()


@pytest.mark.parametrize("which", ["above", "root", "folder", "mark"])
def test_the_part_of_the_path_that_denies_is_named(any_url: str, shared: Path, which: str) -> None:
    """An operator needs to know which folder to open, and its owner needs another advice than others."""
    root = shared / "above" / "segments"

    def told() -> list[str]:
        root.parent.mkdir(mode=0o755)
        produce(any_url, "t", 100, payload=f"segments:{root}")
        (folder,) = root.iterdir()
        part = {"above": root.parent, "root": root, "folder": folder, "mark": folder / MARK}[which]
        part.chmod(0)
        with connect(any_url) as client:
            found = plane_of(load_stream(client, "t"))
        part.chmod(0o700)
        assert not found.is_seen
        return [str(part), found.why_unseen]

    found = as_user(told)
    assert len(found) == 2, found
    part, why = found
    assert re.search(rf"permission denied \({part}: user .*, mode 0000\); .*chmod u\+rwx {part}\)", why), why


def test_a_writer_whose_folder_is_closed_gives_its_epoch_up(any_url: str, shared: Path) -> None:
    """It must end with an error that names the folder, and nobody waits for its epoch."""
    root = shared / "segments"

    def write() -> list[str]:
        with (
            pytest.raises(SegmentsUnseen) as caught,
            writer_of(any_url, spec=SPEC, payload=f"segments:{root}", budget_bytes=3 << 20, block_bytes=20_000) as made,
            made.epoch() as epoch,
        ):
            for number in range(50_000):
                epoch.write(sample(number))
                if number == 1000:
                    (folder,) = root.iterdir()
                    folder.chmod(0)
        folder.chmod(0o700)
        return [str(folder), str(caught.value)]

    told = as_user(write)
    assert len(told) == 2, told
    folder, why = told
    assert re.search(rf"permission denied \({folder}: user .*, mode 0000\)", why), why
    with connect(any_url) as client:
        assert load_manifest(client, load_stream(client, "t"), 0).state == ABANDONED


@pytest.mark.parametrize("trap", ["pipe", "link"])
def test_a_look_for_leftovers_is_neither_held_up_nor_led_elsewhere(
    any_url: str, any_client: redis.Redis, shared: Path, trap: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Everybody may make folders in ``/dev/shm``, where an operator removes what deleted streams left."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    monkeypatch.setattr("penstock_common.stream.removal.deletion.QUIET_S", 0.0)
    mine = shared / "mine"
    produce(any_url, "t", 100, payload=f"segments:{mine}")
    folder = segments_of(open_stream(any_client, "t"))
    assert folder is not None
    any_client.flushall()  # so that it is a leftover
    there = shared / "there"

    def plant() -> str:
        there.mkdir()
        planted = there / folder.path.name
        if trap == "link":
            planted.symlink_to(folder.path)
        else:
            planted.mkdir()
            os.mkfifo(planted / MARK)
        there.chmod(0o755)
        return "planted"

    assert (as_nobody(plant) if IS_ROOT else plant()) == "planted"
    if not IS_ROOT:
        there.chmod(0o777)
    with within(20):
        assert main(["delete", "--segments", str(there), "--yes"]) == 0
    assert ": removed" not in capsys.readouterr().out
    assert folder.names(), "it lies elsewhere, and is its owner's"
    assert main(["delete", "--segments", str(mine), "--yes"]) == 0
    assert not folder.path.exists()
