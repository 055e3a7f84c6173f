"""The messages that clients send, checked. A message that is not as expected is refused with what was expected."""

from __future__ import annotations

import json
from typing import Any

from penstock.gateway.limits import MAX_ACKED, MAX_BATCH_SIZE, MAX_CREDITS, MAX_MESSAGE_BYTES
from penstock.gateway.refusals import BAD_MESSAGE, Refusal
from penstock.gateway.tokens import Grant

MAX_NUMBER = 2**32 - 1


def parse_message(text: str | bytes | None) -> dict[str, Any]:
    """Parse one message: a JSON object of a bounded size. Raises Refusal."""
    if text is None:
        raise Refusal(BAD_MESSAGE, 'a binary message came, expected JSON text such as {"type": "credits", ...}')
    if len(text) > MAX_MESSAGE_BYTES:
        raise Refusal(BAD_MESSAGE, f"a message of {len(text)} bytes, expected {MAX_MESSAGE_BYTES} at most")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Refusal(BAD_MESSAGE, 'a message is no JSON, expected an object such as {"type": "epoch"}') from None
    if not isinstance(value, dict):
        raise Refusal(BAD_MESSAGE, f"a message is a JSON {type(value).__name__}, expected an object")
    return value


def _number(value: Any, name: str, least: int, most: int) -> int:
    if value is None:
        raise Refusal(BAD_MESSAGE, f"{name} is missing, expected a whole number from {least} to {most}")
    if type(value) is not int or not least <= value <= most:
        raise Refusal(BAD_MESSAGE, f"{name} is {str(value)[:40]!r}, expected a whole number from {least} to {most}")
    return value


def batch_size_in(message: dict[str, Any]) -> int:
    """Return the batch size that a client asks for. Raises Refusal."""
    return _number(message.get("batch_size"), "batch_size", 1, MAX_BATCH_SIZE)


def credits_in(message: dict[str, Any]) -> int:
    """Return the batches that a client allows. Raises Refusal."""
    return _number(message.get("batches"), "batches", 1, MAX_CREDITS)


def acknowledged_in(message: dict[str, Any]) -> list[int]:
    """Return the numbers of the batches that a client acknowledges. Raises Refusal."""
    numbers = message.get("batches")
    if not isinstance(numbers, list) or not 1 <= len(numbers) <= MAX_ACKED:
        raise Refusal(BAD_MESSAGE, f"batches is no list of 1 to {MAX_ACKED} numbers")
    return [_number(number, "a batch's number", 1, MAX_NUMBER) for number in numbers]


def require_grant(message: dict[str, Any], grant: Grant) -> None:
    """Raise Refusal if a client names another stream or group than its token opens. The names go nowhere else."""
    for kind, found, expected in (
        ("stream", message.get("stream", grant.stream), grant.stream),
        ("group", message.get("group", grant.group), grant.group),
    ):
        if found != expected:
            raise Refusal(BAD_MESSAGE, f"this token opens {grant}, and the {kind} {str(found)[:100]!r} was asked for")
