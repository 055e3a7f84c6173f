"""The facts about a server before it carries streams: settings, state, rights, latency, throughput.

``penstock.views.doctor_server`` judges them. Only a scratch key changes on the server, and it is removed.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from redis.exceptions import ResponseError

from penstock_common.errors import PenstockError, Unauthorized, WritesRefused
from penstock_common.segments.folder import INLINE
from penstock_common.server.connection import lets_in_all
from penstock_common.stream.commands import Client
from penstock_common.stream.directory import list_streams
from penstock_common.stream.keys import scratch_key
from penstock_common.stream.rights import LOADER, MONITOR, WRITER, find_missing, user_of
from penstock_common.stream.servers.suitability import allocator_settings
from penstock_common.stream.streams import find_stream, look_at_each

PINGS: Final = 100
PROBE_ENTRY_BYTES: Final = 1_000_000
"""About the size of a block."""
PROBE_ENTRIES: Final = 32
PROBE_TTL_S: Final = 60
"""If this process dies in between, the server removes the scratch key."""
SPARE_BYTES: Final = 4 * PROBE_ENTRY_BYTES * PROBE_ENTRIES
"""The memory that must be free for the probe."""
_REPLAYED: Final = ("XADD KEY * f v", "XGROUP CREATE KEY g 0", "HSET KEY f v", "SETBIT KEY 0 1", "UNLINK KEY")
"""Commands of the kinds that transactions and scripts leave in an append-only file."""


@dataclass(frozen=True, slots=True)
class LocalHostFacts:
    """The facts that this host knows of a server that runs on it."""

    environment: Mapping[str, str] | None
    """The part of the server's environment that steers its allocator. None if the process title has overwritten it."""
    open_files: int | None
    """The file descriptors it may have."""
    overcommit: str
    """The setting ``vm.overcommit_memory``."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts about one server."""

    product: str
    """The name ``redis`` or ``valkey``."""
    version: tuple[int, ...]
    info: Mapping[str, Any]
    """The answer of INFO, all sections together."""
    config: Mapping[str, str] | None
    """The settings, or None if CONFIG GET is forbidden, as on managed servers."""
    decay_ms: str | None
    """The dirty_decay_ms of jemalloc, or None if the server does not report it."""
    max_fit: str | None
    """The lg_extent_max_active_fit of jemalloc, or None if the server does not report it."""
    user: str
    refused: tuple[str, ...]
    """Commands that Penstock needs and that this user may not use."""
    pings_ms: tuple[float, ...] = ()
    """Round trips in ms, in rising order."""
    written_per_s: float | None = None
    read_per_s: float | None = None
    """Bytes a second of the probe, with plain redis-py, or None without a probe."""
    probe_left_out: str = ""
    """The reason why there was no probe."""
    local: LocalHostFacts | None = None
    budgets: Mapping[str, int] = field(default_factory=dict)
    """Stream -> bytes of the server's memory that it may take."""
    held_bytes: int | None = 0
    """Bytes of the server's memory that the payload of all streams takes now, or None if that is not known."""
    has_jobs: bool = False
    """Whether there was ever a queue of jobs on it."""
    uncompressed: tuple[str, ...] = ()
    """The streams whose payload is sent to it without compression."""
    lets_in_all: bool | None = None
    """Whether it answers a connection without a login, or None if that is not known."""
    weak_default: Literal["on", "off"] | None = None
    """The state of the default user if it lacks rights that a replay of the append-only file needs.

    None if it has them, and where the server does not tell.
    """


def read_server(
    client: Client,
    *,
    probe: bool,
    budgets: Mapping[str, int],
    held_bytes: int | None,
    uncompressed: tuple[str, ...] = (),
) -> ServerFacts:
    """Read all facts. The probe writes and reads 32 MB in a scratch key, unless that would fill the server."""
    info: dict[str, Any] = client.info("everything")
    info["maxmemory"] = int(info.get("maxmemory", 0)) or client.memory_bytes
    version = str(info.get("valkey_version") or info.get("redis_version", "0"))
    limit, used = int(info.get("maxmemory", 0)), int(info.get("used_memory", 0))
    left_out = "" if probe else "not wanted"
    if probe and limit and limit - used < SPARE_BYTES:
        left_out = "too little memory is free"
    refused = missing_rights(client)
    if not left_out and refused:
        left_out = "commands are refused"
    written, read = None, None
    if not left_out:
        try:
            written, read = throughput(client)
        except WritesRefused:  # the rules for disk, memory and replicas say why
            left_out = "the server takes no writes now"
    host = str(client.connection_pool.connection_kwargs.get("host", ""))
    jemalloc = allocator_settings(client)
    return ServerFacts(
        product="valkey" if "valkey_version" in info else "redis",
        version=tuple(int(part) for part in version.split(".") if part.isdecimal()),
        info=info, config=_config(client), decay_ms=jemalloc.get("dirty_decay_ms"),
        max_fit=jemalloc.get("lg_extent_max_active_fit"), user=_user(client), refused=refused,
        pings_ms=latencies(client), written_per_s=written, read_per_s=read, probe_left_out=left_out,
        local=_local(host, info), budgets=budgets, held_bytes=held_bytes,
        has_jobs=_has_jobs(client), uncompressed=uncompressed, lets_in_all=lets_in_all(client),
        weak_default=_weak_default(client),
    )  # fmt: skip


