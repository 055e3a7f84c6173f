"""A client finds this user's ``penstock server`` by a private file that lives as long as the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock_common import settings
from penstock_common.errors import ServerUnsuitable
from penstock_common.local_servers import (
    NotPrivate,
    announced,
    find_servers_of_user,
    private_folder,
    read_private,
    require_private_folder,
    write_private,
)
from penstock_common.settings import DEFAULT_URL, Settings

COMMON = str(Path(settings.__file__).parents[1])
HOLDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from penstock_common.local_servers import announced
with announced(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])):
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def login(tmp_path: Path) -> Path:
    """Make a runtime folder like that of a login."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def look(login: Path, **variables: str) -> Settings:
    """Return the settings of a program of this login."""
    return Settings.from_environment({"XDG_RUNTIME_DIR": str(login), **variables})


@contextmanager
def holder(url: str, port: int, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that announces a server."""
    command = [sys.executable, "-c", HOLDER, COMMON, url, str(port), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the messages of the settings to the user."""
    told: list[str] = []
    monkeypatch.setattr(settings, "_tell_once", told.append)
    return told


def test_a_client_without_a_url_takes_the_running_server_of_its_user(login: Path, said: list[str]) -> None:
    """A password that users need not copy stays in use."""
    assert look(login).url == DEFAULT_URL
    with announced("redis://default:p@127.0.0.1:7000", 7000, look(login).own_servers) as file:
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert look(login).url == look(login).queue_url == "redis://default:p@127.0.0.1:7000"
        assert look(login, PENSTOCK_URL="redis://a").url == "redis://a"
    assert not file.exists()
    assert look(login).url == DEFAULT_URL
    assert said == []


def test_of_two_servers_the_one_started_last_is_taken_and_its_end_leaves_the_other(
    login: Path, said: list[str]
) -> None:
    """Two ports of one user: each has a separate file, and the choice is reported."""
    folder = look(login).own_servers
    with announced("redis://one", 7001, folder) as one:
        os.utime(one, ns=(0, 0))  # the older file, however coarse the clock of the file system
        with announced("redis://two", 7002, folder) as two:
            assert look(login).url == "redis://two"
            assert said == [
                f"2 servers of yours run here: taking the one started last, of {two}; PENSTOCK_URL names another"
            ]
        assert look(login).url == "redis://one"


def test_the_file_of_a_killed_server_is_named_and_passed_over(login: Path, said: list[str]) -> None:
    """SIGKILL leaves the file; a client must neither wait for a dead server nor fail without a reason."""
    folder = look(login).own_servers
    with holder("redis://dead", 7003, folder) as process:
        assert look(login).url == "redis://dead"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert look(login).url == DEFAULT_URL
    (sentence,) = said
    assert f"the server of {folder / 'server-7003.url'} was killed" in sentence
    assert DEFAULT_URL in sentence
    with announced("redis://anew", 7003, folder):
        assert look(login).url == "redis://anew"
    assert not list(folder.iterdir())


def test_a_server_that_ends_leaves_the_file_of_its_successor(login: Path) -> None:
    """The port is free before the process has ended, so another server may have announced itself on it."""
    folder = look(login).own_servers
    with announced("redis://second", 7004, folder) as file:
        first = announced("redis://first", 7004, folder)
        first.__enter__()
        with announced("redis://third", 7004, folder):
            first.__exit__(None, None, None)
            assert look(login).url == "redis://third"
        assert not file.exists()


def test_a_folder_that_others_may_write_to_announces_nothing(login: Path, said: list[str]) -> None:
    """The user who made the folder first could hard-link an old file of this user there."""
    folder = look(login).own_servers
    with announced("redis://moved", 7009, folder):
        folder.chmod(0o777)
        assert look(login).url == DEFAULT_URL
        folder.chmod(0o700)
        assert look(login).url == "redis://moved"
    assert said == []


@pytest.mark.parametrize("damage", ["group", "link", "folder"])
def test_a_file_that_another_user_could_have_made_does_not_count(login: Path, damage: str, said: list[str]) -> None:
    """Samples and jobs would go to the server of the file's author."""
    folder = look(login).own_servers
    with announced("redis://forged", 7005, folder) as file:
        if damage == "group":
            file.chmod(0o660)
        elif damage == "link":
            file.rename(folder / "elsewhere")
            file.symlink_to(folder / "elsewhere")
        else:
            file.unlink()
            file.mkdir()
        assert look(login).url == DEFAULT_URL
        assert find_servers_of_user(folder).running == []


def test_a_folder_that_others_may_use_is_neither_written_nor_the_login_s(tmp_path: Path) -> None:
    """A user who may write to the folder can replace the file, and a user who made the folder first can read it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    assert private_folder(shared).parent != shared
    assert private_folder(Path("relative")).is_absolute()
    with pytest.raises(ServerUnsuitable, match=r"shared: other users may use it \(mode 770\).*XDG_RUNTIME_DIR"):
        announced("redis://x", 7006, shared).__enter__()
    (tmp_path / "link").symlink_to(shared)
    with pytest.raises(ServerUnsuitable, match="link: it is no folder"):
        announced("redis://x", 7006, tmp_path / "link").__enter__()
    assert not list(shared.iterdir())


def test_a_file_or_folder_of_another_user_is_refused(login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger makes the folder in /tmp first, or links to a file of his own."""
    write_private(login / "file", "chosen")
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(NotPrivate, match=f"it belongs to user {owner}, not to {owner + 1}"):
        read_private(login / "file")
    with pytest.raises(NotPrivate, match=f"it belongs to user {owner}, not to {owner + 1}"):
        require_private_folder(login)
    assert private_folder(login).parent != login
