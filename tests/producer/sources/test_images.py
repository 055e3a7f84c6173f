"""Folders and zips of images as sources: what counts, how it is labelled, and every way it can be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock_common.errors import SampleError, SourceError
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig, parse_config
from penstock_producer.sources.image_files import EXTENSIONS, images_below, passed_over
from penstock_producer.sources.images import ImagesSource
from penstock_producer.sources.open import config_for_jobs, open_source
from penstock_producer.sources.protocol import Source
from tests.contracts.source import SourceContract, digest, read


class TestFolder(SourceContract):
    """A folder keeps every promise of a source."""

    @pytest.fixture
    def config(self, folder: Path) -> ImagesConfig:
        """Return what a job would carry."""
        return ImagesConfig(path=str(folder))

    @pytest.fixture
    def source(self, config: ImagesConfig) -> Source:
        """Opened here."""
        return ImagesSource(config)


class TestZip(SourceContract):
    """A zip keeps every promise of a source."""

    @pytest.fixture
    def config(self, zipped: Path) -> ImagesConfig:
        """Return what a job would carry."""
        return ImagesConfig(path=str(zipped), mode="gray", resize=(3, 2))

    @pytest.fixture
    def source(self, config: ImagesConfig) -> Source:
        """Opened here."""
        return ImagesSource(config)


class TestUnequalImagesWithBoxes(SourceContract):
    """Ragged images and ragged labels keep every promise of a source."""

    @pytest.fixture
    def config(self, folder: Path, tmp_path: Path) -> ImagesConfig:
        """Return what a job would carry."""
        Image.new("RGB", (9, 9)).save(folder / "cat/a.png")
        rows = ['{"file": "cat/a.png", "boxes": [[1, 2, 3, 4]], "name": "tom"}']
        rows += [f'{{"file": "{p}", "boxes": [], "name": "rex"}}' for p in ("cat/b.bmp", "cat/deep/c.png", "dog/a.png")]
        (tmp_path / "labels.jsonl").write_text("\n".join(rows))
        return ImagesConfig(path=str(folder), labels=str(tmp_path / "labels.jsonl"), unlabelled="skip")

    @pytest.fixture
    def source(self, config: ImagesConfig) -> Source:
        """Opened here."""
        return ImagesSource(config)


def test_a_folder_gives_images_and_class_ids_in_the_order_of_their_paths(folder: Path) -> None:
    """Ids equal those of torchvision and Keras, which sort the class folders too."""
    images = ImagesSource(ImagesConfig(path=str(folder)))
    assert images.info["files"] == ["cat/a.png", "cat/b.bmp", "cat/deep/c.png", "dog/a.png", "dog/b.tiff", "dog/c.png"]
    assert images.info["classes"] == {"y": ["cat", "dog"]}
    assert [int(read(images, index)["x"][0, 0, 0]) for index in range(6)] == [0, 10, 20, 30, 40, 50]
    assert [int(read(images, index)["y"]) for index in range(6)] == [0, 0, 0, 1, 1, 1]
    assert images.spec == {"x": ("uint8", (6, 4, 3)), "y": ("int64", ())}


def test_a_zip_gives_what_the_folder_gives(folder: Path, zipped: Path) -> None:
    """Zipping a folder with its top folder is the usual way, and must not make it a class."""
    from_folder, from_zip = ImagesSource(ImagesConfig(path=str(folder))), ImagesSource(ImagesConfig(path=str(zipped)))
    assert from_zip.info == from_folder.info
    assert [digest(read(from_zip, i)) for i in range(6)] == [digest(read(from_folder, i)) for i in range(6)]


def test_files_that_are_no_images_or_hidden_are_passed_over(folder: Path) -> None:
    """Folders hold notes, thumbnails databases and the traces of editors."""
    for name in ("notes.txt", "cat/.hidden.png", "dog/Thumbs.db", ".cache/x.png", "cat/a.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("hello")
    images = ImagesSource(ImagesConfig(path=str(folder)))
    assert len(images) == 6
    assert images.info["passed_over"] == {".txt": 2, ".db": 1}
    assert passed_over(images.info) == (
        "2 x .txt, 1 x .db passed over: images are files ending in " + " ".join(EXTENSIONS)
    )


def test_an_avif_a_jp2_and_an_ico_beside_a_jpg_are_all_read(tmp_path: Path) -> None:
    """Cameras and the web write more formats every year; none may be missing in silence."""
    for name in ("a.jpg", "b.avif", "c.jp2", "d.j2k", "e.ico", "F.AVIF"):
        Image.new("RGB", (32, 32), (0, 200, 0)).save(tmp_path / name)
    images = ImagesSource(ImagesConfig(path=str(tmp_path)))
    assert list(map(images.key, range(len(images)))) == [
        "F.AVIF",
        "a.jpg",
        "b.avif",
        "c.jp2",
        "d.j2k",
        "e.ico",
    ]
    for index in range(6):
        assert np.abs(read(images, index)["x"][16, 16].astype(int) - [0, 200, 0]).max() <= 4
    assert passed_over(images.info) is None


def test_files_and_hidden_members_of_a_mixture_are_told_apart() -> None:
    """Each kind of file is left out for another reason."""
    info = {"parts": [{"passed_over": {".txt": 2}}, {"passed_over": {"hidden": 3}}]}
    said = str(passed_over(info))
    assert said.startswith("2 x .txt passed over: images are files ending in .jpg")
    assert said.endswith(
        "; 3 hidden members of tars passed over: a part of their path begins with a dot, or is __MACOSX"
    )


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_production_counts_aloud_what_it_passes_over(any_url: str, folder: Path, is_mixed: bool) -> None:
    """A class whose photos are all .heic would be missing from training without a word."""
    for number in range(3):
        (folder / f"cat/{number}.heic").write_bytes(b"photo")
    config: Any = {"kind": "images", "path": str(folder)}
    source: Any = {"kind": "weighted", "parts": [{"source": config, "weight": 1}] * 2} if is_mixed else config
    plan = ProductionPlan(stream="train", source=parse_config(source))
    said: list[str] = []
    with Production(plan, WorkerOptions(url=any_url, queue_url=any_url), workers=0, notify=said.append):
        pass
    count = 6 if is_mixed else 3
    assert [line for line in said if line.startswith(f"{count} x .heic passed over: images are files ending in .jpg")]


def test_pipes_and_sockets_are_passed_over(folder: Path) -> None:
    """Reading one would wait for ever."""
    os.mkfifo(folder / "cat/pipe.png")
    assert len(ImagesSource(ImagesConfig(path=str(folder)))) == 6


def test_a_flat_folder_gives_images_without_labels(tmp_path: Path) -> None:
    """Labels are not always needed."""
    Image.new("L", (4, 4)).save(tmp_path / "a.JPG")
    images = ImagesSource(ImagesConfig(path=str(tmp_path)))
    assert images.spec == {"x": ("uint8", (4, 4, 3))}
    assert list(read(images, 0)) == ["x"]


def test_given_classes_fix_the_ids(folder: Path) -> None:
    """A validation folder that lacks a class must number the others as training did."""
    images = ImagesSource(ImagesConfig(path=str(folder), classes=("ant", "cat", "dog")))
    assert int(read(images, 0)["y"]) == 1
    with pytest.raises(SourceError, match=r"'dog', which is not among the classes \('ant', 'cat'\)"):
        ImagesSource(ImagesConfig(path=str(folder), classes=("ant", "cat")))


def test_links_are_followed_and_circles_end(folder: Path, tmp_path: Path) -> None:
    """Data folders are often made of links; two classes may even link to one folder."""
    (tmp_path / "linked").mkdir()
    for name in ("one", "two"):
        (tmp_path / "linked" / name).symlink_to(folder / "cat")
    (folder / "cat/deep/up").symlink_to(tmp_path / "linked")
    images = ImagesSource(ImagesConfig(path=str(tmp_path / "linked")))
    assert images.info["files"] == [
        f"{name}/{file}" for name in ("one", "two") for file in ("a.png", "b.bmp", "deep/c.png")
    ]


def test_the_fingerprint_changes_with_the_files_and_the_options(folder: Path) -> None:
    """A retried job must notice that it would make other samples than the first try."""

    def fingerprint(**options: object) -> str:
        return ImagesSource(ImagesConfig.model_validate({"path": str(folder), **options})).fingerprint

    seen = [fingerprint(), fingerprint(mode="gray"), fingerprint(resize=3)]
    os.utime(folder / "dog/a.png", (1, 1))
    seen.append(fingerprint())
    (folder / "dog/a.png").write_bytes(b"shorter")
    seen.append(fingerprint())
    (folder / "dog/a.png").rename(folder / "dog/z.png")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


def test_a_file_that_changed_after_the_folder_was_listed_is_a_bad_sample(folder: Path) -> None:
    """An epoch was made of old and new files, and nothing said so."""
    images = ImagesSource(ImagesConfig(path=str(folder)))
    read(images, 0)
    path = folder / images.info["files"][0]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(SampleError, match="was changed after its folder was listed"):
        read(images, 0)
    read(images, 1)


def test_images_of_unequal_size_are_ragged_unless_resized(folder: Path) -> None:
    """Boxes and segmentation need the original sizes; batches need equal ones."""
    Image.new("RGB", (9, 5)).save(folder / "cat/a.png")
    ragged, resized = (ImagesSource(ImagesConfig(path=str(folder), resize=size)) for size in (None, (3, 2)))
    assert ragged.spec["x"] == ("uint8", (None, None, 3))
    assert [read(ragged, i)["x"].shape for i in range(2)] == [(5, 9, 3), (6, 4, 3)]
    assert resized.spec["x"] == ("uint8", (3, 2, 3))
    assert {read(resized, i)["x"].shape for i in range(6)} == {(3, 2, 3)}


def test_a_single_odd_size_among_many_names_the_image(tmp_path: Path) -> None:
    """Only some headers are read to learn the size; the one that differs must be found by name, not by a crash."""
    for number in range(130):
        Image.new("L", (4, 4 if number != 1 else 5)).save(tmp_path / f"{number:03}.png")
    images = ImagesSource(ImagesConfig(path=str(tmp_path)))
    assert images.spec["x"] == ("uint8", (4, 4, 3))
    with pytest.raises(SampleError, match=r"001.png: is 5 x 4 \(height x width\), others 4 x 4; set resize"):
        read(images, 1)


def test_a_bad_image_is_named_and_the_others_are_read(folder: Path) -> None:
    """One bad image among a million must not end the epoch."""
    Image.effect_noise((4, 6), 50).convert("RGB").save(folder / "cat/a.png")
    os.truncate(folder / "cat/a.png", 90)
    (folder / "dog/a.png").write_text("hello, I am a text")
    (folder / "dog/c.png").unlink()
    (folder / "dog/c.png").symlink_to(folder / "nowhere")
    images = ImagesSource(ImagesConfig(path=str(folder)))
    with pytest.raises(SampleError, match=r"^cat/a.png: cannot be decoded: .*[Tt]runcated"):
        read(images, 0)
    with pytest.raises(SampleError, match=r"^dog/a.png: not a readable image: its 18 bytes begin with b'hello, I am "):
        read(images, 3)
    with pytest.raises(SampleError, match=r"^dog/c.png: cannot be read: No such file"):
        read(images, 5)
    assert read(images, 1)["x"][0, 0, 0] == 10


def test_file_names_of_any_bytes_are_read_and_shown(tmp_path: Path) -> None:
    """Old archives hold names in forgotten encodings."""
    Image.new("L", (2, 2)).save(tmp_path / "plain.png")
    os.rename(os.fsencode(tmp_path / "plain.png"), os.fsencode(tmp_path) + b"/\xe9t\xe9.png")  # noqa: PTH104
    images = ImagesSource(ImagesConfig(path=str(tmp_path)))
    assert images.key(0) == "�t�.png"
    assert read(images, 0)["x"].shape == (2, 2, 3)


def test_an_empty_or_missing_folder_says_what_was_found(tmp_path: Path) -> None:
    """The first mistake of a first-time user is the path."""
    for path, message in (
        (tmp_path / "nowhere", r"no image folder at .*nowhere: found nothing there; give a folder or a \.zip"),
        (tmp_path, r"no images in .*: found nothing; images are files ending in \.jpg"),
    ):
        with pytest.raises(SourceError, match=message):
            ImagesSource(ImagesConfig(path=str(path)))
    (tmp_path / "a.txt").touch()
    (tmp_path / "README").touch()
    with pytest.raises(SourceError, match=r"found 1 x \.txt, 1 x no extension; images are"):
        ImagesSource(ImagesConfig(path=str(tmp_path)))
    with pytest.raises(SourceError, match=r"found a file that is no \.zip there"):
        ImagesSource(ImagesConfig(path=str(tmp_path / "a.txt")))


@pytest.mark.parametrize(
    "config",
    [
        {"kind": "images", "path": "s3://bucket/photos"},
        {"kind": "images", "path": "gs://bucket/photos.zip"},
        {"kind": "images", "path": ".", "labels": "s3://bucket/labels.csv"},
        {"kind": "tar", "path": "s3://bucket/shards"},
        {"kind": "arrays", "columns": {"x": ["s3://bucket/x.npy"]}},
        {"kind": "arrays", "archives": ["s3://bucket/x.npz"]},
    ],
)
def test_an_object_store_is_refused_in_words(config: dict[str, Any]) -> None:
    """'Found nothing there' would send its owner to look for a typing error in the bucket's name."""
    with pytest.raises(
        SourceError, match=r"^(s3|gs)://bucket/.* is an address, expected a path: object stores are not"
    ):
        open_source(parse_config(config))
    with pytest.raises(SourceError, match="is an address"):
        images_below("s3://bucket/photos")


