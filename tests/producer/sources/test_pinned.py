"""Golden orders, identities and random numbers: a stored stream keeps its meaning across versions of Penstock.

A resumed production, a repair and a replay find an epoch again from the source's config, its fingerprint and the seed.
The literal values below were taken once. They change only with a new format, never to make a test pass.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_producer.jobs.plan import EpochOrder, cut, cut_batches
from penstock_producer.sources.config import parse_config
from penstock_producer.sources.decode import random_box
from penstock_producer.sources.open import open_source
from penstock_producer.sources.seeding import find_seeded, reseed, sample_rng, seed_globals
from tests.producer.sources.conftest import UserModule

DAY = 1_700_000_000
"""When every file of these tests was changed, in seconds since 1970: times are part of a fingerprint."""
LABELS = [0] * 12 + [1] * 3 + [2] * 6


def bitmap(red: int) -> bytes:
    """Return a BMP of 2 x 2 pixels whose columns differ, byte by byte, so no library's version changes it."""
    row = bytes((0, 0, red, 0, 255, red)) + b"\0\0"
    size = 54 + 2 * len(row)
    head = b"BM" + size.to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    numbers = ((40, 4), (2, 4), (2, 4), (1, 2), (24, 2), (0, 4), (2 * len(row), 4), (0, 4), (0, 4), (0, 4), (0, 4))
    return head + b"".join(number.to_bytes(length, "little") for number, length in numbers) + row + row


