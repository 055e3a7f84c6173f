"""Fill one shard from a source: continue where it was left, number every sample, record bad ones in their place.

There is one function or class for each shape of source. `plan` says which items a shard has; `task_runner` calls this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np

from penstock_common.errors import BadSpec, PenstockError, SampleError, SpecMismatch, TooLarge
from penstock_common.wire.spec import Spec, TensorSpec
from penstock_producer.jobs.task import OnError
from penstock_producer.jobs.watchdog import HUNG, SAMPLE_LIMIT_S, CrashRecord, CurrentSample
from penstock_producer.sources.names import blame, is_ctrl_c
from penstock_producer.sources.protocol import BatchSource, IterSource, Sample, Source, draws
from penstock_producer.sources.seeding import sample_rng, seed_globals
from penstock_producer.sources.transform import Transform, transform_block
from penstock_producer.write.shard import ShardWriter

T = TypeVar("T")

HOPELESS = 100
"""Bad samples before the first good one that are no accident: the source, the transform or a package is broken."""


MAX_BAD = "50%"
"""The share of bad samples above which an epoch is of no use."""


LOOK_AHEAD = 64
"""The samples that are looked at when the first one does not fit, to propose a spec that fits them, too."""
LOOK_AHEAD_S = 5.0
"""The time after which no further one is looked at."""


class TooManyBad(PenstockError, ValueError):
    """The number of samples that cannot be made is so high that continuing would hide a mistake."""


class FillStopped(BaseException):
    """The worker was asked to stop. It is no Exception, because user code that catches those must not swallow it."""


def bad_limit(max_bad: str, samples: int | None) -> int | None:
    """Return how many samples of an epoch may be bad, by ``max_bad``: a number, or a share such as ``5%``.

    None stands for a share of a number that is not known yet.
    """
    number = int(max_bad.removesuffix("%"))
    if not max_bad.endswith("%"):
        return number
    return None if samples is None else samples * number // 100


@dataclass
class FailureLimit:
    """A count of what happened to samples, which decides when it is enough."""

    should_stop: Callable[[], bool]
    on_error: OnError = "quarantine"
    max_bad: str = MAX_BAD
    samples: int | None = None
    """The samples of the whole epoch, as far as they are planned."""
    spec_is_declared: bool = False
    """Whether the user declared the spec. A sample that does not fit a declared spec is a bad one. If it does not fit a
    spec that was inferred from another sample, the spec was wrong, and the epoch ends."""
    current: CurrentSample = field(default_factory=CurrentSample)
    """This process's note for its supervisor of the sample that it makes."""
    crashes: Mapping[int, CrashRecord] = field(default_factory=dict)
    """Offset in the shard -> what the sample there did to workers that made it before."""
    sample_limit_s: float = SAMPLE_LIMIT_S
    good: int = 0
    bad: int = 0
    last: str = ""
    """The reason of the last bad sample."""
    wider: WiderSpec | None = None
    """The spec that holds for all samples so far, once one did not fit."""
    has_looked_ahead: bool = False
    """Whether further samples were made to find that spec."""

    @property
    def has_fitted(self) -> bool:
        """Return whether a sample fits the spec: the one that gave an inferred spec, or one that was written."""
        return self.good > 0 or not self.spec_is_declared

    def before_sample(self) -> None:
        """Raise FillStopped if the worker has to stop."""
        if self.should_stop():
            raise FillStopped

    def make(self, offset: int, key: str, make: Callable[[], T], commit_all: Callable[[], None]) -> T:
        """Make a sample, or a block of them that begins at this offset, while the supervisor watches.

        Raises SampleError, which names the sample whatever the source's own text is.

        A sample that ended a worker before is made once everything before it is safe, which ``commit_all`` ensures. If
        it ends another worker, nothing else is lost. After too many such ends it is not tried any more.
        """
        record = self.crashes.get(offset)
        if record is not None:
            commit_all()
            if record.is_enough:
                raise SampleError(f"{key}: {record}")
        self.current.begin(offset, self.sample_limit_s)
        try:
            return make()
        except SampleError as error:
            raise with_name(error, key) from error.__cause__
        except SystemExit as error:
            raise SampleError(f"{key}: called sys.exit({error.code!r})") from error
        except KeyboardInterrupt as error:
            if is_ctrl_c(error):
                raise
            raise SampleError(f"{key}: {blame(error)}") from error
        finally:
            self.current.end()

    def attempt(
        self, offset: int, key: str, make: Callable[[], T], commit_all: Callable[[], None] = lambda: None
    ) -> T | SampleError:
        """Return what `make` does, or the reason why the sample cannot be made."""
        try:
            return self.make(offset, key, make, commit_all)
        except SampleError as error:
            return error

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Ask this before each sample from now on."""
        self.should_stop = should_stop

    def saw_good(self, count: int = 1) -> None:
        """Count samples that were written."""
        self.good += count

    def saw_bad(self, error: SampleError, count: int = 1) -> str:
        """Return the reason to record. Raises if bad samples are not wanted, or if there are no others."""
        if self.on_error == "fail":
            raise error
        self.bad += count
        self.last = str(error)
        if self.on_error == "skip":
            return str(error)
        if self.bad >= HOPELESS and not self.good:
            raise TooManyBad(f"the first {self.bad} samples all failed, the last was {error}")
        self.require_few(self.bad, self.samples)
        return str(error)

    def saw_mismatch(self, error: SpecMismatch, count: int = 1) -> str:
        """Return the reason for a sample that does not fit the spec. Raises if the spec was not declared."""
        if not self.spec_is_declared:
            raise error
        return self.saw_bad(SampleError(str(error)), count)

    def widen(self, spec: Spec, sample: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> WiderSpec | None:
        """Return a spec for a sample that does not fit ``spec``, and for all others so far. None if there is none.

        At the first such sample, ``others`` are looked at, too, so that the spec holds for more than this one.
        """
        known = self.wider or WiderSpec(spec, 0)
        found = known.widened(sample, others_fit=self.has_fitted or self.wider is not None)
        if found is None:
            return None
        if not self.has_looked_ahead:
            self.has_looked_ahead = True
            for other in others:
                found = found.widened(other, others_fit=True) or found
        if _fits_alike(spec, found.spec):
            self.wider = found
        return found

    def require_few(self, bad: int, samples: int | None) -> None:
        """Raise TooManyBad if these are too many bad samples for an epoch. Those of other jobs count, too."""
        limit = None if self.on_error == "skip" else bad_limit(self.max_bad, samples)
        if limit is not None and bad > limit:
            of = f" of {samples}" if samples is not None else ""
            last = f"; the last was {self.last}" if self.last else ""
            raise TooManyBad(f"{bad}{of} samples are bad, --max-bad {self.max_bad} allows {limit}{last}")


def with_name(error: SampleError, key: str) -> SampleError:
    """Return an error whose text names the sample. Only a source of the user's own raises others."""
    text = str(error)
    first = text.partition(": ")[0]
    is_of_part = bool(first) and key.endswith(first)  # a part of a weighted source names its own sample
    return error if key in text or is_of_part else SampleError(f"{key}: {text}")


