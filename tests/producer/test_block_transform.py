"""Transforms of many samples at once: which samples they get, what becomes of a bad one, and that chance repeats."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis

import penstock
from penstock_common.errors import SampleError, SourceError
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import ProductionSummary
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import DatasetConfig, GeneratorConfig, SourceConfig
from penstock_producer.sources.transform import Transform, transform_block
from tests.producer.reading import read_epoch

SAMPLES, BLOCK = 50, 8
Block = dict[str, Any]
_calls: list[int] = []


def numbers() -> list[dict[str, Any]]:
    """A dataset; one of its items cannot be read."""
    return [{"x": np.full(3, number, np.float32), "name": str(number)} for number in range(SAMPLES)]


def first_read(item: dict[str, Any]) -> dict[str, Any]:
    """Number 7 is bad before any block sees it."""
    if item["x"][0] == 7:
        raise ValueError("seven")
    return item


def noisy(block: Block, rng: np.random.Generator) -> Block:
    """Noise drawn at once, and how many were in the block."""
    assert isinstance(block["name"], list)
    many = np.full(len(block["x"]), len(block["x"]))
    return {"x": block["x"] + rng.random(block["x"].shape, np.float32) / 2, "many": many, "name": block["name"]}


def noisy_killed_once(block: Block, rng: np.random.Generator) -> Block:
    """Add noise, in a process that is killed once at its third block, when part of the second is committed."""
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    _calls.append(len(block["x"]))
    if len(_calls) == 3 and not mark.exists():
        time.sleep(0.2)  # so that what was sent has arrived
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return noisy(block, rng)


def fails_or_crashes(block: Block, rng: np.random.Generator) -> Block:
    """Number 13 raises, number 30 is the end of its worker."""
    if 13 in block["x"]:
        raise ValueError("thirteen")
    if 30 in block["x"]:
        os._exit(9)
    return noisy(block, rng)


def produce(url: str, block_transform: str, source: SourceConfig | None = None, **plan: Any) -> ProductionSummary:
    """One production by two workers."""
    named = DatasetConfig(name=f"{__name__}:numbers", transform=f"{__name__}:first_read")
    asked = ProductionPlan(
        stream="train", source=source or named, block_transform=f"{__name__}:{block_transform}", block_samples=BLOCK,
        shard_samples=25, **plan,
    )  # fmt: skip
    options = WorkerOptions(url=url, queue_url=url)
    with Production(asked, options, workers=2, notify=lambda _: None) as production:
        list(production.run())
        return production.summary()


def samples_in(url: str) -> dict[Any, bytes]:
    """Identity -> the drawn numbers."""
    return {place: sample["x"].tobytes() for place, sample in read_epoch(url).items()}


def test_blocks_are_transformed_at_once_and_alike_after_a_kill(
    any_url: str, any_client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectorised code is many times faster; a retried shard must still hold the same bytes, cut where it may be."""
    monkeypatch.setenv("PENSTOCK_TEST_MARK", str(tmp_path / "mark"))
    summary = produce(any_url, "noisy")
    assert (summary.samples, summary.bad) == (SAMPLES, 1)
    made, samples = samples_in(any_url), read_epoch(any_url).values()
    assert sorted(int(sample["x"][0]) for sample in samples) == [n for n in range(SAMPLES) if n != 7]
    assert {int(sample["many"]) for sample in samples} >= {BLOCK, BLOCK - 1}  # whole, and that with the bad one
    any_client.flushall()
    produce(any_url, "noisy_killed_once", block_bytes=60)
    assert (tmp_path / "mark").exists()
    assert samples_in(any_url) == made


def test_only_the_bad_sample_of_a_block_is_lost(any_url: str, any_client: redis.Redis) -> None:
    """Sixty-four samples must not go for one, whether it raises or takes its worker along."""
    summary = produce(any_url, "fails_or_crashes")
    assert (summary.samples, summary.bad) == (SAMPLES, 3)
    assert sorted(int(s["x"][0]) for s in read_epoch(any_url).values()) == [
        n for n in range(SAMPLES) if n not in (7, 13, 30)
    ]
    (key,) = any_client.scan_iter("*:quarantine")
    reasons = b" ".join(any_client.hvals(key))  # type: ignore[arg-type]
    for why in (b"numbers[13]: transform", b"thirteen", b"numbers[30]: ended its worker with exit code 9, 3 times"):
        assert why in reasons


def test_a_notebooks_function_of_blocks_may_be_a_closure(any_url: str) -> None:
    """A user tries the function that was just written in a cell."""
    scale = 10

    def scaled(block: Block) -> Block:
        return {"x": block["x"] * scale}

    penstock.produce(
        list(range(20)), tuning=penstock.Tuning(block_transform=scaled, notify=lambda _: None), url=any_url, wait=True
    )
    assert sorted(int(sample["x"]) for sample in read_epoch(any_url).values()) == [n * 10 for n in range(20)]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ({"x": np.zeros(3)}, "gave 3 rows of 'x' for 2 samples"),
        ({"x": 1.0}, "gave no rows of 'x' for 2 samples"),
        (np.zeros(2), "returned a ndarray; expected a dict of tensors"),
        ({}, "returned an empty dict; expected a dict of tensors"),
    ],
)
def test_what_is_no_row_for_each_sample_is_refused(made: Any, why: str) -> None:
    """A row too few would shift all labels behind it."""
    transform = Transform.of(lambda block: made, "mine")
    with pytest.raises(SampleError, match=why):
        transform_block(transform, [{"x": 1}, {"x": 2}], np.random.default_rng(0), "key")


def test_a_block_of_bytes_is_a_list_of_them() -> None:
    """Texts and encoded images have no common shape."""
    transform = Transform.of(noisy, "noisy")
    block = [{"x": np.full(3, n, np.float32), "name": str(n).encode()} for n in range(12)]
    made = transform_block(transform, block, np.random.default_rng(0), "key")
    assert [(int(sample["x"][0]), sample["name"]) for sample in made] == [(n, str(n).encode()) for n in range(12)]


def test_a_block_transform_may_return_dicts_within_its_dict() -> None:
    """A transform of many samples may return what a transform of one may."""
    transform = Transform.of(lambda block: {"y": {"twice": block["x"] * 2}}, "mine")
    assert transform_block(transform, [{"x": 1}, {"x": 2}], np.random.default_rng(0), "key") == [
        {"y/twice": 2},
        {"y/twice": 4},
    ]


def test_samples_of_different_shapes_are_no_block() -> None:
    """They come one at a time, because padding is the user's choice."""
    transform = Transform.of(lambda block: block, "mine")
    with pytest.raises(SampleError, match="different shapes"):
        transform_block(transform, [{"x": np.zeros(2)}, {"x": np.zeros(3)}], np.random.default_rng(0), "key")


def test_a_source_without_samples_of_a_number_is_refused(any_url: str) -> None:
    """Before an epoch is begun."""
    with pytest.raises(SourceError, match=r"gives each item as a whole: transform it there"):
        produce(any_url, "noisy", GeneratorConfig(name=f"{__name__}:numbers"))
