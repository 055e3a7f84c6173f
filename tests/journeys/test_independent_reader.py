"""Readers that know only the documents of wire format, keys and segment format rebuild an epoch bit for bit."""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.wire.dtypes import numpy_dtype
from tests.common.wire import independent
from tests.common.wire.independent import Tensor
from tests.journeys import independent_reader, independent_segments
from tests.journeys.independent_reader import Identity
from tests.tuned import tuned

SPEC = {
    "image": ("uint8", (12, 12, 3)),
    "boxes": ("float32", (None, 4)),
    "name": ("bytes", ()),
    "label": ("int64", ()),
    "half": ("bfloat16", (5,)),
}
SIZES = (70, 3, 41, 0, 12)


def make_sample(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """Random bits, NaNs among them; every third sample has no boxes, some names are empty."""
    return {
        "image": rng.integers(0, 256, (12, 12, 3), dtype=np.uint8),
        "boxes": rng.integers(0, 1 << 32, (number % 3, 4), dtype=np.uint32).view(np.float32),
        "name": rng.bytes(number % 7),
        "label": np.int64(number - 5),
        "half": rng.standard_normal(5).astype(np.float32),
    }


def is_bad(shard: int, offset: int) -> bool:
    """At the start, at the end, in a row, and a whole shard of them."""
    return shard == 1 or (shard == 0 and offset in (0, 30, 31, 32, 69))


BAD = {(shard, o): f"bad {shard}:{o}" for shard, size in enumerate(SIZES) for o in range(size) if is_bad(shard, o)}


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("block_bytes", [1, 20_000], ids=["one sample an entry", "many samples an entry"])
def test_the_two_documents_suffice_to_rebuild_every_sample_bit_for_bit(
    url: str, partitions: int, block_bytes: int
) -> None:
    """Data that only our own code can read is data held hostage."""
    written = produce(url, partitions=partitions, block_bytes=block_bytes)
    with redis.Redis.from_url(url) as client:
        read = dict(independent_reader.IndependentReader(client, "train", 1).samples())
        bad = independent_reader.quarantined(client, "train", 1)
    assert list(read) == list(written)
    require_equal(read, written)
    assert bad == BAD


def test_the_documents_suffice_for_a_feed_of_two_writers(any_url: str, any_client: redis.Redis) -> None:
    """Its records name their writers, which a planned epoch's do not."""
    rng = np.random.default_rng(7)
    written: dict[Identity, dict[str, Any]] = {}
    settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 2000, "notify": lambda _: None}
    with (
        penstock.Writer("train", url=any_url, **tuned("Writer", settings)) as one,
        penstock.Writer("train", url=any_url) as two,
    ):
        for offset in range(20):
            for shard, writer in enumerate((one, two)):
                sample = make_sample(rng, offset)
                sample["half"] = sample["half"].astype(numpy_dtype("bfloat16"))
                writer.write(sample)
                written[shard, offset] = sample
    read = dict(independent_reader.IndependentReader(any_client, "train", 0).samples())
    require_equal(read, written)


def produce(url: str, *, shards: list[int] | None = None, **settings: Any) -> dict[Identity, dict[str, Any]]:
    """Two epochs; what the second holds, in its order."""
    rng = np.random.default_rng(7)
    written: dict[Identity, dict[str, Any]] = {}
    with penstock.Writer(
        "train", url=url, spec=SPEC, **tuned("Writer", settings, penstock.Tuning(notify=lambda _: None))
    ) as writer:
        with writer.epoch(sizes=[1]) as before, before.shard(0) as part:  # another epoch, which must not be mixed in
            part.write({**make_sample(rng, 0), "half": np.zeros(5, numpy_dtype("bfloat16"))})
        with writer.epoch(sizes=SIZES) as epoch:
            for shard in shards or range(len(SIZES)):
                with epoch.shard(shard) as part:
                    for offset in range(SIZES[shard]):
                        sample = make_sample(rng, offset)
                        sample["half"] = sample["half"].astype(numpy_dtype("bfloat16"))
                        if is_bad(shard, offset):
                            part.quarantine(f"bad {shard}:{offset}")
                        else:
                            part.write(sample)
                            written[shard, offset] = sample
    return dict(sorted(written.items()))


def require_equal(read: Mapping[Identity, Mapping[str, Tensor]], written: Mapping[Identity, Mapping[str, Any]]) -> None:
    """The very bits."""
    assert set(read) == set(written)
    for identity, tensors in read.items():
        for name, tensor in tensors.items():
            value = written[identity][name]
            raw = value if isinstance(value, bytes) else np.asarray(value).tobytes()
            shape = [len(value)] if isinstance(value, bytes) else list(np.shape(value))
            assert (tensor.raw, tensor.shape, tensor.dtype) == (raw, shape, SPEC[name][0]), (identity, name)


@pytest.mark.parametrize("block_bytes", [1, 20_000], ids=["one sample a block", "many samples a block"])
def test_segment_files_are_read_by_their_document_alone(any_url: str, tmp_path: Path, block_bytes: int) -> None:
    """Years later, no server and nothing of ours at hand: the files must tell what they hold, and so must an export."""
    plane, out = f"segments:{tmp_path / 'plane'}", tmp_path / "out"
    shards = random.Random(3).sample(range(len(SIZES)), len(SIZES))
    written = produce(any_url, partitions=3, block_bytes=block_bytes, payload=plane, shards=shards)
    found = [independent_segments.read_segment(path) for path in (tmp_path / "plane").rglob("*.seg")]
    of_epoch = [segment for segment in found if segment.info["epoch"] == 1]
    assert {segment.info["partition"] for segment in of_epoch} == {0, 1, 2}
    for segment in of_epoch:
        assert {entry.header["shard"] % 3 for entry in segment.entries} == {segment.info["partition"]}
    entries = [entry for segment in of_epoch for entry in segment.entries]
    require_equal(dict(independent_segments.samples_of(entries)), written)
    assert main(["export", "train", str(out), "--url", any_url]) == 0
    exported, bad = independent_segments.read_export(out, 1)
    assert [identity for identity, _ in exported] == list(written), "canonical order, however it was made"
    require_equal(dict(exported), written)
    assert bad == BAD


def test_the_reader_knows_nothing_of_penstock() -> None:
    """Else it would prove nothing."""
    for module in (independent_reader, independent_segments, independent):
        source = inspect.getsource(module)
        assert [line for line in source.splitlines() if "import" in line and "penstock" in line] == []
