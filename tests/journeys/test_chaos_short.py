"""A short chaos suite with fixed seeds: kills, stops and restarts for seconds, and every sample counted. The long form
is ``make chaos``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos.networks import why_not

ROOT = Path(__file__).parents[2]
EPOCH = ("--epoch-samples", "2000")
"""Epochs whose end comes soon after the last fault. Of longer ones, most samples are read when nothing fails."""
LIMIT_S = 420
"""The time limit, much longer than needed. A hang shows earlier, with stacks, after ``--patience``."""


def chaos(tmp_path: Path, *options: str) -> dict[str, Any]:
    """Return the totals of one run, which must have found nothing wrong."""
    totals = tmp_path / "totals.json"
    command = [sys.executable, "-m", "chaos", "--json", str(totals), "--directory", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False, cwd=ROOT, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(totals.read_text())
    return result


def require_all_delivered(result: dict[str, Any]) -> None:
    """Require, outside of the checker, that it had something to count."""
    groups = dict(result["groups"])
    assert groups.pop("feeders")["delivered"] >= result["feed_samples"] > 0
    assert groups.pop("ranks")["delivered"] > 0
    assert {group["delivered"] for group in groups.values()} == {result["samples"]}
    assert result["samples"] > 0
    assert result["faults"]


@pytest.mark.slow
def test_chaos_loses_nothing_and_repeats_only_what_a_crash_may(tmp_path: Path) -> None:
    """All roles, all policies, and restarts of the server: the whole promise in one minute.

    Half of the members are in Node. They share groups with those in Python and take over from each other, so a promise
    of one holds for both.
    """
    result = chaos(
        tmp_path, *EPOCH, "--seed", "7", "--minutes", "0.4", "--members", "2", "--node", "1", "--workers", "2",
        "--pause", "1",
    )  # fmt: skip
    require_all_delivered(result)
    assert result["bad"] > 0
    assert any("server" in kind for kind in result["faults"])
    assert result["node_processes"] > 5  # at least one in each group


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_chaos_with_faulty_links(tmp_path: Path) -> None:
    """Hosts lose packets and each other, while processes are killed and come back."""
    result = chaos(
        tmp_path, *EPOCH, "--seed", "13", "--minutes", "0.3", "--networks", "--members", "2", "--workers", "2",
        "--pause", "1",
    )  # fmt: skip
    require_all_delivered(result)
    assert any("link" in kind or "host" in kind for kind in result["faults"])


@pytest.mark.slow
def test_chaos_on_a_cluster(tmp_path: Path) -> None:
    """A slot moves and a master is killed, while processes are killed and come back."""
    result = chaos(
        tmp_path, *EPOCH, "--seed", "8922", "--minutes", "0.15", "--cluster", "--members", "2", "--workers", "2",
        "--node", "0", "--pause", "1",
    )  # fmt: skip
    require_all_delivered(result)
    assert {"kill a master", "move a slot"} & result["faults"].keys()


@pytest.mark.slow
def test_chaos_with_large_entries(tmp_path: Path) -> None:
    """Entries of 5 MB take many reads of a socket, so every cut is in the middle of one."""
    result = chaos(
        tmp_path, "--seed", "2", "--minutes", "0.15", "--sample-bytes", "5000000", "--epoch-samples", "40",
        "--members", "2", "--groups", "1", "--workers", "2", "--pause", "1",
    )  # fmt: skip
    require_all_delivered(result)


@pytest.mark.slow
def test_chaos_with_eight_partitions_and_five_members(tmp_path: Path) -> None:
    """Every promise holds for any number of partitions, most of them empty for a member, and with payloads in files.

    This is a stored seed, which is run with the options that it is stored with.
    """
    totals = tmp_path / "totals.json"
    command = [sys.executable, "-m", "chaos", "--seeds", "3", "--minutes", "0.15", "--json", str(totals), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(totals.read_text())
    options = {"seed": 3, "partitions": 8, "members": 5, "groups": 1, "payload": "segments"}
    assert options.items() <= result["options"].items()
    require_all_delivered(result)
    assert "1 stored seeds: all well" in done.stdout
