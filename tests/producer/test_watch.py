"""A watched folder: each file that is whole is in one epoch, and only one, whatever happens to the watcher."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import redis
from PIL import Image

from penstock_common.errors import SourceError, StreamConflict
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.manifest import ABANDONED, OPEN, load_manifest, open_epoch, retained_epochs, take_number
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from penstock_common.stream.watched_files import load_watched, note_made, take_files
from penstock_common.tuning import Tuning
from penstock_common.wire.spec import SpecLike
from penstock_producer.jobs import watched_folder
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.watched_folder import FileSightings, FolderWatch
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.files import SourceFile
from penstock_producer.write.writer import Writer
from tests.producer.reading import read_epoch
from tests.producer.test_epoch_numbers import forget_epoch

PATIENCE_S = 120.0


def put(folder: Path, name: str, shade: int) -> None:
    """A whole picture, renamed into place."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(hidden, format="PNG")
    hidden.rename(path)


def watching(
    url: str,
    folder: Path,
    told: list[str],
    epochs: int | None = None,
    workers: int = 1,
    transform: str | None = None,
    resize: tuple[int, int] | None = None,
    mode: Literal["rgb", "gray16"] = "rgb",
    spec: SpecLike | None = None,
) -> FolderWatch:
    """A watch of the folder."""
    source = ImagesConfig(path=str(folder), transform=transform, resize=resize, mode=mode)
    plan = ProductionPlan(stream="train", source=source, max_bad="100%", shuffle=False, shard_samples=2, spec=spec)
    options = WorkerOptions(url=url, queue_url=url, room_wait_s=1.0)
    return FolderWatch(plan, options, workers=workers, epochs=epochs, notify=told.append, whole_after_s=0.3)


def shades(url: str) -> list[int]:
    """Return the shades of all samples of all epochs."""
    with connect(url) as client:
        epochs = retained_epochs(client, load_stream(client, "train"))
    return [int(s["x"][0, 0, 0]) for epoch in epochs for s in read_epoch(url, epoch=epoch).values()]


def until(looks: Iterator[object], done: object) -> None:
    """Goes on until ``done()``."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline
        next(looks)


def test_files_that_are_not_read_as_images_are_said_once(any_url: str, tmp_path: Path) -> None:
    """A watch that waits for files it does not read waits for ever."""
    for name in ("a.heic", "b.heic"):
        (tmp_path / name).write_bytes(b"photo")
    told: list[str] = []
    with watching(any_url, tmp_path, told, workers=0) as watch:
        looks = watch.run()
        until(looks, lambda: told)
        watch._new_files()
    assert told == ["files ending in .heic are passed over: they are not read as images"]


def test_files_that_stay_empty_are_said_once(any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is never taken, and never mentioned, is missed when it is too late."""
    monkeypatch.setattr(watched_folder, "EMPTY_AFTER_S", 0.5)
    told: list[str] = []
    (tmp_path / "a.png").touch()
    with watching(any_url, tmp_path, told) as watch:
        looks = watch.run()
        until(looks, lambda: told)
        for number in range(5):
            (tmp_path / f"b{number}.png").touch()
        until(looks, lambda: len(told) == 2)
        watch._new_files()
        put(tmp_path, "a.png", 7)
        until(looks, lambda: watch.epochs == 1)
    assert told == [
        "a.png has been empty for 0.5 s: it is taken once it has content",
        "b0.png, b1.png, b2.png and 2 more have been empty for 0.5 s: each is taken once it has content",
    ]
    assert shades(any_url) == [7]


def test_a_file_is_whole_when_it_has_not_changed_for_a_while() -> None:
    """Half a picture is a bad sample for ever, so the watch waits for its writer."""
    sightings = FileSightings(whole_after_s=3.0)
    small, grown, other = SourceFile("a.png", 10, 100), SourceFile("a.png", 20, 103), SourceFile("b.png", 5, 100)
    assert sightings.whole(0.0, [small, other]) == []
    assert sightings.whole(2.9, [small, other]) == []
    assert sightings.whole(3.0, [grown, other]) == [other]
    assert sightings.whole(5.9, [grown, other]) == [other]
    assert sightings.whole(6.0, [grown]) == [grown]
    assert sightings.whole(7.0, [other]) == []  # it was gone, and is another file
    assert sightings.whole(99.0, [SourceFile("empty.png", 0, 0)]) == []


