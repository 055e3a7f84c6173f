"""`penstock.tensorflow`: the adapters' promises, and what each transformation of tf.data does to acknowledging."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import PenstockError
from penstock_common.tuning import Tuning
from penstock_common.wire.spec import SpecLike
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_producer.write.writer import Writer
from tests.contracts.adapter import (
    BATCH,
    GROUP,
    MEMBER,
    SAMPLES,
    STREAM,
    AdapterContract,
    acknowledged,
    delivered,
    loader_of,
    report_until_killed,
)
from tests.contracts.feed import produce

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from penstock.keras import Acknowledge  # noqa: E402 - only where TensorFlow is
from penstock.tensorflow import acknowledging, dataset  # noqa: E402 - only where TensorFlow is

BATCHES = -(-SAMPLES // BATCH)


def train_until_killed(url: str) -> None:
    """Train, with batches read ahead."""
    loader = Loader(STREAM, group=GROUP, batch_size=BATCH, url=url, tuning=Tuning(member=MEMBER))
    report_until_killed(batch["y"].numpy().tolist() for batch in dataset(loader).prefetch(6))


class TestTensorFlow(AdapterContract):
    """The contract with tf.data.Dataset."""

    def dataset(self, loader: Loader | Mixture, **settings: Any) -> Any:
        """Return a dataset with dicts as elements."""
        return dataset(loader, **settings)

    def read_ahead(self, batches: Any, count: int) -> Any:
        """Read ahead as tf.data does."""
        return batches.prefetch(count)

    def as_numpy(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return an array without a copy."""
        values: np.ndarray[Any, Any] = tensor.numpy()
        return values

    train_until_killed = staticmethod(train_until_killed)


@pytest.fixture
def model() -> Any:
    """Return a model that learns nothing and takes no time."""
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    return made


def halved(x: Any, y: Any) -> Any:
    """Halve, as a function for map."""
    return x / 2, y


def is_even_batch(x: Any, y: Any) -> Any:
    """Drop some batches."""
    return tf.reduce_sum(y) % 2 == 0


def is_of_the_second_epoch(y: Any) -> Any:
    """Drop a whole epoch."""
    return tf.reduce_min(y) >= SAMPLES


THROUGH: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda ds: ds,
    "map": lambda ds: ds.map(halved, num_parallel_calls=2),
    "unordered map": lambda ds: ds.map(halved, num_parallel_calls=2, deterministic=False),
    "filter": lambda ds: ds.filter(is_even_batch),
    "skip": lambda ds: ds.skip(3),
    "shuffle": lambda ds: ds.shuffle(5),
    "prefetch": lambda ds: ds.prefetch(4),
    "unbatch and batch": lambda ds: ds.unbatch().batch(10),
    "all of them": lambda ds: ds.skip(1).map(halved).shuffle(4).filter(is_even_batch).prefetch(2),
}


@pytest.mark.parametrize("name", THROUGH)
def test_fit_over_three_epochs_acknowledges_everything_behind(name: str, any_url: str, model: Any) -> None:
    """A filtered sample counts as read, and a buffered one does not.

    At the end all is acknowledged, without a warning.
    """
    produce(any_url, STREAM, SAMPLES, epochs=3)
    with loader_of(any_url) as loader:
        batches = THROUGH[name](dataset(loader, select=("x", "y")))
        model.fit(batches, epochs=3, verbose=0)
    assert delivered(any_url) == [SAMPLES] * 3
    assert acknowledged(any_url)


CUT: dict[str, Callable[[Any], Any]] = {
    "take": lambda ds: ds.take(5),
    "take behind a buffer": lambda ds: ds.prefetch(BATCHES + 1).take(5),
    "take while": lambda ds: ds.take_while(lambda batch: tf.constant(True)).take(5),
    "skip and take": lambda ds: ds.skip(1).take(5),
}


@pytest.mark.parametrize("name", CUT)
def test_what_take_leaves_comes_in_the_next_pass(name: str, any_url: str) -> None:
    """An epoch in pieces is still the whole epoch, even if a buffer had pulled all of it."""
    produce(any_url, STREAM, SAMPLES)
    seen: list[int] = []
    with loader_of(any_url) as loader:
        source = dataset(loader)
        for _ in range(2):
            seen += [number for batch in CUT[name](source) for number in batch["y"].numpy().tolist()]
            assert delivered(any_url)[0] < SAMPLES
        seen += [number for batch in source for number in batch["y"].numpy().tolist()]
    dropped = 2 * BATCH if "skip" in name else 0
    assert len(set(seen)) >= SAMPLES - dropped
    assert acknowledged(any_url)


