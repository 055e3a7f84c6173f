"""A foreign job runs no code and reads no file, on a production's own queue and on shared queues."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from PIL import Image

from penstock_common.errors import EpochFailed, SourceError
from penstock_producer.jobs import production as productions
from penstock_producer.jobs.allowlist import ANYTHING, Allowlist, PlannedTasks, options_for
from penstock_producer.jobs.dispatch import Dispatcher
from penstock_producer.jobs.fleet import Fleet
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.queue import FUNCTION
from penstock_producer.jobs.task import ShardTask
from penstock_producer.jobs.worker import QUEUE, WorkerOptions
from penstock_producer.sources import allowed, names
from penstock_producer.sources.allowed import NotAllowed
from penstock_producer.sources.config import (
    ArraysConfig,
    DatasetConfig,
    ImagesConfig,
    SourceConfig,
    TarConfig,
    WeightedConfig,
    WeightedPart,
)
from penstock_producer.sources.open import open_source
from tests.producer.made import SAMPLES
from tests.producer.test_jobs import PATIENCE_S, dataset, numbers_in, options_of

TASK = ShardTask(
    stream="train", stream_id="s", epoch=0, manifest_id="m", shard=0, source={}, fingerprint="f", seed=0
)  # fmt: skip


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Make a folder of two images with a link that leads out of it, and a secret outside."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for shade in range(2):
        Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(folder / f"{shade}.png")
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "secret.png")
    return folder


def test_the_options_told_for_a_source_allow_its_jobs_and_each_is_needed(photos: Path) -> None:
    """A worker that is started as advised must not refuse the jobs, nor be allowed more than these."""
    arrays = ArraysConfig(columns={"x": (str(photos / "x.npy"),), "y": (str(photos.parent / "y.npy"),)})
    sources: list[SourceConfig] = [
        ImagesConfig(path=str(photos), transform="team.pixels:of", labels=str(photos.parent / "other" / "labels.csv")),
        TarConfig(path=str(photos / "a.tar"), transform="team:flip"),
        arrays,
        WeightedConfig(
            parts=(
                WeightedPart(source=ImagesConfig(path=str(photos), transform="team:flip"), weight=1.0),
                WeightedPart(source=DatasetConfig(name="other:data", transform="team:flip"), weight=1.0),
            )
        ),
    ]
    for source in sources:
        words = options_for(source, "blocks:mix")
        pairs = list(zip(words[::2], words[1::2], strict=True))
        task = TASK.model_copy(update={"source": source.model_dump(mode="json"), "block_transform": "blocks:mix"})
        _trust_of(pairs).check(task)
        for left_out in pairs:
            with pytest.raises(NotAllowed):
                _trust_of([pair for pair in pairs if pair != left_out]).check(task)


def _trust_of(pairs: list[tuple[str, str]]) -> Allowlist:
    allow, roots = ([value for option, value in pairs if option == wanted] for wanted in ("--allow", "--root"))
    return Allowlist(tuple(allow), tuple(roots))


def test_a_production_without_workers_names_the_command_that_may_do_its_jobs(any_url: str) -> None:
    """A bare `penstock worker` refuses to start on a server that others use."""
    options = replace(options_of(any_url), queue="my jobs")
    with Production(ProductionPlan(stream="train", source=dataset()), options, workers=0) as production:
        deadline, waits = time.monotonic() + PATIENCE_S, ""
        for look in production.run():
            if waits := look.waits:
                break
            assert time.monotonic() < deadline
    assert waits == (
        "no worker takes jobs: start `penstock worker --allow tests.producer.made:numbers "
        "--allow tests.producer.made:with_pid --queue 'my jobs'`"
    )


def attack_of(folder: Path, mark: Path) -> dict[str, Any]:
    """The source of the forged job: its label function is a shell, its file a command."""
    (folder / f"$(touch {mark.name}).jpg").write_bytes(b"")
    return {
        "kind": "images", "path": str(folder), "files": [f"$(touch {mark.name}).jpg"], "label": "os:system",
    }  # fmt: skip


def packed(task: dict[str, Any]) -> bytes:
    """A job's data, as rq has it."""
    return zlib.compress(json.dumps([FUNCTION, None, [], task]).encode())