def test_new_files_become_epochs_each_file_once(any_url: str, tmp_path: Path) -> None:
    """Cover files that exist, arrive later, are half written, are broken, or belong to no class."""
    folder, told = tmp_path / "in", list[str]()
    for shade in range(5):
        put(folder, f"cat/{shade}.png", shade)
    put(folder, "dog/5.png", 5)
    with watching(any_url, folder, told) as watch:
        looks = watch.run()
        until(looks, lambda: watch.epochs == 1)
        assert sorted(shades(any_url)) == list(range(6))
        whole = (folder / "cat/0.png").read_bytes()
        slow = (folder / "dog/slow.png").open("wb")
        growing = threading.Event()

        def grow() -> None:  # never still for as long as makes a file whole, however long a busy machine takes
            slow.write(whole[:-1])
            while not growing.wait(0.02):
                slow.write(b"\0")
                slow.flush()

        writer = threading.Thread(target=grow)
        writer.start()
        put(folder, "dog/6.png", 6)
        put(folder, "bird/7.png", 7)
        (folder / "cat/broken.png").write_bytes(b"\x89PNG but not really")
        (folder / "cat/8.txt").write_text("no picture")
        until(looks, lambda: watch.epochs == 2)
        growing.set()
        writer.join()
        slow.close()
        os.truncate(folder / "dog/slow.png", 0)  # gone: it is never whole
        assert sorted(shades(any_url)) == list(range(7))
        labels = {int(s["x"][0, 0, 0]): int(s["y"]) for e in (0, 1) for s in read_epoch(any_url, epoch=e).values()}
        assert labels == {**dict.fromkeys(range(5), 0), 5: 1, 6: 1}
        assert any("folder bird are left out" in line for line in told)
    with connect(any_url) as client:
        epochs = audit_stream(client, "train").epochs
    assert [(epoch.planned, epoch.bad) for epoch in epochs] == [(6, 0), (2, 1)]


def test_a_watcher_makes_its_stream_by_the_rules_of_every_writer(
    fresh_server: Callable[..., EmbeddedServer], tmp_path: Path
) -> None:
    """A stream that no writer may open afterwards would leave every file of the folder unread."""
    small, told = fresh_server(maxmemory_bytes=100 << 20), list[str]()
    put(tmp_path, "0.png", 0)
    with watching(small.url, tmp_path, told, epochs=1) as watch:
        list(watch.run())
    assert shades(small.url) == [0]
    assert any("takes a budget of 37 MiB" in line for line in told)


def test_a_watcher_that_is_started_again_takes_no_file_twice(any_url: str, tmp_path: Path) -> None:
    """Between any two of its steps it may be killed: what was taken is made, what was made is not made again."""
    folder, told = tmp_path / "in", list[str]()
    for shade in range(4):
        put(folder, f"{shade}.png", shade)
    with watching(any_url, folder, told, epochs=1) as watch:
        list(watch.run())
        stream = watch._stream
    put(folder, "4.png", 4)
    put(folder, "5.png", 5)
    with connect(any_url) as client:
        take_number(client, stream)  # killed after this: a number is left out
        epoch = take_number(client, stream)  # killed after the taking: it must be made all the same
        assert take_files(client, stream, epoch, ["4.png"])
        assert take_files(client, stream, epoch, ["4.png"])
        assert not take_files(client, stream, epoch + 1, ["4.png", "5.png"])  # and another watcher leaves it alone
        assert load_watched(client, stream).due == [epoch]
        client.hset(stream.keys.watched, "due:0", 4)  # killed before the making was noted
    with watching(any_url, folder, told) as again:
        looks = again.run()
        until(looks, lambda: again.epochs == 3)
    assert sorted(shades(any_url)) == list(range(6))
    with connect(any_url) as client:
        watched = load_watched(client, stream)
        assert (watched.due, watched.files(epoch)) == ([], ("4.png",))
        note_made(client, stream, epoch)
    with watching(any_url, folder, told) as third:
        looks = third.run()
        ends = time.monotonic() + 1.5
        until(looks, lambda: time.monotonic() > ends)
        assert third.epochs == 0
    assert sorted(shades(any_url)) == list(range(6))
    assert not [line for line in told if "cannot be made" in line]


