"""Real servers for the tests: one of each build found here per test run, on free ports, emptied before use."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from hypothesis import settings

from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label

# A shell without job control ignores SIGINT for what it starts in the background, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does the same with SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Test processes share the cores, and a thread of OpenMP spins while it waits for another one that has no core. On a
# busy machine that was nine tenths of the CPU of a small training in torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# TensorFlow has threads of its own. With one for each core a small fit() takes 1.4 times the CPU.
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

# The time of an example depends on the machine's load; benchmarks measure speed.
settings.register_profile("penstock", deadline=None)
settings.load_profile("penstock")

Servers = Callable[[Path | None], EmbeddedServer]
SHARED_MEMORY = Path("/dev/shm")

# Without any server, every test that needs one fails with the line that says how to get one, and is not skipped.
_EXECUTABLES: list[Path | None] = [*find_servers()] or [None]
del _EXECUTABLES[1 if "PENSTOCK_TEST_ONE_SERVER" in os.environ else len(_EXECUTABLES) :]
"""The versions of the server that tests run on. `make lowest` sets the variable, because it tests packages, not
servers.
"""


def _label(executable: Path | None) -> str:
    return server_label(executable) if executable else "no-server"


def pytest_collection_finish() -> None:
    """Exclude what collection made from garbage collection: a look at these 900,000 objects takes 0.5 s of CPU."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def session_folder() -> Iterator[None]:
    """Make a separate runtime folder, so that no client meets a `penstock server` of the user who runs the tests."""
    with tempfile.TemporaryDirectory(prefix="penstock-test-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def usual_terminal() -> Iterator[None]:
    """Tests give a command a terminal that shows colours, whichever terminal starts the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        yield


@pytest.fixture(scope="session", autouse=True)
def redis_cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put redis-cli on PATH. If none is installed, use the one next to a server that a Python package brings."""
    beside = [executable.with_name("redis-cli") for executable in find_servers()]
    with pytest.MonkeyPatch.context() as patch:
        if shutil.which("redis-cli") is None and (found := next(filter(Path.exists, beside), None)):
            folder = tmp_path_factory.mktemp("redis-cli")
            (folder / "redis-cli").symlink_to(found)
            patch.setenv("PATH", f"{os.environ['PATH']}{os.pathsep}{folder}")
        yield


@pytest.fixture(scope="module", autouse=True)
def no_user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules of users that a file's tests imported, because the next file's may have the same names."""
    path, before = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    root = str(tmp_path_factory.getbasetemp())
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(root):
            del sys.modules[name]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Return a function that starts one server per executable for the whole test run, on demand."""
    running: dict[Path | None, EmbeddedServer] = {}

    def server_of(executable: Path | None) -> EmbeddedServer:
        if executable not in running:
            running[executable] = EmbeddedServer(executable)
        return running[executable]

    yield server_of
    for server in running.values():
        server.close()


@pytest.fixture(params=_EXECUTABLES, ids=_label)
def server(request: pytest.FixtureRequest, servers: Servers) -> EmbeddedServer:
    """Yield an empty server, once for every version found.

    Leave it running and as it is configured, or use fresh_server.
    """
    return _emptied(servers(request.param))


@pytest.fixture
def url(server: EmbeddedServer) -> str:
    """Return the URL of ``server``."""
    return server.url


@pytest.fixture
def any_server(servers: Servers) -> EmbeddedServer:
    """Yield an empty server of the first version found, for tests that do not depend on the version."""
    return _emptied(servers(_EXECUTABLES[0]))


@pytest.fixture
def any_url(any_server: EmbeddedServer) -> str:
    """Return the URL of ``any_server``."""
    return any_server.url


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[redis.Redis]:
    """Return a client of ``server``, as Penstock's programs have one."""
    with connect(server.url) as connected:
        yield connected


@pytest.fixture
def any_client(any_server: EmbeddedServer) -> Iterator[redis.Redis]:
    """Return a client of ``any_server``, as Penstock's programs have one."""
    with connect(any_server.url) as connected:
        yield connected


@pytest.fixture
def fresh_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """Return a function that makes servers for one test, to kill, fill or configure.

    It takes EmbeddedServer's arguments, and the servers are closed at the end.
    """
    with ExitStack() as stack:

        def make(executable: Path | None = _EXECUTABLES[0], **arguments: object) -> EmbeddedServer:
            return stack.enter_context(EmbeddedServer(executable, **arguments))  # type: ignore[arg-type]

        yield make


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory, as for most segments, or on a disk if there is no such file system."""
    if not SHARED_MEMORY.is_dir():
        yield tmp_path
        return
    root = Path(tempfile.mkdtemp(dir=SHARED_MEMORY, prefix="penstock-test-"))
    yield root
    shutil.rmtree(root)


def _emptied(server: EmbeddedServer) -> EmbeddedServer:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server
