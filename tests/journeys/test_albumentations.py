"""The albumentations example: the same shard made twice, by other workers and after SIGKILL, has the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import albumentations as A  # noqa: N812 - as its own pages write it
import numpy as np
import pytest
import redis
from PIL import Image
from torch.utils.data import Dataset, Subset

import penstock
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig, TorchConfig
from tests.producer.reading import read_epoch

IMAGES = 24
EXAMPLE = "examples.albumentations.augment:augment"


def killed_once(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Augment as the example does, in a process that is killed at its tenth sample, the first time."""
    from examples.albumentations.augment import augment

    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    with mark.open("a") as file:
        file.write("x")
    if mark.stat().st_size == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(sample, rng)


def made(url: str, folder: Path, transform: str, workers: int) -> dict[Any, bytes]:
    """Return identity -> pixels."""
    source = ImagesConfig(path=str(folder), resize=(256, 256), transform=transform)
    plan = ProductionPlan(stream="train", source=source, seed=5, shard_samples=IMAGES // 2, block_bytes=300_000)
    options = WorkerOptions(url=url, queue_url=url)
    with Production(plan, options, workers=workers, notify=lambda _: None) as production:
        list(production.run())
        assert production.summary().bad == 0
    return {place: sample["x"].tobytes() for place, sample in read_epoch(url).items()}


class Photos(Dataset):
    """A dataset as users write it: its Compose is an attribute, and has no seed."""

    def __init__(self) -> None:
        self.transform = A.Compose([A.RandomResizedCrop(size=(8, 8), scale=(0.1, 0.9)), A.HorizontalFlip(p=0.5)])
        self.pixels = np.random.default_rng(0).integers(0, 256, (512, 512, 3), np.uint8)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return self.transform(image=self.pixels)["image"], index


def photos() -> Subset[Any]:
    """Return a dataset within another dataset."""
    return Subset(Photos(), range(400))


def _silent(_: str) -> None:
    pass


def crops(url: str, client: redis.Redis, workers: int, dataset: Any = None) -> dict[int, bytes]:
    """Return index -> pixels of a production by a name, as from the command line, or of an object of this process."""
    client.flushall()
    if dataset is not None:
        penstock.produce(
            dataset,
            workers=workers,
            url=url,
            tuning=penstock.Tuning(seed=5, shard_samples=50, notify=_silent),
            wait=True,
        )
    else:
        plan = ProductionPlan(stream="train", source=TorchConfig(name=f"{__name__}:photos"), seed=5, shard_samples=50)
        options = WorkerOptions(url=url, queue_url=url)
        with Production(plan, options, workers=workers, notify=lambda _: None) as production:
            list(production.run())
            assert production.summary().bad == 0
    return {int(sample["y"]): sample["x"].tobytes() for sample in read_epoch(url).values()}


@pytest.mark.slow
def test_a_compose_inside_a_dataset_gives_each_sample_its_own_crop_in_every_process(
    any_url: str, any_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked workers had copies of its generator in one state: half of the crops were made twice, none repeatably."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
    named = crops(any_url, any_client, 2)
    assert len(named) == 400
    assert len(set(named.values())) == 400
    assert crops(any_url, any_client, 1) == named
    assert crops(any_url, any_client, 2, photos()) == named


@pytest.mark.slow
def test_albumentations_gives_the_same_bytes_again_also_after_a_kill(
    any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most augmentations are written with this library, and a result that cannot be repeated cannot be explained."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the internet for a newer version
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    folder = tmp_path / "photos"
    (folder / "one").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = rng.integers(0, 256, (12, 16, 3), np.uint8)
        Image.fromarray(pixels).resize((320, 240)).save(folder / "one" / f"{number:02}.jpg")
    first = made(any_url, folder, EXAMPLE, workers=1)
    any_client.flushall()
    assert made(any_url, folder, f"{__name__}:killed_once", workers=2) == first
    assert (tmp_path / "mark").stat().st_size > IMAGES
    assert len(set(first.values())) == IMAGES
