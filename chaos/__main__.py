"""Run the chaos suite: ``python -m chaos`` does one run and prints its totals.

The exit code is 1 if anything is wrong. The folder of all logs is kept then.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from chaos.conductor import BrokenOff, Conductor
from chaos.inquest import Findings, hold
from chaos.lives import NODE_TRAINER
from chaos.networks import why_not
from chaos.node_trainer import is_built
from chaos.options import RANKS, Options
from chaos.stage import Stage
from chaos.stored import MINUTES, Stored, chosen

SHOWN = 20
EPILOG = """\
example:
  python -m chaos --minutes 2
  python -m chaos --minutes 20 --seed 7 --partitions 8 --members 5
  python -m chaos --minutes 3 --sample-bytes 10000000
  python -m chaos --networks --minutes 10
  python -m chaos --cluster --minutes 20 --seed 7
  python -m chaos --seeds stored --minutes 0.4
  python -m chaos --seeds 7,61123 --minutes 0.5

The seed decides the data, which samples are bad, and which fault comes when. What a fault hits depends on who is alive
at that moment, so a repeated run is alike, not equal. `chaos/stored.json` holds 20 seeds with their options, and what
each covers: `--seeds` runs all or some of them, one after another, and takes their options from there."""


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every promise held, 1 if not."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.networks and (reason := why_not()):
        parser.error(reason)
    if args.cluster and args.payload != "inline":
        parser.error("--cluster needs --payload inline")
    directory = Path(args.directory or tempfile.mkdtemp(prefix="penstock-chaos-")).absolute()
    if args.seeds is None:
        results = [run(_options(args), directory, is_quiet=args.quiet)]
        print(told(results[0]))
    else:
        results = _stored_runs(args, directory)
    if args.json:
        Path(args.json).write_text(json.dumps(results[0] if args.seeds is None else results, indent=1) + "\n")
    if any(result["violations"] for result in results):
        print(f"all logs are in {directory}")
        return 1
    if not args.directory:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


def _stored_runs(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Do each stored run in a folder of its own, which is removed if nothing is wrong."""
    results = []
    for one in args.seeds:
        print(f"\n{one.covers}:", flush=True)
        folder = directory / str(one.seed)
        results.append(run(one.run_options(args.minutes, args.node), folder, is_quiet=args.quiet))
        print(told(results[-1]), flush=True)
        if not results[-1]["violations"] and not args.directory:
            shutil.rmtree(folder, ignore_errors=True)
    wrong = [str(result["seed"]) for result in results if result["violations"]]
    print(f"\n{len(results)} stored seeds: {'seeds ' + ', '.join(wrong) + ' went wrong' if wrong else 'all well'}")
    return results


def run(options: Options, directory: Path, *, is_quiet: bool = False) -> dict[str, Any]:
    """Do one run, and return what was done, delivered and wrong as values for JSON."""
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "story.log").open("a") as story, ExitStack() as stack:

        def say(text: str) -> None:
            story.write(f"{time.monotonic():.3f} {text}\n")
            story.flush()
            if not is_quiet:
                print(text, flush=True)

        say(f"chaos, seed {options.seed}: {json.dumps(asdict(options))}; logs in {directory}")
        stage = Stage(options, directory)
        stack.callback(stage.close)
        conductor = Conductor(options, directory, stage, say)
        stack.callback(conductor.close)
        findings = Findings()
        try:
            conductor.run()
            findings = hold(options, stage, conductor.cast)
        except BrokenOff as error:
            findings.violations.append(str(error))
    return {
        "seed": options.seed,
        "options": asdict(options),
        "seconds": round(time.monotonic() - began, 1),
        "faults": dict(sorted(conductor.inflictor.counts.items())),
        "ended_by_themselves": dict(sorted(conductor.cast.own_ends.items())),
        "processes": len(conductor.cast.everyone),
        "node_processes": sum(actor.life.role == NODE_TRAINER for actor in conductor.cast.everyone),
        "rounds": conductor.cast.rounds,
        "epochs": findings.epochs,
        "samples": findings.samples,
        "bad": findings.bad,
        "feed_epochs": findings.feed_epochs,
        "feed_samples": findings.feed_samples,
        "groups": {
            verdict.group: {
                "delivered": verdict.delivered,
                "handed_twice": verdict.twice,
                "because": dict(sorted(verdict.reasons.items())),
            }
            for verdict in findings.groups
        },
        "violations": [*conductor.cast.violations, *findings.violations],
    }


