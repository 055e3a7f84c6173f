"""The rules for a server that carries streams: one small function for each, from facts to a finding. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from penstock.views.doctor import Finding, ok
from penstock_common.printable import readable_bytes
from penstock_common.stream.servers.checkup import ServerFacts, role_of
from penstock_common.stream.servers.embedded import ALLOCATOR_ENVIRONMENT
from penstock_common.stream.servers.suitability import fitting_backlog, may_evict, memory_of, usable_bytes
from penstock_common.wire.limits import MAX_ENTRY_BYTES, MAX_FIELD_BYTES

FLOOR = {"redis": (6, 2), "valkey": (7, 2)}
SLOW_PING_MS, VERY_SLOW_PING_MS = 5.0, 50.0
"""A writer commits a block of 1 MB in some ms, so a longer round trip limits its rate."""
SLOW_BYTES_PER_S = 100e6
"""Below this rate, a single trainer of 150 kB samples gets less than 700 of them a second."""
PACKED_BYTES_PER_S = 240e6
"""The rate at which one core compresses tokens with zstd (docs/compression.md), its slowest common input."""
REPLICA_BUFFER_BYTES = 1 << 30
BACKLOG_BYTES = 256 << 20
MOST_BACKLOG_SHARE = 0.25
"""The share of maxmemory above which a backlog is too large."""
CROWDED = 0.8
REPLAYS_ALL = {"redis": (8, 6), "valkey": (9, 1, 2)}
"""The versions from which a replay of the append-only file ignores the rights of the default user.

