"""A server as a distribution starts it: the settings of its memory allocator are the defaults."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

from penstock import EmbeddedServer

START_S = 20.0


class StockServer:
    """A server with no settings but its port, no snapshots, and its folder."""

    def __init__(self, folder: Path) -> None:
        """Start it. It ends with the context."""
        port = free_port()
        environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
        settings = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        with (folder / "server.log").open("wb") as log:
            self._process = subprocess.Popen([_executable(), *settings], stdout=log, stderr=log, env=environment)
        self.url = f"redis://127.0.0.1:{port}"

    @property
    def pid(self) -> int:
        """Return the pid of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        with redis.Redis.from_url(self.url) as client:
            while True:
                try:
                    client.ping()
                    return self
                except redis.ConnectionError:
                    if time.monotonic() > deadline or self._process.poll() is not None:
                        self._process.kill()
                        raise
                    time.sleep(0.02)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()


@cache
def _executable() -> str:
    """Return the path of the server that Penstock starts here."""
    with EmbeddedServer() as server:
        return str(server.executable)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
