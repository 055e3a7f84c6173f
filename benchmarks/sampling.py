"""The purposes of a running process's CPU time, by the tools of this machine: py-spy for Python, perf for all else.

Samples become counts. Python lines are counted by their module, all else by the work of a symbol's library. A missing
tool, or one that may not examine other processes, raises a message for the user.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PER_SECOND = 400
START_S = 1.0
"""The time in which a sampler finds a waiting process."""
END_S = 30.0
"""The time in which it writes its results."""
PTRACE = "run this as root, or with sysctl kernel.yama.ptrace_scope=0; in a container with --cap-add SYS_PTRACE"
PARANOID = "run this as root, or with sysctl kernel.perf_event_paranoid=1; in a container with --cap-add PERFMON"
OURS = "penstock"
NAMES = {"redis": "redis-py", "hiredis": "redis-py", "numpy": "numpy", "benchmarks": "the benchmark"}
"""First part of a module's name -> the name that is shown. Penstock's modules are shown separately, and the rest is
Python's.
"""
COPIED_BY_KERNEL = re.compile(r"copy_(user|to_iter|from_iter|page)|copyin|copyout|rep_movs|_copy_|memcpy")
PAGES = re.compile(r"clear_page|page_fault|handle_mm|do_anonymous|shmem_|zap_|unmap_|alloc_pages|free_(unref_)?page")
COPIED = re.compile(r"mem(cpy|move|set)|^0x0*$")
PERF_LINE = re.compile(r"^\s*(\d+)\s+[0-9a-f]+\s+(.+?)\s+\((.+)\)\s*$")


class Unsampled(Exception):
    """A tool cannot be used here. The message says what to do."""


def tool(name: str) -> str | None:
    """Return a tool next to this interpreter, or on PATH."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@contextmanager
def python_lines(pids: Iterable[int]) -> Iterator[dict[int, Counter[str]]]:
    """Fill process -> module -> samples when the block ends, by the innermost Python line that holds the GIL.

    Sockets, and copies and checksums of large data, run without it. Raises Unsampled.
    """
    if (program := tool("py-spy")) is None:
        raise Unsampled("no py-spy, so Python lines are left out: pip install py-spy, or pip install -e '.[dev]'")
    found: dict[int, Counter[str]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        files = {pid: folder / str(pid) for pid in pids}
        asked = [program, "record", "--gil", "--format", "raw", "--rate", str(PER_SECOND)]
        running = [
            stack.enter_context(_Sampler([*asked, "--pid", str(pid), "--output", str(file)], PTRACE))
            for pid, file in files.items()
        ]
        for one in running:
            one.begin()
        yield found
        for one, file in zip(running, files.values(), strict=True):
            one.end(file)
        found.update({pid: by_module(file.read_text()) for pid, file in files.items()})


@contextmanager
def symbols(pids: Iterable[int]) -> Iterator[dict[int, Counter[str]]]:
    """Fill process -> purpose -> samples when the block ends. Raises Unsampled."""
    if (program := tool("perf")) is None:
        raise Unsampled(
            "no perf, so kernel, interpreter, copies and checksums are left out: apt-get install linux-perf"
        )
    found: dict[int, Counter[str]] = {}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))) / "perf.data"
        listed = ",".join(map(str, pids))
        command = [program, "record", "-e", "cpu-clock", "-F", str(PER_SECOND), "-p", listed, "-o", str(file)]
        one = stack.enter_context(_Sampler(command, PARANOID))
        one.begin()
        yield found
        one.end(file)
        told = [program, "script", "-i", str(file), "-F", "pid,ip,sym,dso"]
        done = subprocess.run(told, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unsampled(f"perf cannot read what it wrote: {done.stderr.strip()}")
        found.update(by_purpose(done.stdout))


class _Sampler:
    """A process that samples until it is interrupted."""

    def __init__(self, command: list[str], remedy: str) -> None:
        self._name, self._remedy = Path(command[0]).name, remedy
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by `__exit__`
        self._popen = subprocess.Popen(command, stdout=self._words, stderr=self._words)

    def __enter__(self) -> _Sampler:
        return self

    def __exit__(self, *_: object) -> None:
        self._popen.kill()
        self._popen.wait()
        self._words.close()

    def begin(self) -> None:
        """Return once it samples. Raises Unsampled if it ends instead."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(START_S)
            self._fail()

    def end(self, file: Path) -> None:
        """Interrupt it, so that it writes its results. Raises Unsampled if there are none."""
        self._popen.send_signal(signal.SIGINT)
        self._popen.wait(END_S)
        if not file.exists():
            self._fail()

    def _fail(self) -> None:
        self._words.seek(0)
        lines = [line.strip() for line in self._words.read().splitlines() if line.strip()]
        raise Unsampled(
            f"{self._name} cannot look at the processes: {' '.join(lines) or 'no reason given'}\n{self._remedy}"
        )


def by_module(raw: str) -> Counter[str]:
    """Count py-spy's raw form by module: ``outer (file:line);inner (file:line) samples`` a line."""
    found: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        found[_module(stack.rpartition(";")[2])] += int(count)
    return found


def _module(frame: str) -> str:
    """Return the module of Penstock's code, or the library of other code."""
    path = frame.rpartition("(")[2].rpartition(":")[0].removesuffix(".py").replace("\\", "/")
    first = path.split("/")[0]
    if first.startswith(OURS):
        return path.replace("/", ".")
    return NAMES.get(first, "Python's library")


def by_purpose(script: str) -> dict[int, Counter[str]]:
    """Count the output of ``perf script -F pid,ip,sym,dso``: process -> purpose -> samples."""
    found: dict[int, Counter[str]] = {}
    for line in script.splitlines():
        if (matched := PERF_LINE.match(line)) is not None:
            pid, symbol, library = matched.groups()
            found.setdefault(int(pid), Counter())[purpose(symbol, library)] += 1
    return found


def purpose(symbol: str, library: str) -> str:
    """Return the purpose of a function, by its library first."""
    name = Path(library.split(maxsplit=1)[0]).name
    # 1. the kernel, in three parts
    if name.startswith("[k") or library.endswith(".ko"):
        if COPIED_BY_KERNEL.search(symbol):
            return "kernel: copying"
        return "kernel: pages" if PAGES.search(symbol) else "kernel: the rest"
    # 2. libraries with a single purpose
    for part, what in (("xxhash", "xxh3"), ("numpy", "numpy"), ("hiredis", "hiredis"), ("jemalloc", "allocator")):
        if part in library:
            return what
    if re.match(r"(redis|valkey)-", name) or name.startswith("liblua"):
        return "server's own code"
    # 3. copies and checksums are in the C library; all else is the interpreter and its callees
    if name.startswith(("libc.", "libc-")):
        return "libc: copying" if COPIED.search(symbol) else "libc: the rest"
    return "interpreter" if "python" in name or "lib-dynload" in library else "other"


def shares(counts: Counter[str]) -> dict[str, float]:
    """Return the counts in percent, the largest first."""
    whole = counts.total() or 1
    return {name: 100 * count / whole for name, count in counts.most_common()}