redis/redis#14545, valkey-io/valkey#3984
"""
LEAST_FIT = 16
"""The lg of the factor by which a range of freed pages may exceed a request and still be used: some KB of a GB."""


def _set(name: str, value: object) -> str:
    return f"redis-cli CONFIG SET {name} {value}"


def _mb(nbytes: float) -> str:
    """Return megabytes as redis.conf has them, rounded up."""
    return f"{-(-int(nbytes) // (1 << 20))}mb"


def _setting(facts: ServerFacts, name: str) -> str | None:
    return None if facts.config is None else facts.config.get(name)


def product(facts: ServerFacts) -> Finding:
    """Check the version. The lowest one is the lowest that is tested, because commands of streams differ before it."""
    version = ".".join(map(str, facts.version))
    floor = FLOOR[facts.product]
    if facts.version < floor:
        least = ".".join(map(str, floor))
        return Finding("version", "error", f"{facts.product} {version} is older than {least}", "install a newer server")
    return ok("version", f"{facts.product} {version}")


def eviction(facts: ServerFacts) -> Finding:
    """Check that neither samples are deleted before they are read, nor jobs before they are done."""
    policy = str(facts.info.get("maxmemory_policy", "noeviction"))
    if not may_evict(policy, has_jobs=facts.has_jobs):
        return ok("eviction", policy)
    what = "samples unread" if may_evict(policy) else "jobs that wait in its queue"
    return Finding(
        "eviction", "error", f"maxmemory-policy is {policy}: it may delete {what}",
        _set("maxmemory-policy", "noeviction"),
    )  # fmt: skip


def memory(facts: ServerFacts) -> Finding:
    """Check the limits: writers must reach their budget before the server's limit, and the server before the host's."""
    limit, used = int(facts.info.get("maxmemory", 0)), int(facts.info.get("used_memory", 0))
    host = int(facts.info.get("total_system_memory", 0))
    budgets = sum(facts.budgets.values())
    if not limit:
        return Finding(
            "memory", "warning",
            f"no maxmemory: {readable_bytes(used)} are used, and nothing stops the server before the host's "
            f"{readable_bytes(host)} are gone", _set("maxmemory", _mb(max(host // 2, 2 * budgets) or 2 << 30)),
        )  # fmt: skip
    others = max(0, used - facts.held_bytes) if facts.held_bytes is not None else 0
    raised = _set("maxmemory", _mb(max(used, budgets + others) * 1.25 + (32 << 20)))
    remedy, of_replicas = f"redis-cli --bigkeys; or {raised}", ""
    if backlog_bytes := memory_of(facts.info).backlog_bytes:
        of_replicas = f", {readable_bytes(backlog_bytes)} of it by the replication backlog and the buffers of replicas"
    fitting = fitting_backlog(limit)
    if backlog_bytes > fitting and int(facts.info.get("repl_backlog_size", 0)) > 2 * fitting:
        remedy = _set("repl-backlog-size", _mb(fitting))
    if used > usable_bytes(limit):
        of_others = f", {readable_bytes(others)} by what is not payload of streams"
        of_others = "" if facts.held_bytes is None else of_others  # a part of the cluster does not tell
        return Finding(
            "memory", "error",
            f"{readable_bytes(used)} of {readable_bytes(limit)} are used{of_others}{of_replicas}: writers "
            "wait, rq fails", remedy,
        )  # fmt: skip
    if budgets > usable_bytes(limit):
        return Finding(
            "memory", "error",
            f"the streams' budgets come to {readable_bytes(budgets)}, maxmemory {readable_bytes(limit)} leaves space "
            f"for {readable_bytes(max(0, usable_bytes(limit)))}", raised,
        )  # fmt: skip
    if budgets + others > usable_bytes(limit):
        return Finding(
            "memory", "warning",
            f"{readable_bytes(others)} are taken by what is not payload of streams{of_replicas}, so budgets of "
            f"{readable_bytes(budgets)} do not fit under {readable_bytes(limit)}: writers will wait for memory", remedy,
        )  # fmt: skip
    if host and limit > 0.9 * host:
        return Finding(
            "memory", "warning",
            f"maxmemory {readable_bytes(limit)} is nearly all of the host's {readable_bytes(host)}; "
            "buffers and a rewrite of the append-only file need as much again", _set("maxmemory", _mb(host // 2)),
        )  # fmt: skip
    left = readable_bytes(usable_bytes(limit) - used)
    return ok("memory", f"{readable_bytes(used)} of {readable_bytes(limit)} used, writers may take {left} more")


def allocator(facts: ServerFacts) -> Finding:
    """Check the allocator: blocks above 2 MB move at 0.5 to 0.8 of the rate if freed pages go back to the kernel.

    By its defaults, jemalloc gives freed neighbours of 8 MB back at once. Kept pages must also be used again. Its
    defaults take new pages for a request of less than a 64th of them.
    """
    kind = str(facts.info.get("mem_allocator", "unknown"))
    if kind.startswith("jemalloc"):
        if facts.decay_ms == "-1" and facts.max_fit is not None and int(facts.max_fit) < LEAST_FIT:
            return Finding(
                "allocator", "warning",
                f"{kind} keeps freed pages and takes new ones beside them (lg_extent_max_active_fit {facts.max_fit}): "
                "each epoch that is released can make the server larger", _keep(kind),
            )  # fmt: skip
        if facts.decay_ms == "-1":
            return ok("allocator", f"{kind}, keeps freed pages")
        if facts.decay_ms is None:
            return Finding("allocator", "note", f"{kind}; whether it keeps freed pages it does not tell", _keep(kind))
        return Finding(
            "allocator", "note",
            f"{kind} gives freed pages back (dirty_decay_ms {facts.decay_ms}): blocks above 2 MB, and samples of that "
            "size, move at 0.5 to 0.8 of the speed",
            _keep(kind),
        )  # fmt: skip
    known = facts.local.environment if facts.local is not None else None
    if known is not None and all(known.get(name) == value for name, value in _names(kind).items()):
        return ok("allocator", f"{kind}, keeps freed pages")
    lacks = "is not told to keep freed pages" if known is not None else "may give freed pages back"
    return Finding(
        "allocator", "note", f"{kind} {lacks}: entries of 150 kB and more move at 0.6 to 0.8 of the speed", _keep(kind)
    )


def _names(kind: str) -> dict[str, str]:
    is_jemalloc = kind.startswith("jemalloc")
    return {name: value for name, value in ALLOCATOR_ENVIRONMENT.items() if name.endswith("_CONF") == is_jemalloc}


def _keep(kind: str) -> str:
    return "start the server with " + " ".join(f"{name}={value}" for name, value in _names(kind).items())


def persistence(facts: ServerFacts) -> Finding:
    """Check the disk.

    If it cannot be written, all writers stop. Snapshots fork the server after a number of writes.
    """
    info = facts.info
    for key, what in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if info.get(key, "ok") != "ok":
            return Finding(
                "persistence", "error", f"the last write of the {what} failed: the server may refuse all writes",
                "df -h; then look into the server's log",
            )  # fmt: skip
    save, is_aof = _setting(facts, "save"), bool(int(info.get("aof_enabled", 0)))
    if save:
        return Finding(
            "persistence", "note", f"snapshots ({save}) fork the server and write all of it again and again",
            'redis-cli CONFIG SET save ""',
        )  # fmt: skip
    if not is_aof:
        return ok("persistence", "nothing is on disk: a restart loses every stream, epochs must be made again")
    if facts.local is not None and facts.local.overcommit != "1":
        return Finding(
            "persistence", "warning", f"vm.overcommit_memory is {facts.local.overcommit}: a rewrite of the append-only "
            "file forks, and may fail for want of memory that it does not need", "sysctl -w vm.overcommit_memory=1",
        )  # fmt: skip
    return ok("persistence", "append-only file")


def replay(facts: ServerFacts) -> Finding:
    """Check the default user: a replay of the append-only file runs transactions with its rights, also while it is off.

    The server starts without those that it refuses, and only its log says so.
    """
    if facts.weak_default is None or not int(facts.info.get("aof_enabled", 0)):
        return ok("default user", "has the rights that a restart needs, or the server does not tell")
    if facts.version >= REPLAYS_ALL[facts.product]:
        return ok("default user", "a restart does not need its rights")
    file = _setting(facts, "aclfile")
    keeping, kept_in = ("ACL SAVE", file) if file else ("CONFIG REWRITE", "redis.conf")
    first = "give programs that log in as default a user of their own; " if facts.weak_default == "on" else ""
    return Finding(
        "default user", "error",
        f"it is {facts.weak_default} and lacks rights: the next restart reads the append-only file with its rights and "
        f"leaves out every transaction, so the streams are lost; {kept_in} needs `user default off ~* &* +@all`",
        f"{first}redis-cli ACL SETUSER default off '~*' '&*' +@all; redis-cli {keeping}",
    )  # fmt: skip


def output_buffers(facts: ServerFacts) -> Finding:
    """Check the limit of a reader's buffer.

    The server disconnects a reader that asks for 64 MB if its limit is smaller, and the reader asks again.
    """
    limits = (_setting(facts, "client-output-buffer-limit") or "").split()
    classes = {limits[at]: limits[at + 1 : at + 4] for at in range(0, len(limits) - 3, 4)}
    normal, replica = classes.get("normal", ["0"]), classes.get("slave", classes.get("replica", ["0"]))
    if normal[0] != "0":
        return Finding(
            "output buffers", "warning", f"trainers are cut off at {normal[0]} bytes of answers",
            'redis-cli CONFIG SET client-output-buffer-limit "normal 0 0 0"',
        )  # fmt: skip
    if int(facts.info.get("connected_slaves", 0)) and 0 < int(replica[0]) < REPLICA_BUFFER_BYTES:
        return Finding(
            "output buffers", "warning",
            f"a replica is cut off when it is {replica[0]} bytes behind, and copies all again",
            'redis-cli CONFIG SET client-output-buffer-limit "replica 4gb 2gb 60"',
        )  # fmt: skip
    return ok("output buffers", "no limit for trainers" if limits else "the server does not tell")


def query_buffer(facts: ServerFacts) -> Finding:
    """Check the limits of one argument, and of all arguments that a transaction queues."""
    limits = {"proto-max-bulk-len": MAX_FIELD_BYTES, "client-query-buffer-limit": MAX_ENTRY_BYTES}
    for name, wanted in limits.items():
        limit = int(_setting(facts, name) or wanted)
        if limit < wanted:
            return Finding(
                "query buffer", "warning", f"a writer whose entry is larger than {readable_bytes(limit)} is cut off",
                _set(name, wanted),
            )  # fmt: skip
    return ok("query buffer", readable_bytes(limit))


def backlog(facts: ServerFacts) -> Finding:
    """Check the backlog: a replica that was away for a second of 1 GB/s copies everything again.

    The backlog counts in the server's used memory, so a large one takes the space of samples.
    """
    replicas, size = int(facts.info.get("connected_slaves", 0)), int(facts.info.get("repl_backlog_size", 0))
    limit = int(facts.info.get("maxmemory", 0))
    fitting = fitting_backlog(limit, int(facts.info.get("total_system_memory", 0)))
    if replicas and limit and size > MOST_BACKLOG_SHARE * limit:
        return Finding(
            "replication backlog", "warning",
            f"a backlog of {readable_bytes(size)} may fill maxmemory {readable_bytes(limit)}: writers would wait",
            _set("repl-backlog-size", _mb(fitting)),
        )  # fmt: skip
    if replicas and size < min(BACKLOG_BYTES, fitting // 2):  # a raised maxmemory alone brings no warning
        return Finding(
            "replication backlog", "warning",
            f"a backlog of {readable_bytes(size)} for {replicas} replica{'' if replicas == 1 else 's'}: one that is "
            "away for a moment copies everything again", _set("repl-backlog-size", _mb(fitting)),
        )  # fmt: skip
    return ok("replication backlog", f"{readable_bytes(size)}, {replicas} replicas")


def least_replicas(facts: ServerFacts) -> Finding:
    """Check min-replicas-to-write: without it a primary that is cut off takes writes that its successor lacks."""
    replicas, least = int(facts.info.get("connected_slaves", 0)), _setting(facts, "min-replicas-to-write")
    if least is None:
        return ok("min replicas", "the server does not tell")
    good = int(facts.info.get("min_slaves_good_slaves", replicas))
    if good < int(least):
        return Finding(
            "min replicas", "error",
            f"min-replicas-to-write is {least}, and {good} replicas follow closely: it refuses all writes",
            "redis-cli INFO replication",
        )  # fmt: skip
    if replicas and not int(least):
        price = ". With one replica, writers and trainers then wait while that one is away" if replicas == 1 else ""
        return Finding(
            "min replicas", "warning",
            "min-replicas-to-write is 0: if this server is cut off and a replica replaces it, both take writes "
            f"(split brain), and those that this one took are lost{price}", _set("min-replicas-to-write", 1),
        )  # fmt: skip
    return ok("min replicas", f"writes need {least}" if int(least) else "no replica")


def role(facts: ServerFacts) -> Finding:
    """Check that the server is not a replica, which accepts no writes."""
    if facts.info.get("role", "master") != "master":
        where = f"{facts.info.get('master_host', '?')}:{facts.info.get('master_port', '?')}"
        return Finding(
            "role", "error", "it is a replica: nobody can write", f"use --url {shlex.quote(f'redis://{where}')}"
        )
    return ok("role", "it is no replica")


def rights(facts: ServerFacts) -> Finding:
    """Check the user's rights: a missing one fails in the middle of a run."""
    if not facts.refused:
        return ok("rights", f"user {facts.user} may do all that Penstock does")
    user, (role, needed) = facts.user, role_of(facts.refused)
    if not needed:
        return Finding(
            "rights", "note", f"user {user} has the rights of a {role}, and may not use {', '.join(facts.refused)}",
            "for another role, log in as its user (docs/acl.md)",
        )  # fmt: skip
    plain = [command.partition(" (")[0] for command in needed]
    grants = " ".join("+" + command.replace(" ", "|") for command in plain)
    keys = "~penstock:* " if any("(keys" in command for command in needed) else ""
    of_role = f", which a {role} needs" if role else ""
    return Finding(
        "rights", "error", f"user {user} may not use {', '.join(needed)}{of_role}",
        f"as an administrator run ACL SETUSER {shlex.quote(user)} {keys}{grants}",
    )  # fmt: skip


