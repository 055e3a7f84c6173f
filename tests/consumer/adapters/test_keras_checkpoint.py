"""`penstock.keras.ModelCheckpoint`: a saved model and the group's ledger say the same about what was trained on."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock_common.stream.commands import Client
from penstock_common.tuning import Tuning
from penstock_consumer.read.loader import Loader
from tests.contracts.adapter import BATCH, GROUP, MEMBER, SAMPLES, STREAM, acknowledged, delivered, loader_of, ordered
from tests.contracts.feed import open_stream, produce
from tests.contracts.processes import child

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from penstock.keras import Acknowledge, ModelCheckpoint  # noqa: E402 - only where TensorFlow is
from penstock.tensorflow import dataset  # noqa: E402 - only where TensorFlow is

BATCHES = -(-SAMPLES // BATCH)
KILLED_AFTER = BATCHES + 9
"""The steps in the second epoch before the kill."""


def small_model(**settings: Any) -> Any:
    """Return a model that learns nothing and takes no time."""
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    made.compile("sgd", "mse", **settings)
    return made


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, writing HDF5
@pytest.mark.parametrize(
    ("settings", "steps_per_execution"),
    [
        ({}, 1),
        ({"save_freq": 5}, 1),
        ({"save_freq": 5}, 3),
        ({"save_weights_only": True, "filepath": "w{epoch}.weights.h5"}, 1),
    ],
)
def test_fit_with_checkpoints_ends_and_what_they_contain_is_acknowledged(
    settings: dict[str, Any], steps_per_execution: int, any_url: str, tmp_path: Path
) -> None:
    """There are three epochs, and the later ones begin while the earlier ones wait for their checkpoint."""
    produce(any_url, STREAM, SAMPLES, epochs=3)
    path = tmp_path / settings.get("filepath", "m.keras")
    settings = {name: value for name, value in settings.items() if name != "filepath"}
    with loader_of(any_url, acknowledge="on_checkpoint") as loader:
        saving = ModelCheckpoint(loader, path, **settings)
        model = small_model(steps_per_execution=steps_per_execution)
        model.fit(dataset(loader, select=("x", "y")), epochs=3, verbose=0, callbacks=[saving])
    if "save_freq" not in settings:
        assert delivered(any_url) == [SAMPLES] * 3
        assert acknowledged(any_url)
    elif steps_per_execution == 1:
        last_saved = 3 * BATCHES // 5 * 5 - 2 * BATCHES  # of the third epoch's steps
        assert delivered(any_url) == [SAMPLES, SAMPLES, last_saved * BATCH]
    else:
        assert delivered(any_url)[:2] == [SAMPLES] * 2
    assert list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's own, writing HDF5
def test_a_save_is_on_disk_under_its_name_before_it_is_acknowledged(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledged samples never come again, so a power cut must not remove the only file that contains them."""
    produce(any_url, STREAM, SAMPLES, epochs=3)
    path = tmp_path / "m.keras"
    synced: list[tuple[str, int]] = []
    sync, told = os.fsync, []

    def watched(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, os.fstat(descriptor).st_ino))
        sync(descriptor)

    def acknowledge_what_is_whole() -> None:
        keras.saving.load_model(path)
        assert (path.name, path.stat().st_ino) not in synced  # never the file that is in use
        assert [inode for _, inode in synced[-2:]] == [path.stat().st_ino, tmp_path.stat().st_ino]
        told.append(path.stat().st_ino)
        acknowledge()

    monkeypatch.setattr(os, "fsync", watched)
    with loader_of(any_url, acknowledge="on_checkpoint") as loader:
        acknowledge = loader.checkpointed
        monkeypatch.setitem(vars(loader), "checkpointed", acknowledge_what_is_whole)
        model = small_model()
        model.fit(dataset(loader, select=("x", "y")), epochs=2, verbose=0, callbacks=[ModelCheckpoint(loader, path)])
        assert len(set(told)) == 2
        before = path.read_bytes()
        monkeypatch.setattr(model, "save", lambda file, **_: (Path(file).write_bytes(b"half"), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            model.fit(dataset(loader, select=("x", "y")), verbose=0, callbacks=[ModelCheckpoint(loader, path)])
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]  # a full disk must not also hold the half of each try
        assert delivered(any_url) == [SAMPLES, SAMPLES, 0]


def test_keras_knows_the_steps_of_an_epoch_where_the_loader_does(any_url: str) -> None:
    """Learning-rate schedules and progress bars begin in the first epoch; a resumed one is only as long as its rest."""
    produce(any_url, STREAM, SAMPLES, epochs=3)
    seen: list[Any] = []

    class Watch(keras.callbacks.Callback):  # type: ignore[name-defined]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            seen.append([self.params["steps"], 0])

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen[-1][1] += 1

    with ordered(any_url) as loader:
        batches = dataset(loader, select=("x", "y")).map(lambda x, y: (x / 2, y)).prefetch(2)
        assert len(batches) == len(loader) == BATCHES
        assert (len(batches.take(5)), int(batches.unbatch().cardinality())) == (5, tf.data.UNKNOWN_CARDINALITY)
        small_model().fit(batches, epochs=2, verbose=0, callbacks=[Watch()])
        state = batches.state_dict()
    assert seen == [[BATCHES, BATCHES]] * 2
    assert (state["epoch"], state["position"]) == (2, 0)
    with ordered(any_url) as loader:
        batches = dataset(loader, select=("x", "y"))
        batches.load_state_dict({**state, "epoch": 1, "position": 3 * BATCH})
        small_model().fit(batches, epochs=2, verbose=0, callbacks=[Watch()])
    assert seen[2:] == [[BATCHES, BATCHES - 3], [BATCHES, BATCHES]]
    assert delivered(any_url) == [SAMPLES] * 3


def train(url: str, folder: str, save_freq: str, is_first: str) -> None:
    """Fit three epochs, with each step's labels in a file.

    Stops after step KILLED_AFTER, once every save is reported.
    """

    class Told(keras.Model):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> Any:
            with tf.control_dependencies([tf.print(data[1], summarize=-1, output_stream=f"file://{folder}/steps")]):
                return super().train_step(data)

    class Stop(keras.callbacks.Callback):  # type: ignore[name-defined]
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == KILLED_AFTER:
                sys.stdout.write("middle\n")
                sys.stdout.flush()
                time.sleep(60)

    class Said(ModelCheckpoint):
        def _save_model(self, *args: Any, **settings: Any) -> None:
            super()._save_model(*args, **settings)
            sys.stdout.write(f"saved {stop.steps + (self.save_freq != 'epoch' and is_first == '1')}\n")

    loader = Loader(
        STREAM, group=GROUP, batch_size=BATCH, url=url, tuning=Tuning(member=MEMBER), acknowledge="on_checkpoint"
    )
    stop = Stop()
    saving = Said(loader, f"{folder}/m.weights.h5", save_weights_only=True, save_freq=_freq(save_freq))
    callbacks = [saving, stop] if is_first == "1" else [stop, saving]
    model = Told()
    model.compile("sgd", "mse")
    model.fit(dataset(loader, select=("x", "y")).prefetch(4), epochs=3, verbose=0, callbacks=callbacks)


def _freq(text: str) -> Any:
    return int(text) if text.isdigit() else text


@pytest.mark.parametrize(("save_freq", "is_first"), [("epoch", 1), ("4", 0)])
def test_a_killed_fit_is_given_again_exactly_what_it_trained_on_since_its_last_checkpoint(
    save_freq: str, is_first: int, any_url: str, any_client: Client, tmp_path: Path
) -> None:
    """SIGKILL in the second epoch, with batches read ahead: the restored model misses nothing and sees nothing
    twice.
    """
    produce(any_url, STREAM, SAMPLES, epochs=3)
    with child(train, any_url, tmp_path, save_freq, is_first) as trainer:
        lines: list[str] = []
        while (line := trainer.line()) != "middle":
            assert line, trainer.errors()
            lines.append(line)
        trainer.kill()
    saved = int(lines[-1].split()[1])
    assert saved == (BATCHES if save_freq == "epoch" else KILLED_AFTER // 4 * 4)
    steps = [_labels(line) for line in (tmp_path / "steps").read_text().splitlines()]
    assert len(steps) == KILLED_AFTER
    trained = Counter(number for step in steps[:saved] for number in step)
    again: Counter[int] = Counter()
    with loader_of(any_url, member=MEMBER) as loader:
        for _ in range(2):  # the rest of the second epoch, and the third
            again.update(number for batch in loader for number in batch["y"].tolist())
    assert trained + again == Counter(3 * list(range(SAMPLES)))
    assert acknowledged(any_url)
    assert not any_client.xpending(open_stream(any_client, STREAM).partitions[0].entries(1), GROUP)["pending"]


def _labels(line: str) -> list[int]:
    return [int(word) for word in line.strip("[] \n").split()]


class TestWords:
    """A callback of the wrong policy acknowledges nothing, or too early, so it raises an error before the training."""

    def test_the_steps_callback_is_refused_where_checkpoints_count(self, any_url: str) -> None:
        """It would acknowledge samples that a restored model has forgotten."""
        with (
            loader_of(any_url, acknowledge="on_checkpoint") as loader,
            pytest.raises(ValueError, match=r"penstock\.keras\.ModelCheckpoint"),
        ):
            Acknowledge(loader)

    def test_the_checkpoints_callback_is_refused_where_steps_count(self, any_url: str) -> None:
        """A user who adds it expects that checkpoints count."""
        with loader_of(any_url) as loader, pytest.raises(ValueError, match="acknowledge='on_checkpoint'"):
            ModelCheckpoint(loader, "m.keras")

    def test_training_data_from_elsewhere_is_refused(self, any_url: str, tmp_path: Path) -> None:
        """Keras had read ahead of its step, and all of that would count as trained on."""
        produce(any_url, STREAM, SAMPLES)
        with loader_of(any_url, acknowledge="on_checkpoint") as loader:
            source = ((batch["x"], batch["y"]) for batch in loader)
            with pytest.raises(ValueError, match=r"penstock\.tensorflow\.dataset\(loader\)"):
                small_model().fit(source, callbacks=[ModelCheckpoint(loader, tmp_path / "m.keras")], verbose=0)
        assert delivered(any_url) == [0]
