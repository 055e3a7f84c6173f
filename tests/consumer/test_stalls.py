"""Each slow part, under real conditions, is found to be the cause."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import pytest

import penstock
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_consumer.stages.stats import Stats
from penstock_producer.write.writer import Writer
from tests.contracts.feed import loader_of, produce
from tests.journeys.trouble import at_port
from tests.tuned import tuned

WIDE = {"x": ("uint8", (20_000,)), "y": ("int64", ())}
SAMPLES = 120
BATCH = 8
ORDERS: list[Literal["canonical"] | None] = [None, "canonical"]


def write(url: str, name: str = "t", pause_s: float = 0.0, **settings: Any) -> None:
    """Write an epoch of 2.4 MB in entries of 40 kB, with a pause after each sample."""
    with (
        Writer(
            name, url=url, spec=WIDE, **tuned("Writer", settings, Tuning(block_bytes=40_000, notify=lambda _: None))
        ) as writer,
        writer.epoch(sizes=[SAMPLES]).shard(0) as shard,
    ):
        for number in range(SAMPLES):
            shard.write({"x": np.full(20_000, number, np.uint8), "y": number})
            if pause_s:
                shard.flush()
                time.sleep(pause_s)


class SlowProxy:
    """A proxy that passes on a server's answers at a limited rate on each connection."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        self._port, self._bytes_per_s = urlsplit(url).port or 0, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = at_port(url, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
                server = socket.create_connection(("127.0.0.1", self._port))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for source, sink, rate in ((client, server, None), (server, client, self._bytes_per_s)):
                    threading.Thread(target=self._pass_on, args=(source, sink, rate), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, rate: float | None) -> None:
        with suppress(OSError), source, sink:
            while data := source.recv(8192):
                sink.sendall(data)
                if rate is not None:
                    time.sleep(len(data) / rate)


@contextmanager
def slowed(url: str, bytes_per_s: float) -> Iterator[str]:
    """Yield the address of the same server behind a slow network."""
    proxy = SlowProxy(url, bytes_per_s)
    try:
        yield proxy.url
    finally:
        proxy.close()


def nothing(_: Any) -> None:
    """Take no time, as a step."""


def slowly(seconds: float) -> Callable[[Any], Any]:
    """Return the argument after a while."""

    def give(value: Any) -> Any:
        time.sleep(seconds)
        return value

    return give


def read(loader: Any, step: Callable[[Any], None] = nothing) -> Stats:
    """Read one pass."""
    for batch in loader:
        step(batch)
    stats: Stats = loader.stats()
    return stats


def require_cause(stats: Stats, cause: str) -> None:
    """Require that nearly all of the time was waiting for one cause, and that all numbers add up."""
    assert stats.cause == cause, stats.as_dict()
    assert getattr(stats, f"{cause}_s") > 0.6 * stats.waited_s, stats.as_dict()
    assert stats.wait_share > 0.8, stats.as_dict()
    assert stats.producers_s + stats.server_s + stats.reader_s == pytest.approx(stats.waited_s, rel=0.01)
    assert stats.waited_s <= stats.elapsed_s + 1e-6


@pytest.mark.parametrize("order", ORDERS)
def test_slow_producers_are_found_to_be_the_cause(any_url: str, order: Any) -> None:
    """More workers would help then, and nothing else would. This includes the time before the first sample."""
    with Writer("t", url=any_url, spec=WIDE, tuning=Tuning(notify=lambda _: None)):
        pass
    writer = threading.Timer(0.5, write, (any_url,), {"pause_s": 0.02})
    writer.start()
    with loader_of(any_url, order=order) as loader:
        stats = read(loader)
    writer.join()
    assert stats.samples == SAMPLES
    require_cause(stats, "producers")


@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_connection_is_found_to_be_the_cause(any_url: str, order: Any) -> None:
    """More workers cannot help if the samples exist and do not arrive."""
    write(any_url)
    with slowed(any_url, 2e6) as far, loader_of(far, order=order) as loader:
        require_cause(read(loader), "server")


def test_a_producer_beyond_a_slow_connection_is_told_from_it(any_url: str) -> None:
    """Both look like a slow read, but the entries' ids show since when there was something to read."""
    writer = threading.Thread(target=write, args=(any_url,), kwargs={"pause_s": 0.02})
    writer.start()
    with slowed(any_url, 20e6) as far, loader_of(far) as loader:
        require_cause(read(loader), "producers")
    writer.join()


@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_map_is_found_to_be_the_reader(any_url: str, order: Any) -> None:
    """Work of this process on a batch delays the step like any other cause."""
    write(any_url)
    with loader_of(any_url, order=order) as loader:
        view = loader.view().map(slowly(0.02)).select("x", "y")
        require_cause(read(view), "reader")


