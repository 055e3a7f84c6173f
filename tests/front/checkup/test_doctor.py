"""`penstock doctor`: each rule on a table of situations, and the whole of it on every server that is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock.checkup import server_rules as server
from penstock.checkup import stream_rules as stream
from penstock.checkup.findings import Finding
from penstock.checkup.holes import HOLES, is_open, open_holes
from penstock.checkup.server_rules import check_server
from penstock.checkup.stream_rules import StreamFacts
from penstock_common.stream.checkup import Local, ServerFacts
from penstock_common.stream.glance import EpochGlance, Glance, GroupGlance, MemberGlance
from penstock_common.stream.paces import Paces, Told
from penstock_common.stream.server import ALLOCATOR_ENVIRONMENT, EmbeddedServer
from penstock_common.stream.suitability import ServerMemory
from penstock_common.stream.waiters import Waiter

GB, MB = 1 << 30, 1 << 20
INFO: dict[str, Any] = {
    "maxmemory": 2 * GB, "used_memory": 100 * MB, "total_system_memory": 16 * GB, "maxmemory_policy": "noeviction",
    "mem_allocator": "jemalloc-5.2.1", "aof_enabled": 1, "role": "master", "connected_clients": 10,
    "maxclients": 10_000,
}  # fmt: skip
CONFIG = {
    "save": "", "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 0 0 0", "timeout": "0",
    "client-query-buffer-limit": str(GB), "bind": "* -::*", "protected-mode": "yes", "requirepass": "",
}  # fmt: skip
LOCAL = Local(ALLOCATOR_ENVIRONMENT, 65_000, "1")
WELL = ServerFacts(
    "redis", (8, 6, 6), INFO, CONFIG, "-1", "default", (), tuple([0.1] * 100), 1e9, 2e9, "", LOCAL, {"train": GB}
)


def info(**changes: Any) -> ServerFacts:
    """A server whose INFO says something else."""
    return replace(WELL, info={**INFO, **changes})


def config(**changes: str) -> ServerFacts:
    """A server whose settings are others."""
    return replace(WELL, config={**CONFIG, **{name.replace("_", "-"): value for name, value in changes.items()}})


def test_a_server_as_it_should_be_has_no_findings() -> None:
    """A doctor who always finds something is not listened to."""
    assert [finding for finding in check_server(WELL) if finding.severity != "ok"] == []


@pytest.mark.parametrize(
    ("rule", "facts", "severity", "found", "mend"),
    [
        (server.product, replace(WELL, version=(6, 0, 16)), "error", "older than 6.2", "install a newer server"),
        (server.product, replace(WELL, product="valkey", version=(7, 0)), "error", "older than 7.2", "install"),
        (server.holes, replace(WELL, version=(7, 0, 15)), "warning", "CVE-2025-49844", "redis 7.2.11 or newer"),
        (server.role, info(role="slave", master_host="a", master_port=1), "error", "replica", "use --url redis://a:1"),
        (server.role, info(cluster_enabled=1), "warning", "node of a cluster", "server of its own"),
        (
            server.rights,
            replace(WELL, user="bob", refused=("xadd", "xgroup create")),
            "error",
            "bob may not use xadd",
            "redis-cli ACL SETUSER bob +xadd +xgroup|create",
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
        (server.memory, info(maxmemory=0), "warning", "no maxmemory", f"CONFIG SET maxmemory {8 * GB}"),
        (server.memory, info(used_memory=2 * GB), "error", "are used: writers wait", f"CONFIG SET maxmemory {4 * GB}"),
        (server.memory, replace(WELL, budgets={"a": GB, "b": GB}), "error", "budgets come to 2048 MiB", "maxmemory"),
        (
            server.memory,
            info(used_memory=1200 * MB),
            "warning",
            "1200 MiB are taken by what is not payload",
            "--bigkeys",
        ),
        (server.memory, info(total_system_memory=2 * GB), "warning", "nearly all of the host's", "maxmemory"),
        (server.allocator, replace(WELL, decay_ms="10000"), "note", "after 10000 ms", "MALLOC_CONF=dirty_decay_ms:-1"),
        (server.allocator, replace(WELL, decay_ms=None), "note", "does not tell", "MALLOC_CONF"),
        (
            server.allocator,
            replace(info(mem_allocator="libc"), local=Local({}, None, "1")),
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
        (server.persistence, info(aof_enabled=0), "note", "loses every stream", "CONFIG SET appendonly yes"),
        (server.persistence, replace(WELL, local=Local({}, None, "0")), "warning", "overcommit_memory is 0", "sysctl"),
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
            server.backlog,
            info(connected_slaves=2, repl_backlog_size=MB),
            "warning",
            "1.0 MiB for 2 replicas",
            "repl-backlog-size 1gb",
        ),
        (server.clients, info(connected_clients=9000), "warning", "9000 of 10000", "maxclients 20000"),
        (
            server.clients,
            replace(WELL, local=Local({}, 4096, "1")),
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
        (server.throughput, replace(WELL, written_per_s=None, probe_left_out="not wanted"), "ok", "not wanted", ""),
        (server.login, config(protected_mode="no"), "warning", "anybody who reaches its port", "requirepass"),
        (server.login, config(protected_mode="no", requirepass="x"), "ok", "needs a password", ""),
        (server.login, config(protected_mode="no", bind="127.0.0.1 -::1"), "ok", "only this host", ""),
        (server.settings, replace(WELL, config=None), "note", "CONFIG GET is forbidden", "ask"),
        (server.output_buffers, replace(WELL, config=None), "ok", "does not tell", ""),
    ],
)
def test_what_is_wrong_with_a_server_is_named_with_its_command(
    rule: Callable[[ServerFacts], Finding], facts: ServerFacts, severity: str, found: str, mend: str
) -> None:
    """A finding without what to do about it is a worry."""
    finding = rule(facts)
    assert finding.severity == severity
    assert found in finding.found
    assert mend in finding.mend
    assert bool(finding.mend) == (severity != "ok")


@pytest.mark.parametrize(
    ("product", "version", "names"),
    [
        ("redis", (7, 2, 10), {"CVE-2025-49844", "CVE-2026-23479"}),
        ("redis", (7, 2, 14), set()),
        ("redis", (7, 0, 4), {"CVE-2025-49844", "CVE-2025-21605", "CVE-2022-35951"}),
        ("redis", (6, 2, 20), set()),
        ("redis", (8, 4, 3), {"CVE-2026-81934"}),
        ("redis", (9, 0, 0), set()),
        ("valkey", (8, 1, 3), {"CVE-2025-49844", "CVE-2026-63639"}),
        ("valkey", (9, 1, 1), set()),
    ],
)
def test_a_hole_is_told_of_just_the_versions_that_have_it(
    product: str, version: tuple[int, ...], names: set[str]
) -> None:
    """Each line of versions gets a mended one of its own, or none."""
    assert {hole.name for hole in open_holes(product, version)} == names
    assert all(not is_open(hole, hole.product, closed) for hole in HOLES for closed in hole.closed)


GROUP = GroupGlance(
    "resnet", "shared", False, True, 0, 0, 0, 0.0, 0, 0, 0, 0, 0, (MemberGlance("gpu-0", 1.0, 0, None),)
)  # fmt: skip
GLANCE = Glance(
    "train", "id", 0.0, budget_bytes=GB, held_bytes=MB, next_epoch=1, final=None, made_entries=0, made_samples=0,
    made_bytes=0, epochs=(EpochGlance(0, "sized", "epoch", 10, 5, 0, MB, {}),), groups=(GROUP,),
    waiting={}, waited_s=0.0,
    paces=Paces({"host.1": Told(10.0, {"busy": 1.0})}, {}, {}), memory=ServerMemory(0, 0, "noeviction"),
)  # fmt: skip
FINE = StreamFacts(GLANCE, "memory", "inline", is_aof=False, has_waitaof=True, replicas=0)
WAITS = {(0, 0): Waiter(0, 0, 1, 1, "budget", is_next=True)}


def glance(**changes: Any) -> StreamFacts:
    """A stream that looks otherwise."""
    return replace(FINE, glance=replace(GLANCE, **changes))


def test_a_stream_as_it_should_be_has_no_findings() -> None:
    """As above."""
    assert [finding for finding in stream.check_stream(FINE) if finding.severity != "ok"] == []


@pytest.mark.parametrize(
    ("rule", "facts", "severity", "found", "mend"),
    [
        (stream.durability, replace(FINE, durability="fsync"), "error", "no append-only file", "appendonly yes"),
        (
            stream.durability,
            replace(FINE, durability="fsync", has_waitaof=False),
            "error",
            "no WAITAOF",
            "install Redis 7.2",
        ),
        (
            stream.durability,
            replace(FINE, durability="replicas=2", replicas=1),
            "error",
            "1 replicas follow",
            "REPLICAOF",
        ),
        (stream.durability, replace(FINE, durability="fsync", is_aof=True), "ok", "fsync", ""),
        (
            stream.segments,
            replace(FINE, payload="segments:/dev/shm/p", segments_seen=False),
            "warning",
            "/dev/shm/p",
            "PENSTOCK_SEGMENTS",
        ),
        (
            stream.segments,
            replace(FINE, payload="segments:/dev/shm/p", segments_seen=True, segments_free=MB),
            "error",
            "1.0 MiB left",
            "df -h /dev/shm/p",
        ),
        (stream.segments, replace(FINE, payload="segments:/d", segments_seen=True, segments_free=GB), "ok", "/d", ""),
        (
            stream.absent_groups,
            glance(groups=(replace(GROUP, members=(), lag_samples=5, lag_bytes=MB),)),
            "warning",
            "1.0 MiB are kept for resnet",
            "penstock groups drop train resnet",
        ),
        (
            stream.absent_groups,
            glance(groups=(replace(GROUP, members=(), lag_samples=5),), waiting=WAITS),
            "error",
            "writers wait for that room",
            "groups drop",
        ),
        (
            stream.absent_groups,
            glance(groups=(replace(GROUP, members=(), lag_samples=5, holds=False),)),
            "ok",
            "none",
            "",
        ),
        (
            stream.silent_members,
            glance(groups=(replace(GROUP, members=(MemberGlance("gpu-1", 50.0, 3, None),)),)),
            "warning",
            "gpu-1 of resnet (3 entries)",
            "start a trainer",
        ),
        (
            stream.waiting_writers,
            glance(waiting=WAITS, waited_s=45.0),
            "warning",
            "the longest for 45 s",
            "penstock monitor train",
        ),
        (stream.waiting_writers, glance(waiting=WAITS, waited_s=5.0), "ok", "1", ""),
        (
            stream.idle_workers,
            glance(paces=Paces({"h.1": Told(1.0, {"idle": 0.99})}, {}, {})),
            "warning",
            "epochs 0 are not made",
            "penstock produce",
        ),
        (
            stream.bad_samples,
            glance(epochs=(EpochGlance(0, "produced", "epoch", 10, 5, 2, MB, {}),)),
            "note",
            "2 samples could not be made",
            "penstock bad list train",
        ),
        (
            stream.bad_samples,
            glance(groups=(replace(GROUP, dead_letters=1),)),
            "warning",
            "1 entries could not be read",
            "penstock bad list train",
        ),
    ],
)
def test_what_is_wrong_with_a_stream_is_named_with_its_command(
    rule: Callable[[StreamFacts], Finding], facts: StreamFacts, severity: str, found: str, mend: str
) -> None:
    """As of servers."""
    finding = rule(facts)
    assert (finding.severity, finding.check) == (severity, finding.check)
    assert found in finding.found
    assert mend in finding.mend
    assert bool(finding.mend) == (severity != "ok")


# --- real servers -----------------------------------------------------------------------------------------------------


def examined(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and check -> finding."""
    code = main(["doctor", "--json", *argv])
    return code, {f"{one['of']}/{one['check']}": one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_every_server_is_examined_without_leaving_a_trace(
    url: str, client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Versions differ in what they tell; the probe must not remain in a server that streams live on."""
    monkeypatch.setenv("PENSTOCK_URL", url)
    with penstock.Writer("train", url=url, spec={"x": ("uint8", (1000,))}) as writer:
        with writer.epoch(sizes=[3]) as epoch, epoch.shard(0) as part:
            for _ in range(3):
                part.write({"x": np.zeros(1000, np.uint8)})
        before = set(client.keys())
        code, found = examined(capsys)
        assert code == 0, found
        assert set(client.keys()) == before
    for check in ("eviction", "rights", "role", "version", "output buffers"):
        assert found[f"server/{check}"]["severity"] == "ok", found[f"server/{check}"]
    allocator = found["server/allocator"]
    if "jemalloc" in allocator["found"]:  # libc tells nothing of how it was started
        assert allocator["severity"] == "ok"
    assert "MB/s written" in found["server/throughput"]["found"]
    assert found["server/persistence"]["mend"] == "redis-cli CONFIG SET appendonly yes"
    assert found["stream train/durability"]["found"] == "memory"
    assert examined(capsys, "--no-probe", "--strict")[0] in (0, 3)
    assert main(["doctor", "train", "--no-probe"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("checks are well (--all shows them)")
    assert not any(line.startswith("ok ") for line in out.splitlines())
    assert "\x1b" not in out


def test_a_server_that_will_lose_data_ends_with_a_code_for_ci(
    fresh_server: Callable[..., EmbeddedServer], capsys: pytest.CaptureFixture[str]
) -> None:
    """What CI should stop on is an exit code; what the user may not do is told before a run fails in its middle."""
    started = fresh_server(maxmemory_bytes=64 << 20)
    with redis.Redis(port=started.port) as raw:
        raw.config_set("maxmemory-policy", "allkeys-lru")
        raw.execute_command("ACL", "SETUSER", "bob", "on", ">secret", "~*", "+@all", "-xclaim", "-xgroup")
        raw.execute_command("ACL", "SETUSER", "eve", "on", ">secret", "~other:*", "+@all")
    code, found = examined(capsys, "--url", started.url, "--no-probe")
    assert code == 3
    assert found["server/eviction"]["mend"] == "redis-cli CONFIG SET maxmemory-policy noeviction"
    code, found = examined(capsys, "--url", started.url.replace("//", "//bob:secret@"))
    assert code == 3
    assert "xclaim" in found["server/rights"]["found"]
    assert "+xclaim" in found["server/rights"]["mend"]
    assert found["server/throughput"]["found"].startswith("not measured")
    code, found = examined(capsys, "--url", started.url.replace("//", "//eve:secret@"), "--no-probe")
    assert "~penstock:*" in found["server/rights"]["mend"]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["doctor", "trian"], "penstock: no stream 'trian'"),
        (["doctor", "--url", "redis://127.0.0.1:1"], "penstock: no Redis answers at redis://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_examined_is_one_line(
    argv: list[str], line: str, any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 tells CI that nothing was checked."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(line)
