"""The promises of any source of items in order. A subclass provides `source`, opened over real input, and failing ones.
The tensor ``x`` numbers its samples from 0, row by row if an item is a batch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import pytest

from penstock_common.errors import SampleError, SourceError
from penstock_common.wire.spec import Spec
from penstock_producer.jobs.fill import EpochSeed, FailureLimit, FillStopped, ItemFiller
from penstock_producer.sources.config import SourceConfig, parse_config
from penstock_producer.sources.open import open_source
from penstock_producer.sources.protocol import IterSource
from penstock_producer.sources.seeding import sample_rng
from penstock_producer.write.shard import ShardWriter
from tests.contracts.source import Sample, digest, in_fork

ITEMS = 4
"""The items of one pass that are read from an endless source. Other sources have at least as many."""


def passed(source: IterSource, count: int | None = ITEMS) -> list[Sample]:
    """Return the first items of one pass (None: all), made as in a job."""
    items = enumerate(islice(iter(source), count))
    return [dict(source.make(item, place, sample_rng(1, 0, 0, place))) for place, item in items]


def samples(source: IterSource, made: Iterable[Sample]) -> list[Sample]:
    """Return the rows of batches, and samples unchanged."""
    if not source.batched:
        return list(made)
    return [{name: rows[row] for name, rows in batch.items()} for batch in made for row in range(len(_first_of(batch)))]


def number_of(sample: Sample) -> int:
    """Return the number that a sample shows."""
    return int(np.ravel(sample["x"])[0])


def open_items(config: SourceConfig) -> IterSource:
    """Open a source of items in order."""
    source = open_source(config)
    assert source.unit == "item"
    return source


def _first_of(batch: Mapping[str, Any]) -> Any:
    return next(iter(batch.values()))


class Sheet:
    """The part of a shard's writer that an `ItemFiller` needs; it keeps samples in a list."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    @property
    def position(self) -> int:
        """Return the number of samples."""
        return len(self.written)

    def is_at(self, place: int) -> bool:
        """Return whether ``count`` samples are written."""
        return self.position >= place

    def write(self, sample: Sample) -> None:
        """Write one sample."""
        self.written.append(number_of(sample))

    def write_batch(self, batch: Mapping[str, Any]) -> None:
        """Write samples row by row."""
        self.written += [number_of({"x": row}) for row in batch["x"]]

    def quarantine(self, reason: str) -> None:
        """Write a hole."""
        self.written.append(reason)

    def commit_all(self) -> None:
        """Do nothing, because all of it is safe."""


