"""Fills one shard from a source: goes on where it was left, numbers every sample, records the bad ones in their place.

One function or class per shape of source. Which items a shard has is ``plan``'s; who calls this is ``task_runner``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np

from penstock_common.errors import BadSpec, PenstockError, SampleError, SpecMismatch
from penstock_common.wire.spec import Spec
from penstock_producer.jobs.task import OnError
from penstock_producer.jobs.watchdog import HUNG, SAMPLE_LIMIT_S, CrashRecord, CurrentSample
from penstock_producer.sources.protocol import BatchSource, IterSource, Sample, Source, draws
from penstock_producer.sources.seeding import sample_rng, seed_globals
from penstock_producer.sources.transform import BlockTransform
from penstock_producer.writing.shard import ShardWriter

T = TypeVar("T")

HOPELESS = 100
"""So many bad samples before the first good one are no accident: the source, the transform or a package is broken."""


MAX_BAD = "50%"
"""An epoch of which more than this is bad is no epoch to train on."""


class TooManyBad(PenstockError, ValueError):
    """So many samples cannot be made that going on would only hide a mistake."""


class FillStopped(BaseException):
    """The worker was asked to stop. No Exception: user code that catches those must not swallow it."""


def bad_limit(max_bad: str, samples: int | None) -> int | None:
    """How many samples of an epoch may be bad, by ``max_bad``: a number, or a share like ``5%``.

    None for a share of a number that nobody knows yet.
    """
    number = int(max_bad.removesuffix("%"))
    if not max_bad.endswith("%"):
        return number
    return None if samples is None else samples * number // 100


@dataclass
class FailureLimit:
    """Counts what happens to samples, and decides when it is enough."""

    should_stop: Callable[[], bool]
    on_error: OnError = "quarantine"
    max_bad: str = MAX_BAD
    samples: int | None = None
    """Of the whole epoch, as far as they are planned."""
    spec_is_declared: bool = False
    """A sample that does not fit a declared spec is a bad one; one that does not fit a spec that was taken from another
    sample shows that this was no spec, and ends the epoch."""
    current: CurrentSample = field(default_factory=CurrentSample)
    """What this process's supervisor sees of it."""
    suspects: Mapping[int, CrashRecord] = field(default_factory=dict)
    """Place in the shard -> what the sample there did to workers that made it before."""
    sample_limit_s: float = SAMPLE_LIMIT_S
    good: int = 0
    bad: int = 0

    def before_sample(self) -> None:
        """Raises FillStopped if the worker has to go."""
        if self.should_stop():
            raise FillStopped

    def make(self, place: int, key: str, make: Callable[[], T], settle: Callable[[], None]) -> T:
        """A sample (or a block of them that begins at this place), made in sight of the supervisor. Raises SampleError.

        One that ended a worker before is made when all before it is safe, which ``settle`` sees to: if it does it again
        nothing else is lost; and after too many times it is not tried any more.
        """
        suspicion = self.suspects.get(place)
        if suspicion is not None:
            settle()
            if suspicion.is_enough:
                raise SampleError(f"{key}: {suspicion}")
        self.current.begin(place, self.sample_limit_s)
        try:
            return make()
        except SystemExit as error:
            raise SampleError(f"{key}: called sys.exit({error.code!r})") from error
        finally:
            self.current.end()

    def saw_bad(self, error: SampleError, count: int = 1) -> str:
        """The reason to record; raises where bad samples are not wanted, or nothing else comes."""
        if self.on_error == "fail":
            raise error
        self.bad += count
        if self.on_error == "skip":
            return str(error)
        if self.bad >= HOPELESS and not self.good:
            raise TooManyBad(f"the first {self.bad} samples all failed, the last was {error}")
        self.require_few(self.bad, self.samples, f"; the last was {error}")
        return str(error)

    def saw_misfit(self, error: SpecMismatch, count: int = 1) -> str:
        """The same for a sample that does not fit the spec; raises where nobody declared that spec."""
        if not self.spec_is_declared:
            raise error
        return self.saw_bad(SampleError(str(error)), count)

    def require_few(self, bad: int, samples: int | None, more: str = "") -> None:
        """Raises TooManyBad if so many bad samples are too many of an epoch; those of other jobs count too."""
        limit = None if self.on_error == "skip" else bad_limit(self.max_bad, samples)
        if limit is not None and bad > limit:
            of = f" of {samples}" if samples is not None else ""
            raise TooManyBad(f"{bad}{of} samples are bad, --max-bad {self.max_bad} allows {limit}{more}")


