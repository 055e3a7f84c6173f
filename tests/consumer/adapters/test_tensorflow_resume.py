"""Resuming with TensorFlow's own means: ``tf.train.Checkpoint``, loops inside a ``tf.function``, static shapes."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import StateMismatch
from penstock_common.tuning import Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_producer.write.writer import Writer
from tests.contracts.adapter import BATCH, SAMPLES, STREAM, delivered, loader_of, ordered
from tests.contracts.feed import SAMPLE_BYTES, produce
from tests.contracts.processes import child

tf = pytest.importorskip("tensorflow")

from penstock.tensorflow import dataset  # noqa: E402 - only where TensorFlow is

STEPS = -(-SAMPLES // BATCH)


def train_with_checkpoints(url: str, folder: str) -> None:
    """Save weight and position every fourth step. It pauses in step STEPS + 7, so that it can be killed."""
    weight = tf.Variable(0, dtype=tf.int64)
    with ordered(url, acknowledge="on_checkpoint") as loader:
        batches = dataset(loader, select="y").prefetch(6)
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=weight, data=batches), folder, max_to_keep=2)
        step = 0
        for _ in range(2):
            for y in batches:
                step += 1
                weight.assign_add(tf.reduce_sum(y))
                if step % 4 == 0:
                    manager.save()
                    loader.checkpointed()
                if step == STEPS + 7:
                    sys.stdout.write("here\n")
                    sys.stdout.flush()
                    signal.pause()


def test_a_killed_training_goes_on_at_its_checkpoint_with_weight_and_data_alike(any_url: str, tmp_path: Path) -> None:
    """SIGKILL in the second epoch: every sample went into the restored weight once, and none is left out."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    with child(train_with_checkpoints, any_url, tmp_path) as trainer:
        assert trainer.line() == "here", trainer.errors()
        trainer.kill()
    saved = (STEPS + 7) // 4 * 4 - STEPS
    weight = tf.Variable(0, dtype=tf.int64)
    with ordered(any_url, acknowledge="on_checkpoint") as loader:
        batches = dataset(loader, select="y").prefetch(6)
        saving = tf.train.Checkpoint(weight=weight, data=batches)
        saving.restore(tf.train.latest_checkpoint(tmp_path)).assert_consumed()
        assert int(weight) == sum(range(SAMPLES)) + sum(range(saved * BATCH))
        rest = [number for y in batches for number in y.numpy().tolist()]
        loader.checkpointed()
    assert rest == list(range(saved * BATCH, SAMPLES))
    assert delivered(any_url) == [SAMPLES] * 2


def test_a_checkpoint_of_another_stream_is_refused_by_restore(any_url: str, tmp_path: Path) -> None:
    """Otherwise it would silently train on other data."""
    produce(any_url, STREAM, SAMPLES)
    with ordered(any_url) as loader:
        path = tf.train.Checkpoint(data=dataset(loader)).save(str(tmp_path / "c"))
    with ordered(any_url, group="other") as loader, pytest.raises(StateMismatch, match="group"):
        tf.train.Checkpoint(data=dataset(loader)).restore(path)