def test_a_slow_filter_is_found_to_be_the_reader(any_url: str) -> None:
    """Stages run in this process, too."""
    write(any_url)
    with loader_of(any_url) as loader:
        loader.filter(lambda batch: slowly(0.02)(batch)["y"] >= 0)
        require_cause(read(loader), "reader")


def test_what_single_samples_are_made_into_is_the_steps_time(any_url: str) -> None:
    """The clock is not read for each sample."""
    write(any_url)
    with loader_of(any_url) as loader:
        for _ in loader.view().samples().collate(slowly(0.005)):
            pass
        assert loader.stats().wait_share < 0.5


@pytest.mark.parametrize("order", ORDERS)
def test_a_slow_step_waits_for_nothing(any_url: str, order: Any) -> None:
    """A user looks for something to fix in a cause, and here there is nothing."""
    write(any_url)
    with loader_of(any_url, order=order) as loader:
        stats = read(loader, lambda _: time.sleep(0.05))
    assert stats.elapsed_s > 0.05 * SAMPLES / BATCH
    assert stats.wait_share < 0.25, stats.as_dict()


def test_a_replay_has_no_producers_to_wait_for(any_url: str) -> None:
    """A replayed epoch is complete, so only the connection or this process can be slow."""
    write(any_url)
    said: list[str] = []
    with (
        slowed(any_url, 2e6) as far,
        Replay("t", epoch=0, batch_size=BATCH, url=far, tuning=Tuning(notify=said.append)) as replay,
    ):
        stats = read(replay)
        require_cause(stats, "server")
        assert stats.producers_s == 0
        slow = read(replay, lambda _: time.sleep(0.2))  # another pass counts separately
    assert slow.batches == stats.batches == len(replay)
    assert slow.wait_share < 0.8
    assert said == [f"t replay of epoch 0: {one}" for one in (stats, slow)]


def test_a_mixture_tells_of_all_of_its_streams_and_of_each(any_url: str) -> None:
    """One slow stream of two makes the mixture slow, and it must be visible which one."""
    write(any_url, "fast")
    writer = threading.Thread(target=write, args=(any_url, "slow"), kwargs={"pause_s": 0.02})
    writer.start()
    common: Any = {"group": "g", "batch_size": BATCH, "url": any_url, "notify": nothing, "timeout_s": 30}
    with penstock.mix({name: (Loader(name, **tuned("Loader", common)), 1.0) for name in ("fast", "slow")}) as mixture:
        stats = read(mixture, lambda _: time.sleep(0.001))
        view = mixture.stats().as_dict()
    writer.join()
    fast, slow = stats.streams["fast"], stats.streams["slow"]
    assert (stats.samples, fast.samples, slow.samples) == (2 * SAMPLES, SAMPLES, SAMPLES)
    require_cause(stats, "producers")
    assert slow.cause == "producers"
    assert slow.waited_s > 3 * fast.waited_s
    assert fast.waited_s + slow.waited_s <= stats.waited_s + 0.01
    assert json.loads(json.dumps(view))["streams"]["slow"]["cause"] == "producers"


def test_each_epoch_ends_with_a_line(any_url: str) -> None:
    """The log of a training shows whether more workers would help. An interrupted epoch continues in its own line."""
    produce(any_url, "t", 40, epochs=2)
    said: list[str] = []
    with loader_of(any_url, "resnet", notify=said.append) as loader:
        assert loader.stats() == Stats()
        next(iter(loader))
        first = loader.stats()
        assert (first.epoch, first.samples) == (0, 8)
        time.sleep(0.3)  # between two iterations, nothing waits and nothing trains
        for _ in loader:
            pass
        assert loader.stats().elapsed_s < first.elapsed_s + 0.3
        assert read(loader).epoch == 1
        both = loader.stats(total=True)
    assert (both.samples, loader.stats().samples) == (80, 40)
    assert [line.partition(":")[0] for line in said] == ["t/resnet epoch 0", "t/resnet epoch 1"]
    assert all("40 samples in " in line and " samples/s, " in line for line in said)


def test_a_number_may_be_asked_for_at_any_time_from_any_thread(any_url: str) -> None:
    """A dashboard asks while the loop waits, and its numbers must be consistent."""
    writer = threading.Thread(target=write, args=(any_url,), kwargs={"pause_s": 0.01})
    writer.start()
    with loader_of(any_url) as loader:
        reader = threading.Thread(target=read, args=(loader,))
        reader.start()
        while reader.is_alive():
            stats = loader.stats()
            assert 0 <= stats.waited_s <= stats.elapsed_s + 1e-6
            known = stats.producers_s + stats.server_s + stats.reader_s
            assert known == pytest.approx(stats.waited_s, abs=1e-3)
            time.sleep(0.001)
        writer.join()
    assert loader.stats().samples == SAMPLES