def forge(client: Any, job_id: str, source: dict[str, Any], *, copy: str = "") -> None:
    """Changes a queued job in its place, or puts a changed copy of it in front of all others."""
    found = client.hgetall(f"rq:job:{job_id}")
    task = json.loads(zlib.decompress(found[b"data"]))[3]
    found[b"data"] = packed({**task, "source": source})
    client.hset(f"rq:job:{copy or job_id}", mapping=found)
    if copy:
        client.lpush("rq:queue:penstock", copy)


# --- own workers ------------------------------------------------------------------------------------------------------


def test_a_forged_job_is_not_run_by_a_productions_own_workers(
    any_url: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any local user could run code as the user of `penstock run`: the label function was called before any check."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(productions, "CARE_S", 0.3)
    mark = tmp_path / "mark"
    told: list[str] = []
    source, changed = attack_of(photos, mark), ""
    plan = ProductionPlan(stream="train", source=dataset("slowly"), shard_samples=10)
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=2, notify=told.append) as production,
    ):
        deadline = time.monotonic() + PATIENCE_S
        for look in production.run():
            assert time.monotonic() < deadline, (look, told)
            if look.done and not changed:
                changed = client.lindex("rq:queue:penstock", -1).decode()
                forge(client, changed, source)
                forge(client, changed, source, copy="forged-1")
        assert production.summary().samples == SAMPLES
        assert client.llen("rq:queue:penstock") == 0
    assert not mark.exists(), "the stranger's command was run"
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert sum("refused job forged-1: this production never planned it" in line for line in told) == 1, told
    assert sum(f"refused job {changed}: somebody else changed it" in line for line in told) == 1, told


def test_a_forged_copy_of_the_last_job_holds_up_nothing(any_url: str) -> None:
    """The queue is then empty, and workers that pause with the job in hand would hide it from its producer."""
    plan = ProductionPlan(stream="train", source=dataset("slowly"), shard_samples=SAMPLES // 3)
    told: list[str] = []
    forged = 0
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=2, notify=told.append) as production,
    ):
        deadline = time.monotonic() + PATIENCE_S
        for look in production.run():
            assert time.monotonic() < deadline, (look, told)
            if forged < 3 and (queued := client.lrange("rq:queue:penstock", 0, -1)):
                found = client.hgetall(f"rq:job:{queued[-1].decode()}")
                task = json.loads(zlib.decompress(found[b"data"]))[3]
                if task["seed"] != 10**30:
                    client.hset(f"rq:job:{queued[-1].decode()}", "data", packed({**task, "seed": 10**30}))
                    forged += 1
        assert production.summary().samples == SAMPLES
    assert forged
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_jobs_of_another_production_are_left_to_its_workers(any_url: str) -> None:
    """Two productions share the default queue: neither runs what the other planned, and both are made."""
    with Production(ProductionPlan(stream="other", source=dataset()), options_of(any_url), workers=0) as other:
        other.enqueue_all()
        waiting = set(other._live_jobs())
        with Production(ProductionPlan(stream="train", source=dataset()), options_of(any_url), workers=1) as production:
            list(production.run())
        dispatcher = Dispatcher(any_url, QUEUE)
        assert waiting <= dispatcher.known(), "none was run, none was lost"
        helper = Fleet(options_of(any_url), 1)
        try:
            list(other.run())
        finally:
            helper.stop()
            dispatcher.close()
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))