def aged(path: Path) -> Path:
    """Set a file's time."""
    os.utime(path, (DAY, DAY))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """One small input of every kind that is read from files."""
    for number, name in enumerate(("cat/a.bmp", "cat/b.bmp", "dog/a.bmp", "dog/c.bmp", "dog/notes.txt")):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(bitmap(10 * number))
        aged(tmp_path / "photos" / name)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for name in ("train/cat/a.bmp", "train/dog/b.bmp"):
            archive.writestr(zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10)), bitmap(7))
    (tmp_path / "labels.csv").write_text("file,label,weight\n" + "".join(
        f"{name},{label},{weight}\n" for name, label, weight in
        (("cat/a.bmp", "tabby", 1), ("dog/a.bmp", "pug", 2), ("dog/c.bmp", "pug", 3))
    ))  # fmt: skip
    with tarfile.open(tmp_path / "shard.tar", "w") as tar:
        for number in range(3):
            for suffix, data in (("bmp", bitmap(number)), ("cls", b"%d" % number), ("json", b'{"a": {"b": 1.5}}')):
                member = tarfile.TarInfo(f"{number:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    aged(tmp_path / "shard.tar")
    np.save(tmp_path / "x.npy", np.arange(len(LABELS)))
    np.save(tmp_path / "y.npy", np.array(LABELS))
    np.save(tmp_path / "few.npy", np.arange(100, 104))
    for name in ("x.npy", "y.npy", "few.npy"):
        aged(tmp_path / name)
    return tmp_path


def configs(place: Path) -> dict[str, dict[str, Any]]:
    """Every kind of source, as a job carries it."""
    photos = {"kind": "images", "path": f"{place}/photos"}
    rows = {"kind": "arrays", "columns": {"x": (f"{place}/x.npy",), "y": (f"{place}/y.npy",)}}
    few = {"kind": "arrays", "columns": {"x": (f"{place}/few.npy",)}}
    return {
        "images": photos,
        "flipped": photos | {"random_crop": (4, 6), "flip": True},
        "named": photos | {"files": ("cat/a.bmp", "dog/gone.bmp")},
        "labelled": photos | {"labels": f"{place}/labels.csv", "unlabelled": "skip"},
        "zip": {"kind": "images", "path": f"{place}/photos.zip", "mode": "gray", "classes": ("dog", "cat")},
        "tar": {"kind": "tar", "path": f"{place}/shard.tar"},
        "arrays": rows,
        "split": {"kind": "split", "source": rows, "parts": (("train", 0.7), ("val", 0.3)), "part": "val", "seed": 3},
        "balanced": {"kind": "balanced", "source": rows, "samples": 9},
        "weighted": {"kind": "weighted", "parts": ({"source": rows, "weight": 3}, {"source": few}), "samples": 8},
    }


FINGERPRINTS = {
    "images": "61badd6ef4d27ad2",
    "flipped": "1e3565e205f344ee",
    "named": "c4ebaa7af587f080",
    "labelled": "ca6b4e4b762ca6f9",
    "zip": "ee9d7fe62728545e",
    "tar": "68a2651a3e0cf2b3",
    "arrays": "ff32b9330cf4a516",
    "split": "884266d0dc3d1bad",
    "balanced": "c90f2e0a861fabb2",
    "weighted": "0558d3b2443b2c2b",
}
FOUR, THREE = [[3, 2, 0, 1], [0, 3, 2, 1], [0, 1, 2, 3]], [[2, 0, 1], [0, 2, 1], [0, 1, 2]]
ORDERS = {
    "images": FOUR,
    "flipped": FOUR,
    "named": [[0, 1]] * 3,
    "labelled": THREE,
    "zip": [[0, 1]] * 3,
    "tar": THREE,
    "arrays": [
        [3, 5, 2, 9, 7, 10, 14, 0, 16, 15, 8, 13, 17, 12, 6, 18, 11, 1, 4, 19, 20],
        [14, 10, 0, 15, 16, 17, 13, 6, 18, 11, 12, 20, 5, 3, 4, 9, 19, 7, 8, 2, 1],
        list(range(21)),
    ],
    "split": [[3, 5, 2, 0, 1, 4], [0, 5, 3, 4, 2, 1], [0, 1, 2, 3, 4, 5]],
    "balanced": [
        [13, 14, 0, 17, 3, 18, 19, 10, 12],
        [5, 15, 12, 14, 13, 20, 16, 2, 8],
        [6, 12, 15, 7, 13, 16, 8, 14, 17],
    ],
    "weighted": [
        [20, 3, 15, 24, 14, 22, 7, 9],
        [12, 23, 1, 18, 16, 21, 13, 6],
        [12, 13, 21, 14, 15, 16, 22, 17],
    ],
}
PHOTOS = {
    "source": "images",
    "classes": {"y": ["cat", "dog"]},
    "passed_over": {".txt": 1},
    "files": ["cat/a.bmp", "cat/b.bmp", "dog/a.bmp", "dog/c.bmp"],
}
ROWS = {"source": "arrays", "files": ["x.npy", "y.npy"]}
INFOS = {
    "images": PHOTOS,
    "flipped": PHOTOS,
    "named": {"source": "images", "classes": {"y": ["cat", "dog"]}, "passed_over": {}},
    "labelled": PHOTOS | {"classes": {"label": ["pug", "tabby"]}, "files": ["cat/a.bmp", "dog/a.bmp", "dog/c.bmp"]},
    "zip": PHOTOS | {"classes": {"y": ["dog", "cat"]}, "passed_over": {}, "files": ["cat/a.bmp", "dog/b.bmp"]},
    "tar": {"source": "tar", "tars": 1, "fields": {"x": "bmp", "y": "cls", "json": "json"}},
    "arrays": ROWS,
    "split": ROWS | {"split": "val"},
    "balanced": ROWS | {"balanced": "y"},
    "weighted": {
        "source": "weighted",
        "parts": [{"source": "arrays", "samples": 6}, {"source": "arrays", "samples": 2}],
    },
}


def test_fingerprints_are_the_same_for_ever(place: Path) -> None:
    """A fingerprint that changes makes a resumed production and a repair refuse the source that they were given."""
    found = {name: open_source(parse_config(config)).fingerprint for name, config in configs(place).items()}
    assert found == FINGERPRINTS


def test_fingerprints_of_objects_are_the_same_for_ever(user_module: UserModule) -> None:
    """Those depend on names, lengths and options alone."""
    written = user_module(
        """
        import numpy as np
        numbers = list(range(5))
        def double(item): return {"x": 2 * item}
        def feed(): return iter(range(7))
        class Batches:
            def __len__(self): return 3
            def __getitem__(self, index): return np.full((1 if index == 2 else 4, 2), index)
        """
    )
    Path(f"{written}.py").rename("user_pinned.py")
    described: dict[str, dict[str, Any]] = {
        "dataset": {"kind": "dataset", "name": "user_pinned:numbers"},
        "transformed": {"kind": "dataset", "name": "user_pinned:numbers", "transform": "user_pinned:double"},
        "keras": {"kind": "keras", "name": "user_pinned:Batches"},
        "generator": {
            "kind": "generator",
            "name": "user_pinned:feed",
            "limit": 5,
            "transform": "user_pinned:double",
        },
        "pairs": {"kind": "generator", "pairs": {"x": "user_pinned:feed", "y": "user_pinned:feed"}},
    }
    found = {name: open_source(parse_config(config)).fingerprint for name, config in described.items()}
    assert found == {
        "dataset": "1e94c6397fd55c52",
        "transformed": "52c9fad766101b23",
        "keras": "08c82c145458f697",
        "generator": "82792b344f8a5ad9",
        "pairs": "9f63313c19c463dc",
    }


def test_orders_are_the_same_for_ever(place: Path) -> None:
    """A replay, a repair and a retried job read the same sample at an offset as the job that wrote it."""
    found: dict[str, list[list[int]]] = {}
    for name, config in configs(place).items():
        source = open_source(parse_config(config))
        assert source.unit == "sample"
        ways = ((1, 0, True), (1, 1, True), (1, 2, False))
        found[name] = [
            EpochOrder(source, seed=seed, epoch=epoch, shuffle=shuffle).first(99).tolist()
            for seed, epoch, shuffle in ways
        ]
    assert found == ORDERS


def test_what_a_stream_keeps_of_its_source_is_the_same_for_ever(place: Path) -> None:
    """Loaders and commands read class names and file names from a stream that an older version wrote."""
    found = {name: open_source(parse_config(config)).info for name, config in configs(place).items()}
    assert found == INFOS


def test_shards_are_cut_at_the_same_places_for_ever() -> None:
    """Identities are (epoch, shard, offset): another cut would give every sample another one."""
    assert cut(100, 7) == [7] * 12 + [6, 4, 2, 2, 1, 1]
    assert cut(10, 4) == [4, 4, 2]
    assert cut_batches([3, 4, 5, 6, 7] * 8, 9) == [2, 1, 1, 1] * 7 + [1] * 5


def test_random_numbers_of_a_sample_are_the_same_for_ever() -> None:
    """A sample that is made again has the same augmentation, whichever generator it drew from."""
    held: list[int] = []

    class Holder:
        """Seeded for each sample."""

        def set_random_seed(self, seed: int) -> None:
            """Keep it."""
            held.append(seed)

    rng = sample_rng(7, 3, 2, 1)
    reseed(find_seeded([Holder(), {"a": Holder()}], "data"), rng, "data[0]")
    assert held == [1541406460, 1779998149]
    assert rng.random() == 0.5662354044752963
    own: list[Any] = [np.random.default_rng(), np.random.RandomState(), random.Random()]
    reseed(find_seeded([own, Holder()], "data"), sample_rng(7, 3, 2, 1), "data[0]")
    assert held[2:] == [1541406460]  # whatever generators there are
    assert [float(own[0].random()), float(own[1].random_sample()), own[2].random()] == [
        0.7950443509554525,
        0.3315605957966564,
        0.9459030511379485,
    ]
    boxes = [random_box(375, 500, sample_rng(1, 0, 0, offset)) for offset in range(3)]
    assert boxes == [(126, 89, 412, 304), (84, 14, 362, 373), (139, 217, 270, 365)]
    seed_globals(7, 3, 2, 1)
    assert (random.random(), float(np.random.rand())) == (0.47541281020590065, 0.14941036263440244)  # noqa: NPY002


def test_flips_and_crops_fall_on_the_same_samples_for_ever(place: Path) -> None:
    """The bytes of a decoded sample follow from its identity."""
    config = configs(place)["images"] | {"flip": True}
    source, tar = open_source(parse_config(config)), open_source(parse_config(configs(place)["tar"] | {"flip": True}))
    assert source.unit == tar.unit == "sample"
    flips = [offset for offset in range(24) if source.read(3, sample_rng(5, 1, 0, offset))["x"][0, 0, 1]]
    assert flips == [3, 4, 15, 18, 21]
    flips = [offset for offset in range(24) if tar.read(2, sample_rng(5, 1, 0, offset))["x"][0, 0, 1]]
    assert flips == [0, 1, 2, 4, 8, 10, 13, 15, 18, 20, 21, 22, 23]
    row = [[30, 0, 0], [30, 255, 0]]
    assert source.read(3, sample_rng(5, 1, 0, 0))["x"].tolist() == [row, row]
