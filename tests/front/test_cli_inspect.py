"""Inspecting and steering from a shell: inspect, audit, groups, epochs. Every wrong word is one line and exit code
1.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock.__main__ import main
from penstock_common.explain.monitor import StreamMonitor
from penstock_common.stream.commands import ms_of
from penstock_common.stream.groups.presence import MEMBER_SILENT_MS
from penstock_common.stream.groups.roster import load_roster
from penstock_common.stream.removal.deletion import users_of
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import create_stream, load_stream
from penstock_producer.write.writer import EpochWriter
from tests.contracts.processes import child

_ROOT = Path(penstock.__file__).parents[2]
_PATHS = os.pathsep.join(str(_ROOT / folder) for folder in ("common", "producer", "consumer", "front"))
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that runs a command line against the server: exit code, stdout, stderr."""
    monkeypatch.setenv("PENSTOCK_URL", url)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(argv))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def writer(url: str) -> Iterator[penstock.Writer]:
    """Return a writer of a stream with two partitions and one sample an entry."""
    with penstock.Writer(
        "train", url=url, spec={"x": ("uint8", (1000,))}, partitions=2, tuning=penstock.Tuning(block_bytes=1)
    ) as made:
        yield made


def write(epoch: EpochWriter, shard: int, count: int, *, bad: int = 0) -> None:
    """Write a whole shard."""
    with epoch.shard(shard) as part:
        for number in range(count):
            part.write({"x": np.full(1000, number % 251, dtype=np.uint8)})
        for _ in range(bad):
            part.quarantine("truncated")


def produced(writer: penstock.Writer) -> None:
    """Produce one epoch: 30 samples in three shards, two of them bad."""
    with writer.epoch(sizes=[10, 10, 10]) as epoch:
        write(epoch, 0, 10)
        write(epoch, 1, 8, bad=2)
        write(epoch, 2, 10)


def inspected(told: Told) -> dict[str, Any]:
    """Return the view that programs get."""
    code, out, err = told("inspect", "train", "--json")
    assert (code, err) == (0, "")
    view: dict[str, Any] = json.loads(out)
    return view


def test_inspect_counts_lag_pending_and_bytes_on_every_server(told: Told, url: str, writer: penstock.Writer) -> None:
    """Redis 6.2 has no lag, and Redis 7 loses its count after a deletion, so the counts are ours."""
    produced(writer)
    epoch = writer.epoch(sizes=[5, 5])
    write(epoch, 0, 5)
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0", prefetch_bytes=1)
    ) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        view, resnet = inspected(told), {}
        for _ in range(500):  # acknowledgements are sent without waiting for their answers
            view = inspected(told)
            (resnet,) = view["groups"]
            if resnet["pending_entries"] + resnet["lag_entries"] == 28 + 5 - 4:  # the first batch is acknowledged
                break
        assert [m["name"] for m in resnet["members"]] == ["gpu-0"]
        assert resnet["members"][0]["seen_s"] < 20
        assert resnet["members"][0]["pending_entries"] == resnet["pending_entries"] > 0
        assert resnet["pending_entries"] + resnet["lag_entries"] == 29
        assert resnet["lag_samples"] == resnet["lag_entries"] > 0
        told("groups", "declare", "train", "vit")
        vit = json.loads(told("groups", "list", "train", "--json")[1])[1]
        assert (vit["name"], vit["declared"], vit["lag_samples"], vit["pending_entries"]) == ("vit", True, 33, 0)
    one, two = view["epochs"]
    assert (one["state"], one["planned"], one["committed"], one["bad"], one["entries"]) == ("produced", 30, 30, 2, 28)
    assert (two["state"], two["planned"], two["committed"], two["shards_done"], two["shards"]) == ("sized", 10, 5, 1, 2)
    assert (view["bytes"], view["entries"], view["partitions"], view["next_epoch"]) == (33_000, 33, 2, 2)
    assert view["budget_bytes"] == 1 << 30


def test_inspect_reads_well_for_people(told: Told, url: str, writer: penstock.Writer) -> None:
    """The page shows what a trainer's owner looks for: spec, bytes of budget, epochs, groups, members."""
    assert "no group reads it yet: start a trainer" in told("inspect", "train")[1]
    produced(writer)
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
    ) as loader:
        assert sum(batch.size for batch in loader) == 28
        out = told("inspect", "train")[1]
    for words in (
        "x: uint8 [1000]",
        "27 KiB of 1024 MiB (0%)",
        "30 of 30",
        "3 of 3",
        "shared, holds data",
        "what holds it up, and what helps: penstock monitor train",
        "gpu-0",
    ):
        assert words in out, out
    table = told("inspect")[1].splitlines()
    assert table[1].split() == ["train", "1", "28", "27", "KiB", "of", "1024", "MiB", "(0%)", "1", "0"]


