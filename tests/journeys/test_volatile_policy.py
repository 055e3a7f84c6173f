"""A server that evicts only keys with a time to live: streams are safe there, jobs are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import ServerUnsuitable
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Canonical
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import parse_config
from tests.journeys.test_delete import in_every_state
from tests.producer import made

VOLATILE = {"maxmemory-policy": "volatile-lru"}


def test_no_key_of_a_stream_has_a_time_to_live(
    fresh_server: Callable[..., EmbeddedServer], any_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a server deletes a key with a time to live whenever its memory is full, whatever is in it."""
    server = fresh_server(maxmemory_bytes=200 << 20, extra=VOLATILE)
    with connect(server.url) as client:
        in_every_state(server.url, client, 2)
    config = parse_config({"kind": "dataset", "name": "tests.producer.made:numbers", "transform": None})
    plan = ProductionPlan(stream="train", source=config, shard_samples=10)
    options = WorkerOptions(url=server.url, queue_url=any_url)
    with Production(plan, options, workers=1, notify=lambda _: None) as production:
        for _ in production.run():
            pass
    with Loader("train", group="g", batch_size=1, url=server.url) as shared:
        assert sum(1 for _ in shared) == made.SAMPLES
    with Loader(
        "train",
        group="r",
        batch_size=2,
        url=server.url,
        order=Canonical(rank=0, world_size=1),
    ) as ordered:
        assert len(list(ordered)) == made.SAMPLES // 2
    with Replay("train", url=server.url, epoch=0, batch_size=1) as replay:
        assert sum(1 for _ in replay) == made.SAMPLES
    for words in (["monitor", "--once", "--every", "0.1"], ["audit", "train"], ["doctor", "train"]):
        assert main([*words, "--url", server.url]) == 0, capsys.readouterr()
    with redis.Redis.from_url(server.url) as raw:
        mortal = {key: raw.pttl(key) for key in raw.scan_iter(count=1000) if raw.pttl(key) != -1}
        assert mortal == {}
        assert raw.dbsize() > 50
        assert raw.info("stats")["expired_keys"] == 0


def test_a_queue_is_refused_where_its_jobs_may_be_evicted(fresh_server: Callable[..., EmbeddedServer]) -> None:
    """Keys of rq have a time to live, so a full server would delete jobs, and an epoch would never be complete."""
    server = fresh_server(extra=VOLATILE)
    with pytest.raises(ServerUnsuitable, match=r"volatile-lru, which may delete jobs.*policy noeviction"):
        Dispatcher(server.url, "penstock")