def clients(facts: ServerFacts) -> Finding:
    """Check the connections: a trainer takes four, and a worker four."""
    most, now = (
        int(facts.info.get("maxclients", 0) or _setting(facts, "maxclients") or 10_000),
        int(facts.info.get("connected_clients", 0)),
    )
    if now > CROWDED * most:
        return Finding(
            "connections", "warning", f"{now} of {most} connections are taken; a refused one waits, then ends",
            _set("maxclients", 2 * most),
        )  # fmt: skip
    files = facts.local.open_files if facts.local is not None else None
    if files is not None and files < most + 32:
        return Finding(
            "connections", "warning", f"maxclients is {most}, and the process may open {files} files",
            f"ulimit -n {most + 1000} before the server is started",
        )  # fmt: skip
    return ok("connections", f"{now} of {most} taken")


def idle_timeout(facts: ServerFacts) -> Finding:
    """Check the timeout of idle clients: a trainer in a long step is silent on some of its connections."""
    seconds = int(_setting(facts, "timeout") or 0)
    if seconds:
        return Finding("idle timeout", "warning", f"connections silent for {seconds} s are closed", _set("timeout", 0))
    return ok("idle timeout", "none")


def latency(facts: ServerFacts) -> Finding:
    """Check the round trips that writers and trainers meet."""
    if not facts.pings_ms:
        return ok("latency", "not measured")
    half, most = (facts.pings_ms[int(len(facts.pings_ms) * part)] for part in (0.5, 0.99))
    text = f"PING takes {half:.2f} ms, 1 of 100 {most:.2f} ms or more"
    if half > SLOW_PING_MS or most > VERY_SLOW_PING_MS:
        return Finding(
            "latency", "warning", f"{text}: look for slow commands, swapping, or a far network",
            "redis-cli --latency; redis-cli SLOWLOG GET 10",
        )  # fmt: skip
    return ok("latency", text)


