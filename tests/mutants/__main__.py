"""Mutation check: ``python -m tests.mutants --count 100 --seed 0``, or ``make mutants``.

It makes small faults (mutants) in the scripts and in the code that commits, acknowledges, retains, reclaims and orders,
one at a time, and runs the tests that use the changed function. A mutant that no test notices survives. It gets a
test, or a reason in ``reasons.toml`` why it changes nothing that a promise speaks of.

The checkout is not changed: each worker has a copy. First the tests run once and record what each of them uses, which
takes minutes. Later runs record only test files that changed. ``build/mutants/`` keeps the record and the results.

Mutmut and Cosmic Ray mutate only Python, and run tests that a user lists or those of the whole project. One small tool
does both languages here and runs the tests of one function.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, NamedTuple

from tests.mutants.mutator import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
STATE = ROOT / "build/mutants"
RECORDED = ("tests/common", "tests/producer", "tests/consumer", "tests/journeys")
JOURNEYS = (
    "damaged_keys", "delete", "exactly_once", "feed_rollback", "in_place", "lost_slots", "lost_tail", "replay_running",
    "rights_taken", "segments_trouble", "server_lost", "torn",
)  # fmt: skip
"""The journeys that are recorded. They break connections and servers, in one process and within seconds."""
LEFT_OUT = {"adapters", "sources", "views"}
"""Folders of tests of other code, which take minutes because they import frameworks."""
WRITE, READ = "producer/penstock_producer/write", "consumer/penstock_consumer/read"
GROUPS = "common/penstock_common/stream/groups"
TARGETS = [
    *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("common/penstock_common/server/scripts/*.lua")),
    *(f"{WRITE}/{name}.py" for name in ("commit", "target", "shard", "retention", "trimmer", "completion")),
    *(f"{GROUPS}/{name}.py" for name in ("ledger", "positions", "roster", "outbox")),
    *(f"{READ}/{name}.py" for name in ("ack", "leases", "shared", "claims", "canonical", "ordered", "fetch_plan")),
]
BATCH = 8
"""Test files that are recorded by one pytest."""
FIRST = 12
"""The first tests, which run on their own: most mutants go no further."""
MOST_S = 60.0
"""Tests that take longer together are left out; see `chosen`."""
PLAIN = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")


@dataclass
class Result:
    """The result of one mutant."""

    name: str
    file: str
    line: int
    before: str
    after: str
    outcome: str = ""
    """``killed``, ``timeout``, ``reasoned`` or ``survived``."""
    by: str = ""
    """The test that failed, or the reason."""
    tests: int = 0
    """The number of tests that were run."""


class RecordedTest(NamedTuple):
    """A test, and how much of the code it runs."""

    seconds: float
    name: str
    size: int
    """The number of scripts, functions and lines that it runs."""


def chosen(tests: Collection[RecordedTest], module: str = "", most_s: float = MOST_S) -> list[RecordedTest]:
    """Return the tests that fit ``most_s``, in the order in which they run.

    Tests that were written for the line are likely to notice. Half of the time is for those of files that import its
    module, a quarter for those that run the least other code, and the rest for the quickest.
    """
    within: dict[str, RecordedTest] = {}
    parts: list[tuple[float, list[RecordedTest]]] = [
        (0.5, sorted((test for test in tests if module and _names(test, module)), key=lambda test: (test.size, test))),
        (0.75, sorted(tests, key=lambda test: (test.size, test))),
        (1.0, sorted(tests)),
    ]
    for share, ordered in parts:
        left_s = share * most_s - sum(test.seconds for test in within.values())
        for test in ordered:
            if test.name not in within and test.seconds <= left_s:
                left_s -= test.seconds
                within[test.name] = test
    return list(within.values())


def _names(test: RecordedTest, module: str) -> bool:
    return module in _text(test.name.partition("::")[0])


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Uses:
    """The tests that use each script, function or line."""

    tests: dict[str, list[RecordedTest]]

    def of(self, mutant: Mutant) -> list[RecordedTest]:
        """Return the tests that run the changed lines.

        If no test is known to, those of the function. Code outside of functions has those of the file.
        """
        function = f"{mutant.path}::{mutant.function}"
        if mutant.path.endswith(".lua"):
            return self._of([mutant.path])
        if not mutant.function:
            return self._of([name for name in self.tests if name.startswith(function)])
        return self._of([f"{function}::{line}" for line in mutant.lines]) or self._of([function])

    def _of(self, names: list[str]) -> list[RecordedTest]:
        return sorted({test for name in names for test in self.tests.get(name, ())})


def main() -> None:
    """Make mutants, test them, and print those that survive."""
    given = _arguments()
    STATE.mkdir(parents=True, exist_ok=True)
    uses = _uses(given.no_record, given.workers)
    found = [mutant for path in TARGETS if not given.only or given.only in path for mutant in mutants_of(ROOT, path)]
    sample = Random(given.seed).sample(found, min(given.count, len(found)))
    json_file = given.json or STATE / "results.json"
    old = {one["name"]: one for one in json.loads(json_file.read_text())} if given.resume and json_file.exists() else {}
    reasons = load_reasons()
    results: list[Result] = []

    def finish(result: Result) -> None:
        results.append(result)
        json_file.write_text(json.dumps([asdict(one) for one in results], indent=1))
        print(f"{len(results)}/{len(sample)} {result.outcome}: {result.file}:{result.line}", flush=True)

    pending = []
    for mutant in sample:
        known, reason = old.get(mutant.name), reason_of(mutant, reasons)
        if known and known["outcome"] in ("killed", "timeout"):
            finish(Result(**known))
        elif reason:
            finish(_result(mutant, "reasoned", reason))
        else:
            pending.append(mutant)
    with tempfile.TemporaryDirectory(prefix="penstock-mutants-") as folder:
        runners = [Runner(_copy(Path(folder) / str(number))) for number in range(given.workers)]
        free: SimpleQueue[Runner] = SimpleQueue()
        for runner in runners:
            free.put(runner)

        def test(mutant: Mutant) -> Result:
            runner = free.get()
            try:
                return _test(runner, mutant, chosen(uses.of(mutant), mutant.module, given.seconds))
            finally:
                free.put(runner)

        with ThreadPoolExecutor(given.workers) as pool:
            for done in as_completed([pool.submit(test, mutant) for mutant in pending]):
                finish(done.result())
        for runner in runners:
            runner.close()
    _report(results)
    sys.exit(any(one.outcome == "survived" for one in results))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Mutation check.")
    parser.add_argument("--count", type=int, default=100, help="how many mutants (100)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (0)")
    parser.add_argument("--only", metavar="TEXT", help="only files whose path contains this")
    parser.add_argument("--workers", type=int, default=2, help="how many mutants at the same time (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where results go (build/mutants/results.json)")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="how long the tests of one may take (60)")
    parser.add_argument("--resume", action="store_true", help="keep what FILE says of killed mutants")
    parser.add_argument("--no-record", action="store_true", help="use the last record of the tests as it is")
    return parser.parse_args()


def _uses(is_known: bool, workers: int) -> Uses:
    """Record the tests whose files changed since the last record."""
    path = STATE / "uses.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    files = {
        str(file.relative_to(ROOT)): hashlib.sha256(repr(TARGETS).encode() + file.read_bytes()).hexdigest()
        for folder in RECORDED
        for file in sorted((ROOT / folder).rglob("test_*.py"))
        if file.parent.name not in LEFT_OUT
        and (folder != "tests/journeys" or file.stem.removeprefix("test_") in JOURNEYS)
    }
    record = {name: one for name, one in record.items() if name in files}
    stale = [name for name, digest in files.items() if record.get(name, {}).get("digest") != digest]
    batches = [] if is_known else [stale[at : at + BATCH] for at in range(0, len(stale), BATCH)]
    with ThreadPoolExecutor(workers) as pool:
        for number, (names, found) in enumerate(zip(batches, pool.map(_record, batches), strict=True), 1):
            print(f"recorded {number}/{len(batches)} times {BATCH} test files", flush=True)
            for name in names:
                tests = {test: used for test, used in found.items() if test.startswith(f"{name}::")}
                record[name] = {"digest": files[name], "tests": tests}
            path.write_text(json.dumps(record))
    by_name: dict[str, list[RecordedTest]] = {}
    for one in record.values():
        for test, (seconds, used) in one["tests"].items():
            for name in used:
                by_name.setdefault(name, []).append(RecordedTest(seconds, test, len(used)))
    return Uses(by_name)


def _record(names: list[str]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        environment = _environment(ROOT) | {"PENSTOCK_MUTANTS_RECORD": file.name}
        plugin = ("-p", "tests.mutants.recorder", "-m", "not slow")
        line = [sys.executable, "-m", "pytest", *PLAIN, *plugin, *names]
        subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False, timeout=900)
        text = Path(file.name).read_text()
    return json.loads(text) if text else {}


def load_reasons() -> list[dict[str, str]]:
    """Return the mutants that may survive: ``file``, ``before``, ``after`` and ``why``. Without a file, any.

    A ``constant`` in place of ``before`` and ``after`` has one reason for every change of its number.
    """
    loaded: list[dict[str, str]] = tomllib.loads((HERE / "reasons.toml").read_text())["mutant"]
    return loaded


def reason_of(mutant: Mutant, reasons: list[dict[str, str]]) -> str:
    """Return why a mutant may survive, or an empty text."""
    for reason in reasons:
        if "constant" in reason:
            is_it = not mutant.function and mutant.before.startswith(f"{reason['constant']} = ")
        else:
            is_it = (mutant.before, mutant.after) == (reason["before"], reason["after"])
        if is_it and mutant.path.endswith(reason.get("file", "")):
            return reason["why"]
    return ""


def _copy(folder: Path) -> Path:
    """Copy the working tree. Compiled files in the copy are checked by content, because a mutant changes no size."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)
    compiled = ("common", "producer", "consumer", "front")
    line = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *compiled]
    subprocess.run(line, cwd=folder, check=True)
    return folder


