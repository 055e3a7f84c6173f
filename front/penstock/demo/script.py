"""The script of `penstock demo`: handwritten digits, a costly transform, worker processes, two models on one stream.

It is a script on the public names of `penstock`, as a user would write it.
`penstock.demo.command` is the command around it. Run as a program, the module is the trainer process of one model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

import penstock
from penstock.cli.production import ProductionView

if TYPE_CHECKING:
    from penstock.cli.console import Console

STREAM = "digits"
BATCH = 16
SHARD_SAMPLES = 64
"""Small jobs, so that the first batches come at once."""
LATE = 0.3
"""The second trainer starts when the first has read this part of its first epoch."""
COMPARE_S = 6.0
"""The comparison trains for this long, which is enough for a steady rate."""
POLL_S, REPORT_S, END_S = 0.2, 0.1, 5.0

# --- the samples ------------------------------------------------------------------------------------------------------

SIDE, CLASSES = 32, 10
"""Pixels of an image's side, and digits. The originals have 8 pixels; enlarged, they give a decoder something to do."""
HELD_OUT = 0.2
FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("jpg", {"quality": 92}),
    ("png", {}),
    ("webp", {"quality": 92}),
)
"""The file formats, which take turns."""


class DigitFiles:
    """A dataset of image files, in one sub-folder per class: ``x`` uint8 [32, 32, 1] and the class ``y``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = sorted(folder.glob("*/*.*"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        file = self._files[index]
        with Image.open(file) as image:
            return {"x": np.asarray(image.convert("L"))[..., None], "y": int(file.parent.name)}


def write_digits(folder: Path, samples: int) -> tuple[DigitFiles, DigitFiles]:
    """Write the first ``samples`` of a fixed shuffle of scikit-learn's digits; every fifth is held out for testing."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1797).permutation(len(images))[:samples].tolist()
    train, held_out = folder / "train", folder / "held-out"
    for position, index in enumerate(order):
        target = (held_out if position < round(len(order) * HELD_OUT) else train) / str(int(labels[index]))
        target.mkdir(parents=True, exist_ok=True)
        extension, options = FORMATS[position % len(FORMATS)]
        pixels = Image.fromarray((images[index].reshape(8, 8) * 15.9).astype(np.uint8))
        enlarged = pixels.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        enlarged.save(target / f"{index:04d}.{extension}", **options)
    return DigitFiles(train), DigitFiles(held_out)


# --- the transform: a light augmentation that costs a CPU about 5 ms of Python ----------------------------------------

WORK = 200
"""Side of the enlarged image in pixels, which decides the time: 5 ms on a 2.5 GHz core."""
DEGREES, ZOOM, SHIFT, WARP, NOISE = 10.0, 0.08, 0.04, 0.01, 0.03
"""Largest rotation in degrees. Zoom, shift and warp are parts of the side, and noise is a part of full brightness."""

Array = NDArray[np.float32]


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample in the form that `augment` gives it, unchanged: ``x`` float32 [32, 32, 1] in 0..1."""
    return {"x": sample["x"].astype(np.float32) / 255, "y": sample["y"]}


def augment(sample: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Return a variant of the image: an affine map, an elastic distortion and noise at a larger size, reduced again."""
    image = Image.fromarray(sample["x"][:, :, 0])
    large = np.asarray(image.resize((WORK, WORK), Image.Resampling.BICUBIC), dtype=np.float32)
    warped = _sampled(large, *_coordinates(rng))
    warped += rng.normal(0, NOISE * 255, warped.shape).astype(np.float32)
    small = Image.fromarray(warped).resize(image.size, Image.Resampling.BOX)
    return {"x": np.clip(np.asarray(small)[:, :, None] / 255, 0, 1).astype(np.float32), "y": sample["y"]}


def _coordinates(rng: np.random.Generator) -> tuple[Array, Array]:
    """Return where each pixel comes from: an affine map plus a smooth random displacement."""
    rows, columns = np.mgrid[0:WORK, 0:WORK].astype(np.float32) - WORK / 2
    angle = np.deg2rad(rng.uniform(-DEGREES, DEGREES))
    zoom = 1 + rng.uniform(-ZOOM, ZOOM, 2)
    down, right = rng.uniform(-SHIFT, SHIFT, 2) * WORK
    y = (np.cos(angle) * rows - np.sin(angle) * columns) * zoom[0] + down + WORK / 2
    x = (np.sin(angle) * rows + np.cos(angle) * columns) * zoom[1] + right + WORK / 2
    return y.astype(np.float32) + _smooth_noise(rng), x.astype(np.float32) + _smooth_noise(rng)


