"""Tokens: each opens one group of one stream. Only the operator names streams and groups."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.gateway.refusals import BAD_TOKEN, Refusal
from penstock_common.errors import PenstockError
from penstock_common.stream.keys import checked_name

SHORTEST = 16
"""The fewest characters of a token. `new_token` makes 43."""


class Grant(NamedTuple):
    """The group of a stream that a token opens."""

    stream: str
    group: str

    def __str__(self) -> str:
        return f"{self.stream}/{self.group}"


def parse_grant(text: str) -> Grant:
    """Parse ``STREAM/GROUP``. Raises PenstockError."""
    stream, slash, group = text.partition("/")
    if not slash:
        raise PenstockError(f"{text!r:.80} names no group: write STREAM/GROUP, such as train/resnet")
    return Grant(checked_name("stream", stream), checked_name("group", group))


def new_token() -> str:
    """Return a token of 256 random bits."""
    return secrets.token_urlsafe(32)


def parse_tokens(text: str, source: str) -> list[tuple[Grant, str]]:
    """Parse lines of ``STREAM/GROUP TOKEN``. Empty lines and lines that begin with ``#`` are left out.

    Args:
        text: the lines.
        source: where they come from, for messages. A message never shows a token.

    Raises:
        PenstockError: a line has another form, or two lines have the same token.
    """
    found = list(_lines(text, source))
    if len({token for _, token in found}) != len(found):
        raise PenstockError(
            f"{source} gives the same token to two groups: make each with `penstock gateway --make-token STREAM/GROUP`"
        )
    if not found:
        raise PenstockError(f"{source} has no token: `penstock gateway --make-token STREAM/GROUP` prints a line for it")
    return found


def _lines(text: str, source: str) -> Iterator[tuple[Grant, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or len(words[1]) < SHORTEST or not words[1].isascii():
            raise PenstockError(
                f"{source}, line {number}: expected STREAM/GROUP and a token of {SHORTEST} or more characters; "
                "`penstock gateway --make-token STREAM/GROUP` prints such a line"
            )
        try:
            yield parse_grant(words[0]), words[1]
        except PenstockError as error:
            raise PenstockError(f"{source}, line {number}: {error}") from None


class Tokens:
    """The tokens of a gateway. Its representation shows none of them."""

    def __init__(self, tokens: Iterable[tuple[Grant, str]]) -> None:
        self._tokens = [(grant, token.encode()) for grant, token in tokens]

    @property
    def grants(self) -> list[Grant]:
        """Return the groups that some token opens."""
        return sorted({grant for grant, _ in self._tokens})

    def grant_of(self, token: object) -> Grant:
        """Return the group that a token opens. Every token is compared, each in constant time. Raises Refusal."""
        given = token.encode("utf-8", "replace") if isinstance(token, str) else b""
        found: Grant | None = None
        for grant, known in self._tokens:
            if hmac.compare_digest(given, known):
                found = grant
        if found is None:
            text = "this token opens no group here" if given else "a token is missing"
            raise Refusal(BAD_TOKEN, f"{text}: ask who runs the gateway for the token of your group")
        return found
