"""Streams and states that commit 0be23fc wrote, under today's code: its keys, its files, its checkpoints.

A fleet is never updated at once, and a checkpoint outlives many versions. See `tests.kept.write`.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import redis

import penstock
from penstock.__main__ import main as command
from tests.kept.keys import describe, restore
from tests.kept.samples import numbers, sample
from tests.kept.write import BATCH, HERE, ROOT, STREAMS
from tests.tuned import tuned

EXPECTED = json.loads((HERE / "expected.json").read_text())
STATES = EXPECTED["states"]
FEEDS = ("feed",)
PRODUCED = [name for name in STREAMS if name not in FEEDS]
MOST_BYTES = 300_000


@pytest.fixture
def kept(client: redis.Redis, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of segments, once all is back on a server, of each version."""
    return put_back(client, tmp_path, url, monkeypatch)


@pytest.fixture
def kept_once(any_client: redis.Redis, tmp_path: Path, any_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of segments, once all is back on one server, for what no version changes."""
    return put_back(any_client, tmp_path, any_url, monkeypatch)


def put_back(client: redis.Redis, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Restore the keys and the segments, and let every command find the server."""
    monkeypatch.setenv("PENSTOCK_URL", url)
    with tarfile.open(HERE / "segments.tar.gz") as archive:
        archive.extractall(tmp_path, filter=_as_written)
    root = tmp_path / "segments"
    restore(client, json.loads((HERE / "keys.json").read_text().replace(ROOT, str(root))))
    return root


def _as_written(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """Keep its rights, and give it to the user who runs the tests."""
    found = tarfile.data_filter(member, path)
    return found.replace(mode=0o700 if member.isdir() else member.mode)


def loader_of(stream: str, group: str, **settings: Any) -> penstock.Loader:
    """A quiet loader that never waits for long."""
    settings = {"batch_size": BATCH, "timeout_s": 20, "notify": lambda _: None, **settings}
    return penstock.Loader(stream, group=group, **tuned("Loader", settings))


def rows(batch: Any) -> list[Any]:
    """Return rows in the form of the fixture: each sample's identity and number, its bytes compared."""
    return [[[*identity], number] for identity, number in zip(batch.identities(), numbers(batch), strict=True)]


def all_rows(batches: Iterable[Any]) -> list[Any]:
    """Those of several batches."""
    return [row for batch in batches for row in rows(batch)]


def asked(*arguments: str) -> Any:
    """Return a command's answer with ``--json``; it may have found something."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        command([*arguments, "--json"])
    return json.loads(printed.getvalue())


def told(*arguments: str) -> None:
    """Runs a command that must succeed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert command([*arguments]) == 0, said.getvalue()


def is_clean(stream: str) -> bool:
    """Return whether the audit finds every payload in order."""
    return bool(asked("audit", stream, "--deep")["clean"])


def test_the_fixtures_are_small() -> None:
    """Every clone has them."""
    names = ("keys.json", "expected.json", "segments.tar.gz")
    assert sum((HERE / name).stat().st_size for name in names) < MOST_BYTES


def test_what_is_restored_is_what_was_kept(client: redis.Redis, kept: Path) -> None:
    """A restorer that forgets pending entries would prove nothing about them."""
    there = json.loads(json.dumps(describe(client)).replace(str(kept), ROOT))
    assert there == json.loads((HERE / "keys.json").read_text())


@pytest.mark.usefixtures("kept")
def test_every_kept_sample_has_its_identity_and_its_bytes() -> None:
    """In both ways of reading an epoch."""
    for name in PRODUCED:
        for epoch, samples in EXPECTED["epochs"][name].items():
            with penstock.Replay(name, epoch=int(epoch), batch_size=BATCH) as replay:
                assert all_rows(replay) == samples
    with loader_of("train", "new", start="earliest") as loader:
        for epoch in EXPECTED["epochs"]["train"].values():
            assert sorted(all_rows(loader)) == epoch


@pytest.mark.usefixtures("kept")
def test_the_audit_counts_what_it_counted() -> None:
    """Lost, pending, unread, dead: all that it said of the stream then, and the same verdict."""
    for name, before in EXPECTED["audits"].items():
        now = asked("audit", name, "--deep")
        assert counts(now, before) == counts(before, before)
        for epoch, was in zip(now["epochs"], before["epochs"], strict=True):
            assert counts(epoch, was) == counts(was, was)


def counts(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the values that ``before`` also has, with findings as their number, because words may change."""
    told_in_words = {"verdict", "findings", "epochs"}
    return {name: found[name] for name in before.keys() - told_in_words} | {"findings": len(found["findings"])}


@pytest.mark.usefixtures("kept")
def test_a_shared_group_goes_on_with_just_what_was_not_acknowledged() -> None:
    """The member that was killed comes back with the state of its checkpoint."""
    with loader_of("train", "resnet", member="a", acknowledge="on_checkpoint") as loader:
        loader.load_state_dict(STATES["shared"]["state"])
        assert sorted(all_rows(loader)) == sorted(STATES["shared"]["after"])
        loader.checkpointed()
    assert is_clean("train")


@pytest.mark.usefixtures("kept")
def test_a_rank_goes_on_with_the_very_next_batch() -> None:
    """Batch by batch, in the order that the old code read them in."""
    for rank in (0, 1):
        kept_state = STATES[f"rank {rank}"]
        with loader_of("train", "ranks", order="canonical", rank=rank, world_size=2) as loader:
            loader.load_state_dict(kept_state["state"])
            assert [rows(batch) for batch in loader] == kept_state["after"]
    assert is_clean("train")


@pytest.mark.usefixtures("kept")
def test_torch_goes_on_with_the_very_next_batch() -> None:
    """Its state says more than the loader's: whether the pass is over."""
    from penstock.torch import dataset

    with loader_of("train", "torched", order="canonical") as loader:
        batches = dataset(loader)
        batches.load_state_dict(STATES["torch"]["state"])
        assert [batch["y"].tolist() for batch in batches] == STATES["torch"]["after"]


@pytest.mark.usefixtures("kept")
def test_a_mixture_goes_on_with_the_very_next_batch() -> None:
    """The turns of its loaders follow from the step."""
    loaders = {group: loader_of("train", group, order="canonical") for group in ("mixed1", "mixed2")}
    mixture = penstock.mix({name: (loader, 1) for name, loader in loaders.items()})
    mixture.load_state_dict(STATES["mixture"]["state"])
    assert [rows(batch) for batch in mixture] == STATES["mixture"]["after"]
    for loader in loaders.values():
        loader.close()


@pytest.mark.usefixtures("kept")
def test_an_open_epoch_is_written_on_where_its_writer_was_killed() -> None:
    """Neither a gap nor a sample twice, and then it is read by who waited for it."""
    with (
        penstock.Writer("train", tuning=penstock.Tuning(notify=lambda _: None)) as writer,
        writer.epoch(3).shard(0) as shard,
    ):
        assert shard.position == 317 - 300
        for number in range(317, 320):
            shard.write(sample(number))
    told("epochs", "close", "train", "3")
    with loader_of("train", "late") as loader:
        *whole, last = [sorted(all_rows(loader)) for _ in range(3)]
    assert whole == [*EXPECTED["epochs"]["train"].values()]
    assert last == [[[3, 0, number - 300], number] for number in range(300, 320)]
    assert is_clean("train")


@pytest.mark.usefixtures("kept")
def test_a_feed_goes_on_and_its_group_gets_the_rest() -> None:
    """Its first epoch is sealed, with a shard that its writer never ended; its second is open."""
    before = EXPECTED["audits"]["feed"]
    with penstock.Writer("feed", tuning=penstock.Tuning(notify=lambda _: None)) as writer:
        for number in range(900, 910):
            writer.write(sample(number))
    for epoch in ("0", "1"):
        told("epochs", "close", "feed", epoch)
    owed = before["pending"] + before["unread"] + 10
    read: list[int] = []
    with loader_of("feed", "tail", member="a") as loader:
        for batch in loader:
            read += numbers(batch)
            if len(read) >= owed:  # a feed has no end
                break
    assert len(set(read)) == len(read) == owed
    assert set(range(900, 910)) <= set(read)
    assert set(read) <= {*range(400, 411), *range(500, 500 + before["produced"] - 11), *range(900, 910)}
    assert is_clean("feed")


@pytest.mark.usefixtures("kept")
def test_another_member_takes_over_what_a_dead_one_held_in_segments() -> None:
    """The files are those of then."""
    with loader_of("files", "tail", member="other", lease_s=1) as loader:
        read = [number for batch in loader for number in numbers(batch)]
    assert len(read) == len(set(read)) == EXPECTED["audits"]["files"]["pending"]
    assert is_clean("files")


@pytest.mark.usefixtures("kept")
def test_dead_letters_are_listed_as_they_were_and_have_their_way_back() -> None:
    """One is unreadable and may be tried again, and an operator gave up the other one."""
    given_up, unreadable = [{**letter, "why": ""} for letter in EXPECTED["bad"]["dead"]]
    assert [{**letter, "why": ""} for letter in asked("bad", "list", "hurt")["dead"]] == [given_up, unreadable]
    told("bad", "retry", "hurt", "--group", "g")
    assert [{**letter, "why": ""} for letter in asked("bad", "list", "hurt")["dead"]] == [given_up]


@pytest.mark.usefixtures("kept_once")
def test_whoever_looks_at_a_kept_stream_finds_no_fault_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that explains a stream reads other keys."""
    monkeypatch.setattr("penstock_producer.write.cleaner.LOOK_AGAIN_S", 0.0)  # all of its members are long gone
    told("inspect")
    told("monitor", "--once", "--every", "0.1")
    for name in STREAMS:
        for arguments in (
            ("inspect", name), ("monitor", name, "--once", "--every", "0.1"), ("groups", "list", name),
            ("epochs", "list", name), ("show", name), ("stat", name), ("trim", name),
        ):  # fmt: skip
            told(*arguments)
    findings = asked("doctor", "--no-probe")["findings"]
    assert [one for one in findings if one["severity"] == "error" and one.get("stream") in PRODUCED[:2]] == []


def test_a_kept_stream_is_deleted_whole(client: redis.Redis, kept: Path) -> None:
    """Today's code knows every kind of key that an old stream has."""
    for name in STREAMS:
        told("delete", name, "--yes", "--force")
    assert client.keys() == []
    assert [*kept.iterdir()] == []
