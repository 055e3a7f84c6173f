"""`penstock bench` from a shell, and its rule of judgement."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock.bench.recommendation import judge
from penstock.cli.bench import SHARED_MEMORY

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = [str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front", ".")]
SIDES = ["Penstock inline", "Penstock with segments"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Make a folder with a few pictures, a transform, and a module with an unusual dataset."""
    rng = np.random.default_rng(0)
    for n in range(12):
        path = tmp_path / "photos" / ("cat" if n % 2 else "dog") / f"{n:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(path)
    (tmp_path / "augment.py").write_text(
        "def flip(sample, rng):\n    return {**sample, 'x': sample['x'][:, ::-1]}\n"
        "def broken(sample, rng):\n    raise KeyError('nope')\n"
    )
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "class Rows:\n"
        "    def __len__(self):\n        return 10\n"
        "    def __getitem__(self, i):\n        return {'x': np.zeros((i + 1, 2), np.float32), 'name': b'n' * i}\n"
        "rows = Rows()\n"
    )
    return tmp_path


def start(cwd: Path, *arguments: str, first: Path | None = None) -> subprocess.Popen[str]:
    """Start `penstock bench` in a separate process group. Modules in ``first`` hide others."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    paths = os.pathsep.join([*([str(first)] if first else []), *_PATHS])
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "bench", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**clean, "PYTHONPATH": paths}, start_new_session=True,
    )  # fmt: skip


def without_torch(folder: Path) -> Path:
    """Make a folder that makes `import torch` fail as if torch were missing."""
    (folder / "hides").mkdir()
    (folder / "hides" / "torch.py").write_text("raise ImportError('no torch')\n")
    return folder / "hides"


# --- from a shell -----------------------------------------------------------------------------------------------------


def test_a_folder_is_measured_on_all_sides_and_the_verdict_says_which_to_use(work: Path) -> None:
    """A new user decides by this command whether Penstock is worth it, with one trainer and with several."""
    args = ["images", "photos/", "--resize", "32", "--transform", "augment:flip", "--trainers", "2", "--seconds", "2"]
    bench = start(work, *args, "--json")
    out, err = bench.communicate(timeout=240)
    assert bench.returncode == 0, err
    found = json.loads(out)
    assert [one["trainers"] for one in found["verdicts"]] == [1, 2]
    for one in found["verdicts"]:
        assert list(one["samples_per_s"]) == ["DataLoader", *SIDES]
        assert all(rate > 0 for rates in one["samples_per_s"].values() for rate in rates)
        assert one["use"] in one["samples_per_s"]
        ratios = {side: one["samples_per_s"][side][0] / one["samples_per_s"]["DataLoader"][0] for side in SIDES}
        assert {side: ratio["median"] for side, ratio in one["ratios"].items()} == pytest.approx(ratios)
    assert found["sample"]["nbytes"] == 32 * 32 * 3 + 8
    assert "6/6 turns" in err


def test_without_torch_a_process_pool_is_measured_and_ragged_samples_pass(work: Path) -> None:
    """Users of other frameworks have no torch, and their samples may differ in size."""
    spec = json.dumps({"x": ["float32", [None, 2]], "name": ["bytes", []]})
    args = ["dataset", "mine:rows", "--spec", spec, "--trainers", "1", "--seconds", "1"]
    bench = start(work, *args, first=without_torch(work))
    out, err = bench.communicate(timeout=240)
    assert bench.returncode == 0, err
    *table, verdict = out.splitlines()
    assert [line.split()[1] for line in table] == ["fed", "process", "Penstock", "Penstock"]
    assert verdict.startswith("1 trainer: use ")
    assert "relative to a process pool: Penstock inline " in verdict
    assert "torch is not installed, so a process pool stands for a DataLoader" in err


def test_samples_that_cannot_be_made_are_one_line(work: Path) -> None:
    """A typo in a transform must not become six rounds of nothing."""
    bench = start(work, "images", "photos/", "--transform", "augment:broken")
    out, err = bench.communicate(timeout=120)
    assert (bench.returncode, out) == (1, "")
    *_, line = err.splitlines()
    assert re.fullmatch(r"penstock: 100 samples cannot be made; the last: .*KeyError: 'nope'.*", line)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_bench_that_is_ended(work: Path, blow: signal.Signals) -> None:
    """Trainers that continue after the owner was killed would take the cores for ever, and its segments the memory."""
    with start(work, "images", "photos/", "--seconds", "600", first=without_torch(work)) as bench:
        assert bench.stderr is not None
        while "a process pool" not in bench.stderr.readline():
            assert bench.poll() is None
        while not children(bench.pid):  # a trainer of the first turn
            assert bench.poll() is None
        bench.send_signal(blow)
        bench.wait(60)
    assert bench.returncode == (130 if blow == signal.SIGTERM else -blow)
    deadline = time.monotonic() + 60
    while is_alive(bench.pid) or [*SHARED_MEMORY.glob(f"penstock-bench-{bench.pid}-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def children(pid: int) -> list[str]:
    """Return the processes that a process has forked and that are in its group, without its server."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if os.getpgid(int(child)) == pid]


def is_alive(group: int) -> bool:
    """Return whether a process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inline", "segments", "use"),
    [
        (86, 101, "DataLoader"),
        (109, 109, "DataLoader"),
        (150, 160, SIDES[0]),
        (290, 370, SIDES[1]),
        (90, 120, SIDES[1]),
    ],
)
def test_the_simplest_side_wins_unless_another_gains_a_tenth(inline: float, segments: float, use: str) -> None:
    """A server is one more thing to run, and segments tie readers to one host, so neither is proposed without a
    gain.
    """
    verdict = judge({"DataLoader": [100.0] * 3, SIDES[0]: [inline] * 3, SIDES[1]: [segments] * 3}, 4)
    assert verdict.use == use
    whom = "one DataLoader each" if use == "DataLoader" else use
    assert verdict.sentence.startswith(f"4 trainers: use {whom}. Samples per second, relative to one DataLoader each: ")


def test_a_verdict_says_when_its_rounds_disagree_or_there_was_only_one() -> None:
    """A user should know that a verdict may be chance."""
    steady = judge({"DataLoader": [100, 50, 10], SIDES[0]: [200, 100, 20]}, 1)
    shaky = judge({"DataLoader": [100, 100, 100], SIDES[0]: [90, 120, 130]}, 1)
    once = judge({"DataLoader": [100], SIDES[0]: [200]}, 1)
    assert steady.sentence.endswith("relative to a DataLoader: Penstock inline 2.00x")
    assert "Penstock inline 1.20x (0.90-1.30). The rounds disagree" in shaky.sentence
    assert "2.00x. That was one short round" in once.sentence