def _environment(root: Path) -> dict[str, str]:
    path = os.pathsep.join(str(root / name) for name in ("common", "producer", "consumer", "front", "."))
    return os.environ | {"PYTHONPATH": path, "PENSTOCK_TEST_ONE_SERVER": "1"}


def _test(runner: Runner, mutant: Mutant, tests: list[RecordedTest]) -> Result:
    file = runner.root / mutant.path
    original = file.read_text(encoding="utf-8")
    file.write_text(mutant.text(original), encoding="utf-8")
    try:
        result = _result(mutant, "survived", "", len(tests))
        for part in filter(None, (tests[:FIRST], tests[FIRST:])):
            limit_s = 30 + 3 * sum(test.seconds for test in part)
            names = [test.name for test in part]
            result.outcome, result.by = runner.run(["-x", *names], limit_s)
            if result.outcome != "survived":
                break
        return result
    finally:
        file.write_text(original, encoding="utf-8")


class Runner:
    """A copy of the checkout, and a process in it that runs tests in forks of itself.

    It has imported pytest and the packages that mutants do not change, which takes longer than most tests.
    """

    def __init__(self, root: Path) -> None:
        """Start the process in a copy."""
        self.root = root
        line = [sys.executable, "-m", "tests.mutants.runner"]
        self._process = subprocess.Popen(
            line, cwd=root, env=_environment(root), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def run(self, arguments: list[str], limit_s: float) -> tuple[str, str]:
        """Run tests, and return the outcome for a mutant and the test that failed."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([[*PLAIN, "--tb=no", *arguments], limit_s]), file=self._process.stdin, flush=True)
        code, lines = json.loads(self._process.stdout.readline())
        if code is None:
            return "timeout", f"no end in {limit_s:.0f} s"
        if code == 0:
            return "survived", ""
        failed = [line.split(" - ")[0].partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        if code in (4, 5) and not failed:
            raise SystemExit("\n".join(["pytest found no tests, so the record in build/mutants is old:", *lines[-3:]]))
        return "killed", failed[0] if failed else "\n".join(lines[-3:])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _result(mutant: Mutant, outcome: str, by: str, tests: int = 0) -> Result:
    return Result(mutant.name, mutant.path, mutant.line, mutant.before, mutant.after, outcome, by, tests)


def _report(results: list[Result]) -> None:
    counts = {outcome: sum(one.outcome == outcome for one in results) for outcome in ("killed", "timeout", "reasoned")}
    for one in results:
        if one.outcome == "survived":
            print(f"\n{one.file}:{one.line} survived {one.tests} tests\n  - {one.before}\n  + {one.after}")
    print(f"\n{len(results)} mutants: " + ", ".join(f"{count} {name}" for name, count in counts.items()), end="")
    print(f", {len(results) - sum(counts.values())} survived, at {time.strftime('%H:%M')}")


if __name__ == "__main__":
    main()
