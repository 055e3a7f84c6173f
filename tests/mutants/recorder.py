"""A pytest plugin that records which scripts and Python functions each test runs, and how long it takes.

It is loaded with ``-p tests.mutants.recorder`` and writes to the file that ``PENSTOCK_MUTANTS_RECORD`` names. Python
code that runs in other processes is not seen. Scripts are, because the server knows which it has been sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import redis

from penstock_common.server.scripts import load_script
from penstock_common.stream.servers.embedded import EmbeddedServer

ROOT = Path(__file__).parents[2]
SCRIPTS = "common/penstock_common/server/scripts"
_DIGESTS = {
    hashlib.sha1(load_script(path.stem).encode(), usedforsecurity=False).hexdigest(): f"{SCRIPTS}/{path.name}"
    for path in sorted((ROOT / SCRIPTS).glob("*.lua"))
}
_PACKAGES = tuple(f"{ROOT}/{folder}/" for folder in ("common", "producer", "consumer"))


class _Recorder:
    """What the running test has used so far."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self.servers: list[EmbeddedServer] = []
        self._names: dict[int, tuple[Any, str]] = {}

    def trace(self, frame: FrameType, event: str, _argument: Any) -> None:
        """Note the function of a call."""
        if event != "call":
            return
        code = frame.f_code
        known = self._names.get(id(code))
        if known is None:
            path = code.co_filename
            name = f"{path[len(str(ROOT)) + 1 :]}::{code.co_qualname}" if path.startswith(_PACKAGES) else ""
            known = self._names[id(code)] = (code, name)  # the code is kept, so that nothing else gets its id
        if known[1]:
            self.seen.add(known[1])

    def scripts(self) -> set[str]:
        """Return the scripts that the servers were sent, and make the servers forget them."""
        found: set[str] = set()
        for server in list(self.servers):
            try:
                with redis.Redis.from_url(server.url, socket_timeout=1) as client:
                    told = client.script_exists(*_DIGESTS)
                    client.script_flush()
            except redis.RedisError:
                self.servers.remove(server)
                continue
            found |= {name for name, there in zip(_DIGESTS.values(), told, strict=True) if there}
        return found


_recorder = _Recorder()


def pytest_configure() -> None:
    """Follow every call, and every server that is started."""
    started = EmbeddedServer.__init__

    def noted(server: EmbeddedServer, *args: Any, **named: Any) -> None:
        started(server, *args, **named)
        _recorder.servers.append(server)

    setattr(EmbeddedServer, "__init__", noted)  # noqa: B010 - the type of a method cannot be assigned
    threading.setprofile(_recorder.trace)
    sys.setprofile(_recorder.trace)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record one test with its fixtures."""
    _recorder.seen.clear()
    begun = time.monotonic()
    result = yield
    _recorder.tests[item.nodeid] = (round(time.monotonic() - begun, 3), sorted(_recorder.seen))
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Ask the servers before the fixtures end them."""
    with suppress(OSError):
        _recorder.seen |= _recorder.scripts()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave out what fails or is skipped as it is."""
    if report.outcome != "passed":
        _recorder.tests[report.nodeid] = (0.0, [])


def pytest_sessionfinish() -> None:
    """Write the record."""
    sys.setprofile(None)
    threading.setprofile(None)
    Path(os.environ["PENSTOCK_MUTANTS_RECORD"]).write_text(json.dumps(_recorder.tests))
