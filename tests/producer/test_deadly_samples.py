"""Samples that end their workers: the worker is replaced, the sample is named, and the epoch goes on to its end."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock_common.errors import EpochFailed
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import ABANDONED, retained_epochs
from penstock_common.stream.streams import create_stream, load_stream
from penstock_producer.jobs import watchdog
from penstock_producer.jobs.fill import TooManyBad
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import ProductionSummary
from penstock_producer.jobs.queue import DEATHS
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import DatasetConfig, GeneratorConfig, LocalConfig
from penstock_producer.sources.names import register
from tests.producer.deadly import DEEDS, SAMPLES, good
from tests.producer.reading import read_epoch


def produce(
    url: str,
    transform: str | GeneratorConfig | LocalConfig,
    *,
    told: list[str] | None = None,
    memory: int | None = None,
    **plan: Any,
) -> ProductionSummary:
    """One production by two workers to its end."""
    named = DatasetConfig(name="tests.producer.deadly:numbers", transform=f"tests.producer.deadly:{transform}")
    source = named if isinstance(transform, str) else transform
    asked = ProductionPlan(stream="train", source=source, **plan)
    options = replace(WorkerOptions(url=url, queue_url=url), memory_bytes=memory)
    with Production(asked, options, workers=2, notify=(told if told is not None else []).append) as production:
        for _ in production.run():
            pass
        return production.summary()


def reasons(client: redis.Redis) -> list[str]:
    """All that is in quarantine, sorted."""
    found: list[str] = []
    for key in client.scan_iter("*:quarantine"):
        values: Any = client.hvals(key)
        found += [json.loads(value)["why"] for value in values]
    return sorted(found)


def made(url: str) -> list[int]:
    """The numbers of epoch 0."""
    return sorted(int(sample["x"][0]) for sample in read_epoch(url).values())


def test_samples_that_crash_hang_or_walk_out_are_named_and_the_rest_is_made(
    any_url: str, any_client: redis.Redis
) -> None:
    """A decoder's bug in one file must cost that file, not the night's training."""
    summary = produce(any_url, "deadly", sample_limit_s=1.0, shard_samples=20)
    assert made(any_url) == [number for number in range(SAMPLES) if number not in DEEDS]
    assert (summary.samples, summary.bad) == (SAMPLES, len(DEEDS))
    expected = {
        5: "killed its worker by SIGSEGV, 3 times",
        17: "ended its worker with exit code 3, 3 times",
        18: "ended its worker with exit code 0, 3 times",
        33: "took its worker longer than 1 s (--sample-limit), 2 times",
        34: "called sys.exit('enough')",
        50: "killed its worker by SIGSEGV, 3 times",
    }
    name = "tests.producer.deadly:numbers"
    assert reasons(any_client) == sorted(f"{name}[{number}]: {why}" for number, why in expected.items())


def test_an_item_of_an_iterator_that_ends_its_worker_is_left_out(any_url: str, any_client: redis.Redis) -> None:
    """A generator begins again for each worker, so the note must have the item's position."""
    name = "tests.producer.deadly:numbers"
    source = GeneratorConfig(name=name, transform="tests.producer.deadly:fifth_walks_out")
    summary = produce(any_url, source)
    assert (summary.samples, summary.bad) == (SAMPLES, 1)
    assert made(any_url) == [number for number in range(SAMPLES) if number != 5]
    assert reasons(any_client) == [f"{name}[5]: ended its worker with exit code 0, 3 times"]


def test_an_iterator_that_ends_its_worker_each_time_fails_the_epoch_by_the_shards_name(any_url: str) -> None:
    """No sample is to blame. Its user read "see what it said above" after three tries, and nothing was above."""

    def feed() -> Iterator[dict[str, Any]]:
        yield from map(good, range(25))
        os._exit(7)

    told: list[str] = []
    with pytest.raises(EpochFailed, match=r"^shard 0 of .* with exit code 7, the last of 15 .* no more than 0 samples"):
        produce(any_url, LocalConfig(token=register(feed)), told=told)
    assert sum("ended with exit code 7; another takes its place" in line for line in told) == DEATHS
    with connect(any_url) as client:
        assert retained_epochs(client, load_stream(client, "train")) == {0: ABANDONED}


