"""Profiles, comparisons of commits, and the limits of moving bytes: their sums, and small real rounds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest

from benchmarks import between, channel, limits, profiles, sampling
from benchmarks.cases import ONE_BY_ONE, Case
from benchmarks.cpu import running_seconds
from benchmarks.sides import INLINE, SHARED_MEMORY

SMALL = Case("4 kB", (1024,), "float32", batch=64, room_bytes=8 << 20, most_bytes=4_000_000)
RAW = """\
main (train.py:3);Writer.write (penstock_producer/write/writer.py:10);add (penstock_common/wire/block.py:187) 3
main (train.py:3);Writer.write (penstock_producer/write/writer.py:11) 1
main (train.py:3);send (redis/connection.py:9) 2
main (train.py:3);wait (threading.py:331) 4
"""
SCRIPT = """\
   17  ffffffff81a1b2c3 copy_user_generic_string ([kernel.kallsyms])
   17  ffffffff81a1b2c4 clear_page_erms ([kernel.kallsyms])
   17  ffffffff81a1b2c5 tcp_sendmsg_locked ([kernel.kallsyms])
   17      7f00aa112233 _PyEval_EvalFrameDefault (/usr/lib/libpython3.11.so.1.0)
   17      7f00aa112234 __memmove_avx_unaligned_erms (/usr/lib/x86_64-linux-gnu/libc.so.6)
   17      7f00aa112235 XXH3_64bits_update (/venv/xxhash/_xxhash.cpython-311-x86_64-linux-gnu.so)
   21      55d0aa112236 processCommand (/usr/bin/redis-check-rdb)
   21      7f00aa112237 je_arena_bin (/usr/lib/x86_64-linux-gnu/libjemalloc.so.2)
not a sample
"""


def test_python_lines_are_counted_by_our_module_and_by_others_library() -> None:
    """A share that stands at the wrong module sends its reader to the wrong file."""
    found = sampling.by_module(RAW)
    assert found == {
        "penstock_common.wire.block": 3,
        "penstock_producer.write.writer": 1,
        "redis-py": 2,
        "Python's library": 4,
    }
    assert next(iter(sampling.shares(found).items())) == ("Python's library", 40)


def test_all_else_is_counted_by_what_it_is_for_process_by_process() -> None:
    """Neither the time of copies in the kernel nor that of xxh3 must count as Python's."""
    found = sampling.by_purpose(SCRIPT)
    assert set(found[17]) == {
        "kernel: copying", "kernel: pages", "kernel: the rest", "interpreter", "libc: copying", "xxh3",
    }  # fmt: skip
    assert found[21] == {"server's own code": 1, "allocator": 1}