def test_a_loop_inside_a_tf_function_is_given_an_iterator(any_url: str) -> None:
    """The step is visible through `iter(ds)`. A loop over the dataset itself, where it is not, raises an error."""
    produce(any_url, STREAM, SAMPLES)

    @tf.function
    def train(batches: Any, steps: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for _ in tf.range(steps):
            total += tf.reduce_sum(next(batches)["y"])
        return total

    @tf.function
    def train_to_the_end(batches: Any) -> Any:
        total = tf.constant(0, tf.int64)
        for batch in batches:
            total += tf.reduce_sum(batch["y"])
        return total

    with ordered(any_url) as loader:
        source = dataset(loader).prefetch(5)
        with pytest.raises(tf.errors.OpError, match=r"give the tf\.function iter\(ds\)"):
            train_to_the_end(source)
        batches = iter(source)
        assert int(train(batches, 3)) == sum(range(3 * BATCH))
        assert loader.state_dict()["position"] == 3 * BATCH
        hooks_of(loader).acknowledger.flush()
        assert delivered(any_url) == [2 * BATCH]  # the third is in the step
        assert int(train_to_the_end(batches)) == sum(range(3 * BATCH, SAMPLES))
    assert delivered(any_url) == [SAMPLES]


def test_shapes_are_static_where_all_batches_are_alike_and_ragged_tensors_may_be_padded(any_url: str) -> None:
    """A compiled step needs its shapes before the first batch."""
    spec: Any = {"t": ("int32", (None,)), "y": ("int64", ())}
    with Writer(STREAM, url=any_url, spec=spec, tuning=Tuning(notify=lambda _: None)) as writer:
        for _ in range(2):
            with writer.epoch() as epoch:
                for number in range(SAMPLES):
                    epoch.write({"t": np.arange(number % 5, dtype=np.int32), "y": number})
    with loader_of(any_url, remainder="pad") as loader:
        ragged = dataset(loader)
        assert ragged.element_spec["y"] == tf.TensorSpec((BATCH,), tf.int64)
        assert ragged.element_spec["t"] == tf.RaggedTensorSpec((BATCH, None), tf.int32)
        for batch in ragged:
            assert batch["t"].row_lengths().numpy().tolist() == [number % 5 for number in batch["y"].numpy()]
        with pytest.raises(ValueError, match="'padded'"):
            dataset(loader, ragged="list")  # type: ignore[call-overload]
        padded = dataset(loader, select=("t", "y"), ragged="padded")
        assert padded.element_spec[0] == tf.TensorSpec((BATCH, None), tf.int32)
        for rows, y in padded:
            expected = [[n if n < number % 5 else 0 for n in range(rows.shape[1])] for number in y.numpy()]
            assert rows.numpy().tolist() == expected
    with loader_of(any_url, group="kept") as loader:
        assert dataset(loader).element_spec["y"] == tf.TensorSpec((None,), tf.int64)


def test_a_state_is_of_the_steps_own_epoch_though_the_next_one_is_pulled_already(any_url: str) -> None:
    """With `repeat` and a large buffer, two epochs are in memory, and the state skips nothing."""
    produce(any_url, STREAM, SAMPLES, epochs=3)
    states, pulled = [], []

    def watched(y: Any) -> Any:
        pulled.append(0)
        return y

    with ordered(any_url, acknowledge="on_checkpoint") as loader:
        source = dataset(loader, select="y").map(lambda y: tf.numpy_function(watched, [y], tf.int64))
        batches = source.repeat(2).prefetch(3 * STEPS)
        running = iter(batches)
        whole = [next(running).numpy().tolist()]
        until = time.monotonic() + 30
        while len(pulled) < 2 * STEPS and time.monotonic() < until:
            time.sleep(0.01)
        assert len(pulled) == 2 * STEPS
        states.append(batches.state_dict())
        for y in running:
            whole.append(y.numpy().tolist())
            states.append(batches.state_dict())
    ends = [(step // STEPS, BATCH * (step % STEPS)) for step in range(1, 2 * STEPS + 1)]
    assert [(state["epoch"], state["position"]) for state in states] == ends
    with ordered(any_url, acknowledge="on_checkpoint") as loader:
        batches = dataset(loader, select="y")
        batches.load_state_dict(states[4])
        assert [y.numpy().tolist() for y in batches] == whole[5:STEPS]


@pytest.mark.parametrize("order", [None, "canonical"])
def test_what_came_back_from_a_buffer_is_counted_once(any_url: str, order: str | None) -> None:
    """An epoch's lines sum up to its samples, whatever a pass that was left early had read ahead."""
    produce(any_url, STREAM, SAMPLES)
    lines: list[str] = []
    with loader_of(any_url, order=order, notify=lines.append) as loader:
        batches = dataset(loader, select="y").prefetch(4)
        running = iter(batches)
        seen = [number for _ in range(3) for number in next(running).numpy().tolist()]
        del running
        seen += [number for y in batches for number in y.numpy().tolist()]
        assert sorted(seen) == list(range(SAMPLES))
        total = loader.stats(total=True)
        assert (total.samples, total.bytes) == (SAMPLES, SAMPLES * SAMPLE_BYTES)
    counted = [int(found[1]) for line in lines if (found := re.search(r"epoch 0: (\d+) samples", line))]
    assert sum(counted) == SAMPLES, lines