def test_a_sample_that_interrupts_its_worker_is_left_out_by_name(any_url: str, any_client: redis.Redis) -> None:
    """A library may raise KeyboardInterrupt. The epoch ended with that word and no sample's name."""

    def interrupts(number: int) -> dict[str, Any]:
        if number == 13:
            raise KeyboardInterrupt
        return good(number)

    source = LocalConfig(token=register(range(SAMPLES)), transform=register(interrupts))
    summary = produce(any_url, source, shuffle=False)
    assert (summary.samples, summary.bad) == (SAMPLES, 1)
    (reason,) = reasons(any_client)
    assert re.fullmatch(r"range local-\w+\[13\]: KeyboardInterrupt \(test_deadly_samples.py:\d+\)", reason)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_an_iterator_that_interrupts_its_worker_fails_the_epoch_by_the_items_number(
    any_url: str, error: BaseException
) -> None:
    """As any other error of an iterator does."""

    def feed() -> Iterator[dict[str, Any]]:
        yield from map(good, range(13))
        raise error

    with pytest.raises(EpochFailed, match=rf" failed at item 13: {type(error).__name__}"):
        produce(any_url, LocalConfig(token=register(feed)))


def test_a_transform_that_crashes_at_random_completes_with_every_sample(
    any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flaky native library: what is good is found to be good, however many workers it takes."""
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    told: list[str] = []
    summary = produce(any_url, "crashes_at_random", told=told, shard_samples=30)
    assert sum("killed by SIGSEGV" in line for line in told) >= 3
    assert made(any_url) == list(range(SAMPLES)), reasons(any_client)
    assert (summary.samples, summary.bad) == (SAMPLES, 0)


def test_a_transform_that_always_crashes_is_said_before_any_worker_tries_it(any_url: str) -> None:
    """The command itself must survive to report it, without a wait for hundreds of dying workers."""
    with pytest.raises(TooManyBad, match=r"none of the first 5 samples can be made; the last: .*by SIGSEGV"):
        produce(any_url, "always_segfaults")


def test_a_production_that_cannot_begin_closes_its_writer(any_url: str) -> None:
    """The stream is there, so its writer is opened before a first sample gives the spec. It has a thread of its own."""
    with connect(any_url) as client:
        create_stream(client, "train")
    with pytest.raises(TooManyBad, match="none of the first 5 samples can be made"):
        produce(any_url, "always_segfaults")
    assert [thread.name for thread in threading.enumerate() if thread.name == "penstock-cleaner-train"] == []


def test_a_first_sample_that_hangs_is_passed_over(any_url: str) -> None:
    """Which sample is first is the seed's choice: its command must not stand still with it."""
    summary = produce(any_url, "first_hangs", sample_limit_s=0.5, shard_samples=SAMPLES, shuffle=False)
    assert (summary.samples, summary.bad) == (SAMPLES, 1)


def test_where_bad_samples_are_not_wanted_a_deadly_one_fails_the_epoch_by_name(any_url: str) -> None:
    """`--on-error fail` is for those who would rather have no epoch; the file's name is what they need."""
    with pytest.raises(EpochFailed, match=r"deadly:numbers\[\d+\]: (killed|ended) its worker .*, 3 times"):
        produce(any_url, "deadly", on_error="fail", shuffle=False)


def test_a_worker_that_leaks_is_replaced_and_its_sample_is_not_to_blame(
    any_url: str, any_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leaking library would take the machine with it; a fresh process costs a second."""
    monkeypatch.setattr(watchdog, "RIPE_S", 0.5)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.1)
    told: list[str] = []
    summary = produce(any_url, "leaks", told=told, memory=400 << 20, shard_samples=30)
    assert any("held more than 400 MiB of memory; another takes its place" in line for line in told)
    assert made(any_url) == list(range(SAMPLES))
    assert (summary.bad, reasons(any_client)) == (0, [])