@dataclass(frozen=True)
class EpochSeed:
    """The seed of an epoch, from which the random generator of each of its samples comes."""

    seed: int
    epoch: int
    sets_globals: bool = True
    """Not in a process that is the user's own."""

    def of(self, shard: int, offset: int) -> np.random.Generator:
        """The generator of one sample, which is made next: the process's global ones are set for it, too."""
        self.set_globals(shard, offset)
        return sample_rng(self.seed, self.epoch, shard, offset)

    def set_globals(self, shard: int, offset: int) -> None:
        """The process's generators for one sample, which is made next."""
        if self.sets_globals:
            seed_globals(self.seed, self.epoch, shard, offset)

    def undrawn(self, shard: int, offset: int) -> np.random.Generator:
        """As `of`, for a source that leaves its generator alone (`protocol.draws`): None, whatever the type says."""
        self.set_globals(shard, offset)
        return cast("np.random.Generator", None)


def fill_samples(
    source: Source, items: Iterable[int], writer: ShardWriter, shard: int, seed: EpochSeed, watch: FailureLimit
) -> None:
    """One item is one sample; those below the writer's position are not read again."""
    done = writer.position
    seeded = seed.of if draws(source) else seed.undrawn
    for offset, item in enumerate(items):
        if offset < done:
            continue
        watch.before_sample()
        number, key = int(item), source.key(int(item))
        made: Sample | SampleError
        try:
            made = watch.make(offset, key, partial(source.read, number, seeded(shard, offset)), writer.settle)
        except SampleError as error:
            made = error
        put(writer, watch, key, made)


def put(writer: ShardWriter, watch: FailureLimit, key: str, made: Sample | SampleError) -> None:
    """Writes the next sample, or why there is none."""
    if isinstance(made, SampleError):
        writer.quarantine(watch.saw_bad(made))
        return
    try:
        writer.write(made)
    except SpecMismatch as error:
        writer.quarantine(watch.saw_misfit(named(error, key, writer.spec, made)))
        return
    watch.good += 1


def fill_batches(
    source: BatchSource, items: Iterable[int], writer: ShardWriter, shard: int, seed: EpochSeed, watch: FailureLimit
) -> None:
    """One item is a known number of samples; one that was half committed is read again and its rest written."""
    start = 0
    for item in map(int, items):
        first, start = start, start + source.size(item)
        if writer.position >= start:
            continue
        watch.before_sample()
        key, read = source.key(item), partial(source.read, item, seed.of(shard, first))
        _write_rows(
            writer,
            partial(watch.make, first, key, read, writer.settle),
            skip=writer.position - first,
            count=source.size(item),
            key=key,
            watch=watch,
        )


def _write_rows(
    writer: ShardWriter, read: Callable[[], Mapping[str, Any]], *, skip: int, count: int, key: str, watch: FailureLimit
) -> None:
    try:
        rows = read()
        writer.write_batch({name: values[skip:] for name, values in rows.items()} if skip else rows)
    except (SampleError, SpecMismatch) as error:
        if isinstance(error, SpecMismatch):
            reason = watch.saw_misfit(named(error, key, None, None), count - skip)
        else:
            reason = watch.saw_bad(error, count - skip)
        for _ in range(count - skip):
            writer.quarantine(reason)
        return
    watch.good += count - skip