class IterableContract:
    """Promises of every `IterSource`. Fixtures: ``config``, and ``failing`` and ``empty``, the same kind of source over
    an iterable that raises ZeroDivisionError as its item 1, and over one without items.
    """

    @pytest.fixture
    def source(self, config: SourceConfig) -> IterSource:
        """Return the source, opened here."""
        return open_items(config)

    def others(self, config: Any) -> list[SourceConfig]:
        """Return the same source with other options; the first one ends after two items."""
        return [config.model_copy(update={"limit": 2}), config.model_copy(update={"limit": 3})]

    def test_each_pass_gives_the_same_samples_in_the_same_order(self, source: IterSource) -> None:
        """A repeated job walks the iterable from its start and leaves out the committed samples."""
        first = passed(source)
        assert len(first) == ITEMS
        numbers = [number_of(sample) for sample in samples(source, first)]
        assert numbers == list(range(len(numbers)))
        again = [digest(sample) for sample in samples(source, passed(source))]
        assert again == [digest(sample) for sample in samples(source, first)]

    def test_a_pass_that_is_broken_off_takes_nothing_from_the_next(self, source: IterSource) -> None:
        """A worker keeps its source open from job to job, even if a job stops in the middle."""
        broken_off = iter(source)
        next(broken_off)
        assert number_of(samples(source, passed(source, 1))[0]) == 0

    def test_it_says_that_nobody_knows_its_length_and_that_it_only_goes_forward(
        self, source: IterSource, config: SourceConfig
    ) -> None:
        """No plan may cut it into shards, no audit may repair from it, and no split may be made of it silently."""
        assert not hasattr(source, "__len__")
        assert not hasattr(source, "read")
        assert source.repeatable is False
        split = {"kind": "split", "source": config.model_dump(), "parts": [["a", 1.0]], "part": "a"}
        with pytest.raises(SourceError, match="split"):
            open_source(parse_config(split))

    def test_every_sample_fits_the_spec(self, source: IterSource) -> None:
        """The spec is declared, or taken from the first sample. One that its own samples break would end the epoch."""
        made = passed(source)
        if source.batched:
            assert [len({len(rows) for rows in batch.values()}) for batch in made] == [1] * len(made)
        apart = samples(source, made)
        spec = Spec.of(source.spec) if source.spec else Spec.infer(apart[0])
        for sample in apart:
            spec.check_names(sample)
            for tensor in spec:
                tensor.canonical(sample[tensor.name])

    @pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
    def test_a_job_opens_the_same_source_from_json(self, source: IterSource, config: SourceConfig) -> None:
        """Jobs carry no code and no object, and refuse to continue with another source."""
        carried = config.model_dump_json()

        def told() -> str:
            again = open_items(parse_config(json.loads(carried)))
            about = [again.fingerprint, again.batched, again.info, again.spec, again.key(3)]
            return json.dumps([about, [digest(sample) for sample in passed(again)]])

        about = [source.fingerprint, source.batched, source.info, source.spec, source.key(3)]
        expected = json.dumps([about, [digest(sample) for sample in passed(source)]])
        assert in_fork(told) == told() == expected
        assert re.fullmatch("[0-9a-f]{16}", source.fingerprint)

    def test_other_options_are_another_source(self, source: IterSource, config: SourceConfig) -> None:
        """An epoch that was begun with a limit does not continue without it, and the limit counts items."""
        others = [open_items(other) for other in self.others(config)]
        assert len({source.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)
        assert len(passed(others[0], None)) == 2

    def test_its_words_can_be_stored(self, source: IterSource) -> None:
        """Info goes into the stream's meta as JSON, and keys into reports of bad samples, where each names one item."""
        assert json.loads(json.dumps(source.info)) == source.info
        keys = [source.key(place) for place in range(1000)]
        assert len(set(keys)) == len(keys)
        assert all(key.encode().decode().isprintable() for key in keys)

    def test_an_item_that_is_no_sample_is_named_and_does_not_end_the_pass(self, source: IterSource) -> None:
        """A generator that has raised is over, so making the sample is a separate step."""
        items = iter(source)
        next(items)
        with pytest.raises(SampleError) as caught:
            source.make(object(), 1, sample_rng(1, 0, 0, 1))
        assert str(caught.value).startswith(source.key(1))
        assert "\n" not in str(caught.value)
        assert source.make(next(items), 1, sample_rng(1, 0, 0, 1))

    def test_an_iterable_that_raises_or_has_nothing_is_named(self, failing: SourceConfig, empty: SourceConfig) -> None:
        """The pass has ended and the epoch would look complete, so this is not a bad sample."""
        broken = open_items(failing)
        items = iter(broken)
        assert number_of(samples(broken, [dict(broken.make(next(items), 0, sample_rng(1, 0, 0, 0)))])[0]) == 0
        with pytest.raises(SourceError, match=r"failed at item 1: ZeroDivisionError: .* by zero") as caught:
            next(items)
        assert str(caught.value).startswith(broken.key(1).removesuffix("[1]"))
        assert "\n" not in str(caught.value)
        assert list(items) == []
        with pytest.raises(SourceError, match="gave no items"):
            list(open_items(empty))

    def test_going_on_leaves_out_exactly_what_is_committed(self, source: IterSource) -> None:
        """A worker that dies may leave any number of samples, also half a batch: none is lost, and none comes twice."""
        whole = [number_of(sample) for sample in samples(source, passed(source))]
        for done in range(1, len(whole) + 1):
            sheet = Sheet()
            sheet.written = whole[:done]
            watch = FailureLimit(partial(sheet.is_at, len(whole)))
            filler = ItemFiller(source, _no_shard, 10**6, watch, [], cast("ShardWriter", sheet))
            with suppress(FillStopped):  # an endless source
                filler.fill(EpochSeed(1, 0, sets_globals=False), done)
            assert sheet.written[: len(whole)] == whole
            assert watch.good == len(whole) - done


def _no_shard(number: int, like: Mapping[str, Any]) -> ShardWriter:
    raise AssertionError(f"shard {number} was opened, and the first is not full")
