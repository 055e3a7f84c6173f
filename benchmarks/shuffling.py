"""The quality of the two ways of shuffling, against a true permutation: ``python -m benchmarks.shuffling``.

The stages and the permutation themselves are measured. The number of a sample is its position, and its label is
constant over long stretches, as in a folder of images by class. Then the cost of a window is measured, alone and behind
a server. The tables are those of docs/shuffling.md. It needs an internal part, the stages, so it measures only its own
tree.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock import EmbeddedServer, Loader, Writer
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.batch import ArrayPool, Batch, BatchSpan, Lease
from penstock_consumer.stages.shuffle import ShuffleOptions, ShuffleWindow
from penstock_consumer.stages.stage import StageContext
from penstock_producer.sources.order import permutation

SAMPLES, BATCH, CLASSES, ENTRY = 100_000, 64, 100, 128


@dataclass(frozen=True, slots=True)
class Quality:
    """The distance of an order from the one that it was made of."""

    displacement: float
    """Mean distance of a sample from its old position, as a share of all. It is 1/3 for a true permutation."""
    correlation: float
    """Spearman's correlation of old and new positions. It is 0 for a true permutation."""
    run: float
    """Mean length of a run of equal labels, if an epoch has ``CLASSES`` labels in sorted order."""
    labels: float
    """Mean number of different labels in a batch."""


