"""The end of a history: what users and Penstock do until nothing more comes, and the judgement of what came of it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np

from penstock_common.errors import PenstockError
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.entries import index_records
from penstock_common.stream.feeds import FEED, close_epoch
from penstock_common.stream.groups.ledger import group_bits
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.manifest import (
    ABANDONED,
    OPEN,
    PRODUCED,
    SIZED,
    begun_shards,
    find_manifest,
    retained_epochs,
)
from penstock_common.stream.payloads import reader_of, whole_fields
from penstock_common.stream.removal.reconcile import reopen_lost
from penstock_common.stream.streams import Stream, find_stream, is_released, load_stream
from tests.histories.actors import NAME, Confirmed, Producer
from tests.histories.step import PLANS, RANKS, Step
from tests.histories.world import GroupFacts, Violation, World

ROUNDS = 200
"""Rounds in which every trainer reads, after which the history should have ended."""
VAIN = 3
"""Rounds in a row that brought nothing, after which nothing more will come."""
LATER_S = 3600.0
"""The time of the repairs, after all writers are known to be gone."""
NEWCOMER = "n0"
"""The member of a group that nobody has joined before."""
LIVES = 4
"""Processes that a user starts under one name before giving up."""

Place = tuple[int, int, int]
"""(epoch, shard, offset)."""


def settle(world: World) -> None:
    """Let every actor finish, start again what died, and judge. Violations are noted in the world."""
    if world.remade is not None:
        _settle_remade(world, world.remade)
        return
    if find_stream(world.operator, NAME) is None or world.is_deleted:
        _settle_deleted(world)
        return
    for who in [*world.producers]:
        world.take(Step("end", who))
    if find_stream(world.operator, NAME) is None:
        return
    for act in (_run_cleaner, _end_epochs, _run_jobs, _run_cleaner):
        with world.doing(act.__name__):
            act(world)
    if not world.violations:
        _read_all(world)
    if not world.violations:
        with world.doing("judge"):
            _judge(world)


def _settle_deleted(world: World) -> None:
    """Delete again whatever a loss brought back: nothing may stay."""
    for who in [*world.producers, *world.trainers]:
        world.end(who)
    for _ in range(3):
        world.take(Step("delete"))
    left = [key for key in world.arena.admin.keys("*") if world.arena.slots.slot_of(key) != "names"]
    if left:
        world.violations.append(Violation("left", f"a deletion left {left}"))


def _settle_remade(world: World, writer: Producer) -> None:
    """Let the newer stream's writer finish, and a new group read. Nobody of the older stream may have changed it."""
    for who in [*world.producers, *world.trainers]:
        world.end(who)
    run = world.interrupts.runs
    try:
        writer.write(world.values, 1, run)
        writer.close(run)
        world.take(Step("join", NEWCOMER))
        for kind in ("read", "ack", "close") * 3:
            world.take(Step(kind, NEWCOMER))
        report = audit_stream(world.operator, NAME, deep=True)
    except PenstockError as error:
        _violate(world, "intruded", f"the newer stream ended with {type(error).__name__}: {error}")
        return
    finally:
        writer.die()
    lacking = {one.value for one in writer.confirmed} - world.groups.get(NEWCOMER[0], GroupFacts()).delivered
    if lacking or not report.is_clean:
        _violate(world, "intruded", f"{sorted(lacking)} are not read of the newer stream; {report.findings}")
    else:
        _settle_deleted(world)


def _end_epochs(world: World) -> None:
    """Close feeds without a writer, and open planned epochs again whose dispatcher died."""
    stream = load_stream(world.operator, NAME)
    for epoch, state in retained_epochs(world.operator, stream).items():
        manifest = find_manifest(world.operator, stream, epoch)
        if manifest is None or state not in (OPEN, SIZED):
            continue
        if manifest.kind == FEED:
            close_epoch(world.operator, stream, epoch)
        else:
            world.producer("op").plan(manifest.seed, PLANS[manifest.seed], epoch)


def _run_jobs(world: World) -> None:
    """Run the jobs of planned epochs, also those of samples that the server lost."""
    stream = load_stream(world.operator, NAME)
    found = [find_manifest(world.operator, stream, epoch) for epoch in retained_epochs(world.operator, stream)]
    reopen_lost(world.operator, stream, {one.id for one in found if one is not None and one.kind != FEED}, settle_s=0.0)
    for _ in range(20):
        if not world.producer("op").run_job(0, world.interrupts.runs):
            return


def _run_cleaner(world: World) -> None:
    world.clean(0, LATER_S)


def _read_all(world: World) -> None:
    """Let every member that ever joined read until nothing more comes, and of an ordered group every rank."""
    if RANKS[0][0] in world.groups:
        world.names.update(RANKS)
    lives: dict[str, int] = defaultdict(int)
    vain = 0
    for _ in range(ROUNDS):
        came = 0
        for name in sorted(world.names):
            if name not in world.trainers and lives[name] < LIVES:
                lives[name] += 1
                world.take(Step("join", name))
            before = len(world.groups[name[0]].delivered)
            for kind in ("read", "ack", "close"):
                world.take(Step(kind, name))
            came += len(world.groups[name[0]].delivered) - before
        vain = (
            0 if came or any(name not in world.trainers and lives[name] < LIVES for name in world.names) else vain + 1
        )
        if vain == VAIN:
            return