@dataclass(frozen=True)
class WiderSpec:
    """A spec for samples that were seen, to propose in an error."""

    spec: Spec
    count: int
    """The samples that it was made from, beside those that the first spec was."""

    def widened(self, sample: Mapping[str, Any], *, others_fit: bool) -> WiderSpec | None:
        """Return a spec for this sample and for those before it, or None if there is none."""
        try:
            wider = self.spec.widened(sample)
        except (BadSpec, SpecMismatch):
            return None
        if not set(self.spec.names) <= set(wider.names):
            return None  # other samples may have what this one lacks
        return None if others_fit and not _fits_alike(self.spec, wider) else WiderSpec(wider, self.count + 1)


def _fits_alike(spec: Spec, wider: Spec) -> bool:
    """Return whether samples that fit ``spec`` may fit ``wider``: it has the same tensors, of as many dimensions."""
    return set(spec.names) == set(wider.names) and all(
        wider[known.name].dtype == known.dtype
        and (len(wider[known.name].shape) == len(known.shape) or _is_of_empty_list(known, wider[known.name]))
        for known in spec
    )


def _is_of_empty_list(known: TensorSpec, wider: TensorSpec) -> bool:
    return known.shape == (0,) and wider.shape[:1] == (None,)


@dataclass(frozen=True)
class EpochSeed:
    """The seed of an epoch, which gives each of its samples a random generator."""

    seed: int
    epoch: int
    sets_globals: bool = True
    """Whether to seed the process's global generators, which is wrong in a process of the user's own."""

    def of(self, shard: int, offset: int) -> np.random.Generator:
        """Return the generator of the sample that is made next.

        The process's global generators are seeded for it, too.
        """
        self.set_globals(shard, offset)
        return sample_rng(self.seed, self.epoch, shard, offset)

    def set_globals(self, shard: int, offset: int) -> None:
        """Seed the process's generators for the sample that is made next."""
        if self.sets_globals:
            seed_globals(self.seed, self.epoch, shard, offset)

    def no_generator(self, shard: int, offset: int) -> np.random.Generator:
        """Return None, whatever the type says, for a source that leaves its generator alone (`protocol.draws`)."""
        self.set_globals(shard, offset)
        return cast("np.random.Generator", None)


