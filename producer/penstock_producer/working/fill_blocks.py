"""Fills one shard through a transform that takes many samples at once. Without one it is ``fill``'s."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock_common.errors import SampleError
from penstock_producer.sources.protocol import Sample, Source
from penstock_producer.sources.transform import BlockTransform
from penstock_producer.working.fill import Seed, Watch, put
from penstock_producer.working.oversight import HUNG
from penstock_producer.writing.shard import ShardWriter

Made = dict[int, Sample | SampleError]
"""Place in the shard -> the sample, or what is wrong with it."""


@dataclass
class BlockFiller:
    """The blocks of a shard are its samples ``count * k`` to ``count * (k + 1)``, whatever is committed already.

    So a block that was half committed is made again as a whole, and comes out alike. Where the transform fails on a
    block, or was the end of workers, it is given the block's samples one by one: only those that are bad are lost.
    """

    source: Source
    items: Any
    """Indices of the shard's samples, in order: an array, or a list."""
    writer: ShardWriter
    shard: int
    seed: Seed
    watch: Watch
    transform: BlockTransform
    count: int

    def fill(self) -> None:
        """What is missing of the shard."""
        for first in range(0, len(self.items), self.count):
            places = range(first, min(first + self.count, len(self.items)))
            if self.writer.position >= places.stop:
                continue
            self.watch.before_sample()
            made = self._transformed(self._read(places))
            for place in places:
                if place >= self.writer.position:
                    put(self.writer, self.watch, self._key(place), made[place])

    def _read(self, places: range) -> Made:
        made: Made = {}
        for place in places:
            read = partial(self.source.read, int(self.items[place]), self.seed.of(self.shard, place))
            try:
                made[place] = self.watch.make(place, self._key(place), read, self.writer.settle)
            except SampleError as error:
                made[place] = error
        return made

    def _transformed(self, read: Made) -> Made:
        good = {place: sample for place, sample in read.items() if not isinstance(sample, SampleError)}
        if not good:
            return read
        if not self._is_suspected(read):
            try:
                return read | dict(zip(good, self._call(good), strict=True))
            except SampleError:
                pass  # which of them is to blame shows when each is alone
        made = dict(read)
        for place, sample in good.items():
            try:
                (made[place],) = self._call({place: sample})
            except SampleError as error:
                made[place] = error
        return made

    def _call(self, samples: dict[int, Sample]) -> list[Sample]:
        first = min(samples)
        make = partial(self.transform, list(samples.values()), self.seed.of(self.shard, first), self._key(first))
        made: list[Sample] = self.watch.make(first, self._key(first), make, self.writer.settle)
        return made

    def _is_suspected(self, places: Made) -> bool:
        """Whether workers that made this block died too often: a death in a block is noted against its first sample."""
        found = (self.watch.suspects.get(place) for place in places)
        return any(suspicion.weight >= HUNG for suspicion in found if suspicion is not None)

    def _key(self, place: int) -> str:
        return self.source.key(int(self.items[place]))
