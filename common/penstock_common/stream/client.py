"""The control client of a stream: it names the damaged key behind a refusal, and how to repair it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from penstock_common.errors import PenstockError
from penstock_common.server import connection
from penstock_common.server.client import ControlClient
from penstock_common.server.error_translation import is_denied
from penstock_common.stream.damage import damage_of
from penstock_common.stream.rights import lacking


class StreamClient(ControlClient):
    """A control client that knows what the keys of a stream hold."""

    def explain_refusal(self, error: Exception, parts: Iterable[Any]) -> PenstockError | None:
        """See ControlClient. It raises only the errors of asking for the keys' types."""
        if is_denied(error):  # a script, whose error does not name the command
            return lacking(self)
        return damage_of(self, error, parts)


connect = partial(connection.connect, client_class=StreamClient)
"""``connection.connect``, with a StreamClient."""
