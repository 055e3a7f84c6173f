"""One round of JPEGs that become torch batches: ``penstock produce`` with two workers, a server, a trainer.

``python -m benchmarks.between COMMIT --jpegs`` runs it on both commits in turn, so it uses only what users use.
`benchmarks.loading` compares it with torch's DataLoader. The first epochs are not timed. In them every process starts,
and memory for payloads is allocated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cpu import tree_seconds
from benchmarks.trainers import QUIET, Trainers
from penstock import EmbeddedServer, Loader

ROOT = Path(__file__).parents[1]
STREAM, BATCH, WORKERS = "photographs", 64, 2
WARM, EPOCHS = 2, 2
"""The epochs before the clock starts, and the timed ones."""
BUDGET = "512mb"


def run(payload: str) -> dict[str, Any]:
    """Return seconds, samples, and CPU seconds by role."""
    with EmbeddedServer() as server:
        trainers = Trainers(1, lambda _: _train(server.url))
        producer = subprocess.Popen(
            [
                sys.executable, "-m", "penstock", "produce", "dataset", "benchmarks.photographs:photographs",
                "--stream", STREAM, "--epochs", str(WARM + EPOCHS), "--workers", str(WORKERS), "--payload", payload,
                "--budget", BUDGET, "--json", "--url", server.url,
            ],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={**os.environ},
        )  # fmt: skip
        threading.Thread(target=_end_with, args=(producer.pid, trainers.pids), daemon=True).start()
        try:
            roles = {"producer and workers": [producer.pid], "trainer": trainers.pids, "server": [server.pid]}
            trainers.begin()
            trainers.end()
            before = {role: tree_seconds(pids) for role, pids in roles.items()}
            began = trainers.begin()
            at, samples = trainers.end()
            cpu = {role: tree_seconds(pids) - before[role] for role, pids in roles.items()}
            trainers.close()
        finally:
            producer.terminate()
            producer.wait()
    return {"seconds": at - began, "samples": sum(samples), "cpu_s": cpu}


def _end_with(producer: int, trainers: list[int]) -> None:
    """End all processes if the producer fails, because a trainer would wait for samples that never come."""
    found = os.waitid(os.P_PID, producer, os.WEXITED | os.WNOWAIT)  # its CPU time is read after its end
    if found is None or found.si_status in (0, signal.SIGTERM):
        return
    for pid in trainers:
        os.kill(pid, signal.SIGKILL)
    sys.stderr.write(f"penstock produce ended with {found.si_status}\n")
    os._exit(1)


def _train(url: str) -> Iterator[int]:
    from torch.utils.data import DataLoader

    from penstock.torch import dataset

    with Loader(STREAM, group="resnet", batch_size=BATCH, url=url, **QUIET) as loader:
        batches: Any = DataLoader(dataset(loader), batch_size=None)
        for epochs in (WARM, EPOCHS):
            yield sum(len(batch["x"]) for _ in range(epochs) for batch in batches)


def main() -> None:
    """Print the round as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jpegs", description=__doc__)
    parser.add_argument("payload", help="inline, or segments:DIR")
    print(json.dumps(run(parser.parse_args().payload)))


if __name__ == "__main__":
    main()
