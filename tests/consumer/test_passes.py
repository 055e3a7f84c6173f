"""One epoch for weeks: each pass has all of it, in an order that its seed and number decide."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock_common.stream.client import connect
from penstock_consumer.replay.export import export_stream
from penstock_consumer.replay.files import Files
from penstock_consumer.replay.replay import Replay
from tests.contracts.feed import numbers, produce
from tests.tuned import tuned

COUNT = 2000
QUIET = {"notify": lambda _: None}


def replay(url: str, batch_size: int = 16, **settings: object) -> Replay:
    """Return a replay of the epoch that `produce` made."""
    return Replay("t", url=url, epoch=0, batch_size=batch_size, **tuned("Replay", {**QUIET, **settings}))


@pytest.fixture
def made(any_url: str) -> str:
    """Yield the URL of a server with an epoch of the samples 0 .. COUNT - 1, in blocks of 20."""
    produce(any_url, "t", COUNT, block_samples=20)
    return any_url


def test_each_shuffled_pass_has_every_sample_once_in_an_order_of_its_own(made: str) -> None:
    """Epochs 2 to N must differ, or the model learns the order, and none may lack a sample."""
    with replay(made, shuffle=7, window=200) as shuffled:
        passes = [numbers(shuffled) for _ in range(3)]
        assert len(shuffled) == COUNT // 16
    assert all(sorted(one) == list(range(COUNT)) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    places = np.arange(COUNT)
    for one in passes:
        assert abs(np.corrcoef(one, places)[0, 1]) < 0.2  # the blocks' order is not correlated with the canonical one
        assert np.mean(np.abs(np.diff(one)) == 1) < 0.05  # neither are consecutive samples


def test_a_seed_and_a_number_decide_a_pass(made: str) -> None:
    """A training that continues after a crash shuffles as before, and another seed shuffles differently."""
    with replay(made, shuffle=7, window=200) as shuffled:
        first, second = numbers(shuffled), numbers(shuffled)
    with replay(made, shuffle=7, window=200) as again:
        again.set_pass(1)
        assert numbers(again) == second
        again.set_pass(0)
        assert numbers(again) == first
    with replay(made, shuffle=8, window=200) as other:
        assert numbers(other) not in (first, second)
    with replay(made) as canonical:
        assert numbers(canonical) == numbers(canonical) == list(range(COUNT))


def test_files_are_shuffled_as_the_stream_they_come_from(made: str, tmp_path: Path) -> None:
    """Moving from the server to files in the middle of an experiment changes nothing."""
    with connect(made) as client:
        export_stream(client, "t", tmp_path / "out", file_bytes=8192)
    with (
        replay(made, shuffle=7) as shuffled,
        Files(tmp_path / "out", batch_size=16, shuffle=7, **tuned("Files", QUIET)) as files,
    ):
        for _ in range(2):
            assert numbers(files) == numbers(shuffled)
        assert files.stats().reader_s > 0
        assert files.stats().server_s == 0, "it reads a folder"


def test_a_pass_that_is_left_early_counts(made: str) -> None:
    """A look at the first batch is a pass, and the next one is another."""
    with replay(made, shuffle=7, window=100) as shuffled:
        next(iter(shuffled))
        second = numbers(shuffled)
        shuffled.set_pass(1)
        assert numbers(shuffled) == second


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"shuffle": -1}, "a seed"), ({"window": 5}, "goes with shuffle"), ({"shuffle": 1, "window": 0}, "at least 1")],
)
def test_a_shuffle_that_means_nothing_is_refused(made: str, settings: dict[str, int], match: str) -> None:
    """It is refused at once, not after an epoch."""
    with pytest.raises(ValueError, match=match):
        replay(made, **settings)
    with replay(made) as canonical, pytest.raises(ValueError, match="counted from 0"):
        canonical.set_pass(-1)