def test_inspect_counts_the_commonest_reasons_of_bad_samples(told: Told, writer: penstock.Writer) -> None:
    """A hundred thousand bad samples most often have one cause, and it should be seen at a glance."""
    with writer.epoch(sizes=[10]) as epoch, epoch.shard(0) as part:
        part.write({"x": np.zeros(1000, np.uint8)})
        for number in range(8):
            part.quarantine(f"cat/{number}.jpg: {number * 100} x 200 pixels; at most 90 are decoded")
        part.quarantine("dog/1.jpg: the file is\nempty")
    (seen,) = inspected(told)["epochs"]
    assert [kind["samples"] for kind in seen["reasons"]] == [8, 1]
    lines = told("inspect", "train")[1].splitlines()
    assert [line for line in lines if line.startswith("  bad in epoch 0: 8 like cat/")]
    assert "  bad in epoch 0: 1 like dog/1.jpg: the file is empty" in lines
    assert "  all of them: penstock bad list train --epoch 0" in lines


def test_inspect_of_an_empty_server_says_what_to_do(told: Told) -> None:
    """A newcomer's first look."""
    assert told("inspect") == (0, "no streams yet: start a producer (`penstock produce`, or penstock.Writer)\n", "")


def test_inspect_of_another_database_names_the_one_with_keys(told: Told, url: str, client: redis.Redis) -> None:
    """It said that a producer is to be started, although one had written."""
    create_stream(client, "train")
    code, line, _ = told("inspect", "--url", f"{url}/1")
    assert code == 0
    assert line.startswith("this database of the server has no streams; database 0 has keys: is the number at the end")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["inspect", "trian"], "no stream 'trian'; streams there: train; did you mean 'train'?"),
        (["audit", "trian"], "no stream 'trian'; streams there: train; did you mean 'train'?"),
        (["groups", "list", "trian"], "no stream 'trian'; streams there: train; did you mean 'train'?"),
        (["groups", "drop", "train", "resent"], "stream 'train' has no group 'resent'; groups there: none"),
        (["epochs", "close", "train", "7"], "stream 'train' has no epoch 7; retained epochs: 0"),
        (["epochs", "abandon", "train", "7"], "stream 'train' has no epoch 7; retained epochs: 0"),
        (["epochs", "abandon", "train", "0"], "epoch 0 of 'train' is complete, with 30 samples: give --force to"),
        (["audit", "train", "--epoch", "7"], "stream 'train' has no epoch 7; retained epochs: 0"),
        (["inspect", "--url", "redis://127.0.0.1:1"], "no Redis answers at redis://127.0.0.1:1"),
    ],
    ids=" ".join,
)
def test_a_wrong_name_is_one_line_and_exit_code_1(
    told: Told, writer: penstock.Writer, argv: list[str], line: str
) -> None:
    """A typo is answered at once, with what there is."""
    produced(writer)
    code, out, err = told(*argv)
    assert (code, out) == (1, "")
    assert err.startswith(f"penstock: {line}"), err
    assert err.count("\n") == 1


def test_a_declared_group_holds_data_until_it_is_dropped(told: Told, writer: penstock.Writer) -> None:
    """Declaring is how a trainer that starts tomorrow gets today's epochs."""
    produced(writer)
    said = "group 'vit' of 'train' declared: all from epoch 0 on is kept for it until it is dropped\n"
    assert told("groups", "declare", "train", "vit") == (0, said, "")
    assert "was declared before" in told("groups", "declare", "train", "vit")[1]
    assert "on is kept for it until it is dropped" in " ".join(told("groups", "--help")[1].split())
    assert told("groups", "list", "train")[1].splitlines()[1].split() == ["vit", "shared", "yes", "yes", "0", "28", "0"]
    assert (
        told("groups", "drop", "train", "vit")[1]
        == "group 'vit' of 'train' is dropped: nothing is kept for it any more\n"
    )
    assert told("groups", "list", "train")[1] == "stream 'train' has no groups yet\n"


