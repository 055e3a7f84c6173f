"""``penstock doctor``: checks server and streams as an expert would, with the command that fixes each finding."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from penstock.cli import (
    LOGIN_HINT,
    STREAM_NAME,
    add_jobs,
    add_json,
    add_url,
    connected,
    needs_password,
    of_node,
    queue_url_of,
    typed,
    url_of,
)
from penstock_common.errors import DamagedKey, PenstockError, SegmentsUnseen, ServerUnavailable, Unauthorized

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.views.doctor import Finding, StreamFacts
    from penstock_common.server.nodes import NodeState
    from penstock_common.stream.commands import Client
    from penstock_common.stream.servers.budgets import ServerBudgets


BAD = 3
_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "ok": "green"}


_LIMIT = re.compile(r"(redis-cli [^;]*CONFIG SET maxmemory) (\d+mb)")
"""The advice of a limit: the command for one server, and the figure."""


EPILOG = (
    "example:\n  penstock doctor\n  penstock doctor train --all\n"
    "  penstock doctor --strict --no-probe --json | jq '.findings[] | select(.severity == \"error\")'\n\n"
    "It changes nothing; the throughput probe writes a scratch key and removes it. error: data or runs will be\n"
    "lost, or nothing works; warning: it will hurt; note: good to know.\n\n"
    f"exit codes: 0 no errors, {BAD} at least one error (with --strict: or warning), 1 could not check: no such\n"
    "stream or no server, 2 wrong usage"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument("stream", nargs="?", type=STREAM_NAME, help="left out: all streams")
    parser.add_argument("--no-probe", action="store_true", help="do not measure throughput (32 MB on a scratch key)")
    parser.add_argument("--strict", action="store_true", help="warnings count as errors, for the exit code")
    parser.add_argument("--all", action="store_true", help="show also what is well")
    add_jobs(parser)
    add_url(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Check the server and the streams, and print the findings."""
    from penstock.views.doctor import ORDER, Finding, check_stream
    from penstock_common.server.connection import may_keep_jobs
    from penstock_common.server.nodes import look_at_nodes

    with connected(args) as client:
        nodes = look_at_nodes(client, is_thorough=True)
        streams, damaged = _streams(client, args, nodes)
        of_servers = _of_servers(client, args, nodes, streams)
        found = [(f"stream {facts.snapshot.name}", one) for facts in streams for one in check_stream(facts)]
        for name, error in damaged.items():
            check = "reachable" if isinstance(error, ServerUnavailable) else "keys"
            found.append((f"stream {name}", Finding(check, "error", str(error))))
        queue_url = queue_url_of(args)
        if queue_url or may_keep_jobs(client):
            names = [facts.snapshot.name for facts in streams]
            found += [("queue", one) for one in _queue(client, queue_url or url_of(args), args.queue, names)]
        limits = dict(limit for _, one in of_servers for limit in _LIMIT.findall(one.fix))
        found = [
            *of_servers,
            *((of, replace(one, fix=_agreed(typed(one.fix, args, client), limits))) for of, one in found),
        ]
        has_password = any(needs_password(one.fix, client) for _, one in found)
    found.sort(key=lambda each: ORDER.index(each[1].severity))
    counts: dict[str, int] = {severity: sum(one.severity == severity for _, one in found) for severity in ORDER}
    if args.json:
        console.json({"findings": [{"of": of, **asdict(one)} for of, one in found], **counts})
    else:
        _print(found, counts, args, console)
        if has_password:
            console.line(LOGIN_HINT)
    return BAD if counts["error"] or (args.strict and counts["warning"]) else 0


def _agreed(fix: str, limits: Mapping[str, str]) -> str:
    """Return a stream's fix with the limits that the findings on its servers advise, which count all streams."""
    return _LIMIT.sub(lambda found: f"{found[1]} {limits.get(found[1], found[2])}", fix)


def _streams(
    client: Client, args: argparse.Namespace, nodes: Sequence[NodeState]
) -> tuple[list[StreamFacts], Mapping[str, PenstockError]]:
    from penstock_common.stream.directory import StreamLister
    from penstock_common.stream.servers.checkup import missing_rights, role_of
    from penstock_common.stream.streams import look_at_each

    _, needed = role_of(missing_rights(client))
    if needed:  # nothing can be read
        return [], {}
    names = [args.stream] if args.stream else StreamLister(client).names()
    # one server of its own has no findings if it is away; of a cluster the others have some
    borne = (DamagedKey, ServerUnavailable) if len(nodes) > 1 else (DamagedKey,)
    return look_at_each(names, lambda name: _stream(client, name, nodes), borne)


