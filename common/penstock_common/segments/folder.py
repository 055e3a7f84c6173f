"""A stream's folder of segments: the setting that names it, names, locks, and files taken and given back. No Redis.

A file's name holds a random token that changes each time the file is used again, so a name always means one content.
A process that reads or writes a file holds a shared lock on it (flock). A file is used again only under an exclusive
lock, which the kernel grants once the last of these processes has finished or died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISGID, S_ISREG

from penstock_common.errors import BadOption, BadSegment, PenstockError, SegmentGone, SegmentsUnseen
from penstock_common.segments.trust import FileUser, PathStep, denying_step, walk, why_not_read, why_not_write
from penstock_common.wire.header import NAME
from penstock_common.wire.segment import SegmentInfo, info_bytes, pack_info, parse_info

MARK = "stream"
"""The name of a file that holds the stream's id: a process that reads it sees the stream's segments."""
NOTES = f"{MARK}.checked"
"""The name of the readers' notes on checked blocks."""
_BESIDE_MARK = re.compile(rf"({re.escape(NOTES)}|{MARK}\.[0-9a-f]{{12}})\Z")
"""The names of the notes, and of a mark whose writer died before it gave it its name."""
_FREE = re.compile(r"free-[0-9a-f]{12}\.seg\Z")
_NEW = re.compile(r"new-[0-9a-f]{12}\.seg\Z")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
MODE = 0o640
"""The mode of a file, whatever the umask. The folder's mode decides whether a group reaches it."""
FOLDER_MODE, SHARED_MODE, ABOVE_MODE = 0o700, 0o2750, 0o755
"""The modes of a stream's folder and of a root made for it, of a stream's folder in a setgid root, and of new folders
above a root."""
MARK_BYTES = 64
"""Bytes that are read of a mark. No id is as long."""
VIEWS_A_CALL = 1000
"""The views that one call reads or writes, below IOV_MAX, which is 1024."""
REMOVALS = 5
_OURS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Errors of this process or host, not of the file: another process may be able to read it."""

WhyNot = Callable[[Sequence[PathStep], Sequence[PathStep], FileUser], str | None]


def new_token() -> str:
    """Return a random token for one life of a file."""
    return secrets.token_hex(6)


def sync(path: Path) -> None:
    """Write a file, or a folder with the names of its files, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """An open segment file."""

    fd: int
    name: str
    head: bytes
    nbytes: int
    is_fresh: bool = False
    """Whether it was made just now and has no pages in memory yet. Writing such a file is cheaper than mapping it."""

    def close(self) -> None:
        """Close the file. A process that was forked while it was open keeps the lock."""
        os.close(self.fd)

    def release(self) -> None:
        """Unlock the file, also for processes that were forked while it was open, and close it. Only its writer may."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def open_segment(folder: Path, name: str) -> OpenSegment:
    """Open a segment of a folder for reading.

    Raises:
        SegmentGone: There is no file of that name, or it is no segment.
        SegmentsUnseen: This process cannot open the file, but others may.
    """
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)  # a pipe of that name would block
    except OSError as error:
        raise unreadable(str(folder / name), error) from None
    try:
        if not S_ISREG(os.fstat(fd).st_mode):
            raise BadSegment("it is no file")
        first = os.pread(fd, 64, 0)
        head = os.pread(fd, info_bytes(first), 0)
        if parse_info(head).file != name:
            raise SegmentGone(f"the payload is in {name}, which has been used again")
        return OpenSegment(fd, name, head, os.fstat(fd).st_size)
    except (BadSegment, OSError) as error:
        os.close(fd)
        raise SegmentGone(f"the payload is in {name}: {error}") from None
    except BaseException:
        os.close(fd)
        raise


def unreadable(name: str, error: OSError) -> PenstockError:
    """Return the error to raise: SegmentsUnseen if this process or host is the cause, else SegmentGone."""
    if error.errno not in _OURS:
        return SegmentGone(f"the payload is in {name}, which cannot be read: {error.strerror}")
    return SegmentsUnseen(
        f"the payload is in {name}, which this process cannot open: {error.strerror}; it needs the right to read the "
        "folder's files, and a limit of open files (ulimit -n) above what it has open"
    )


def read_mark(folder: Path) -> str:
    """Return the id of the stream whose folder this is. Raises OSError if that cannot be read."""
    fd = os.open(folder / MARK, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)  # a pipe under that name would block
    try:
        if not S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, f"{MARK} is no file")
        return os.read(fd, MARK_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)


def _write_mark(path: Path, stream_id: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, MODE)
    try:
        os.fchmod(fd, MODE)
        os.write(fd, f"{stream_id}\n".encode())
    finally:
        os.close(fd)


class SegmentFolder:
    """The folder ``root/<stream>.<id>``, which holds all segments of one life of a stream.

    Args:
        root: The folder that contains the folders of streams.
        stream: The stream's name.
        stream_id: The stream's id, which differs when a stream is made again.
    """

    def __init__(self, root: str | Path, stream: str, stream_id: str) -> None:
        self.root = Path(root).expanduser().absolute()
        self.path = self.root / f"{stream}.{stream_id}"
        self.stream, self.stream_id = stream, stream_id

    def make(self) -> None:
        """Make the folder, for a writer.

        Raises:
            SegmentsUnseen: It cannot be made, or another user could replace it.
        """
        what = f"segments of {self.stream!r} cannot be kept in {self.path}"
        self._check(what, why_not_write)
        try:
            for folder in reversed(self.root.parents):
                folder.mkdir(ABOVE_MODE, exist_ok=True)
            self.root.mkdir(FOLDER_MODE, exist_ok=True)
            self.path.mkdir(FOLDER_MODE, exist_ok=True)
            self._check(what, why_not_write)  # again, because parts may have existed before
            self._limit_rights()
            mark, own = self.path / MARK, self.path / f"{MARK}.{new_token()}"
            if not mark.exists():
                _write_mark(own, self.stream_id)
                own.rename(mark)  # renamed, so that no process reads half of it
        except PermissionError:
            raise self._denied(what) from None
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None

    def require(self) -> None:
        """Require that this process sees the folder of this very stream, and may read from it.

        Raises:
            SegmentsUnseen: It does not see it, or another user could replace it.
        """
        self._require(f"segments of {self.stream!r} cannot be read from {self.path}", why_not_read)

    def require_own(self) -> None:
        """Require that this process sees the folder of this very stream, and may write to it.

        Raises:
            SegmentsUnseen: It does not see it, or another user could replace it.
        """
        what = f"segments of {self.stream!r} cannot be kept in {self.path}"
        self._require(what, why_not_write)
        try:
            self._limit_rights()  # an earlier release gave more rights
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None

    def _require(self, what: str, why_not: WhyNot) -> None:
        try:
            found = read_mark(self.path)
        except PermissionError:
            self._check(what, why_not)  # it may give a better reason
            raise self._denied(what) from None
        except OSError as error:
            raise self._unseen(error.strerror or "unreadable") from None
        self._check(what, why_not)
        if found != self.stream_id:
            raise self._unseen(found)

    def _denied(self, what: str) -> SegmentsUnseen:
        step = denying_step(self.path / MARK)
        own = f"give it back to its owner (chmod u+rwx {shlex.quote(str(step.path))})"
        others = "run as that user, or, where the mode begins with 2, as a member of that group"
        advice = own if step.uid == FileUser.current().uid else others
        return SegmentsUnseen(f"{what}: permission denied ({step.path}: {step.words()}); {advice}")

    def _unseen(self, found: str) -> SegmentsUnseen:
        return SegmentsUnseen(
            f"stream {self.stream!r} keeps its payloads in {self.path}, which this process does not see "
            f"({found}): run it on that host, mount the same file system there, or say where it is mounted with "
            "PENSTOCK_SEGMENTS; over a network alone, produce with payload='inline'"
        )

    def _check(self, what: str, why_not: WhyNot) -> None:
        """Raise SegmentsUnseen if another user could replace the folder, or a component of its path."""
        try:
            root = walk(self.root)
            folder: list[PathStep] = []
            with suppress(PermissionError):  # the root decides who may enter
                folder = walk(self.path)[len(root) :]
        except PermissionError:
            raise self._denied(what) from None
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None
        if (reason := why_not(root, folder, FileUser.current())) is not None:
            raise SegmentsUnseen(f"{what}: {reason}")

    def _limit_rights(self) -> None:
        """Give the folder to its owner alone, or in a setgid root also to the root's group, to read."""
        root, folder = self.root.stat(), self.path.stat()
        is_shared = root.st_mode & S_ISGID and folder.st_gid == root.st_gid
        mode = SHARED_MODE if is_shared else FOLDER_MODE
        if S_IMODE(folder.st_mode) != mode:
            self.path.chmod(mode)

    # --- listing ---

    def names(self) -> dict[str, os.stat_result]:
        """Return the segments by name, with their sizes and times."""
        return self._list(NAME)

    def spare(self) -> dict[str, os.stat_result]:
        """Return the files that wait to be used again."""
        return self._list(_FREE)

    def unfinished(self) -> dict[str, os.stat_result]:
        """Return the files that are being made, or whose maker died."""
        return self._list(_NEW)

    def _list(self, pattern: re.Pattern[str]) -> dict[str, os.stat_result]:
        found: dict[str, os.stat_result] = {}
        for entry in self._entries():
            if pattern.match(entry.name):
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def _entries(self) -> list[os.DirEntry[str]]:
        """Return the folder's entries: none if it is gone, or if this process may not list it."""
        with suppress(OSError), os.scandir(self.path) as entries:
            return list(entries)
        return []

    # --- taking and giving back ---

    def take(self, info: SegmentInfo, nbytes: int, least: int = 0) -> OpenSegment:
        """Return a locked file for writing, under ``info``'s name.

        A spare file is used again if there is one, because its pages are in memory already. On a full disk, spare files
        that cannot be used are removed for a new one.

        Args:
            info: What the file says of itself.
            nbytes: The size of a new file, and of a spare one if there is one so large.
            least: The size that is enough (default: ``nbytes``). Smaller spare files are enlarged to it.

        Raises:
            OSError: No file can be made; ENOSPC on a full disk.
        """
        spare = sorted(self.spare().items(), key=lambda item: item[1].st_size)
        enough = [name for name, stat in spare if stat.st_size >= nbytes]
        for name in (*enough, *(name for name, _ in reversed(spare[: len(spare) - len(enough)]))):
            if (taken := self._take_spare(name, info, least or nbytes)) is not None:
                return taken
        while True:
            try:
                return self._make_new(info, nbytes)
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not is_full or not any(self.give_back(spare.pop()[0], keep=False) for _ in range(len(spare))):
                    raise

    def _take_spare(self, name: str, info: SegmentInfo, least: int) -> OpenSegment | None:
        with suppress(OSError), self._alone(name) as fd:
            if fd is None:
                return None
            if os.fstat(fd).st_size < least:
                os.posix_fallocate(fd, 0, least)
            head = pack_info(info)
            os.pwrite(fd, head, 0)
            (self.path / name).rename(self.path / info.file)
            return self._locked(os.dup(fd), info, head)
        return None

    def _make_new(self, info: SegmentInfo, nbytes: int) -> OpenSegment:
        path = self.path / f"new-{info.token}.seg"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, MODE)
        try:
            os.fchmod(fd, MODE)  # whatever the umask
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.posix_fallocate(fd, 0, nbytes)  # a full disk is an error here; in a map it would be a SIGBUS
            head = pack_info(info)
            os.pwrite(fd, head, 0)
            path.rename(self.path / info.file)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return OpenSegment(fd, info.file, head, nbytes, is_fresh=True)

    def _locked(self, fd: int, info: SegmentInfo, head: bytes) -> OpenSegment | None:
        """Replace the exclusive lock by a shared one. Return None if another process took the file in between."""
        fcntl.flock(fd, fcntl.LOCK_SH)
        found = OpenSegment(fd, info.file, head, os.fstat(fd).st_size)
        if self.has(fd, info.file):
            return found
        found.close()
        return None

    def give_back(self, name: str, *, keep: bool) -> bool:
        """Return a file that no entry needs. With ``keep`` it waits for its next use, otherwise it is removed.

        A process that still reads the file may continue. The file is used again once no process reads it.

        Returns:
            False if the file is gone, or if it was to be removed and is in use.
        """
        if keep:
            try:
                (self.path / name).rename(self.path / f"free-{new_token()}.seg")
            except OSError:
                return False
            return True
        with self._alone(name) as fd:
            if fd is None:
                return False
            os.ftruncate(fd, 0)  # a reader that has it open would keep its pages
            (self.path / name).unlink(missing_ok=True)
            return True

    def is_unused(self, name: str) -> bool:
        """Return whether no process uses the file."""
        with self._alone(name) as fd:
            return fd is not None

    @contextmanager
    def _alone(self, name: str) -> Iterator[int | None]:
        """Yield the file under an exclusive lock, or None if it is gone, in use, or not accessible."""
        try:
            fd = os.open(self.path / name, os.O_RDWR | os.O_NONBLOCK | _FLAGS)
        except OSError:
            yield None
            return
        try:
            yield fd if self._has_locked(fd, name) else None
        finally:
            os.close(fd)

    def _has_locked(self, fd: int, name: str) -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return self.has(fd, name)

    def has(self, fd: int, name: str) -> bool:
        """Return whether the open file still has that name, as far as this process can see."""
        try:
            there, here = (self.path / name).lstat(), os.fstat(fd)
        except OSError:  # it is gone, or the folder was closed to this process
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def remove(self) -> bool:
        """Remove everything, for a stream that is deleted. Files that are being read live until they are closed.

        The server names the folder, so only a mark of this stream makes its files ours. The mark goes last: after an
        interruption the rest can be removed.

        Returns:
            False if something is left: another user's file, one that is no segment, or a folder of something else.
        """
        try:
            self._check("", why_not_write)
            is_ours = read_mark(self.path) == self.stream_id
        except SegmentsUnseen:
            return False
        except OSError:  # a removal that was interrupted may have left an empty folder
            is_ours = False
        for _ in range(REMOVALS):  # a writer that does not know of the deletion may make another file
            if is_ours:
                self._empty()
            with suppress(OSError):
                self.path.rmdir()
            if not self.path.exists():
                return True
        return False

    def _empty(self) -> None:
        """Remove every file that Penstock makes in a folder, and the mark if nothing else is left."""
        for name in (*self.names(), *self.spare(), *self.unfinished()):
            if not self.give_back(name, keep=False):
                self._unlink(name)
        for name in self._list(_BESIDE_MARK):  # not truncated, because readers have the notes in a map
            self._unlink(name)
        if [entry.name for entry in self._entries()] == [MARK]:
            self._unlink(MARK)

    def _unlink(self, name: str) -> None:
        with suppress(OSError):
            (self.path / name).unlink(missing_ok=True)


# --- the payload setting of a stream ----------------------------------------------------------------------------------


INLINE = "inline"
SEGMENTS = "segments:"


def parse_payload(text: str) -> Path | None:
    """Return the folder of a ``payload`` setting, or None for ``inline``. Raises BadOption."""
    if text == INLINE:
        return None
    folder = Path(text.removeprefix(SEGMENTS)).expanduser()
    if not text.startswith(SEGMENTS) or not folder.is_absolute() or "\n" in text:
        raise BadOption(
            f"payload is {text!r}, expected 'inline' or 'segments:' and an absolute folder, such as "
            "segments:/dev/shm/penstock"
        )
    return folder


def folder_of(payload: str, stream: str, stream_id: str, seen_at: Path | None = None) -> SegmentFolder | None:
    """Return a stream's folder of segments, or None for inline payloads.

    ``seen_at`` is its mount point on this host.
    """
    root = parse_payload(payload)
    return None if root is None else SegmentFolder(seen_at or root, stream, stream_id)