def test_where_each_rank_is_can_be_seen(told: Told, url: str, writer: penstock.Writer) -> None:
    """The slowest rank holds all the others, and the data: who it is must not need a debugger."""
    produced(writer)
    assert told("groups", "declare", "train", "ddp", "--ordered")[0] == 0
    with penstock.Loader(
        "train",
        group="ddp",
        batch_size=4,
        url=url,
        order=penstock.Canonical(rank=1, world_size=2),
    ) as loader:
        next(iter(loader))
    group = json.loads(told("inspect", "train", "--json")[1])["groups"][0]
    assert (group["kind"], group["lag_samples"], group["pending_entries"]) == ("ordered", 28 - 4, 0)
    assert [(one["rank"], one["epoch"], one["position"]) for one in group["ranks"]] == [(0, 0, 0), (1, 0, 8)]
    rows = [line.split() for line in told("inspect", "train")[1].splitlines() if line.startswith("ddp")]
    assert rows[-1] == ["ddp", "1", "0", "8", "of", str(group["ranks"][1]["planned"])]


def test_inspect_shows_how_far_a_group_is_also_once_its_epochs_are_released(
    told: Told, url: str, writer: penstock.Writer
) -> None:
    """A trainer that has read many epochs seemed to have read only those that are retained."""

    def newest_done() -> str:
        lines = told("inspect", "train")[1].splitlines()
        at = next(at for at, line in enumerate(lines) if "newest done" in line)
        return lines[at + 1][: lines[at].index("newest done") + len("newest done")].split()[-1]

    assert told("groups", "declare", "train", "resnet")[0] == 0
    seen = [newest_done()]
    for _ in range(3):
        produced(writer)
        with penstock.Loader("train", group="resnet", batch_size=4, url=url) as loader:
            assert sum(batch.size for batch in loader) == 28
        seen.append(newest_done())
    assert "released epochs 0-2 of" in told("trim", "train", "--keep", "0")[1]
    assert [*seen, newest_done()] == ["none", "0", "1", "2", "2"]
    assert inspected(told)["groups"][0]["settled_epochs"] == []


def test_a_group_with_living_members_is_dropped_only_by_force(told: Told, url: str, writer: penstock.Writer) -> None:
    """Dropping it under them would end a training run by a slip of the hand."""
    produced(writer)
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
    ) as loader:
        next(iter(loader))
        code, _, err = told("groups", "drop", "train", "resnet")
        assert code == 1
        assert err.startswith("penstock: group 'resnet' of 'train' is read by gpu-0 (seen 0 s ago): stop it first")
        assert "one that has ended counts as gone at most 30 s after it was last seen" in err
    with penstock.Loader("train", group="vit", batch_size=4, url=url) as loader:
        next(iter(loader))
        assert told("groups", "drop", "train", "vit", "--force")[0] == 0
    # ... and leaving a group that is gone raises nothing at the end of that training run


def test_several_groups_are_dropped_by_one_command_or_none_of_them(
    told: Told, url: str, writer: penstock.Writer
) -> None:
    """A sweep leaves many. A wrong name or a live member among them must not leave half of the work done."""

    def names() -> list[str]:
        return [group["name"] for group in json.loads(told("groups", "list", "train", "--json")[1])]

    produced(writer)
    for name in ("a", "b", "c", "d"):
        assert told("groups", "declare", "train", name)[0] == 0
    code, _, err = told("groups", "drop", "train", "a", "nope")
    assert code == 1
    assert "nope" in err
    with penstock.Loader("train", group="d", batch_size=4, url=url) as loader:
        next(iter(loader))
        assert told("groups", "drop", "train", "a", "d")[0] == 1
    assert names() == ["a", "b", "c", "d"]
    assert told("groups", "drop", "train", "a", "b", "a")[1].count("is dropped") == 2
    one = {"stream": "train", "group": "c", "dropped": True}
    assert json.loads(told("groups", "drop", "train", "c", "--json")[1]) == one
    assert told("groups", "declare", "train", "c")[0] == 0
    assert json.loads(told("groups", "drop", "train", "c", "d", "--json")[1]) == [one, one | {"group": "d"}]
    assert names() == []