def throughput(facts: ServerFacts) -> Finding:
    """Check a small probe: 32 entries of 1 MB, with plain redis-py, during all other work."""
    if facts.written_per_s is None or facts.read_per_s is None:
        return ok("throughput", f"not measured: {facts.probe_left_out or 'left out'}")
    text = f"{facts.written_per_s / 1e6:,.0f} MB/s written, {facts.read_per_s / 1e6:,.0f} MB/s read"
    if min(facts.written_per_s, facts.read_per_s) < SLOW_BYTES_PER_S:
        return Finding(
            "throughput", "warning", f"{text}, in entries of 1 MB: the network, or a busy server",
            "penstock monitor; redis-cli INFO commandstats",
        )  # fmt: skip
    return ok("throughput", text)


def link(facts: ServerFacts) -> Finding:
    """Check whether bytes take longer on the way than one core takes to compress them.

    The probe cannot tell a slow link from a busy server, so this is a note that says both.
    """
    if facts.local is not None:
        return ok("link", "the server is on this host")
    if facts.written_per_s is None or facts.read_per_s is None:
        return ok("link", "not measured")
    rate = min(facts.written_per_s, facts.read_per_s)
    text = f"{rate / 1e6:,.0f} MB/s from this host"
    if rate >= PACKED_BYTES_PER_S or not facts.uncompressed:
        return ok("link", text)
    name = facts.uncompressed[0]
    return Finding(
        "link", "note",
        f"{text}, and one core compresses {PACKED_BYTES_PER_S / 1e6:,.0f} MB/s: if the network is the limit, and not a "
        f"busy server, masks, labels and tokens come faster compressed; {', '.join(facts.uncompressed)} "
        f"{'is' if len(facts.uncompressed) == 1 else 'are'} sent without compression",
        f"penstock stat {name}, for the ratio of each tensor; then penstock produce ... --compression TENSOR=zstd",
    )  # fmt: skip


