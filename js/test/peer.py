"""The Python side of the Node tests: a server, a writer and a reader, told what to do by lines of JSON."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ml_dtypes
import numpy as np

import penstock
from chaos.cluster import low_port
from penstock_common.server.slots import slot_of
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.feeds import close_epoch
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.stream.placement import choose_tags
from penstock_common.stream.removal.deletion import delete_stream, release_epoch
from penstock_common.stream.servers.embedded import EmbeddedServer, find_servers
from penstock_common.stream.servers.suitability import ServerMemory
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import Spec
from penstock_producer.write.explain import explain_memory, explain_quota
from penstock_producer.write.quota import Admission, QuotaState, decide_admission, pause_s
from penstock_producer.write.writer import WriterHooks
from tests.clusters import NODE_TIMEOUT_MS, PASSWORD, Cluster, started_cluster, until
from tests.contracts.feed import entries
from tests.sentinels import SERVER_PASSWORD, Service, started_service
from tests.torn import TornPair, torn_master_of, torn_service
from tests.torn_slots import SlotState, partition_slot

SPECS: dict[str, dict[str, Any]] = {
    "fixed": {"x": ("uint8", (3, 5)), "y": ("int64", ())},
    "digits": {"2": ("float32", (2,)), "1": ("bfloat16", ()), "b": ("bool", (3,)), "c": ("complex64", ())},
    "images": {"x": ("uint8", (200, 200, 3))},
    "numbers": {"x": ("float32", (2,)), "y": ("int64", ())},
    "ragged": {"boxes": ("float32", (None, 4)), "name": ("bytes", ()), "y": ("int32", ())},
    "masks": {"mask": ("float32", (64, 8)), "ids": ("int64", (None,)), "text": ("bytes", ()), "y": ("uint8", ())},
}


def sample(spec: str, seed: int) -> dict[str, Any]:
    """Return the sample that a number stands for."""
    rng = np.random.default_rng(seed)
    match spec:
        case "fixed":
            return {"x": rng.integers(0, 256, (3, 5), dtype=np.uint8), "y": np.int64(seed - 2**60)}
        case "digits":
            return {
                "2": rng.random(2, dtype=np.float32),
                "1": np.asarray(rng.random()).astype(ml_dtypes.bfloat16),
                "b": rng.random(3) < 0.5,
                "c": np.complex64(complex(seed, -seed)),
            }
        case "images":
            return {"x": rng.integers(0, 256, (200, 200, 3), dtype=np.uint8)}
        case "numbers":
            return {"x": np.asarray([seed, seed + 0.5], np.float32), "y": np.int64(seed)}
        case "masks":
            mask = np.full((64, 8), seed % 5, np.float32)
            return {"mask": mask, "ids": np.arange(seed % 9), "text": b"word " * (seed % 40), "y": np.uint8(seed % 251)}
        case _:
            return {
                "boxes": rng.random((seed % 4, 4), dtype=np.float32),
                "name": bytes(rng.integers(0, 256, seed % 9, dtype=np.uint8)),
                "y": np.int32(seed),
            }


def produce(
    stream: str,
    spec: str,
    sizes: list[int],
    holes: Sequence[int] = (),
    epochs: int = 1,
    block_bytes: int | None = None,
    pause_s: float = 0.0,
    compression: str | None = None,
    **options: Any,
) -> None:
    """Write epochs of shards of these sizes. Every offset in ``holes`` is a bad sample in each shard.

    ``pause_s`` is the time from one sample to the next.
    """
    tuning = Tuning(block_bytes=block_bytes, compression=compression)
    with penstock.Writer(stream, spec=SPECS[spec], tuning=tuning, **options) as writer:
        for number in range(epochs):
            with writer.epoch(sizes=sizes) as epoch:
                for index, size in enumerate(sizes):
                    with epoch.shard(index) as shard:
                        for offset in range(size):
                            time.sleep(pause_s)
                            if offset in holes:
                                shard.quarantine("made bad on purpose")
                            else:
                                shard.write(sample(spec, 100_000 * number + 1000 * index + offset))


def compressed(stream: str, url: str) -> list[int]:
    """Return how many entries of epoch 0 are compressed, and how many there are."""
    with connect(url) as client:
        found = [b'"compression":' in fields[b"meta"] for _, fields in entries(client, stream, 0)]
    return [sum(found), len(found)]


def digits(url: str) -> None:
    """Write scikit-learn's digits to two streams. Every fifth one is held out for a test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(images))
    held_out = np.arange(len(order)) % 5 == 0
    spec = {"x": ("uint8", (8, 8)), "y": ("int64", ())}
    for stream, chosen in (("digits.train", order[~held_out]), ("digits.test", order[held_out])):
        with penstock.Writer(stream, spec=spec, url=url) as writer, writer.epoch() as epoch:
            for index in chosen:
                epoch.write({"x": images[index].reshape(8, 8).astype(np.uint8), "y": labels[index]})


