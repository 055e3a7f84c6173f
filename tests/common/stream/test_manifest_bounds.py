"""Readers refuse a plan that no producer makes, because a manifest's sizes decide how much memory and time they
take.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator

import pytest
import redis

from penstock.__main__ import main
from penstock_common.errors import DamagedKey, EpochIncomplete, PenstockError, StreamConflict
from penstock_common.stream.manifest import (
    MAX_EPOCH_SAMPLES,
    MAX_SHARDS,
    begun_shards,
    load_manifest,
    reserve_shard,
    size_epoch,
    why_not_planned,
)
from penstock_common.wire.limits import MAX_SHARD_SAMPLES
from tests.contracts.feed import loader_of, numbers, open_stream, produce, replayed, writer_of
from tests.contracts.processes import within

FULL = [MAX_SHARD_SAMPLES] * (MAX_EPOCH_SAMPLES // MAX_SHARD_SAMPLES)
HOSTILE = {
    "one size of 2^33": ({"sizes": f"[{1 << 33}]"}, "a shard holds at most 1048576 samples, planned are 8589934592"),
    "200,000 full shards": ({"sizes": json.dumps([1 << 20] * 200_000)}, "an epoch holds at most 8589934592 samples"),
    "too many shards": ({"sizes": "[" + "1," * MAX_SHARDS + "1]"}, "an epoch has at most 1048576 shards"),
    "a text of 40 MB": ({"sizes": "[" + " " * 40_000_000 + "]"}, "sizes has 40000002 bytes"),
    "below nothing": ({"sizes": "[10, -1]"}, "planned are -1"),
    "no numbers": ({"sizes": '["10"]'}, "sizes is no list of numbers"),
    "true": ({"sizes": "[true]"}, "sizes is no list of numbers"),
    "no list": ({"sizes": '{"0": 10}'}, "sizes is no list of numbers"),
    "a shard far away": ({"d:4503599627370496": "1"}, "d:4503599627370496 says 1"),
    "a shard that is too long": ({"d:0": str(1 << 33)}, "d:0 says 8589934592"),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit the memory to two gigabytes more than is in use, so that a request for eight fails and does not harm the
    host.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(("fields", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_plan_beyond_every_bound_is_a_damaged_key_to_whoever_reads_it(
    any_url: str, any_client: redis.Redis, fields: dict[str, str], told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It would take eight gigabytes of bits, or an hour over missing shards, longer than the loader's timeout."""
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    produce(any_url, "t", 10)
    key = open_stream(any_client, "t").keys.manifest(0)
    for field, value in fields.items():
        any_client.hset(key, field, value)
    damaged = f"^{key} holds what Penstock did not write .*{told}"
    with within(20):
        with pytest.raises(DamagedKey, match=damaged), loader_of(any_url, timeout_s=3) as loader:
            numbers(loader)
        with pytest.raises(DamagedKey, match=damaged):
            replayed(any_url)
        for command in ("audit", "inspect"):
            assert main([command, "t"]) != 0
            assert key in "".join(capsys.readouterr())


def test_a_shard_number_beyond_every_bound_is_a_damaged_key(any_url: str, any_client: redis.Redis) -> None:
    """The number of shards of an open epoch is a counter, and readers loop over it without a plan."""
    with writer_of(any_url, spec={"y": ("int64", ())}) as writer, writer.epoch() as epoch:
        stream = open_stream(any_client, "t")
        manifest = load_manifest(any_client, stream, 0)
        with pytest.raises(StreamConflict, match=f"shards are numbered from 0 to {MAX_SHARDS - 1}"):
            reserve_shard(any_client, stream, manifest, MAX_SHARDS)
        any_client.hset(stream.keys.manifest(0), "next_shard", 1 << 53)
        with pytest.raises(DamagedKey, match="next_shard is 9007199254740992"):
            begun_shards(any_client, stream, manifest)
        any_client.hset(stream.keys.manifest(0), "next_shard", 0)
        epoch.write({"y": 1})


@pytest.mark.parametrize(
    "sizes",
    [[MAX_SHARD_SAMPLES + 1], [-1], [1] * (MAX_SHARDS + 1), [*FULL, 1]],
    ids=["a long shard", "below nothing", "many shards", "many samples"],
)  # fmt: skip
def test_what_readers_would_refuse_is_not_planned(any_url: str, any_client: redis.Redis, sizes: list[int]) -> None:
    """Both sides have the same bounds, so every epoch that is made can be read."""
    assert why_not_planned(sizes[:-1] if len(sizes) > 1 else [MAX_SHARD_SAMPLES]) is None
    with writer_of(any_url, spec={"y": ("int64", ())}) as writer:
        with pytest.raises(StreamConflict, match=why_not_planned(sizes)):
            writer.epoch(0, sizes=sizes)
        stream = open_stream(any_client, "t")
        manifest = load_manifest(any_client, stream, 0)
        assert manifest.sizes is None
        size_epoch(any_client, stream, manifest, [MAX_SHARD_SAMPLES] * 3)
        assert load_manifest(any_client, stream, 0).samples == 3 * MAX_SHARD_SAMPLES


def test_an_epoch_that_lost_thousands_of_shards_is_told_at_once(any_url: str, any_client: redis.Redis) -> None:
    """The plan is within the bounds, but nothing of it exists: one request a shard takes longer than a loader waits."""
    produce(any_url, "t", 10)
    stream = open_stream(any_client, "t")
    any_client.hset(stream.keys.manifest(0), "sizes", json.dumps([10, *[MAX_SHARD_SAMPLES] * 8000]))
    with within(20), pytest.raises(PenstockError) as told, loader_of(any_url, timeout_s=3) as loader:
        numbers(loader)
    assert isinstance(told.value, EpochIncomplete)
    assert f"{8000 * MAX_SHARD_SAMPLES} samples" in str(told.value)
