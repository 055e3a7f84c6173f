"""Which samples an epoch takes: weights, classes, splits; the same for every process, steady as files come and go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from penstock_common.errors import SourceError
from penstock_producer.jobs.plan import EpochOrder, count_samples
from penstock_producer.sources.choice import side_of
from penstock_producer.sources.config import (
    ArraysConfig,
    BalancedConfig,
    ImagesConfig,
    KerasConfig,
    LocalConfig,
    SourceConfig,
    SplitConfig,
    WeightedConfig,
    WeightedPart,
    parse_config,
)
from penstock_producer.sources.names import register
from penstock_producer.sources.open import config_for_jobs, open_source
from penstock_producer.sources.protocol import Source
from tests.contracts.source import SourceContract, read
from tests.producer.sources.conftest import UserModule

PARTS = (("train", 0.9), ("val", 0.1))


def arrays(folder: Path, name: str, start: int, labels: list[int]) -> ArraysConfig:
    """Numbers from ``start``, one for each label."""
    np.savez(folder / f"{name}.npz", x=np.arange(start, start + len(labels)), y=np.array(labels))
    return ArraysConfig(archives=(f"{folder}/{name}.npz",))


def opened(config: SourceConfig) -> Any:
    """The source."""
    return open_source(config)


def epoch_of(source: Any, epoch: int = 0, seed: int = 1, *, shuffle: bool = True) -> list[int]:
    """Return the values of `x` in the epoch's order, as jobs would make them."""
    order = EpochOrder(source, seed=seed, epoch=epoch, shuffle=shuffle, shard_samples=4)
    items = [int(item) for shard in range(len(order.sizes)) for item in order.items(shard)]
    assert len(items) == count_samples(source)
    return [int(read(source, item)["x"]) for item in items]


# --- the rules --------------------------------------------------------------------------------------------------------


@given(st.text(max_size=20), st.integers(0, 2**63))
def test_a_side_depends_on_name_and_seed_alone(key: str, seed: int) -> None:
    """Moving the border moves only what lies between the old and the new one."""
    sides = [side_of(key, fractions, seed) for fractions in ((0.5, 0.5), (0.7, 0.3), (0.9, 0.1))]
    assert sides == sorted(sides, reverse=True)
    assert side_of(key, (0.7, 0.2, 0.1), seed) in (0, 1, 2)
    assert side_of(key, (0.5,), seed) in (0, 1)


def test_sides_are_the_same_for_ever_and_as_large_as_asked() -> None:
    """Golden: another version must not move validation samples into training."""
    sides = [side_of(f"cat/{n:05}.jpg", (0.9, 0.1), 0) for n in range(20_000)]
    assert sides[:24] == GOLDEN
    assert abs(sum(sides) - 2000) < 150
    other = [side_of(f"cat/{n:05}.jpg", (0.9, 0.1), 1) for n in range(20_000)]
    assert abs(sum(a and b for a, b in zip(sides, other, strict=True)) - 200) < 60


GOLDEN = [0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1]


# --- splits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two hundred small pictures of two classes."""
    for n in range(200):
        path = tmp_path / "photos" / ("cat" if n % 4 else "dog") / f"{n:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (2, 2), n).save(path)
    return tmp_path / "photos"


def sides(folder: Path) -> dict[str, set[str]]:
    """Part -> its files."""
    found = {}
    for name, _ in PARTS:
        source = opened(SplitConfig(source=ImagesConfig(path=str(folder)), parts=PARTS, part=name))
        found[name] = {source.key(index) for index in range(len(source))}
        assert source.info["files"] == [source.key(index) for index in range(len(source))]
    return found


def test_files_that_come_and_go_move_no_other(pictures: Path) -> None:
    """A validation set that leaks into training makes every number a lie."""
    before = sides(pictures)
    assert not before["train"] & before["val"]
    assert len(before["train"] | before["val"]) == 200
    for n in range(300, 400):
        Image.new("L", (2, 2), 0).save(pictures / "cat" / f"{n}.png")
    gone = sorted(before["train"])[:50]
    for name in gone:
        (pictures / name).unlink()
    after = sides(pictures)
    for part in before:
        assert before[part] - set(gone) <= after[part]
    assert not after["train"] & after["val"]


