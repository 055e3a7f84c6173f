"""A pytest plugin that records which scripts and lines of Python each test runs, and how long it takes.

It is loaded with ``-p tests.mutants.recorder`` and writes to the file that ``PENSTOCK_MUTANTS_RECORD`` names. Python
code that runs in other processes is not seen. Scripts are, because the server knows which it has been sent.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import redis

from penstock_common.server.scripts import load_script
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.mutants.__main__ import TARGETS

ROOT = Path(__file__).parents[2]
SCRIPTS = "common/penstock_common/server/scripts"
_DIGESTS = {
    hashlib.sha1(load_script(path.stem).encode(), usedforsecurity=False).hexdigest(): f"{SCRIPTS}/{path.name}"
    for path in sorted((ROOT / SCRIPTS).glob("*.lua"))
}
_FILES = {str(ROOT / path): path for path in TARGETS}
# What the name of a function in a function, such as a comprehension, has behind that of the outer one.
_INNER = re.compile(r"(\.<locals>)?\.<(?!locals).*")


class _Code:
    """A function of a target, and those of its lines that the running test has not run."""

    def __init__(self, code: CodeType) -> None:
        self._code, self.path = code, _FILES.get(code.co_filename, "")
        self._lines = {line for _, _, line in code.co_lines() if line is not None} if self.path else set[int]()
        self.left = set(self._lines)

    def take_names(self) -> set[str]:
        """Return the names of the function and of its lines that have run, and forget that they have."""
        ran, self.left = self._lines - self.left, set(self._lines)
        function = f"{self.path}::{_INNER.sub('', self._code.co_qualname)}"
        texts = {linecache.getline(self._code.co_filename, line).strip() for line in ran}
        return {function, *(f"{function}::{text}" for text in texts)} if ran else set()


class _Recorder:
    """The record of the code and scripts that the running test has used until now."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self.servers: list[EmbeddedServer] = []
        self.scripts_seen: set[str] = set()
        self._codes: dict[int, _Code] = {}

    def trace(self, frame: FrameType, _event: str, _argument: Any) -> Any:
        """Note the line of a call, and follow the next lines as long as one of the function has not run."""
        code = self._codes.get(id(frame.f_code))
        if code is None:
            code = self._codes[id(frame.f_code)] = _Code(frame.f_code)
        code.left.discard(frame.f_lineno)
        return self.trace if code.left else None

    def take(self) -> set[str]:
        """Return the names of what has been used, and forget them."""
        targets = [code for code in list(self._codes.values()) if code.path]
        found = set(self.scripts_seen).union(*(code.take_names() for code in targets))
        self.scripts_seen.clear()
        return found

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
    threading.settrace(_recorder.trace)
    sys.settrace(_recorder.trace)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record one test with its fixtures."""
    _recorder.take()
    begun = time.monotonic()
    result = yield
    _recorder.tests[item.nodeid] = (round(time.monotonic() - begun, 3), sorted(_recorder.take()))
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Ask the servers before the fixtures end them."""
    with suppress(OSError):
        _recorder.scripts_seen |= _recorder.scripts()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Leave out what fails or is skipped as it is."""
    if report.outcome != "passed":
        _recorder.tests[report.nodeid] = (0.0, [])


def pytest_sessionfinish() -> None:
    """Write the record."""
    threading.settrace(None)
    sys.settrace(None)
    Path(os.environ["PENSTOCK_MUTANTS_RECORD"]).write_text(json.dumps(_recorder.tests))
