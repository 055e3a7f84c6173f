"""Events between a read of the server and the script that was planned from it. If the state has changed, the script
must be refused: by a generation, an id, or a compared value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from penstock_common.stream.commands import sha_of


@contextmanager
def between(look: str, script: str, act: Callable[[], object]) -> Iterator[None]:
    """Run ``act`` once, after the first look and before the first run of the script that follows it.

    Args:
        look: dotted name of the function that reads, at the place of its call.
        script: the Lua of the script that acts by it.
        act: the action of another process in between.

    Raises AssertionError if the block ends without such a pair, because it has then tested nothing.
    """
    module, _, name = look.rpartition(".")
    said: list[str] = []
    evalsha = redis.Redis.evalsha
    with pytest.MonkeyPatch.context() as patch:
        seen = vars(sys.modules[module])[name]

        def looked(*args: Any, **options: Any) -> Any:
            found = seen(*args, **options)
            if not said:
                said.append("looked")
            return found

        def run(self: redis.Redis, sha: str, *args: Any) -> Any:
            if said == ["looked"] and sha.encode() == sha_of(script):
                said.append("acted")
                act()
            return evalsha(self, sha, *args)

        patch.setattr(look, looked)
        patch.setattr(redis.Redis, "evalsha", run)
        yield
    assert said == ["looked", "acted"], f"between {look} and the script there was nothing: {said}"