def fill_samples(
    source: Source, items: Any, writer: ShardWriter, shard: int, seed: EpochSeed, watch: FailureLimit
) -> None:
    """Fill a shard from a source whose items, an array or a list, are single samples.

    Items below the writer's position are not read again.
    """
    done = writer.position
    seeded = seed.of if draws(source) else seed.no_generator
    rest = partial(_rest, source, items, shard, seed, watch)
    for offset, item in enumerate(items):
        if offset < done:
            continue
        watch.before_sample()
        number, key = int(item), source.key(int(item))
        made = watch.attempt(offset, key, partial(source.read, number, seeded(shard, offset)), writer.commit_all)
        put(writer, watch, key, made, offset, rest)


def _rest(
    source: Source, items: Any, shard: int, seed: EpochSeed, watch: FailureLimit, offset: int
) -> Iterator[Sample | SampleError]:
    """Make the samples of a shard behind this offset, and then those before it."""
    for other in (*range(offset + 1, len(items)), *range(offset)):
        watch.before_sample()
        if other in watch.crashes:
            continue
        item = int(items[other])
        yield watch.attempt(other, source.key(item), partial(source.read, item, seed.of(shard, other)))


def further(made: Iterable[Sample | SampleError]) -> Iterator[Sample]:
    """Yield the good ones of these samples, as many as are looked at."""
    end = time.monotonic() + LOOK_AHEAD_S
    for one in islice(made, LOOK_AHEAD):
        if not isinstance(one, SampleError):
            yield one
        if time.monotonic() > end:
            return


def put(
    writer: ShardWriter,
    watch: FailureLimit,
    key: str,
    made: Sample | SampleError,
    offset: int,
    rest: Callable[[int], Iterable[Sample | SampleError]],
) -> None:
    """Write the next sample, or the reason why there is none.

    ``rest`` gives the other samples of the shard, to look at if the sample at this offset does not fit.
    """
    if isinstance(made, SampleError):
        writer.quarantine(watch.saw_bad(made))
        return
    try:
        writer.write(made)
    except SpecMismatch as error:
        writer.quarantine(watch.saw_mismatch(named(error, key, watch.widen(writer.spec, made, further(rest(offset))))))
        return
    except TooLarge as error:
        writer.quarantine(watch.saw_bad(_too_large(error, key, writer)))
        return
    watch.saw_good()


def _too_large(error: TooLarge, key: str, writer: ShardWriter) -> SampleError:
    """Return what is wrong with a sample that no block may hold. Raises the error if another sample is the cause."""
    if writer.has_failed:  # else the writer has taken this sample back
        raise error
    return SampleError(f"{key}: {error}")


def fill_batches(
    source: BatchSource, items: Iterable[int], writer: ShardWriter, shard: int, seed: EpochSeed, watch: FailureLimit
) -> None:
    """Fill a shard from a source whose items hold a known number of samples. A half-committed item is read again for
    its remaining samples.
    """
    start = 0
    for item in map(int, items):
        first, start = start, start + source.size(item)
        if writer.position >= start:
            continue
        watch.before_sample()
        key, skip, count = source.key(item), writer.position - first, start - writer.position
        read = partial(source.read, item, seed.of(shard, first))
        try:
            rows = watch.make(first, key, read, writer.commit_all)
            writer.write_batch({name: values[skip:] for name, values in rows.items()} if skip else rows)
        except (SampleError, SpecMismatch) as error:
            if isinstance(error, SpecMismatch):
                reason = watch.saw_mismatch(named(error, key, None, is_batch=True), count)
            else:
                reason = watch.saw_bad(error, count)
            for _ in range(count):
                writer.quarantine(reason)
        except TooLarge as error:
            raise TooLarge(f"{key}: {error}") from error
        else:
            watch.saw_good(count)


