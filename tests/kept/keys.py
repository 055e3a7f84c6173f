"""Redis keys as JSON that any server from Redis 6.2 on can take back: no DUMP, whose blobs older servers refuse.

Bytes are text of one character a byte (latin-1). A stream has its entries with their ids, and each group with its
position, its consumers and what is pending for them. Idle times are not kept: who held something is long gone.
"""

from __future__ import annotations

from typing import Any

IDLE_MS = 3_600_000
"""The time for which a pending entry was held when it is restored: its holder is dead."""
MANY = 10_000
"""More than any key here holds."""

Described = dict[str, Any]


def describe(client: Any) -> dict[str, Described]:
    """Every key of the server."""
    return {_text(key): _described(client, key) for key in sorted(client.scan_iter(count=1000))}


def restore(client: Any, keys: dict[str, Described]) -> None:
    """Make the keys on an empty server."""
    for name, described in keys.items():
        key, value = _bytes(name), described["value"]
        if described["type"] == "string":
            client.set(key, _bytes(value))
        elif described["type"] == "hash":
            client.hset(key, mapping={_bytes(field): _bytes(content) for field, content in value.items()})
        else:
            _restore_stream(client, key, described)


def _described(client: Any, key: bytes) -> Described:
    kind = client.type(key).decode()
    if kind == "string":
        return {"type": kind, "value": _text(client.get(key) or b"")}
    if kind == "hash":
        return {"type": kind, "value": {_text(field): _text(v) for field, v in sorted(client.hgetall(key).items())}}
    assert kind == "stream", f"{key!r} is a {kind}: no key of Penstock's is"
    info = client.xinfo_stream(key)
    entries = [
        [_text(entry_id), {_text(field): _text(value) for field, value in fields.items()}]
        for entry_id, fields in client.xrange(key, count=MANY)
    ]
    groups = [_described_group(client, key, group) for group in client.xinfo_groups(key)]
    return {"type": kind, "value": entries, "last_id": _text(info["last-generated-id"]), "groups": groups}


def _described_group(client: Any, key: bytes, group: dict[str, Any]) -> Described:
    pending = client.xpending_range(key, group["name"], "-", "+", MANY)
    return {
        "name": _text(group["name"]),
        "last_id": _text(group["last-delivered-id"]),
        "consumers": [_text(consumer["name"]) for consumer in client.xinfo_consumers(key, group["name"])],
        "pending": [[_text(one["message_id"]), _text(one["consumer"]), one["times_delivered"]] for one in pending],
    }


def _restore_stream(client: Any, key: bytes, described: Described) -> None:
    for group in described["groups"]:
        client.execute_command("XGROUP", "CREATE", key, _bytes(group["name"]), "0", "MKSTREAM")
    for entry_id, fields in described["value"]:
        client.xadd(key, {_bytes(field): _bytes(value) for field, value in fields.items()}, id=entry_id)
    client.execute_command("XSETID", key, described["last_id"])
    for group in described["groups"]:
        name = _bytes(group["name"])
        for consumer in group["consumers"]:
            client.execute_command("XGROUP", "CREATECONSUMER", key, name, _bytes(consumer))
        client.execute_command("XGROUP", "SETID", key, name, group["last_id"])
        for entry_id, consumer, deliveries in group["pending"]:
            client.xclaim(
                key, name, consumer, 0, [entry_id], idle=IDLE_MS, retrycount=deliveries, force=True, justid=True
            )


def _text(value: bytes) -> str:
    return value.decode("latin-1")


def _bytes(value: str) -> bytes:
    return value.encode("latin-1")
