"""State and checkpoints with tf.data: they cover what the step was given, however far is read ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from penstock_common.errors import BudgetFull
from penstock_common.tuning import Tuning
from penstock_producer.write.writer import Writer, WriterHooks
from tests.contracts.adapter import BATCH, SAMPLES, STREAM, acknowledged, delivered, loader_of
from tests.contracts.feed import SAMPLE_BYTES, SPEC, produce, sample
from tests.tuned import tuned

tf = pytest.importorskip("tensorflow")

from penstock.tensorflow import dataset  # noqa: E402 - only where TensorFlow is

AHEAD: dict[str, Callable[[Any], Any]] = {
    "prefetch": lambda ds: ds.prefetch(20),
    "shuffle": lambda ds: ds.shuffle(6).prefetch(3),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_state_counts_what_reached_the_step(name: str, any_url: str) -> None:
    """A state of all pulled samples would skip a full buffer at each resume."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        for count, _ in enumerate(AHEAD[name](dataset(loader)), 1):
            assert loader.state_dict()["batches"] == count


@pytest.mark.parametrize("name", AHEAD)
def test_a_checkpoint_acknowledges_what_reached_the_step_until_its_state_was_taken(name: str, any_url: str) -> None:
    """In a custom loop, the checkpoint is saved in the background, and reported when it is durable."""
    produce(any_url, STREAM, SAMPLES)
    trained: list[list[int]] = []
    with loader_of(any_url, acknowledge="on_checkpoint", member="one") as loader:
        for batch in AHEAD[name](dataset(loader)):
            trained.append(batch["y"].numpy().tolist())
            if len(trained) == 3:
                state = loader.state_dict()
            if len(trained) == 6:
                assert delivered(any_url) == [0]
                loader.checkpointed(state)
                assert delivered(any_url) == [3 * BATCH]
            if len(trained) == 8:
                break
    assert delivered(any_url) == [3 * BATCH]
    with loader_of(any_url, member="two") as loader:
        again = [number for batch in loader for number in batch["y"].tolist()]
    assert sorted(again + [number for step in trained[:3] for number in step]) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_what_waits_for_a_checkpoint_is_not_handed_out_again_by_a_break(any_url: str) -> None:
    """Entries span batches: an interrupted pass leaves a part of an entry whose other part was trained on."""
    produce(any_url, STREAM, SAMPLES, block_samples=50)
    seen: list[int] = []
    with loader_of(any_url, acknowledge="on_checkpoint") as loader:
        source = dataset(loader)
        for _ in range(3):
            seen += [number for batch in source.prefetch(4).take(2) for number in batch["y"].numpy().tolist()]
        seen += [number for batch in source for number in batch["y"].numpy().tolist()]
        assert sorted(seen) == list(range(SAMPLES))
        assert delivered(any_url) == [0]
        loader.checkpointed()
        assert delivered(any_url) == [SAMPLES]
        assert acknowledged(any_url)


@pytest.mark.parametrize("policy", ["on_next", "on_checkpoint"])
def test_what_a_buffer_holds_is_not_acknowledged_by_what_overtook_it_in_order(policy: Any, any_url: str) -> None:
    """Ordered groups acknowledge by position, and a shuffle buffer trains on later positions first."""
    produce(any_url, STREAM, SAMPLES)
    seen: list[int] = []
    with loader_of(any_url, acknowledge=policy, order="canonical") as loader:
        tf.random.set_seed(3)
        for batch in dataset(loader).shuffle(6, seed=7):
            seen += batch["y"].numpy().tolist()
            if len(seen) == 5 * BATCH:
                state = loader.state_dict()
                if policy == "on_checkpoint":
                    loader.checkpointed()
                break
    ordered = [number for number in range(SAMPLES) if number not in seen]
    assert state["position"] <= ordered[0]
    assert max(seen) > ordered[0]  # something was indeed overtaken
    with loader_of(any_url, order="canonical") as loader:
        again = [number for batch in loader for number in batch["y"].tolist()]
    assert set(seen) | set(again) == set(range(SAMPLES))


def test_a_fit_that_can_never_reach_its_checkpoint_ends_with_the_reason(
    any_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tf.data pulls in another thread, and its error must reach the waiting loop."""
    monkeypatch.setattr("penstock_consumer.read.ack.OTHER_THREAD_S", 4.0)
    is_over = threading.Event()

    def write() -> None:
        settings: dict[str, Any] = {"spec": SPEC, "block_bytes": 10 * SAMPLE_BYTES, "budget_bytes": 400 * SAMPLE_BYTES}
        with (
            Writer(STREAM, url=any_url, **tuned("Writer", settings, Tuning(notify=lambda _: None))) as writer,
            suppress(BudgetFull),
        ):
            WriterHooks(writer).stop_when(is_over.is_set)
            epoch = writer.epoch()
            for number in range(1000):
                epoch.write(sample(number))

    writing = threading.Thread(target=write)
    writing.start()
    try:
        with (
            loader_of(any_url, acknowledge="on_checkpoint") as loader,
            pytest.raises(tf.errors.OpError, match=r"CheckpointOverdue.*loader\.checkpointed\(\) at least every 200"),
        ):
            for _ in dataset(loader).prefetch(4):
                pass
    finally:
        is_over.set()
        writing.join(20)
