"""The endless feed ends its own epochs, with any number of writers, and loses nothing."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import count
from time import sleep
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import BudgetFull, ShardMismatch, TooLarge
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from penstock_common.stream.feeds import close_epoch
from penstock_common.stream.manifest import load_manifest, retained_epochs
from penstock_common.tuning import Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_producer.write import writer as feeding
from penstock_producer.write.writer import SEAL_CHECK, Writer
from tests.contracts.feed import (
    SAMPLE_BYTES,
    SPEC,
    loader_of,
    numbers,
    open_stream,
    replayed,
    sample,
    stored,
    writer_of,
)
from tests.producer.reading import read_epoch


class TestFeed:
    """The endless feed."""

    def test_a_feed_rotates_its_epochs_and_loses_nothing(self, any_url: str) -> None:
        """Old data is released in whole epochs, so a feed must end its epochs."""
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 1000, "budget_bytes": 80_000}
        with writer_of(any_url, **settings) as writer:
            for number in range(2000):
                writer.write(sample(number))
        with Loader(
            "t", group="g", batch_size=50, url=any_url, tuning=Tuning(timeout_s=0.3, notify=lambda _: None)
        ) as loader:
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
        """An epoch is produced when its last writer has left it, so every writer must leave."""
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

    def test_writers_that_start_together_share_an_epoch(self, any_url: str, any_client: Client) -> None:
        """Groups read epochs one after the other: a writer alone in the second one fed nobody until the first ended."""
        for name in ("a", "b", "c", "d", "e"):
            with ExitStack() as ending:
                quiet = Tuning(notify=lambda _: None)
                writers = [ending.enter_context(Writer(name, spec=SPEC, url=any_url, tuning=quiet)) for _ in range(6)]
                together = threading.Barrier(len(writers))

                def write(writer: Writer, number: int, together: threading.Barrier = together) -> None:
                    together.wait()
                    writer.write(sample(number))

                threads = [threading.Thread(target=write, args=(one, number)) for number, one in enumerate(writers)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert list(retained_epochs(any_client, writers[0].stream)) == [0]

    def test_the_server_is_asked_for_a_seal_once_a_block_at_most(
        self, any_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small rows are written faster than a server answers: asked for every 64 of them, it took most of the time."""
        asked: list[int] = []

        def is_sealed(*_: object) -> bool:
            asked.append(1)
            return False

        monkeypatch.setattr(feeding, "is_sealed", is_sealed)
        with writer_of(any_url, spec=SPEC, block_bytes=1000 * SAMPLE_BYTES, budget_bytes=10 << 20) as writer:
            for number in range(10_500):
                writer.write(sample(number))
        assert 5 <= len(asked) <= 10

    def test_a_seal_is_seen_within_64_samples_of_large_blocks_too(self, any_url: str, any_client: Client) -> None:
        """Else an epoch stays open, and trainers wait in it, for as long as one of its writers goes on."""
        with writer_of(any_url, spec=SPEC) as writer:
            for number in range(SEAL_CHECK):
                writer.write(sample(number))
            writer.flush()
            any_client.hset(writer.stream.keys.manifest(0), "sealed", "1")
            for number in range(SEAL_CHECK, 2 * SEAL_CHECK + 1):
                writer.write(sample(number))
            assert writer._feed_epoch == 1
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "produced"

    def test_a_slow_writer_sees_a_seal_after_a_moment(
        self, any_url: str, any_client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An actor that writes twice a second held its learners up in one epoch for 64 of its samples."""
        monkeypatch.setattr(feeding, "SEAL_CHECK_S", 0.05)
        with writer_of(any_url, spec=SPEC) as writer:
            writer.write(sample(0))
            writer.flush()
            any_client.hset(writer.stream.keys.manifest(0), "sealed", "1")
            sleep(0.1)
            writer.write(sample(1))
            assert writer._feed_epoch == 1
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "produced"

    def test_what_is_written_can_be_read_before_the_feed_ends(self, any_url: str) -> None:
        """A feed may never end; `flush` says when trainers can have what was written."""
        with writer_of(any_url, spec=SPEC) as writer:
            writer.write(sample(5))
            writer.flush()
            with Loader(
                "t", group="g", batch_size=1, url=any_url, tuning=Tuning(timeout_s=5, notify=lambda _: None)
            ) as loader:
                assert numbers([next(iter(loader))]) == [5]

    @pytest.mark.parametrize("is_feed", [True, False])
    def test_a_writer_whose_epoch_an_operator_closes_says_what_is_not_part_of_it(
        self, any_url: str, any_client: Client, is_feed: bool
    ) -> None:
        """Readers take later samples for damage, and the writer ended without a word."""
        said = r"shard 0 ended with 2 samples of epoch 0 of 't', because .*`penstock epochs close` closed it.*next one"
        with pytest.raises(ShardMismatch, match=said), writer_of(any_url, spec=SPEC, block_bytes=1) as writer:
            target = writer if is_feed else writer.epoch()
            for number in range(2):
                target.write(sample(number))
            assert close_epoch(any_client, writer.stream, 0) == 2
            target.write(sample(2))
            target.close()

    def test_an_error_beside_a_feed_loses_nothing_of_it(self, any_url: str, any_client: Client) -> None:
        """Written samples were accepted, and an epoch that never ends would keep every trainer waiting."""
        with pytest.raises(ZeroDivisionError), writer_of(any_url, spec=SPEC) as writer:
            for number in range(5):
                writer.write(sample(number))
            raise ZeroDivisionError
        assert load_manifest(any_client, open_stream(any_client, "t"), 0).state == "produced"
        assert replayed(any_url) == list(range(5))


@pytest.mark.parametrize("batched", [False, True])
def test_only_the_sample_that_is_too_large_is_refused(any_url: str, any_client: Client, batched: bool) -> None:
    """The samples before it in its block were lost with it, and all that came after were refused."""
    spec = {"x": ("uint8", (None,)), "y": ("int64", ())}
    sizes = {5: 8000, 7: 4900}  # a block may have 5000 bytes; number 7 fits alone, and not with number 6
    refused = []
    settings: dict[str, Any] = {"spec": spec, "budget_bytes": 20_000, "block_bytes": 4000, "partitions": 1}
    with writer_of(any_url, **settings) as writer, writer.epoch() as epoch:
        for number in range(12):
            x = np.full(sizes.get(number, 100), number, np.uint8)
            try:
                if batched:
                    epoch.write_batch({"x": [x], "y": np.array([number])})
                else:
                    epoch.write({"x": x, "y": number})
            except TooLarge:
                refused.append(number)
    assert refused == [5]
    assert [item["y"].item() for item in read_epoch(any_url, "t").values()] == [*range(5), *range(6, 12)]
    assert audit_stream(any_client, "t").is_clean


class TestRefusedBlocks:
    """A feed keeps the samples that it wrote while the budget was full."""

    SETTINGS: dict[str, Any] = {"spec": SPEC, "block_bytes": 100, "budget_bytes": 2000, "room_wait_s": 0.05}  # noqa: RUF012

    def fill(self, writer: Writer) -> int:
        """Writes until there is no space; how many samples were given to it, the one that was refused included."""
        with pytest.raises(BudgetFull):
            for given in count(1):
                writer.write(sample(given - 1))
        return given

    def test_a_block_that_found_no_room_is_committed_by_the_next_write(self, any_url: str) -> None:
        """It was lost, and the samples behind it were refused as if the server had lost data."""
        with writer_of(any_url, **self.SETTINGS) as writer, loader_of(any_url, batch_size=1) as loader:
            batches = iter(loader)
            given = self.fill(writer)
            found = [int(next(batches)["y"][0]) for _ in range(40)]
            hooks_of(loader).acknowledger.flush()
            for number in range(given, given + 10):
                writer.write(sample(number))
            writer.close()
            found += [int(next(batches)["y"][0]) for _ in range(given - 30)]
        assert sorted(found) == list(range(given + 10))

    def test_a_writer_that_ends_by_a_full_budget_ends_its_epoch_as_committed(
        self, any_url: str, any_client: Client
    ) -> None:
        """Its epoch claimed samples that were never committed, so every group met a gap that could not be filled."""
        with pytest.raises(BudgetFull), writer_of(any_url, **self.SETTINGS) as writer:
            for number in count():
                writer.write(sample(number))
        stream = open_stream(any_client, "t")
        epochs = retained_epochs(any_client, stream)
        committed = sum(stored(any_client, "t", epoch).total() for epoch in epochs)
        assert sum(load_manifest(any_client, stream, epoch).samples or 0 for epoch in epochs) == committed > 0
        found = 0
        with loader_of(any_url, timeout_s=0.5) as loader, pytest.raises(TimeoutError):
            for batch in loader:
                found += batch.size
        assert found == committed
