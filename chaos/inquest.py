"""After a run: compare what the seed says should exist with the journals, the audit and the quarantine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from chaos import keys
from chaos.cast import Cast
from chaos.command import penstock
from chaos.journal import read_journal
from chaos.leftovers import leftovers
from chaos.lives import Diary, read_diary
from chaos.options import FEED, MAIN, RANKS, Options
from chaos.order import first_word, shards
from chaos.payload import feed_nonce, is_bad
from chaos.ranks import PlannedEpoch, judge_ranks
from chaos.rule import Rule
from chaos.stage import Stage
from chaos.verdict import Expected, GroupVerdict, expect, judge

SHOWN = 5


@dataclass(slots=True)
class Findings:
    """The result of comparing a run with its plan."""

    epochs: int = 0
    """The epochs of the main stream."""
    samples: int = 0
    """The good samples in them."""
    bad: int = 0
    """The planted bad samples in them."""
    feed_epochs: int = 0
    feed_samples: int = 0
    """The samples of the feed that are certainly committed."""
    groups: list[GroupVerdict] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def hold(options: Options, stage: Stage, cast: Cast) -> Findings:
    """Check everything that can be checked once all processes have left."""
    findings = Findings()
    with stage.client() as client:
        findings.epochs, findings.feed_epochs = (
            int(keys.meta(client, name).get("next_epoch", 0)) for name in (MAIN, FEED)
        )
        for name in (MAIN, FEED):
            for epoch, state in keys.epochs(client, name).items():
                if state != keys.PRODUCED:
                    findings.violations.append(f"epoch {epoch} of {name!r} is {state}")
        there = keys.rostered(client, keys.partitions(client, MAIN)[0])
        quarantined = {epoch: keys.quarantine(client, MAIN, epoch) for epoch in there}
    begun = told_epochs(stage.directory) | there | {
        batch.epoch for actor in cast.everyone if actor.life.stream == MAIN and actor.life.group
        for batch in read_diary(0, actor.life).handed
    }  # fmt: skip
    planned = [epoch for epoch in plan_epochs(options, findings.epochs) if epoch.number in begun]
    expected, bad = expect_epochs(planned), {epoch.number: epoch.bad for epoch in planned}
    findings.samples, findings.bad = len(expected.nonces), sum(map(len, bad.values()))
    for epoch, offsets in quarantined.items():
        if offsets != bad[epoch]:
            wrong = sorted(offsets ^ bad[epoch])
            findings.violations.append(
                f"epoch {epoch}: quarantine differs from what was bad on purpose at {wrong[:SHOWN]}"
            )
    fed = expect_feed(options, [a.life.journal for a in cast.everyone if a.life.role == "feeder"])
    findings.feed_samples = len(fed.nonces)
    _judge_groups(options, stage, cast, planned, {MAIN: expected, FEED: fed}, findings)
    stage.end_sweeping()
    for name in (MAIN, FEED):
        findings.violations += _audited(stage.url, name)
    for name in (MAIN, FEED) if options.payload != "inline" else ():
        findings.violations += [f"segments of {name!r}: {line}" for line in leftovers(stage.url, name)]
    return findings


def _judge_groups(
    options: Options,
    stage: Stage,
    cast: Cast,
    planned: list[PlannedEpoch],
    expected: dict[str, Expected],
    findings: Findings,
) -> None:
    rule = Rule(int(options.lease_s * 1e9), stage.outages, stage.failovers)
    for stream, group in cast.groups():
        lives = [actor.life for actor in cast.everyone if actor.life.group == group]
        for life in lives:
            life.cuts = stage.cuts_of(life.host)
        diaries: list[Diary] = [read_diary(number, life) for number, life in enumerate(lives)]
        if group == RANKS:
            verdict = judge_ranks(options, diaries, planned, rule)
        else:
            verdict = judge(group, diaries, expected[stream], rule)
        findings.groups.append(verdict)
        findings.violations += verdict.violations
    for stream in expected:
        found = {v.optional for v, (name, _) in zip(findings.groups, cast.groups(), strict=True) if name == stream}
        if len(found) > 1:
            findings.violations.append(f"groups of {stream!r} differ in what an unfinished writer left")


def plan_epochs(options: Options, epochs: int) -> list[PlannedEpoch]:
    """Return the content of all epochs, computed from seed and order alone."""
    planned = []
    for number in range(epochs):
        epoch = PlannedEpoch(number, [], set())
        for shard, items in enumerate(shards(options.samples, options.seed, number, options.shard_samples)):
            for offset, index in enumerate(items):
                if is_bad(options.seed, index):
                    epoch.nonces.append(None)
                    epoch.bad.add(f"{shard}:{offset}")
                else:
                    epoch.nonces.append(first_word(options.seed, number, shard, offset))
        planned.append(epoch)
    return planned


def told_epochs(directory: Path) -> set[int]:
    """Return the epochs that a dispatcher told of.

    A dispatcher that is killed while it begins an epoch may have taken the number without having begun the epoch. It
    does not report that number.
    """
    texts = [path.read_text(errors="replace") for path in directory.glob("dispatcher-*.???")]
    numbers = [number for text in texts for number in re.findall(r'"epoch": (\d+)', text)]
    lists = [found for text in texts for found in re.findall(r'"epochs": \[([\d,\s]*)\]', text)]
    return {
        int(number) for number in [*numbers, *(word for found in lists for word in found.replace(",", " ").split())]
    }


def expect_epochs(planned: list[PlannedEpoch]) -> Expected:
    """Return the good samples of all epochs."""
    good = [(nonce, epoch.number) for epoch in planned for nonce in epoch.nonces if nonce is not None]
    return expect([nonce for nonce, _ in good], [number for _, number in good], [])


def expect_feed(options: Options, journals: list[Path]) -> Expected:
    """Return what the feeders know to be committed. Samples that they only announced may exist or not."""
    sure: list[int] = []
    open_ended: list[int] = []
    first = 0
    for path in journals:  # one after another, each beginning where the one before had planned to go
        announced = committed = first
        for line in read_journal(path):
            if line.letter == "W":
                announced = int(line.words[0])
            elif line.letter == "C":
                committed = int(line.words[0])
            elif line.letter == "L":
                committed = announced
        sure += [feed_nonce(options.seed, number) for number in range(first, committed)]
        open_ended += [feed_nonce(options.seed, number) for number in range(committed, announced)]
        first = announced
    return expect(sure, [-1] * len(sure), open_ended)


def _audited(url: str, stream: str) -> list[str]:
    """Return the output of `penstock audit --deep` if it is not clean."""
    done = penstock(url, "audit", stream, "--deep", "--json")
    if done.returncode == 0:
        return []
    report = json.loads(done.stdout or "{}")
    findings = "; ".join(report.get("findings", [])[:SHOWN])
    return [f"audit of {stream!r}: {report.get('verdict', done.returncode)}; {findings or done.stderr}"]
