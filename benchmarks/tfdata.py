"""The tf.data path against the numpy path: groups that take turns, batch by batch, read the same produced epoch.

``python -m benchmarks tf.data`` measures the target only. ``python -m benchmarks.tfdata`` also measures the limits: a
dataset behind a transformation, a bare `from_generator`, and `from_generator` without a loader. With ``--variants`` it
measures other ways from Python into tf.data instead (`benchmarks.tfdata_variants`).

The clock starts a quarter into a pass. Before that, a pass allocates the memory of its batches. For batches of 38 MB
this takes a tenth of a second, sometimes before tf.data's first batch and sometimes after it. The start of a pass is
mostly tf.data's tracing, which a longer epoch needs no more often. It is in the ratio of whole passes.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from benchmarks import tfdata_variants
from benchmarks.spread import Spread, spread, table
from benchmarks.tfdata_variants import aligned
from benchmarks.trainers import QUIET
from penstock import EmbeddedServer, Loader, Writer

SHAPE, SAMPLES = (224, 224, 3), 8000
BATCHES = (64, 256)
COLD = {size: SAMPLES // size // 4 + 1 for size in BATCHES}
"""The batches of a pass before the clock starts."""
NUMPY, DATASET, PREFETCHED, BARE, ALONE = "numpy", "dataset", "prefetched", "bare", "alone"
OTHER = (tfdata_variants.NUMPY_FUNCTION, tfdata_variants.DLPACK)
LIMITS = {
    PREFETCHED: "behind a transformation, prefetch(1)",
    BARE: "a bare from_generator over the loader",
    **{variant: f"{variant}, over the loader" for variant in OTHER},
    ALONE: "from_generator over arrays that are there",
}
"""Those behind the first one do not acknowledge by the step."""
READY = 4
"""The arrays that `ALONE` gives in turn, as many as a loader has in memory when tf.data reads it."""


def measure(rounds: int) -> dict[str, Spread]:
    """Return part of a pass -> the ratio of tf.data's speed to numpy's in it."""
    return {what: one for size, passes in read(rounds, (NUMPY, DATASET)).items() for what, one in _told(size, passes)}


def read(rounds: int, sides: Iterable[str]) -> dict[int, dict[str, list[Pass]]]:
    """Return batch size -> side -> its passes, one for each round. The first round is not counted."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with EmbeddedServer() as server:
        spec = {"x": ("uint8", SHAPE), "y": ("int64", ())}
        with Writer("tf", url=server.url, spec=spec, budget_bytes=4 << 30, **QUIET) as writer, writer.epoch() as epoch:
            image = np.zeros(SHAPE, np.uint8)
            for number in range(SAMPLES):
                epoch.write({"x": image, "y": number})
        passes: dict[tuple[int, str], list[Pass]] = {(size, side): [] for size in BATCHES for side in sides}
        for number in range(rounds + 1):
            for turn, (size, side) in enumerate([*passes, *reversed(passes)]):  # a drift affects all sides alike
                passes[size, side].append(_pass(server.url, side, size, f"{size}-{number}-{turn}"))
    return {size: {side: _rounds(passes[size, side])[1:] for side in sides} for size in BATCHES}


class Pass(NamedTuple):
    """One pass over the epoch."""

    seconds: float
    """The time of the whole pass."""
    warm_s: float
    """The time after its first quarter."""
    cpu_s: float
    """The CPU time of the trainer's process after its first quarter. The server is another process."""


def _rounds(passes: list[Pass]) -> list[Pass]:
    """Join the two passes of a side in each round."""
    return [
        Pass(*(sum(both) for both in zip(one, other, strict=True)))
        for one, other in zip(passes[::2], passes[1::2], strict=True)
    ]


def _told(batch: int, passes: dict[str, list[Pass]]) -> Iterator[tuple[str, Spread]]:
    def to_numpy(side: str, of: Callable[[Pass], float]) -> Spread:
        return spread(of(plain) / of(ours) for plain, ours in zip(passes[NUMPY], passes[side], strict=True))

    yield f"batches of {batch}", to_numpy(DATASET, lambda one: one.warm_s)
    yield f"batches of {batch}, whole passes of {SAMPLES:,} samples", to_numpy(DATASET, lambda one: one.seconds)
    for side in [side for side in passes if side in LIMITS]:
        yield f"batches of {batch}, {LIMITS[side]}", to_numpy(side, lambda one: one.warm_s)


def _pass(url: str, side: str, batch: int, group: str) -> Pass:
    gc.collect()  # the tracing of the pass before leaves much garbage
    if side == ALONE:
        return _clocked(lambda: _from_generator(_ready(batch)), batch)
    with Loader("tf", group=group, batch_size=batch, url=url, **QUIET) as loader:
        return _clocked(lambda: _batches(side, loader), batch)


def _batches(side: str, loader: Loader) -> Iterable[Any]:
    from penstock.tensorflow import dataset

    made: Iterable[Any] = loader
    if side == BARE:
        made = _from_generator(loader)
    elif side in OTHER:
        made = tfdata_variants.generated(
            side, ((batch["x"], batch["y"]) for batch in loader), (*_signature().values(),)
        )
    elif side == DATASET:
        made = dataset(loader)
    elif side == PREFETCHED:
        made = dataset(loader).prefetch(1)
    return made


def _signature() -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.TensorSpec((None, *SHAPE), tf.uint8), "y": tf.TensorSpec((None,), tf.int64)}


def _from_generator(batches: Iterable[Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=_signature())


def _ready(batch: int) -> Iterator[dict[str, Any]]:
    """Yield as many batches as an epoch has, in existing memory that is aligned like a loader's."""
    arrays = [{"x": aligned((batch, *SHAPE), np.uint8), "y": aligned((batch,), np.int64)} for _ in range(READY)]
    for number in range(-(-SAMPLES // batch)):
        yield arrays[number % READY]


def _clocked(batches: Callable[[], Iterable[Any]], size: int) -> Pass:
    began, warm, cpu = time.perf_counter(), 0.0, 0.0
    for number, _ in enumerate(batches(), start=1):
        if number == COLD[size]:
            warm, cpu = time.perf_counter(), time.process_time()
    ended = time.perf_counter()
    return Pass(ended - began, ended - warm, time.process_time() - cpu)


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tfdata", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", action="store_true", help="measure other ways from Python into tf.data")
    args = parser.parse_args()
    if args.variants:
        print(tfdata_variants.shown(tfdata_variants.measure(args.rounds)))
        return
    for size, passes in read(args.rounds, (NUMPY, DATASET, *LIMITS)).items():
        print(table(["tf.data", "speed to the numpy path"], [[what, one.shown()] for what, one in _told(size, passes)]))
        gigabytes = 2 * (SAMPLES - size * COLD[size]) * prod(SHAPE) / 1e9  # two passes a round
        rows = [[side, spread(one.cpu_s / gigabytes for one in took).shown("")] for side, took in passes.items()]
        print("\n" + table([f"batches of {size}", "CPU s/GB of the trainer's process"], rows) + "\n")


if __name__ == "__main__":
    main()
