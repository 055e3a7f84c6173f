"""Bad samples up to a limit, and no further: beyond it, or against a guessed spec, an epoch fails loudly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis

from penstock_common.errors import EpochFailed, SpecMismatch
from penstock_common.tuning import Tuning
from penstock_producer.jobs.fill import bad_limit
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import SHOWN_BAD, ProductionSummary
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import DatasetConfig, GeneratorConfig, LocalConfig, SourceConfig
from penstock_producer.sources.names import register
from penstock_producer.write.writer import Writer
from tests.producer.made import SAMPLES
from tests.producer.reading import read_epoch

BAD = 12
"""The number of bad samples of `every_tenth_fails`."""


def dataset(transform: str) -> DatasetConfig:
    """The numbers, by import name."""
    return DatasetConfig(name="tests.producer.made:numbers", transform=f"tests.producer.made:{transform}")


def produce(url: str, source: SourceConfig, **plan: Any) -> ProductionSummary:
    """One production to its end."""
    asked = ProductionPlan(stream="train", source=source, **plan)
    with Production(asked, WorkerOptions(url=url, queue_url=url), workers=2, notify=lambda _: None) as production:
        for _ in production.run():
            pass
        return production.summary()


def states(client: redis.Redis) -> Any:
    """Return the states of the epochs."""
    found: Any = client.hgetall("penstock:{train}:epochs")
    return found


def test_a_server_that_lost_its_bad_samples_ends_no_production(url: str) -> None:
    """It came back without its newest writes. Those that are bad again are new."""
    asked = ProductionPlan(stream="train", source=dataset("every_tenth_fails"))
    with Production(asked, WorkerOptions(url=url, queue_url=url), workers=2, notify=lambda _: None) as production:
        *_, last = production.run()
        stream, details = production._writer.stream, production._details
        assert last.bad == BAD
        lost = replace(last, epochs=tuple(replace(epoch, bad=0) for epoch in last.epochs))
        assert details.explained(lost, stream, [], "").new_bad == ()
        details._bad_reported.clear()
        assert len(details.explained(last, stream, [], "").new_bad) == SHOWN_BAD


@pytest.mark.parametrize(
    ("max_bad", "samples", "limit"),
    [("0", None, 0), ("20", 100, 20), ("50%", 120, 60), ("5%", 119, 5), ("0%", 10, 0), ("5%", None, None)],
)
def test_a_limit_is_a_number_or_a_share(max_bad: str, samples: int | None, limit: int | None) -> None:
    """A share of an unknown number limits nothing until the number is known."""
    assert bad_limit(max_bad, samples) == limit


@pytest.mark.parametrize("max_bad", [str(BAD), "10%"])
def test_as_many_bad_samples_as_allowed_make_an_epoch(any_url: str, max_bad: str) -> None:
    """Exactly the limit is within it."""
    assert produce(any_url, dataset("every_tenth_fails"), max_bad=max_bad, shard_samples=30).bad == BAD


@pytest.mark.parametrize("shard_samples", [7, 30, SAMPLES])
@pytest.mark.parametrize("max_bad", [str(BAD - 1), "9%"])
def test_one_more_fails_the_epoch_however_it_is_cut(
    any_url: str, any_client: redis.Redis, max_bad: str, shard_samples: int
) -> None:
    """Over all jobs together, and before the epoch can be taken for a whole one: never produced, always abandoned."""
    with pytest.raises(EpochFailed, match=rf"samples are bad, --max-bad {max_bad} allows \d+.*unlucky|bad"):
        produce(any_url, dataset("every_tenth_fails"), max_bad=max_bad, shard_samples=shard_samples)
    assert states(any_client) == {b"0": b"abandoned"}


def test_skipped_samples_may_be_as_many_as_they_like(any_url: str, any_client: redis.Redis) -> None:
    """If most of a source is unfit, the rest is an epoch, and each bad sample is counted with its reason."""
    with pytest.raises(EpochFailed, match=r"samples are bad, --max-bad 50% allows 60"):
        produce(any_url, dataset("most_fail"))
    any_client.flushall()
    summary = produce(any_url, dataset("most_fail"), on_error="skip", max_bad="1")
    assert (summary.samples, summary.bad) == (SAMPLES, 84)
    assert len(read_epoch(any_url)) == SAMPLES - 84
    (key,) = any_client.scan_iter("*:quarantine")
    assert any_client.hlen(key) == 84


def test_of_an_iterator_the_share_is_taken_at_its_end(any_url: str, any_client: redis.Redis) -> None:
    """The length of an iterator is not known before, but a number limits it at once."""
    source = GeneratorConfig(
        name="tests.producer.test_too_many_bad:feed", transform="tests.producer.made:every_tenth_fails"
    )
    with pytest.raises(EpochFailed, match="12 of 120 samples are bad, --max-bad 9% allows 10"):
        produce(any_url, source, max_bad="9%")
    assert states(any_client) == {b"0": b"abandoned"}
    assert produce(any_url, source, max_bad="10%").bad == BAD


def feed() -> Iterator[int]:
    """A generator of numbers."""
    yield from range(SAMPLES)


def with_one_huge() -> Iterator[dict[str, Any]]:
    """Thirty images, of which one is larger than a block may be."""
    yield from ({"x": np.zeros(3_000_000 if n == 17 else 1000 + n, np.uint8)} for n in range(30))


with_a_huge_one = list(with_one_huge())


@pytest.mark.parametrize(
    "source",
    [
        DatasetConfig(name="tests.producer.test_too_many_bad:with_a_huge_one"),
        GeneratorConfig(name="tests.producer.test_too_many_bad:with_one_huge"),
    ],
)
def test_a_sample_that_no_block_may_hold_is_a_bad_one(
    any_url: str, any_client: redis.Redis, source: SourceConfig
) -> None:
    """It ended the epoch, and nobody learned which of a million images it was."""
    plan: dict[str, Any] = {"spec": {"x": ("uint8", (None,))}, "budget_bytes": 8_000_000, "shuffle": False}
    summary = produce(any_url, source, **plan)
    assert (summary.samples, summary.bad, len(read_epoch(any_url))) == (30, 1, 29)
    ((_, why),) = any_client.hgetall(next(any_client.scan_iter("*:0:quarantine"))).items()
    assert b"[17]: a block of 2.9 MiB does not fit a quarter of the budget" in why
    assert b"raise budget_bytes (--budget) to 12000000" in why
    with pytest.raises(EpochFailed, match=r"\[17\]: a block of 2.9 MiB does not fit a quarter"):
        produce(any_url, source, **plan, on_error="fail", seed=1)


def test_what_does_not_fit_a_declared_spec_is_a_bad_sample(any_url: str, any_client: redis.Redis) -> None:
    """A sample that does not match is counted, named by tensor and item, and left out."""
    summary = produce(any_url, dataset("grows"), spec={"x": ("int32", (4,))}, shuffle=False)
    assert (summary.samples, summary.bad) == (SAMPLES, 1)
    assert len(read_epoch(any_url)) == SAMPLES - 1
    stream = next(any_client.scan_iter("*:0:quarantine"))
    ((_, why),) = any_client.hgetall(stream).items()
    assert b"tensor 'x': found" in why
    assert b"numbers[119]" in why


@pytest.mark.parametrize("on_error", ["quarantine", "skip"])
def test_what_does_not_fit_a_guessed_spec_fails_the_epoch(any_url: str, any_client: redis.Redis, on_error: str) -> None:
    """The first sample may have been the odd one: tensor, sample, found, expected are named, nothing is dropped."""
    with pytest.raises(EpochFailed, match=r"tensor 'x': found .*5.* expected .*4.*numbers\[119\]"):
        produce(any_url, dataset("grows"), shuffle=False, on_error=on_error)
    assert states(any_client) == {b"0": b"abandoned"}
    assert not list(any_client.scan_iter("*:quarantine"))


def test_a_batch_that_does_not_fit_a_declared_spec_is_bad_as_a_whole(any_url: str) -> None:
    """All or nothing, because the bad row is unknown."""

    class Sequence:
        __module__ = "keras.utils"

        def __len__(self) -> int:
            return 6

        def __getitem__(self, item: int) -> tuple[Any, Any]:
            return np.zeros((5, 2 + (item == 3)), np.float32), np.arange(5)

    config = LocalConfig(token=register(Sequence()))
    spec = {"x": ("float32", (2,)), "y": ("int64", ())}
    summary = produce(any_url, config, spec=spec)
    assert (summary.samples, summary.bad) == (30, 5)


def test_a_writers_epoch_is_abandoned_by_a_sample_that_does_not_fit(any_url: str, any_client: redis.Redis) -> None:
    """Trainers end with the committed samples, and do not wait for the rest. The error says what was found."""
    with Writer("train", url=any_url, tuning=Tuning(notify=lambda _: None)) as writer:
        with (
            pytest.raises(SpecMismatch, match=r"tensor 'x': found shape \(2,\), expected shape \(\)") as told,
            writer.epoch() as epoch,
        ):
            epoch.write({"x": 1})
            epoch.write({"x": [1, 2]})
        assert told.value.tensor == "x"
    assert states(any_client) == {b"0": b"abandoned"}
