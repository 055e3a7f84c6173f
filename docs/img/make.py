"""Make the pictures of the documents again, from real runs: ``python docs/img/make.py``. It takes about a minute.

It needs the extra ``demo``. No picture is drawn manually: servers, workers and trainers are processes, and one is
stopped.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

import penstock
from penstock.cli.monitor_screen import drawn
from penstock_common.stream.servers.embedded import EmbeddedServer

HERE = Path(__file__).resolve().parent
PATHS = os.pathsep.join(str(HERE.parents[1] / folder) for folder in ("common", "producer", "consumer", "front"))
COLUMNS = 100
PATIENCE_S = 120.0
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

PHOTOS = """
import time
import numpy as np

data = [(np.full((64, 64, 3), number % 251, np.uint8), number % 10) for number in range(2000)]

def augment(sample, rng):
    time.sleep(0.04)  # heavy Python
    return sample
"""
TRAIN = """
import sys, time, penstock

group, member, step_s = sys.argv[1:]
tuning = penstock.Tuning(member=member, prefetch_bytes=1 << 20)
with penstock.Loader("train", group=group, batch_size=16, tuning=tuning) as loader:
    while True:
        for batch in loader:
            time.sleep(float(step_s))
"""
TRAINERS = (("resnet", "gpu-0", "0.18"), ("resnet", "gpu-1", "0.18"), ("vit", "gpu-2", "0.12"))


def main() -> None:
    """Make all pictures."""
    with EmbeddedServer() as server, tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": PATHS, "PENSTOCK_URL": server.url, "PENSTOCK_QUEUE_URL": server.url}
        look_at_digits(server.url, environment)
        watch_a_run(Path(folder), environment)


def look_at_digits(url: str, environment: dict[str, str]) -> None:
    """Make show.png, and the plots of stat."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    with penstock.Writer("digits", url=url, info={"classes": {"y": list(NAMES)}}) as writer, writer.epoch() as epoch:
        for image, label in zip(images, labels, strict=True):
            epoch.write({"x": (image.reshape(8, 8) * 15).astype(np.uint8), "y": np.int64(label)})
    penstock_command(environment, "show", "digits", "--count", "18", "--seed", "1", "--out", str(HERE / "show.png"))
    with tempfile.TemporaryDirectory() as folder:
        penstock_command(environment, "stat", "digits", "--exact", "--plots", folder)
        for name in ("x.histogram", "y.classes"):
            (HERE / f"stat-{name.replace('.', '-')}.png").write_bytes((Path(folder) / f"{name}.png").read_bytes())


def watch_a_run(folder: Path, environment: dict[str, str]) -> None:
    """Make monitor.svg, of trainers that wait for producers, and dead.svg, of a trainer that stands still.

    A trainer that is killed looks the same from other hosts. On its own host, the others get its entries at once.
    """
    (folder / "photos.py").write_text(PHOTOS)
    (folder / "train.py").write_text(TRAIN)
    making = ["-m", "penstock", "produce", "dataset", "photos:data", "--transform", "photos:augment"]
    making += ["--workers", "3", "--budget", "256mb", "--epochs", "20", "--ahead", "2"]
    with ExitStack() as stack:
        stack.enter_context(running(folder, environment, *making))
        trainers = [stack.enter_context(running(folder, environment, "train.py", *one)) for one in TRAINERS]
        time.sleep(20.0)  # for rates of a run that has found its pace
        save("monitor.svg", until(environment, "producers"))
        trainers[1].send_signal(signal.SIGSTOP)
        save("dead.svg", until(environment, "dead member"))


@contextmanager
def running(folder: Path, environment: dict[str, str], *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run Python during the block, and discard its output."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, *argv], cwd=folder, env=environment, **silent) as ran:  # type: ignore[call-overload]
        try:
            yield ran
        finally:
            ran.terminate()
            ran.send_signal(signal.SIGCONT)  # a process that stands still ends once it goes on


def penstock_command(environment: dict[str, str], *argv: str) -> str:
    """Return the output of a ``penstock`` command."""
    command = [sys.executable, "-m", "penstock", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def until(environment: dict[str, str], cause: str) -> list[dict[str, Any]]:
    """Wait until the monitor names that cause, and return its records."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        found: list[dict[str, Any]] = json.loads(penstock_command(environment, "monitor", "train", "--once", "--json"))
        if found[0]["bottleneck"]["cause"] == cause:
            return found
        time.sleep(0.5)
    raise SystemExit(f"{cause} was never named, but {found[0]['bottleneck']}")


def save(name: str, records: list[dict[str, Any]]) -> None:
    """Save the screen of a terminal of 100 columns. The picture fetches no font."""
    for host in records[0]["workers"]:
        host["host"] = "workers-a"  # not whose machine this is
    terminal = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True, color_system="truecolor")
    terminal.print(Text("$ penstock monitor train", style="bold"))
    terminal.print(drawn(records, COLUMNS))
    text = terminal.export_svg(title="penstock", unique_id=name.partition(".")[0])
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