def test_a_watch_whose_images_cannot_fit_the_stream_takes_no_file(any_url: str, tmp_path: Path) -> None:
    """A file that was taken with a wrong --resize is a bad sample for ever, and the right one comes too late."""
    put(tmp_path, "0.png", 0)
    with watching(any_url, tmp_path, [], epochs=1, resize=(8, 8)) as watch:
        list(watch.run())
    put(tmp_path, "1.png", 1)
    told = r"'train' holds samples of \(x: uint8\[8, 8, 3\]\), but with these options each image is \(x: "
    with pytest.raises(StreamConflict, match=told + r"uint8\[6, 6, 3\]\), so no file would fit: give the --resize"):
        watching(any_url, tmp_path, [], resize=(6, 6))
    with pytest.raises(StreamConflict, match=told + r"uint16\[\?, \?, 1\]\)"):
        watching(any_url, tmp_path, [], mode="gray16")
    with pytest.raises(StreamConflict, match="in --spec: leave --spec out"):
        watching(any_url, tmp_path, [], spec={"x": ("uint8", (6, 6, 3))})
    with watching(any_url, tmp_path, [], epochs=1, resize=(8, 8)) as watch:
        list(watch.run())
        assert watch.files == 1
    assert sorted(shades(any_url)) == [0, 1]


def test_a_watch_of_a_forgotten_epoch_leaves_the_one_with_its_number_alone(any_url: str, tmp_path: Path) -> None:
    """The server came back from before the watch opened it, and another producer was given its number."""
    folder, told = tmp_path / "in", list[str]()
    put(folder, "0.png", 0)
    with watching(any_url, folder, told, workers=0) as watch, connect(any_url) as client:
        looks = watch.run()
        until(looks, lambda: next(looks) is not None)
        forget_epoch(client, 0, "train")
        with Writer("train", url=any_url, tuning=Tuning(notify=told.append)) as writer:
            other = writer.epoch()
            assert other.number == 0
            until(looks, lambda: watch.epochs == 1)
            assert load_manifest(client, writer.stream, 0).state == OPEN
            other.close()
    assert [line for line in told if "epoch 0 (1 file) cannot be made" in line]


def test_an_epoch_that_an_earlier_watch_opened_is_given_up_if_it_cannot_be_made(any_url: str, tmp_path: Path) -> None:
    """Trainers would wait for it for ever."""
    folder, told = tmp_path / "in", list[str]()
    put(folder, "0.png", 0)
    with watching(any_url, folder, told, workers=0) as watch, connect(any_url) as client:
        epoch = take_number(client, watch._stream)
        assert take_files(client, watch._stream, epoch, ["0.png"])
        open_epoch(client, watch._stream, epoch)  # killed after this
    broken = "tests.producer.made:no_such_transform"
    with watching(any_url, folder, told, workers=0, transform=broken) as again, connect(any_url) as client:
        looks = again.run()
        until(looks, lambda: again.epochs == 1)
        assert retained_epochs(client, load_stream(client, "train")) == {0: ABANDONED}
    assert [line for line in told if "epoch 0 (1 file) cannot be made" in line]


def test_a_folder_that_goes_away_for_a_while_is_waited_for(any_url: str, tmp_path: Path) -> None:
    """A remount ended a watch of weeks."""
    folder, away, told = tmp_path / "new", tmp_path / "away", list[str]()
    put(folder, "a.png", 1)
    with watching(any_url, folder, told) as watch:
        looks = watch.run()
        until(looks, lambda: watch.epochs == 1)
        folder.rename(away)
        until(looks, lambda: told)
        assert told == [f"waiting: the watched folder {folder} is not there: mount or make it again"]
        away.rename(folder)
        put(folder, "b.png", 2)
        until(looks, lambda: watch.epochs == 2)
    assert shades(any_url) == [1, 2]


def test_the_first_file_that_is_overwritten_is_named(any_url: str, tmp_path: Path) -> None:
    """A name counts once. Who writes every picture to the same name must learn of it."""
    told: list[str] = []
    for name in ("a.png", "b.png"):
        put(tmp_path, name, 1)
    with watching(any_url, tmp_path, told) as watch:
        looks = watch.run()
        until(looks, lambda: watch.epochs == 1)
        for name in ("a.png", "b.png"):
            (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"more")
        put(tmp_path, "c.png", 3)
        until(looks, lambda: watch.epochs == 2)
    (line,) = told
    assert line.startswith("a.png was changed after epoch 0 took it, and is not read again, nor is any other file: ")
    assert shades(any_url) == [1, 1, 3]


def test_a_folder_that_is_not_there_is_said_at_once(any_url: str, tmp_path: Path) -> None:
    """A typo must not be watched for ever."""
    with pytest.raises(SourceError, match="no image folder"):
        watching(any_url, tmp_path / "nowhere", [])
    with redis.Redis.from_url(any_url) as client:
        assert not client.exists("penstock:{train}:meta")
