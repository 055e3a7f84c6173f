"""The Lua scripts, one in each ``.lua`` file of this folder. Every language of Penstock ships the same files.

The comments on top of a file name its keys, arguments, answer and callers. The scripts move ids and counters, never a
payload, and use only keys that they are given. Lines that several scripts need are repeated in each of them.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def load_script(name: str) -> str:
    """Return a script as it is sent to the server: without the comments on top of its file.

    Args:
        name: The name of the file in this folder, without ``.lua``.

    Raises:
        FileNotFoundError: There is no such script.

    Example:
        >>> load_script("forget_manifest").splitlines()[0]
        "if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] then return 0 end"
    """
    lines = files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8").splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    return "".join(lines[first:]).lstrip("\n")
