"""tf.data service, uncompressed: dispatcher and worker are one process, which counts as the writer, and a reader.

Samples must come from a graph. They are ready in the worker's memory, and are batched there. Modes: ``plain`` and
``caching``, the cross-trainer cache, with which each reader must see everything. The cache needs endless data.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

from benchmarks.transports.protocol import Load, Turns, run

service = tf.data.experimental.service
worker_config: Any = importlib.import_module("tensorflow.core.protobuf.service_config_pb2").WorkerConfig
"""A setting that the public class lacks: the size of the cross-trainer cache, 10 GB by default."""


def write(load: Load, turns: Turns) -> None:
    """Serve. A turn needs nothing from it."""
    dispatcher = service.DispatchServer()
    config = worker_config(
        dispatcher_address=dispatcher.target.split("://")[1],
        worker_address="localhost:%port%",
        protocol="grpc",
        heartbeat_interval_ms=100,
        dispatcher_timeout_ms=60_000,
        cross_trainer_cache_size_bytes=load.room_bytes,
    )
    worker = service.WorkerServer(config)
    (Path(load.place) / "address").write_text(dispatcher.target)
    for _ in turns:
        pass
    del worker


def read(load: Load, turns: Turns) -> None:
    """Read turns. Each takes batches from a separate job or, with the cache, from the one that all share."""
    target = (Path(load.place) / "address").read_text()
    caching = load.mode == "caching"
    cache = service.CrossTrainerCache(trainer_id=str(load.reader)) if caching else None
    job: dict[str, Any] = {"job_name": "bench", "cross_trainer_cache": cache} if caching else {}
    distribute = service.distribute(processing_mode=service.ShardingPolicy.OFF, service=target, compression=None, **job)
    shared = iter(_made(load).apply(distribute)) if caching else None
    for samples in turns:
        batches = shared or iter(_made(load).take(samples // load.batch).apply(distribute))
        for _ in range(samples // load.batch):
            turns.got(next(batches))


def _made(load: Load) -> Any:
    """Return endless batches of samples kept in the worker's memory."""
    pool = load.pool()
    values = [int(sample.flat[0]) for sample in pool]

    def sample(value: Any) -> Any:
        return tf.fill(load.shape, tf.cast(value, load.dtype))

    kept = tf.data.Dataset.from_tensor_slices(values).map(sample)
    if load.by_batch:
        return kept.batch(load.batch).cache().repeat()
    return kept.cache().repeat().batch(load.batch)


if __name__ == "__main__":
    run({"write": write, "read": read})
