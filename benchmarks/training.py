"""``python -m benchmarks.training``: how long a training waits for its batches, with each feed.

A small convolutional network learns digits behind a Python transform of 5 ms a sample, for the same number of steps
each. It is fed by Penstock, by torch's DataLoader with 0, 1 and 2 worker processes, and from memory (synthetic, the
upper limit). A trainer computes on one core. With ``--transform compute`` the transform needs a core, too, which few
cores take from the training. ``at most`` is what the cores allow if none is ever idle, by the CPU time of a step alone
and of the transform in the cheapest DataLoader. With ``--transform io`` it sleeps, as one that waits for a disk or a
service. Several trainers read one stream, or have a DataLoader with one worker each. Rounds of all feeds alternate.
Ratios are of neighbouring rounds, and mean little if a feed had fewer ``cores`` than it needed because other programs
used them. The learning must not depend on the feed: ``right`` is the share of held-out digits that are classified
correctly.

``--device cuda`` trains ResNet-50 on 224 x 224, with batches copied ahead. The target is 0.97x of synthetic. No GPU was
available for it, so it has not been run on one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.allowance import Allowance, Piece
from benchmarks.digits import SETTINGS, TRANSFORM_S, count_turns
from benchmarks.machine import describe_machine, progress
from benchmarks.training_sides import Lesson, Round, run_round

SYNTHETIC = "synthetic"
MINUTES = 3.7


def main() -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each feed, if there is time (default 3)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"at most about so long (default {MINUTES:g})")
    parser.add_argument("--steps", type=int, default=24, help="of each trainer in each round (default 24)")
    parser.add_argument("--batch", type=int, default=32, help="samples a step (default 32)")
    parser.add_argument("--workers", type=int, default=2, help="of Penstock, and of the largest DataLoader (default 2)")
    parser.add_argument("--trainers", type=int, nargs="+", default=[1, 2], help="how many at once (default 1 2)")
    parser.add_argument("--transform", choices=("compute", "io"), default="compute", help="what 5 ms are spent on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model is (default cpu)")
    parser.add_argument("--json", type=Path, help="write every figure of every round to this file")
    args = parser.parse_args()
    began = time.monotonic()
    if args.device == "cuda" and not _has_gpu():
        parser.error("torch sees no GPU here: run it where `nvidia-smi` lists one, or leave out --device cuda")
    model = "resnet50" if args.device == "cuda" else "cnn"
    side, channels = (224, 3) if model == "resnet50" else (32, 1)
    turns = count_turns() if args.transform == "compute" else 0
    os.environ[SETTINGS] = f"{args.steps * args.batch} {side} {channels} {turns}"
    environment = describe_machine() | {"torch": version("torch"), "device": args.device, "model": model}
    print(", ".join(f"{name} {value}" for name, value in environment.items()))
    print(f"\ntransform: {args.transform}, {1000 * TRANSFORM_S:g} ms a sample; {args.steps} steps of {args.batch};")
    print(f"median (lowest-highest) of up to {args.rounds} interleaved rounds\n", flush=True)
    measures = [_lessons(args, count, model) for count in args.trainers]
    allowance, results = Allowance(60 * args.minutes, [float(len(lessons)) for lessons in measures]), []
    for lessons in measures:
        results.append(_measure(lessons, args, allowance.piece()))
        if args.json:
            whole = {"environment": environment, "settings": _plain(args), "measures": results}
            args.json.write_text(json.dumps(whole, indent=1))
    print(f"figures of every round: {args.json}" if args.json else "", f"done after {time.monotonic() - began:.0f} s")
    return 0


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _lessons(args: argparse.Namespace, trainers: int, model: str) -> dict[str, Lesson]:
    """Return every feed by name.

    Several trainers have a DataLoader with one worker each, because more would slow them down.
    """

    def lesson(feed: str, workers: int) -> Lesson:
        return Lesson(feed, workers, trainers, args.batch, args.device, model)

    def workers(count: int) -> str:
        return f"{count} worker{'s' * (count != 1)}{' each' * (trainers > 1)}" if count else "in the training process"

    loaders = sorted({0, 1, args.workers}) if trainers == 1 else [1]
    shared = ", shared" * (trainers > 1)
    return {
        SYNTHETIC: lesson(SYNTHETIC, 0),
        f"Penstock, {args.workers} workers{shared}": lesson("penstock", args.workers),
        **{f"DataLoader, {workers(count)}": lesson("torch", count) for count in loaders},
    }


def _measure(lessons: dict[str, Lesson], args: argparse.Namespace, piece: Piece) -> dict[str, Any]:
    trainers = lessons[SYNTHETIC].trainers
    taken: dict[str, list[Round]] = {name: [] for name in lessons}
    for number in range(args.rounds):
        if not piece.has_room_for(number):
            break
        for name in list(lessons) if number % 2 else reversed(lessons):
            progress(f"{trainers} trainer{'s' * (trainers > 1)}, round {number + 1} of {args.rounds}: {name}")
            taken[name].append(run_round(lessons[name]))
    progress("")
    count = len(taken[SYNTHETIC])
    print(f"**{trainers} trainer{'s' if trainers > 1 else ''}, {count} round{'s' if count > 1 else ''}**\n")
    print("| feed | of synthetic | at most | waits | steps/s | CPU ms a step | cores | right | by |\n|" + "---|" * 9)
    step_s, made_s = _step_s(taken[SYNTHETIC]), float(args.batch * TRANSFORM_S)
    is_computing = args.transform == "compute"
    if is_computing:  # measured next to a training, because the speed of cores varies
        made_s = min(_step_s(taken[name]) for name, one in lessons.items() if one.feed == "torch") - step_s
    for name, rounds in taken.items():
        _print_feed(name, rounds, taken[SYNTHETIC], _at_most(lessons[name], step_s, made_s, is_computing))
    print(flush=True)
    return {"trainers": trainers, "rounds": {name: [asdict(one) for one in rounds] for name, rounds in taken.items()}}


def _step_s(rounds: Sequence[Round]) -> float:
    """Return the CPU seconds of all processes for a step."""
    return statistics.median([sum(one.cpu_s.values()) / one.steps for one in rounds])


def _at_most(lesson: Lesson, step_s: float, made_s: float, is_computing: bool) -> float | None:
    """Return the limit of these cores relative to the synthetic feed, or None if the model is not on them.

    ``step_s`` is the CPU time of a step alone, ``made_s`` that of the transform of its samples.
    """
    if lesson.device != "cpu":
        return None
    cores, trainers = len(os.sched_getaffinity(0)), lesson.trainers
    alone = max(step_s, trainers * step_s / cores)
    if lesson.feed == SYNTHETIC:
        return 1.0
    if lesson.feed == "torch" and not lesson.workers:
        return alone / (step_s + made_s)
    # a feed makes each batch once, or once for each trainer, with this number of workers
    times = 1 if lesson.feed == "penstock" else trainers
    workers = lesson.workers if lesson.feed == "penstock" else lesson.workers * trainers
    on_cores = trainers * step_s + (times * made_s if is_computing else 0.0)
    return alone / max(step_s, on_cores / cores, times * made_s / workers)


def _print_feed(name: str, rounds: list[Round], synthetic: list[Round], at_most: float | None) -> None:
    relative = [one.rate / other.rate for one, other in zip(rounds, synthetic, strict=True)]
    roles = ", ".join(
        f"{role} {statistics.median([1000 * one.cpu_s[role] / one.steps for one in rounds]):.0f}"
        for role in rounds[0].cpu_s
    )
    cells = [
        name,
        _spread(relative),
        "" if at_most is None else f"{at_most:.2f}",
        _spread([100 * one.stalled for one in rounds], " %", 0),
        _spread([one.rate for one in rounds], ""),
        f"{statistics.median([1000 * sum(one.cpu_s.values()) / one.steps for one in rounds]):.0f}",
        f"{statistics.median([one.cores for one in rounds]):.1f}",
        f"{100 * statistics.median([one.right for one in rounds]):.0f} %",
        roles,
    ]
    print(f"| {' | '.join(cells)} |")


def _spread(values: list[float], unit: str = "x", digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f}{unit} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name != "json"}


if __name__ == "__main__":
    sys.exit(main())
