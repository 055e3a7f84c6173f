"""One round: a fresh server, a writer process and a reader process, timed from outside; CPU of all three."""

from __future__ import annotations

import importlib
import multiprocessing
import resource
import time
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks import ours, plain
from benchmarks.cases import Case
from penstock_common.stream.servers.embedded import EmbeddedServer

SIDES = {"penstock": ours, "plain redis-py + hiredis": plain}


@dataclass(frozen=True, slots=True)
class Round:
    """What one round of one side took."""

    seconds: float
    writer_cpu_s: float
    reader_cpu_s: float
    server_cpu_s: float
    samples: int


def run_round(side: str, case: Case) -> Round:
    """Writer and reader work at once; the clock runs from when both are ready until the reader has everything."""
    context = multiprocessing.get_context("spawn")
    with EmbeddedServer() as server:
        SIDES[side].prepare(server.url, case)
        barrier, results = context.Barrier(3), context.Queue()
        processes = [
            context.Process(target=_role, args=(role, side, server.url, case, barrier, results), daemon=True)
            for role in ("write", "read")
        ]
        for process in processes:
            process.start()
        before = _server_cpu(server.url)
        barrier.wait(60)
        began = time.perf_counter()
        found = dict([results.get(timeout=300), results.get(timeout=300)])
        seconds = max(found["read"]["at"], found["write"]["at"]) - began
        cpu = _server_cpu(server.url) - before
        for process in processes:
            process.join(30)
    return Round(seconds, found["write"]["cpu"], found["read"]["cpu"], cpu, found["read"]["samples"] or case.samples)


def _role(role: str, side: str, url: str, case: Case, barrier: Any, results: Any) -> None:
    module = SIDES[side]
    importlib.import_module("penstock_consumer.loader")  # importing is not what is measured
    importlib.import_module("penstock_producer.writing.writer")
    case.pool()
    barrier.wait(60)
    before = _own_cpu()
    samples = getattr(module, role)(url, case)
    # perf_counter is CLOCK_MONOTONIC here: one clock for all processes of the machine
    results.put((role, {"at": time.perf_counter(), "cpu": _own_cpu() - before, "samples": samples}))


def _own_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _server_cpu(url: str) -> float:
    info = redis.Redis.from_url(url).info("cpu")
    return float(info["used_cpu_sys"]) + float(info["used_cpu_user"])
