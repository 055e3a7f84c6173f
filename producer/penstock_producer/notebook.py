"""``penstock.produce``: a production from a notebook or a script, for objects without an import name.

The workers are forked from this process, and therefore have its objects. The loop runs in a thread.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError

from penstock_common.errors import PenstockError, StreamConflict, WaitTimeout
from penstock_common.hints import Answering, an, callable_of, explained, seconds, whole
from penstock_common.settings import Settings
from penstock_common.tuning import Tuning, chosen, takes_old_names, tuning_of
from penstock_common.waiting import Notify, to_stderr
from penstock_common.wire.compression import Compression
from penstock_common.wire.spec import Spec
from penstock_producer.jobs.plan import ProductionPlan
from penstock_producer.jobs.production import Production as Loop
from penstock_producer.jobs.production import refuse_path
from penstock_producer.jobs.progress import ProductionProgress, ProductionSummary
from penstock_producer.jobs.watchdog import SAMPLE_LIMIT_S
from penstock_producer.jobs.worker import WorkerOptions
from penstock_producer.sources.config import LocalConfig
from penstock_producer.sources.names import forget, register_alike
from penstock_producer.sources.transform import BLOCK_SAMPLES

END_S = 5.0
"""The longest time that the end of the program waits for workers to stop."""


class BackgroundProduction(Answering):
    """A running production, with its `progress`. Leaving a ``with`` block stops it, and so does the program's end.

    Example:
        >>> with penstock.produce(dataset, transform=augment, workers=4) as production:
        ...     summary = production.wait()
    """

    def __init__(self, loop: Loop, stream: str, tokens: list[str], notify: Notify) -> None:
        self._loop, self._stream, self._tokens, self._notify = loop, stream, tokens, notify
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._owner = os.getpid()
        self._is_left = False
        """Whether the program continues without the production, or ends, and `stop` was not called."""
        self._error: BaseException | None = None
        self._summary: ProductionSummary | None = None
        self.progress = ProductionProgress((), None)
        """The latest state, updated several times a second."""
        self._thread = threading.Thread(target=self._run, name="penstock-produce", daemon=True)
        self._thread.start()
        atexit.register(self._end_with_program)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Return the numbers of the epochs that it produces."""
        return self._loop.epochs

    @property
    def is_done(self) -> bool:
        """Tell whether it has ended, with or without an error."""
        return self._ended.is_set() or os.getpid() != self._owner  # a forked child has this object, and no thread

    def wait(self, timeout_s: float | None = None) -> ProductionSummary:
        """Wait until all epochs are produced.

        Args:
            timeout_s: the longest wait in seconds. None means no limit.

        Returns:
            What was produced: the numbers of epochs, samples and bad samples, the bytes and the time.

        Raises:
            WaitTimeout: the production still runs after this time.
            PenstockError: `stop` ended the production. Any other error that ended it is raised as it was.
        """
        if not self._await_end(timeout_s):
            raise WaitTimeout(f"not produced after {timeout_s} s: {self.progress.waits or 'still at work'}")
        if self._error is not None:
            raise self._error
        if self._summary is None:
            raise PenstockError("the production was stopped before its end; what was committed stands")
        return self._summary

    def stop(self) -> None:
        """Stop the workers and wait for their end.

        An unfinished epoch is abandoned, so that its trainers end.
        """
        self._stopping.set()
        self._await_end()

    def __repr__(self) -> str:
        state, progress = "ended" if self.is_done else "running", self.progress
        return f"<production of {self._stream!r}, {state}: {progress.done} of {progress.samples or 'its'} samples>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_left = kind is None
        self.stop()

    def _end_with_program(self) -> None:
        """Stop, in bounded time, a production that the program did not wait for."""
        self._is_left = True
        self._stopping.set()
        self._await_end(END_S)

    def _await_end(self, limit_s: float | None = None) -> bool:
        """Wait until it has ended. Returns False if it has not after ``limit_s``."""
        # not join(): Python 3.11 takes a thread for ended once Ctrl-C interrupted a join
        return self.is_done or self._ended.wait(limit_s)

    def _run(self) -> None:
        try:
            with self._loop as loop:
                for self.progress in loop.run():
                    if self._stopping.is_set():
                        loop.abandon()
                        if self._is_left:
                            self._tell_stopped()
                        return
                self._summary = loop.summary()
                if bad := self._summary.bad:
                    self._notify(
                        f"{bad} of {self._summary.samples} samples of {self._stream!r} could not be made and are "
                        f"left out: `penstock bad list {self._stream}` says why"
                    )
        except Exception as error:
            self._error = error
            to_stderr(f"production failed: {error}")
        finally:
            atexit.unregister(self._end_with_program)
            for token in self._tokens:
                forget(token)
            self._ended.set()

    def _tell_stopped(self) -> None:
        """Say what is missing, because a script that forgot to wait gets a part of its samples and no error."""
        done, planned = self.progress.done, self.progress.samples
        if planned is None or done < planned:
            self._notify(
                f"the production of {self._stream!r} was stopped at {done} of {planned or 'its'} samples: call its "
                "wait() before the program or the `with` block ends, or write produce(..., wait=True)"
            )


_RUNNING: weakref.WeakValueDictionary[tuple[str, str], BackgroundProduction] = weakref.WeakValueDictionary()
"""(server, stream) -> the last production of this process. Its thread refers to it while it runs."""


