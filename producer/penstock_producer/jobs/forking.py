"""Processes that are forked from this one, which may have threads and objects of a framework."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any


def forked(target: Callable[..., None], *args: Any, daemon: bool = False) -> BaseProcess:
    """Fork a process that calls ``target(*args)``, and start it. See `to_fork`."""
    process = to_fork(target, *args, daemon=daemon)
    fork(process)
    return process


def to_fork(target: Callable[..., None], *args: Any, daemon: bool = False) -> BaseProcess:
    """Return a process for `fork` that calls ``target(*args)``.

    It never collects the garbage of this one. A framework's object may need a thread when it is destroyed, and a fork
    copies no other threads. A function of TensorFlow crashes the process then.
    """
    return get_context("fork").Process(target=_run, args=(target, args, gc.isenabled()), daemon=daemon)


def fork(process: BaseProcess) -> None:
    """Start a process that `to_fork` returned."""
    was_enabled = gc.isenabled()
    gc.disable()  # the new process must not collect anything before it freezes what it inherits
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks in a process with threads. The child does not use the parent's locks and
            # connections.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if was_enabled:
            gc.enable()


def _run(target: Callable[..., None], args: tuple[Any, ...], collects: bool) -> None:
    gc.freeze()
    if collects:
        gc.enable()
    target(*args)
