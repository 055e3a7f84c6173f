"""Rates that workers and trainers report are shown, expire, and are removed with the stream."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.errors import DamagedKey
from penstock_common.rate_meter import RateMeter
from penstock_common.stream.client import connect
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.reported_rates import (
    GONE_MS,
    REPORT_COUNTS_MS,
    RateReporter,
    load_reported_rates,
    trainer_field,
    worker_field,
)
from penstock_common.stream.streams import Stream, load_stream
from penstock_producer.jobs.autoscaler import Autoscaler
from tests.contracts.feed import produce

PATIENCE_S = 60.0


@pytest.fixture
def stream(any_url: str) -> Stream:
    """An empty stream."""
    with penstock.Writer("train", url=any_url, spec={"x": ("int64", ())}) as writer:
        return writer.stream


def paced(rate: float) -> RateMeter:
    """Return the pace of a process that worked for a second and waited as long."""
    now = [0.0]
    pace = RateMeter("busy", clock=lambda: now[0])
    pace.enter("busy")
    now[0] = 1.0
    pace.count(int(rate))
    pace.enter("room")
    now[0] = 2.0
    return pace


def test_inspect_shows_the_wish_and_what_it_is_made_of(
    any_url: str, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user who sizes a fleet must see why: rates and waits, for people and for programs."""
    with connect(any_url) as client:
        for name in ("one", "two"):
            RateReporter(client, stream, worker_field(name)).send({"rate": 20.0, "shares": {"busy": 1.0}, "samples": 7})
        RateReporter(client, stream, trainer_field("resnet", "host-1")).send(
            {"rate": 81.0, "shares": {}, "samples": 64}
        )
        RateReporter(client, stream, trainer_field("resnet", "host-2")).send(
            {"rate": 30.0, "shares": {}, "samples": 64}
        )
    assert main(["inspect", "train", "--url", any_url]) == 0
    assert "2 workers, wished 6: trainers would take 111 samples/s, one worker makes 20/s" in capsys.readouterr().out
    assert main(["inspect", "train", "--json", "--url", any_url]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["staffing"] == {
        "workers": 2, "wished": 6, "worker_rate": 20.0, "group_rates": {"resnet": 111.0}, "busy": 1.0, "room": 0.0,
        "idle": 0.0,
    }  # fmt: skip
    assert [worker["name"] for worker in view["workers"]] == ["one", "two"]


def test_a_loop_that_does_nothing_wishes_for_more_workers_than_can_be_told(
    any_url: str, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run without a training step takes millions of samples a second, for which no fleet should grow."""
    with connect(any_url) as client:
        RateReporter(client, stream, worker_field("one")).send({"rate": 20.0, "shares": {"busy": 1.0}, "samples": 7})
        RateReporter(client, stream, trainer_field("dry", "host-1")).send({"rate": 4e6, "shares": {}, "samples": 64})
    assert main(["inspect", "train", "--url", any_url]) == 0
    assert "1 worker, wished more than can be told: trainers would take" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["worker", "--max", "3"], "--max goes with --auto"),
        (["worker", "--auto", "--burst"], "give one of them"),
        (["produce", "images", ".", "--watch", "--follow"], "--watch goes neither with --follow"),
        (["produce", "dataset", "json:loads", "--watch"], "--watch takes one folder of images"),
        (["produce", "dataset", "json:loads", "--follow", "--no-workers"], "--workers 0"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fleet that did something else than was meant would be found out on the bill."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the command's handlers are not this process's
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_who_is_silent_is_forgotten(any_url: str, stream: Stream) -> None:
    """A host that lost its power must not be counted for ever, nor leave anything behind."""
    with connect(any_url) as client, redis.Redis.from_url(any_url) as raw:
        RateReporter(client, stream, worker_field("dead")).report(paced(50.0))
        told = load_reported_rates(client, stream).workers["dead"]
        assert (told.rate, told.samples) == (50.0, 50)
        assert told.shares["room"] == pytest.approx(0.5, abs=0.05)
        said = json.loads(raw.hget(stream.keys.rates, "w:dead") or b"")
        raw.hset(stream.keys.rates, "w:dead", json.dumps({**said, "seen": said["seen"] - REPORT_COUNTS_MS - 1}))
        assert load_reported_rates(client, stream).workers == {}
        assert (
            load_reported_rates(client, stream).silent["dead"] > REPORT_COUNTS_MS / 1000
        )  # told of, and counted no more
        raw.hset(stream.keys.rates, "w:\x1b[2J", json.dumps({**said, "seen": said["seen"] - REPORT_COUNTS_MS - 1}))
        assert set(load_reported_rates(client, stream).silent) == {"dead"}  # no worker has such a name
        raw.hdel(stream.keys.rates, "w:\x1b[2J")
        raw.hset(stream.keys.rates, "w:dead", json.dumps({**said, "seen": said["seen"] - GONE_MS - 1}))
        assert load_reported_rates(client, stream).silent == {}
        alive = RateReporter(client, stream, worker_field("alive"))
        alive.report(paced(50.0))  # sweeps
        assert raw.hkeys(stream.keys.rates) == [b"w:alive"]
        alive.leave()
        assert not raw.exists(stream.keys.rates)
        raw.hset(stream.keys.rates, "w:odd", "no JSON")
        with pytest.raises(DamagedKey, match="paces"):
            load_reported_rates(client, stream)


def test_nothing_is_said_of_a_stream_that_was_deleted(any_url: str, stream: Stream) -> None:
    """Workers and trainers go on talking for a moment; a key that came back would stay for ever."""
    with connect(any_url) as client:
        reporter = RateReporter(client, stream, worker_field("one"))
        reporter.send({"rate": 1.0})
        delete_stream(client, "train")
        reporter.send({"rate": 1.0})
        assert list(client.scan_iter("penstock:*")) == []


def test_fleets_that_follow_one_wish_find_each_other(any_url: str, stream: Stream) -> None:
    """Two hosts with --auto must share what is wished, and a queue's server that is away changes nothing."""
    now = [0.0]
    scales = {
        name: Autoscaler(any_url, name, most, lambda: ["train", "no such stream"], clock=lambda: now[0])
        for name, most in (("a", 8), ("b", 4))
    }
    sizes = dict.fromkeys(scales, 1)
    with connect(any_url) as client:
        trainer = RateReporter(client, stream, trainer_field("resnet", "host-1"), clock=lambda: now[0])
        worker = RateReporter(client, stream, worker_field("one"), clock=lambda: now[0])
        for _ in range(40):
            now[0] += 2.1
            trainer.send({"rate": 179.0})
            worker.send({"rate": 20.0, "shares": {"busy": 1.0}})
            sizes = {name: scale.look(sizes[name]) for name, scale in scales.items()}
        assert sizes == {"a": 6, "b": 3}
        assert sizes == {name: scale.look(sizes[name]) for name, scale in scales.items()}  # not due yet
        assert {name: fleet.now for name, fleet in load_reported_rates(client, stream).fleets.items()} == sizes
        for scale in scales.values():
            scale.close()
        assert load_reported_rates(client, stream).fleets == {}


@pytest.mark.parametrize("order", [None, "canonical"], ids=["shared", "ordered"])
def test_a_trainer_tells_how_fast_it_would_be_if_it_never_waited(any_url: str, order: Any) -> None:
    """The wished number needs every loop, also those that read in order; and no starving one must look slow."""
    produce(any_url, "train", 200)
    with (
        connect(any_url) as client,
        penstock.Loader(
            "train",
            group="g",
            batch_size=10,
            url=any_url,
            order=order,
            tuning=penstock.Tuning(lease_s=3.0, notify=lambda line: None),
        ) as loader,
    ):
        batches = iter(loader)
        deadline = time.monotonic() + PATIENCE_S
        while not (told := [t.rate for t in load_reported_rates(client, loader.stream).trainers.values() if t.rate]):
            assert time.monotonic() < deadline
            next(batches)
            time.sleep(0.25)  # a step
        assert told == [pytest.approx(40, rel=0.25)]
    with connect(any_url) as client:
        assert not load_reported_rates(client, load_stream(client, "train")).trainers


def test_shares_stay_right_for_days() -> None:
    """A worker runs for months, and a laptop sleeps for a week."""
    now = [0.0]
    pace = RateMeter("busy", clock=lambda: now[0])
    pace.enter("busy")
    for seconds in (1e6, *[10.0] * 50_000):
        now[0] += seconds
        pace.look()
    pace.enter("room")
    now[0] += 10.0
    assert pace.look().shares == pytest.approx({"busy": 0.5, "room": 0.5})


def test_shares_of_the_last_ten_seconds_forget_what_was_before(any_url: str, stream: Stream) -> None:
    """The monitor judges by them: what two seconds show is chance, and what half a minute shows may be over."""
    now = [0.0]
    pace = RateMeter("busy", clock=lambda: now[0])

    def spend(seconds: int, kind: str) -> dict[str, float]:
        """Go on so for a while, and say so every two seconds; what was said last."""
        pace.enter(kind)
        for _ in range(seconds // 2):
            now[0] += 2.0
            reporter.report(pace)
        return load_reported_rates(client, stream).workers["one"].recent

    with connect(any_url) as client:
        reporter = RateReporter(client, stream, worker_field("one"), clock=lambda: now[0])
        assert spend(4, "busy") == {"busy": 1.0}
        assert spend(4, "room") == {"busy": 0.5, "room": 0.5}
        assert spend(4, "room") == {"busy": 0.2, "room": 0.8}
        assert spend(2, "room") == {"busy": 0.0, "room": 1.0}
        assert spend(2, "busy") == {"busy": 0.2, "room": 0.8}
