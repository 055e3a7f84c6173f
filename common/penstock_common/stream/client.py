"""The control client of a stream: it names the damaged key behind a refusal, and how to repair it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Self

import redis

from penstock_common.errors import PenstockError
from penstock_common.server import connection
from penstock_common.server.client import ControlClient
from penstock_common.server.error_translation import is_denied
from penstock_common.stream.damage import damage_of
from penstock_common.stream.rights import Role, lacking, role_of_refusal


class StreamClient(ControlClient):
    """A control client that knows what the keys of a stream hold."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own_role: Role | None = None
        """The role of the program, once `require_rights` has asked for its rights."""

    def take_role(self, role: Role | None) -> None:
        """Name only the rights of this role in a refusal from now on."""
        self.own_role = role

    def explain_refusal(self, error: Exception, parts: Iterable[Any]) -> PenstockError | None:
        """See ControlClient. It raises only the errors of asking for the keys' types."""
        if is_denied(error):  # of a script: Redis 6.2 does not name its command
            role = role_of_refusal(error, self.own_role)
            return lacking(self, role.commands, role.stream)
        return damage_of(self, error, parts)

    def _alike(self, pool: redis.ConnectionPool, *, is_node: bool) -> Self:
        client = super()._alike(pool, is_node=is_node)
        client.take_role(self.own_role)
        return client


connect = partial(connection.connect, client_class=StreamClient)
"""``connection.connect``, with a StreamClient."""
