"""Slots of a cluster: the slot of a key, and the key of a command. Pure: no connection and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from redis.crc import key_slot

SLOTS: Final = 16_384
"""The number of slots, from the Redis Cluster specification."""

Key: TypeAlias = bytes | str | None
"""A key whose server a command is for, or None where any server will do."""

_SCRIPTS: Final = frozenset({b"EVAL", b"EVALSHA", b"EVAL_RO", b"EVALSHA_RO"})
_READS: Final = frozenset({b"XREAD", b"XREADGROUP"})
_SECOND_WORDS: Final = frozenset({b"XINFO", b"XGROUP", b"OBJECT"})
"""Commands of two words, whose key is the third."""
_KEYLESS: Final = frozenset(
    b"ACL ASKING AUTH CLIENT CLUSTER COMMAND CONFIG DBSIZE DISCARD ECHO EXEC FLUSHALL FLUSHDB HELLO INFO LATENCY "
    b"MEMORY MULTI PING ROLE SCAN SCRIPT SELECT SLOWLOG TIME UNWATCH WAIT WAITAOF".split()
)


def slot_of(key: bytes | str) -> int:
    """Return a key's slot: the CRC16 of its hash tag, or of the whole key if it has none.

    Example:
        >>> slot_of("penstock:{train}:meta") == slot_of("{train}")
        True
    """
    return key_slot(key.encode() if isinstance(key, str) else bytes(key))


def key_of(command: Sequence[Any]) -> Key:
    """Return the first key of a command, or None for a command without keys.

    Args:
        command: The words of the command, as for redis-py's ``execute_command`` or for a channel. The first may hold
            two words, as in ``"XGROUP CREATE"``.
    """
    head = command[0]
    first, *rest = (head.encode() if isinstance(head, str) else bytes(head)).upper().split()
    if first in _KEYLESS:
        return None
    if first in _READS:
        at = next(number for number, word in enumerate(command) if word in (b"STREAMS", "STREAMS"))
        return _as_key(command[at + 1])
    if first in _SCRIPTS:
        return _as_key(command[3]) if int(command[2]) else None
    at = 2 if first in _SECOND_WORDS and not rest else 1
    return _as_key(command[at]) if len(command) > at else None


def _as_key(word: Any) -> bytes | str:
    return word if isinstance(word, str) else bytes(word)