def test_a_folder_whose_name_looks_like_an_address_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder is read, whatever its name."""
    (folder.parent / "s3:").mkdir()
    folder.rename(folder.parent / "s3:/train")
    monkeypatch.chdir(folder.parent)
    assert len(ImagesSource(ImagesConfig(path="s3://train"))) == 6


def test_images_beside_class_folders_are_refused(folder: Path) -> None:
    """Which label they should have cannot be guessed."""
    Image.new("L", (2, 2)).save(folder / "stray.png")
    with pytest.raises(SourceError, match=r"1 image \(stray.png\) are not in a class folder; move them"):
        ImagesSource(ImagesConfig(path=str(folder)))


def test_a_zip_that_cannot_be_read_says_why(tmp_path: Path, zipped: Path) -> None:
    """Half downloads, passwords and rare compressions are found when opening, not after a night."""
    (tmp_path / "half.zip").write_bytes(zipped.read_bytes()[:300])
    (tmp_path / "text.zip").write_text("hello")
    with zipfile.ZipFile(tmp_path / "lzma.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a.png", b"x")
    locked = bytearray(zipped.read_bytes())
    for found in range(len(locked)):
        if locked[found : found + 4] == b"PK\x01\x02":
            locked[found + 8] |= 1  # the flag of encrypted members, APPNOTE 4.4.4
    (tmp_path / "locked.zip").write_bytes(locked)
    for name, message in (
        ("half", "is not a readable zip"),
        ("text", "is not a readable zip: File is not a zip file"),
        ("lzma", "a.png is neither stored nor deflated; zip it again"),
        ("locked", "is encrypted .*; give a zip without a password"),
        ("none", "no file at .*none.zip"),
    ):
        with pytest.raises(SourceError, match=message):
            ImagesSource(ImagesConfig(path=str(tmp_path / f"{name}.zip")))


def test_a_bomb_in_a_zip_costs_itself_and_not_the_archive(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member of gigabytes is not inflated, and said by name; the others are read."""
    monkeypatch.setattr("penstock_producer.sources.image_files.MAX_FIELD_BYTES", 5000)
    with zipfile.ZipFile(zipped, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("train/cat/bomb.png", bytes(5001))
    images = ImagesSource(ImagesConfig(path=str(zipped)))
    bombs = []
    for index in range(len(images)):
        try:
            read(images, index)
        except SampleError as error:
            bombs.append(str(error))
    assert bombs == ["cat/bomb.png has 5001 bytes; at most 5000 are read"]


def test_a_damaged_member_of_a_zip_is_named(zipped: Path) -> None:
    """Damage in one member is one bad sample, whichever of its bytes is hit."""
    whole = zipped.read_bytes()
    with zipfile.ZipFile(zipped) as archive:
        member = archive.getinfo("train/dog/a.png")
    for at in (member.header_offset, member.header_offset + 60):
        broken = bytearray(whole)
        broken[at] ^= 0xFF
        zipped.write_bytes(broken)
        images = ImagesSource(ImagesConfig(path=str(zipped)))
        with pytest.raises(SampleError, match=r"^dog/a.png: damaged in train.zip: "):
            read(images, 3)
        assert read(images, 1)["y"] == 0


def test_a_closed_zip_holds_no_file_open(zipped: Path) -> None:
    """Long-lived workers open many sources."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    images = ImagesSource(ImagesConfig(path=str(zipped)))
    images.close()
    images.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_pinned_configs_can_be_opened_from_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers do not run where the command ran."""
    monkeypatch.chdir(folder.parent)
    config = ImagesConfig(path="train")
    pinned = config_for_jobs(config, open_source(config))
    monkeypatch.chdir("/")
    assert open_source(pinned).info["classes"] == {"y": ["cat", "dog"]}


def test_without_pillow_one_line_names_the_extra(folder: Path) -> None:
    """A trainer's environment need not have Pillow; a producer's must, and pip's name for it."""
    code = f"""
import sys
sys.modules["PIL"] = None
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.sources.open import open_source
from penstock_common.errors import MissingExtra
try:
    open_source(ImagesConfig(path={str(folder)!r}))
except MissingExtra as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == 'reading images needs Pillow: pip install "penstock[producer]"\n'


def test_a_transform_gets_the_decoded_sample_and_its_own_generator(folder: Path, user_module: object) -> None:
    """Augmentation must be the same again when a shard is made again, and differ between samples."""
    module = user_module(  # type: ignore[operator]
        """
        def jitter(sample, rng):
            return {"x": sample["x"].astype("float32") + rng.random(), "y": sample["y"]}
        """
    )
    source = open_source(ImagesConfig(path=str(folder), transform=f"{module}:jitter"))
    assert source.unit == "sample"
    first, again, other = read(source, 0), read(source, 0), read(source, 1)
    assert source.spec is None
    assert first["x"].dtype == np.float32
    assert digest(first) == digest(again)
    assert other["x"].flat[0] - 10 != first["x"].flat[0]
