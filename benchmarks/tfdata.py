"""The tf.data path against the numpy path: the same produced epoch read by alternating groups, batch by batch.

The clock starts at a pass's first batch; what a pass takes to begin, mostly tf.data's tracing of it, which a longer
epoch pays no oftener, is in the ratio of whole passes, told beside.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

import numpy as np

from benchmarks.spread import Spread, spread
from benchmarks.trainers import QUIET
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_consumer.loader import Loader
from penstock_producer.writing.writer import Writer

SHAPE, SAMPLES = (224, 224, 3), 8000
BATCHES = (64, 256)
NUMPY, TFDATA = "numpy", "tf.data"


def measure(rounds: int) -> dict[str, Spread]:
    """What of a pass -> tf.data's speed in it to numpy's; the first round is not counted."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with EmbeddedServer() as server:
        spec = {"x": ("uint8", SHAPE), "y": ("int64", ())}
        with Writer("tf", url=server.url, spec=spec, budget_bytes=4 << 30, **QUIET) as writer, writer.epoch() as epoch:
            image = np.zeros(SHAPE, np.uint8)
            for number in range(SAMPLES):
                epoch.write({"x": image, "y": number})
        passes: dict[tuple[str, int], list[Pass]] = {(path, size): [] for size in BATCHES for path in (NUMPY, TFDATA)}
        for number in range(rounds + 1):
            for path, batch in list(passes)[:: 1 if number % 2 else -1]:
                passes[path, batch].append(_pass(server.url, path, batch, f"{path}-{batch}-{number}"))
    found = {}
    for batch in BATCHES:
        pairs = list(zip(passes[NUMPY, batch], passes[TFDATA, batch], strict=True))[1:]
        found[f"batches of {batch}"] = spread(ours.rate / plain.rate for plain, ours in pairs)
        whole = spread(plain.seconds / ours.seconds for plain, ours in pairs)
        found[f"batches of {batch}, whole passes of {SAMPLES:,} samples"] = whole
    return found


class Pass(NamedTuple):
    """One pass over the epoch."""

    seconds: float
    """Of all of it."""
    rate: float
    """Samples a second from its first batch on."""


def _pass(url: str, path: str, batch: int, group: str) -> Pass:
    from penstock_consumer.adapters.tensorflow import dataset

    with Loader("tf", group=group, batch_size=batch, url=url, **QUIET) as loader:
        batches = iter(loader if path == NUMPY else dataset(loader))
        began = time.perf_counter()
        next(batches)
        first = time.perf_counter()
        for _ in batches:
            pass
        ended = time.perf_counter()
    return Pass(ended - began, (SAMPLES - batch) / (ended - first))
