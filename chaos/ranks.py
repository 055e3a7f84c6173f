"""The check of the ordered group: every batch of every rank is the one of the canonical order, by payload.

A batch is judged like a sample of a shared group: delivered, lost, invented, or duplicated for a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from chaos.lives import Diary, Handed
from chaos.options import Options
from chaos.rule import Rule
from chaos.verdict import GroupVerdict, expect, judge


@dataclass(frozen=True, slots=True)
class PlannedEpoch:
    """One epoch in canonical order."""

    number: int
    nonces: list[int | None]
    """The nonces by position, with None for a sample that is bad on purpose."""
    bad: set[str]
    """The bad samples, as ``shard:offset``."""


def batches_of(epoch: PlannedEpoch, batch: int, ranks: int) -> list[tuple[int, ...]]:
    """Return all batches of an epoch, rank after rank, step after step; the next good sample stands for a bad one.

    The last step is filled with the first samples of the epoch.
    """
    total = len(epoch.nonces)
    good: list[int] = []
    following = next(nonce for nonce in epoch.nonces if nonce is not None)
    for nonce in reversed(epoch.nonces):
        following = following if nonce is None else nonce
        good.append(following)
    good.reverse()
    step = batch * ranks
    filled = [good[position % total] for position in range(-(-total // step) * step)]
    return [tuple(filled[start : start + batch]) for start in range(0, len(filled), batch)]


def judge_ranks(
    options: Options, diaries: Sequence[Diary], planned: Sequence[PlannedEpoch], rule: Rule
) -> GroupVerdict:
    """Judge batches as `verdict.judge` judges samples. Ranks have no leases, so a stop excuses nothing."""
    places = {
        (epoch.number, place): nonces
        for epoch in planned
        for place, nonces in enumerate(batches_of(epoch, options.rank_batch, options.ranks))
    }
    for diary in diaries:
        diary.handed = [_named(batch, places, diary, options) for batch in diary.handed]
    names = {_name(*place): place[0] for place in places}
    expected = expect(list(names), list(names.values()), [])
    return judge("ranks", diaries, expected, replace(rule, lease_ns=1 << 62))


def _named(batch: Handed, places: dict[tuple[int, int], tuple[int, ...]], diary: Diary, options: Options) -> Handed:
    """Return the batch under the name of its place if it holds what belongs there, else under an unexpected name.

    Two batches may be equal: both have one sample, and one of them replaces a bad sample.
    """
    step = batch.position // (options.rank_batch * options.ranks) - 1
    place = (batch.epoch, step * options.ranks + int(diary.life.member))
    name = _name(*place) if places.get(place) == batch.nonces else xxhash.xxh3_64_intdigest(repr(batch).encode())
    return replace(batch, nonces=(name,))


def _name(epoch: int, place: int) -> int:
    return (epoch << 32) + place