@takes_old_names
@explained
def produce(
    dataset: Any,
    *,
    stream: str = "train",
    transform: Callable[..., Any] | str | None = None,
    workers: int = 2,
    epochs: int = 1,
    url: str | None = None,
    spec: Mapping[str, Any] | None = None,
    wait: bool = False,
    tuning: Tuning | None = None,
) -> BackgroundProduction:
    """Let worker processes produce epochs of an object with a length and items, of batches or of an iterable.

    Objects and functions may be local to this process, such as closures in a notebook. If the dataset and the functions
    are attributes of imported modules, the same program continues after a kill what it left unfinished.

    Args:
        dataset: the object.
        stream: the stream's name.
        transform: ``f(item)`` or ``f(item, rng)``, or its import name. It returns a dict of tensors, (x, y) or x.
        workers: the number of processes, at least 1.
        epochs: how many epochs are produced.
        url: the server's address. None means the one in the environment.
        spec: the tensors' dtypes and shapes. None means that the first sample decides.
        wait: whether the call returns only after everything is produced. If it is interrupted, the production stops.
        tuning: rarely changed options: shuffle, seed, block_transform, block_samples, shard_samples, budget_bytes,
            retention, durability, compression, on_error, sample_limit_s, worker_memory_bytes, notify. See `Tuning`.

    Returns:
        The production, which continues in the background unless ``wait`` is true.

    Raises:
        StreamConflict: an earlier production of this process is making epochs of the stream.
        PenstockError: the source or an option is wrong, or the production failed while the call waited.

    Example:
        >>> with penstock.produce(dataset, transform=augment, workers=4) as production:
        ...     production.wait()
    """
    tuning = tuning_of("produce", tuning)
    notify, sample_limit_s = chosen(tuning.notify, to_stderr), chosen(tuning.sample_limit_s, SAMPLE_LIMIT_S)
    refuse_path(dataset)
    if isinstance(dataset, type):
        raise TypeError(f"dataset is the class {dataset.__name__}, expected an object: write {dataset.__name__}()")
    _require_usable(transform, spec, tuning)
    if not isinstance(stream, str):
        raise TypeError(f"stream is {stream!r:.40}, {an(stream)}; expected a stream's name such as 'train'")
    workers, epochs = whole("workers", workers, 0), whole("epochs", epochs)
    seed = whole("seed", chosen(tuning.seed, 0), 0)
    block_samples = whole("block_samples", chosen(tuning.block_samples, BLOCK_SAMPLES))
    shard_samples = None if tuning.shard_samples is None else whole("shard_samples", tuning.shard_samples)
    budget_bytes = None if tuning.budget_bytes is None else whole("budget_bytes", tuning.budget_bytes)
    seconds("sample_limit_s", sample_limit_s)
    callable_of("notify", notify, "print")
    if workers < 1:
        raise PenstockError("workers=0: objects without an import name need local workers; give workers=1 or more")
    settings = Settings.from_environment()
    url = url or settings.url
    if (running := _RUNNING.get((url, stream))) is not None and not running.is_done:
        raise StreamConflict(
            f"this process has a {running!r}, and two would open the same epochs: wait() for that one, stop() it, or "
            "name another stream"
        )
    block_transform = tuning.block_transform
    objects = [dataset, *(function for function in (transform, block_transform) if callable(function))]
    tokens = register_alike(objects)
    functions = iter(tokens[1:])
    transform = next(functions) if callable(transform) else transform
    block_transform = next(functions) if callable(block_transform) else block_transform
    options = WorkerOptions(
        url=url, queue_url=settings.named_queue_url or url, queue=f"penstock-{secrets.token_hex(4)}",
        memory_bytes=tuning.worker_memory_bytes,
    )  # fmt: skip
    try:
        with _refusals_in_words():
            plan = ProductionPlan(
                stream=stream, source=LocalConfig(token=tokens[0], transform=transform), epochs=epochs, seed=seed,
                shuffle=chosen(tuning.shuffle, True), shard_samples=shard_samples, spec=spec, budget_bytes=budget_bytes,
                compression=tuning.compression, retention=tuning.retention, durability=tuning.durability,
                on_error=chosen(tuning.on_error, "quarantine"),
                sample_limit_s=sample_limit_s, block_transform=block_transform, block_samples=block_samples,
            )  # fmt: skip
        loop = Loop(plan, options, workers=workers, notify=notify)
    except BaseException:
        for token in tokens:
            forget(token)
        raise
    production = _RUNNING[url, stream] = BackgroundProduction(loop, stream, tokens, notify)
    if wait:
        try:
            production.wait()
        except BaseException:  # Ctrl-C: nobody has the object that could stop it later
            production.stop()
            raise
    return production


def _require_usable(transform: object, spec: Any, tuning: Tuning) -> None:
    """Raise TypeError or BadSpec for a value that the plan would take, or would refuse without a sentence."""
    for name, value, shape in (
        ("transform", transform, "sample) or f(sample, rng"),
        ("block_transform", tuning.block_transform, "block) or f(block, rng"),
    ):
        if value is not None and not callable(value) and not isinstance(value, str):
            raise TypeError(
                f"{name} is {an(value)}; expected a function f({shape}), not what it returned: write {name}=function"
            )
    if not isinstance(chosen(tuning.shuffle, True), bool):
        raise TypeError(f"shuffle is {tuning.shuffle!r:.40}, {an(tuning.shuffle)}; expected True or False")
    if spec is not None:
        Spec.of(spec)
    if tuning.compression is not None:
        Compression.parse(tuning.compression)


@contextmanager
def _refusals_in_words() -> Iterator[None]:
    """Raise the first refusal of a model as a ValueError of one line."""
    try:
        yield
    except ValidationError as error:
        wrong = error.errors()[0]
        expected = wrong["msg"].replace("Input should be", "expected")
        raise ValueError(f"{wrong['loc'][0]} is {wrong['input']!r:.40}, {expected}") from None
