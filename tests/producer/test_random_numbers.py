"""Chance that can be repeated: a transform's random numbers come from the sample's identity, wherever it finds them."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import redis
from PIL import Image

from penstock_producer.jobs.fill import EpochSeed
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.arrays import ArraysSource
from penstock_producer.sources.choice import BalancedSource, SplitSource, WeightedSource
from penstock_producer.sources.config import ArraysConfig, DatasetConfig, ImagesConfig
from penstock_producer.sources.dataset import DatasetSource
from penstock_producer.sources.images import ImagesSource
from penstock_producer.sources.protocol import draws
from penstock_producer.sources.seeding import seed_globals
from penstock_producer.sources.transform import Transform, TransformedSource
from tests.producer.reading import read_epoch


def numbers() -> list[int]:
    """A dataset."""
    return list(range(40))


def dice(number: int, rng: np.random.Generator) -> dict[str, Any]:
    """Draws wherever it can."""
    return {
        "number": number,
        "drawn": np.array([random.random(), np.random.rand(), rng.random()]),  # noqa: NPY002
    }


NUMPY, PYTHON = np.random.default_rng(42), random.Random(42)


def held_dice(number: int) -> dict[str, Any]:
    """Draws from generators of its module."""
    return {"number": number, "drawn": np.array([NUMPY.normal(), PYTHON.random()])}


def drawn_by(url: str, workers: int, transform: str = "dice") -> dict[Any, bytes]:
    """Identity -> what its sample drew, in one production."""
    source = DatasetConfig(name=f"{__name__}:numbers", transform=f"{__name__}:{transform}")
    plan = ProductionPlan(stream="train", source=source, seed=3, shard_samples=8)
    options = WorkerOptions(url=url, queue_url=url)
    with Production(plan, options, workers=workers, notify=lambda _: None) as production:
        list(production.run())
    return {place: sample["drawn"].tobytes() for place, sample in read_epoch(url).items()}


def test_global_generators_repeat_themselves_whoever_makes_a_sample(any_url: str, any_client: redis.Redis) -> None:
    """Libraries draw from numpy's and Python's own generators, which a user cannot see in their code."""
    first = drawn_by(any_url, workers=1)
    any_client.flushall()
    assert drawn_by(any_url, workers=2) == first
    assert len(set(first.values())) == len(first) == 40


def test_generators_of_a_users_module_repeat_themselves_whoever_makes_a_sample(
    any_url: str, any_client: redis.Redis
) -> None:
    """Two workers that each began at the module's seed gave 20 samples 11 values."""
    first = drawn_by(any_url, 1, "held_dice")
    any_client.flushall()
    assert drawn_by(any_url, 2, "held_dice") == first
    assert len(set(first.values())) == len(first) == 40


def test_each_identity_has_random_numbers_of_its_own() -> None:
    """Two samples that draw the same are one augmentation less."""
    drawn = set()
    for identity in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (-1, 0, 0, 0)):
        seed_globals(*identity)
        drawn.add((random.random(), np.random.rand()))  # noqa: NPY002
    assert len(drawn) == 6


def test_torch_is_seeded_where_it_is_there_and_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchvision draws from it; a worker without it must not wait seconds for its import."""
    monkeypatch.setitem(sys.modules, "torch", None)
    seed_globals(0, 0, 0, 0)
    told: list[int] = []
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(default_generator=SimpleNamespace(manual_seed=told.append))
    )
    seed_globals(0, 0, 0, 0)
    seed_globals(0, 0, 0, 0)
    assert told[0] == told[1] > 1 << 32


def test_a_users_own_process_keeps_its_generators() -> None:
    """`penstock.produce` in a notebook must not make the rest of the notebook draw the same numbers again."""
    random.seed(7)
    expected = random.random()
    random.seed(7)
    EpochSeed(0, 0, sets_globals=False).of(0, 0)
    assert random.random() == expected


def test_only_a_source_that_says_it_draws_nothing_is_given_no_generator(tmp_path: Path) -> None:
    """Making one takes as long as a small transform; but a source that knows nothing of this must get its own."""

    def with_rng(item: Any, rng: np.random.Generator) -> Any:
        return {"x": rng.random()}

    class Written:
        """Classes that use common names for something else."""

    class Counting:
        """A name that others may use for something else."""

        draws = 0

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    plain, drawing = DatasetSource([1], "plain"), DatasetSource([1], "drawing", Transform.of(with_rng))
    images, flipped = (ImagesSource(ImagesConfig(path=str(tmp_path), flip=flip)) for flip in (False, True))
    found = [
        draws(cast(Any, source))
        for source in (
            plain,
            drawing,
            images,
            flipped,
            TransformedSource(plain, Transform.of(with_rng)),
            Written(),
            Counting(),
        )
    ]
    assert found == [False, True, False, True, True, True, True]
    assert EpochSeed(1, 0, sets_globals=False).no_generator(0, 0) is None


def test_a_choice_of_samples_draws_as_what_it_chooses_from(tmp_path: Path) -> None:
    """Else `--split` or `mix` would give a transform None, or every array a generator that it has no use for."""
    np.save(tmp_path / "x.npy", np.arange(8))
    arrays = ArraysSource(ArraysConfig(columns={"x": (str(tmp_path / "x.npy"),)}))
    drawing = DatasetSource(list(range(8)), "drawing", Transform.of(dice))
    for part in (arrays, drawing):
        chosen = (
            SplitSource(part, [("train", 1.0)], "train", 0),
            BalancedSource(arrays, "x"),
            WeightedSource([arrays, part], [1, 1]),
        )
        assert [source.draws for source in chosen] == [draws(part), False, draws(part)]
