"""The Python side of the Node tests: a server, a writer and a reader, told what to do by lines of JSON."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

import penstock
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.tuning import Tuning
from penstock_common.wire.ragged import Ragged

SPECS: dict[str, dict[str, Any]] = {
    "fixed": {"x": ("uint8", (3, 5)), "y": ("int64", ())},
    "digits": {"2": ("float32", (2,)), "1": ("bfloat16", ()), "b": ("bool", (3,)), "c": ("complex64", ())},
    "ragged": {"boxes": ("float32", (None, 4)), "name": ("bytes", ()), "y": ("int32", ())},
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
    **options: Any,
) -> None:
    """Write epochs of shards of these sizes. Every offset in ``holes`` is a bad sample in each shard."""
    tuning = Tuning(block_bytes=block_bytes) if block_bytes else None
    with penstock.Writer(stream, spec=SPECS[spec], tuning=tuning, **options) as writer:
        for number in range(epochs):
            with writer.epoch(sizes=sizes) as epoch:
                for index, size in enumerate(sizes):
                    with epoch.shard(index) as shard:
                        for offset in range(size):
                            if offset in holes:
                                shard.quarantine("made bad on purpose")
                            else:
                                shard.write(sample(spec, 100_000 * number + 1000 * index + offset))


def open_epoch(stream: str, url: str) -> None:
    """Leave an epoch of a new stream open."""
    penstock.Writer(stream, spec=SPECS["fixed"], url=url).epoch(sizes=[3])


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


def say(value: Any) -> None:
    """Write a line of JSON."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the standard input ends."""
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


if __name__ == "__main__":
    main()
