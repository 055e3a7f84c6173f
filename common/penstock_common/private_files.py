"""Files and folders that only one user can read, for passwords and URLs with passwords."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

_OTHERS = 0o077
_LONGEST = 1 << 16


class NotPrivate(OSError):
    """A file or folder that another user made or may use. ``strerror`` says what was found and what to do."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(0, why, str(path))


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically by one that only this user can read: a reader sees the old text or the new one.

    Raises:
        OSError: The folder cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(name, path)  # noqa: PTH105 - both are in one folder
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_private(path: Path) -> str:
    """Return the text of a file that this user alone can use, without the spaces around it.

    Raises:
        FileNotFoundError: The file does not exist.
        NotPrivate: It is a link or no regular file, or another user made it or may use it.
        OSError: It cannot be read.
    """
    with os.fdopen(open_private(path), "rb") as file:
        return file.read(_LONGEST).decode(errors="replace").strip()


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