def test_groups_list_names_the_members_that_are_silent(told: Told, url: str, writer: penstock.Writer) -> None:
    """Three members, one of them dead, look like three that train."""
    produced(writer)
    partition = writer.stream.partitions[0]
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
    ) as loader:
        next(iter(loader))
        for member, seconds in (("gpu-1", 50), ("gpu-2", 600)):
            seen = {"inc": "x", "seen": ms_of(writer.client.time()) - 1000 * seconds}
            writer.client.hset(partition.roster, f"m:resnet:{member}", json.dumps(seen))
        row = told("groups", "list", "train")[1].splitlines()[1]
        members = json.loads(told("groups", "list", "train", "--json")[1])[0]["members"]
    assert row.endswith("gpu-1 (50 s), gpu-2 (10 min)"), row
    assert {m["name"]: m["is_silent"] for m in members} == {"gpu-0": False, "gpu-1": True, "gpu-2": True}


def hold_and_wait(url: str) -> None:
    """A trainer in its first step."""
    with penstock.Loader(
        "train", group="resnet", batch_size=4, url=url, tuning=penstock.Tuning(member="gpu-0")
    ) as loader:
        next(iter(loader))
        print("holds", flush=True)
        time.sleep(600)


def test_a_trainer_that_was_killed_on_this_host_is_in_nobodys_way(
    told: Told, url: str, writer: penstock.Writer
) -> None:
    """For a whole lease its group could not be dropped, nor its stream deleted, and no list said why."""
    produced(writer)
    with child(hold_and_wait, url) as trainer:
        assert trainer.line() == "holds", trainer.errors()
        assert told("groups", "drop", "train", "resnet")[0] == 1
        trainer.kill()
        roster = load_roster(writer.client, writer.stream.partitions[0])
        while ms_of(writer.client.time()) - roster.members["resnet", "gpu-0"] < MEMBER_SILENT_MS:
            time.sleep(0.05)
        (group,) = StreamMonitor(writer.client, "train").snapshot().groups
        assert [(m.name, m.is_silent) for m in group.members if m.name[0] != "~"] == [("gpu-0", True)]
        assert "gpu-0 (" in told("groups", "list", "train")[1]
        assert users_of(writer.client, writer.stream) == []
        assert told("groups", "drop", "train", "resnet")[0] == 0


def test_a_group_made_anew_under_an_old_name_reads_everything_again(
    told: Told, url: str, writer: penstock.Writer
) -> None:
    """Acknowledgements of the former group must not count, or they would end epochs that the new one never saw."""
    produced(writer)
    with penstock.Loader("train", group="resnet", batch_size=4, url=url) as loader:
        assert sum(batch.size for batch in loader) == 28
    told("groups", "drop", "train", "resnet")
    assert not [key for key in writer.client.scan_iter(match="*") if b"resnet" in key]
    with penstock.Loader("train", group="resnet", batch_size=4, url=url) as loader:
        next(iter(loader))
    audit = json.loads(told("audit", "train", "--json")[1])
    assert (audit["clean"], audit["delivered"], audit["pending"] + audit["unread"]) == (True, {"resnet": 4}, 24)


def test_an_epoch_whose_producer_died_is_closed_as_it_stands(told: Told, url: str, writer: penstock.Writer) -> None:
    """Trainers then end it with the committed samples, and do not wait for ever."""
    epoch = writer.epoch(sizes=[10, 10])
    write(epoch, 0, 10)
    said = "epoch 0 of 'train' is closed as it stands; samples committed: 10 of 20 planned\n"
    assert told("epochs", "close", "train", "0")[:2] == (0, said)
    assert told("epochs", "close", "train", "0")[1] == "epoch 0 of 'train' was produced already, with 10 samples\n"
    assert told("epochs", "list", "train")[1].splitlines()[1].split()[:5] == ["0", "produced", "10", "of", "10"]
    with penstock.Loader("train", group="resnet", batch_size=4, url=url) as loader:
        assert sum(batch.size for batch in loader) == 10
    assert told("audit", "train")[0] == 0


def test_who_closes_an_epoch_is_told_first_when_each_open_shard_was_written(
    told: Told, writer: penstock.Writer
) -> None:
    """A writer that is idle for long still ends with an error, and what it writes later is lost to the epoch."""
    epoch = writer.epoch(sizes=[10, 10, 10])
    write(epoch, 0, 10)
    part = epoch.shard(2)
    part.write({"x": np.zeros(1000, np.uint8)})
    part.commit_all()
    code, _, err = told("epochs", "close", "train", "0")
    assert code == 0
    assert re.fullmatch(
        r"epoch 0 of 'train' has open shards: 2 \(last written \d s ago\), 1 \(no sample\)\. A writer .*\n", err
    )
    assert told("epochs", "close", "train", "0")[2] == ""