def produce_files(url: str) -> None:
    """Write JPEG and WebP files as they are to a stream."""
    from PIL import Image

    spec = {"file": ("bytes", ()), "y": ("int64", ())}
    with penstock.Writer("files", spec=spec, url=url) as writer, writer.epoch() as epoch:
        for number in range(16):
            file = io.BytesIO()
            Image.new("RGB", (60, 40), (16 * number, 0, 0)).save(file, "JPEG" if number % 2 else "WEBP")
            epoch.write({"file": file.getvalue(), "y": number})


def open_epoch(stream: str, url: str) -> None:
    """Leave an epoch of a new stream open."""
    penstock.Writer(stream, spec=SPECS["fixed"], url=url).epoch(sizes=[3])


def open_shards(stream: str, url: str) -> None:
    """Leave two shards of an epoch without sizes open, each by a writer of its own."""
    for _ in range(2):
        WRITERS.append(penstock.Writer(stream, spec=SPECS["fixed"], url=url))
        WRITERS[-1].write(sample("fixed", 0))
        WRITERS[-1].flush()


PLANNED: list[Any] = []
"""The writer and the epoch that `plan` leaves open."""


def plan(stream: str, sizes: list[int], url: str) -> None:
    """Open an epoch of a stream."""
    PLANNED.append(penstock.Writer(stream, url=url))
    PLANNED.append(PLANNED[-1].epoch(sizes=sizes))


def write_planned(shard: int, size: int) -> None:
    """Write a shard of the open epoch."""
    with PLANNED[-1].shard(shard) as part:
        for offset in range(size):
            part.write(sample("fixed", 1000 * shard + offset))


def open_again(sizes: list[int]) -> None:
    """Open the epoch of `plan` again, which a server has lost, write it, and close its writer."""
    lost, writer = PLANNED.pop().manifest, PLANNED.pop()
    again = WriterHooks(writer).open_again(lost)
    for shard, size in enumerate(sizes):
        with WriterHooks(writer).open_shard(again, shard) as part:
            for offset in range(part.position, size):
                part.write(sample("fixed", 1000 * shard + offset))
    writer.close()


def end_planned() -> None:
    """Close the open epoch and its writer."""
    PLANNED.pop().close()
    PLANNED.pop().close()


def told(value: Any) -> list[str]:
    """Return digests of a tensor's bytes and of its shapes."""
    arrays = [value.values, value.shapes] if isinstance(value, Ragged) else [value]
    return [hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16] for array in arrays]


def batches(found: Any) -> list[Any]:
    """Return identities and digests of batches."""
    return [
        [[list(each) for each in batch.identities()], {name: told(batch[name]) for name in batch}] for batch in found
    ]


def replay(stream: str, passes: int = 1, prefetch_bytes: int | None = None, **options: Any) -> list[Any]:
    """Return what Python's Replay gives, pass after pass."""
    tuning = Tuning(notify=lambda text: None, prefetch_bytes=prefetch_bytes)
    with penstock.Replay(stream, tuning=tuning, **options) as found:
        return [batches(found) for _ in range(passes)]


def identities(batch: Any) -> list[list[int]]:
    """Return the identities of a batch."""
    return [list(each) for each in batch.identities()]


