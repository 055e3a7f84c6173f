"""The Lua files: every server can compile each of them, and gets it without the comments on top."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from penstock_common.server.scripts import load_script
from tests.house.lua import LUA_FILES

NAMES = [path.stem for path in LUA_FILES]


def test_every_server_compiles_every_script(client: redis.Redis) -> None:
    """SCRIPT LOAD reports a syntax error. Otherwise only the commands that use a rare script would meet it."""
    for name in NAMES:
        client.script_load(load_script(name))


def test_a_server_names_the_syntax_error_of_a_broken_script(client: redis.Redis) -> None:
    """This shows that the test above can fail."""
    with pytest.raises(redis.ResponseError, match="compiling"):
        client.script_load(load_script("commit").removesuffix("\n") + " end")


@pytest.mark.parametrize("path", LUA_FILES, ids=lambda path: path.stem)
def test_a_script_travels_without_the_comments_on_top(path: Path) -> None:
    """Some scripts are sent in full with every commit."""
    comments, _, code = path.read_text().partition("\n\n")
    assert all(line.startswith("--") for line in comments.splitlines())
    assert load_script(path.stem) == code