def _judge(world: World) -> None:
    world.judge_files()
    stream = load_stream(world.operator, NAME)
    report = audit_stream(world.operator, NAME, deep=True)
    there = _values_there(world, stream)
    present = {value for values in there.values() for value in values.values()}
    _judge_ledgers(world, stream, there)
    if report.is_clean or world.arena.is_durable:
        _judge_holes(world, stream, present)
    if report.is_clean:
        if not any(facts.is_told for facts in world.groups.values()):
            _judge_reading(world, report, there)
        _judge_bytes(world, stream)
    elif not world.losses:
        _violate(world, "alarm", f"nothing was lost, and the audit finds {report.findings}")


def _violate(world: World, kind: str, text: str) -> None:
    world.violations.append(Violation(kind, text))


def _values_there(world: World, stream: Stream) -> dict[tuple[int, int], dict[int, int]]:
    """Return (epoch, shard) -> offset -> value, of every committed sample whose entry is there."""
    found: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    segments = reader_of(stream)
    for epoch in retained_epochs(world.operator, stream):
        manifest = find_manifest(world.operator, stream, epoch)
        for shard in begun_shards(world.operator, stream, manifest) if manifest is not None else ():
            partition = stream.partition_of(shard)
            for record in index_records(world.operator, partition, epoch, shard):
                entry = world.arena.admin.xrange(partition.entries(epoch), record.entry_id, record.entry_id)
                if entry:
                    fields = dict(whole_fields([*entry[0][1].items()], stream.require_spec(), segments))
                    meta, values = json.loads(entry[0][1][b"meta"]), np.frombuffer(fields[b"y"], "<i8").tolist()
                    found[epoch, meta["shard"]].update(enumerate(values, meta["first"]))
    return found


def _judge_ledgers(world: World, stream: Stream, there: dict[tuple[int, int], dict[int, int]]) -> None:
    """Require that each sample that a group has acknowledged was given to a member of it."""
    records = {
        name: one for part in stream.partitions for name, one in load_roster(world.operator, part).groups.items()
    }
    for (epoch, shard), values in there.items():
        manifest = find_manifest(world.operator, stream, epoch)
        for group, facts in world.groups.items():
            if manifest is None or group not in records:
                continue
            size = max(values) + 1
            bits = group_bits(world.operator, stream, manifest, group, records[group], shard, 0, size)
            wrong = [offset for offset, value in values.items() if bits[offset] and value not in facts.delivered]
            if wrong:
                where = f"epoch {epoch} shard {shard} offsets {wrong}"
                _violate(world, "untrue", f"{where} are acknowledged, and group {group} was never given them")


def _judge_bytes(world: World, stream: Stream) -> None:
    """Require that no bytes count that no epoch has."""
    retained = retained_epochs(world.operator, stream)
    for partition in stream.partitions:
        roster = load_roster(world.operator, partition)
        stray = sorted({*roster.epochs, *roster.epoch_bytes} - {*retained})
        if stray and roster.bytes:
            _violate(world, "leak", f"{partition.roster} counts bytes of epochs {stray}, which nobody can release")


def _judge_holes(world: World, stream: Stream, present: set[int]) -> None:
    """Require that no confirmed sample that a replica had is gone, or that the audit says so if it can be known."""
    released: dict[int, bool] = {}
    states = retained_epochs(world.operator, stream)
    for producer in [*world.former, *world.producers.values()]:
        for one in producer.confirmed:
            if one.value in present or (not world.arena.is_durable and _may_be_unknown(world, producer, one)):
                continue
            lacking = [name for name, facts in world.groups.items() if _lacks(facts, one)]
            if one.epoch not in released:
                released[one.epoch] = is_released(world.operator, stream, one.epoch)
            if one.epoch in world.ended or states.get(one.epoch) == ABANDONED:
                continue
            if lacking or not (world.groups or released[one.epoch]):
                where = f"{one.value} of epoch {one.epoch}"
                kind, also = ("lost", "a replica had it") if world.arena.is_durable else ("hole", "the audit is clean")
                _violate(world, kind, f"sample {where} is gone, groups {lacking} lack it, and {also}")
                return


def _lacks(facts: Any, one: Confirmed) -> bool:
    return facts.first <= one.epoch and one.value not in facts.delivered and not facts.is_told


def _may_be_unknown(world: World, producer: Producer, one: Confirmed) -> bool:
    """Return whether a loss came after the commit of a sample, and every process that knew of the commit has ended."""
    return world.interrupts.runs > one.run and producer.was_gone_by(world.interrupts.runs)


def _judge_reading(world: World, report: AuditReport, there: dict[tuple[int, int], dict[int, int]]) -> None:
    """Require that every group received the samples that are present."""
    states = {epoch.epoch: epoch.state for epoch in report.epochs}
    for name, facts in world.groups.items():
        for (epoch, shard), values in there.items():
            lacking = [offset for offset, value in values.items() if value not in facts.delivered]
            if lacking and epoch >= facts.first and states.get(epoch) == PRODUCED:
                where = f"epoch {epoch} shard {shard} offsets {lacking}"
                _violate(world, "stuck", f"group {name} is not given {where}, and the audit says: {report.verdict}")
