"""The parts of a split side by side: none waits for the other, and none is left waiting when another fails."""

from __future__ import annotations

import time

import pytest
import redis

import penstock
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.streams import load_stream
from penstock_producer.planning.plan import EpochFailed, ProductionPlan
from penstock_producer.planning.productions import Productions
from penstock_producer.sources.config import DatasetConfig
from penstock_producer.working.worker import WorkerOptions


def plan(part: str, transform: str, **options: object) -> ProductionPlan:
    """The numbers, in a stream of the part's own."""
    source = DatasetConfig(name="tests.producer.made:numbers", transform=f"tests.producer.made:{transform}")
    return ProductionPlan(stream=f"digits.{part}", source=source, **options)  # type: ignore[arg-type]


def test_a_part_that_nobody_reads_does_not_hold_up_the_other(any_url: str) -> None:
    """Training comes before validation: while the first fills its budget, all of the second must be made."""
    plans = {
        "train": plan("train", "wide", budget_bytes=16 << 20, block_bytes=1 << 20),
        "val": plan("val", "with_pid", epochs=3),
    }
    with penstock.Loader("digits.train", group="late", batch_size=1, url=any_url, timeout_s=30) as _:
        options = WorkerOptions(url=any_url, queue_url=any_url)
        with Productions(plans, options, workers={"train": 1, "val": 1}) as productions:
            deadline, done = time.monotonic() + 30, dict.fromkeys(plans, 0)
            for part, look in productions.run():
                done[part] = look.done
                assert time.monotonic() < deadline, done
                if done["val"] == 360 and 0 < done["train"] < 120:
                    break


def test_a_part_that_fails_ends_the_others(any_url: str) -> None:
    """A trainer would read one part, and wait for ever for the other."""
    plans = {"train": plan("train", "very_slowly"), "val": plan("val", "every_tenth_fails", max_bad="3")}
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with (
        pytest.raises(EpochFailed, match="samples are bad"),
        Productions(plans, options, workers={"train": 1, "val": 1}) as productions,
    ):
        for _ in productions.run():
            pass
    with redis.Redis.from_url(any_url) as client:
        for part in plans:
            states = retained_epochs(client, load_stream(client, f"digits.{part}"))
            assert set(states.values()) == {"abandoned"}