def _smooth_noise(rng: np.random.Generator) -> Array:
    """Return displacements in pixels: noise, blurred until neighbours move together."""
    noise = Image.fromarray(rng.integers(0, 256, (WORK, WORK), dtype=np.uint8))
    blurred = np.asarray(noise.filter(ImageFilter.GaussianBlur(WORK / 12)), dtype=np.float32)
    blurred -= blurred.mean()
    spread = float(blurred.std()) or 1.0
    return blurred / np.float32(spread) * np.float32(WARP * WORK)


def _sampled(image: Array, y: Array, x: Array) -> Array:
    """Interpolate bilinearly. Positions outside the image take the value of its edge."""
    y, x = np.clip(y, 0, WORK - 1.001), np.clip(x, 0, WORK - 1.001)
    top, left = y.astype(np.int32), x.astype(np.int32)
    dy, dx = y - top, x - left
    upper = image[top, left] * (1 - dx) + image[top, left + 1] * dx
    lower = image[top + 1, left] * (1 - dx) + image[top + 1, left + 1] * dx
    result: Array = upper * (1 - dy) + lower * dy
    return result


# --- the models: two Keras networks, or two in plain numpy for a machine without TensorFlow ---------------------------

MODELS = {"keras": ("convnet", "dense"), "numpy": ("numpy-small", "numpy-large")}
LEARNING_RATE = 3e-3
"""The learning rate at the start. It falls to zero along a cosine over the planned steps, which steadies the last
epoch's accuracy.
"""

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Images float32 [n, 32, 32, 1], labels int64 [n]."""
OnStep = Callable[[], None]


class KerasModel:
    """One of two Keras networks, fed by `penstock.tensorflow.dataset` as any Keras model would be."""

    def __init__(self, name: str, steps: int, seed: int) -> None:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(seed)
        tf.config.threading.set_intra_op_parallelism_threads(1)  # the other model and the workers need the cores too
        layers = keras.layers
        hidden = {
            "convnet": [
                layers.Conv2D(24, 5, strides=2, activation="relu"),
                layers.Conv2D(48, 3, strides=2, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
            ],
            "dense": [
                layers.AveragePooling2D(2),
                layers.Flatten(),
                layers.Dense(256, activation="relu"),
                layers.Dense(128, activation="relu"),
            ],
        }
        self._model = keras.Sequential([keras.Input((SIDE, SIDE, 1)), *hidden[name], layers.Dense(CLASSES)], name=name)
        rate = keras.optimizers.schedules.CosineDecay(LEARNING_RATE, max(1, steps))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])

    def train(self, loader: penstock.Loader, epochs: int, on_step: OnStep) -> None:
        """Call `fit` once, over the group's epochs."""
        import penstock.tensorflow

        self._fit(penstock.tensorflow.dataset(loader, select=("x", "y")), epochs, on_step)

    def train_on(self, batches: Iterator[Arrays], on_step: OnStep) -> None:
        """Train in the usual way, on a tf.data.Dataset over a Python generator."""
        import tensorflow as tf

        first = next(batches)
        signature = tuple(tf.TensorSpec((None, *array.shape[1:]), array.dtype) for array in first)
        every = tf.data.Dataset.from_generator(lambda: itertools.chain([first], batches), output_signature=signature)
        self._fit(every, 1, on_step)

    def _fit(self, batches: Any, epochs: int, on_step: OnStep) -> None:
        import keras

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: on_step())
        self._model.fit(batches, epochs=epochs, verbose=0, shuffle=False, callbacks=[callback])

    def accuracy(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Return the share of right answers."""
        return float(self._model.evaluate(images, labels, verbose=0)[1])


class NumpyModel:
    """Two layers on the image reduced to 16 x 16, trained with Adam in plain numpy."""

    def __init__(self, hidden: int, steps: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        sizes = (SIDE * SIDE // 4, hidden, CLASSES)
        self._weights = [
            (rng.standard_normal((m, n)) * math.sqrt(2 / m)).astype(np.float32) for m, n in itertools.pairwise(sizes)
        ]
        self._biases = [np.zeros(n, np.float32) for n in sizes[1:]]
        self._moments = [(np.zeros_like(p), np.zeros_like(p)) for p in (*self._weights, *self._biases)]
        self._steps, self._step = max(1, steps), 0

    def train(self, loader: penstock.Loader, epochs: int, on_step: OnStep) -> None:
        """Train on the given number of epochs of a loader."""
        for _ in range(epochs):
            self.train_on(((batch["x"], batch["y"]) for batch in loader), on_step)

    def train_on(self, batches: Iterator[Arrays], on_step: OnStep) -> None:
        """Train on batches that this process makes."""
        for images, labels in batches:
            self._learn(_reduced(images), labels)
            on_step()

    def accuracy(self, images: NDArray[Any], labels: NDArray[Any]) -> float:
        """Return the share of right answers."""
        _, scores = self._forward(_reduced(images))
        return float((scores.argmax(axis=1) == labels).mean())

    def _forward(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        hidden = np.maximum(inputs @ self._weights[0] + self._biases[0], 0)
        return hidden, hidden @ self._weights[1] + self._biases[1]

    def _learn(self, inputs: NDArray[Any], labels: NDArray[Any]) -> None:
        """Take one step of Adam on the cross-entropy."""
        hidden, scores = self._forward(inputs)
        scores -= scores.max(axis=1, keepdims=True)
        error = np.exp(scores)
        error /= error.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1
        error /= len(labels)
        back = (error @ self._weights[1].T) * (hidden > 0)
        gradients = [inputs.T @ back, hidden.T @ error, back.sum(axis=0), error.sum(axis=0)]
        self._step += 1
        rate = LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * min(1.0, self._step / self._steps)))
        rate *= math.sqrt(1 - 0.999**self._step) / (1 - 0.9**self._step)
        parameters = [*self._weights, *self._biases]
        for parameter, gradient, moments in zip(parameters, gradients, self._moments, strict=True):
            _adam(parameter, gradient, moments, rate)


def _adam(
    parameter: NDArray[Any], gradient: NDArray[Any], moments: tuple[NDArray[Any], NDArray[Any]], rate: float
) -> None:
    first, second = moments
    first += 0.1 * (gradient - first)
    second += 0.001 * (gradient**2 - second)
    parameter -= rate * first / (np.sqrt(second) + 1e-7)


def _reduced(images: NDArray[Any]) -> NDArray[Any]:
    """Return the means of each 2 x 2 pixels: [n, 32, 32, 1] becomes [n, 256]."""
    half = SIDE // 2
    reduced: NDArray[Any] = images.reshape(-1, half, 2, half, 2).mean(axis=(2, 4)).reshape(len(images), half * half)
    return reduced


# --- the trainer process: trains one model, and reports its progress as lines of JSON on stdout
# -------------------------


@dataclass(frozen=True)
class TrainerTask:
    """The work of one trainer, as JSON in the first line of its stdin, because every user can read command lines."""

    url: str = field(repr=False)
    model: str
    """The name of the model, and of its group."""
    epochs: int
    train: str
    """The folder of images."""
    held_out: str
    seed: int = 0


class _Speed:
    """The rate of a training job and its share of waiting.

    They are measured from the end of the first step, because that step compiles.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int, float] | None = None

    def step(self, samples: int, waited_s: float) -> None:
        """Note the end of a step."""
        self._first = self._first or (time.monotonic(), samples, waited_s)

    def result(self, samples: int, waited_s: float) -> dict[str, float]:
        """Return the measurements until now."""
        began, before, waited_before = self._first or (time.monotonic(), samples, waited_s)
        seconds = max(time.monotonic() - began, 1e-9)
        return {"rate": (samples - before) / seconds, "waited": (waited_s - waited_before) / seconds}


