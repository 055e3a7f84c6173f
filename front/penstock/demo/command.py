"""``penstock demo``: Penstock at work on real input, from image files to two trained models, in a few minutes.

The demo itself is the script `penstock.demo.script`. This module starts its server, audits the stream, and reports.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cli import add_json, whole_number
from penstock.cli.interrupts import end_by_signals
from penstock_common.errors import MissingExtra, PenstockError
from penstock_common.settings import child_environment
from penstock_common.stream.servers.embedded import EmbeddedServer

if TYPE_CHECKING:
    from penstock.cli.console import Console
    from penstock.demo.script import DemoOutcome, TrainerProcess
    from penstock_common.stream.audit.accounts import AuditReport
    from penstock_common.stream.commands import Client


GOAL = 0.95
"""The held-out accuracy that both models reach on all digits in three epochs."""

_ALL = 1797
_FEWEST = 100


class DemoResult(NamedTuple):
    """The numbers and findings of one demo."""

    outcome: DemoOutcome
    audit: AuditReport
    look_command: str
    look_output: str | None
    """The output of redis-cli, or None without redis-cli."""
    seconds: float


EPILOG = (
    "example:\n  penstock demo\n  penstock demo --trainer numpy --keep digits/\n\n"
    "exit codes: 0 the audit is clean and the models learned, 1 they did not, or an error, 2 wrong usage, 130\n"
    "Ctrl-C"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See the module."""
    parser.add_argument(
        "--samples", type=whole_number(_FEWEST, _ALL), default=_ALL, metavar="N", help=f"digits (default: all {_ALL})"
    )
    parser.add_argument("--epochs", type=whole_number(1), default=3, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--workers", type=whole_number(1), default=2, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument("--trainer", choices=("keras", "numpy"), help="default: keras if TensorFlow is installed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the images there and leave them")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Return 0 if the audit is clean and both models learned, 1 if not, 130 when interrupted."""
    end_by_signals()
    _require_extras()
    try:
        return _demonstrate(args, console)
    except KeyboardInterrupt:
        console.notice("demo ended early; nothing of it is left running")
        return 130


def _demonstrate(args: argparse.Namespace, console: Console) -> int:
    from penstock.demo.script import ENVIRONMENT, STREAM, DemoOptions, run_demo
    from penstock_common.stream.audit import audit_stream
    from penstock_common.stream.client import connect

    began = time.monotonic()
    options = DemoOptions(args.samples, args.epochs, args.workers, args.trainer)
    with ExitStack() as stack:
        folder = _empty(args.keep) or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-demo-")))
        server = stack.enter_context(EmbeddedServer())
        outcome = run_demo(options, folder, server, child_environment(ENVIRONMENT), console)
        console.notice("6. Auditing: what was planned against what is in the stream and what each group acknowledged.")
        with connect(server.url) as client:
            audit = audit_stream(client, STREAM)
            look = look_inside(server, client, audit.epochs[-1].epoch)
    result = DemoResult(outcome, audit, *look, seconds=time.monotonic() - began)
    wrong = failures(outcome, audit, needs_goal=options.needs_goal)
    if args.json:
        console.json(as_json(result, wrong))
    else:
        report(result, wrong, console)
    return 1 if wrong else 0


def _require_extras() -> None:
    """Raise MissingExtra with the names of the missing packages, before anything is started."""
    from penstock_common.extras import PACKAGES

    missing = [PACKAGES[name].name for name in ("sklearn", "PIL", "rq") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f'penstock demo needs {", ".join(missing)}: pip install "penstock[demo]"')


def _empty(folder: Path | None) -> Path | None:
    """Make the folder that the user named, if there is none, and return it. Raises PenstockError if it is of no use."""
    if folder is None:
        return None
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise PenstockError(f"--keep {folder}: something is there already; name a new or an empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise PenstockError(f"--keep {folder}: it cannot be written ({error.strerror}); name another folder") from None


def look_inside(server: EmbeddedServer, client: Client, epoch: int) -> tuple[str, str | None]:
    """Return a redis-cli command that shows an epoch's groups, and what it prints, or None without a redis-cli."""
    from penstock.demo.script import STREAM
    from penstock_common.stream.streams import load_stream

    words = ["XINFO", "GROUPS", load_stream(client, STREAM).partitions[0].entries(epoch)]
    shown = " ".join(['redis-cli -u "$PENSTOCK_URL"', *(f"'{word}'" if "{" in word else word for word in words)])
    executable = _find_redis_cli(server)
    if executable is None:
        return shown, None
    command = [executable, "-p", str(server.port), "--no-raw", *words]
    # every user of the host can read a command line
    environment = child_environment({"REDISCLI_AUTH": server.password})
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10, env=environment)
    return shown, done.stdout.rstrip() if done.returncode == 0 else None


def _find_redis_cli(server: EmbeddedServer) -> str | None:
    """Return the redis-cli on PATH, or in the server's folder, or in its wheel."""
    names = [f"{server.name}-cli", "redis-cli"]
    for folder in (server.executable.parent, Path(sys.executable).parent):
        names += [str(folder / name) for name in names[:2]]
    return next(filter(None, map(shutil.which, names)), None)


def failures(outcome: DemoOutcome, audit: AuditReport, *, needs_goal: bool) -> list[str]:
    """Return the unexpected results, one line each."""
    found = []
    planned = outcome.train_count * outcome.epochs
    if not audit.is_clean:
        found += audit.findings or [audit.verdict]
    if audit.produced + audit.bad != planned:
        found.append(f"{audit.produced + audit.bad} of {planned} samples were produced")
    for one in outcome.trainers:
        delivered = audit.delivered.get(one.task.model, 0)
        if delivered != audit.produced:
            found.append(f"group {one.task.model!r} acknowledged {delivered} of {audit.produced} samples")
        accuracy = one.results["trained"]["accuracy"]
        if needs_goal and accuracy < GOAL:
            found.append(f"model {one.task.model!r} has a held-out accuracy of {accuracy:.3f}, below {GOAL}")
    return found


_HEAD = ("model", "held-out accuracy", "samples/s", "waited", "alone: samples/s", "alone: waited")


def report(result: DemoResult, wrong: list[str], console: Console) -> None:
    """Print the final report: a table of the models, the audit, the output of redis-cli."""
    outcome, audit = result.outcome, result.audit
    rate = outcome.produced / max(outcome.produced_s, 1e-9)
    pids = ", ".join(map(str, outcome.worker_pids))
    console.line()
    console.line(("What came of it", "bold"))
    console.line(f"  workers (processes {pids}) made {outcome.produced:,} samples at {rate:,.0f} a second")
    console.line()
    console.table([_row(one) for one in outcome.trainers], head=_HEAD)
    console.line()
    console.line("  waited: the part of its time that a model spent waiting for its next batch.")
    console.line("  alone: without Penstock, each model's process decoding and augmenting for itself, both at once.")
    console.line()
    console.line(("Audit", "bold"), " (counted from the stream and each group's ledger)")
    bad = f", {audit.bad} bad" if audit.bad else ""
    console.line(f"  produced   {audit.produced:,} samples in {outcome.epochs} epochs{bad}")
    for group, count in audit.delivered.items():
        console.line(f"  delivered  {count:,} to group {group!r}, each acknowledged after it was trained on")
    console.line(f"  lost {audit.lost}, duplicate {audit.duplicate}, pending {audit.pending}")
    console.line()
    console.line(("Look inside", "bold"), " while it runs, from any shell: who reads, what is pending, how far")
    console.line(f"  $ {result.look_command}")
    if result.look_output is None:
        console.line("  (there is no redis-cli here to show what it prints)")
    else:
        for line in (
            *result.look_output.splitlines(),
            "(_last is Penstock's own bookmark, the others are the two models)",
        ):
            console.line(f"  {line}")
    console.line()
    for line in wrong:
        console.line((f"NOT GOOD: {line}", "red"))
    if not wrong:
        good = (f"All good, in {result.seconds:.0f} s.", "green")
        console.line(good, " Next, with your own images and your own training script:")
        console.line("  penstock run images DIR -- python train.py")


def _row(trainer: TrainerProcess) -> tuple[object, ...]:
    trained, alone = trainer.results["trained"], trainer.results["compared"]
    return (
        trainer.task.model,
        f"{trained['accuracy']:.3f}",
        round(trained["rate"]),
        f"{trained['waited']:.0%}",
        round(alone["rate"]),
        f"{alone['waited']:.0%}",
    )


def as_json(result: DemoResult, wrong: list[str]) -> dict[str, Any]:
    """Return the same report for programs."""
    outcome, audit = result.outcome, result.audit
    counts = ("produced", "bad", "delivered", "lost", "duplicate", "pending")
    return {
        "ok": not wrong,
        "failures": wrong,
        "trainer": outcome.trainer,
        "seconds": round(result.seconds, 1),
        "samples": outcome.train_count,
        "held_out": outcome.held_out_count,
        "epochs": outcome.epochs,
        "worker_pids": list(outcome.worker_pids),
        "trainer_pids": [one.pid for one in outcome.trainers],
        "produced_per_s": round(outcome.produced / max(outcome.produced_s, 1e-9), 1),
        "models": {one.task.model: {"group": one.task.model, **_numbers(one)} for one in outcome.trainers},
        "audit": {name: getattr(audit, name) for name in counts} | {"clean": audit.is_clean},
        "look_inside": {"command": result.look_command, "output": result.look_output},
    }


def _numbers(trainer: TrainerProcess) -> dict[str, float]:
    trained, alone = trainer.results["trained"], trainer.results["compared"]
    return {
        "accuracy": round(trained["accuracy"], 4),
        "samples_per_s": round(trained["rate"], 1),
        "waited": round(trained["waited"], 3),
        "alone_samples_per_s": round(alone["rate"], 1),
        "alone_waited": round(alone["waited"], 3),
    }
