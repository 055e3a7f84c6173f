"""`penstock tail` follows new entries without reading them, and `penstock groups reset` lets a group read again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.__main__ import main
from penstock_common.stream.client import connect
from penstock_common.stream.index import IndexTail
from penstock_common.stream.keys import StreamKeys
from penstock_common.stream.servers.embedded import find_servers
from tests.clusters import started_cluster
from tests.contracts.feed import produce

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))


@pytest.fixture
def writer(any_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[penstock.Writer]:
    """Make a writer with two partitions, and one sample of 1000 bytes an entry."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    spec = {"x": ("uint8", (1000,))}
    with penstock.Writer("train", url=any_url, spec=spec, partitions=2, tuning=penstock.Tuning(block_bytes=1)) as made:
        yield made


def write(writer: penstock.Writer, sizes: list[int], *, bad: int = 0) -> None:
    """Write a whole epoch."""
    with writer.epoch(sizes=sizes) as epoch:
        for shard, size in enumerate(sizes):
            with epoch.shard(shard) as part:
                for number in range(size - bad):
                    part.write({"x": np.full(1000, number % 251, dtype=np.uint8)})
                for _ in range(bad):
                    part.quarantine("truncated")


def test_a_tail_tells_each_entry_once_and_where_it_lies(
    writer: penstock.Writer, any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A user learns whether anything arrives and what, as identities, and the server sends no payload."""
    write(writer, [3, 2])
    with connect(any_url) as client:
        tail = IndexTail(client, "train")
        assert tail.look() == []
        write(writer, [2, 4], bad=1)
        seen = tail.look()
        told = [(one.epoch, one.shard, one.first, one.end, one.samples, one.bad, one.bytes) for one in seen]
        assert sorted(told) == [
            (1, 0, 0, 1, 1, 0, 1000), (1, 0, 1, 2, 0, 1, 0),
            (1, 1, 0, 1, 1, 0, 1000), (1, 1, 1, 2, 1, 0, 1000), (1, 1, 2, 3, 1, 0, 1000), (1, 1, 3, 4, 0, 1, 0),
        ]  # fmt: skip
        assert tail.look() == []
        assert {one.entry for one in IndexTail(client, "train").last(4)} == {one.entry for one in seen if one.entry}
    assert main(["tail", "train", "--once", "-n", "6", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1, 1, 1]
    assert lines[-1]["stream"] == "train"
    assert main(["tail", "train", "--once", "-n", "4"]) == 0
    assert "epoch 1 shard 1 [2, 3)  1 samples, 1000 bytes  " in capsys.readouterr().out


def test_a_tail_follows_until_ctrl_c(writer: penstock.Writer) -> None:
    """Users leave it running in a window."""
    command = [sys.executable, "-m", "penstock", "tail", "train"]
    environment = {**os.environ, "PYTHONPATH": _PATHS}
    write(writer, [1])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as ran:
        assert ran.stdout is not None
        assert ran.stdout.readline().startswith("epoch 0 shard 0 [0, 1)")
        write(writer, [1])
        assert ran.stdout.readline().startswith("epoch 1 shard 0 [0, 1)")
        ran.send_signal(signal.SIGINT)
        assert ran.communicate(timeout=60)[1] == ""
    assert ran.returncode == 0


def test_a_tail_goes_on_after_a_failover() -> None:
    """The producer and the trainers that it watches do so."""
    with started_cluster(find_servers()[0], replicas=1) as cluster:
        produce(cluster.url, "train", 1, partitions=1)
        command = [sys.executable, "-m", "penstock", "tail", "train", "--url", cluster.url]
        environment = {**os.environ, "PYTHONPATH": _PATHS}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as ran:
            assert ran.stdout is not None
            assert ran.stdout.readline().startswith("epoch 0 shard 0 [0, 1)")
            cluster.lose_master_of(StreamKeys("train").meta, "kill")
            produce(cluster.url, "train", 1, partitions=1)
            assert ran.stdout.readline().startswith("epoch 1 shard 0 [0, 1)")
            ran.send_signal(signal.SIGINT)
            told = ran.communicate(timeout=60)[1]
        assert "; trying again for 60 s" in told
        assert ran.returncode == 0


def test_a_group_that_was_reset_reads_its_epochs_again(
    writer: penstock.Writer, any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with a mistake in its loss is repeated without producing again, and without a new name."""
    for _ in range(3):
        write(writer, [4])

    def read() -> list[int]:
        with penstock.Loader(
            "train", group="resnet", batch_size=4, url=any_url, tuning=penstock.Tuning(timeout_s=1.0)
        ) as loader:
            return [sum(batch.size for batch in loader) for _ in range(2)]

    assert read() == [4, 4]
    with penstock.Loader("train", group="resnet", batch_size=4, url=any_url) as loader:
        next(iter(loader))
        assert main(["groups", "reset", "train", "resnet", "1"]) == 1
        assert "stop it first: it would be handed again" in capsys.readouterr().err
    assert main(["groups", "reset", "train", "resnet", "1"]) == 0
    assert capsys.readouterr().out == "group 'resnet' of 'train' reads again from epoch 1 on\n"
    assert read() == [4, 4]
    assert main(["groups", "reset", "train", "resnet", "earliest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_epoch"] == 0
    assert read() == [4, 4]
    for argv, line in (
        (["resnet", "9"], "stream 'train' has no epoch 9; retained epochs: 0, 1, 2; 'earliest' is 0"),
        (["resent", "1"], "stream 'train' has no group 'resent'"),
    ):
        assert main(["groups", "reset", "train", *argv]) == 1
        assert line in capsys.readouterr().err
