"""The spec of a source's first good sample. A process of its own makes it, so that a crash ends no command.

Workers find out which samples are always bad. Here they are only skipped.
"""

from __future__ import annotations

import json
import signal
import time
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from penstock_common.errors import BadSpec, PenstockError, SampleError, SourceError
from penstock_common.waiting import FIRST_WORD_S, Notify
from penstock_common.wire.spec import Spec
from penstock_producer.jobs.fill import HOPELESS, EpochSeed, FailureLimit, TooManyBad
from penstock_producer.jobs.forking import forked
from penstock_producer.jobs.watchdog import CurrentSample, WorkerWatchdog
from penstock_producer.sources.protocol import Sample, Source

DEATHS = 5
"""The number of first samples that each end the process that makes them, and are no accident."""
_LOOK_S = 0.1


def infer_spec(source: Source, items: Any, seed: EpochSeed, limit_s: float, notify: Notify) -> Spec:
    """Return the spec of the first item of shard 0 that can be made.

    The process is forked, so that an open source need not be opened again. Raises TooManyBad, and errors that no sample
    caused.
    """
    start = 0
    last = "there are none"
    for _ in range(DEATHS):
        watchdog = WorkerWatchdog(None)
        ours, theirs = Pipe(duplex=False)
        args = (theirs, source, items, start, seed, limit_s, watchdog.current)
        process = forked(_make_first, *args, daemon=True)
        theirs.close()
        try:
            found = _await(process, ours, watchdog, lambda offset: source.key(int(items[offset])), notify)
        except BaseException:  # Ctrl-C
            process.kill()
            raise
        current = watchdog.current.look()
        process.join()
        death = watchdog.death("", process.pid, process.exitcode or 0)
        if found is not None:
            return _read(found)
        if death is None or current.offset is None:
            raise TooManyBad("the first sample cannot be made: the process that should make it ended and said nothing")
        start = current.offset + 1
        last = f"{source.key(int(items[current.offset]))}: {death.deed}"
        if start >= len(items):
            break
    raise TooManyBad(f"none of the first {start} samples can be made; the last: {last}")


def _await(process: BaseProcess, pipe: Connection, watchdog: WorkerWatchdog, key: Any, notify: Notify) -> str | None:
    """Return what the process found, or None if it died."""
    is_explained = False
    with pipe:
        while not pipe.poll(_LOOK_S):
            watchdog.look_after(process)
            current = watchdog.current.look()
            if not is_explained and current.offset is not None and time.monotonic() - current.since > FIRST_WORD_S:
                is_explained = True
                notify(f"the first sample, {key(current.offset)}, is being made since {FIRST_WORD_S:g} s")
        try:
            return pipe.recv_bytes().decode()
        except EOFError:
            return None


def _read(found: str) -> Spec:
    answer = json.loads(found)
    if "spec" in answer:
        return Spec.from_json(answer["spec"])
    raise _KINDS.get(answer["kind"], PenstockError)(answer["error"])


_KINDS: dict[str, type[PenstockError]] = {kind.__name__: kind for kind in (SourceError, BadSpec, TooManyBad)}
"""The errors that a source may have."""


def _make_first(
    pipe: Connection, source: Source, items: Any, start: int, seed: EpochSeed, limit_s: float, current: CurrentSample
) -> None:
    """Report the spec as JSON, in the other process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the owner, which ends this process
    watch = FailureLimit(lambda: False, current=current, sample_limit_s=limit_s)
    try:
        answer: dict[str, Any] = {"spec": Spec.infer(first_good(source, items, seed, 0, watch, start=start)).as_json()}
    except Exception as error:
        kind = type(error).__name__
        answer = {"error": str(error) if isinstance(error, PenstockError) else f"{kind}: {error}", "kind": kind}
    pipe.send_bytes(json.dumps(answer).encode())


def first_good(source: Any, items: Any, seed: EpochSeed, shard: int, watch: FailureLimit, *, start: int = 0) -> Sample:
    """Return the first sample of a shard that can be made, to infer a spec from it. Raises TooManyBad.

    A source of samples may begin at offset ``start``.
    """
    offset, last = start, ""
    for item in map(int, items[start:HOPELESS]):
        try:
            read = partial(source.read, item, seed.of(shard, offset))
            made: Sample = watch.make(offset, source.key(item), read, lambda: None)
        except SampleError as error:
            last = str(error)
        else:
            return {name: values[0] for name, values in made.items()} if source.unit == "batch" else made
        offset += source.size(item) if source.unit == "batch" else 1
    raise TooManyBad(f"none of the first {min(len(items), HOPELESS)} samples can be made; the last: {last}")
