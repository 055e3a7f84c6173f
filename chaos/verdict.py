"""Compare the expected deliveries with the actual ones, for each group: every sample, and every duplicate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from chaos.lives import Diary, Handed
from chaos.rule import Rule

SHOWN = 5

Nonces = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Expected:
    """The samples of a stream, each named by its nonce, in rising order."""

    nonces: Nonces
    epochs: NDArray[np.int64]
    """The epoch of each sample, or -1 for any epoch of the feed."""
    open_ended: Nonces
    """Samples that may exist or not, but for all groups alike: a writer was killed while it wrote them."""


def expect(nonces: Sequence[int], epochs: Sequence[int], open_ended: Sequence[int]) -> Expected:
    """Return the expected samples from the epoch of each, in any order."""
    array = np.array(nonces, np.uint64)
    order = np.argsort(array)
    return Expected(array[order], np.array(epochs, np.int64)[order], np.array(open_ended, np.uint64))


@dataclass(slots=True)
class GroupVerdict:
    """The verdict on one group of one stream, in samples."""

    group: str
    delivered: int = 0
    """The different samples whose step ended."""
    twice: int = 0
    """The deliveries beyond the first of each sample."""
    reasons: Counter[str] = field(default_factory=Counter)
    """The reasons of these, by the rule."""
    optional: frozenset[int] = frozenset()
    """The delivered samples of `Expected.open_ended`."""
    violations: list[str] = field(default_factory=list)


def judge(group: str, diaries: Sequence[Diary], expected: Expected, rule: Rule) -> GroupVerdict:
    """Return the verdict on one group."""
    verdict = GroupVerdict(group)
    batches = sorted((batch for diary in diaries for batch in diary.handed), key=lambda batch: batch.ns)
    nonces = np.array([nonce for batch in batches for nonce in batch.nonces], np.uint64)
    owner = np.repeat(np.arange(len(batches)), [len(batch.nonces) for batch in batches])
    is_done = np.array([batch.seq in diaries[batch.life].done for batch in batches], bool)
    delivered = np.unique(nonces[is_done[owner]]) if len(nonces) else nonces
    verdict.delivered = len(delivered)
    verdict.optional = frozenset(np.intersect1d(delivered, expected.open_ended).tolist())
    _judge_set(verdict, nonces, delivered, expected)
    _judge_epochs(verdict, nonces, owner, batches, expected)
    verdict.violations += [f"group {group}: corrupt: {text}" for diary in diaries for text in diary.corrupt[:SHOWN]]
    _judge_twice(verdict, nonces, owner, batches, diaries, rule)
    return verdict


def _judge_set(verdict: GroupVerdict, nonces: Nonces, delivered: Nonces, expected: Expected) -> None:
    lost = np.setdiff1d(expected.nonces, delivered)
    invented = np.setdiff1d(np.unique(nonces), np.concatenate([expected.nonces, expected.open_ended]))
    for what, found in (("never delivered", lost), ("invented", invented)):
        if len(found):
            epochs = Counter(expected.epochs[np.isin(expected.nonces, found)].tolist())
            where = ", ".join(f"{count} of epoch {epoch}" for epoch, count in sorted(epochs.items()))
            shown = " ".join(f"{nonce:x}" for nonce in found[:SHOWN].tolist())
            verdict.violations.append(
                f"group {verdict.group}: {len(found)} samples {what} ({where or 'unknown'}): {shown}"
            )


def _judge_epochs(
    verdict: GroupVerdict,
    nonces: Nonces,
    owner: NDArray[np.int64],
    batches: Sequence[Handed],
    expected: Expected,
) -> None:
    """Compare the header's epoch with the payload's."""
    if not len(expected.nonces) or not len(nonces):
        return
    at = np.minimum(np.searchsorted(expected.nonces, nonces), len(expected.nonces) - 1)
    is_known = (expected.nonces[at] == nonces) & (expected.epochs[at] >= 0)
    said = np.array([batch.epoch for batch in batches], np.int64)[owner]
    wrong = is_known & (said != expected.epochs[at])
    if wrong.any():
        verdict.violations.append(f"group {verdict.group}: {int(wrong.sum())} samples came under another epoch's name")


def _judge_twice(
    verdict: GroupVerdict,
    nonces: Nonces,
    owner: NDArray[np.int64],
    batches: Sequence[Handed],
    diaries: Sequence[Diary],
    rule: Rule,
) -> None:
    """Require a reason for each delivery of a sample after its first, against each earlier one."""
    order = np.argsort(nonces, kind="stable")  # batches are in order of time, and the sort keeps it
    bounds = np.flatnonzero(np.diff(nonces[order])) + 1
    unexplained: Counter[tuple[int, int]] = Counter()
    for low, high in pairwise([0, *bounds.tolist(), len(order)]):
        if high - low < 2:
            continue
        verdict.twice += high - low - 1
        held = [batches[owner[at]] for at in order[low:high]]
        for later in range(1, len(held)):
            reason = ""
            for earlier in range(later):
                first, second = held[earlier], held[later]
                is_same = first is second  # nothing excuses a sample that is in one batch twice
                reason = "" if is_same else rule.excuse(diaries[first.life], first, diaries[second.life], second)
                if not reason:
                    unexplained[int(owner[order[low + earlier]]), int(owner[order[low + later]])] += 1
            verdict.reasons[reason or "unexplained"] += 1
    for (first_at, second_at), count in list(unexplained.items()):
        verdict.violations.append(_told(verdict.group, count, diaries, batches[first_at], batches[second_at]))


def _told(group: str, count: int, diaries: Sequence[Diary], first: Handed, second: Handed) -> str:
    def who(batch: Handed) -> str:
        diary = diaries[batch.life]
        acknowledged = "acknowledged" if diary.is_acknowledged(batch.seq) else "not acknowledged"
        ending = f"{diary.life.ending or 'running'} at {diary.life.ended_ns / 1e9:.3f}"
        return f"{diary.life.journal.stem} batch {batch.seq} at {batch.ns / 1e9:.3f} ({acknowledged}; {ending})"

    return f"group {group}: {count} samples of epoch {first.epoch} twice: {who(first)}, then {who(second)}"
