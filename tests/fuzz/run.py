"""Coverage-guided fuzzing: ``python -m tests.fuzz.run TARGET SECONDS``, or ``make fuzz TARGET=resp SECONDS=600``. It
starts from the corpus, and ends with a smaller one of the same coverage. An input that broke a promise is kept as
``crash-*``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha1
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random

HERE = Path(__file__).parent
TARGETS = {"decoder": "tests.fuzz.decoder", "resp": "tests.fuzz.replies"}
MEMORY_BYTES = 1 << 30
"""The address space beyond that in use before the first input. No claim of an entry may need it."""
MOST_BYTES = {"decoder": 8192, "resp": 2048}

Mutator = Callable[[bytes, int, int], bytes]


def main() -> None:
    """Run libFuzzer in children: one that searches, and one that merges the corpus."""
    if sys.argv[1] == "--child":
        _child(sys.argv[2], sys.argv[3:])
        return
    target, seconds = sys.argv[1], sys.argv[2]
    if target == "model":
        _walk(float(seconds))
        return
    if target not in TARGETS:
        sys.exit(f"TARGET is {target!r}, expected one of {', '.join([*TARGETS, 'model'])}")
    if find_spec("atheris") is None:
        sys.exit("atheris is not installed: its wheels lag behind new Pythons: take an older one, or TARGET=model")
    corpus = HERE / "corpus" / target
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as found:
        for data in _seeds(target):
            (Path(found) / sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
        options = [f"-max_total_time={seconds}", f"-max_len={MOST_BYTES[target]}", "-timeout=20", "-rss_limit_mb=3000"]
        prefix = f"-artifact_prefix={corpus}/"
        ended = _run(target, [*options, prefix, "-print_final_stats=1", found, str(corpus)])
        with tempfile.TemporaryDirectory() as small:
            _run(target, ["-merge=1", f"-max_len={MOST_BYTES[target]}", small, str(corpus), found])
            _replace(corpus, Path(small), {sha1(data, usedforsecurity=False).hexdigest() for data in _seeds(target)})
    sys.exit(ended)


def _walk(seconds: float) -> None:
    """Walk at random, compared with the model, until the time is over or a promise breaks.

    Hypothesis prints it, shortened.
    """
    from hypothesis import HealthCheck, settings
    from hypothesis.stateful import run_state_machine_as_test

    from penstock_common.stream.servers.embedded import EmbeddedServer
    from tests.fuzz.machine import Machine

    ends, walks = time.monotonic() + seconds, 0
    with EmbeddedServer() as server:
        Machine.url = server.url
        while time.monotonic() < ends:
            options = settings(
                max_examples=20, stateful_step_count=60, deadline=None, database=None, print_blob=True,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            run_state_machine_as_test(Machine, settings=options)
            walks += 20
    print(f"{walks} walks, {Machine.steps}: nothing that the model does not say")


def _run(target: str, arguments: list[str]) -> int:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--child", target, *arguments], check=False
    ).returncode


def _replace(corpus: Path, merged: Path, seeds: set[str]) -> None:
    """Replace the corpus by the merged one, without inputs that the code makes itself. Crashes stay for ever."""
    if not any(merged.iterdir()):
        sys.exit("nothing was merged: the corpus stays as it was")
    for old in corpus.iterdir():
        if not old.name.startswith("crash-"):
            old.unlink()
    for new in (path for path in merged.iterdir() if path.name not in seeds):
        (corpus / new.name).write_bytes(new.read_bytes())


def _seeds(target: str) -> list[bytes]:
    if target == "decoder":
        from tests.fuzz.entries import golden_entries, packed

        return [packed(entry) for entry in golden_entries()]
    found: list[bytes] = import_module(TARGETS[target]).seeds()
    return found


def _child(target: str, arguments: list[str]) -> None:
    import atheris

    with atheris.instrument_imports(include=["penstock_common", "penstock_consumer", "tests.fuzz"]):
        harness = import_module(TARGETS[target])
    mutator = _entry_mutator() if target == "decoder" else _token_mutator(harness.TOKENS)
    limits = harness.small_limits() if target == "resp" else nullcontext()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    if "-merge=1" not in arguments:
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    # a merge starts itself again, by a shell and what it takes for its own name
    atheris.Setup(
        [f"{sys.executable} -m tests.fuzz.run --child {target}", *arguments], harness.check, custom_mutator=mutator
    )
    with limits:
        atheris.Fuzz()


def _entry_mutator() -> Mutator:
    import atheris

    from tests.fuzz.entries import packed, unpacked
    from tests.fuzz.making import damaged

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.1:
            return bytes(atheris.Mutate(data, most))
        entry = unpacked(data)
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            entry = damaged(entry, random, lambda part, size: bytes(atheris.Mutate(part, size)))
        return packed(entry)[:most]

    return mutate


def _token_mutator(tokens: list[bytes]) -> Mutator:
    import atheris

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        random = Random(seed)
        if random.random() < 0.6:
            return bytes(atheris.Mutate(data, most))
        at = random.randrange(len(data) + 1)
        token = random.choice([*tokens, data[at : at + random.randrange(80)]])
        where = random.randrange(len(data) + 1)
        return (data[:where] + token + data[where + random.choice([0, 0, 1, len(token)]) :])[:most]

    return mutate


if __name__ == "__main__":
    main()
