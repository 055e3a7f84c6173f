"""The check whether another user of the host could replace a folder of segments or a component of its path.

`walk` collects the facts. `why_not_write` and `why_not_read` judge them. A folder that passes stays safe: only its
owner, the asking user, and root can replace it.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_IMODE, S_ISDIR, S_ISGID, S_ISLNK, S_ISVTX, S_IWGRP, S_IWOTH

MAX_LINKS = 40
"""Symlinks that a path may lead through, as in the kernel."""
SUPERUSER = 0


@dataclass(frozen=True, slots=True)
class FileUser:
    """The user and the groups on whose behalf a process opens files."""

    uid: int
    groups: frozenset[int]

    @classmethod
    def current(cls) -> FileUser:
        """Return the effective user of this process, with all its groups."""
        return cls(os.geteuid(), frozenset({os.getegid(), *os.getgroups()}))

    def is_in(self, group: int) -> bool:
        """Return whether the user has the rights of a group; root has those of every group."""
        return self.uid == SUPERUSER or group in self.groups


@dataclass(frozen=True, slots=True)
class PathStep:
    """One component that the kernel passes on the way to a path: a folder, a symlink, or the file at its end."""

    path: Path
    uid: int
    gid: int
    mode: int
    """Type and rights, as in `os.stat_result.st_mode`."""

    def has(self, bit: int) -> bool:
        """Return whether the mode has a bit of `stat`."""
        return bool(self.mode & bit)

    def words(self) -> str:
        """Return owner, group and mode in words."""
        return f"user {user_name(self.uid)}, group {group_name(self.gid)}, mode {S_IMODE(self.mode):04o}"


def walk(path: Path) -> list[PathStep]:
    """Return the components of an absolute path, those of symlinks' targets included, as far as they exist.

    Raises OSError if a component cannot be examined, or if symlinks form a cycle.
    """
    here, links = Path("/"), 0
    steps = [_step(here)]
    left = list(reversed(path.parts[1:]))
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        try:
            step = _step(here / name)
        except FileNotFoundError:
            break
        steps.append(step)
        if not S_ISLNK(step.mode):
            here = step.path
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        target = step.path.readlink()
        here = Path("/") if target.is_absolute() else here
        left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    return steps


def denying_step(path: Path) -> PathStep:
    """Return the component at which this process is denied a path: a folder on the way, or what is at its end."""
    try:
        return walk(path)[-1]
    except PermissionError as error:
        return _step(Path(error.filename).parent)


def _step(path: Path) -> PathStep:
    found = path.lstat()
    return PathStep(path, found.st_uid, found.st_gid, found.st_mode)


@lru_cache(maxsize=64)
def private_group(uid: int) -> int | None:
    """Return the group that has a user's own name and no other member, or None if there is no such group.

    Many distributions give each user such a group, and a umask that lets it write. No other user may write then.
    """
    try:
        user = pwd.getpwuid(uid)
        group = grp.getgrgid(user.pw_gid)
    except KeyError:
        return None
    is_private = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    return group.gr_gid if is_private else None


def user_name(uid: int) -> str:
    """Return a user's name, or the number of a user without a name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return a group's name, or the number of a group without a name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


PrivateGroup = Callable[[int], int | None]
"""A function that returns the group whose only member is a user."""


