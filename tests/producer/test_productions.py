"""The parts of a split side by side: none waits for the other, and none is left waiting when another fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import redis
from PIL import Image

import penstock
from penstock_common.errors import EpochFailed, PenstockError, StreamConflict
from penstock_common.stream import manifest
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_common.stream.directory import list_streams
from penstock_common.stream.feeds import close_epoch
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.streams import Stream, load_stream, read_counters
from penstock_producer.jobs.allowlist import ANYTHING
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production, SplitProduction
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import DatasetConfig, ImagesConfig
from tests.producer.reading import read_epoch


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
    with penstock.Loader(
        "digits.train", group="late", batch_size=1, url=any_url, tuning=penstock.Tuning(timeout_s=30)
    ) as _:
        options = WorkerOptions(url=any_url, queue_url=any_url)
        with SplitProduction(plans, options, workers={"train": 1, "val": 1}) as productions:
            deadline, done = time.monotonic() + 30, dict.fromkeys(plans, 0)
            for part, look in productions.run():
                done[part] = look.done
                assert time.monotonic() < deadline, done
                if done["val"] == 360 and 0 < done["train"] < 120:
                    break


def test_a_part_that_fails_ends_the_others(any_url: str) -> None:
    """A trainer would read one part, and wait for ever for the other."""
    plans = {"train": plan("train", "very_slowly"), "val": plan("val", "every_tenth_fails", max_bad="3")}
    options, said = WorkerOptions(url=any_url, queue_url=any_url), list[str]()
    with (
        pytest.raises(EpochFailed, match="samples are bad"),
        SplitProduction(plans, options, workers={"train": 1, "val": 1}, notify=said.append) as productions,
    ):
        for _ in productions.run():
            pass
    with redis.Redis.from_url(any_url) as client:
        for part in plans:
            states = retained_epochs(client, load_stream(client, f"digits.{part}"))
            assert set(states.values()) == {"abandoned"}
            assert [line for line in said if f"`penstock delete digits.{part}` gives it back" in line]


def test_a_source_without_a_good_sample_makes_no_stream(any_url: str) -> None:
    """Each stream takes half of the memory that is left, so ten failed tries would leave nothing for the next."""
    with pytest.raises(PenstockError, match="samples can be made"):
        Production(plan("train", "always_fails"), WorkerOptions(url=any_url, queue_url=any_url), workers=1)
    with redis.Redis.from_url(any_url) as client:
        assert list_streams(client) == []


def test_a_failed_first_epoch_tells_how_to_give_the_budget_back(any_url: str) -> None:
    """With a declared spec the stream is made before its first sample, and trainers may be waiting for it."""
    said: list[str] = []
    asked = plan("train", "always_fails", spec={"x": ("int32", (4,)), "pid": ("int64", ())}, budget_bytes=64 << 20)
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with (
        pytest.raises(EpochFailed),
        Production(asked, options, workers=1, notify=said.append) as production,
    ):
        for _ in production.run():
            pass
    advice = "which keeps its budget of 64 MiB for the next run; `penstock delete digits.train` gives it back"
    assert said[-1] == f"this run made stream 'digits.train', {advice}"
    with (
        pytest.raises(EpochFailed),
        Production(asked, options, workers=1, notify=said.append) as production,
    ):
        for _ in production.run():
            pass
    assert len([line for line in said if advice in line]) == 1  # the second run made no stream


def test_a_source_that_takes_long_to_open_is_named(any_url: str) -> None:
    """A constructor that reads an index for a minute looks like a command that hangs, and the workers repeat it."""
    said: list[str] = []
    source = DatasetConfig(name="tests.producer.made:late_numbers", transform="tests.producer.made:with_pid")
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with Production(ProductionPlan(stream="late", source=source), options, workers=1, notify=said.append):
        pass
    assert said[0] == "waiting: the source of 'late' is being opened, and each worker does that once more"
    threads = [thread.name for thread in threading.enumerate()]
    with Production(plan("train", "with_pid"), options, workers=1, notify=said.append):
        pass
    assert not any("is being opened" in line for line in said[1:])
    assert [thread.name for thread in threading.enumerate()] == threads  # what is forked next has one thread


# --- two productions of one stream ------------------------------------------------------------------------------------


def numbers(**options: object) -> ProductionPlan:
    """The numbers in shards of a fixed size, so that nothing but its source and options tells a plan from another."""
    source = DatasetConfig(name="tests.producer.made:numbers", transform="tests.producer.made:with_pid")
    return ProductionPlan(stream="digits", **{"source": source, "shard_samples": 30} | options)  # type: ignore[arg-type]


OTHERS: dict[str, dict[str, object]] = {
    "source": {"source": DatasetConfig(name="tests.producer.made:numbers", transform="tests.producer.made:slowly")},
    "seed": {"seed": 7},
    "order": {"shuffle": False},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_production_refuses_an_epoch_that_another_began_with_other_samples(any_url: str, other: str) -> None:
    """Both planned the same epoch, and each made some of its shards, so the epoch was an unplanned mixture."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    first = Production(numbers(), options, workers=1)
    second = Production(numbers(**OTHERS[other]), options, workers=0)
    with first:
        looks = first.run()
        next(looks)
        with second, pytest.raises(StreamConflict) as caught:
            next(second.run())
        assert first.epochs == second.epochs == (0,)
        list(looks)
        assert first.summary().samples == 120
    wanted = "its seed is 0, not 7" if other == "seed" else "its fingerprint (of the source and its order) is "
    assert f"epoch 0 of 'digits' belongs to another production: {wanted}" in str(caught.value)
    assert "give this one another stream name, or start both with the same source and options" in str(caught.value)
    assert sorted(int(sample["x"][0]) for sample in read_epoch(any_url, stream_name="digits").values()) == list(
        range(120)
    )


