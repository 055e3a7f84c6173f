"""A stream's folder of segments: names, locks, files that are taken and given back. No Redis: who may go is said to it.

A file's name holds a random token, which is another one each time the file is used again, so a name means one content
for ever. Whoever reads or writes a file holds a shared lock on it (flock); it is used again only under an exclusive
one, which the kernel gives as soon as the last process of them is done, or dead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISGID, S_ISREG

from penstock_common.errors import BadSegment, PenstockError, SegmentGone, SegmentsUnseen
from penstock_common.segments.trust import Step, User, walk, why_not_read, why_not_write
from penstock_common.wire.header import NAME
from penstock_common.wire.segment import SegmentInfo, info_bytes, pack_info, parse_info

MARK = "stream"
"""A file that holds the stream's id: whoever sees it sees the segments."""
_FREE = re.compile(r"free-[0-9a-f]{12}\.seg\Z")
_NEW = re.compile(r"new-[0-9a-f]{12}\.seg\Z")
_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
MODE = 0o640
"""Rights of a file, whatever the umask. Whether a group gets as far as the file is said by the folder."""
FOLDER_MODE, SHARED_MODE, ABOVE_MODE = 0o700, 0o2750, 0o755
"""Rights of a stream's folder and of a root that is made for it; of a stream's folder in a setgid root; of folders
above a root that are made with it."""
MARK_BYTES = 64
"""Of a mark that are read: no id is as long."""
REMOVALS = 5
_OURS = {errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""What is amiss with this process or host, and not with the file: others may read it well."""

WhyNot = Callable[[Sequence[Step], Sequence[Step], User], str | None]


def new_token() -> str:
    """Of one life of a file."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class OpenSegment:
    """A file that is open, and what it is."""

    fd: int
    name: str
    head: bytes
    nbytes: int
    is_fresh: bool = False
    """Whether it was made just now, its pages not yet found: cheaper to write than to map."""

    def close(self) -> None:
        """Gives the file back; a lock on it lives on in processes that were forked meanwhile."""
        os.close(self.fd)

    def release(self) -> None:
        """Gives the file, and every lock on it, back, whoever was forked with it; for its writer."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def open_segment(folder: Path, name: str) -> OpenSegment:
    """A segment of a folder to read; raises SegmentGone where there is none of that name, or it is none.

    SegmentsUnseen where it is this process that cannot: what the file holds is lost to nobody else.
    """
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS)  # a pipe under that name would block
    except OSError as error:
        raise unreadable(str(folder / name), error) from None
    try:
        if not S_ISREG(os.fstat(fd).st_mode):
            raise BadSegment("it is no file")
        first = os.pread(fd, 64, 0)
        head = os.pread(fd, info_bytes(first), 0)
        if parse_info(head).file != name:
            raise SegmentGone(f"the payload lies in {name}, which has been used again")
        return OpenSegment(fd, name, head, os.fstat(fd).st_size)
    except (BadSegment, OSError) as error:
        os.close(fd)
        raise SegmentGone(f"the payload lies in {name}: {error}") from None
    except BaseException:
        os.close(fd)
        raise


def unreadable(name: str, error: OSError) -> PenstockError:
    """What to raise: SegmentGone, or SegmentsUnseen where it is this process, or its host, that cannot."""
    if error.errno not in _OURS:
        return SegmentGone(f"the payload lies in {name}, which cannot be read: {error.strerror}")
    return SegmentsUnseen(
        f"the payload lies in {name}, which this process cannot open: {error.strerror}; it needs the right to read the "
        "folder's files, and a limit of open files (ulimit -n) above what it has open"
    )


def read_mark(folder: Path) -> str:
    """Return the id of the stream whose folder this is; raises OSError where that cannot be read."""
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


def _make_folder(path: Path, mode: int) -> None:
    if not path.exists():
        with suppress(FileExistsError):
            path.mkdir(mode)


class SegmentFolder:
    """``root/<stream>.<id>``: all segments of one life of a stream.

    Args:
        root: The folder in which streams have theirs.
        stream: The stream's name.
        stream_id: The id of this life of it.
        user: The user who reads or writes; that of the process by default.
    """

    def __init__(self, root: str | Path, stream: str, stream_id: str, user: User | None = None) -> None:
        self.root = Path(root).expanduser().absolute()
        self.path = self.root / f"{stream}.{stream_id}"
        self.stream, self.stream_id, self._user = stream, stream_id, user

    def make(self) -> None:
        """Make the folder, for those who write.

        Raises:
            SegmentsUnseen: It cannot be made, or another user could replace it.
        """
        what = f"segments of {self.stream!r} cannot be kept in {self.path}"
        self._check(what, why_not_write)
        try:
            for folder in reversed(self.root.parents):
                _make_folder(folder, ABOVE_MODE)
            _make_folder(self.root, FOLDER_MODE)
            _make_folder(self.path, FOLDER_MODE)
            self._check(what, why_not_write)  # what was there before this process made it, too
            self._limit_rights()
            mark, own = self.path / MARK, self.path / f"{MARK}.{new_token()}"
            if not mark.exists():
                _write_mark(own, self.stream_id)
                own.rename(mark)  # nobody reads half of it
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None

    def require(self) -> None:
        """Return if this process sees the folder of this very stream, and may read from it.

        Raises:
            SegmentsUnseen: It does not see it, or another user could replace it.
        """
        self._require(f"segments of {self.stream!r} cannot be read from {self.path}", why_not_read)

    def require_own(self) -> None:
        """Return if this process sees the folder of this very stream, and may write to it.

        Raises:
            SegmentsUnseen: It does not see it, or another user could replace it.
        """
        what = f"segments of {self.stream!r} cannot be kept in {self.path}"
        self._require(what, why_not_write)
        try:
            self._limit_rights()  # an earlier release left more
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None

    def _require(self, what: str, why_not: WhyNot) -> None:
        try:
            found = read_mark(self.path)
        except PermissionError:
            self._check(what, why_not)  # it may know more
            last = walk(self.root)[-1]
            raise SegmentsUnseen(
                f"{what}: permission denied ({last.path}: {last.told()}); run as that user, or, where the mode begins "
                "with 2, as a member of that group"
            ) from None
        except OSError as error:
            raise self._unseen(error.strerror or "unreadable") from None
        self._check(what, why_not)
        if found != self.stream_id:
            raise self._unseen(found)

    def _unseen(self, found: str) -> SegmentsUnseen:
        return SegmentsUnseen(
            f"stream {self.stream!r} keeps its payloads in {self.path}, which this process does not see "
            f"({found}): run it on that host, mount the same file system there, or say where it is mounted with "
            "PENSTOCK_SEGMENTS; over a network alone, produce with payload='inline'"
        )

    def _check(self, what: str, why_not: WhyNot) -> None:
        """Raise SegmentsUnseen where another user could replace the folder, or a component of its path."""
        try:
            root = walk(self.root)
            folder: list[Step] = []
            with suppress(PermissionError):  # the root says who may pass
                folder = walk(self.path)[len(root) :]
        except OSError as error:
            raise SegmentsUnseen(f"{what}: {error.strerror}") from None
        if (reason := why_not(root, folder, self._user or User.current())) is not None:
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
        """The segments that have a name of their own, with their sizes and times."""
        return self._list(NAME)

    def spare(self) -> dict[str, os.stat_result]:
        """The files that wait to be used again."""
        return self._list(_FREE)

    def unfinished(self) -> dict[str, os.stat_result]:
        """The files that are being made, or whose maker died."""
        return self._list(_NEW)

    def _list(self, pattern: re.Pattern[str]) -> dict[str, os.stat_result]:
        found: dict[str, os.stat_result] = {}
        for entry in self._entries():
            if pattern.match(entry.name):
                with suppress(FileNotFoundError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
        return found

    def _entries(self) -> list[os.DirEntry[str]]:
        """Nothing where the folder is not there, or not for this process to list."""
        with suppress(OSError), os.scandir(self.path) as entries:
            return list(entries)
        return []

    # --- reading ---

    def open(self, name: str) -> OpenSegment:
        """A segment to read; raises SegmentGone where there is none of that name, BadSegment where it is none."""
        return open_segment(self.path, name)

    # --- taking and giving back ---

    def take(self, info: SegmentInfo, nbytes: int) -> OpenSegment:
        """A file of at least so many bytes to write, locked, under ``info``'s name; raises OSError (ENOSPC).

        One that waits to be used again if there is one, so that no pages have to be found for it. On a full disk those
        that are too small make room for a new one.
        """
        spare = sorted(self.spare().items(), key=lambda item: item[1].st_size)
        for name, stat in spare:
            if stat.st_size >= nbytes and (taken := self._take_spare(name, info)) is not None:
                return taken
        while True:
            try:
                return self._make_new(info, nbytes)
            except OSError as error:
                is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not is_full or not any(self.give_back(spare.pop()[0], keep=False) for _ in range(len(spare))):
                    raise

    def _take_spare(self, name: str, info: SegmentInfo) -> OpenSegment | None:
        with suppress(OSError), self._alone(name) as fd:
            if fd is None:
                return None
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
            os.posix_fallocate(fd, 0, nbytes)  # now, where it is an error; later it would be a SIGBUS
            head = pack_info(info)
            os.pwrite(fd, head, 0)
            path.rename(self.path / info.file)
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        return OpenSegment(fd, info.file, head, nbytes, is_fresh=True)

    def _locked(self, fd: int, info: SegmentInfo, head: bytes) -> OpenSegment | None:
        """With a shared lock in place of the exclusive one; None where somebody came in between."""
        fcntl.flock(fd, fcntl.LOCK_SH)
        found = OpenSegment(fd, info.file, head, os.fstat(fd).st_size)
        if self._is(fd, info.file):
            return found
        found.close()
        return None

    def give_back(self, name: str, *, keep: bool) -> bool:
        """Has a file that nobody needs used again (``keep``), or removed; False where it is gone.

        Whoever looks at it yet may go on: it is used again once nobody does, and False where it was to be removed.
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
        """Whether no process has the file in use."""
        with self._alone(name) as fd:
            return fd is not None

    @contextmanager
    def _alone(self, name: str) -> Iterator[int | None]:
        """The file under an exclusive lock; None where it is gone, in use, or not for this process to touch."""
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
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return self._is(fd, name)

    def _is(self, fd: int, name: str) -> bool:
        """Whether the open file still has that name."""
        try:
            there, here = (self.path / name).lstat(), os.fstat(fd)
        except FileNotFoundError:
            return False
        return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)

    def sync(self) -> None:
        """Has the folder's own content, the files' names, on the disk when it returns."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self) -> bool:
        """Removes everything, for a stream that is deleted; what is read at the moment lives until it is not.

        False where something is left: it is not this user's to remove, or was no segment.
        """
        try:
            self._check("", why_not_write)
        except SegmentsUnseen:
            return False
        for _ in range(REMOVALS):  # a writer that has not heard of it may make one more file
            marks = [entry.name for entry in self._entries() if entry.name.partition(".")[0] == MARK]
            for name in (*self.names(), *self.spare(), *self.unfinished()):
                if not self.give_back(name, keep=False):
                    with suppress(OSError):
                        (self.path / name).unlink(missing_ok=True)
            for name in marks:
                with suppress(OSError):
                    (self.path / name).unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()
            if not self.path.exists():
                return True
        return False
