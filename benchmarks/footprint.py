"""The cost before the first batch, and of an idle process: ``python -m benchmarks.footprint``.

- Imports: seconds and CPU seconds of ``import X`` in a fresh interpreter, less those of an empty one, and the part of
  Penstock's own modules (the sum of their own times in ``-X importtime``).
- First batch: from the start of a trainer's process whose data is ready, cold and on resume from a checkpoint.
- Memory: the resident memory of each process in the middle of a small run, and the part that no other process shares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.counting import ROOT, Stuck, wait_for
from benchmarks.machine import describe_machine, progress
from benchmarks.memory import Resident, children, resident
from benchmarks.peers.catalogue import EVERYONE, RESUME, Peer
from benchmarks.peers.environments import Unavailable, python_of
from benchmarks.scenarios import Size, Stage, handed, resumed
from penstock import EmbeddedServer

IMPORTS = {
    "import penstock": ("penstock", "import penstock"),
    "penstock.Writer": ("penstock", "import penstock; penstock.Writer"),
    "penstock.Loader": ("penstock", "import penstock; penstock.Loader"),
    "penstock.torch": ("penstock", "import penstock.torch"),
    "penstock.tensorflow": ("penstock", "import penstock.tensorflow"),
    "penstock.keras": ("penstock", "import penstock.keras"),
    "penstock.jax": ("penstock", "import penstock.jax"),
    "numpy": ("penstock", "import numpy"),
    "redis": ("redis", "import redis"),
    "tensorcom": ("tensorcom", "import tensorcom"),
    "torch": ("torch", "import torch.utils.data"),
    "torchdata": ("torchdata", "import torchdata.stateful_dataloader"),
    "streaming": ("mosaic", "import streaming"),
    "tensorflow": ("tfdata", "import tensorflow"),
}
"""Name -> environment, and the line that is run."""
TOLD = (
    "; import resource as r, time as t; u = r.getrusage(r.RUSAGE_SELF); print(t.monotonic(), u.ru_utime + u.ru_stime)"
)
MB = 1e6


@dataclass(frozen=True)
class Import:
    """The medians of one line."""

    seconds: float
    cpu_s: float
    own_s: float
    """The time in Penstock's own modules."""


def imported(name: str, rounds: int) -> Import:
    """Run the line and an empty one in turn. The first round warms the file cache. Raises Unavailable."""
    environment, line = IMPORTS[name]
    python = python_of(environment)
    found = []
    for _ in range(rounds + 1):
        (empty, empty_cpu), (whole, whole_cpu) = _timed(python, "pass"), _timed(python, line)
        found.append((whole - empty, whole_cpu - empty_cpu))
    seconds, cpu_s = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return Import(seconds, cpu_s, _own_seconds(python, line))