def measured(order: NDArray[np.int64], *, classes: int = CLASSES, batch: int = BATCH) -> Quality:
    """Measure an order. ``order`` holds for each position the sample that came there."""
    n = len(order)
    places = np.arange(n)
    labels = order * classes // n
    runs = 1 + np.count_nonzero(np.diff(labels))
    whole = labels[: n // batch * batch].reshape(-1, batch)
    return Quality(
        float(np.abs(order - places).mean() / n),
        float(np.corrcoef(order, places)[0, 1]),
        n / runs,
        float(np.mean([len(np.unique(row)) for row in whole])),
    )


def windowed(order: NDArray[np.int64], samples: int, seed: int, *, batch: int = BATCH) -> NDArray[np.int64]:
    """Return the order that a window of ``samples`` samples makes of an order of arrival."""
    window = ShuffleWindow(
        StageContext(Spec.of({"y": ("int64", ())}), ArrayPool(8), 0, batch, False), seed, samples=samples, nbytes=None
    )
    found: list[NDArray[np.int64]] = []

    def drain() -> None:
        while (one := window.take()) is not None:
            found.append(one["y"].copy())

    for start in range(0, len(order), batch):
        values = order[start : start + batch]
        lease = Lease(0, 0, 0, b"", len(values))
        window.put(Batch({"y": values}, 0, [BatchSpan(lease, start, start + len(values))]))
        drain()
    window.end()
    drain()
    return np.concatenate(found)


def interleaved(order: NDArray[np.int64], producers: int) -> NDArray[np.int64]:
    """Return the order of arrival if several producers write shards of one permutation, one entry each in turn."""
    parts = np.array_split(order, producers)
    entries = [[part[at : at + ENTRY] for at in range(0, len(part), ENTRY)] for part in parts]
    turns = max(len(part) for part in entries)
    return np.concatenate([part[turn] for turn in range(turns) for part in entries if turn < len(part)])


def again(order: NDArray[np.int64], entry: int, samples: int, seed: int, number: int) -> NDArray[np.int64]:
    """Return the order of a shuffled pass of a `Replay` or of `Files`: permuted blocks, then a window."""
    shuffle = ShuffleOptions(seed, number, samples, 0)
    blocks = [order[at : at + entry] for at in range(0, len(order), entry)]
    permuted = np.concatenate([blocks[place] for place in shuffle.blocks(len(blocks))])
    return windowed(permuted, samples, seed + number)


def cost(sample_bytes: int, *, batches: int = 400) -> float:
    """Return GB/s of payload through a window of ten batches: two copies of each sample."""
    spec = Spec.of({"x": ("uint8", (sample_bytes,))})
    window = ShuffleWindow(StageContext(spec, ArrayPool(8), 0, BATCH, False), 1, samples=10 * BATCH, nbytes=None)
    values = np.ones((BATCH, sample_bytes), np.uint8)
    began = time.perf_counter()
    for number in range(batches):
        lease = Lease(0, 0, 0, b"", BATCH)
        window.put(Batch({"x": values}, 0, [BatchSpan(lease, number * BATCH, (number + 1) * BATCH)]))
        while window.take() is not None:
            pass
    return batches * BATCH * sample_bytes / (time.perf_counter() - began) / 1e9


def rate(server: EmbeddedServer, sample_bytes: int, n: int, batch: int, samples: int | None) -> float:
    """Return samples a second from a server to an empty loop, all acknowledged, through a window of ``samples``."""
    quiet: dict[str, Any] = {"url": server.url, "notify": lambda _: None}
    name = f"{sample_bytes}-{samples}"
    with Writer(name, spec={"x": ("uint8", (sample_bytes,))}, budget_bytes=2 << 30, **quiet) as writer:
        with writer.epoch() as epoch:
            for _ in range(0, n, 1000):
                epoch.write_batch({"x": np.zeros((1000, sample_bytes), np.uint8)})
        with Loader(name, group="g", batch_size=batch, **quiet) as loader:
            if samples is not None:
                loader.shuffle(samples=samples, seed=1)
            began = time.perf_counter()
            found = sum(one.size for one in loader)
            return found / (time.perf_counter() - began)


def costs() -> None:
    """Print the cost of a window."""
    print("| sample | through a window alone, GB/s |\n|---|---|")
    for size in (256, 4096, 150_000):
        print(f"| {size} bytes | {cost(size, batches=4000 if size < 10_000 else 100):.2f} |")
    print("\n| from a server, samples/s (best of 3) | no window | window of 10 batches |\n|---|---|---|")
    for size, n, batch in ((256, 100_000, 256), (4096, 50_000, 256), (150_000, 3000, 64)):
        best = []
        for samples in (None, 10 * batch):
            tries = []
            for _ in range(3):
                with EmbeddedServer() as server:
                    tries.append(rate(server, size, n, batch, samples))
            best.append(max(tries))
        print(f"| {size} bytes, batches of {batch} | {best[0]:,.0f} | {best[1]:,.0f} |")


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--samples", type=int, default=SAMPLES)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--orders-only", action="store_true", help="not what a window costs")
    options = arguments.parse_args()
    n, seed = options.samples, options.seed
    sorted_source = np.arange(n)
    true = np.random.default_rng(seed).permutation(n)
    canonical = permutation(n, seed, 0)
    cases = {
        "as it lies in the source": sorted_source,
        "true permutation (numpy)": true,
        "canonical order: the seeded permutation": canonical,
        "the same in shared order, 4 producers, no window": interleaved(canonical, 4),
        "unshuffled source, 4 producers, no window": interleaved(sorted_source, 4),
    }
    for share in (0.001, 0.01, 0.1, 0.5):
        samples = max(1, int(n * share))
        cases[f"unshuffled source, window of {samples} samples ({share:.1%})"] = windowed(sorted_source, samples, seed)
    for entry, samples in ((128, 1000), (128, 10_000), (7, 1000), (7, 10_000)):
        cases[f"unshuffled source replayed: blocks of {entry} permuted, window of {samples}"] = again(
            sorted_source, entry, samples, seed, 0
        )
    one, other = (again(canonical, 128, 1000, seed, number) for number in (0, 1))
    cases["canonical order replayed: blocks of 128 permuted, window of 1000"] = one
    place = np.empty(n, dtype=np.int64)
    place[one] = np.arange(n)
    cases["the pass after that, compared with that one"] = place[other]
    print(
        f"| {n} samples, {CLASSES} labels, batches of {BATCH} | displacement | correlation | run | labels in a batch |"
    )
    print("|---|---|---|---|---|")
    for name, order in cases.items():
        found = measured(np.asarray(order, dtype=np.int64))
        print(
            f"| {name} | {found.displacement:.3f} | {found.correlation:+.3f} | {found.run:.2f} | {found.labels:.1f} |"
        )
    print()
    if not options.orders_only:
        costs()


if __name__ == "__main__":
    main()
