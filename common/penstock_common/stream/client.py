"""The control client: redis-py's, whose failures speak Penstock's words.

Plain refusals of one command (a script's own error, NOSCRIPT, WATCH) pass untouched: they are answered in ``stream/``.
"""

from __future__ import annotations

from typing import Any

import redis
from redis import exceptions as foreign
from redis.client import Pipeline

from penstock_common.stream.failure import translate


def _raise_translated(error: Exception, client: redis.Redis) -> None:
    """Raises what a user can act on; returns where the caller inside ``stream/`` knows better."""
    if type(error) in (foreign.ResponseError, foreign.NoScriptError, foreign.WatchError):
        return
    failure = translate(error, client)
    if failure is not None:
        raise failure from error


class ControlClient(redis.Redis):
    """redis.Redis, with translated errors."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.Redis."""
        try:
            return super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (redis.RedisError, OSError) as error:
            _raise_translated(error, self)
            raise

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> Pipeline:
        """See redis.Redis."""
        return ControlPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)


class ControlPipeline(Pipeline):
    """redis-py's pipeline, with translated errors."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """See redis.client.Pipeline."""
        try:
            return list(super().execute(raise_on_error))
        except (redis.RedisError, OSError) as error:
            _raise_translated(error, self)
            raise

    def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        """See redis.client.Pipeline."""
        try:
            return super().immediate_execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except (redis.RedisError, OSError) as error:
            _raise_translated(error, self)
            raise