def trainer_main() -> int:
    """Train and test a model, and on the word ``compare`` train it again without Penstock."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo handles Ctrl-C
    task = TrainerTask(**json.loads(sys.stdin.readline()))
    go = threading.Event()
    threading.Thread(target=_listen, args=(go,), daemon=True).start()
    images = DigitFiles(Path(task.train))
    steps = task.epochs * -(-len(images) // BATCH)
    if task.model in MODELS["keras"]:
        model: KerasModel | NumpyModel = KerasModel(task.model, steps, task.seed)
    else:
        model = NumpyModel(128 if task.model.endswith("small") else 256, steps, task.seed)
    _tell(state="ready", pid=os.getpid())
    try:
        _tell(state="trained", **_train(task, model))
    except penstock.PenstockError as error:
        _tell(state="failed", reason=str(error))
        return 1
    go.wait()
    _tell(state="compared", **_train_alone(images, model, task.seed))
    return 0


def _listen(go: threading.Event) -> None:
    """Wait for ``compare``. The end of stdin means that the demo ended, for any reason."""
    for _ in sys.stdin:
        go.set()
    os._exit(1)


def _tell(**message: Any) -> None:
    assert sys.__stdout__ is not None  # frameworks sometimes print to sys.stdout
    sys.__stdout__.write(json.dumps(message) + "\n")
    sys.__stdout__.flush()


def _train(task: TrainerTask, model: KerasModel | NumpyModel) -> dict[str, float]:
    speed, printed_s = _Speed(), 0.0
    with penstock.Loader(
        STREAM,
        group=task.model,
        batch_size=BATCH,
        url=task.url,
        tuning=penstock.Tuning(member=task.model, notify=lambda text: _tell(state="notice", text=text)),
    ) as loader:

        def on_step() -> None:
            nonlocal printed_s
            if time.monotonic() - printed_s > REPORT_S:
                printed_s = time.monotonic()
                stats = loader.stats(total=True)
                speed.step(stats.samples, stats.waited_s)
                _tell(state="training", samples=stats.samples)

        model.train(loader, task.epochs, on_step)
        stats = loader.stats(total=True)
        result = speed.result(stats.samples, stats.waited_s)
    held_out = DigitFiles(Path(task.held_out))
    images, labels = _stacked(plain(held_out[index]) for index in range(len(held_out)))
    return {**result, "samples": stats.samples, "accuracy": model.accuracy(images, labels)}


def _train_alone(images: DigitFiles, model: KerasModel | NumpyModel, seed: int) -> dict[str, float]:
    """Train the same model with the same transform. This process makes every batch itself."""
    speed, samples, making_s = _Speed(), 0, 0.0

    def batches() -> Iterator[Arrays]:
        nonlocal samples, making_s
        end = time.monotonic() + COMPARE_S
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images)).tolist()
        for start in range(0, len(order), BATCH):
            began = time.monotonic()
            if began > end:
                return
            batch = _stacked(augment(images[index], rng) for index in order[start : start + BATCH])
            making_s += time.monotonic() - began
            samples += len(batch[0])
            yield batch

    model.train_on(batches(), lambda: speed.step(samples, making_s))
    return speed.result(samples, making_s)


def _stacked(samples: Iterable[Mapping[str, Any]]) -> Arrays:
    made = list(samples)
    return np.stack([sample["x"] for sample in made]), np.array([sample["y"] for sample in made])


# --- the demo ---------------------------------------------------------------------------------------------------------

ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",  # TensorFlow's notes on this machine are not part of the demo
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "KERAS_BACKEND": "tensorflow",
    "OPENBLAS_NUM_THREADS": "1",  # small matrices, and the workers need the cores too
    "OMP_NUM_THREADS": "1",
}
"""Variables of a trainer process."""
LAST_LINES = 5
_NOTES = {"starting": "loading its framework", "ready": "waiting for the first samples", "trained": "done"}


@dataclass
class TrainerProcess:
    """A trainer process as the demo sees it. Its messages arrive in a thread."""

    task: TrainerTask
    on_notice: Callable[[str], None]
    samples: int = 0
    pid: int = 0
    is_started: bool = False
    state: str = "starting"
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The messages ``trained`` and ``compared``, once they came."""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def start(self, environment: Mapping[str, str]) -> None:
        """Start the process. Its stderr is kept in case it fails."""
        self.is_started = True
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.demo.script"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._tell(json.dumps(asdict(self.task)))

    def compare(self) -> None:
        """Let it train once more, without Penstock."""
        self._tell("compare")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process is dead, and `check` gives the reason
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def check(self) -> None:
        """Raise PenstockError with the reason if it died."""
        if self.state == "failed" or ("compared" not in self.results and self._process.poll() is not None):
            self._thread.join(END_S)
            raise penstock.PenstockError(f"the trainer of group {self.task.model!r} failed: {self._reason()}")

    def wait_for(self, state: str) -> None:
        """Wait for the message with this state."""
        with self.changed:
            while state not in self.results:
                self.check()
                self.changed.wait(POLL_S)

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join(END_S)
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._hear(json.loads(line))

    def _hear(self, message: dict[str, Any]) -> None:
        state = message.pop("state")
        if state == "notice":
            self.on_notice(f"{self.task.model}: {message['text']}")
            return
        with self.changed:
            self.state = state
            self.samples = message.get("samples", self.samples)
            self.pid = message.get("pid", self.pid)
            if state in ("trained", "compared", "failed"):
                self.results[state] = message
            self.changed.notify_all()

    def _reason(self) -> str:
        if "failed" in self.results:
            return str(self.results["failed"]["reason"])
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return " | ".join(lines[-LAST_LINES:]) or f"it ended with code {self._process.returncode} and said nothing"


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command."""

    samples: int
    epochs: int
    workers: int
    trainer: str | None
    """``keras``, ``numpy``, or None for Keras if it is installed."""

    @property
    def needs_goal(self) -> bool:
        """Return True if the models must reach the goal, which is promised only for the whole demo."""
        return self.samples * self.epochs >= 1700 * 3


@dataclass(frozen=True)
class DemoOutcome:
    """The numbers that the report shows."""

    train_count: int
    held_out_count: int
    epochs: int
    trainer: str
    produced: int
    produced_s: float
    worker_pids: tuple[int, ...]
    trainers: tuple[TrainerProcess, ...]


def run_demo(
    options: DemoOptions, folder: Path, server: penstock.EmbeddedServer, environment: Mapping[str, str],
    console: Console,
) -> DemoOutcome:  # fmt: skip
    """Write digits into a folder, produce and train on them, and train again without Penstock.

    Every process that it starts ends with it. It prints each stage in plain words.
    """
    trainer = options.trainer or _choose_trainer(console)
    train, held_out, trainers = _prepare(options, trainer, folder, server, console)
    early, late = trainers
    with ExitStack() as stack:
        production = stack.enter_context(
            penstock.produce(
                train, stream=STREAM, transform=augment, workers=options.workers, epochs=options.epochs,
                tuning=penstock.Tuning(shard_samples=SHARD_SAMPLES, notify=console.notice), url=server.url,
            )
        )  # fmt: skip

        def start(one: TrainerProcess) -> None:
            one.start(environment)
            stack.callback(one.end)

        start(early)
        pids: set[int] = set()
        with console.progress() as shown:
            bars = [
                (one, shown.add(f"train {one.task.model}", len(train) * options.epochs, "samples")) for one in trainers
            ]
            view, seen = ProductionView(console, shown), production.progress
            summary = None
            while summary is None or any("trained" not in one.results for one in trainers):
                time.sleep(POLL_S)
                if production.is_done:
                    summary = production.wait()  # raises the error that ended it
                if production.progress is not seen:
                    seen = production.progress
                    pids.update(seen.pids)
                    view.update(seen)
                if not late.is_started and early.samples >= len(train) * LATE:
                    start(late)
                    done = f"{early.task.model!r} has trained on {early.samples:,}"
                    console.notice(f"   {done}; now starting {late.task.model!r}")
                for one, bar in bars:
                    if one.is_started:
                        one.check()
                    bar.update(one.samples, _NOTES.get(one.state, "") if one.is_started else "started later")
        console.notices(
            "5. Training the same models again without Penstock for a comparison: each process decodes and augments\n"
            "   its own images between its steps, both at once on the same cores."
        )
        for one in trainers:
            one.compare()
        for one in trainers:
            one.wait_for("compared")
    return DemoOutcome(
        len(train), len(held_out), options.epochs, trainer, summary.samples, summary.seconds, tuple(sorted(pids)),
        trainers,
    )  # fmt: skip


def _prepare(
    options: DemoOptions, trainer: str, folder: Path, server: penstock.EmbeddedServer, console: Console
) -> tuple[DigitFiles, DigitFiles, tuple[TrainerProcess, TrainerProcess]]:
    """Write the digits to train on and those to test on, and return them with both trainers, which are not started."""
    train, held_out = write_digits(folder, options.samples)
    extensions = ", ".join(extension for extension, _ in FORMATS)
    console.notice(
        f"1. Wrote {options.samples:,} scanned handwritten digits as {extensions} files, a folder per class: "
        f"{len(train):,} to train on, {len(held_out):,} held out to test on."
    )
    console.notice(f"2. Started a private {server.name} {server.version} at {server.address} to carry the samples.")
    tasks = [
        TrainerTask(server.url, name, options.epochs, str(train.folder), str(held_out.folder), seed)
        for seed, name in enumerate(MODELS[trainer])
    ]
    early, late = (TrainerProcess(task, console.notice) for task in tasks)
    console.notices(
        f"3. {options.workers} worker processes decode each image and distort it at random, which costs about 5 ms of "
        f"Python a sample,\n   {options.epochs} times over (epochs), and append the results to a Redis stream.\n"
        f"4. Model {early.task.model!r} reads the stream while it is written. Model {late.task.model!r} is started "
        "later, and still gets\n   every sample. Each is a process and a consumer group of its own; none is made twice."
    )
    return train, held_out, (early, late)


def _choose_trainer(console: Console) -> str:
    if all(importlib.util.find_spec(name) is not None for name in ("tensorflow", "keras")):
        return "keras"
    console.notice(
        "TensorFlow is not installed here, so two numpy networks are trained instead of Keras models; everything "
        'else is the same. For Keras: pip install "penstock[demo]"'
    )
    return "numpy"


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        code = trainer_main()
    sys.stdout.flush()
    os._exit(code)  # nothing of TensorFlow's threads is needed any more
