"""The mutation check makes the faults that it says it makes, and a reason speaks of a mutant that exists."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.mutants.__main__ import ROOT, TARGETS, load_reasons, reason_of
from tests.mutants.mutator import Mutant, mutants_of

LUA = """-- A script.
--
-- KEYS: a
-- only if it is then

local n = tonumber(ARGV[1]) or 0 -- not a mutant: if x then
if n > 3 and n ~= 5 then
  redis.call('DEL', KEYS[1])
  return -1
end
for i = 2, n do redis.call('SET', KEYS[1], '') n = n - i end
return redis.call('GET', KEYS[1])
"""
PYTHON = '''"""A module with 1 number in its text."""

LIMIT: int = 7


class Counter:
    """A class."""

    def step(self, more: bool = False) -> int:
        """Count."""
        if self.count < LIMIT and more:
            self.count += 1
            log(f"{self.count + 1}")
        return [value for value in self.all if not value]
'''


def _mutants(folder: Path, name: str, text: str) -> list[Mutant]:
    (folder / name).write_text(text)
    return mutants_of(folder, name)


def test_faults_in_lua_are_small_and_leave_comments_and_commands_alone(tmp_path: Path) -> None:
    """A fault in a comment is no fault, and one in a command's name is found by any call."""
    found = {(one.line, one.after) for one in _mutants(tmp_path, "a.lua", LUA)}
    assert found == {
        (6, "local n = tonumber(ARGV[1]) and 0 -- not a mutant: if x then"),
        (6, "local n = tonumber(ARGV[1]) or 1 -- not a mutant: if x then"),
        (7, "if n >= 3 and n ~= 5 then"),
        (7, "if n > 4 and n ~= 5 then"),
        (7, "if n > 3 or n ~= 5 then"),
        (7, "if n > 3 and n == 5 then"),
        (7, "if n > 3 and n ~= 6 then"),
        (7, "if not (n > 3 and n ~= 5) then"),
        (8, ""),
        (9, "return -2"),
        (9, ""),
        (11, "for i = 3, n do redis.call('SET', KEYS[1], '') n = n - i end"),
        (11, "for i = 2, n do n = n - i end"),
        (11, "for i = 2, n do redis.call('SET', KEYS[1], '~') n = n - i end"),
        (11, "for i = 2, n do redis.call('SET', KEYS[1], '') n = n + i end"),
    }


def test_faults_in_python_are_small_and_know_their_function(tmp_path: Path) -> None:
    """The function decides which tests run."""
    found = {(one.line, one.function, one.after) for one in _mutants(tmp_path, "a.py", PYTHON)}
    step = "Counter.step"
    assert found == {
        (3, "", "LIMIT: int = 8"),
        (9, step, "def step(self, more: bool = True) -> int:"),
        (11, step, "if (not (self.count < LIMIT and more)):"),
        (11, step, "if (self.count <= LIMIT) and more:"),
        (11, step, "if (self.count < LIMIT or more):"),
        (12, step, "self.count += 2"),
        (12, step, "pass"),
        (13, step, "pass"),
        (14, step, "return None"),
        (14, step, "return [value for value in self.all if (value)]"),
        (14, step, "return [value for value in self.all if (not (not value))]"),
    }


@pytest.mark.parametrize("path", [path for path in TARGETS if path.endswith(".lua")], ids=lambda path: Path(path).stem)
def test_every_mutant_of_a_script_compiles(any_client: redis.Redis, path: str) -> None:
    """One that does not compile is killed by every test, and says nothing of them."""
    text = (ROOT / path).read_text()
    for mutant in mutants_of(ROOT, path):
        code = mutant.text(text)
        any_client.script_load(code[code.index("\n\n") :])


def test_every_reason_speaks_of_a_mutant_that_exists() -> None:
    """A reason for code that has changed would hide a new survivor."""
    mutants = [mutant for path in TARGETS for mutant in mutants_of(ROOT, path, must_compile=False)]
    for reason in load_reasons():
        assert any(reason_of(mutant, [reason]) for mutant in mutants), reason
