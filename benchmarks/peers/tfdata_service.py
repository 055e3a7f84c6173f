"""tf.data service: a dispatcher with a journal, workers, and trainers by ``distribute``.

With ``sharing`` (dynamic sharding), trainers of one job share an epoch. With ``caching`` (the cross-trainer cache),
each trainer must see everything. The cache is only for endless data, whose first samples are counted.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import tensorflow as tf

from benchmarks.peers.protocol import SAMPLE_BYTES, Job, Report, run

service = tf.data.experimental.service
worker_config: Any = importlib.import_module("tensorflow.core.protobuf.service_config_pb2").WorkerConfig
"""A setting that the public class lacks: the size of the cross-trainer cache, 10 GB by default."""


def serve(job: Job, report: Report) -> None:
    """Run the dispatcher."""
    config = service.DispatcherConfig(
        port=int(job.extra["port"]), fault_tolerant_mode=True, work_dir=job.extra["folder"], protocol="grpc"
    )
    server = service.DispatchServer(config)
    report.say("made")
    server.join()


def produce(job: Job, report: Report) -> None:
    """Run one worker, on a port that it has again after a restart."""
    config = worker_config(
        dispatcher_address=f"127.0.0.1:{job.extra['port']}",
        worker_address=f"127.0.0.1:{job.extra['worker']}",
        port=int(job.extra["worker"]),
        heartbeat_interval_ms=200,
        protocol="grpc",
        dispatcher_timeout_ms=30_000,
        cross_trainer_cache_size_bytes=job.room * SAMPLE_BYTES,
    )
    service.WorkerServer(config).join()


def read(job: Job, report: Report) -> None:
    """Read one epoch, or the first samples."""
    endless = job.mode == "caching"
    source = tf.data.Dataset.counter() if endless else tf.data.Dataset.range(job.samples)

    def make(number: Any) -> Any:
        # it must be a graph op, because Python code runs only in the trainer's process
        words = tf.range(SAMPLE_BYTES // 8, dtype=tf.int64) * 1_000_003 + number
        return tf.bitcast(words, tf.uint8)

    cache = service.CrossTrainerCache(trainer_id=job.member) if endless else None
    dataset = source.map(make).batch(job.batch)
    dataset = dataset.apply(
        service.distribute(
            processing_mode=service.ShardingPolicy.OFF if endless else service.ShardingPolicy.DYNAMIC,
            service=f"grpc://127.0.0.1:{job.extra['port']}",
            job_name=job.group,
            max_outstanding_requests=2,
            cross_trainer_cache=cache,
        )
    )
    last = 0
    for rows in dataset:
        found = tf.reshape(rows, [-1, SAMPLE_BYTES]).numpy()
        report.step(found, job.step_s)
        last = int(found[-1].view("int64")[0])
        if endless and last >= job.samples - 1:
            return
        if report.is_checkpoint_due(job):
            report.say("checkpoint", state={})


if __name__ == "__main__":
    run({"serve": serve, "produce": produce, "read": read})