class ItemFiller:
    """Fills shards one after the other from an iterator whose length nobody knows.

    A repeated job walks the iterator again and skips as many samples as are committed: it loses and repeats no
    offset, but an iterator that yields something else the second time is not found out.
    """

    def __init__(
        self,
        source: IterSource,
        open_shard: Callable[[int, Mapping[str, Any]], ShardWriter],
        limit: int,
        watch: FailureLimit,
    ) -> None:
        self._source, self._open, self._limit, self._watch = source, open_shard, limit, watch
        self._writer: ShardWriter | None = None
        self._bad_before: list[str] = []
        """Bad items before the first good one, which a stream without spec needs to begin."""
        self.sizes: list[int] = []
        """Of the shards that are complete."""

    def fill(self, seed: EpochSeed, skip: int) -> None:
        """One pass; ``skip`` samples are committed and left out."""
        for position, item in enumerate(self._source):
            if skip and not self._source.batched:
                skip -= 1
                continue
            self._watch.before_sample()
            try:
                make = partial(self._source.make, item, position, seed.of(0, position))
                made = self._watch.make(position, self._source.key(position), make, self.settle)
            except SampleError as error:
                if skip:
                    skip -= 1  # of a bad batch nobody knows the size: it took one offset
                else:
                    self._quarantine(self._watch.saw_bad(error))
                continue
            try:
                skip = self._write(made, skip)
            except SpecMismatch as error:
                spec = None if self._writer is None or self._source.batched else self._writer.spec
                self._quarantine(self._watch.saw_misfit(named(error, self._source.key(position), spec, made)))
        self.settle()
        if self._writer is None:
            raise TooManyBad(f"none of the {len(self._bad_before)} items could be made: {self._bad_before[:1]}")

    def begin_at(self, done: list[int], writer: ShardWriter | None) -> None:
        """Go on after complete shards of these sizes, in the middle of ``writer``'s."""
        self.sizes, self._writer = list(done), writer

    def settle(self) -> None:
        """Everything given so far is committed."""
        if self._writer is not None:
            self._writer.settle()

    def close(self) -> None:
        """Complete the last shard."""
        assert self._writer is not None
        self._end_shard(self._writer)

    def abort(self) -> None:
        """Give the connection back."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, made: Mapping[str, Any], skip: int) -> int:
        if not self._source.batched:
            self._current(made).write(made)
            self._watch.good += 1
            return 0
        count = len(next(iter(made.values())))
        start = min(skip, count)
        skip -= start
        while start < count:
            writer = self._current({name: values[start] for name, values in made.items()})
            stop = min(count, start + self._limit - writer.position)
            writer.write_batch({name: values[start:stop] for name, values in made.items()})
            self._watch.good += stop - start
            start = stop
        return skip

    def _quarantine(self, reason: str) -> None:
        if self._writer is None and not self.sizes:
            self._bad_before.append(reason)
        else:
            self._current({}).quarantine(reason)

    def _current(self, like: Mapping[str, Any]) -> ShardWriter:
        if self._writer is not None and self._writer.position >= self._limit:
            self._end_shard(self._writer)
        if self._writer is None:
            self._writer = self._open(len(self.sizes), like)
            for reason in self._bad_before:
                self._writer.quarantine(reason)
            self._bad_before.clear()
        return self._writer

    def _end_shard(self, writer: ShardWriter) -> None:
        writer.close()
        self.sizes.append(writer.position)
        self._writer = None


def named(error: SpecMismatch, key: str, spec: Spec | None, sample: Mapping[str, Any] | None) -> SpecMismatch:
    """Return the mismatch with the sample's name and what to do: a spec to declare, where sample and spec are given."""
    declare = "declare a spec in which null is a free size (--spec)"
    if spec is not None and sample is not None:
        with suppress(BadSpec):
            declare = f"fill another stream (--stream NAME) with {spec.widened(sample).as_option()}"
    remedy = f"make samples alike (--resize, a transform), or {declare}"
    return SpecMismatch(error.tensor, error.found, error.expected, f"in sample {key}; {remedy}")


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
    seed: EpochSeed
    watch: FailureLimit
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
