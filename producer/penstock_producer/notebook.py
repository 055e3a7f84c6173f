"""``penstock.produce``: from a notebook or a script, for objects that have no import name.

The workers are forked from this process, and so have its objects; the loop runs in a thread.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from penstock_common.errors import PenstockError, WaitTimeout
from penstock_common.hints import callable_of, explained, whole
from penstock_common.settings import Settings
from penstock_common.waiting import Notify, to_stderr
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production as Loop
from penstock_producer.jobs.production import refuse_path
from penstock_producer.jobs.progress import ProductionProgress, ProductionSummary
from penstock_producer.jobs.task import OnError
from penstock_producer.jobs.watchdog import SAMPLE_LIMIT_S
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import LocalConfig
from penstock_producer.sources.names import forget, register
from penstock_producer.sources.transform import BLOCK_SAMPLES


class Production:
    """A running production: `wait` for its end, read its `progress`, `stop` it. Leaving a ``with`` block stops it."""

    def __init__(self, loop: Loop, tokens: list[str]) -> None:
        self._loop, self._tokens = loop, tokens
        self._stopping = threading.Event()
        self._error: BaseException | None = None
        self._summary: ProductionSummary | None = None
        self.progress = ProductionProgress((), None)
        """The last look; renewed several times a second."""
        self._thread = threading.Thread(target=self._run, name="penstock-produce", daemon=True)
        self._thread.start()

    @property
    def epochs(self) -> tuple[int, ...]:
        """Numbers of the epochs being produced."""
        return self._loop.epochs

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> ProductionSummary:
        """Returns when all epochs are produced. Raises what ended it, or WaitTimeout while it goes on."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"not produced after {timeout_s} s: {self.progress.waits or 'still at work'}")
        if self._error is not None:
            raise self._error
        if self._summary is None:
            raise PenstockError("the production was stopped before its end; what was committed stands")
        return self._summary

    def stop(self) -> None:
        """Ends the workers and waits for that. An unfinished epoch is abandoned: nobody else has its objects."""
        self._stopping.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            with self._loop as loop:
                for self.progress in loop.run():
                    if self._stopping.is_set():
                        loop.abandon()
                        return
                self._summary = loop.summary()
        except Exception as error:
            self._error = error
            to_stderr(f"production failed: {error}")
        finally:
            for token in self._tokens:
                forget(token)


@explained
def produce(
    dataset: Any,
    *,
    stream: str = "train",
    transform: Callable[..., Any] | str | None = None,
    block_transform: Callable[..., Any] | str | None = None,
    block_samples: int = BLOCK_SAMPLES,
    workers: int = 2,
    epochs: int = 1,
    url: str | None = None,
    seed: int = 0,
    shuffle: bool = True,
    shard_samples: int | None = None,
    spec: Mapping[str, Any] | None = None,
    budget_bytes: int | None = None,
    retention: str | None = None,
    durability: str | None = None,
    on_error: OnError = "quarantine",
    sample_limit_s: float = SAMPLE_LIMIT_S,
    worker_memory_bytes: int | None = None,
    wait: bool = False,
    notify: Notify = to_stderr,
) -> Production:
    """Has worker processes make ``epochs`` epochs of any object with a length and items (or batches, or an iterable).

    ``transform(item)`` or ``transform(item, rng)`` gives a sample: a dict of tensors, (x, y), or x. Both may be
    closures, as may ``block_transform``, which takes ``block_samples`` of these at once. ``wait=True`` returns when all
    is produced; else the production goes on in the background.
    """
    refuse_path(dataset)
    workers, epochs = whole("workers", workers, 0), whole("epochs", epochs)
    callable_of("notify", notify, "print")
    if workers < 1:
        raise PenstockError("workers=0: objects without an import name need local workers; give workers=1 or more")
    tokens = [register(dataset)]
    if callable(transform):
        tokens.append(register(transform))
        transform = tokens[-1]
    if callable(block_transform):
        tokens.append(register(block_transform))
        block_transform = tokens[-1]
    settings = Settings.from_environment()
    url = url or settings.url
    plan = ProductionPlan(
        stream=stream, source=LocalConfig(token=tokens[0], transform=transform), epochs=epochs, seed=seed,
        shuffle=shuffle, shard_samples=shard_samples, spec=spec, budget_bytes=budget_bytes, retention=retention,
        durability=durability, on_error=on_error, sample_limit_s=sample_limit_s,
        block_transform=block_transform, block_samples=block_samples,
    )  # fmt: skip
    options = WorkerOptions(
        url=url, queue_url=settings.named_queue_url or url, queue=f"penstock-{secrets.token_hex(4)}",
        memory_bytes=worker_memory_bytes,
    )  # fmt: skip
    try:
        loop = Loop(plan, options, workers=workers, notify=notify)
    except BaseException:
        for token in tokens:
            forget(token)
        raise
    production = Production(loop, tokens)
    if wait:
        production.wait()
    return production