def load(
    stream: str,
    epochs: int = 1,
    most: int | None = None,
    rank: tuple[int, int] | None = None,
    drop_last: bool = False,
    state: dict[str, Any] | None = None,
    lease_s: float | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Read at most a given number of batches as a member of a group, and return them with the state after them."""
    order = penstock.Canonical(*rank, drop_last=drop_last) if rank else None
    found: list[Any] = []
    tuning = Tuning(notify=lambda text: None, lease_s=lease_s)
    with penstock.Loader(stream, order=order, tuning=tuning, **options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for _ in range(epochs):
            for batch in loader:
                found += [batches([batch])[0]]
                if len(found) == most:
                    break
        return {"batches": found, "state": loader.state_dict()}


def member(
    stream: str,
    pause_s: float,
    lease_s: float,
    member: str | None = None,
    rank: tuple[int, int] | None = None,
    prefetch_bytes: int = 2000,
    **options: Any,
) -> None:
    """Be a member that takes its time for each batch, and say what it was given and what it acknowledged."""
    order = penstock.Canonical(*rank) if rank else None
    tuning = Tuning(lease_s=lease_s, member=member, prefetch_bytes=prefetch_bytes)
    with penstock.Loader(stream, acknowledge="manual", order=order, tuning=tuning, **options) as loader:
        say({"joined": loader.member})
        for batch in loader:
            say({"given": identities(batch)})
            time.sleep(pause_s)
            loader.acknowledge(batch)
            say({"acknowledged": identities(batch)})
    say({"left": True})


def audit(stream: str, url: str) -> list[Any]:
    """Return the exit code of `penstock audit`, and what it says."""
    command = [sys.executable, "-m", "penstock", "audit", stream, "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [done.returncode, done.stdout + done.stderr]


def take_over(url: str, stream: str, after_s: float) -> list[int]:
    """Give all that is pending in group g of epoch 0 to another member, after a time. Returns the samples' offsets."""
    with connect(url) as client:
        keys = load_stream(client, stream).partitions[0].entries(0)
        time.sleep(after_s)
        ids = [one["message_id"] for one in client.xpending_range(keys, "g", "-", "+", 1000)]
        taken = client.xclaim(keys, "g", "another", 0, ids)
    metas = [json.loads(fields[b"meta"]) for _, fields in taken]
    return [offset for meta in metas for offset in range(meta["first"], meta["first"] + meta["count"])]


WRITERS: list[penstock.Writer] = []
"""The writers that `open_shards` leaves open."""
SERVERS: list[EmbeddedServer] = []
"""The servers of their own that tests have stopped and started again."""


def start_server(directory: str, port: int | None = None) -> list[Any]:
    """Start a server that keeps an append-only file, and return its URL and port."""
    # on a busy disk a server holds back up to 2 s of writes while it syncs, and a kill would lose them
    server = EmbeddedServer(appendonly=True, directory=directory, port=port, extra={"appendfsync": "always"})
    SERVERS.append(server)
    return [server.url, urlsplit(server.url).port]


def start_replica() -> int:
    """Start a replica of the server that was started last, and return its process id once it follows."""
    primary = SERVERS[-1]
    follow = {"replicaof": f"127.0.0.1 {urlsplit(primary.url).port}", "masterauth": primary.password}
    SERVERS.append(EmbeddedServer(extra=follow))
    with connect(primary.url) as client:
        until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
    return SERVERS[-1].pid


def kill_server() -> None:
    """Kill the server that was started last."""
    SERVERS.pop().kill()


CLUSTERS: list[ExitStack] = []
"""The stacks that end the started clusters, one for each."""
CLUSTER: list[Cluster] = []
"""The clusters that were started, the last one last."""


def start_cluster(replicas: int = 0, node_timeout_ms: int = NODE_TIMEOUT_MS) -> list[str]:
    """Start a cluster of three masters, and return its URL and that of each master."""
    CLUSTERS.append(ExitStack())
    settings = {"cluster-node-timeout": str(node_timeout_ms)}
    started = started_cluster(find_servers()[0], replicas=replicas, settings=settings)
    CLUSTER.append(CLUSTERS[-1].enter_context(started))
    return [CLUSTER[-1].url, *(node.url for node in CLUSTER[-1].masters)]


def keys_of(stream: str, url: str) -> list[str]:
    """Return a key of a stream, and one of each of its partitions."""
    with connect(url) as client:
        found = load_stream(client, stream)
    return [found.keys.meta, *(partition.roster for partition in found.partitions)]


def masters_of(keys: list[str]) -> list[int]:
    """Return the port of the master of each key."""
    return [CLUSTER[-1].master_of(key).port for key in keys]


def lose_master(key: str, fault: str) -> None:
    """Kill or stop the master of a key, whose replica has everything."""
    CLUSTER[-1].lose_master_of(key, fault)


TORN: list[TornPair] = []
"""The masters that are cut off from their replicas."""


def cut_off(key: str) -> None:
    """Keep from the replica of a key's master all that is written from now on."""
    TORN.append(CLUSTERS[-1].enter_context(torn_master_of(CLUSTER[-1], key)))
    TORN[-1].cut_off()


def fail_over() -> None:
    """Kill the master that was cut off last, and let its replica take over as it is."""
    TORN.pop().fail_over()


def add_replica(key: str) -> None:
    """Start a replica of a key's master."""
    CLUSTER[-1].add_replica(CLUSTER[-1].master_of(key))


def ask(url: str, command: list[Any]) -> Any:
    """Return a server's answer to a command, which is a number, a text or nothing."""
    with connect(url) as client:
        answer = client.execute_command(*command)
    return answer.decode() if isinstance(answer, bytes) else answer


def move_slot(key: str) -> None:
    """Move the slot of a key to the next master."""
    CLUSTER[-1].move_slot_of(key)


def half_move(key: str) -> None:
    """Move a key's slot to the next master, as a tool does that is killed before its last step."""
    cluster, slot = CLUSTER[-1], slot_of(key)
    old = cluster.master_of(key)
    new = cluster.masters[(cluster.masters.index(old) + 1) % len(cluster.masters)]
    for node, word, other in ((new, "IMPORTING", old), (old, "MIGRATING", new)):
        cluster.asked(node, "CLUSTER", "SETSLOT", slot, word, cluster.asked(other, "CLUSTER", "MYID"))
    keys = cluster.asked(old, "CLUSTER", "GETKEYSINSLOT", slot, 100)
    cluster.asked(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "AUTH", PASSWORD, "KEYS", *keys)


def end_cluster() -> None:
    """End the cluster that was started last."""
    CLUSTERS.pop().close()
    CLUSTER.pop()


STOPPED: list[int] = []
"""The processes of the masters that stand still."""


def stop_master(key: str, seconds: float) -> None:
    """Stop the master of a key, and return a while later."""
    cluster = CLUSTER[-1]
    STOPPED.append(cluster.asked_pid(cluster.master_of(key)))
    os.kill(STOPPED[-1], signal.SIGSTOP)
    time.sleep(seconds)


def go_on() -> None:
    """Let the stopped master go on."""
    os.kill(STOPPED.pop(), signal.SIGCONT)


def idle_ms(keys: list[str], group: str) -> list[int]:
    """Return how long ago each entry of a group was given or renewed. A stopped master is not asked."""
    with connect(CLUSTER[-1].url) as client:
        found = [client.xpending_range(key, group, "-", "+", 100) for key in keys]
    return [one["time_since_delivered"] for entries in found for one in entries]


SERVICES: list[tuple[ExitStack, Service]] = []
"""The services that were started, with what ends each."""


def start_service() -> str:
    """Start a primary with a replica, and the Sentinels that watch them, and return the address of the service."""
    stack = ExitStack()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    SERVICES.append((stack, stack.enter_context(started_service(find_servers()[0], folder))))
    return SERVICES[-1][1].url


def fail_service(fault: str) -> None:
    """Lose the primary, whose replica has everything."""
    SERVICES[-1][1].fail(fault)


def cut_off_service() -> None:
    """Keep from the replica of a service all that is written from now on."""
    stack, service = SERVICES[-1]
    TORN.append(stack.enter_context(torn_service(service)))
    TORN[-1].cut_off()


def follow_service() -> None:
    """Start a replica of the primary of a service, and return once it follows."""
    stack, service = SERVICES[-1]
    primary = service.primary()
    follow = {"replicaof": f"127.0.0.1 {primary.port}", "masterauth": SERVER_PASSWORD}
    server = EmbeddedServer(find_servers()[0], port=low_port(), password=SERVER_PASSWORD, extra=follow)
    stack.enter_context(server)
    with connect(primary.url) as client:
        until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")


PAST: list[SlotState] = []
"""Partitions as they were."""


def remember(stream: str, url: str) -> None:
    """Remember the first partition of a stream as it is now."""
    with connect(url) as client:
        PAST.append(partition_slot(client, load_stream(client, stream), 0))


def go_back(url: str) -> None:
    """Bring the partition back to what was remembered, and cut all connections, as a failover does."""
    with connect(url) as client:
        PAST.pop().restore(client)
        client.client_kill_filter(_type="normal", skipme=True)


def end_service() -> None:
    """End the service that was started last."""
    SERVICES.pop()[0].close()


def cluster_tags(stream: str, stream_id: str, count: int) -> list[str]:
    """Return the tags that Python gives the partitions of a stream on the cluster."""
    with connect(CLUSTER[-1].url) as client:
        return choose_tags(stream, stream_id, count, client.slots())


def feed(stream: str, samples: int, url: str) -> None:
    """Write samples to a feed."""
    with penstock.Writer(stream, spec=SPECS["fixed"], url=url) as writer:
        for number in range(samples):
            writer.write(sample("fixed", number))


def audit_report(stream: str, url: str) -> dict[str, Any]:
    """Return the verdict of the audit, with checksums."""
    with connect(url) as client:
        report = audit_stream(client, stream, deep=True)
    counts = {name: getattr(report, name) for name in ("produced", "bad", "lost", "duplicate")}
    return {"clean": report.is_clean, "findings": report.findings, **counts}


def facts(stream: str, url: str) -> dict[str, Any]:
    """Return the settings of a stream and its epochs, as Python reads them."""
    with connect(url) as client:
        found = load_stream(client, stream)
        epochs = [load_manifest(client, found, epoch) for epoch in retained_epochs(client, found)]
    return {
        "spec": None if found.spec is None else json.dumps(found.spec.as_json()),
        "tags": [partition.tag for partition in found.partitions],
        "settings": [found.budget_bytes, found.block_bytes, found.retention, found.durability, found.payload],
        "info": found.info,
        "epochs": [[one.epoch, one.state, one.kind, one.seed, one.fingerprint, one.sizes] for one in epochs],
    }


def infer() -> list[str]:
    """Return the specs that Python infers from samples of several kinds."""
    samples: list[dict[str, Any]] = [
        {"x": np.zeros((2, 3), np.float32), "y": 3},
        {"x": 0.5, "y": True, "z": [[1, 2], [3, 4]]},
        {"x": [1, 2.5], "y": [True, False], "z": b"abc", "n": np.zeros(4, np.uint8)},
        {"x": {"a": np.zeros(2, np.int64), "b": {"c": 1}}, "y": np.zeros((0, 4), np.float64)},
        {"x": np.zeros((8, 2), np.int16), "y": np.zeros(8, np.int32)},
    ]
    return [json.dumps(Spec.infer(each).as_json()) for each in samples]


def quota_plans(states: list[dict[str, Any]], keepers: list[dict[str, Any]]) -> list[Any]:
    """Return what Python plans for each state of a quota, and the sentences that it says."""
    plans = []
    for state in states:
        found = QuotaState(**state)
        refused = decide_admission(found, Admission.SERVER_FULL)
        decisions = [one.name.lower().replace("_", " ") for one in (decide_admission(found), refused)]
        memory = ServerMemory(3_000_000, 64 << 20, "noeviction")
        sentences = [explain_quota("s", found, **one) for one in keepers] + [explain_memory("s", found, memory)]
        plans.append([decisions, found.missing_bytes, sentences])
    return plans


def pauses(waits: list[list[float]]) -> list[float]:
    """Return the pauses between two looks of a writer that waits."""
    return [pause_s(*each) for each in waits]


def full(stream: str, url: str, shard: int, most: int) -> str:
    """Write samples to a planned shard, and return what the error says once there is no space."""
    tuning = Tuning(room_wait_s=0.3, notify=lambda text: None)
    writer = penstock.Writer(stream, url=url, tuning=tuning)
    part = writer.epoch(0).shard(shard)
    try:
        for _ in range(most):
            part.write({"x": np.zeros(500, np.uint8)})
        part.flush()
    except penstock.errors.BudgetFull as error:
        return str(error)
    finally:
        part.abort()
        writer.close()
    raise AssertionError("there was space")


def command(words: list[str], url: str) -> None:
    """Run a command of `penstock` that must succeed."""
    subprocess.run([sys.executable, "-m", "penstock", *words, "--url", url], check=True, capture_output=True)


def refusals(stream: str, url: str) -> list[str]:
    """Return what Python's writer says of samples and of specs that do not fit."""
    bad: list[Any] = [
        {"x": np.zeros(3, np.float32), "y": 1},
        {"x": np.zeros(2, np.float64), "y": 1},
        {"x": np.zeros(2, np.float32), "y": 0.5},
        {"x": np.zeros(2, np.float32)},
        {"x": np.zeros(2, np.float32), "y": 1, "z": 1},
    ]
    said = []
    with penstock.Writer(stream, url=url) as writer:
        epoch = writer.epoch(0)
        for sample in bad:
            try:
                epoch.write(sample)
            except penstock.errors.SpecMismatch as error:
                said.append(str(error))
    try:
        penstock.Writer(stream, spec={"x": ("uint8", (5,))}, url=url)
    except penstock.errors.StreamConflict as error:
        said.append(str(error))
    return said


def tags(stream: str, stream_id: str, count: int) -> list[str]:
    """Return the tags of a stream's partitions."""
    return choose_tags(stream, stream_id, count, [])


def numbers() -> dict[str, list[str]]:
    """Return digests of two samples that were given as numbers."""
    bfloat16 = ml_dtypes.bfloat16
    rows: dict[str, Any] = {
        "i": np.array([[1, -128]] * 2, np.int8), "l": np.array([2**60, 5]), "f": np.array([0.1, 3], np.float32),
        "h": np.array([1 / 3, -65504], np.float16), "b": np.array([1e38, np.nan]).astype(bfloat16),
        "t": np.array([True, False]), "c": np.array([2, 0.5], np.complex64),
    }  # fmt: skip
    return {name: told(value) for name, value in rows.items()}


def remove(stream: str, url: str) -> None:
    """Delete a stream with its segments."""
    with connect(url) as client:
        delete_stream(client, stream)


def release(stream: str, epoch: int, url: str) -> None:
    """Release an epoch."""
    with connect(url) as client:
        release_epoch(client, load_stream(client, stream), epoch)


def close_feed(stream: str, epoch: int, url: str) -> None:
    """Close an epoch as an operator does."""
    with connect(url) as client:
        close_epoch(client, load_stream(client, stream), epoch)


def copy(source: str, stream: str, url: str) -> None:
    """Write the samples of a stream's epoch 0 to another stream, in the same shards."""
    with connect(url) as client:
        found = load_stream(client, source)
        sizes = load_manifest(client, found, 0).sizes
    assert sizes is not None
    assert found.spec is not None
    tuning = Tuning(notify=lambda text: None)
    with (
        penstock.Writer(stream, spec=found.spec, url=url) as writer,
        penstock.Replay(source, epoch=0, batch_size=1, url=url, tuning=tuning) as samples,
    ):
        epoch, shards = writer.epoch(0, sizes=sizes), dict[int, Any]()
        for batch in samples:
            ((_, shard, _),) = batch.identities()
            if shard not in shards:
                shards[shard] = epoch.shard(shard)
            shards[shard].write({name: batch[name][0] for name in found.spec.names})
        for one in shards.values():
            one.close()


def say(value: Any) -> None:
    """Write a line of JSON."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    """Call the function that the arguments name, or serve until the standard input ends."""
    if len(sys.argv) > 1:
        globals()[sys.argv[1]](**json.loads(sys.argv[2]))
        return
    with EmbeddedServer() as server:
        say({"url": server.url})
        for line in sys.stdin:
            name, options = json.loads(line)
            try:
                answer: Any = globals()[name](**options)
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
            else:
                say({"answer": answer})
        while CLUSTERS:
            end_cluster()
        while SERVICES:
            end_service()


if __name__ == "__main__":
    main()