def _of_servers(
    client: Client, args: argparse.Namespace, nodes: Sequence[NodeState], streams: Sequence[StreamFacts]
) -> list[tuple[str, Finding]]:
    """Return the findings on the server, or on each server of a cluster and on all together."""
    from penstock.views.doctor_nodes import check_nodes
    from penstock.views.doctor_server import check_server
    from penstock.views.servers import cli_of
    from penstock_common.stream.keys import scratch_key
    from penstock_common.stream.servers.budgets import read_budgets
    from penstock_common.stream.servers.checkup import read_inline, read_server
    from penstock_common.stream.servers.suitability import memory_of

    plain = tuple(each.snapshot.name for each in streams if each.payload == "inline" and not each.is_compressed)
    if len(nodes) == 1:
        # also of streams that were not named. Without a stream that can be read, rights may be missing
        budgets, held = read_inline(client) if streams else ({}, {})
        facts = read_server(
            client, probe=not args.no_probe, budgets=budgets, held_bytes=sum(held.values()), uncompressed=plain
        )
        return [("server", replace(one, fix=typed(one.fix, args, client))) for one in check_server(facts)]
    masters = {node.where: node for node in nodes if (node.info or {}).get("role") == "master"}
    memories = {where: memory_of(node.info or {}, client.memory_bytes) for where, node in masters.items()}
    by_server: list[ServerBudgets] = []
    held_on: dict[str, int] | None = None
    if all(node.info is not None for node in nodes):
        with suppress(ServerUnavailable):  # a slot is half moved, which is a finding
            by_server, held_on = read_budgets(client, memories), read_inline(client)[1]
    found = check_nodes(nodes, by_server)
    budgets_of = {one.where: one.budgets for one in by_server}
    for server in client.on_each(lambda each: each):
        node = masters.get(server.where)
        if node is None:
            continue
        # only one of them has the slot of the scratch key
        probe = not args.no_probe and client.node_of(scratch_key("")).where == server.where
        facts = read_server(
            server, probe=probe, budgets=budgets_of.get(server.where, {}),
            held_bytes=None if held_on is None else held_on.get(server.where, 0), uncompressed=plain,
        )  # fmt: skip
        here = f"{cli_of(node.host, node.port)} "
        found += [
            (f"server {server.where}", replace(one, fix=one.fix.replace("redis-cli ", here)))
            for one in check_server(facts)
        ]
    return [(of, replace(one, fix=of_node(one.fix, client))) for of, one in found]


def _queue(stream_client: Client, url: str, queue: str, streams: list[str]) -> list[Finding]:
    """Return the findings on the workers and jobs of the queues that these streams may have."""
    from penstock.views.doctor import Finding, jobs_without_stream, only_own_workers
    from penstock_common.explain.queues import find_foreign_workers, find_queued_streams, queue_names
    from penstock_common.server.error_translation import START_ONE
    from penstock_common.stream.client import connect
    from penstock_common.stream.commands import Refused
    from penstock_common.stream.keys import StreamKeys

    try:
        with connect(url) as client:
            names = queue_names(queue, streams)
            gone = {
                name: [one for one in queued if not stream_client.exists(StreamKeys(one).meta)]
                for name, queued in find_queued_streams(client, names).items()
            }
            where = '"$PENSTOCK_QUEUE_URL"' if "@" in url else shlex.quote(url)  # a password must not appear
            return [*only_own_workers(find_foreign_workers(client, names)), *jobs_without_stream(gone, where)]
    except ServerUnavailable as error:
        found = f"no production and no worker can start: {str(error).removesuffix(f': {START_ONE}')}"
        return [Finding("reachable", "error", found, "set PENSTOCK_QUEUE_URL (or --queue-url) to a server that runs")]
    except (PenstockError, Refused) as error:
        fix = (
            "set PENSTOCK_QUEUE_URL (or --queue-url), with a user of the queue"
            if isinstance(error, Unauthorized)
            else ""
        )
        return [Finding("workers", "note", f"who works on queue {queue!r} is not known: {error}", fix)]


def _stream(client: Client, name: str, nodes: Sequence[NodeState]) -> StreamFacts:
    from penstock.views.doctor import StreamFacts
    from penstock_common.explain.monitor import StreamMonitor
    from penstock_common.segments.folder import folder_of
    from penstock_common.settings import Settings
    from penstock_common.stream.servers.checkup import has_waitaof
    from penstock_common.stream.streams import load_stream

    snapshot = StreamMonitor(client, name).snapshot()
    stream = load_stream(client, name)
    masters = [node for node in nodes if (node.info or {}).get("role") == "master"] or list(nodes)
    replicas = min(sum(one.is_online for one in node.replicas) for node in masters)
    is_aof = all((node.info or {}).get("aof_enabled") for node in masters)
    seen, free, trouble = None, 0, ""
    folder = folder_of(stream.payload, name, stream.id, Settings.from_environment().segments)
    if folder is not None:
        try:
            folder.require()
            seen, free = True, shutil.disk_usage(folder.path).free
        except SegmentsUnseen as error:
            seen, trouble = False, str(error)
    return StreamFacts(
        snapshot=snapshot,
        durability=stream.durability, payload=stream.payload, is_aof=is_aof,
        has_waitaof=has_waitaof(client.node_of(stream.keys.meta)), replicas=replicas, segments_seen=seen,
        segments_free=free, segments_trouble=trouble, is_compressed=bool(stream.compression),
    )  # fmt: skip


def _print(
    found: list[tuple[str, Finding]], counts: dict[str, int], args: argparse.Namespace, console: Console
) -> None:
    for of, one in found:
        if one.severity == "ok" and not args.all:
            continue
        console.line((f"{one.severity:7}", f"bold {_COLOURS[one.severity]}"), f"  {of}, {one.check}: {one.found}")
        if one.fix:
            console.line(f"         fix: {one.fix}")
    totals = [f"{counts[each]} {each}{'' if counts[each] == 1 else 's'}" for each in ("error", "warning", "note")]
    console.line(f"{', '.join(totals)}; {counts['ok']} checks are well" + ("" if args.all else " (--all shows them)"))
