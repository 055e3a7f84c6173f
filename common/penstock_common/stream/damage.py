"""Control keys with values that Penstock did not write: which key it is, what it should hold, and how to repair it.

``stream.client`` asks here when the server answers WRONGTYPE, ``commands.readable`` when a value cannot be parsed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import RedisError

from penstock_common.errors import DamagedKey
from penstock_common.server.error_translation import is_wrong_type
from penstock_common.stream.keys import StreamKeys, parts_of

_GONE = "XGROUP subcommand requires the key to exist"
"""The server's words for an entries key that does not exist."""
_WRONG_STATE = "PENSTOCK damaged state"
"""The words of our scripts (``server/scripts``) for a damaged state key."""
_NO_ID_LEFT = "exhausted the last possible ID|ID specified in XADD is equal or smaller"
_WRONG_VALUE = re.compile(f"value is not an integer|{_NO_ID_LEFT}|increment or decrement would overflow")
"""The server's words for a number that cannot be incremented, and for a stream that has no id left."""
_CLI = 'redis-cli -u "$PENSTOCK_URL"'
_BACKUP = "restore it from a backup of the server; without one "
_REMAKE = _BACKUP + "`penstock delete {stream} --force` removes the stream, and its producer makes it again"
_REWRITE = f"`{_CLI} DEL {{key}}`, then `penstock audit {{stream}} --repair SOURCE...` writes it again"
_REFILL = (
    f"`{_CLI} DEL {{key}}` and `{_CLI} XGROUP CREATE {{key}} _last 0 MKSTREAM`, then "
    "`penstock audit {stream} --repair SOURCE...` makes its samples again"
)
_REREAD = (
    f"`{_CLI} DEL {{key}}`, then `penstock groups reset {{stream}} {{group}} {{epoch}}` has the group read again from"
    " that epoch"
)
_ID = f"$({_CLI} HGET {{manifest}} id)"
_RELIVE = f'`{_CLI} SET {{key}} "live:{_ID}"` puts it right, of an epoch that was not abandoned'


@dataclass(frozen=True, slots=True)
class KeyKind:
    """A kind of key: its type, and how to repair it."""

    type: str
    """The type in the words of the server's TYPE."""
    repair: str
    """The repair and its cost, with placeholders for the parts of the key's name."""


KINDS = {
    "meta": KeyKind("hash", _REMAKE),
    "epochs": KeyKind("hash", _REMAKE),
    "events": KeyKind("stream", f"`{_CLI} DEL {{key}}` loses nothing: it holds only hints"),
    "paces": KeyKind("hash", f"`{_CLI} DEL {{key}}` loses nothing: workers and trainers write it again"),
    "watched": KeyKind("hash", f"`{_CLI} DEL {{key}}` makes `penstock produce --watch` take every file again"),
    "manifest": KeyKind("hash", _REMAKE),
    "roster": KeyKind("hash", _REMAKE),
    "entries": KeyKind("stream", _REFILL),
    "index": KeyKind("stream", _REWRITE),
    "repairs": KeyKind("stream", _REWRITE),
    "segments": KeyKind("hash", _REMAKE),
    "state": KeyKind("string", _RELIVE),
    "quarantine": KeyKind("hash", f"`{_CLI} DEL {{key}}` loses the reasons of the epoch's bad samples, nothing else"),
    "ledger": KeyKind("string", _REREAD),
    "pos": KeyKind("hash", _REREAD),
    "dead": KeyKind("hash", _REREAD),
}
"""Word in the key's name -> kind. docs/redis-keys.md has the contents."""


def kind_of(key: str) -> KeyKind | None:
    """Return the kind of a key, or None if Penstock makes no key of that name."""
    found = parts_of(key)
    return KINDS.get(found["kind"] or "") if found else None


def repair_of(key: str) -> str:
    """Return how to repair a key, as a clause that follows a semicolon, or '' for a key that Penstock does not know."""
    found, kind = parts_of(key), kind_of(key)
    if not found or kind is None:
        return ""
    manifest = StreamKeys(found["stream"] or "").manifest(int(found["epoch"] or 0))
    words = {name: shlex.quote(word or "") for name, word in {**found, "key": key, "manifest": manifest}.items()}
    return kind.repair.format(**words)


def unreadable_value(where: str, error: Exception, key: str = "") -> DamagedKey:
    """Return the error for a value that cannot be parsed.

    Args:
        where: The key, or a part of it, in words.
        error: The parser's error.
        key: The key to repair, if ``where`` does not end with it.
    """
    repair = repair_of(key or where.rpartition(" ")[2])  # as in ``record 5-0 of KEY``
    # the representation of a redis error is its class alone
    said = f"{type(error).__name__}({str(error)!a})" if isinstance(error, RedisError) else ascii(error)
    return DamagedKey(
        f"{where} holds what Penstock did not write ({said[:120]}): another program wrote there; "
        f"docs/redis-keys.md says what belongs there; correct it{f', or {repair}' if repair else ''}"
    )


def wrong_type(types: Mapping[str, str]) -> DamagedKey | None:
    """Return the error for the first key of a wrong type, or None if all are right.

    Args:
        types: Key -> its type as the server's TYPE says it, ``none`` where there is no key.
    """
    for key, found in types.items():
        kind = kind_of(key)
        if kind is not None and found not in (kind.type, "none"):
            return DamagedKey(
                f"{key} is a {found}, expected a {kind.type}: another program wrote it (docs/redis-keys.md); "
                f"{repair_of(key)}"
            )
    return None


def gone(types: Mapping[str, str]) -> DamagedKey | None:
    """Return the error for the first missing key of entries of an open epoch, or None if none is missing."""
    for key, found in types.items():
        if found == "none" and kind_of(key) is KINDS["entries"]:
            return DamagedKey(f"{key} is gone, expected a stream: another program removed it; {repair_of(key)}")
    return None


def damage_of(client: Any, error: object, parts: Iterable[Any]) -> DamagedKey | None:
    """Return the error that names the damaged key behind the server's refusal of a command, or None.

    Args:
        client: A control connection. It is asked for types, in one round trip, only if the refusal is about a type.
        error: The server's answer.
        parts: The arguments of the command; keys are found among them.
    """
    keys = [key for key in _keys_among(parts) if kind_of(key) is not None]
    if not keys or not isinstance(error, Exception):
        return None
    if _WRONG_STATE in str(error):
        return next((unreadable_value(key, error) for key in keys if kind_of(key) is KINDS["state"]), None)
    if _WRONG_VALUE.search(str(error)):
        return unreadable_value(" or ".join(keys[:3]), error, keys[0])
    is_gone = _GONE in str(error)
    if not is_gone and not is_wrong_type(error):
        return None
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.type(key)
        types = {key: found.decode() for key, found in zip(keys, pipe.execute(), strict=True)}
    return wrong_type(types) or (gone(types) if is_gone else None)


def _keys_among(parts: Iterable[Any]) -> list[str]:
    """Return a command's keys, each once. A pipeline may name thousands of other arguments."""
    texts = (part.decode("utf-8", "replace") if isinstance(part, bytes) else part for part in parts)
    return list(dict.fromkeys(text for text in texts if isinstance(text, str) and parts_of(text)))
