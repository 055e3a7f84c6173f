"""Refusals: a request that is not carried out is answered by one sentence, and one code over HTTP and WebSocket."""

from __future__ import annotations

from typing import NamedTuple

from penstock_common.errors import PenstockError, ServerUnavailable

REASON_BYTES = 120
"""The longest reason that a close frame may carry is 123 bytes."""


class Kind(NamedTuple):
    """A kind of refusal: an HTTP status. The WebSocket close code is 4000 more."""

    code: str
    status: int


BAD_MESSAGE = Kind("bad_message", 400)
BAD_TOKEN = Kind("bad_token", 401)
FOREIGN_ORIGIN = Kind("foreign_origin", 403)
NO_MEMBER = Kind("no_member", 404)
TOO_SLOW = Kind("too_slow", 408)
BATCH_TOO_LARGE = Kind("batch_too_large", 413)
TOO_MANY = Kind("too_many", 429)
FAILED = Kind("failed", 500)


class Refusal(Exception):
    """A request that the gateway does not carry out. The client gets the kind and the text."""

    def __init__(self, kind: Kind, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.kind = kind
        self.cause = cause or text
        """The text for the operator, which may say more."""

    @property
    def close_code(self) -> int:
        """Return the close code of a WebSocket."""
        return 4000 + self.kind.status

    @property
    def reason(self) -> str:
        """Return the sentence in the length that a close frame may have."""
        return str(self).encode()[:REASON_BYTES].decode(errors="ignore")

    def message(self) -> dict[str, str]:
        """Return the refusal as a client receives it."""
        return {"type": "error", "code": self.kind.code, "text": str(self)}


def refusal_of(error: PenstockError, text: str = "") -> Refusal:
    """Return an error of reading as a refusal. Its code is the name of the error's class.

    Args:
        error: the error.
        text: what a client is told instead of the error's own text.
    """
    status = 503 if isinstance(error, ServerUnavailable) else 409
    return Refusal(Kind(type(error).__name__, status), text or str(error), str(error))
