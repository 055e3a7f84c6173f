"""``python -m benchmarks.start``: from a command line to the first batch, with `penstock run` and with a torch
DataLoader.

Both decode the same JPEGs with two workers and import torch. Their runs alternate, and the ratio is that of
neighbouring runs. Warm runs find their files in the page cache. For cold runs, the files of the environment are dropped
from the page cache first, unless another process maps them. Bytecode is compiled before, as by an installer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.arguments import whole_number

FILES, SIDE, BATCH, WORKERS = 512, 64, 32, 2
ROUNDS = 10
_ROOT = Path(__file__).parents[1]

TRAINER = f"""
import os, time
import torch
import penstock

with penstock.Loader("train", group="start", batch_size={BATCH}) as loader:
    for batch in loader:
        torch.from_numpy(batch["x"])
        print("first batch", time.time(), flush=True)
        os._exit(0)
"""

LOADER = f"""
import glob, os, time
import numpy as np
import torch
from PIL import Image

class Photos(torch.utils.data.Dataset):
    def __init__(self):
        self.paths = sorted(glob.glob("photos/*/*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as image:
            return np.array(image.convert("RGB").resize(({SIDE}, {SIDE}))), "cat" in self.paths[index]

for batch in torch.utils.data.DataLoader(Photos(), batch_size={BATCH}, shuffle=True, num_workers={WORKERS}):
    print("first batch", time.time(), flush=True)
    os._exit(0)
"""


def make_photos(folder: Path) -> None:
    """Write small JPEGs of two classes."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        path = folder / "photos" / ("cat" if number % 2 else "dog") / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (128, 128, 3), dtype=np.uint8)).save(path)


def first_batch_s(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Run a command and return the seconds until it reports a batch."""
    began = time.time()
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = [line for line in ended.stdout.splitlines() if line.startswith("first batch")]
    if not said:
        raise SystemExit(f"{command}: no batch came: {ended.stderr}")
    return float(said[0].split()[-1]) - began


def drop_from_page_cache() -> None:
    """Make the kernel read the environment's and Penstock's files from the disk again."""
    for folder in (Path(sysconfig.get_path("purelib")), _ROOT):
        for path in _files(folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _files(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (path for name in names if (path := Path(root, name)).is_file() and os.access(path, os.R_OK))


def measure(folder: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return for warm and cold starts the seconds of both, round by round."""
    (folder / "train.py").write_text(TRAINER)
    (folder / "loader.py").write_text(LOADER)
    run = [sys.executable, "-m", "penstock", "run", "images", "photos/", "--resize", f"{SIDE}x{SIDE}"]
    ours = [*run, "--workers", str(WORKERS), "--", sys.executable, "train.py"]
    theirs = [sys.executable, "loader.py"]
    paths = [str(_ROOT / name) for name in ("common", "producer", "consumer", "front")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_") and k != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    for command in (ours, theirs):  # to compile bytecode
        first_batch_s(command, folder, environment)
    found: dict[str, list[tuple[float, float]]] = {"warm": [], "cold": []}
    for _ in range(rounds):
        for kind, pairs in found.items():
            pair = []
            for command in (ours, theirs):
                if kind == "cold":
                    drop_from_page_cache()
                pair.append(first_batch_s(command, folder, environment))
            pairs.append((pair[0], pair[1]))
    return found


def shown(found: dict[str, list[tuple[float, float]]]) -> str:
    """Return the table."""
    text = "\n| start | penstock run, s | DataLoader, s | ratio, median (range) |\n|---|---|---|---|\n"
    for kind, pairs in found.items():
        ratios = [ours / theirs for ours, theirs in pairs]
        ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        text += f"| {kind} | {ours:.2f} | {theirs:.2f} | {spread} |\n"
    return text


def main() -> int:
    """Measure, print the table, and write the figures to the file of ``--json``."""
    parser = argparse.ArgumentParser("python -m benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=whole_number(1), default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-start-") as name:
        make_photos(Path(name))
        found = measure(Path(name), args.rounds)
    figures: dict[str, Any] = {**found, "cores": os.cpu_count(), "load": os.getloadavg()}
    print(shown(found), f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end", sep="\n")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