def told(result: dict[str, Any]) -> str:
    """Return the totals as text for people."""
    options, ended = result["options"], result["ended_by_themselves"]
    sizes = f"{options['partitions']} partitions, samples of {options['sample_bytes']} bytes"
    crew = f"{options['members']} members a group, {options['node']} of them in Node, {options['workers']} workers"
    made = f"{result['epochs']} epochs with {result['samples']} samples and {result['bad']} bad ones"
    lines = [
        f"seed {result['seed']}: {result['seconds']:.0f} s, {sizes}, {crew}",
        f"faults: {_counted(result['faults'])}",
        f"processes: {result['processes']}, {result['node_processes']} in Node; ended by themselves: {_counted(ended)}",
        f"produced: {made}; a feed of {result['feed_epochs']} epochs with {result['feed_samples']} samples",
    ]
    for name, group in result["groups"].items():
        twice = f"{group['handed_twice']} ({_counted(group['because'])})" if group["handed_twice"] else "0"
        what = "batches " if name == RANKS else ""
        lines.append(f"group {name}: {group['delivered']} {what}delivered, handed twice {twice}")
    violations = result["violations"]
    lines += [f"VIOLATION: {text}" for text in violations[:SHOWN]]
    if len(violations) > SHOWN:
        lines.append(f"VIOLATION: and {len(violations) - SHOWN} more")
    lines.append(f"{len(violations)} violations" if violations else "nothing lost, nothing twice that may not be")
    return "\n".join(lines)


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{what} {count}" for what, count in counts.items()) or "none"


def _stored(which: str) -> list[Stored]:
    try:
        return chosen(which)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _node(text: str) -> int:
    count = int(text)
    if count and not is_built():
        raise argparse.ArgumentTypeError("trainers in Node need the npm package: `make js` builds it")
    return count


def _options(args: argparse.Namespace) -> Options:
    return Options(
        seed=args.seed if args.seed is not None else secrets.randbelow(1_000_000),
        minutes=args.minutes, partitions=args.partitions, sample_bytes=args.sample_bytes, members=args.members,
        node=args.node, groups=args.groups, ranks=args.ranks, workers=args.workers, epoch_samples=args.epoch_samples,
        lease_s=args.lease, pause_s=args.pause, server_kills=not args.no_server_kills, own_queue=args.own_queue,
        patience_s=args.patience, payload=args.payload, networks=args.networks, cluster=args.cluster,
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m chaos", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Options(seed=0, minutes=MINUTES)
    add = parser.add_argument
    add("--minutes", type=float, default=default.minutes, help="of faults (default: %(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, help="default: a random one, printed")
    which.add_argument(
        "--seeds",
        type=_stored,
        metavar="WHICH",
        help="run stored seeds with their options: 'stored' (all), or some, as 7,61123; --minutes is for each",
    )
    add("--partitions", type=int, default=default.partitions, metavar="P", help="default: %(default)s")
    add("--sample-bytes", type=int, default=default.sample_bytes, metavar="B", help="default: %(default)s")
    add("--members", type=int, default=default.members, metavar="M", help="of each group (default: %(default)s)")
    add(
        "--node",
        type=_node,
        default=int(is_built()),
        metavar="N",
        help="members of each group, and ranks, that run in Node (default: 1 if the npm package is built, else 0)",
    )
    add("--groups", type=int, default=default.groups, metavar="G", help="default: %(default)s")
    add(
        "--ranks",
        type=int,
        default=default.ranks,
        metavar="R",
        help="of an ordered group, 0: none (default: 2)",
    )
    add("--payload", choices=("inline", "segments"), default=default.payload, help="default: %(default)s")
    add("--workers", type=int, default=default.workers, metavar="W", help="at least 2 (default: %(default)s)")
    add("--epoch-samples", type=int, default=0, metavar="N", help="default: some seconds of work")
    add("--lease", type=float, default=default.lease_s, metavar="S", help="seconds (default: %(default)s)")
    add("--pause", type=float, default=default.pause_s, metavar="S", help="mean, between faults (default: %(default)s)")
    add("--patience", type=float, default=default.patience_s, metavar="S", help="standstill that counts as a hang")
    add("--no-server-kills", action="store_true", help="leave the server alone")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--networks", action="store_true", help="processes on hosts of their own, with faulty links")
    where.add_argument("--cluster", action="store_true", help="streams on three masters with a replica each")
    add("--own-queue", action="store_true", help="jobs on a second server, which is left alone")
    add("--directory", metavar="DIR", help="for all logs, which are then kept (default: a new one)")
    add("--json", metavar="FILE", help="the totals for programs")
    add("--quiet", action="store_true", help="totals only")
    return parser


if __name__ == "__main__":
    sys.exit(main())