class ItemFiller:
    """A filler of one shard after the other, from an iterator of unknown length.

    A repeated job walks the iterator again and skips as many samples as are committed. It loses and repeats no offset,
    but it does not notice if the iterator yields something else the second time.
    """

    def __init__(
        self,
        source: IterSource,
        open_shard: Callable[[int, Mapping[str, Any]], ShardWriter],
        limit: int,
        watch: FailureLimit,
        done: Sequence[int] = (),
        begun: ShardWriter | None = None,
    ) -> None:
        """Make a filler that continues after complete shards of the sizes ``done``, in the middle of ``begun``."""
        self._source, self._open, self._limit, self._watch = source, open_shard, limit, watch
        self._writer = begun
        self._bad_before: list[str] = []
        """Bad items before the first good one, which a stream without spec needs to begin."""
        self.sizes = list(done)
        """The sizes of the shards that are complete."""

    def fill(self, seed: EpochSeed, skip: int) -> None:
        """Read the iterator once. ``skip`` samples are committed already and left out."""
        walk = enumerate(self._source)
        for position, item in walk:
            if skip and not self._source.batched:
                skip -= 1
                continue
            self._watch.before_sample()
            try:
                make = partial(self._source.make, item, position, seed.of(0, position))
                made = self._watch.make(position, self._source.key(position), make, self.commit_all)
            except SampleError as error:
                if skip:
                    skip -= 1  # the size of a bad batch is not known: it took one offset
                else:
                    self._quarantine(self._watch.saw_bad(error))
                continue
            try:
                skip = self._write(made, skip)
            except SpecMismatch as error:
                key, wider = self._source.key(position), None
                if not self._source.batched and self._writer is not None:
                    wider = self._watch.widen(self._writer.spec, made, self._further(walk, seed))
                self._quarantine(self._watch.saw_mismatch(named(error, key, wider, is_batch=self._source.batched)))
            except TooLarge as error:
                key = self._source.key(position)
                if self._source.batched or self._writer is None:
                    raise TooLarge(f"{key}: {error}") from error
                self._quarantine(self._watch.saw_bad(_too_large(error, key, self._writer)))
        self.commit_all()
        if self._writer is None:
            raise TooManyBad(f"none of the {len(self._bad_before)} items could be made: {self._bad_before[:1]}")

    def _further(self, walk: Iterator[tuple[int, Any]], seed: EpochSeed) -> Iterator[Sample]:
        """Yield the next samples, but none of an epoch that goes on, which would lack them."""
        return further(()) if self._watch.spec_is_declared else further(self._rest(walk, seed))

    def _rest(self, walk: Iterator[tuple[int, Any]], seed: EpochSeed) -> Iterator[Sample | SampleError]:
        for position, item in walk:
            self._watch.before_sample()
            make = partial(self._source.make, item, position, seed.of(0, position))
            yield self._watch.attempt(position, self._source.key(position), make)

    @property
    def committed(self) -> int:
        """The committed samples of all shards."""
        return sum(self.sizes) + (0 if self._writer is None else self._writer.committed)

    def commit_all(self) -> None:
        """Commit everything that was given so far."""
        if self._writer is not None:
            self._writer.commit_all()

    def close(self) -> None:
        """Complete the last shard."""
        assert self._writer is not None
        self._end_shard(self._writer)

    def abort(self) -> None:
        """Return the connection."""
        if self._writer is not None:
            self._writer.abort()

    def _write(self, made: Mapping[str, Any], skip: int) -> int:
        if not self._source.batched:
            self._current(made).write(made)
            self._watch.saw_good()
            return 0
        count = len(next(iter(made.values())))
        start = min(skip, count)
        skip -= start
        while start < count:
            writer = self._current({name: values[start] for name, values in made.items()})
            stop = min(count, start + self._limit - writer.position)
            writer.write_batch({name: values[start:stop] for name, values in made.items()})
            self._watch.saw_good(stop - start)
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