def login(facts: ServerFacts) -> Finding:
    """Check the login: every client that reaches a server without one can delete everything on it."""
    if facts.config is None:
        return ok("login", "the server does not tell its settings")
    is_open = facts.lets_in_all  # requirepass is empty, too, where an ACL file has the password
    if is_open is None:
        is_open = facts.user == "default" and not _setting(facts, "requirepass")
    reached = {"127.0.0.1", "::1", "-::1", "localhost"}.issuperset((_setting(facts, "bind") or "*").split())
    if is_open and not reached and _setting(facts, "protected-mode") == "no":
        return Finding(
            "login", "warning", "anybody who reaches its port may read and delete everything",
            "redis-cli CONFIG SET requirepass A_LONG_SECRET",
        )  # fmt: skip
    if is_open:
        return Finding(
            "login", "note", "every user of its host may read and delete everything, and run code by its jobs",
            "redis-cli CONFIG SET requirepass A_LONG_SECRET",
        )  # fmt: skip
    return ok("login", "needs a password")


def settings(facts: ServerFacts) -> Finding:
    """Check that settings can be read, because some rules need them."""
    if facts.config is None:
        return Finding("settings", "note", "CONFIG GET is forbidden: limits of buffers and timeouts were not checked",
                       "ask whoever runs the server")  # fmt: skip
    return ok("settings", f"{len(facts.config)} read")


RULES: tuple[Callable[[ServerFacts], Finding], ...] = (
    product, role, rights, eviction, memory, persistence, replay, allocator, output_buffers, query_buffer, backlog,
    least_replicas, clients, idle_timeout, latency, throughput, link, login, settings,
)  # fmt: skip


def check_server(facts: ServerFacts) -> list[Finding]:
    """Return every rule's finding."""
    return [rule(facts) for rule in RULES]