class TestSplit(SourceContract):
    """A part of a source keeps every promise of a source."""

    @pytest.fixture
    def config(self, pictures: Path) -> SplitConfig:
        """Return what a job would carry."""
        return SplitConfig(source=ImagesConfig(path=str(pictures), mode="gray"), parts=PARTS, part="val")

    @pytest.fixture
    def source(self, config: SplitConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source


def test_batches_are_split_whole(user_module: UserModule) -> None:
    """A Keras dataset's items are batches: each is on one side, with its own size."""
    name = user_module(
        """
        import numpy as np
        class Batches:
            def __len__(self): return 21
            def __getitem__(self, index):
                rows = 2 if index == 20 else 3
                return np.full((rows, 1), index), np.arange(rows)
        """
    )
    both = [
        opened(SplitConfig(source=KerasConfig(name=f"{name}:Batches"), parts=(("a", 0.6), ("b", 0.4)), part=part))
        for part in "ab"
    ]
    assert {source.unit for source in both} == {"batch"}
    assert sum(count_samples(source) for source in both) == 62
    rows = [row for source in both for n in range(len(source)) for row in read(source, n)["x"][:, 0].tolist()]
    assert sorted(rows) == sorted([n for n in range(20) for _ in range(3)] + [20, 20])


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    """In one line, when it is opened."""
    few = arrays(tmp_path, "few", 0, [0, 1])
    with pytest.raises(SourceError, match="none of the 2 items falls into 'val'"):
        opened(SplitConfig(source=few, parts=(("train", 0.999999), ("val", 0.000001)), part="val"))
    with pytest.raises(SourceError, match="an iterable cannot be split"):
        opened(SplitConfig(source=LocalConfig(token=register(iter([1]))), parts=PARTS, part="val"))
    for parts, message in (
        ((("a", 0.9), ("b", 0.2)), "fractions add up to at most 1"),
        ((("a", 0.5), ("a", 0.2)), "name a part more than once"),
        ((("b", 0.5),), "no part 'a'; there are b"),
    ):
        with pytest.raises(SourceError, match=message):
            parse_config({"kind": "split", "source": few.model_dump(), "parts": parts, "part": "a"})


# --- classes ----------------------------------------------------------------------------------------------------------

SKEWED = [0] * 12 + [1] * 3 + [2] * 6


class TestBalanced(SourceContract):
    """A balanced source keeps every promise of a source."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> BalancedConfig:
        """Return what a job would carry."""
        return BalancedConfig(source=arrays(tmp_path, "skewed", 0, SKEWED))

    @pytest.fixture
    def source(self, config: BalancedConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source


def test_every_class_comes_equally_often(tmp_path: Path) -> None:
    """In each epoch; over the epochs each sample of a class as often as its neighbours; by seed, not by chance."""
    source = opened(BalancedConfig(source=arrays(tmp_path, "skewed", 0, SKEWED), samples=9))
    epochs = [epoch_of(source, epoch) for epoch in range(4)]
    assert [Counter(SKEWED[x] for x in epoch) for epoch in epochs] == [Counter({0: 3, 1: 3, 2: 3})] * 4
    assert Counter(x for epoch in epochs for x in epoch if SKEWED[x] == 0) == Counter(range(12))
    assert epochs == [epoch_of(source, epoch) for epoch in range(4)]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert epoch_of(source, 0, seed=2) != epochs[0]
    in_order = epoch_of(source, 0, shuffle=False)
    assert [SKEWED[x] for x in in_order] == [0, 1, 2] * 3
    assert in_order == [0, 12, 15, 1, 13, 16, 2, 14, 17]


def test_classes_are_known_without_decoding(pictures: Path) -> None:
    """From the folders' names; within a part of a split only that part's samples are chosen."""
    whole = ImagesConfig(path=str(pictures), mode="gray")
    inner = SplitConfig(source=whole, parts=PARTS, part="val")
    source = opened(BalancedConfig(source=inner))
    order = source.choose(1, 0, True)
    classes = Counter(source.key(int(index)).split("/")[0] for index in order)
    assert sum(classes.values()) == len(opened(inner))
    assert abs(classes["cat"] - classes["dog"]) <= 1


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([0, 1], {"by": "z"}, "there is no tensor 'z' to balance by: images have one from their class folders"),
        ([0.5, 1.5], {}, r"tensor 'y' is float64\[2\]; a class is one whole number or text"),
        ([0, 1], {"samples": 1}, "1 samples an epoch are too few for 2 classes"),
    ],
)
def test_what_cannot_be_balanced_is_refused(tmp_path: Path, labels: Any, options: Any, message: str) -> None:
    """In one line, when it is opened."""
    with pytest.raises(SourceError, match=message):
        opened(BalancedConfig(source=arrays(tmp_path, "a", 0, labels), **options))


def test_a_tensor_that_only_decoding_shows_is_no_class(pictures: Path) -> None:
    """Balancing by pixels would decode every picture before the first one is chosen."""
    with pytest.raises(SourceError, match="the classes of tensor 'x' are not known without making every sample"):
        opened(BalancedConfig(source=ImagesConfig(path=str(pictures), mode="gray"), by="x"))


# --- weights ----------------------------------------------------------------------------------------------------------


def mixed(folder: Path, **options: Any) -> WeightedConfig:
    """Ten numbers from 0 and four from 100, three to one."""
    parts = (
        WeightedPart(source=arrays(folder, "many", 0, [0] * 10), weight=3),
        WeightedPart(source=arrays(folder, "few", 100, [1, 1, 0, 0]), weight=1),
    )
    return WeightedConfig(parts=parts, **options)


class TestWeighted(SourceContract):
    """Several sources as one keep every promise of a source."""

    @pytest.fixture
    def config(self, tmp_path: Path) -> WeightedConfig:
        """Return what a job would carry."""
        return mixed(tmp_path)

    @pytest.fixture
    def source(self, config: WeightedConfig) -> Source:
        """Opened here."""
        source: Source = opened(config)
        return source


def test_each_source_has_its_share_of_every_epoch(tmp_path: Path) -> None:
    """Whatever their sizes; and each is walked through before it begins again."""
    source = opened(mixed(tmp_path, samples=8))
    epochs = [epoch_of(source, epoch) for epoch in range(5)]
    assert [Counter(x >= 100 for x in epoch) for epoch in epochs] == [Counter({False: 6, True: 2})] * 5
    assert Counter(x for epoch in epochs for x in epoch if x < 100) == Counter(dict.fromkeys(range(10), 3))
    assert sorted(x for epoch in epochs[:2] for x in epoch if x >= 100) == [100, 101, 102, 103]
    assert epochs == [epoch_of(source, epoch) for epoch in range(5)]
    assert epoch_of(source, shuffle=False) == [0, 1, 100, 2, 3, 4, 101, 5]
    assert count_samples(opened(mixed(tmp_path))) == 14


def test_choices_are_nested(tmp_path: Path) -> None:
    """Mix balanced classes of one folder with all of another: each epoch of the inner choice is one pass."""
    skewed = BalancedConfig(source=arrays(tmp_path, "skewed", 0, SKEWED), samples=6)
    plain = arrays(tmp_path, "plain", 100, [5, 5])
    source = opened(WeightedConfig(parts=(WeightedPart(source=skewed), WeightedPart(source=plain)), samples=12))
    epoch = epoch_of(source, 3)
    assert Counter(SKEWED[x] for x in epoch if x < 100) == Counter({0: 2, 1: 2, 2: 2})
    assert Counter(x for x in epoch if x >= 100) == Counter({100: 3, 101: 3})
    config = WeightedConfig(parts=(WeightedPart(source=skewed), WeightedPart(source=plain)), samples=12)
    assert config_for_jobs(config, source) == config


def test_the_choice_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    """A repair with other weights, classes or sides would put other samples into the gaps."""
    few = arrays(tmp_path, "a", 0, [0, 1] * 20)
    configs: list[SourceConfig] = [
        few,
        *(SplitConfig(source=few, parts=PARTS, part=part, seed=seed) for part in ("train", "val") for seed in (0, 1)),
        SplitConfig(source=few, parts=(("train", 0.8), ("val", 0.2)), part="train"),
        BalancedConfig(source=few),
        BalancedConfig(source=few, samples=30),
        *(WeightedConfig(parts=(WeightedPart(source=few, weight=w), WeightedPart(source=few))) for w in (1, 2)),
    ]
    fingerprints = [opened(config).fingerprint for config in configs]
    assert len(set(fingerprints)) == len(configs)


def test_sources_that_do_not_fit_together_are_refused(tmp_path: Path, pictures: Path) -> None:
    """Class 0 must mean one thing, and a tensor have one dtype: found out at once, not in the loss curve."""
    other = tmp_path / "other"
    for name in ("bird", "cat"):
        (other / name).mkdir(parents=True)
        Image.new("L", (2, 2)).save(other / name / "a.png")
    parts = [WeightedPart(source=ImagesConfig(path=str(path))) for path in (pictures, other)]
    with pytest.raises(
        SourceError, match=r"parts 0 and 1 have other classes in 'y': cat, dog and bird, cat; .*--classes"
    ):
        opened(WeightedConfig(parts=tuple(parts)))
    numbers = arrays(tmp_path, "numbers", 0, [0])
    with pytest.raises(SourceError, match=r"tensor 'x' is int64\[\] in part 1 and uint8\[2, 2, 3\] in others"):
        _ = opened(WeightedConfig(parts=(parts[0], WeightedPart(source=numbers)))).spec
    with pytest.raises(SourceError, match=r"part 1 has a share of 0\.0001 of 201 samples: none"):
        opened(WeightedConfig(parts=(parts[0], WeightedPart(source=numbers, weight=0.0001))))
    with pytest.raises(SourceError, match="part 0 gives each item whole"):
        opened(WeightedConfig(parts=(WeightedPart(source=LocalConfig(token=register({1}))),)))
