"""`penstock monitor`: what it shows of three prepared situations, and that it ends as a script expects."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.stream.groups.roster import note_wait
from penstock_common.stream.streams import load_stream
from penstock_producer.write.writer import EpochWriter

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
QUICK = ["--once", "--every", "0.2"]


def write(epoch: EpochWriter, count: int) -> None:
    """Write shard 0 with one sample an entry."""
    with epoch.shard(0) as part:
        for number in range(count):
            part.write({"x": np.full(1000, number % 251, dtype=np.uint8)})


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """Return the record that programs get of the one stream."""
    assert main(["monitor", "train", "--json", *QUICK, *argv]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    return record


def test_a_group_that_read_nothing_has_read_no_part_of_an_epoch_with_bad_samples(
    any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad sample is given to no group, so it shows no progress of one."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    spec = {"x": ("uint8", (10,))}
    with penstock.Writer("train", url=any_url, spec=spec) as writer, writer.epoch(sizes=[20]) as epoch:
        assert main(["groups", "declare", "train", "night"]) == 0
        with epoch.shard(0) as part:
            for number in range(16):
                part.write({"x": np.full(10, number, dtype=np.uint8)})
            for number in range(4):
                part.quarantine(f"file {number} is damaged")
    with penstock.Loader("train", group="day", batch_size=4, url=any_url) as loader:
        assert sum(batch.size for batch in loader) == 16
    capsys.readouterr()
    assert main(["monitor", "train", *QUICK]) == 0
    assert "day 100%, night 0%" in capsys.readouterr().out


def test_one_look_tells_who_is_there_and_what_holds_the_stream_up(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user without experience of Penstock finds with this alone why a training is slow."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer(
        "train", url=any_url, spec={"x": ("uint8", (1000,))}, tuning=penstock.Tuning(block_bytes=1)
    ) as writer:
        with writer.epoch(sizes=[30]) as epoch:
            assert shown(capsys)["bottleneck"]["cause"] == "no trainers"
            write(epoch, 30)
        with penstock.Loader(
            "train", group="resnet", batch_size=4, url=any_url, tuning=penstock.Tuning(member="gpu-0")
        ) as loader:
            next(iter(loader))
            record = shown(capsys)
            (group,) = record["groups"]
            (member,) = group["members"]
            assert (member["name"], member["is_silent"]) == ("gpu-0", False)
            assert record["epochs"][0]["committed"] == 30
            assert record["held_bytes"] == 30_000

            # a member that died while it held entries: its last report is a minute old
            stream = load_stream(any_client, "train")
            roster = stream.partitions[0].roster
            key = stream.partitions[0].entries(0)
            now_ms = int(any_client.time()[0]) * 1000
            (first, *_), *_ = any_client.xrange(key, count=1)
            any_client.xclaim(key, "resnet", "gpu-1", 0, [first])
            dead = json.dumps({"inc": "x", "seen": now_ms - 60_000})
            any_client.hset(roster, "m:resnet:gpu-1", dead)
            found = shown(capsys)["bottleneck"]
            assert found["cause"] == "dead member"
            assert "member gpu-1 of group resnet was not heard of for 6" in found["text"]
            assert "it holds 1 entry" in found["text"]
            any_client.hdel(roster, "m:resnet:gpu-1")
            any_client.xclaim(key, "resnet", "gpu-0", 0, [first])

            # a server that is full of other things
            note_wait(
                any_client, stream.partitions[0], 0, 0, waited_s=5, need_bytes=9, held_bytes=9, why="memory",
                is_next=True,
            )  # fmt: skip
            found = shown(capsys)
            assert found["bottleneck"]["cause"] == "memory"
            assert found["waiting"]["writers"] == 1
            assert found["bottleneck"]["remedy"].startswith('redis-cli -u "$PENSTOCK_URL" CONFIG SET maxmemory ')

        assert main(["monitor", *QUICK]) == 0
        out = capsys.readouterr().out
        for words in ("stream train", "30 of 30", "resnet", "budget"):
            assert words in out
        assert out.isascii()  # no boxes, bars and colours in a pipe


def test_a_host_whose_workers_went_silent_stays_on_the_screen(
    any_url: str, any_client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host without power reports nothing, so its row turns red."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    with penstock.Writer("train", url=any_url, spec={"x": ("uint8", ())}) as writer:
        key = writer.stream.keys.rates
    now_ms = int(any_client.time()[0]) * 1000
    said = {"rate": 20.0, "shares": {"busy": 1.0}, "samples": 7}
    for name, ago_s in (("gpu-7.a", 40), ("gpu-7.b", 41), ("gpu-8.a", 0), ("gpu-8.killed", 40)):
        any_client.hset(key, f"w:{name}", json.dumps({**said, "seen": now_ms - ago_s * 1000}))
    record = shown(capsys)
    assert [(one["host"], one["workers"]) for one in record["workers"]] == [("gpu-8", 1)]
    (silent,) = record["silent_workers"]  # another fleet's dead workers are replaced, and none of them is reported
    assert (silent["host"], silent["workers"], 40 <= silent["seen_s"] < 100) == ("gpu-7", 2, True)
    assert main(["monitor", *QUICK]) == 0
    assert "gpu-7: silent for 4" in capsys.readouterr().out
    assert main(["doctor", "--no-probe"]) == 0
    assert "silent workers: not heard of for 10 s or more, and not signed off: 2 of gpu-7" in capsys.readouterr().out


def test_it_ends_quietly_with_ctrl_c_and_prints_lines_into_a_log(any_url: str) -> None:
    """A monitor in a log must not fill it with boxes, and stopping it is not an error."""
    with penstock.Writer("train", url=any_url, spec={"x": ("uint8", (1000,))}) as writer, writer.epoch() as epoch:
        write(epoch, 3)
        command = [sys.executable, "-m", "penstock", "monitor", "train", "--every", "0.2", "--url", any_url]
        environment = {**os.environ, "PYTHONPATH": _PATHS}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as ran:
            assert ran.stdout is not None
            first, second = ran.stdout.readline(), ran.stdout.readline()
            ran.send_signal(signal.SIGINT)
            _, err = ran.communicate(timeout=60)
    assert (ran.returncode, err) == (0, "")
    assert first.startswith("train: ? in, 3 KiB of 1024 MiB; nobody reads")
    assert second.startswith("train: 0/s in")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["monitor", "trian", "--once"], "penstock: no stream 'trian'"),
        (["monitor", "--url", "redis://127.0.0.1:1"], "penstock: no Redis answers at redis://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_watched_is_one_line(
    argv: list[str], line: str, any_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typo ends at once, and not in an empty screen."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    assert main(argv) == 1
    _, err = capsys.readouterr()
    assert err.startswith(line)
    assert err.count("\n") == 1
