"""The pages on moving: modules are written, commands run, and snippets used for training."""

from __future__ import annotations

import importlib
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import penstock
from penstock_common.stream.audit import audit_stream
from penstock_common.stream.commands import Client
from tests.contracts.feed import produce
from tests.producer.reading import read_epoch

torch = pytest.importorskip("torch")

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [(DOCS / name).read_text() for name in ("moving.md", "moving-shapes.md")]
MODULES = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```", PAGES[0], re.MULTILINE | re.DOTALL))
TORCH, FOLDER, FOLDERS, SOUNDS, BOXES, TEXTS = (
    command for page in PAGES for command in re.findall(r"^```sh\npenstock (.*?)\n```", page, re.MULTILINE)
)
VALIDATE, ACT, LEARN, PAD, VIEWS, DETECT, BUCKETS = (
    code for page in PAGES for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
)
SOUND_DATA = """
import torch

class Sounds(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3 + index % 5, 64), index).float(), index, f"{index}.wav"

train = Sounds()
"""
DETECTION = """
import torch

class Boxes(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        count = 1 + index % 3
        boxes = torch.arange(count * 4).reshape(count, 4).float() + index
        return torch.full((3, 8 + index, 9), index).float(), {
            "boxes": boxes, "labels": torch.arange(count) + 1, "image_id": index,
            "area": boxes.prod(1), "iscrowd": torch.zeros(count, dtype=torch.int64),
        }

boxes = Boxes()
"""
TEXT_DATA = """
import torch

class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 512
    def __getitem__(self, index):
        return torch.full((1 + 7 * index % 40,), 1 + index % 9), index % 2

data = Texts()
"""


def test_the_pages_have_what_is_run_here() -> None:
    """A snippet that is not found would pass silently."""
    assert sorted(MODULES) == ["fit.py", "folders.py", "mydata.py", "train.py"]
    assert [command.split()[0] for command in (TORCH, FOLDER, FOLDERS)] == ["run", "run", "produce"]


def penstock_says(command: str, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a shell does, because workers forked from these tests would hold their frameworks' threads."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        [sys.executable, "-m", "penstock", *shlex.split(command), *more],
        check=False, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, any_url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the reader's folder, with a private server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PENSTOCK_URL", any_url)
    for name, code in {**MODULES, "detection.py": DETECTION, "texts.py": TEXT_DATA, "sounds.py": SOUND_DATA}.items():
        (tmp_path / name).write_text(code)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    return tmp_path


def make_photos(folder: Path) -> None:
    """Write sixty pictures of two classes."""
    for number in range(60):
        stripes = np.zeros((40, 36, 3), np.uint8)
        stripes[:: 1 if number % 2 else 4, :: 4 if number % 2 else 1] = 250
        path = folder / "photos" / ("bars" if number % 2 else "rows") / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(stripes).save(path)


def test_the_torch_training_runs_and_validates_on_all_of_its_held_out_photos(folder: Path) -> None:
    """A mover copies this command first: three epochs, the same validation set after each."""
    make_photos(folder)
    done = penstock_says(TORCH)
    assert done.returncode == 0, done.stderr
    right = re.findall(r"^epoch (\d): (\d+) of 12$", done.stdout, re.MULTILINE)
    assert [int(epoch) for epoch, _ in right] == [0, 1, 2]
    assert "produced 3 epochs of 'train': 144 samples, 0 bad" in done.stderr
    assert done.stderr.count("val replay of epoch 0: 12 samples") == 3


def test_keras_validates_on_the_replay(folder: Path, any_url: str) -> None:
    """Each of three epochs ends with the whole validation set."""
    keras = pytest.importorskip("keras")
    import penstock.tensorflow

    produce(any_url, "val", 40)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    train = penstock.tensorflow.dataset(penstock.Replay("val", epoch=0, batch_size=10), select=("x", "y"))
    steps: list[int] = []
    counting = keras.callbacks.LambdaCallback()
    counting.on_test_batch_end = lambda batch, logs=None: steps.append(batch)
    fit = model.fit
    model.fit = lambda *given, **named: fit(*given, **named, callbacks=[counting], verbose=0)
    exec(VALIDATE, {"penstock": penstock, "model": model, "train": train})
    assert steps == [0, 1, 2] * 3


def test_keras_trains_on_a_folder_of_images_and_validates_on_its_other_part(folder: Path, any_url: str) -> None:
    """The two parts contain all files, each in one part, and the classes have the names of their folders."""
    pytest.importorskip("keras")
    make_photos(folder)
    done = penstock_says(FOLDER.replace("run", "produce", 1).partition(" -- ")[0])
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {}
    exec(MODULES["fit.py"], names)
    assert (
        names["names"] == penstock.Replay("photos.val", epoch=0, batch_size=16).info["classes"]["y"] == ["bars", "rows"]
    )
    train, val = (len(read_epoch(any_url, f"photos.{part}", 0)) for part in ("train", "val"))
    assert train + val == 60
    assert names["loader"].stats(total=True).samples == 3 * train


def test_a_tf_data_pipeline_is_read_as_it_is(folder: Path, any_url: str) -> None:
    """A user gets Keras's own choice of files, pixel for pixel, and need not rewrite a pipeline to try Penstock."""
    pytest.importorskip("tensorflow")
    make_photos(folder)
    once = FOLDERS.replace("--epochs 3", "--epochs 1")  # each epoch needs an import of TensorFlow
    done = penstock_says(once, "--workers", "1")
    assert done.returncode == 0, done.stderr
    wanted = sorted((x.numpy().tobytes(), int(y)) for x, y in importlib.import_module("folders").train)
    assert len(wanted) == 48
    samples = read_epoch(any_url).values()
    assert sorted((sample["x"].tobytes(), int(sample["y"])) for sample in samples) == wanted


def test_a_map_cuts_a_batch_for_each_device_of_pmap(folder: Path, any_url: str) -> None:
    """Older JAX code needs a leading dimension of devices, and a partial batch could not be divided."""
    pytest.importorskip("jax")
    import penstock.jax

    produce(any_url, "train", 45)
    with penstock.Loader("train", group="pmap", batch_size=10, tuning=penstock.Tuning(remainder="drop")) as loader:
        cut = penstock.jax.dataset(loader, map=lambda batch: {"x": batch["x"].reshape(2, -1, 4)})
        assert [batch["x"].shape for batch in cut] == [(2, 5, 4)] * 4


def test_boxes_reach_a_model_as_a_dict_for_each_image(folder: Path, any_client: Client) -> None:
    """Models of torchvision accept no other form, and the values are those of the dataset, field by field."""
    done = penstock_says(BOXES, "--workers", "1")
    assert done.returncode == 0, done.stderr
    import penstock.torch

    boxes = importlib.import_module("detection").boxes

    seen: list[int] = []

    def detect(images: Any, targets: Any) -> None:
        for image, target in zip(images, targets, strict=True):
            wanted_image, wanted = boxes[int(target["image_id"])]
            assert torch.equal(image, wanted_image)
            assert target.keys() == wanted.keys()
            assert all(torch.equal(torch.as_tensor(wanted[name]), target[name]) for name in wanted)
            seen.append(int(target["image_id"]))

    exec(DETECT, {"penstock": penstock, "detect": detect})
    assert sorted(seen) == list(range(12))
    assert audit_stream(any_client, "boxes").delivered == {"rcnn": 12}


def test_a_collate_function_keeps_its_lengths_and_names(folder: Path) -> None:
    """A recurrent net needs the lengths, which padding by the loader would lose."""
    done = penstock_says(SOUNDS, "--workers", "1")
    assert done.returncode == 0, done.stderr
    import penstock.torch

    seen: list[int] = []

    def step(sounds: Any, lengths: Any, labels: Any) -> None:
        for sound, length, label in zip(sounds, lengths, labels, strict=True):
            assert length == 3 + label % 5
            assert (sound[:length] == label).all()
            assert not sound[length:].any()
            seen.append(int(label))

    pad = torch.nn.utils.rnn.pad_sequence
    names = {"penstock": penstock, "torch": torch, "pad_sequence": pad, "step": step}
    exec(PAD, names)
    assert sorted(seen) == list(range(40))
    assert sorted(names["names"]) == sorted(f"{label}.wav" for label in seen[-8:])


def test_two_views_of_an_image_come_as_one_tensor(folder: Path, any_url: str) -> None:
    """Contrastive trainings have them in a list, and the page shows how to separate them."""
    views = [([torch.full((3, 4, 5), 2 * index), torch.full((3, 4, 5), 2 * index + 1)], index) for index in range(20)]
    import penstock.torch

    penstock.produce(views, stream="views", workers=1, wait=True, tuning=penstock.Tuning(notify=lambda _: None))

    seen: list[int] = []

    def step(first: Any, second: Any, labels: Any) -> None:
        assert first.shape == second.shape == (len(labels), 3, 4, 5)
        assert (first[:, 0, 0, 0] == 2 * labels).all()
        assert (second[:, 0, 0, 0] == 2 * labels + 1).all()
        seen.extend(labels.tolist())

    with penstock.Loader("views", group="simclr", batch_size=8) as loader:
        exec(VIEWS, {"penstock": penstock, "loader": loader, "step": step})
    assert sorted(seen) == list(range(20))


def test_buckets_give_every_text_with_little_padding(folder: Path, any_client: Client) -> None:
    """A bucketing sampler has this purpose."""
    done = penstock_says(TEXTS, "--workers", "1")
    assert done.returncode == 0, done.stderr
    import penstock.torch

    rows = full = used = 0

    def step(tokens: Any, y: Any) -> None:
        nonlocal rows, full, used
        assert len(tokens) == len(y) == 32
        rows, full, used = rows + len(y), full + tokens.numel(), used + int((tokens > 0).sum())

    pad = torch.nn.utils.rnn.pad_sequence
    exec(BUCKETS, {"penstock": penstock, "random": random, "pad_sequence": pad, "step": step})
    assert rows == 512
    assert used > 0.8 * full
    assert audit_stream(any_client, "texts").delivered == {"gru": 512}


def test_a_learner_gets_what_actors_write(folder: Path) -> None:
    """It works without epochs: the learner ends when it has enough."""
    names: dict[str, Any] = {"penstock": penstock, "np": np}
    seen: list[int] = []
    names["step"] = lambda observation, reward: seen.append(len(reward))
    exec(ACT, names)
    exec(LEARN, names)
    for number in range(2):
        names["act"](number, 100)
    names["learn"](5)
    assert len(seen) == 5
    assert sum(seen) > 100
