"""Samples that are lost, repeated or skipped when processes die: ``python -m benchmarks.correctness``.

Penstock and its peers get the same samples, the same space between producer and trainer, and SIGKILL at the same
places. The bytes of a sample prove which one it is. There are four questions:

- producer killed: twice, and started again each time
- trainer killed: in a step. Others of its group take over, or it is started again
- one slowed: one of two trainers takes four times as long for a step
- resumed: killed between two checkpoints, and started again from the last one. Later steps are undone

``lost`` counts samples that were never trained on. ``again`` counts repeated trainings on a sample. Those that a crash
excuses are in brackets: the killed trainer's last 8 steps, whose acknowledgements may have been under way.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.counting import Stuck
from benchmarks.machine import describe_machine, progress
from benchmarks.peers.catalogue import EVERYONE, PENSTOCK, QUESTIONS, RESUME, SLOW, Peer
from benchmarks.peers.environments import Unavailable, python_of
from benchmarks.scenarios import ASK, Answer, Size


def main() -> int:
    """Run the command. Return 1 if Penstock broke a promise."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.correctness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--samples", type=int, default=Size.samples, help="of an epoch (default: %(default)s)")
    parser.add_argument("--only", default="", help="systems whose name contains this, such as 'Penstock'")
    parser.add_argument("--question", default="", help="questions that contain this, such as 'resumed'")
    parser.add_argument("--json", type=Path, help="write every count to this file")
    args = parser.parse_args()
    size = Size(args.samples)
    print(", ".join(f"{name} {value}" for name, value in describe_machine().items()))
    print(f"{size.samples} samples, batches of {size.batch}, room for {size.room}, a checkpoint each 10 steps\n")
    print(f"| | {' | '.join(QUESTIONS)} | first batch on resume | steps, max - min |\n|{'---|' * (len(QUESTIONS) + 3)}")
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for peer in EVERYONE:
        if args.only.lower() not in peer.name.lower():
            continue
        found = asked(peer, size, args.question)
        results.append({"name": peer.name, "answers": {key: _plain(value) for key, value in found.items()}})
        print(row(peer, found), flush=True)
        notes += [f"{peer.name}, {question}: {_note(one)}" for question, one in found.items() if _note(one)]
    print("\n" + "\n".join(f"- {note}" for note in notes))
    if args.json:
        whole = {"environment": describe_machine(), "size": asdict(size), "systems": results}
        args.json.write_text(json.dumps(whole, indent=1))
    return int(any(is_broken(one) for result in results if _is_ours(result) for one in result["answers"].values()))


def asked(peer: Peer, size: Size, question: str = "") -> dict[str, Answer | str]:
    """Return question -> answer, or the reason why there is none."""
    try:
        python_of(peer.environment)
    except Unavailable as reason:
        return dict.fromkeys(QUESTIONS, f"not here: {reason}")
    found: dict[str, Answer | str] = {}
    for name in QUESTIONS:
        if question not in name:
            continue
        progress(f"{peer.name}: {name}")
        if name in peer.reasons:
            found[name] = f"n/a: {peer.reasons[name]}"
            continue
        try:
            found[name] = ASK[name](peer, size)
        except Stuck as error:
            found[name] = f"stuck: {error}"
    progress("")
    return found


def row(peer: Peer, found: dict[str, Answer | str]) -> str:
    """Return one line of the table."""
    cells = [_cell(found.get(name, "")) for name in QUESTIONS]
    resumed, slowed = found.get(RESUME), found.get(SLOW)
    seconds = "n/a"
    if isinstance(resumed, Answer) and resumed.first_batch_s is not None:
        seconds = f"{resumed.first_batch_s:.2f} s ({resumed.with_imports_s:.1f} with imports)"
    steps = "n/a"
    if isinstance(slowed, Answer) and slowed.steps:
        steps = str(max(slowed.steps) - min(slowed.steps))
    return f"| {peer.name} | {' | '.join(cells)} | {seconds} | {steps} |"


def _cell(found: Answer | str) -> str:
    if isinstance(found, str):
        return found.split(":")[0]
    count = found.count
    excused = count.twice - count.beyond
    text = f"lost {count.lost}, again {count.beyond}"
    text += f" (+{excused})" if excused else ""
    return text + (f", damaged {count.damaged}" if count.damaged else "")


def _note(found: Answer | str) -> str:
    return found if isinstance(found, str) else found.note


def _plain(found: Answer | str) -> Any:
    return found if isinstance(found, str) else asdict(found)


def _is_ours(result: dict[str, Any]) -> bool:
    return result["name"] in {peer.name for peer in PENSTOCK}


def is_broken(found: Any) -> bool:
    """Return whether an answer of Penstock differs from what docs/guarantees.md promises."""
    if isinstance(found, str):
        return True
    count, steps = found["count"], found["steps"]
    return bool(count["lost"] or count["beyond"] or count["damaged"] or (steps and max(steps) - min(steps)))


if __name__ == "__main__":
    sys.exit(main())