@pytest.mark.parametrize("sampler", [sampling.python_lines, sampling.symbols])
def test_a_process_that_computes_is_seen_to_compute(
    sampler: Callable[[list[int]], AbstractContextManager[dict[int, Counter[str]]]],
) -> None:
    """A sampler that finds nothing shows nothing of where time goes."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            with sampler([busy.pid]) as found:
                until = running_seconds([busy.pid]) + 1  # of its own CPU: cores may be busy with others
                while running_seconds([busy.pid]) < until:
                    time.sleep(0.01)
        except sampling.Unsampled as reason:
            pytest.skip(str(reason))
        finally:
            busy.kill()
    assert found[busy.pid].total() > 0


def test_who_may_not_look_at_other_processes_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container forbids tracing, and `Permission denied` alone does not say what to do."""
    refusing = tmp_path / "py-spy"
    refusing.write_text("#!/bin/sh\necho Permission Denied >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setattr(sampling, "tool", lambda name: str(refusing))
    monkeypatch.setattr(sampling, "START_S", sampling.END_S)
    with (
        pytest.raises(sampling.Unsampled, match=r"(?s)Permission Denied.*ptrace_scope.*SYS_PTRACE"),
        sampling.python_lines([1]),
    ):
        pass


def test_without_tools_a_profile_says_what_is_left_out_and_tells_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU of each process and the server's own count need nothing installed."""
    monkeypatch.setattr(profiles, "CASES", [SMALL])
    monkeypatch.setattr(sampling, "tool", lambda name: None)
    path = tmp_path / "figures.json"
    assert profiles.main(["--size", "4 kB", "--side", "inline", "--seconds", "0.05", "--json", str(path)]) == 0
    told, left_out = capsys.readouterr()
    assert "pip install py-spy" in left_out
    assert "apt-get install linux-perf" in left_out
    assert "| xadd " in told
    (found,) = json.loads(path.read_text())["profiles"]
    assert found["side"] == INLINE
    assert found["commands"]["xadd"][0] == 1  # call for each entry
    assert all(figure > 0 for figure in found["cpu_s_per_gb"].values())
    with pytest.raises(SystemExit, match="has such a name"):
        profiles.main(["--size", "no such"])


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two commits: our packages as they are, and without a Writer."""
    folder = tmp_path / "repository"
    for name in between.PACKAGES:
        shutil.copytree(between.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(between, "ROOT", folder)
    writer = folder / "producer" / "penstock_producer" / "write" / "writer.py"
    whole = writer.read_text()
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for text in (whole, "Reader = None\n"):
        writer.write_text(text)
        for command in (("init", "-q"), ("add", "."), ("commit", "-q", "--no-verify", "-m", "one of them")):
            subprocess.run(["git", *who, *command], cwd=folder, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": ""})
    writer.write_text(whole)
    return folder


@pytest.mark.usefixtures("repository")
def test_a_commit_is_measured_beside_this_tree_as_it_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output names the compared commits: the last one has no Writer, and the tree has one again."""
    monkeypatch.setattr(between, "CASES", [SMALL])
    path = tmp_path / "figures.json"
    what = ["--size", "4 kB", "--side", "inline", "--rounds", "2", "--seconds", "0.05"]
    assert between.main(["HEAD~1", *what, "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["transport"]
    before, after = found["rounds"]["before"], found["rounds"]["after"]
    assert len(before) == len(after) == 2
    assert {one["samples"] for one in before} == {one["samples"] for one in after}
    assert "| GB/s " in capsys.readouterr().out
    assert between.main(["HEAD", *what]) == 1
    assert "before: Penstock inline, write ended: ImportError: cannot import name 'Writer'" in capsys.readouterr().out


@pytest.mark.usefixtures("repository")
def test_a_commit_that_is_not_there_is_named() -> None:
    """A misspelt commit must not be measured as something else."""
    with pytest.raises(SystemExit, match="there is no commit nowhere"):
        between.main(["nowhere"])


@pytest.mark.usefixtures("repository")
def test_growth_of_a_commit_that_cannot_grow_says_why() -> None:
    """Its last words come from a process of its own."""
    with pytest.raises(SystemExit, match=r"growth_rounds.py calls: .*Writer"):
        between.main(["HEAD", "--growth", "waiting", "--rounds", "1"])


@pytest.mark.usefixtures("repository")
def test_jpegs_of_a_commit_that_cannot_make_them_say_why() -> None:
    """Its last words come from a process of its own."""
    with pytest.raises(SystemExit, match=r"jpegs.py calls: "):
        between.main(["HEAD", "--jpegs", "2", "--rounds", "1"])


@pytest.mark.slow
def test_jpegs_of_this_tree_are_loaded_by_public_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs on the clock, each sample once, and CPU of every role."""
    path, side = tmp_path / "figures.json", "segments" if SHARED_MEMORY.is_dir() else "inline"
    monkeypatch.setattr(between, "packages", lambda commit, folder: between._path(between.ROOT))
    assert between.main(["HEAD", "--jpegs", "64", "--side", side, "--rounds", "1", "--json", str(path)]) == 0
    (found,) = json.loads(path.read_text())["jpegs"].values()
    for (one,) in found.values():
        assert one["samples"] == 2 * 64
        assert all(seconds >= 0 for seconds in one["cpu_s"].values())
    assert "CPU ms/sample, trainer" in capsys.readouterr().out


def test_a_role_without_measurable_cpu_has_no_ratio() -> None:
    """The clock of processes ticks every 10 ms: a short round of a server reads as 0, and ended all figures."""
    assert between._cells([0.0], [0.01])[-1] == "not measurable"
    assert between._cells([0.0, 2.0], [1.0, 1.0])[-1] == "0.50x"


def test_growth_is_compared_by_size_and_beside_the_smallest() -> None:
    """A commit that makes everything cheaper makes nothing flatter."""
    rounds = [{"1 member": (4.0, 1.0), "32 members": (8.0, 2.0)}], [{"1 member": (2.0, 1.0), "32 members": (4.0, 2.0)}]
    last = [cell.strip() for cell in between.grown(*rounds).splitlines()[-1].strip("|").split("|")]
    assert last == ["32 members", "8.00", "4.00", "0.50x", "2.00x", "2.00x"]


def test_a_target_below_what_moving_bytes_costs_is_called_out_of_reach() -> None:
    """The last tenth is not in Python if sockets take it."""
    assert "does not leave room" in limits.verdict({limits.LEAST: [0.41, 0.5], limits.PENSTOCK: [0.82, 1.0]})
    told = limits.verdict({limits.LEAST: [0.2], limits.PENSTOCK: [0.5]})
    assert "leaves room" in told
    assert "2.50x" in told


def test_what_moving_bytes_costs_is_the_sum_of_its_parts() -> None:
    """A sum of other parts would move the target."""
    found = limits.bare()
    parts = found[limits.SENDER] + found[limits.RECEIVER] + found[limits.COPY] + 2 * found[limits.CHECKSUM]
    assert found[limits.LEAST] == pytest.approx(parts)
    assert min(found.values()) > 0


def test_a_bare_loop_copies_what_penstock_would_and_refuses_what_it_would() -> None:
    """A loop that did less would make any writer look slow."""
    with mmap(-1, 3 * 16) as kept:
        samples = [np.full(4, number, "f4") for number in range(4)]
        limits.copied(samples, samples[0], kept)
        assert np.frombuffer(kept[:], "f4").reshape(3, 4)[:, 0].tolist() == [3, 1, 2]
        for strange in (np.ones(4, "i4"), np.ones((2, 2), "f4"), np.ones(4, "f4").view(np.recarray)):
            with pytest.raises(TypeError, match="is no float32"):
                limits.copied([strange], samples[0], kept)


def test_samples_one_by_one_are_told_in_microseconds_and_beside_the_bare_loop() -> None:
    """Without the bare loop, a reader does not know the least that a call for each sample could cost."""
    lines = limits.shown(ONE_BY_ONE, {limits.LOOP: [1.0], limits.BARE: [2.0], limits.WRITER: [5.0]})
    last = [cell.strip() for cell in lines[-1].strip("|").split("|")]
    assert last == [f"{ONE_BY_ONE.name}: {limits.WRITER}", "5.00", "1.28", "2.50x"]


def test_channels_are_compared_round_by_round(capsys: pytest.CaptureFixture[str]) -> None:
    """A ratio of two rounds would show what else the machine did in between."""
    slower = {"write_cpu": 0.9, "write_wall": 1.0, "read_cpu": 0.6, "read_wall": 1.0}
    ours = {"write_cpu": 0.3, "write_wall": 1.0, "read_cpu": 0.4, "read_wall": 1.0}
    busy = {name: 10 * value for name, value in ours.items()}
    text = channel.shown({"penstock": [ours, busy], "other": [slower, {**busy, "write_cpu": 6.0}]})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells[2] == ["penstock", "0.30", "1", "0.40", "1"]
    assert cells[3] == ["other", "0.90", "2.50x (2.00-3.00)", "0.60", "1.25x (1.00-1.50)"]

    channel.main(["--nbytes", "20000", "--mb", "1", "--rounds", "2", "--json"])
    found = json.loads(capsys.readouterr().out)["seconds_per_gb"]
    assert set(found) == set(channel.WAYS)
    assert all(value > 0 for each in found.values() for one in each for value in one.values())
