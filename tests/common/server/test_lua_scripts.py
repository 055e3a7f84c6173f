"""The Lua files: every server can compile each of them, and gets it without the comments on top."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from penstock_common.errors import Unauthorized
from penstock_common.server.scripts import load_script
from penstock_common.stream.client import connect
from penstock_common.stream.commands import read_by_script
from penstock_common.stream.servers.embedded import EmbeddedServer
from tests.house.lua import LUA_FILES, parse_lua

NAMES = [path.stem for path in LUA_FILES]


def test_every_server_compiles_every_script(client: redis.Redis) -> None:
    """SCRIPT LOAD reports a syntax error. Otherwise only the commands that use a rare script would meet it."""
    for name in NAMES:
        client.script_load(load_script(name))


def test_a_server_names_the_syntax_error_of_a_broken_script(client: redis.Redis) -> None:
    """This shows that the test above can fail."""
    with pytest.raises(redis.ResponseError, match="compiling"):
        client.script_load(load_script("commit").removesuffix("\n") + " end")


def test_a_script_says_that_it_only_reads_if_the_server_says_so_of_its_commands(client: redis.Redis) -> None:
    """A user without the right to write may run these scripts alone."""
    for path in LUA_FILES:
        script = parse_lua(path)
        told = client.execute_command("COMMAND", "INFO", *script.commands)
        assert len(told) == len(script.commands)
        assert script.says_that_it_only_reads == all("readonly" in one["flags"] for one in told.values()), path.name


@pytest.mark.parametrize("path", LUA_FILES, ids=lambda path: path.stem)
def test_a_script_travels_without_the_comments_on_top(path: Path) -> None:
    """Some scripts are sent in full with every commit."""
    comments, _, code = path.read_text().partition("\n\n")
    assert all(line.startswith("--") for line in comments.splitlines())
    assert load_script(path.stem) == code


def test_a_user_who_may_only_read_runs_a_script_that_only_reads(client: redis.Redis, server: EmbeddedServer) -> None:
    """A server before 7.0 knows no EVALSHA_RO, and no right to read a key without the right to write it."""
    script, is_old = load_script("read_headers"), client.info("server")["redis_version"].startswith("6.")
    pattern, commands = ("~", "+eval +evalsha") if is_old else ("%R~", "+eval_ro +evalsha_ro")
    entry = client.xadd("penstock:a", {"meta": "a header"})
    rules = f"{pattern}penstock:* -@all +ping +xrange {commands}"
    client.execute_command("ACL", "SETUSER", "sees", "on", ">x", *rules.split())
    try:
        with connect(f"redis://sees:x@127.0.0.1:{server.port}") as seeing:
            for _ in range(2):  # the second one goes by the digest
                assert read_by_script(seeing, script, ["penstock:a"], [100, entry]) == [b"a header"]
            with pytest.raises(Unauthorized):
                read_by_script(seeing, script, ["other:a"], [100, entry])
    finally:
        client.execute_command("ACL", "DELUSER", "sees")


def test_a_user_without_the_right_to_evalsha_ro_uses_evalsha(client: redis.Redis, server: EmbeddedServer) -> None:
    """Users of an earlier version of Penstock were not given it."""
    rules = ("~penstock:*", "-@all", "+ping", "+xrange", "+eval", "+evalsha")
    client.execute_command("ACL", "SETUSER", "sees", "on", ">x", *rules)
    try:
        with connect(f"redis://sees:x@127.0.0.1:{server.port}") as seeing:
            assert read_by_script(seeing, load_script("read_headers"), ["penstock:a"], [100, "1-0"]) == [b""]
    finally:
        client.execute_command("ACL", "DELUSER", "sees")
