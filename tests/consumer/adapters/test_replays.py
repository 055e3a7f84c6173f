"""A replay with each framework: a validation set, complete in every pass, of a known length, without
acknowledgements.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock_common.stream.audit import audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.commands import Client
from penstock_consumer.replay.export import export_stream
from penstock_consumer.replay.files import Files
from penstock_consumer.replay.passes import Passes
from penstock_consumer.replay.replay import Replay
from penstock_producer.write.writer import Writer
from tests.contracts.feed import produce

SAMPLES, BATCH = 50, 16


@pytest.fixture(params=["stream", "files"])
def replay(any_url: str, any_client: Client, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Passes]:
    """Make an epoch in a stream, and its export."""
    produce(any_url, "val", SAMPLES)
    if request.param == "files":
        with connect(any_url) as client:
            export_stream(client, "val", tmp_path / "out")
        yield Files(tmp_path / "out", batch_size=BATCH)
        return
    with Replay("val", epoch=0, batch_size=BATCH, url=any_url) as found:
        yield found
    assert audit_stream(any_client, "val").delivered == {}


def test_torch_gets_the_whole_epoch_in_every_pass(replay: Passes) -> None:
    """A validation on half of an epoch, or on none from the second time on, gives a wrong number."""
    torch = pytest.importorskip("torch")
    import penstock.torch

    dataset = penstock.torch.dataset(replay, select=("x", "y"))
    batches = torch.utils.data.DataLoader(dataset, batch_size=None)
    assert len(batches) == 4
    for elements in (batches, dataset, penstock.torch.prefetch_to_device(batches, "cpu")):
        for _ in range(2):
            seen = list(elements)
            assert [tuple(x.shape) for x, _ in seen] == [(16, 4)] * 3 + [(2, 4)]
            assert torch.cat([y for _, y in seen]).tolist() == list(range(SAMPLES))
    next(iter(dataset))  # interrupted: the next pass is still complete
    assert sum(len(y) for _, y in dataset) == SAMPLES


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"batch_size": 8}, "batch_size=None"), ({"batch_size": None, "num_workers": 2}, "num_workers=0")],
)
def test_torch_repeats_no_batch_of_a_replay(replay: Passes, settings: dict[str, Any], said: str) -> None:
    """Two workers would give each batch twice, and batches of batches train on unintended shapes."""
    torch = pytest.importorskip("torch")
    import penstock.torch

    dataset = penstock.torch.dataset(replay)
    with pytest.raises(ValueError, match=said):
        next(iter(torch.utils.data.DataLoader(dataset, **settings)))
    with pytest.raises(TypeError, match="are not acknowledged"):
        penstock.torch.acknowledging(dataset)


def test_keras_validates_on_it_after_each_epoch_of_a_training(replay: Passes) -> None:
    """It has a length, including its last batch, and may be zipped, cached and repeated like any dataset."""
    tf, keras = pytest.importorskip("tensorflow"), pytest.importorskip("keras")
    import penstock.tensorflow

    seen: list[int] = []

    def noted(x: Any, y: Any) -> Any:
        seen.extend(y.tolist())
        return x

    val = penstock.tensorflow.dataset(replay, select=("x", "y"))
    assert (len(val), val.element_spec[0].shape.as_list()) == (4, [None, 4])
    watched = val.map(lambda x, y: (tf.ensure_shape(tf.numpy_function(noted, [x, y], tf.float32), (None, 4)), y))
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(np.zeros((8, 4)), np.zeros(8), epochs=3, validation_data=watched, verbose=0).history
    assert seen == [*range(SAMPLES)] * 3
    assert len(history["val_loss"]) == 3
    pairs = tf.data.Dataset.zip(val, val.cache())
    assert sum(len(y) for (_, y), _ in pairs.repeat(2)) == 2 * SAMPLES


def test_jax_gets_the_whole_epoch_in_every_pass(replay: Passes) -> None:
    """The dataset takes the options for left-out and padded samples, as for a loader."""
    jax = pytest.importorskip("jax")
    import penstock.jax

    batches = penstock.jax.dataset(replay, select=("x", "y"))
    assert len(batches) == 4
    for _ in range(2):
        seen = list(batches)
        assert all(isinstance(x, jax.Array) for x, _ in seen)
        assert np.concatenate([y for _, y in seen]).tolist() == list(range(SAMPLES))
    sizes = {
        kind: [len(y) for y in penstock.jax.dataset(replay, select="y", remainder=kind)] for kind in ("pad", "drop")
    }
    assert sizes == {"pad": [16] * 4, "drop": [16] * 3}


def test_ragged_tensors_of_a_replay_have_the_forms_of_a_loader(any_url: str) -> None:
    """Boxes are validated, too."""
    torch, tf = pytest.importorskip("torch"), pytest.importorskip("tensorflow")
    import penstock.tensorflow
    import penstock.torch

    with Writer("ragged", url=any_url, spec={"a/t": ("int32", (None,))}) as writer, writer.epoch() as epoch:
        for length in (1, 3, 2):
            epoch.write({"a/t": np.full(length, length, np.int32)})
    with Replay("ragged", epoch=0, batch_size=3, url=any_url) as replay:
        (lists,) = penstock.torch.dataset(replay, select="a")
        assert [row.tolist() for row in lists["t"]] == [[1], [3, 3, 3], [2, 2]]
        (padded,) = penstock.torch.dataset(replay, select="a/t", ragged="padded")
        assert torch.equal(padded, torch.tensor([[1, 0, 0], [3, 3, 3], [2, 2, 0]], dtype=torch.int32))
        (nested,) = penstock.tensorflow.dataset(replay, nested=True)
        assert isinstance(nested["a"]["t"], tf.RaggedTensor)
        assert nested["a"]["t"].to_list() == [[1], [3, 3, 3], [2, 2]]
