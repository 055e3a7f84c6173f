"""The pages on moving: modules are written, commands run, and snippets used for training."""

from __future__ import annotations

import importlib
import os
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
MODULES = dict(re.findall(r"^```python (\w+\.py)\n(.*?)^```", "\n".join(PAGES), re.MULTILINE | re.DOTALL))
TORCH, FOLDER, FOLDERS, SOUNDS, BOXES, TEXTS = (
    command for page in PAGES for command in re.findall(r"^```sh\npenstock (.*?)\n```", page, re.MULTILINE)
)
VALIDATE, ACTORS, PAD, VIEWS, DETECT, BUCKETS = (
    code for page in PAGES for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
)


def test_the_pages_have_what_is_run_here() -> None:
    """A snippet that is not found would pass silently."""
    assert sorted(MODULES) == [
        "detection.py", "fit.py", "folders.py", "mydata.py", "sounds.py", "texts.py", "train.py",
    ]  # fmt: skip
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
    for name, code in MODULES.items():
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
    """Each of three epochs ends with the whole validation set: the model's loss on it is the loss that it reports."""
    pytest.importorskip("keras")
    produce(any_url, "train", 60)
    produce(any_url, "val", 40)
    names: dict[str, Any] = {}
    exec(VALIDATE, names)
    assert len(names["history"]["val_loss"]) == 3
    with penstock.Replay("val", epoch=0, batch_size=40) as replay:
        (batch,) = replay
    wanted = np.mean((names["model"].predict(batch["x"], verbose=0)[:, 0] - batch["y"]) ** 2)
    assert names["history"]["val_loss"][-1] == pytest.approx(wanted, rel=1e-4)


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


def test_boxes_reach_a_model_as_a_dict_for_each_image(
    folder: Path, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models of torchvision accept no other form, and the values are those of the dataset, field by field."""
    done = penstock_says(BOXES, "--workers", "1")
    assert done.returncode == 0, done.stderr
    boxes = importlib.import_module("detection").boxes
    names: dict[str, Any] = {}
    exec(DETECT, names)
    assert len(names["images"]) == 4
    for image, target in zip(names["images"], names["targets"], strict=True):
        wanted_image, wanted = boxes[int(target["image_id"])]
        assert torch.equal(image, wanted_image)
        assert target.keys() == wanted.keys()
        assert all(torch.equal(torch.as_tensor(wanted[name]), target[name]) for name in wanted)
    seen = re.findall(r"^(\d+) torch", capsys.readouterr().out, re.MULTILINE)
    assert sorted(map(int, seen)) == list(range(12))
    assert audit_stream(any_client, "boxes").delivered == {"rcnn": 12}


def test_a_collate_function_keeps_its_lengths_and_names(folder: Path, any_client: Client) -> None:
    """A recurrent net needs the lengths, which padding by the loader would lose."""
    done = penstock_says(SOUNDS, "--workers", "1")
    assert done.returncode == 0, done.stderr
    names: dict[str, Any] = {}
    exec(PAD, names)
    last = [names[name] for name in ("sounds", "lengths", "labels", "names")]
    assert len(names["labels"]) == 8
    for sound, length, label, name in zip(*last, strict=True):
        assert length == 3 + label % 5
        assert (sound[:length] == label).all()
        assert not sound[length:].any()
        assert name == f"{label}.wav"
    assert audit_stream(any_client, "sounds").delivered == {"gru": 40}


def test_two_views_of_an_image_come_as_one_tensor(folder: Path, any_client: Client) -> None:
    """Contrastive trainings have them in a list, and the page shows how to separate them."""
    exec(VIEWS, {})
    assert audit_stream(any_client, "views").delivered == {"simclr": 20}


def test_buckets_give_every_text_with_little_padding(
    folder: Path, any_client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucketing sampler has this purpose."""
    done = penstock_says(TEXTS, "--workers", "1")
    assert done.returncode == 0, done.stderr
    exec(BUCKETS, {})
    steps = [[int(number) for number in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert [rows for rows, _, _ in steps] == [32] * 16
    assert sum(used for _, _, used in steps) > 0.8 * sum(full for _, full, _ in steps)
    assert audit_stream(any_client, "texts").delivered == {"gru": 512}


def test_a_learner_gets_what_actors_write(folder: Path) -> None:
    """It works without epochs: the learner ends when it has enough."""
    (folder / "experience.py").write_text(ACTORS)
    done = subprocess.run(
        [sys.executable, "experience.py"], check=False, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^\((\d+), 8\) \[[01, ]+\]$", done.stdout, re.MULTILINE)
    assert len(steps) == 5
    assert sum(map(int, steps)) > 100