def _timed(python: Path, line: str) -> tuple[float, float]:
    began = time.monotonic()
    done = subprocess.run([python, "-c", line + TOLD], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise Unavailable(done.stderr.strip().splitlines()[-1])
    at, cpu_s = map(float, done.stdout.splitlines()[-1].split())
    return at - began, cpu_s


def _own_seconds(python: Path, line: str) -> float:
    """Return the time of Penstock's own modules.

    Lines of ``-X importtime`` are: own microseconds | with what it imports | module.
    """
    done = subprocess.run(
        [python, "-X", "importtime", "-c", line], capture_output=True, text=True, cwd=ROOT, check=True
    )
    rows = [row.removeprefix("import time:").split("|") for row in done.stderr.splitlines() if row.count("|") == 2]
    return sum(int(own) for own, _, module in rows if module.strip().startswith("penstock")) / 1e6


@dataclass(frozen=True)
class FirstBatch:
    """Seconds from the start of the trainer's process. Those after its imports are in brackets."""

    cold_s: float
    cold_ready_s: float
    resumed_s: float | None
    resumed_ready_s: float | None


def first_batch(peer: Peer, size: Size) -> FirstBatch:
    """Measure with the producer far ahead, so that no trainer waits for samples to be made."""
    with Stage(peer, size) as stage:
        producer = stage.produce()
        if producer is not None and peer.backing == "server":
            time.sleep(2)  # it is ahead, or waits for space
        trainer = stage.train()
        wait_for(lambda: bool(trainer.steps) or trainer.is_over, "the first batch", [trainer])
        if not trainer.steps:
            raise Stuck(trainer.last_words())
        at, ready = trainer.all("step")[0]["at"], trainer.all("ready")[0]["at"]
        cold, cold_ready = at - trainer.began, at - ready
    if RESUME in peer.reasons:
        return FirstBatch(cold, cold_ready, None, None)
    answer = resumed(peer, size)
    return FirstBatch(cold, cold_ready, answer.with_imports_s, answer.first_batch_s)


def memory(peer: Peer, size: Size) -> dict[str, Resident]:
    """Return role -> memory of its largest process, when the trainer has had a half."""
    with Stage(peer, size) as stage:
        trainer = stage.train()
        stage.produce()
        wait_for(lambda: handed(trainer) >= size.samples // 2 or trainer.is_over, "half of it", [trainer])
        if trainer.is_over:
            raise Stuck(trainer.last_words())
        pids = [(one.job.role, one.popen.pid) for one in stage.processes if not one.is_over]
        pids += [("trainer's worker", pid) for pid in children(trainer.popen.pid)]
        pids += [("server", pid) for pid in stage.servers]
        return _largest(pids)


def fleet_memory() -> dict[str, Resident]:
    """Return the memory of the processes of the command with a worker, in the middle of an epoch."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "numbered.py").write_text(
            "import time\nimport numpy as np\n\nclass Numbered:\n    def __len__(self): return 2000\n"
            "    def __getitem__(self, n):\n        time.sleep(0.005)\n"
            "        return {'x': np.full(3072, n % 256, np.uint8)}\n"
        )
        command = [
            sys.executable, "-m", "penstock", "produce", "dataset", "numbered:Numbered", "--stream", "footprint",
            "--workers", "1", "--url", server.url,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(lambda: bool(children(process.pid)) or process.poll() is not None, "the worker")
            time.sleep(5)
            if process.poll() is not None:
                raise Stuck(f"penstock produce ended with {process.returncode}")
            workers = [("worker", pid) for pid in children(process.pid) if "tracker" not in _command(pid)]
            return _largest([("dispatcher", process.pid), *workers, ("server", server.pid)])
        finally:
            process.terminate()
            process.wait(30)


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _largest(pids: list[tuple[str, int]]) -> dict[str, Resident]:
    found: dict[str, Resident] = {}
    for role, pid in pids:
        one = resident(pid)
        if role not in found or one.whole > found[role].whole:
            found[role] = one
    return found


def tried(ask: Callable[[], Any], what: str) -> Any:
    """Return the answer, or the reason why there is none."""
    progress(what)
    try:
        return ask()
    except (Unavailable, Stuck) as error:
        return f"{type(error).__name__.lower()}: {error}"
    finally:
        progress("")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.footprint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each import (default: %(default)s)")
    parser.add_argument("--only", default="", help="systems whose name contains this, such as 'Penstock'")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args()
    # an installed package is compiled, and so is this one after the first round
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()) + "\n")
    results: dict[str, Any] = {"environment": describe_machine(), "imports": {}, "systems": {}}
    print("| import | seconds | CPU s | Penstock's own, s |\n|---|---|---|---|")
    for name in IMPORTS:
        if args.only.lower() in name:
            one = tried(lambda name=name: imported(name, args.rounds), name)  # type: ignore[misc]
            results["imports"][name] = one if isinstance(one, str) else asdict(one)
            print(f"| `{name}` | {_import_cells(one)} |", flush=True)
    print("\n| | first batch, cold | on resume | MB resident (own) |\n|---|---|---|---|")
    for peer in EVERYONE:
        if args.only.lower() in peer.name.lower():
            results["systems"][peer.name] = _system(peer)
    held = tried(fleet_memory, "penstock produce")
    print(f"| `penstock produce`, one worker | | | {_memory_cell(held)} |")
    results["systems"]["penstock produce"] = held if isinstance(held, str) else _plain(held)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def _system(peer: Peer) -> dict[str, Any]:
    size = Size(step_s=0.01)
    first = tried(lambda: first_batch(peer, size), f"{peer.name}: first batch")
    held = tried(lambda: memory(peer, size), f"{peer.name}: memory")
    print(f"| {peer.name} | {_first_cells(first)} | {_memory_cell(held)} |", flush=True)
    return {
        "first_batch": first if isinstance(first, str) else asdict(first),
        "memory": held if isinstance(held, str) else _plain(held),
    }


def _import_cells(found: Import | str) -> str:
    if isinstance(found, str):
        return f"{found} | | "
    return f"{found.seconds:.2f} | {found.cpu_s:.2f} | {found.own_s:.2f}"


def _first_cells(found: FirstBatch | str) -> str:
    if isinstance(found, str):
        return f"{found} | "
    cold = f"{found.cold_s:.1f} s ({found.cold_ready_s:.2f} after imports)"
    if found.resumed_s is None:
        return f"{cold} | n/a"
    return f"{cold} | {found.resumed_s:.1f} s ({found.resumed_ready_s:.2f})"


def _memory_cell(found: dict[str, Resident] | str) -> str:
    if isinstance(found, str):
        return found
    names = {"read": "trainer", "produce": "producer", "serve": "dispatcher"}
    return ", ".join(
        f"{names.get(role, role)} {one.whole / MB:.0f} ({one.own / MB:.0f})" for role, one in found.items()
    )


def _plain(found: dict[str, Resident]) -> dict[str, Any]:
    return {role: asdict(one) for role, one in found.items()}


if __name__ == "__main__":
    sys.exit(main())