def test_what_was_in_a_shuffle_buffer_comes_again(any_url: str) -> None:
    """The buffer had pulled the whole epoch, but only samples that left it may be acknowledged."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        source = dataset(loader)
        first = [number for batch in source.shuffle(50).take(4) for number in batch["y"].numpy().tolist()]
        rest = [number for batch in source for number in batch["y"].numpy().tolist()]
    assert sorted(first + rest) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_a_filter_that_drops_an_epoch_goes_on_to_the_next(any_url: str) -> None:
    """Keras takes an empty pass for an error, and iterating the loader continues, too."""
    with Writer(STREAM, url=any_url, tuning=Tuning(notify=lambda _: None)) as writer:
        for numbers in (range(SAMPLES), range(SAMPLES, 2 * SAMPLES)):
            with writer.epoch() as epoch:
                for number in numbers:
                    epoch.write({"y": number})
    with loader_of(any_url) as loader:
        kept = dataset(loader, select="y").filter(is_of_the_second_epoch)
        assert sorted(number for y in kept for number in y.numpy().tolist()) == list(range(SAMPLES, 2 * SAMPLES))
    assert delivered(any_url) == [SAMPLES] * 2


def test_a_repeated_dataset_reads_the_epochs_one_after_the_other(any_url: str, model: Any) -> None:
    """Endless feeds are trained on with `steps_per_epoch` and `repeat`."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    with loader_of(any_url) as loader:
        model.fit(dataset(loader, select=("x", "y")).repeat(2), steps_per_epoch=BATCHES, epochs=2, verbose=0)
    assert delivered(any_url) == [SAMPLES] * 2


def test_a_zip_is_told_where_it_can_be_acknowledged(any_url: str) -> None:
    """The step is not visible there, so it is refused instead of losing samples. The remedy in the error works."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        source = dataset(loader, select="y")
        zipped = tf.data.Dataset.zip((source, tf.data.Dataset.range(1000)))
        with pytest.raises(tf.errors.OpError, match="acknowledging"):
            next(iter(zipped))
        seen = [number for y, _ in acknowledging(zipped, source) for number in y.numpy().tolist()]
    assert sorted(seen) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_what_is_concatenated_is_acknowledged_at_the_end_of_the_pass(any_url: str) -> None:
    """Adding own data after an epoch is a common way to make a validation set."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        source = dataset(loader, select="y")
        more = tf.data.Dataset.from_tensors(np.full(3, -1, np.int64))
        batches = [y.numpy().tolist() for y in source.concatenate(more)]
        assert acknowledged(any_url)
    assert sorted(number for batch in batches for number in batch) == [-1] * 3 + list(range(SAMPLES))
    assert batches[-1] == [-1] * 3


HIDING: dict[str, Callable[[Any, Any], Any]] = {
    "sample_from_datasets": lambda ds, more: tf.data.Dataset.sample_from_datasets([ds, more], [0.5, 0.5], seed=1),
    "assert_cardinality": lambda ds, _: ds.apply(tf.data.experimental.assert_cardinality(BATCHES)),
    "concatenate behind another": lambda ds, more: more.concatenate(ds),
}


@pytest.mark.parametrize("name", HIDING)
def test_what_hides_the_step_is_refused_and_works_behind_acknowledging(name: str, any_url: str) -> None:
    """Without a visible step nothing may be acknowledged by chance, and the error has the remedy."""
    produce(any_url, STREAM, SAMPLES)
    more = tf.data.Dataset.from_tensors(np.full(3, -1, np.int64))
    with loader_of(any_url) as loader:
        source = dataset(loader, select="y")
        with pytest.raises(tf.errors.OpError, match=r"nobody sees .*acknowledging\(made, ds\)"):
            list(HIDING[name](source, more))
        assert delivered(any_url) == [0]
        seen = [number for y in acknowledging(HIDING[name](source, more), source) for number in y.numpy().tolist()]
    assert sorted(number for number in seen if number >= 0) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_a_dataset_is_not_saved_and_the_error_names_the_export(any_url: str, tmp_path: Path) -> None:
    """A crash would leave acknowledged samples in an incomplete file."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader, pytest.raises(PenstockError, match="penstock export"):
        dataset(loader, select="y").map(lambda y: y + 1).save(str(tmp_path / "saved"))
    assert delivered(any_url) == [0]


def test_a_map_may_return_a_list_as_in_tf_data(any_url: str) -> None:
    """`tf.numpy_function` returns one, and tf.data takes it for a tuple."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        mapped = dataset(loader, select=("x", "y")).map(
            lambda x, y: tf.numpy_function(lambda x, y: (x, y), (x, y), (tf.float32, tf.int64))
        )
        assert sorted(number for _, y in mapped for number in y.numpy().tolist()) == list(range(SAMPLES))
    assert acknowledged(any_url)


