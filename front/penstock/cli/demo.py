"""``penstock demo``: the main job on real input, from image files to two trained models, in a few minutes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import add_json, whole_number
from penstock.cli.ending import end_by_signals

if TYPE_CHECKING:
    from penstock.cli.console import Console

NAME = "demo"
HELP = "see it all work: digits, workers, Redis, two models, an audit"

_ALL = 1797
_FEWEST = 100


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
    parser.epilog = (
        "example:\n  penstock demo\n  penstock demo --trainer numpy --keep digits/\n\n"
        "exit codes: 0 the audit is clean and the models learned, 1 they did not, or an error, 2 wrong usage, 130\n"
        "Ctrl-C"
    )


def run(args: argparse.Namespace, console: Console) -> int:
    """0 if the audit is clean and both models learned; 1 if not; 130 when interrupted."""
    end_by_signals()
    _require_extras()
    from penstock.demo.report import as_json, failures, tell
    from penstock.demo.session import DemoOptions, goal_applies, run_demo

    options = DemoOptions(args.samples, args.epochs, args.workers, args.trainer, args.keep)
    try:
        outcome = run_demo(options, console)
    except KeyboardInterrupt:
        console.notice("demo ended early; nothing of it is left running")
        return 130
    wrong = failures(outcome, needs_goal=goal_applies(options))
    if args.json:
        console.json(as_json(outcome, wrong))
    else:
        tell(outcome, console, wrong)
    return 1 if wrong else 0


def _require_extras() -> None:
    """Raise MissingExtra with the names of the missing packages, before anything is started."""
    import importlib.util

    from penstock_common.errors import MissingExtra
    from penstock_common.extras import PACKAGES

    missing = [PACKAGES[name].name for name in ("sklearn", "PIL", "rq") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f'penstock demo needs {", ".join(missing)}: pip install "penstock[demo]"')
