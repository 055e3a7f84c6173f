"""One run of the demo: digits on disk, a server, worker processes, two trainers, their comparison, the audit.

Says each stage in plain words as it comes; the closing tables are ``report``'s.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.production import ProductionView
from penstock.demo.digits import FORMATS, Folders, write_digits
from penstock.demo.trainer import STREAM, TRANSFORM, Task
from penstock.demo.trainers import Trainer, keras_is_there
from penstock_common.errors import PenstockError
from penstock_common.settings import child_environment
from penstock_common.stream.audit import AuditReport, audit_stream
from penstock_common.stream.client import connect
from penstock_common.stream.servers.embedded import EmbeddedServer
from penstock_common.stream.streams import load_stream
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production
from penstock_producer.jobs.progress import ProductionSummary
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import ImagesConfig

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.cli.progress import ProgressBars

MODELS = {"keras": ("convnet", "dense"), "numpy": ("numpy-small", "numpy-large")}
LATE = 0.3
"""The second trainer is started when the first has read so much of its first epoch."""
LOOK_S = 0.2
SHARD_SAMPLES = 64
"""Small jobs, so that the first batches come at once."""


@dataclass(frozen=True)
class DemoOptions:
    """The options of the command."""

    samples: int
    epochs: int
    workers: int
    trainer: str | None
    """``keras``, ``numpy``, or None: Keras where it is installed."""
    keep: Path | None


@dataclass(frozen=True)
class Outcome:
    """All that the report tells."""

    folders: Folders
    epochs: int
    trainer: str
    summary: ProductionSummary
    worker_pids: tuple[int, ...]
    trainers: tuple[Trainer, ...]
    audit: AuditReport
    look_command: str
    look_output: str | None
    """None where there is no redis-cli."""
    seconds: float


def run_demo(options: DemoOptions, console: Console) -> Outcome:
    """The whole demo. Every process it starts ends with it."""
    began = time.monotonic()
    with ExitStack() as stack:
        trainer = options.trainer or _choose_trainer(console)
        folder = _kept(options.keep) or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-")))
        folders = write_digits(folder, options.samples)
        extensions = ", ".join(extension for extension, _ in FORMATS)
        console.notice(
            f"1. Wrote {options.samples:,} scanned handwritten digits as {extensions} files, a folder per class: "
            f"{folders.train_count:,} to train on, {folders.held_out_count:,} held out to test on."
        )
        server = stack.enter_context(EmbeddedServer())
        console.notice(f"2. Started a private {server.name} {server.version} at {server.address} to carry the samples.")
        tasks = [_task(options, folders, server.url, name, seed) for seed, name in enumerate(MODELS[trainer])]
        trainers = tuple(Trainer(task, console.notice) for task in tasks)
        summary, pids = _produce_and_train(options, folders, server.url, trainers, stack, console)
        console.notices(
            "5. Training the same models again without Penstock for a comparison: each process decodes and augments\n"
            "   its own images between its steps, both at once on the same cores."
        )
        for one in trainers:
            one.compare()
        _await(trainers, "compared")
        console.notice("6. Auditing: what was planned against what is in the stream and what each group acknowledged.")
        command, output = look_inside(server)
        audit = _audit(server.url)
        return Outcome(
            folders, options.epochs, trainer, summary, pids, trainers, audit, command, output, time.monotonic() - began
        )


def _kept(folder: Path | None) -> Path | None:
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PenstockError(f"--keep {folder}: something is there already; name a new or an empty folder")
    return folder


def _choose_trainer(console: Console) -> str:
    if keras_is_there():
        return "keras"
    console.notice(
        "TensorFlow is not installed here, so two numpy networks are trained instead of Keras models; everything "
        'else is the same. For Keras: pip install "penstock[demo]"'
    )
    return "numpy"


def _task(options: DemoOptions, folders: Folders, url: str, name: str, seed: int) -> Task:
    return Task(
        url=url, group=name, model=name, epochs=options.epochs, samples=folders.train_count,
        train=folders.train, held_out=folders.held_out, seed=seed,
    )  # fmt: skip


def _produce_and_train(
    options: DemoOptions, folders: Folders, url: str, trainers: tuple[Trainer, ...], stack: ExitStack, console: Console
) -> tuple[ProductionSummary, tuple[int, ...]]:
    plan = ProductionPlan(
        stream=STREAM,
        source=ImagesConfig(path=str(folders.train), mode="gray", transform=TRANSFORM),
        epochs=options.epochs,
        shard_samples=SHARD_SAMPLES,
    )
    workers = WorkerOptions(url=url, queue_url=url)
    with Production(plan, workers, workers=options.workers, notify=console.notice) as production:
        early, late = trainers
        _tell_stages(options, early, late, console)
        _start(early, stack)
        pids: set[int] = set()
        with console.progress() as shown:
            bars = _Bars(shown, trainers, folders.train_count * options.epochs)
            view = ProductionView(console, shown)
            for look in production.run():
                pids.update(look.pids)
                view.update(look)
                _start_late(early, late, folders.train_count, stack, console)
                bars.update()
            while any("trained" not in one.results for one in trainers):
                _start_late(early, late, folders.train_count, stack, console)
                bars.update()
                time.sleep(LOOK_S)
            bars.update()
        return production.summary(), tuple(sorted(pids))


def _tell_stages(options: DemoOptions, early: Trainer, late: Trainer, console: Console) -> None:
    console.notices(
        f"3. {options.workers} worker processes decode each image and distort it at random, which costs about 5 ms of "
        f"Python a sample,\n   {options.epochs} times over (epochs), and append the results to a Redis stream.\n"
        f"4. Model {early.task.model!r} reads the stream while it is written. Model {late.task.model!r} is started "
        "later, and still gets\n   every sample. Each is a process and a consumer group of its own; none is made twice."
    )


def _start(trainer: Trainer, stack: ExitStack) -> None:
    trainer.start()
    stack.callback(trainer.end)


def _start_late(early: Trainer, late: Trainer, samples: int, stack: ExitStack, console: Console) -> None:
    """Starts the second once the first is well under way; raises what either died of."""
    early.check()
    if late.is_started:
        late.check()
    elif early.samples >= samples * LATE:
        _start(late, stack)
        console.notice(f"   {early.task.group!r} has trained on {early.samples:,}; now starting {late.task.group!r}")


def _await(trainers: tuple[Trainer, ...], state: str) -> None:
    for one in trainers:
        with one.changed:
            while state not in one.results:
                one.check()
                one.changed.wait(LOOK_S)


class _Bars:
    """One bar per trainer."""

    def __init__(self, shown: ProgressBars, trainers: tuple[Trainer, ...], total: int) -> None:
        self._bars = [(one, shown.add(f"train {one.task.group}", total, "samples")) for one in trainers]

    def update(self) -> None:
        """The newest numbers."""
        for one, bar in self._bars:
            note = _STATES.get(one.state, "") if one.is_started else "started later"
            if bar.done != one.samples or bar.note != note:
                bar.update(one.samples, note)


_STATES = {"starting": "loading its framework", "ready": "waiting for the first samples", "trained": "done"}


def _audit(url: str) -> AuditReport:
    client = connect(url)
    try:
        return audit_stream(client, STREAM)
    finally:
        client.close()


def look_inside(server: EmbeddedServer) -> tuple[str, str | None]:
    """A redis-cli command that shows the groups of the last epoch, and what it prints."""
    client = connect(server.url)
    try:
        stream = load_stream(client, STREAM)
        epoch = audit_stream(client, stream).epochs[-1].epoch
    finally:
        client.close()
    words = ["XINFO", "GROUPS", stream.partitions[0].entries(epoch)]
    shown = " ".join(['redis-cli -u "$PENSTOCK_URL"', *(f"'{word}'" if "{" in word else word for word in words)])
    executable = _find_cli(server)
    if executable is None:
        return shown, None
    command = [str(executable), "-p", str(server.port), "--no-raw", *words]
    environment = child_environment({"REDISCLI_AUTH": server.password})  # every user reads a command line
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10, env=environment)
    return shown, done.stdout.rstrip() if done.returncode == 0 else None


def _find_cli(server: EmbeddedServer) -> Path | None:
    """On PATH, beside the server that runs, or where its wheel put it."""
    names = [f"{server.name}-cli", "redis-cli"]
    for folder in (server.executable.parent, Path(sys.executable).parent):
        names += [str(folder / name) for name in names[:2]]
    found = next(filter(None, map(shutil.which, names)), None)
    return Path(found) if found else None


def goal_applies(options: DemoOptions) -> bool:
    """The accuracy is only promised for the whole demo."""
    return options.samples * options.epochs >= 1700 * 3
