"""Ctrl-C at any moment of a write, as in a notebook: the samples before and after it are whole, or an error says so."""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import PenstockError
from penstock_common.wire.block import BlockBuilder
from penstock_producer.write.cleaner import CleanupTimer
from tests.clusters import until
from tests.contracts.feed import SPEC, replayed, sample, writer_of
from tests.interruption import Interruption

COUNT, BLOCK_BYTES = 20, 4 * 24
TRIED = 40
"""The moments that are tried, of the some hundreds that a write with a full block has."""
RAGGED = {"words": ("int64", (None,)), "tags": ("bytes", ()), "y": ("int64", ())}


def ragged_sample(number: int) -> dict[str, Any]:
    """Return the sample ``number``, whose tensors have other sizes each time."""
    return {"words": np.arange(number % 5), "tags": b"a" * (number % 3), "y": number}


def rows(number: int) -> dict[str, Any]:
    """Return the samples ``number`` and ``number + 1``."""
    both = [sample(number), sample(number + 1)]
    return {name: np.stack([np.asarray(one[name]) for one in both]) for name in SPEC}


@pytest.mark.parametrize("kind", ["write", "write_batch", "ragged"])
def test_an_interrupted_write_leaves_the_others_whole(any_url: str, any_client: Any, kind: str) -> None:
    """It may come when a block is full, or planned, or completed."""
    spec, make, step = (RAGGED, ragged_sample, 1) if kind == "ragged" else (SPEC, sample, 1)
    if kind == "write_batch":
        make, step = rows, 2

    def tried(interruption: Interruption) -> list[int]:
        any_client.flushall()
        with writer_of(any_url, spec=spec, block_bytes=BLOCK_BYTES) as writer, writer.epoch() as epoch:
            write = epoch.write_batch if kind == "write_batch" else epoch.write
            for number in range(0, COUNT, step):
                with suppress(KeyboardInterrupt):
                    (interruption.of if number == 12 - step else lambda call, value: call(value))(write, make(number))
        return replayed(any_url) if kind != "ragged" else numbers_of(any_url)

    whole = Interruption()
    assert tried(whole) == list(range(COUNT))
    assert whole.calls > TRIED
    for number in range(TRIED):
        after = 1 + number * whole.calls // TRIED
        try:
            found = tried(Interruption(after))
        except PenstockError as error:
            assert "was interrupted, as by Ctrl-C, while it completed a block" in str(error), after  # noqa: PT017
        else:
            assert {*range(COUNT)} - {*found} <= {10, 11}, after
            assert found == sorted({*found}), after


def numbers_of(url: str) -> list[int]:
    """Return the numbers of the ragged samples, after checking that the tensors of each agree."""
    import penstock

    found = []
    with penstock.Replay("t", url=url, epoch=0, batch_size=64) as replay:
        for batch in replay:
            for words, tags, number in zip(batch["words"], batch["tags"], batch["y"].tolist(), strict=True):
                assert (len(words), len(tags)) == (number % 5, number % 3)
                found.append(number)
    return found


def test_a_block_that_was_interrupted_is_never_left_out_silently(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples were accepted, and the epoch would have been declared complete without them."""
    finish = BlockBuilder.finish

    def interrupted(builder: BlockBuilder, *arguments: Any) -> None:
        finish(builder, *arguments)
        raise KeyboardInterrupt

    with writer_of(any_url, spec=SPEC) as writer:
        epoch = writer.epoch()
        epoch.write(sample(0))
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(BlockBuilder, "finish", interrupted)
            epoch.flush()
        for end in (epoch.flush, epoch.close):
            with pytest.raises(PenstockError, match="offsets below 0 are committed; end this writer"):
                end()


def test_an_interrupted_flush_leaves_no_answer_for_the_next_request(any_url: str, any_client: Any) -> None:
    """The next script read the answer to the commit, and the writer ended with an error of Python's json."""

    def tried(interruption: Interruption) -> list[int]:
        any_client.flushall()
        with writer_of(any_url, spec=SPEC) as writer:
            writer.write(sample(0))
            with suppress(KeyboardInterrupt):
                interruption.of(writer.flush)
            writer.write(sample(1))
        return replayed(any_url)

    whole = Interruption()
    expected = tried(whole)
    for after in range(1, whole.calls, 3):
        try:
            assert tried(Interruption(after)) == expected, after
        except PenstockError as error:
            assert "was interrupted, as by Ctrl-C, while it completed a block" in str(error), after  # noqa: PT017


def test_ctrl_c_as_a_writer_begins_leaves_no_thread(any_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook kept one for each, with its connection."""
    start = CleanupTimer.start

    def interrupted(timer: CleanupTimer) -> None:
        start(timer)
        raise KeyboardInterrupt

    monkeypatch.setattr(CleanupTimer, "start", interrupted)
    with suppress(KeyboardInterrupt):
        writer_of(any_url, spec=SPEC)
    gc.collect()
    until(lambda: not [one for one in threading.enumerate() if one.name == "penstock-cleaner-t"])
