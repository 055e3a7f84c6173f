"""Replay during production and training gives the same bytes every time, or ReplayTruncated, in separate processes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import numpy as np
import pytest

from penstock_common.errors import EpochNotFound, ReplayTruncated
from penstock_common.stream.commands import Client
from penstock_common.stream.manifest import retained_epochs
from penstock_common.stream.streams import load_stream
from penstock_common.tuning import Tuning
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.cleaner import clean_up
from tests.contracts.feed import loader_of, writer_of
from tests.contracts.processes import child

SPEC = {"x": ("float32", (50,)), "y": ("int64", ())}
SAMPLES = 100
EPOCH_BYTES = SAMPLES * 208


def row(epoch: int, number: int) -> np.ndarray:
    """Return sample ``number`` of an epoch, bit for bit."""
    return np.random.default_rng([epoch, number]).integers(0, 1 << 32, 50, dtype=np.uint32).view(np.float32)


def produce_for_ever(url: str) -> None:
    """Epochs of two shards in a budget of five of them."""
    with writer_of(url, spec=SPEC, block_bytes=2000, budget_bytes=5 * EPOCH_BYTES) as writer:
        while True:
            epoch = writer.epoch(sizes=[SAMPLES // 2] * 2)
            for shard in (1, 0):
                with epoch.shard(shard) as part:
                    for offset in range(SAMPLES // 2):
                        number = shard * SAMPLES // 2 + offset
                        part.write({"x": row(epoch.number, number), "y": number})


def train_for_ever(url: str) -> None:
    """Reads each epoch, and says which is through."""
    with loader_of(url) as loader:
        while True:
            epochs = {batch.epoch for batch in loader}
            print(max(epochs), flush=True)


def replay_with_pauses(url: str, epoch: int, lease_s: str) -> None:
    """Prints each number it is given, and how it ended."""
    try:
        with Replay(
            "t", url=url, epoch=int(epoch), batch_size=1, tuning=Tuning(prefetch_bytes=1000, lease_s=float(lease_s))
        ) as replay:
            for batch in replay:
                print(int(batch["y"][0]), flush=True)
                time.sleep(0.01)  # as a step would take
        print("whole")
    except ReplayTruncated as error:
        print("ReplayTruncated", error)


def test_an_epoch_is_replayed_bit_for_bit_while_others_are_made_read_and_released(
    any_url: str, any_client: Client
) -> None:
    """Debugging last hour's samples must neither stop the training nor be disturbed by it."""
    with child(produce_for_ever, any_url), child(train_for_ever, any_url) as trainer:
        while int(trainer.line()) < 3:
            pass
        stream = load_stream(any_client, "t")
        replay: Replay | None = None
        while replay is None:
            newest = max(epoch for epoch, state in retained_epochs(any_client, stream).items() if state == "produced")
            with suppress(EpochNotFound):  # it was released since
                replay = Replay("t", url=any_url, epoch=newest, batch_size=7)
        with replay:
            for _ in range(4):
                seen = [(int(y), x.tobytes()) for batch in replay for y, x in zip(batch["y"], batch["x"], strict=True)]
                assert seen == [(number, row(newest, number).tobytes()) for number in range(SAMPLES)]
                while int(trainer.line()) % 5:
                    pass
            while int(trainer.line()) < newest + 10:
                pass
            assert newest in retained_epochs(any_client, stream)
            assert newest - 1 not in retained_epochs(any_client, stream)
        while newest in retained_epochs(any_client, stream):
            assert trainer.line()


@pytest.mark.parametrize("lapses", [True, False])
def test_a_replay_that_stood_still_longer_than_its_lease_ends_with_an_error(
    any_url: str, any_client: Client, lapses: bool
) -> None:
    """A laptop that slept must not hold last week's epoch for ever, nor go on with a gap."""
    with writer_of(any_url, spec=SPEC, block_bytes=2000, retention="epochs:0") as writer, loader_of(any_url) as loader:
        with writer.epoch() as epoch:
            for number in range(SAMPLES):
                epoch.write({"x": row(0, number), "y": number})
        for _ in loader:
            pass
        with child(replay_with_pauses, any_url, 0, "0.5" if lapses else "60") as replaying:
            given = [replaying.line()]
            replaying.process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + (20 if lapses else 1.5)
            while 0 in retained_epochs(any_client, writer.stream) and time.monotonic() < deadline:
                clean_up(any_client, writer.stream, lambda _: None)
                time.sleep(0.05)
            assert (0 in retained_epochs(any_client, writer.stream)) != lapses
            os.kill(replaying.process.pid, signal.SIGCONT)
            given += replaying.rest(30)
        *numbers, last = given
        assert [int(number) for number in numbers] == list(range(len(numbers)))
        if lapses:
            assert last.startswith("ReplayTruncated")
            assert len(numbers) < SAMPLES
        else:
            assert last == "whole"
            assert len(numbers) == SAMPLES


def test_a_lapsed_lease_is_an_error_even_if_nothing_was_removed_yet(any_url: str, any_client: Client) -> None:
    """Whether luck had it that all is still there is nothing to build on."""
    with writer_of(any_url, spec=SPEC, block_bytes=2000) as writer, writer.epoch() as epoch:
        for number in range(SAMPLES):
            epoch.write({"x": row(0, number), "y": number})
    roster = load_stream(any_client, "t").partitions[0].roster
    with Replay("t", url=any_url, epoch=0, batch_size=1, tuning=Tuning(prefetch_bytes=1000, lease_s=1.0)) as replay:
        batches = iter(replay)
        next(batches)
        (lease,) = [field for field in any_client.hkeys(roster) if field.startswith(b"r:")]
        any_client.hset(roster, lease, '{"epoch": 0, "till": 5}')
        replay._retained.lease.thread.join(timeout=20)
        with pytest.raises(ReplayTruncated, match=r"lease on epoch 0 of 't' lapsed: it renewed nothing for 1 s"):
            list(batches)
