"""Search for histories that break a promise: ``python -m tests.histories``. The exit code is 1 if one was found.

A history is a short program of writers, trainers and an operator, with torn losses. It is a list of steps that text can
hold. The same text gives the same requests in the same order, because every actor runs in one thread, and waits count
requests instead of time.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path

from tests.histories.schedules import scheduled
from tests.histories.search import Found, arena, search, shortest_of, violation_of
from tests.histories.step import THEMES, History, parse_history, written

EPILOG = """\
example:
  python -m tests.histories --minutes 10
  python -m tests.histories --seed 7 --histories 500 --theme writers
  python -m tests.histories --chaos 7
  python -m tests.histories --replay 'feed f0 1; mark; pour f1 0; lose s; feed f1 2'

A history that was found is printed as steps, the shortest that still fail, with the command that runs it again."""


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every promise held, 1 if not."""
    args = _parser().parse_args(argv)
    theme = args.theme or ("segments" if args.segments else "")
    with arena(args.durability, has_segments=args.segments) as place:
        if args.chaos is not None:
            found = shortest_of(place, args.chaos, scheduled(args.chaos))
            print("every promise held" if found is None else told(found, args))
            return int(found is not None)
        if args.replay is not None:
            violation = violation_of(place, args.replay)
            print("every promise held" if violation is None else f"{violation.kind}: {violation.text}")
            return int(violation is not None)
        seed = args.seed if args.seed is not None else secrets.randbelow(1_000_000)
        found, count = search(place, seed, histories=args.histories, minutes=args.minutes, theme=theme)
    print(f"{count} histories from seed {seed} on: {'every promise held' if found is None else 'a promise is broken'}")
    if found is not None:
        print(told(found, args))
    return int(found is not None)


def told(found: Found, args: argparse.Namespace) -> str:
    """Return a history that fails as text for people."""
    options = f"--durability {args.durability}{' --segments' * args.segments}"
    steps = "\n".join(f"  {step}" for step in found.history)
    return (
        f"{found.violation.kind}: {found.violation.text}\n{steps}\n"
        f"again: python -m tests.histories {options} --replay '{written(found.history)}'"
    )


def _history(text: str) -> History:
    path = Path(text)
    try:
        return parse_history(path.read_text() if len(text) < 255 and path.is_file() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.histories",
        description="Run short random histories of writers, trainers and torn losses, and shrink what fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=1.0, help="the longest time (default: %(default)s)")
    add("--histories", type=int, metavar="N", help="the most histories (default: as many as the time allows)")
    add("--seed", type=int, help="of the first history (default: a random one, printed)")
    add("--theme", choices=("", *THEMES), default="", help="of all histories (default: each chooses)")
    add(
        "--durability", choices=("memory", "auto", "replicas=1"), default="memory",
        help="of the stream; with 'auto' and 'replicas=1' the server has a replica (default: %(default)s)",
    )  # fmt: skip
    add("--segments", action="store_true", help="keep payloads in files, which are used again (theme: segments)")
    add("--chaos", type=int, metavar="SEED", help="run the faults of a seed of the chaos suite, and no other history")
    add("--replay", type=_history, metavar="HISTORY", help="run this history, or the one in this file, and no other")
    return parser


if __name__ == "__main__":
    sys.exit(main())
