"""The albumentations example, run: the same shard made twice, by others and after a kill -9, is the same bytes."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from PIL import Image

from penstock_producer.planning.plan import ProductionPlan
from penstock_producer.planning.production import Production
from penstock_producer.sources.config import ImagesConfig
from penstock_producer.working.worker import WorkerOptions
from tests.producer.reading import read_epoch

IMAGES = 24
EXAMPLE = "examples.albumentations.augment:augment"


def killed_once(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """The example's, in a process that is killed at its tenth sample, the first time."""
    from examples.albumentations.augment import augment

    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    with mark.open("a") as file:
        file.write("x")
    if mark.stat().st_size == 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return augment(sample, rng)


def made(url: str, folder: Path, transform: str, workers: int) -> dict[Any, bytes]:
    """Identity -> pixels."""
    source = ImagesConfig(path=str(folder), resize=(256, 256), transform=transform)
    plan = ProductionPlan(stream="train", source=source, seed=5, shard_samples=IMAGES // 2, block_bytes=300_000)
    options = WorkerOptions(url=url, queue_url=url)
    with Production(plan, options, workers=workers, notify=lambda _: None) as production:
        list(production.run())
        assert production.summary().bad == 0
    return {place: sample["x"].tobytes() for place, sample in read_epoch(url).items()}


@pytest.mark.slow
def test_albumentations_gives_the_same_bytes_again_also_after_a_kill(
    any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that most augmentations are written with: a result that cannot be made again cannot be explained."""
    monkeypatch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")  # it would ask the net for a newer version
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
