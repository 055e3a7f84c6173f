"""The endless feed: it ends its epochs by itself, with any number of writers, and loses nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import load_manifest
from penstock_consumer.loader import Loader
from tests.contracts.feed import (
    SPEC,
    numbers,
    open_stream,
    replayed,
    sample,
    stored,
    writer_of,
)


class TestFeed:
    """The endless feed."""

    def test_a_feed_rotates_its_epochs_and_loses_nothing(self, any_url: str) -> None:
        """Old data can only go by whole epochs, so a feed must end them by itself."""
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 1000, "budget_bytes": 80_000}
        with writer_of(any_url, **settings) as writer:
            for number in range(2000):
                writer.write(sample(number))
        with Loader("t", group="g", batch_size=50, url=any_url, timeout_s=0.3, notify=lambda _: None) as loader:
            found: list[int] = []
            epochs = set()
            with pytest.raises(TimeoutError):
                for batch in loader:
                    found += batch["y"].tolist()
                    epochs.add(batch.epoch)
        assert sorted(found) == list(range(2000))
        assert len(epochs) >= 4

    @pytest.mark.parametrize("batched", [False, True])
    def test_two_writers_of_a_feed_rotate_together(self, any_url: str, any_client: Client, batched: bool) -> None:
        """An epoch is produced when its last writer has left it: nobody may stay behind."""
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 1000, "budget_bytes": 200_000}
        with writer_of(any_url, **settings) as one, writer_of(any_url, **settings) as two:
            for start in range(0, 64 * 64, 64):
                many = one if start % 256 else two  # the second writes a third of what the first does
                if batched:
                    ys = np.arange(start, start + 64)
                    many.write_batch({"x": np.repeat(ys[:, None], 4, axis=1).astype(np.float32), "y": ys})
                else:
                    for number in range(start, start + 64):
                        many.write(sample(number))
            stream = one.stream
        states = [load_manifest(any_client, stream, epoch).state for epoch in (0, 1, 2)]
        assert states == ["produced"] * 3
        assert sum(stored(any_client, "t", epoch).total() for epoch in range(30)) == 64 * 64

    def test_what_is_written_can_be_read_before_the_feed_ends(self, any_url: str) -> None:
        """A feed may never end; `flush` says when trainers can have what was written."""
        with writer_of(any_url, spec=SPEC) as writer:
            writer.write(sample(5))
            writer.flush()
            with Loader("t", group="g", batch_size=1, url=any_url, timeout_s=5, notify=lambda _: None) as loader:
                assert numbers([next(iter(loader))]) == [5]

    def test_an_error_beside_a_feed_loses_nothing_of_it(self, any_url: str, any_client: Client) -> None:
        """What was written was accepted; and an epoch nobody ends would keep every trainer waiting."""
        with pytest.raises(ZeroDivisionError), writer_of(any_url, spec=SPEC) as writer:
            for number in range(5):
                writer.write(sample(number))
            raise ZeroDivisionError
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "produced"
        assert replayed(any_url) == list(range(5))
