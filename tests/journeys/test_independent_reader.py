"""A reader that knows only docs/wire-format.md and docs/redis-keys.md rebuilds an epoch bit for bit."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.format.dtypes import numpy_dtype
from tests.common.format import independent
from tests.journeys import independent_reader

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


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("block_bytes", [1, 20_000], ids=["one sample an entry", "many samples an entry"])
def test_the_two_documents_suffice_to_rebuild_every_sample_bit_for_bit(
    url: str, partitions: int, block_bytes: int
) -> None:
    """Data that only our own code can read is data held hostage."""
    rng = np.random.default_rng(7)
    written: dict[independent_reader.Identity, dict[str, Any]] = {}
    with penstock.Writer("train", url=url, spec=SPEC, partitions=partitions, block_bytes=block_bytes) as writer:
        with writer.epoch(sizes=[1]) as before, before.shard(0) as part:  # another epoch, which must not be mixed in
            part.write({**make_sample(rng, 0), "half": np.zeros(5, numpy_dtype("bfloat16"))})
        with writer.epoch(sizes=SIZES) as epoch:
            for shard, size in enumerate(SIZES):
                with epoch.shard(shard) as part:
                    for offset in range(size):
                        sample = make_sample(rng, offset)
                        sample["half"] = sample["half"].astype(numpy_dtype("bfloat16"))
                        if is_bad(shard, offset):
                            part.quarantine(f"bad {shard}:{offset}")
                        else:
                            part.write(sample)
                            written[shard, offset] = sample
    with redis.Redis.from_url(url) as client:
        read = dict(independent_reader.IndependentReader(client, "train", 1).samples())
        bad = independent_reader.quarantined(client, "train", 1)
    assert list(read) == list(written)
    for identity, tensors in read.items():
        for name, tensor in tensors.items():
            value = written[identity][name]
            raw = value if isinstance(value, bytes) else np.asarray(value).tobytes()
            shape = [len(value)] if isinstance(value, bytes) else list(np.shape(value))
            assert (tensor.raw, tensor.shape, tensor.dtype) == (raw, shape, SPEC[name][0]), (identity, name)
    places = {(shard, offset) for shard, size in enumerate(SIZES) for offset in range(size) if is_bad(shard, offset)}
    assert bad == {(shard, offset): f"bad {shard}:{offset}" for shard, offset in places}


def test_the_reader_knows_nothing_of_penstock() -> None:
    """Else it would prove nothing."""
    for module in (independent_reader, independent):
        source = inspect.getsource(module)
        assert [line for line in source.splitlines() if "import" in line and "penstock" in line] == []
