"""All parts under fire: writers and trainers killed, connections cut, and in the end every sample counted once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from penstock_common.errors import GroupFinished
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import load_manifest
from penstock_common.stream.streams import create_stream, set_plan
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import SAMPLE_BYTES, SPEC, numbers, open_stream, sample, stored
from tests.contracts.processes import Child, child

SHARDS, SIZE, EPOCHS = 4, 150, 2
EVERY = list(range(SHARDS * SIZE))


def job(url: str, epoch: str, shard: str, pause_s: str) -> None:
    """Do the work of a worker for one shard, continuing after its last commit."""
    first = SIZE * int(shard)
    writer = Writer("t", url=url, spec=SPEC, tuning=Tuning(block_bytes=7 * SAMPLE_BYTES), partitions=2)
    with writer, writer.epoch(int(epoch), sizes=[SIZE] * SHARDS).shard(int(shard)) as one:
        while one.position < SIZE:
            one.write(sample(first + one.position))
            if one.position % 7 == 0:
                print(one.position)
                time.sleep(float(pause_s))


def train(url: str, group: str, member: str, pause_s: str) -> None:
    """Train both epochs, and print epoch and numbers of each batch when its step is done."""
    with (
        Loader(
            "t",
            group=group,
            batch_size=13,
            url=url,
            tuning=Tuning(member=member, lease_s=1.0, timeout_s=60, prefetch_bytes=2000),
        ) as loader,
        suppress(GroupFinished),
    ):  # the other member may have the last of it
        for _ in range(EPOCHS):
            for batch in loader:
                time.sleep(float(pause_s))
                print(batch.epoch, *batch["y"].tolist(), flush=True)


def trained(lines: list[str]) -> Counter[tuple[int, int]]:
    """Return (epoch, number) of everything that trainers printed."""
    found: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if line and line[0].isdigit():
            epoch, *rest = map(int, line.split())
            found.update((epoch, number) for number in rest)
    return found


def lines_until(process: Child, count: int) -> list[str]:
    """Return the next lines of a process."""
    return [process.line() for _ in range(count)]


def test_two_groups_of_other_sizes_get_everything_from_jobs_that_die(any_url: str, any_client: Client) -> None:
    """A worker is killed in its shard, a trainer of one group is killed and replaced by two, and another group reads
    on.

    Each group was given all of both epochs, and the stream holds each sample once.
    """
    stream = create_stream(any_client, "t", partitions=2)
    set_plan(any_client, stream, EPOCHS)
    with child(train, any_url, "steady", "s1", 0.0) as steady, child(train, any_url, "shaky", "m1", 0.005) as first:
        with child(job, any_url, 0, 0, 0.004) as dying:
            lines_until(dying, 6)
            dying.kill()
        produce_all(any_url)
        logged = lines_until(first, 5)
        logged += first.kill()
        with (
            child(train, any_url, "shaky", "m2", 0.002) as second,
            child(train, any_url, "shaky", "m3", 0.002) as third,
        ):
            rest = second.rest(60) + third.rest(60)
        all_of_steady = trained(steady.rest(60))
    assert all_of_steady == Counter((epoch, number) for epoch in range(EPOCHS) for number in EVERY)
    shaky = trained(logged) + trained(rest)
    assert set(shaky) == set(all_of_steady)
    twice = {key for key, count in shaky.items() if count > 1}
    assert twice <= set(trained(logged[-1:]))  # at most the step before the kill
    require_whole(any_url, any_client)


def produce_all(url: str) -> None:
    """Produce all shards of all epochs by two workers that share the work badly: both do every shard."""
    errors: list[BaseException] = []

    def work(order: int) -> None:
        try:
            for epoch in range(EPOCHS):
                shards = list(range(SHARDS))
                random.Random(order).shuffle(shards)
                for shard in shards:
                    job(url, str(epoch), str(shard), "0.001")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(order,)) for order in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def require_whole(url: str, client: Client) -> None:
    """Require every epoch produced, every identity in the entries once, nothing pending, and the replay as planned."""
    stream = open_stream(client, "t")
    for epoch in range(EPOCHS):
        assert load_manifest(client, stream, epoch).state == "produced"
        held = stored(client, "t", epoch)
        assert held == Counter((shard, offset) for shard in range(SHARDS) for offset in range(SIZE))
        for partition in stream.partitions:
            for group in ("steady", "shaky"):
                assert client.xpending(partition.entries(epoch), group)["pending"] == 0
        with Replay("t", url=url, epoch=epoch, batch_size=50) as replay:
            assert numbers(replay) == EVERY


def test_everything_arrives_once_while_every_connection_is_cut(url: str, client: Client) -> None:
    """A network that breaks all the time costs time, never samples. No process dies, so nothing comes twice."""
    done = threading.Event()
    errors: list[BaseException] = []
    found: Counter[int] = Counter()

    def write() -> None:
        with Writer(
            "t", url=url, spec=SPEC, tuning=Tuning(block_bytes=5 * SAMPLE_BYTES, notify=lambda _: None)
        ) as writer:
            shard = writer.epoch(0, sizes=[len(EVERY)]).shard(0)
            for number in EVERY:
                shard.write(sample(number))
                time.sleep(0.001)
            shard.commit_all()
            done.set()
            cutter.join()
            shard.close()

    def read() -> None:
        with Loader(
            "t",
            group="g",
            batch_size=7,
            url=url,
            tuning=Tuning(notify=lambda _: None, timeout_s=30, prefetch_bytes=1000, lease_s=5),
        ) as loader:
            for batch in loader:
                found.update(batch["y"].tolist())

    cutter = threading.Thread(target=cut_connections, args=(client, done))
    threads = [threading.Thread(target=guarded, args=(work, errors)) for work in (write, read)]
    for thread in (*threads, cutter):
        thread.start()
    for thread in threads:
        thread.join(60)
    done.set()
    cutter.join()
    assert not errors
    assert found == Counter(EVERY)
    assert stored(client, "t", 0) == Counter((0, number) for number in EVERY)


def cut_connections(client: Client, done: threading.Event) -> None:
    """Close a third of the connections that carry data, fifty times a second."""
    chance = random.Random(3)
    while not done.wait(0.02):
        for info in client.client_list():
            if chance.random() < 0.3 and info["cmd"] in ("xreadgroup", "exec", "hget", "evalsha"):
                client.client_kill_filter(_id=info["id"])


def guarded(work: Callable[[], None], errors: list[BaseException]) -> None:
    """Do the work, and keep its error for the test."""
    try:
        work()
    except BaseException as error:
        errors.append(error)