def named(error: SpecMismatch, key: str, wider: WiderSpec | None, *, is_batch: bool = False) -> SpecMismatch:
    """Return the mismatch with the sample's name and what to do.

    Args:
        error: the mismatch.
        key: the sample's name.
        wider: a spec to declare, if one can hold for all samples so far (`FailureLimit.widen`).
        is_batch: whether it is a batch that does not fit, so that no such spec is known.
    """
    if error.expected.startswith("dtype "):
        dtype = error.found.removeprefix("dtype ")
        remedy = "samples are of one dtype: convert it in the source or in a transform"
        remedy += f"; if all samples of this source are {dtype}, another stream takes them (--stream NAME)"
    elif wider is not None:
        option = f"fill another stream (--stream NAME) with {wider.spec.as_option()}"
        made = f"made from {wider.count} samples" if wider.count > 1 else "made from this one"
        remedy = f"make samples alike (--resize, a transform), or {option} ({made}: other sizes that differ need null)"
    elif error.found == "nothing" or error.expected.startswith("none of that name"):
        remedy = "each sample needs the same tensors: add what is missing, or leave it out of all, in a transform"
    elif not is_batch:
        remedy = "make samples alike in the source or in a transform"
    else:
        remedy = "make samples alike (--resize, a transform), or declare a spec in which null is a free size (--spec)"
    return SpecMismatch(error.tensor, error.found, error.expected, f"in sample {key}; {remedy}")


Made = dict[int, Sample | SampleError]
"""Offset in the shard -> the sample, or what is wrong with it."""


def _others(made: Made, offset: int) -> Iterator[Sample | SampleError]:
    return (one for at, one in made.items() if at != offset)


@dataclass
class BlockFiller:
    """A filler of blocks.

    They are the shard's samples ``count * k`` to ``count * (k + 1)``, whatever is committed already.

    So a half-committed block is made again as a whole, with the same result. If the transform fails on a block, or the
    block ended workers, it gets the block's samples one at a time, and only the bad ones are lost.
    """

    source: Source
    items: Any
    """The indices of the shard's samples, in order: an array or a list."""
    writer: ShardWriter
    shard: int
    seed: EpochSeed
    watch: FailureLimit
    transform: Transform
    count: int

    def fill(self) -> None:
        """Write what is missing of the shard."""
        for first in range(0, len(self.items), self.count):
            offsets = range(first, min(first + self.count, len(self.items)))
            if self.writer.position >= offsets.stop:
                continue
            self.watch.before_sample()
            made = self._transformed(self._read(offsets))
            for offset in offsets:
                if offset >= self.writer.position:
                    put(self.writer, self.watch, self._key(offset), made[offset], offset, partial(_others, made))

    def _read(self, offsets: range) -> Made:
        made: Made = {}
        for offset in offsets:
            read = partial(self.source.read, int(self.items[offset]), self.seed.of(self.shard, offset))
            made[offset] = self.watch.attempt(offset, self._key(offset), read, self.writer.commit_all)
        return made

    def _transformed(self, read: Made) -> Made:
        good = {offset: sample for offset, sample in read.items() if not isinstance(sample, SampleError)}
        if not good:
            return read
        if not self._has_crashed(read):
            try:
                return read | dict(zip(good, self._call(good), strict=True))
            except SampleError:
                pass  # making each alone shows which of them is to blame
        made = dict(read)
        for offset, sample in good.items():
            try:
                (made[offset],) = self._call({offset: sample})
            except SampleError as error:
                made[offset] = error
        return made

    def _call(self, samples: dict[int, Sample]) -> list[Sample]:
        first = min(samples)
        rng, key = self.seed.of(self.shard, first), self._key(first)
        make = partial(transform_block, self.transform, list(samples.values()), rng, key)
        made: list[Sample] = self.watch.make(first, key, make, self.writer.commit_all)
        return made

    def _has_crashed(self, offsets: Made) -> bool:
        """Return whether too many workers died with this block.

        A death in a block is noted against its first sample.
        """
        found = (self.watch.crashes.get(offset) for offset in offsets)
        return any(record.weight >= HUNG for record in found if record is not None)

    def _key(self, offset: int) -> str:
        return self.source.key(int(self.items[offset]))