def test_orders_cover_every_field_of_a_job_but_its_place() -> None:
    """A field that is left out of the comparison is one that a stranger may set."""
    planned_tasks = PlannedTasks()
    assert not planned_tasks.cover(TASK), "before any are given nothing is covered"
    planned_tasks.give(TASK)
    assert planned_tasks.has_met_others()
    assert planned_tasks.cover(TASK.model_copy(update={"epoch": 3, "manifest_id": "n", "shard": 7}))
    assert not planned_tasks.has_met_others()
    others: dict[str, Any] = {
        "stream": "x", "stream_id": "x", "source": {"a": 1}, "fingerprint": "x", "seed": 1, "shuffle": False,
        "on_error": "skip", "sample_limit_s": 1.0, "block_transform": "os:system", "block_samples": 1, "max_bad": "1",
        "spec_is_declared": True,
    }  # fmt: skip
    assert others.keys() | {"epoch", "manifest_id", "shard"} == ShardTask.model_fields.keys()
    for name, value in others.items():
        assert not planned_tasks.cover(TASK.model_copy(update={name: value})), name
        assert planned_tasks.has_met_others()


# --- shared queues ----------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_law() -> Iterator[None]:
    yield
    allowed._allowed = allowed._roots = None


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a label function": ({"kind": "images", "path": "{root}", "label": "os:system"}, "os:system"),
    "a transform": ({"kind": "images", "path": "{root}", "transform": "os:system"}, "os:system"),
    "a transform of a tar": ({"kind": "tar", "path": "{root}", "transform": "os:system"}, "os:system"),
    "a transform of arrays": ({"kind": "arrays", "archives": ["{root}/a.npz"], "transform": "os:abort"}, "os:abort"),
    "a dataset": ({"kind": "dataset", "name": "os:getpid"}, "os:getpid"),
    "a transform of a dataset": ({"kind": "dataset", "name": "team:data", "transform": "os:abort"}, "os:abort"),
    "a torch dataset": ({"kind": "torch", "name": "os:getpid"}, "os:getpid"),
    "a keras sequence": ({"kind": "keras", "name": "os:getpid"}, "os:getpid"),
    "a generator": ({"kind": "generator", "name": "os:getpid"}, "os:getpid"),
    "one of several generators": ({"kind": "generator", "pairs": {"x": "team:data", "y": "os:abort"}}, "os:abort"),
    "a neighbour by name": ({"kind": "dataset", "name": "teammate:data"}, "teammate:data"),
    "another name of a module": ({"kind": "dataset", "name": "single:other"}, "single:other"),
    "a folder": ({"kind": "images", "path": "{root}/../elsewhere"}, "elsewhere"),
    "a folder with the root's name before its own": ({"kind": "images", "path": "{root}2"}, "2 is outside"),
    "a link": ({"kind": "images", "path": "{root}/link"}, "link (which is "),
    "a file by dots": ({"kind": "images", "path": "{root}", "files": ["../secret.png"]}, "secret.png"),
    "a file by its whole path": ({"kind": "images", "path": "{root}", "files": ["/etc/passwd"]}, "/etc/passwd"),
    "a file that is a link": ({"kind": "images", "path": "{root}", "files": ["out.png"]}, "out.png"),
    "a file of labels": ({"kind": "images", "path": "{root}", "labels": "/etc/passwd"}, "/etc/passwd"),
    "a zip": ({"kind": "images", "path": "/tmp/a.zip"}, "/tmp/a.zip"),
    "a tar": ({"kind": "tar", "path": "/tmp/a.tar"}, "/tmp/a.tar"),
    "a column": ({"kind": "arrays", "columns": {"x": ["{root}/x.npy", "/tmp/x.npy"]}}, "/tmp/x.npy"),
    "an archive": ({"kind": "arrays", "archives": ["/tmp/x.npz"]}, "/tmp/x.npz"),
    "a zero byte": ({"kind": "images", "path": "{root}\0"}, "is outside"),
    "an object of another process": ({"kind": "local", "token": "local-1"}, "own workers"),
    "a part of a split": (
        {"kind": "split", "source": {"kind": "dataset", "name": "os:getpid"}, "parts": [["a", 1.0]], "part": "a"},
        "os:getpid",
    ),
    "what is balanced": ({"kind": "balanced", "source": {"kind": "images", "path": "/etc"}}, "/etc"),
    "one of several sources": (
        {"kind": "weighted", "parts": [{"source": {"kind": "dataset", "name": "os:getpid"}}]}, "os:getpid",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_worker_refuses_names_and_paths_it_was_not_allowed(case: str, photos: Path) -> None:
    """The sentence names what was refused and the option that would allow it."""
    (photos / "link").symlink_to(photos.parent)
    (photos / "out.png").symlink_to(photos.parent / "secret.png")
    source, said = REFUSED[case]
    filled = json.loads(json.dumps(source).replace("{root}", str(photos)))
    allowlist = Allowlist(("team", "single:one"), (str(photos),))
    with pytest.raises(NotAllowed) as refused:
        allowlist.check(TASK.model_copy(update={"source": filled}))
    assert said in str(refused.value)
    assert "--allow" in str(refused.value) or "--root" in str(refused.value) or "own workers" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "\0" not in str(refused.value)


def test_the_root_to_allow_is_no_wider_than_what_was_refused(photos: Path) -> None:
    """The parent folder of a user's pictures may be the whole home of that user."""
    allowlist = Allowlist((), (str(photos / "ok"),))
    for refused, root in ((photos, photos), (photos / "0.png", photos), (photos / "none", photos / "none")):
        source = {"kind": "images", "path": str(refused)}
        with pytest.raises(NotAllowed) as error:
            allowlist.check(TASK.model_copy(update={"source": source}))
        assert f"start it with --root {root} if everyone" in str(error.value)


def test_what_was_allowed_is_not_refused(photos: Path) -> None:
    """A module and what is below it, one name of another, files and links within the root."""
    (photos / "again").symlink_to(photos)
    allowlist = Allowlist(("team", "single:one"), (str(photos / "again"),))
    for source in (
        {"kind": "dataset", "name": "team:data", "transform": "team.images.augment:flip"},
        {"kind": "dataset", "name": "single:one"},
        {"kind": "images", "path": str(photos), "label": "team:label", "files": ["0.png", "again/1.png"]},
        {"kind": "images", "path": f"{photos}/../photos/again"},
    ):
        allowlist.check(TASK.model_copy(update={"source": source, "block_transform": "team:batch"}))
        ANYTHING.check(TASK.model_copy(update={"source": {"kind": "dataset", "name": "os:getpid"}}))
    team = {"kind": "dataset", "name": "team:data"}
    with pytest.raises(NotAllowed, match="os:system"):
        allowlist.check(TASK.model_copy(update={"source": team, "block_transform": "os:system"}))
    with pytest.raises(NotAllowed):
        Allowlist().check(TASK.model_copy(update={"source": team}))


def test_an_installed_sources_class_and_paths_count_as_named(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job names an entry point; which module that is, and which files its options name, is looked at all the same."""
    info = tmp_path / "site" / "tiny-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[penstock.sources]\ntiny = tiny_source:Tiny\n")
    (tmp_path / "site" / "tiny_source.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)

    def check(allow: str, **options: Any) -> None:
        source = {"kind": "installed", "name": "tiny", "options": options}
        Allowlist((allow,), (str(photos),)).check(TASK.model_copy(update={"source": source}))

    with pytest.raises(NotAllowed, match="tiny_source"):
        check("team")
    check(
        "tiny_source",
        count=3,
        url="s3://bucket/x",
        cached="simplecache::https://[host/x",
        where=str(photos / "0.png"),
        title="any text",
        table="postgresql:///train-3f",
        far="hdfs:///train-3f/part-0?x=1",
        near=f"sqlite:///{photos / '0.png'}",
        pattern="~nobody-3f",
        kind="local: yes",
    )
    check("tiny_source:Tiny")
    for path in (
        "/etc/passwd", "../x", "file:///etc/passwd", "~/x", "photos/../secret.png", "secret.png", "local:///etc/passwd",
        "simplecache::file:///etc/passwd", "simplecache::FILE:///etc/passwd", "../x://[/y", "sqlite:////etc/passwd",
        "sqlite:////etc/passwd?mode=ro", "osfs:///etc#x", "git:///%65tc", "sqlite:///secret.png", "~root",
        "file:/etc/passwd", "~\0/x",
    ):  # fmt: skip
        with pytest.raises(NotAllowed, match="--root"):
            check("tiny_source", nested=[{"deep": path}])


@pytest.mark.usefixtures("_no_law")
def test_what_only_opening_finds_is_refused_too(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may hold links that lead out of it, and an allowed module imports others that are not."""
    (photos / "out.png").symlink_to(tmp_path / "secret.png")
    tars = tmp_path / "photos" / "tars"
    tars.mkdir()
    with tarfile.open(tmp_path / "secret.tar", "w") as tar:
        tar.add(photos / "0.png", "0.png")
    (tars / "out.tar").symlink_to(tmp_path / "secret.tar")
    (tmp_path / "own_team.py").write_text(
        "import os, json\nfrom os import system\nfrom os.path import join\n"
        "class Data(list): pass\ndef data(): return [1]\n"
        "listed = [1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    Allowlist(("own_team", "json:dumps"), (str(photos),)).enforce()
    for config in (ImagesConfig(path=str(photos)), TarConfig(path=str(tars))):
        with pytest.raises(NotAllowed, match=r"out\.(png|tar) \(which is .*secret"):
            open_source(config)
    for name in ("own_team:data", "own_team:Data", "own_team:listed", "json:dumps"):
        names.resolve(name)
    for name in (
        "own_team:system", "own_team:os.system", "own_team:os", "own_team:join", "own_team:json.dumps", "json:loads",
        "own_team:listed.append", "own_team:data.__globals__", "own_team:Data.__init__.__globals__", "sys:modules",
    ):  # fmt: skip
        with pytest.raises(NotAllowed):
            names.resolve(name)


@pytest.mark.usefixtures("_no_law")
def test_an_object_in_an_allowed_module_is_its_own_whatever_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transform is an instance of a framework's class. It does not tell which module made it."""
    (tmp_path / "framework.py").write_text(
        "from functools import partial\nclass Compose:\n    def __call__(self, sample): return sample\n"
        "ready = Compose()\ndef flip(sample): return sample\n"
    )
    (tmp_path / "augmenting.py").write_text(
        "from functools import partial\nfrom framework import Compose, flip, ready\n"
        "composed = Compose()\nflipped = partial(flip)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    Allowlist(("augmenting",)).enforce()
    for name in ("composed", "flipped", "ready"):
        assert names.resolve_callable(f"augmenting:{name}")(3) == 3
    for name in ("Compose", "flip", "partial"):
        with pytest.raises(NotAllowed, match="is defined in"):
            names.resolve_callable(f"augmenting:{name}")


def test_a_refused_job_fails_its_epoch_with_the_option_that_would_allow_it(
    any_url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The one who planned it must hear of it: neither silence nor tries without end."""
    options = WorkerOptions(
        url=any_url, queue_url=any_url, is_chatty=True, allowlist=Allowlist(("tests.producer.other",))
    )
    fleet = Fleet(options, 1)
    try:
        plan = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES)
        with (
            Production(plan, options_of(any_url), workers=0) as production,
            pytest.raises(EpochFailed, match=r"is not allowed in this worker.*--allow tests\.producer\.made "),
        ):
            deadline = time.monotonic() + PATIENCE_S
            for look in production.run():
                assert time.monotonic() < deadline, look
    finally:
        fleet.stop()
    assert capfd.readouterr().err.count("is not allowed in this worker") == 1, "one sentence, not one for each try"


def test_a_worker_that_refuses_a_job_of_a_production_with_workers_is_named_with_its_reason(any_url: str) -> None:
    """The notice blamed another program and `rq info`, so nobody learned which option the worker lacks."""
    told: list[str] = []
    mine = options_of(any_url)
    fleet = Fleet(replace(mine, allowlist=Allowlist(("team",)), key=b"of another command"), 1)
    try:
        plan = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES)
        cells = PlannedTasks()  # its workers are started by the caller, here once the other one has refused
        with Production(plan, mine, workers=0, notify=told.append, planned_tasks=cells) as production:
            deadline = time.monotonic() + PATIENCE_S
            own: Fleet | None = None
            try:
                for look in production.run():
                    assert time.monotonic() < deadline, (look, told)
                    if own is None and any("gave back job" in line for line in told):
                        own = Fleet(mine, 1, planned_tasks=cells)
            finally:
                if own is not None:
                    own.stop()
            assert production.summary().samples == SAMPLES
    finally:
        fleet.stop()
    (line,) = [line for line in told if "gave back job" in line]
    assert re.match(r"worker '.+' \(process \d+ on .+\) of another `penstock worker` gave back job", line), line
    assert "is not allowed in this worker, which was started with --allow team: start it with --allow tests" in line
    assert "end that worker and start `penstock worker --allow tests.producer.made:numbers --allow " in line
    assert not any("rq info" in line for line in told), told


def test_workers_without_a_job_are_not_called_busy(any_url: str, any_client: redis.Redis) -> None:
    """Workers that refused every job were said to do those of others, on a queue that had none."""
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES)
    with Production(plan, options_of(any_url), workers=0) as production:
        next(production.run())
        any_client.sadd("rq:workers:penstock", "rq:worker:host.01234567")
        why = production._details._why_still(production._live_jobs(), has_workers=False)
    assert why == "no worker of this queue has taken one of its jobs: see what the workers say"


def test_a_forged_job_on_a_shared_queue_stops_no_production(
    any_url: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Shared workers refuse it by name; its producer has it queued again as it was planned."""
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "mark"
    told: list[str] = []
    source = attack_of(photos, mark)
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=40)
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=0, notify=told.append) as production,
    ):
        looks = production.run()
        next(looks)
        changed = client.lindex("rq:queue:penstock", 0).decode()
        forge(client, changed, source)
        forge(client, changed, source, copy="forged-1")
        allowlist = Allowlist(("tests.producer.made",), (str(photos),))
        fleet = Fleet(WorkerOptions(url=any_url, queue_url=any_url, is_chatty=True, allowlist=allowlist), 1)
        try:
            deadline = time.monotonic() + 2 * PATIENCE_S
            for look in looks:
                assert time.monotonic() < deadline, (look, told)
        finally:
            fleet.stop()
        assert production.summary().samples == SAMPLES
    assert not mark.exists(), "the stranger's command was run"
    assert sorted(numbers_in(any_url)) == list(range(SAMPLES))
    assert sum(f"refused job {changed}: somebody else changed it" in line for line in told) == 1, told
    errors = capfd.readouterr().err
    assert errors.count("(job forged-1): os:system is not allowed in this worker") == 1


def test_a_changed_job_that_failed_is_no_failure_of_its_production(
    any_url: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may fail it between two looks of the producer: one look decides what was changed and what failed."""
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    plan = ProductionPlan(stream="train", source=dataset(), shard_samples=SAMPLES)
    allowlist = Allowlist(("tests.producer.made",), (str(photos),))
    with (
        redis.Redis.from_url(any_url) as client,
        Production(plan, options_of(any_url), workers=0, notify=told.append) as production,
    ):
        next(production.run())
        (task,) = production._runs[0].tasks
        forge(client, task.job_id, attack_of(photos, tmp_path / "mark"))
        fleet = Fleet(WorkerOptions(url=any_url, queue_url=any_url, is_chatty=True, allowlist=allowlist), 1)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not client.zcard("rq:failed:penstock"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            fleet.stop()
        assert production._dispatcher.failure([task]) is None
        assert client.lrange("rq:queue:penstock", 0, -1) == [task.job_id.encode()]
    assert any(f"refused job {task.job_id}: somebody else changed it" in line for line in told)


def test_no_law_means_no_bound(tmp_path: Path) -> None:
    """A library that is used by its own user reads whatever the user names."""
    assert allowed._allowed is None
    assert allowed._roots is None
    allowed.require_inside(tmp_path)
    assert names.resolve("os:getpid") is sys.modules["os"].getpid
    with pytest.raises(SourceError, match="did you mean"):
        open_source(DatasetConfig(name="tests.producer.made:number"))
