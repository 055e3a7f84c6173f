"""`penstock bad` and `penstock audit --repair`: what an operator types and reads, and what scripts get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import DatasetConfig
from tests.common.stream.audited import append, audited, entry_of, everything, fill, partition_of, rewrite_index, train

Capture = pytest.CaptureFixture[str]


def run(url: str, *words: str) -> int:
    """Run one command. The URL comes before --repair, which takes the rest of the line."""
    at = words.index("--repair") if "--repair" in words else len(words)
    return main([*words[:at], "--url", url, *words[at:]])


def forge(url: str, client: redis.Redis) -> str:
    """Write an entry that no group can read, and let a group try it."""
    fill(url)
    _, fields = entry_of(client, 1)
    forged = append(client, {**fields, b"x": b"\x1b[2J"})
    train(url)
    return forged.decode()


def test_bad_things_are_listed_for_people_and_for_scripts(
    any_url: str, any_client: redis.Redis, capsys: Capture
) -> None:
    """The list has identity, reason and time, and a forger's control characters do not reach the terminal."""
    forged = forge(any_url, any_client)
    assert run(any_url, "bad", "list", "train") == 0
    told = capsys.readouterr().out
    assert "quarantined samples: 1" in told
    assert "truncated" in told
    assert f"0  resnet  {forged}  in no index" in told
    assert "\x1b" not in told
    assert run(any_url, "bad", "list", "train", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dead"][0]["entry"] == forged
    assert found["quarantined"] == [{"epoch": 0, "shard": 0, "offset": 3, "why": "truncated"}]
    assert run(any_url, "bad", "list", "train", "--epoch", "7") == 1
    assert "no epoch 7" in capsys.readouterr().err


def test_a_reason_that_is_cut_says_so(any_url: str, any_client: redis.Redis, capsys: Capture) -> None:
    """One that ended in the middle of a word looked like the whole of a strange reason."""
    with penstock.Writer("train", url=any_url, spec={"x": ("int64", ())}) as writer, writer.epoch() as epoch:
        epoch.quarantine("z" * 300)
        epoch.quarantine("z" * 501)
        epoch.quarantine("z" * 500)
    assert run(any_url, "bad", "list", "train") == 0
    assert capsys.readouterr().out.count(f"  {'z' * 199}…\n") == 3
    assert run(any_url, "bad", "list", "train", "--json") == 0
    found = json.loads(capsys.readouterr().out)["quarantined"]
    assert [one["why"] for one in found] == ["z" * 300, f"{'z' * 499}…", "z" * 500]


def test_nothing_bad_is_said_in_a_line(any_url: str, capsys: Capture) -> None:
    """An empty table looks like a failure."""
    fill(any_url, bad=())
    assert run(any_url, "bad", "list", "train") == 0
    assert "nothing of 'train' is quarantined, and no group has a dead letter" in capsys.readouterr().out


def test_one_entry_is_shown_retried_and_dropped(any_url: str, any_client: redis.Redis, capsys: Capture) -> None:
    """The commands for a dead letter, as its notice and the audit name them."""
    forged = forge(any_url, any_client)
    assert run(any_url, "bad", "show", "train", "0", forged) == 0
    told = capsys.readouterr().out
    assert "in no shard's index" in told
    assert "dead for group 'resnet'" in told
    assert run(any_url, "bad", "retry", "train", forged) == 0
    assert "is pending again" in capsys.readouterr().out
    assert run(any_url, "bad", "drop", "train", "0", forged, "--all-groups", "--reason", "forged") == 0
    assert "is given up" in capsys.readouterr().out
    assert audited(any_url).is_clean
    assert run(any_url, "bad", "drop", "train", "0", "--all-groups") == 0
    assert "nothing to drop" in capsys.readouterr().out
    assert run(any_url, "bad", "show", "train", "0", forged) == 1
    assert "has no entry" in capsys.readouterr().err


def test_for_whom_to_drop_must_be_said(any_url: str, capsys: Capture) -> None:
    """Discarding data for every group must not be a default."""
    fill(any_url)
    assert run(any_url, "bad", "drop", "train", "0") == 2
    assert "--group --all-groups is required" in capsys.readouterr().err


def test_help_tells_the_two_kinds_apart(capsys: Capture) -> None:
    """A user should not have to read the source to know what a retry does."""
    assert main(["bad", "--help"]) == 0
    told = capsys.readouterr().out
    for word in ("quarantined", "dead letter", "retry", "drop", "EpochIncomplete"):
        assert word in told


def produced(url: str) -> None:
    """Produce an epoch of the numbers, with every tenth bad, by worker processes."""
    source = DatasetConfig(name="tests.producer.made:numbers", transform="tests.producer.made:every_tenth_fails")
    plan = ProductionPlan(stream="train", source=source, shard_samples=30, block_bytes=200)
    with Production(plan, WorkerOptions(url=url, queue_url=url), workers=1) as production:
        list(production.run())


def test_what_was_deleted_by_hand_is_made_again_from_the_source_on_the_command_line(
    any_url: str, any_client: redis.Redis, capsys: Capture
) -> None:
    """The audit that found it repairs it, and ends with 0."""
    produced(any_url)
    key = partition_of(any_client).entries(0)
    found: Any = any_client.xrange(key, count=2)
    any_client.xdel(key, found[1][0])
    assert run(any_url, "audit", "train") == 1
    capsys.readouterr()
    source = ("dataset", "tests.producer.made:numbers", "--transform", "tests.producer.made:every_tenth_fails")
    assert run(any_url, "audit", "train", "--json", "--repair", *source) == 0
    said = capsys.readouterr()
    assert "samples were made again" in said.err
    assert json.loads(said.out)["clean"] is True
    assert run(any_url, "audit", "train", "--repair", *source) == 0


def test_a_repair_says_that_it_has_not_read_payloads_unless_it_has(
    any_url: str, any_client: redis.Redis, capsys: Capture
) -> None:
    """A clean verdict over a damaged payload misled who had asked for its repair."""
    produced(any_url)
    entry_id, fields = entry_of(any_client, 1)
    name = next(name for name in fields if name != b"meta")
    damaged = append(any_client, {**fields, name: bytes([fields[name][0] ^ 1]) + fields[name][1:]})
    any_client.xdel(partition_of(any_client).entries(0), entry_id)
    for shard in range(3):
        index = everything(any_client, partition_of(any_client).index(0, shard))
        ends = [int(record_id.split(b"-")[0]) for record_id, record in index if record[b"e"] == entry_id]
        rewrite_index(any_client, shard, dict.fromkeys(ends, (b"e", damaged)))
    source = ("dataset", "tests.producer.made:numbers", "--transform", "tests.producer.made:every_tenth_fails")
    assert run(any_url, "audit", "train", "--repair", *source) == 0
    assert "payloads were not verified: with --deep before --repair" in capsys.readouterr().err
    assert run(any_url, "audit", "train", "--deep") == 1
    assert f"entry {damaged.decode()}" in capsys.readouterr().out
    assert run(any_url, "audit", "train", "--deep", "--repair", *source) == 0
    said = capsys.readouterr()
    assert "samples were made again" in said.err
    assert "not verified" not in said.err
    assert run(any_url, "audit", "train", "--deep") == 0


def test_a_repair_from_another_source_is_one_line(any_url: str, any_client: redis.Redis, capsys: Capture) -> None:
    """Samples under a false identity would be worse than none."""
    produced(any_url)
    key = partition_of(any_client).entries(0)
    found: Any = any_client.xrange(key, count=1)
    any_client.xdel(key, found[0][0])
    assert run(any_url, "audit", "train", "--repair", "dataset", "tests.producer.made:Batches") == 1
    assert "source" in capsys.readouterr().err
    assert run(any_url, "audit", "train", "--repair", "generator", "tests.producer.made:feed") == 1
    assert "an iterator only goes forward" in capsys.readouterr().err


def test_what_the_repair_does_not_know_is_wrong_usage(any_url: str, capsys: Capture, tmp_path: Path) -> None:
    """Options of a production have no meaning here, because the epoch has its own seed and shards."""
    assert run(any_url, "audit", "train", "--repair", "images", str(tmp_path), "--epochs", "3") == 2
    assert "unknown argument '--epochs'" in capsys.readouterr().err