@dataclass(frozen=True, slots=True)
class _TrustedUsers:
    """The users who may own components, and the groups that admit no other user."""

    owners: frozenset[int]
    """Users who may own the components of the path to the stream's folder."""
    writers: frozenset[int]
    """Users who may own the stream's folder itself."""
    closed: frozenset[int | None]

    @classmethod
    def of(cls, owners: AbstractSet[int], writers: AbstractSet[int], private: PrivateGroup) -> _TrustedUsers:
        """Look up the private groups of all these users."""
        return cls(frozenset(owners), frozenset(writers), frozenset(private(uid) for uid in owners | writers))

    def weak_step(self, way: Sequence[PathStep], end: PathStep | None) -> PathStep | None:
        """Return the first component that another user owns, or in which another user can replace the next one.

        A sticky bit protects the entries of the folders on the way, but does not forbid new files in the last folder.
        """
        for step in way:
            if step.uid not in self.owners or (not step.has(S_ISVTX) and self.is_open(step)):
                return step
        return end if end is not None and (end.uid not in self.writers or self.is_open(end)) else None

    def is_open(self, step: PathStep) -> bool:
        """Return whether users who may not own a folder may write to it."""
        is_shared = step.has(S_IWGRP) and step.gid not in self.closed
        return S_ISDIR(step.mode) and (is_shared or step.has(S_IWOTH))


def why_not_write(
    root: Sequence[PathStep], folder: Sequence[PathStep], user: FileUser, private: PrivateGroup = private_group
) -> str | None:
    """Return why a writer may not keep a stream in a folder, and what helps, or None if it may.

    Args:
        root: The components of the path to the root, from `walk`.
        folder: The components from the root to the stream's folder, empty before that is made.
        user: The user of the writer.
        private: Tells groups of one member.
    """
    trust = _TrustedUsers.of(_owners(root, user), {user.uid}, private)
    return _why_not(
        trust, root, folder, lambda owner: f"name a folder of user {user_name(user.uid)}, or run as user {owner}"
    )


def why_not_read(
    root: Sequence[PathStep], folder: Sequence[PathStep], user: FileUser, private: PrivateGroup = private_group
) -> str | None:
    """Return why a reader may not trust a stream's folder, and what helps, or None if it may.

    The folder of another user is trusted if a setgid root gives it to a group of the reader, and only that group can
    write to the root. The arguments are those of `why_not_write`.
    """
    last, owners, writers = root[-1], _owners(root, user), _owners(root, user)
    if last.has(S_ISGID) and not last.has(S_IWOTH) and user.is_in(last.gid):
        owners |= {last.uid}
        writers |= {last.uid, *(step.uid for step in folder[-1:])}
    share = shlex.quote(str(last.path))
    return _why_not(
        _TrustedUsers.of(owners, writers, private), root, folder,
        lambda owner: f"run as user {owner}, or have that user give the root a group that both users belong to, before "
        f"the stream is made: chgrp GROUP {share} && chmod 2750 {share}",
    )  # fmt: skip


def _why_not(
    trust: _TrustedUsers, root: Sequence[PathStep], folder: Sequence[PathStep], advice: Callable[[str], str]
) -> str | None:
    """Return why the components are not safe, and what helps, or None if they are.

    ``advice`` returns what helps, given the name of the component's owner.
    """
    step = trust.weak_step([*root, *folder[:-1]], folder[-1] if folder else None)
    if step is None:
        return None
    if step.uid in trust.owners and trust.is_open(step):
        return _open_step(step, is_end=step in folder[-1:])
    found = f"{step.path} belongs to another user ({step.words()}), who can replace its files"
    return f"{found}: {advice(user_name(step.uid))}"


def _owners(steps: Sequence[PathStep], user: FileUser) -> set[int]:
    """Return the users who may own a component, for any caller.

    Inside a user namespace root may have another number. It still owns ``/``, and can replace everything below.
    """
    return {user.uid, SUPERUSER, steps[0].uid}


def _open_step(step: PathStep, *, is_end: bool) -> str:
    """Return who can replace files in a component, and what helps. ``is_end``: whether it is the stream's folder."""
    path = shlex.quote(str(step.path))
    who = "every user" if step.has(S_IWOTH) else f"every member of group {group_name(step.gid)}"
    found = f"{who} can replace the files in {step.path} ({step.words()}): remove that right (chmod go-w {path})"
    if is_end:  # a sticky bit does not forbid new files, and the setting names the root
        return found
    return f"{found}, allow only owners to rename and remove (chmod +t {path}), or name another folder"
