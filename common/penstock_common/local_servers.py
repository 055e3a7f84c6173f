"""The ``penstock server`` processes of this user on this host: each announces itself in a private folder.

Each server keeps one file, ``server-PORT.url``, and holds a lock on it for as long as it lives. The kernel releases the
lock however the server ends, so a client recognises a file that was left behind.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock_common.errors import ServerUnsuitable

_NAME = re.compile(r"server-[0-9]{1,5}\.url")
_LONGEST = 4096


@dataclass(frozen=True)
class LocalServer:
    """A running server: its URL, with the password, and the file that announces it."""

    url: str = field(repr=False)
    port: int
    file: Path


@dataclass(frozen=True)
class LocalServers:
    """The running servers of this user, the last started first, and the files that dead ones left."""

    running: Sequence[LocalServer]
    left: Sequence[Path]


def private_folder(session: Path | None) -> Path:
    """Return the folder where this user's servers announce themselves. It need not exist.

    Args:
        session: XDG_RUNTIME_DIR, which counts if it belongs to this user alone.
    """
    user = os.geteuid()
    for folder in (session, Path(f"/run/user/{user}")):
        if folder is not None and folder.is_absolute():
            with suppress(OSError):
                require_private_folder(folder)
                return folder / "penstock"
    return Path(tempfile.gettempdir()) / f"penstock-{user}"


@contextmanager
def announced(url: str, port: int, folder: Path) -> Iterator[Path]:
    """Keep a file with the URL of a server that runs here, until the block ends.

    Yields:
        The file, mode 0600.

    Raises:
        ServerUnsuitable: The folder cannot be made, or it is not this user's alone.
    """
    file = folder / f"server-{port}.url"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        require_private_folder(folder)
        descriptor = _placed(file, f"{url}\n")
    except OSError as error:
        why = f"cannot tell this user's programs of the server in {error.filename or folder}: {error.strerror}"
        raise ServerUnsuitable(f"{why}; set XDG_RUNTIME_DIR to a folder of your own (mode 0700)") from None
    try:
        yield file
    finally:
        with suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                file.unlink()  # not the file of a server that took the port since
        os.close(descriptor)


def find_servers_of_user(folder: Path) -> LocalServers:
    """Return the servers that announced themselves in a folder.

    Files that other users could have put there do not count.
    """
    try:
        require_private_folder(folder)  # otherwise its owner may have moved this user's files there from elsewhere
    except OSError:
        return LocalServers((), ())
    running: list[tuple[int, LocalServer]] = []
    left: list[Path] = []
    for file in sorted(path for path in folder.glob("server-*.url") if _NAME.fullmatch(path.name)):
        with suppress(OSError):
            descriptor = open_private(file)
            try:
                if _is_locked(descriptor):
                    url = os.read(descriptor, _LONGEST).decode(errors="replace").strip()
                    port = int(file.stem.partition("-")[2])
                    running.append((os.fstat(descriptor).st_mtime_ns, LocalServer(url, port, file)))
                else:
                    left.append(file)
            finally:
                os.close(descriptor)
    return LocalServers([server for _, server in sorted(running, key=lambda each: -each[0])], left)


def _placed(file: Path, text: str) -> int:
    """Put a locked file in its place atomically: no process sees it without its lock or its text.

    Returns:
        The descriptor that holds the lock.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # 0600
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, text.encode())
        os.replace(name, file)  # noqa: PTH105 - both are in one folder
    except BaseException:
        os.close(descriptor)
        Path(name).unlink(missing_ok=True)
        raise
    return descriptor


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


# --- files that only one user can read --------------------------------------------------------------------------------


_OTHERS = 0o077
_MAX_TEXT_BYTES = 1 << 16


class NotPrivate(OSError):
    """A file or folder that another user made or may use. ``strerror`` says what was found and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(0, why, str(path))


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically by one that only this user can read: a reader sees the old text or the new one.

    Raises:
        OSError: The folder cannot be written.
    """
    os.close(_placed(path, text))


def read_private(path: Path) -> str:
    """Return the text of a file that this user alone can use, without the spaces around it.

    Raises:
        FileNotFoundError: The file does not exist.
        NotPrivate: It is a link or no regular file, or another user made it or may use it.
        OSError: It cannot be read.
    """
    with os.fdopen(open_private(path), "rb") as file:
        return file.read(_MAX_TEXT_BYTES).decode(errors="replace").strip()


def open_private(path: Path) -> int:
    """Return a descriptor to read a file that this user alone can use. Raises as ``read_private`` does."""
    if path.is_symlink():
        raise NotPrivate(path, "it is a symbolic link: remove it")
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    if why := _not_private(os.fstat(descriptor), stat.S_IFREG):
        os.close(descriptor)
        raise NotPrivate(path, why)
    return descriptor


def require_private_folder(path: Path) -> None:
    """Check that this user alone can use a folder.

    Raises:
        FileNotFoundError: The folder does not exist.
        NotPrivate: It is a link or no folder, or another user made it or may use it.
    """
    if why := _not_private(path.lstat(), stat.S_IFDIR):
        raise NotPrivate(path, why)


def _not_private(found: os.stat_result, kind: int) -> str:
    """Return why a file or folder is not this user's alone, or '' if it is."""
    if stat.S_IFMT(found.st_mode) != kind:
        return f"it is no {'folder' if kind == stat.S_IFDIR else 'regular file'}: remove it"
    if found.st_uid != os.geteuid():
        return f"it belongs to user {found.st_uid}, not to {os.geteuid()}: remove it"
    if found.st_mode & _OTHERS:
        return f"other users may use it (mode {stat.S_IMODE(found.st_mode):o}): take their rights with chmod go="
    return ""