def read_inline(client: Client) -> tuple[dict[str, int], dict[str, int]]:
    """Return the budget of each stream whose payload is in the servers' memory, and the payload bytes on each server.

    A stream that is damaged is left out.

    Returns:
        Stream -> budget, and address -> bytes.
    """
    held: dict[str, int] = {}

    def look(name: str) -> tuple[str, int] | None:
        stream = find_stream(client, name)
        if stream is None or stream.payload != INLINE:
            return None
        for one in stream.partitions:
            where = client.node_of(one.roster).where
            held[where] = held.get(where, 0) + int(client.hget(one.roster, "bytes") or 0)
        return name, stream.budget_bytes

    return dict(look_at_each(list_streams(client), look)[0]), held


def has_waitaof(client: Client) -> bool:
    """Return whether the server can report what is on its disk. It is asked, because versions do not show it."""
    try:
        client.execute_command("WAITAOF", 0, 0, 1)
    except ResponseError as error:
        return "unknown command" not in str(error)
    except Unauthorized:  # a server that lacks a command does not ask for a right to it
        pass
    return True


def missing_rights(client: Client) -> tuple[str, ...]:
    """Return the commands that are refused, as a user reads them."""
    missing = find_missing(client)
    commands = [command.replace("|", " ") for command in missing.commands]
    return (*commands, *(f"{command.replace('|', ' ')} (keys penstock:*)" for command in missing.keys))


def role_of(refused: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the role of docs/acl.md that a user has, and the refused commands that the role needs.

    The commands that append samples and that read them for a group tell the roles apart. A user of no role has the role
    '' and needs all.

    Args:
        refused: What `missing_rights` returned.
    """
    commands = {one: one.partition(" (")[0].replace(" ", "|") for one in refused}
    is_writer, is_reader = "xadd" not in commands.values(), "xreadgroup" not in commands.values()
    needed: tuple[str, ...]
    if is_writer and not is_reader:
        role, needed = "producer", WRITER
    elif is_reader and not is_writer:
        role, needed = "trainer", LOADER
    elif not is_writer and not set(MONITOR).intersection(commands.values()):
        role, needed = "monitor", MONITOR
    else:
        return "", tuple(refused)
    return role, tuple(one for one, command in commands.items() if command in needed)


def latencies(client: Client) -> tuple[float, ...]:
    """Return round trips of a PING in ms, in rising order."""
    found = []
    for _ in range(PINGS):
        began = time.perf_counter()
        with suppress(WritesRefused):  # a round trip, too
            client.ping()
        found.append((time.perf_counter() - began) * 1000)
    return tuple(sorted(found))


def throughput(client: Client) -> tuple[float, float]:
    """Return the bytes a second written, and read, in entries of 1 MB of a scratch key that is removed."""
    key, payload = scratch_key(secrets.token_hex(6)), secrets.token_bytes(PROBE_ENTRY_BYTES)
    writing, reading = [], []
    try:
        client.xadd(key, {"x": payload})
        client.expire(key, PROBE_TTL_S)
        for _ in range(PROBE_ENTRIES):
            began = time.perf_counter()
            entry_id = client.xadd(key, {"x": payload}, nomkstream=True)
            between = time.perf_counter()
            client.xrange(key, entry_id, entry_id)
            writing.append(between - began)
            reading.append(time.perf_counter() - between)
    finally:
        client.unlink(key)
    return PROBE_ENTRY_BYTES / median(writing), PROBE_ENTRY_BYTES / median(reading)


def _config(client: Client) -> Mapping[str, str] | None:
    try:
        found = client.config_get("*")
    except (ResponseError, PenstockError):
        return None
    return {_text(name): _text(value) for name, value in found.items()}


def _has_jobs(client: Client) -> bool:
    try:
        return bool(client.exists("rq:queues"))  # rq notes the name of each queue there
    except (ResponseError, PenstockError):
        return False


def _user(client: Client) -> str:
    try:
        return _text(client.execute_command("ACL", "WHOAMI"))
    except (ResponseError, Unauthorized):  # few users may ask for their name
        return user_of(client)


def _weak_default(client: Client) -> Literal["on", "off"] | None:
    """Return the state of the default user if it may not run what is replayed, see `ServerFacts.weak_default`.

    Redis 6.2 has no ACL DRYRUN, and replays transactions without a look at rights.
    """
    key = scratch_key("")
    try:
        answers = [
            client.acl_dryrun("default", *(key if word == "KEY" else word for word in words.split()))
            for words in _REPLAYED
        ]
        if all(_text(answer) == "OK" for answer in answers):
            return None
        return "on" if client.acl_getuser("default")["enabled"] else "off"
    except (ResponseError, PenstockError):  # few users may ask for others
        return None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _local(host: str, info: Mapping[str, Any]) -> LocalHostFacts | None:
    """Return what this host knows, if the server runs on it and /proc shows the process to this user, else None."""
    if host not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return None
    folder = Path("/proc") / str(info.get("process_id", 0))
    try:
        if not any(name in (folder / "comm").read_text() for name in ("redis", "valkey")):
            return None
        words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        limits = (folder / "limits").read_text()
        overcommit = Path("/proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        return None
    pairs = (word.partition("=") for word in words)
    steering = {name: value for name, _, value in pairs if "MALLOC" in name}
    files = next((line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")), "")
    is_whole = any(word.startswith("PATH=") for word in words)
    return LocalHostFacts(steering if is_whole else None, int(files) if files.isdecimal() else None, overcommit)
