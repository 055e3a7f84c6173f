"""The end of an append-only file that a crash cut inside a transaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from penstock_common.errors import ServerUnsuitable
from penstock_common.stream.servers.aof import cut_open_transaction
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers, server_label

WHOLE = ("MULTI",), ("SET", "x", "A"), ("INCR", "count"), ("EXEC",)


def lines_of(*commands: tuple[str, ...]) -> bytes:
    """Return commands as an append-only file has them."""
    lines = [[f"*{len(words)}", *(part for word in words for part in (f"${len(word)}", word))] for words in commands]
    return "".join(f"{line}\r\n" for command in lines for line in command).encode()


@pytest.mark.parametrize("executable", find_servers(), ids=server_label)
def test_a_transaction_that_a_crash_cut_does_not_come_back(
    fresh_server: Callable[..., EmbeddedServer], executable: Path, tmp_path: Path
) -> None:
    """Redis 6.2 and 7.0 ran it two starts later, so a block was committed twice."""
    start = {"executable": executable, "appendonly": True, "directory": tmp_path}
    fresh_server(**start).close()
    (path,) = [path for path in tmp_path.rglob("*.aof") if ".base." not in path.name]
    path.write_bytes(path.read_bytes() + lines_of(*WHOLE)[:-5])
    server = fresh_server(**start)
    with redis.Redis.from_url(server.url) as client, client.pipeline() as pipeline:
        pipeline.set("y", "B").incr("count").execute()
    server.kill()
    server = fresh_server(**start)
    with redis.Redis.from_url(server.url) as client:
        assert client.mget("x", "y", "count") == [None, b"B", b"1"]


def test_the_file_of_a_server_that_runs_is_left_alone(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path
) -> None:
    """A second start on the same port is refused. Half of a transaction may be just what the first one writes."""
    first = fresh_server(appendonly=True, directory=tmp_path)
    (path,) = [path for path in tmp_path.rglob("*.aof") if ".base." not in path.name]
    path.write_bytes(written := path.read_bytes() + lines_of(*WHOLE[:2]))
    with pytest.raises(ServerUnsuitable, match=r"another server keeps its append-only file in .*: use that one"):
        fresh_server(appendonly=True, directory=tmp_path, port=first.port)
    assert path.read_bytes() == written


@pytest.mark.parametrize(
    ("tail", "is_open"),
    [
        (lines_of(*WHOLE), False),
        (lines_of(*WHOLE) + lines_of(("SET", "y", "B"))[:-3], False),
        (lines_of(*WHOLE[:3]), True),
        (lines_of(*WHOLE)[:-1], True),
        (lines_of(*WHOLE[:2])[:-6], True),
        (lines_of(("SET", "y", "B"), *WHOLE[:1]), True),
        (lines_of(("SET", "y", lines_of(*WHOLE[:2]).decode()), ("SET", "y", "B")), False),  # a sample may hold anything
        (lines_of(*WHOLE[:1], ("SET", "y", lines_of(*WHOLE[:2]).decode()), ("SET", "y", "B")), True),
        (b"*1\r\n$5\r\nMUL", False),  # Redis removes it
    ],
)
def test_only_a_transaction_without_its_end_is_removed(tail: bytes, is_open: bool, tmp_path: Path) -> None:
    """What was confirmed must stay, whatever bytes it has."""
    before = lines_of(("SET", "z", "a" * 100), *WHOLE)
    path = tmp_path / "appendonlydir" / "appendonly.aof.12.incr.aof"
    path.parent.mkdir()
    path.write_bytes(before + tail)
    (path.parent / "appendonly.aof.9.incr.aof").write_bytes(lines_of(*WHOLE[:2]))
    begin = tail.find(lines_of(WHOLE[0])) if is_open else len(tail)
    assert cut_open_transaction(tmp_path) == len(tail) - begin
    assert path.read_bytes() == before + tail[:begin]