def test_an_abandoned_epoch_stays_so_and_says_so(told: Told, writer: penstock.Writer) -> None:
    """Asking twice is no error."""
    writer.epoch(sizes=[10])
    assert told("epochs", "abandon", "train", "0")[1].startswith("epoch 0 of 'train' is abandoned:")
    assert told("epochs", "abandon", "train", "0")[1] == "epoch 0 of 'train' was abandoned before\n"
    assert "abandoned" in told("epochs", "list", "train")[1]
    code, _, err = told("epochs", "close", "train", "0")
    assert (code, err) == (1, "penstock: epoch 0 of 'train' is abandoned; there is nothing to close\n")


def audit_process(server: EmbeddedServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``penstock audit train`` as a script runs it."""
    environment = {**os.environ, "PYTHONPATH": _PATHS, "PENSTOCK_URL": server.url}
    command = [sys.executable, "-m", "penstock", "audit", "train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30, check=False)


def test_the_audit_ends_with_a_verdict_and_a_code_that_scripts_can_use(
    any_server: EmbeddedServer, any_client: redis.Redis
) -> None:
    """0 only for a clean stream; an entry deleted and a duplicate forged are each named, without a traceback."""
    url = any_server.url
    with penstock.Writer(
        "train", url=url, spec={"x": ("uint8", (1000,))}, tuning=penstock.Tuning(block_bytes=1)
    ) as writer:
        produced(writer)
    with penstock.Loader("train", group="resnet", batch_size=4, url=url) as loader:
        assert sum(batch.size for batch in loader) == 28
    clean = audit_process(any_server)
    assert (clean.returncode, clean.stderr) == (0, "")
    assert clean.stdout.splitlines()[-1] == "clean: lost 0, duplicate 0, pending 0"
    key = load_stream(any_client, "train").partitions[0].entries(0)
    found: Any = any_client.xrange(key, count=2)
    (deleted, _), (_, fields) = found
    any_client.xdel(key, deleted)
    forged: Any = any_client.xadd(key, fields)
    damaged = audit_process(any_server)
    assert (damaged.returncode, damaged.stderr) == (1, "")
    assert deleted.decode() in damaged.stdout
    assert forged.decode() in damaged.stdout
    assert damaged.stdout.splitlines()[-1] == "NOT CLEAN: lost 0, duplicate 1, pending 0, 2 findings"
    assert damaged.stdout.splitlines()[-2] == (
        "to fix: `penstock audit train --deep --repair SOURCE...` makes lost and damaged samples again; "
        "`penstock bad drop train 0 --all-groups` goes on without what is lost or a dead letter; `penstock bad drop "
        "train 0 ENTRY --all-groups` deletes an entry that is in no index, once a group was given it"
    )
    as_json = audit_process(any_server, "--json")
    report = json.loads(as_json.stdout)
    assert (as_json.returncode, report["clean"], report["duplicate"], len(report["findings"])) == (1, False, 1, 2)


def test_the_audit_says_how_much_of_an_unfinished_epoch_is_there(
    told: Told, writer: penstock.Writer, client: redis.Redis
) -> None:
    """A production that was stopped leaves a clean stream, and its owner has to learn that samples are to come."""
    produced(writer)
    epoch, feed = writer.epoch(sizes=[10, 10]), writer.epoch()
    assert "\nepoch 1: unfinished: 0 of 20 samples are committed\n" in told("audit", "train")[1]
    write(epoch, 0, 8, bad=2)
    feed.write({"x": np.zeros(1000, dtype=np.uint8)})
    feed.flush()
    code, out, _ = told("audit", "train")
    assert (code, out.splitlines()[-1].partition(":")[0]) == (0, "clean")
    sums = [line for line in out.splitlines() if " bad are " in line]
    assert sums == [
        "epoch 0: 28 produced and 2 bad are 30 samples",
        "epoch 1: 8 produced and 2 bad are 10 samples",
    ]
    said = [line for line in out.splitlines() if "unfinished" in line]
    assert said == ["epoch 1: unfinished: 10 of 20 samples are committed; nothing is wrong with them"]
    key = load_stream(client, "train").partitions[0].entries(1)
    found: Any = client.xrange(key, count=1)
    client.xdel(key, found[0][0])
    code, out, _ = told("audit", "train")
    assert (code, "\nepoch 1: unfinished: 10 of 20 samples are committed\n" in out) == (1, True)
    write(epoch, 1, 10)
    epoch.close()
    feed.close()
    assert "unfinished" not in told("audit", "train")[1]
