"""Each rule of the doctor for servers, on a table of situations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from penstock.views import doctor_server as server
from penstock.views.doctor import Finding
from penstock.views.doctor_server import check_server
from penstock_common.stream.servers.checkup import LocalHostFacts, ServerFacts
from penstock_common.stream.servers.embedded import ALLOCATOR_ENVIRONMENT

GB, MB = 1 << 30, 1 << 20
INFO: dict[str, Any] = {
    "maxmemory": 2 * GB, "used_memory": 100 * MB, "total_system_memory": 16 * GB, "maxmemory_policy": "noeviction",
    "mem_allocator": "jemalloc-5.2.1", "aof_enabled": 1, "role": "master", "connected_clients": 10,
    "maxclients": 10_000,
}  # fmt: skip
CONFIG = {
    "save": "", "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 0 0 0", "timeout": "0",
    "client-query-buffer-limit": str(GB), "bind": "* -::*", "protected-mode": "yes", "requirepass": "x",
}  # fmt: skip
LOCAL = LocalHostFacts(ALLOCATOR_ENVIRONMENT, 65_000, "1")
WELL = ServerFacts(
    "redis", (8, 6, 6), INFO, CONFIG, "-1", "20", "default", (), tuple([0.1] * 100), 1e9, 2e9, "", LOCAL, {"train": GB}
)

FAR = replace(WELL, local=None, written_per_s=118e6, uncompressed=("train",))
"""A server behind a link of 1 Gb/s."""


def info(**changes: Any) -> ServerFacts:
    """Return a server with other fields of INFO."""
    return replace(WELL, info={**INFO, **changes})


def config(**changes: str) -> ServerFacts:
    """Return a server with other settings."""
    return replace(WELL, config={**CONFIG, **{name.replace("_", "-"): value for name, value in changes.items()}})


def test_a_server_as_it_should_be_has_no_findings() -> None:
    """Users do not read a doctor that always finds something."""
    assert [finding for finding in check_server(WELL) if finding.severity != "ok"] == []


@pytest.mark.parametrize(
    ("rule", "facts", "severity", "found", "fix"),
    [
        (server.product, replace(WELL, version=(6, 0, 16)), "error", "older than 6.2", "install a newer server"),
        (server.product, replace(WELL, product="valkey", version=(7, 0)), "error", "older than 7.2", "install"),
        (server.role, info(role="slave", master_host="a", master_port=1), "error", "replica", "use --url redis://a:1"),
        (
            server.rights,
            replace(WELL, user="bob", refused=("xack", "xgroup create")),
            "error",
            "bob may not use xack",
            "as an administrator run ACL SETUSER bob +xack +xgroup|create",
        ),
        (
            server.rights,
            replace(WELL, user="bob", refused=("xadd", "xgroup create", "set")),
            "error",
            "bob may not use xgroup create, which a trainer needs",
            "as an administrator run ACL SETUSER bob +xgroup|create",
        ),
        (
            server.rights,
            replace(WELL, user="bob", refused=("get (keys penstock:*)",)),
            "error",
            "get",
            "ACL SETUSER bob ~penstock:* +get",
        ),
        (
            server.eviction,
            info(maxmemory_policy="allkeys-lru"),
            "error",
            "allkeys-lru",
            "redis-cli CONFIG SET maxmemory-policy noeviction",
        ),
        (server.eviction, info(maxmemory_policy="volatile-ttl"), "ok", "volatile-ttl", ""),
        (
            server.eviction,
            replace(info(maxmemory_policy="volatile-ttl"), has_jobs=True),
            "error",
            "may delete jobs",
            "redis-cli CONFIG SET maxmemory-policy noeviction",
        ),
        (server.memory, info(maxmemory=0), "warning", "no maxmemory", "CONFIG SET maxmemory 8192mb"),
        (
            server.memory,
            info(used_memory=2 * GB),
            "error",
            "not payload of streams: writers wait",
            "CONFIG SET maxmemory 3872mb",
        ),
        (server.memory, replace(WELL, budgets={"a": GB, "b": GB}), "error", "budgets come to 2048 MiB", "maxmemory"),
        (
            server.memory,
            info(used_memory=1200 * MB),
            "warning",
            "1200 MiB are taken by what is not payload",
            "--bigkeys",
        ),
        (server.memory, info(total_system_memory=2 * GB), "warning", "nearly all of the host's", "maxmemory"),
        (server.allocator, replace(WELL, decay_ms="10000"), "note", "decay_ms 10000", "MALLOC_CONF=dirty_decay_ms:-1"),
        (server.allocator, replace(WELL, max_fit="6"), "warning", "takes new ones", "lg_extent_max_active_fit:20"),
        (server.allocator, replace(WELL, decay_ms=None), "note", "does not tell", "MALLOC_CONF"),
        (
            server.allocator,
            replace(info(mem_allocator="libc"), local=LocalHostFacts({}, None, "1")),
            "note",
            "is not told",
            "MALLOC_TRIM_THRESHOLD_=",
        ),
        (
            server.allocator,
            replace(info(mem_allocator="libc"), local=None),
            "note",
            "may give freed",
            "MALLOC_TOP_PAD_",
        ),
        (server.persistence, info(aof_last_write_status="err"), "error", "append-only file failed", "df -h"),
        (server.persistence, info(rdb_last_bgsave_status="err"), "error", "snapshot failed", "df -h"),
        (server.persistence, config(save="3600 1"), "note", "fork the server", 'CONFIG SET save ""'),
        (server.persistence, info(aof_enabled=0), "ok", "loses every stream", ""),
        (
            server.persistence,
            replace(WELL, local=LocalHostFacts({}, None, "0")),
            "warning",
            "overcommit_memory is 0",
            "sysctl",
        ),
        (
            server.replay,
            replace(config(aclfile="users.acl"), version=(8, 4), weak_default="off"),
            "error",
            "users.acl needs `user default off ~* &* +@all`",
            "redis-cli ACL SETUSER default off '~*' '&*' +@all; redis-cli ACL SAVE",
        ),
        (
            server.replay,
            replace(WELL, product="valkey", version=(9, 0, 3), weak_default="on"),
            "error",
            "it is on and lacks rights",
            "redis-cli CONFIG REWRITE",
        ),
        (server.replay, replace(WELL, version=(8, 6), weak_default="off"), "ok", "does not need its rights", ""),
        (server.replay, replace(info(aof_enabled=0), version=(7, 0), weak_default="off"), "ok", "rights", ""),
        (
            server.output_buffers,
            config(client_output_buffer_limit="normal 1000 0 0 slave 0 0 0"),
            "warning",
            "cut off at 1000 bytes",
            "normal 0 0 0",
        ),
        (server.output_buffers, info(connected_slaves=1), "warning", "a replica is cut off", "replica 4gb"),
        (
            server.query_buffer,
            config(client_query_buffer_limit="1000000"),
            "warning",
            "cut off",
            f"client-query-buffer-limit {GB}",
        ),
        (
            server.query_buffer,
            config(proto_max_bulk_len="1048576"),
            "warning",
            "larger than 1.0 MiB is cut off",
            "proto-max-bulk-len 512000000",
        ),
        (
            server.backlog,
            info(connected_slaves=2, repl_backlog_size=MB),
            "warning",
            "1.0 MiB for 2 replicas",
            "repl-backlog-size 103mb",
        ),
        (
            server.backlog,
            info(connected_slaves=1, repl_backlog_size=MB, maxmemory=100 * MB),
            "warning",
            "1.0 MiB for 1 replica",
            "repl-backlog-size 5mb",
        ),
        (server.backlog, info(connected_slaves=1, repl_backlog_size=5 * MB, maxmemory=100 * MB), "ok", "5.0 MiB", ""),
        (
            server.backlog,
            info(connected_slaves=1, repl_backlog_size=MB, maxmemory=0),
            "warning",
            "1.0 MiB for 1 replica",
            "repl-backlog-size 1024mb",
        ),
        (
            server.backlog,
            info(connected_slaves=1, repl_backlog_size=MB, maxmemory=0, total_system_memory=2 * GB),
            "warning",
            "1.0 MiB for 1 replica",
            "repl-backlog-size 128mb",
        ),
        (
            server.backlog,
            info(connected_slaves=1, repl_backlog_size=GB, maxmemory=100 * MB),
            "warning",
            "a backlog of 1024 MiB may fill maxmemory 100 MiB",
            "repl-backlog-size 5mb",
        ),
        (
            server.memory,
            replace(
                info(
                    maxmemory=100 * MB,
                    used_memory=85 * MB,
                    mem_replication_backlog=75 * MB,
                    mem_clients_slaves=MB,
                    repl_backlog_size=GB,
                ),
                budgets={"train": 30 * MB},
                held_bytes=7 * MB,
            ),
            "error",
            "78 MiB by what is not payload of streams, 76 MiB of it by the replication backlog and the buffers of",
            "redis-cli CONFIG SET repl-backlog-size 5mb",
        ),
        (
            server.memory,
            replace(info(maxmemory=100 * MB, used_memory=90 * MB), budgets={}, held_bytes=None),
            "error",
            "90 MiB of 100 MiB are used: writers wait",
            "CONFIG SET maxmemory 145mb",
        ),
        (
            server.least_replicas,
            replace(config(min_replicas_to_write="0"), info={**INFO, "connected_slaves": 2}),
            "warning",
            "split brain",
            "redis-cli CONFIG SET min-replicas-to-write 1",
        ),
        (
            server.least_replicas,
            replace(config(min_replicas_to_write="0"), info={**INFO, "connected_slaves": 1}),
            "warning",
            "writers and trainers then wait while that one is away",
            "redis-cli CONFIG SET min-replicas-to-write 1",
        ),
        (
            server.least_replicas,
            replace(config(min_replicas_to_write="2"), info={**INFO, "connected_slaves": 2}),
            "ok",
            "writes need 2",
            "",
        ),
        (server.least_replicas, config(min_replicas_to_write="0"), "ok", "no replica", ""),
        (
            server.least_replicas,
            replace(
                config(min_replicas_to_write="1"), info={**INFO, "connected_slaves": 1, "min_slaves_good_slaves": 0}
            ),
            "error",
            "0 replicas follow closely: it refuses all writes",
            "redis-cli INFO replication",
        ),
        (server.clients, info(connected_clients=9000), "warning", "9000 of 10000", "maxclients 20000"),
        (
            server.clients,
            replace(WELL, local=LocalHostFacts({}, 4096, "1")),
            "warning",
            "may open 4096 files",
            "ulimit -n 11000",
        ),
        (server.idle_timeout, config(timeout="300"), "warning", "silent for 300 s", "CONFIG SET timeout 0"),
        (
            server.latency,
            replace(WELL, pings_ms=tuple([0.1] * 90 + [80.0] * 10)),
            "warning",
            "1 of 100 80.00 ms",
            "SLOWLOG",
        ),
        (server.latency, replace(WELL, pings_ms=tuple([9.0] * 100)), "warning", "PING takes 9.00 ms", "--latency"),
        (server.throughput, replace(WELL, written_per_s=5e6), "warning", "5 MB/s written", "penstock monitor"),
        (server.link, FAR, "note", "118 MB/s from this host", "penstock stat train"),
        (server.link, replace(FAR, uncompressed=("a", "b")), "note", "a, b are sent without", "penstock stat a"),
        (server.link, replace(FAR, read_per_s=1e9, written_per_s=1e9), "ok", "1,000 MB/s", ""),
        (server.link, replace(FAR, uncompressed=()), "ok", "118 MB/s", ""),
        (server.link, replace(FAR, local=LOCAL), "ok", "on this host", ""),
        (server.link, replace(FAR, read_per_s=None), "ok", "not measured", ""),
        (server.throughput, replace(WELL, written_per_s=None, probe_left_out="not wanted"), "ok", "not wanted", ""),
        (
            server.login,
            config(protected_mode="no", requirepass=""),
            "warning",
            "anybody who reaches its port",
            "requirepass",
        ),
        (server.login, config(protected_mode="no", requirepass="x"), "ok", "needs a password", ""),
        (server.login, replace(config(requirepass=""), lets_in_all=False), "ok", "needs a password", ""),
        (server.login, replace(config(requirepass="x"), lets_in_all=True), "note", "every user of its host", "require"),
        (
            server.login,
            config(requirepass="", bind="127.0.0.1 -::1"),
            "note",
            "every user of its host",
            "requirepass",
        ),
        (server.settings, replace(WELL, config=None), "note", "CONFIG GET is forbidden", "ask"),
        (server.output_buffers, replace(WELL, config=None), "ok", "does not tell", ""),
    ],
)
def test_what_is_wrong_with_a_server_is_named_with_its_command(
    rule: Callable[[ServerFacts], Finding], facts: ServerFacts, severity: str, found: str, fix: str
) -> None:
    """A finding must say what to do about it."""
    finding = rule(facts)
    assert finding.severity == severity
    assert found in finding.found
    assert fix in finding.fix
    assert bool(finding.fix) == (severity != "ok")
