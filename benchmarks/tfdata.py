"""The tf.data path against the numpy path: the same produced epoch read by alternating groups, batch by batch."""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.spread import Spread, spread
from benchmarks.trainers import QUIET
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_consumer.loader import Loader
from penstock_producer.writing.writer import Writer

SHAPE, SAMPLES, BATCH_SIZE = (224, 224, 3), 8000, 64


def measure(rounds: int) -> Spread:
    """The ratio of tf.data's speed to numpy's; the first round is not counted."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from penstock_consumer.adapters.tensorflow import dataset

    with EmbeddedServer() as server:
        spec = {"x": ("uint8", SHAPE), "y": ("int64", ())}
        with Writer("tf", url=server.url, spec=spec, budget_bytes=4 << 30, **QUIET) as writer, writer.epoch() as epoch:
            image = np.zeros(SHAPE, np.uint8)
            for number in range(SAMPLES):
                epoch.write({"x": image, "y": number})
        seconds: dict[str, list[float]] = {"numpy": [], "tf.data": []}
        for number in range(rounds + 1):
            for path in ("numpy", "tf.data") if number % 2 else ("tf.data", "numpy"):
                group = f"{path}-{number}"
                with Loader("tf", group=group, batch_size=BATCH_SIZE, url=server.url, **QUIET) as loader:
                    batches = loader if path == "numpy" else dataset(loader)
                    began = time.perf_counter()
                    for _ in batches:
                        pass
                    seconds[path].append(time.perf_counter() - began)
    return spread(ours / theirs for ours, theirs in zip(seconds["numpy"][1:], seconds["tf.data"][1:], strict=True))