def test_a_production_whose_number_is_taken_leaves_the_plan_to_the_other(
    any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers waited for ever for epochs that it had announced, or in the one that it had open."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    first = Production(numbers(epochs=3), options, workers=1)
    others = [Production(numbers(seed=7, epochs=count), options, workers=0) for count in (5, 3, 1)]
    with first:
        looks = first.run()
        next(looks)
        stream = load_stream(any_client, "digits")
        for other in others:
            with other, pytest.raises(StreamConflict):
                next(other.run())
            assert read_counters(any_client, stream)[1] == 3
        monkeypatch.setattr(Dispatcher, "is_at_work", lambda *_: False)  # it looks as the first worker starts
        third = Production(numbers(seed=8, epochs=2), options, workers=0)
        with third:
            next(third.run())
            assert (third.epochs, read_counters(any_client, stream)[1]) == ((2, 3), 4)
            with pytest.raises(StreamConflict, match="epoch 2 of 'digits' belongs to another production"):
                list(looks)
        states = retained_epochs(any_client, stream)
    assert {epoch: states[epoch] in ("produced", "abandoned") for epoch in (0, 1)} == {0: True, 1: True}
    assert read_counters(any_client, stream)[1] == 4


def test_an_unfinished_epoch_is_continued_beside_another_production(any_url: str) -> None:
    """Both have epochs of their own, and trainers wait for the unfinished one first."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    slow = DatasetConfig(name="tests.producer.made:numbers", transform="tests.producer.made:slowly")
    with Production(numbers(seed=9), options, workers=0) as left:
        next(left.run())
    with Production(numbers(source=slow, epochs=2), options, workers=1) as other:
        looks = other.run()
        next(looks)
        while not other._dispatcher.is_at_work(other._in_work()[0].manifest.id):
            next(looks)
        with Production(numbers(seed=9), options, workers=0) as resumed:
            assert (resumed.epochs, other.epochs) == ((0,), (1, 2))


def test_a_production_is_refused_while_another_has_more_epochs_to_make(any_url: str) -> None:
    """Both would open the same number later, and one of them would fail in the middle."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    slow = DatasetConfig(name="tests.producer.made:numbers", transform="tests.producer.made:slowly")
    with Production(numbers(source=slow, epochs=4), options, workers=1) as first:
        looks = first.run()
        next(looks)
        while not first._dispatcher.is_at_work(first._in_work()[0].manifest.id):
            next(looks)
        following = max(run.manifest.epoch for run in first._in_work()) + 1
        said = f"another production is making epoch 0 of 'digits', and will make epoch {following}: wait for its end"
        with pytest.raises(StreamConflict, match=said):
            Production(numbers(), options, workers=0)


def test_a_production_refuses_an_epoch_that_a_feed_began(any_url: str) -> None:
    """It would have given the feed's epoch an end, and ended the feed with it."""
    with Production(numbers(), WorkerOptions(url=any_url, queue_url=any_url), workers=0) as production:
        feed = penstock.Writer("digits", url=any_url)
        feed.write({"x": np.zeros(4, np.int32), "pid": 1})
        with pytest.raises(StreamConflict, match="its kind is feed, not epoch"):
            next(production.run())
        feed.close()


def test_two_productions_of_one_source_share_its_epochs(any_url: str) -> None:
    """A user may run the same command on two hosts to have more workers."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with Production(numbers(), options, workers=1) as first, Production(numbers(), options, workers=1) as second:
        running = {production: production.run() for production in (first, second)}
        while running:
            for production in list(running):
                if next(running[production], None) is None:
                    del running[production]
        assert first.summary().samples == second.summary().samples == 120
    assert sorted(int(sample["x"][0]) for sample in read_epoch(any_url, stream_name="digits").values()) == list(
        range(120)
    )


def test_an_epoch_that_an_operator_abandons_as_it_is_opened_ends_the_production(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no shards then, and the production ended with IndexError."""
    size = manifest.size_epoch

    def abandon_and_size(client: Client, stream: Stream, opened: manifest.Manifest, sizes: Sequence[int]) -> str:
        manifest.abandon_epoch(client, stream, opened.epoch)
        return size(client, stream, opened, sizes)

    monkeypatch.setattr(manifest, "size_epoch", abandon_and_size)
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with (
        pytest.raises(EpochFailed, match=r"epoch 0 of 'digits\.train' was abandoned"),
        Production(plan("train", "with_pid"), options, workers=0) as production,
    ):
        for _ in production.run():
            pass


def test_an_epoch_that_an_operator_closes_leaves_no_job_behind(any_url: str) -> None:
    """Nobody needs its jobs any more, and they stayed in the queue for ever if no worker came."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with (
        connect(any_url) as operator,
        Production(plan("train", "with_pid"), options, workers=0) as production,
    ):
        for look in production.run():
            if look.epochs[0].state == manifest.SIZED:
                close_epoch(operator, load_stream(operator, "digits.train"), 0)
    with redis.Redis.from_url(any_url) as client:
        assert not client.keys("rq:job:*")
        assert not client.keys("rq:queue:*")


def folder_of(path: Path, *classes: str) -> ImagesConfig:
    """Make a folder with one image for each class, and return its config."""
    for shade, name in enumerate(classes):
        (path / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(path / name / "a.png")
    return ImagesConfig(path=str(path))


def test_a_class_keeps_its_number_in_all_epochs_of_a_stream(any_url: str, tmp_path: Path) -> None:
    """Labels are numbers. A folder with one class more gave circles the number of crosses, and no word about it."""
    options = WorkerOptions(url=any_url, queue_url=any_url)

    def produce(source: ImagesConfig) -> dict[str, list[str]]:
        with Production(ProductionPlan(stream="photos", source=source), options, workers=1) as production:
            for _ in production.run():
                pass
        with connect(any_url) as client:
            names: dict[str, list[str]] = load_stream(client, "photos").info["classes"]
        return names

    assert produce(folder_of(tmp_path / "first", "circle", "cross")) == {"y": ["circle", "cross"]}
    more = folder_of(tmp_path / "more", "arrow", "circle", "cross")
    with pytest.raises(StreamConflict) as caught:
        produce(more)
    assert "class 0 is 'circle' in stream 'photos', and 'arrow' in this source" in str(caught.value)
    assert "keep its numbers with --classes circle,cross,arrow, or write another stream" in str(caught.value)
    assert produce(more.model_copy(update={"classes": ("circle", "cross", "arrow")})) == {
        "y": ["circle", "cross", "arrow"]
    }
    # fewer classes with the same numbers leave the names of the others
    assert produce(folder_of(tmp_path / "few", "circle")) == {"y": ["circle", "cross", "arrow"]}


def test_a_worker_that_goes_on_sees_the_files_that_came(any_url: str, tmp_path: Path) -> None:
    """It kept the folder as it had opened it, and its first job of the next epoch failed that epoch."""
    options = WorkerOptions(url=any_url, queue_url=any_url, allowlist=ANYTHING)
    fleet = Fleet(options, 1)
    try:
        for classes in (("circle",), ("circle", "cross")):
            plan = ProductionPlan(stream="photos", source=folder_of(tmp_path, *classes))
            with Production(plan, options, workers=0) as production:
                (*_, last) = production.run()
            assert last.done == len(classes)
            assert not last.bad
    finally:
        fleet.stop()


def test_an_unfinished_epoch_of_another_source_is_named(any_url: str) -> None:
    """A run that was interrupted and started again with another transform left an epoch that trainers wait for."""
    options = WorkerOptions(url=any_url, queue_url=any_url)
    with Production(numbers(), options, workers=0) as production:
        next(production.run())
    told: list[str] = []
    with Production(numbers(seed=7), options, workers=0, notify=told.append):
        pass
    with Production(numbers(), options, workers=0, notify=told.append):  # it continues its own
        pass
    (said,) = [line for line in told if "is unfinished" in line]
    assert said.startswith("epoch 0 of 'digits' is unfinished, 0 of 120 samples of whole shards")
    assert (
        "unless its command still runs, run it again, or end the epoch as it is: `penstock epochs close digits 0`"
        in said
    )