def test_several_devices_are_fed_by_the_loop_of_the_page_and_refused_elsewhere(any_url: str) -> None:
    """A strategy reads ahead for each device, so `fit` under one would get batches whose arrival is not visible."""
    produce(any_url, STREAM, SAMPLES, epochs=2)
    here = Path(__file__)
    command = [sys.executable, str(here.with_name("two_devices.py")), any_url]
    paths = os.pathsep.join(map(str, [here.parents[3], *sys.path]))
    environment = {**os.environ, "PYTHONPATH": paths, "PENSTOCK_URL": any_url}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    for way in ("fit", "experimental_distribute_dataset", "acknowledging"):
        assert "under a tf.distribute strategy loop in Python and hand each replica its share" in told[way], way
    assert told["delivered before"] == [0, 0]
    labels: list[list[int]] = [[], []]
    for replica, share in re.findall(r"^replica (\d) labels \[([\d ]*)\]$", done.stderr, re.MULTILINE):
        labels[int(replica)] += map(int, share.split())
    assert [len(share) for share in labels] == [SAMPLES] * 2, "half of the page's pass, and half of the test's"
    assert sorted(labels[0] + labels[1]) == sorted([*range(SAMPLES)] * 2)
    assert told["seen"] == sum(range(SAMPLES))
    assert told["delivered in the third step"] == 2 * BATCH
    assert delivered(any_url) == [SAMPLES, 0]


def test_several_steps_in_one_call_are_acknowledged_after_the_call(any_url: str, model: Any) -> None:
    """With steps_per_execution, batches are requested before the first step has ended, so the callback decides."""
    produce(any_url, STREAM, SAMPLES)
    seen: list[int] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[name-defined]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            hooks_of(loader).acknowledger.flush()
            seen.append(delivered(any_url)[0])

    with loader_of(any_url) as loader:
        model.compile("sgd", "mse", steps_per_execution=4)
        callbacks = [Watch(), Acknowledge(loader)]
        model.fit(dataset(loader, select=("x", "y")), verbose=0, callbacks=callbacks)
    assert seen[:3] == [0, 4 * BATCH, 8 * BATCH]
    assert acknowledged(any_url)


RAGGED: SpecLike = {
    "boxes": ("float32", (None, 4)),
    "image": ("uint8", (None, None, 3)),
    "pairs": ("int32", (2, None)),
    "name": ("bytes", ()),
}


def test_ragged_tensors_and_bytes_have_their_tensorflow_types(any_url: str) -> None:
    """Boxes, images of any size and strings go into a model as tf.RaggedTensor and tf.string, with a static spec."""
    samples = [
        {
            "boxes": np.full((i % 3, 4), i, np.float32),
            "image": np.full((i % 4, 2 + i % 2, 3), i, np.uint8),
            "pairs": np.full((2, i % 5), i, np.int32),
            "name": b"sample %d" % i,
        }
        for i in range(20)
    ]
    with (
        Writer(STREAM, url=any_url, spec=RAGGED, tuning=Tuning(notify=lambda _: None)) as writer,
        writer.epoch() as epoch,
    ):
        for sample in samples:
            epoch.write(sample)
    with loader_of(any_url) as loader:
        ds = dataset(loader)
        assert isinstance(ds, tf.data.Dataset)
        assert ds.element_spec["boxes"] == tf.RaggedTensorSpec((None, None, 4), tf.float32, ragged_rank=1)
        assert ds.element_spec["image"] == tf.RaggedTensorSpec((None, None, None, 3), tf.uint8, ragged_rank=2)
        assert ds.element_spec["name"] == tf.TensorSpec((None,), tf.string)
        found = {}
        for batch in ds:
            for row, name in enumerate(batch["name"].numpy()):
                found[name] = {key: batch[key][row] for key in ("boxes", "image", "pairs")}
    for sample in samples:
        for key, value in found[sample["name"]].items():
            expected = np.asarray(sample[key]).tolist()
            got = value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()
            assert got == expected, (key, sample["name"])


def test_select_gives_tuples_or_bare_tensors_and_names_what_there_is(any_url: str) -> None:
    """`fit` takes (x, y), and a mistyped name gets an error with the names."""
    produce(any_url, STREAM, SAMPLES)
    with loader_of(any_url) as loader:
        spec = dataset(loader, select=("x", "y")).element_spec
        assert spec == (tf.TensorSpec((None, 4), tf.float32), tf.TensorSpec((None,), tf.int64))
        assert dataset(loader, select="y").element_spec == tf.TensorSpec((None,), tf.int64)
        with pytest.raises(ValueError, match="x, y"):
            dataset(loader, select=("x", "z"))
