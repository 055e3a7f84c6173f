"""Processes that are forked from this one, which may have threads and objects of a framework.

`end_with_owner` ends them, and processes that are spawned, with their owner.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
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

    The child never collects its parent's garbage. Destroying a framework's object may need a thread that the fork
    lacks. A function of TensorFlow crashes the process then.
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


def end_with_owner(owner: int, grace_s: float, exit_code: int) -> None:
    """Have this process end when its owner is gone: by SIGTERM, and at once if it lives ``grace_s`` later.

    An owner that is killed by SIGKILL cannot announce its end.
    """

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
        os._exit(exit_code)

    threading.Thread(target=watch, daemon=True).start()


def _run(target: Callable[..., None], args: tuple[Any, ...], collects: bool) -> None:
    gc.freeze()
    if collects:
        gc.enable()
    _leave_threads_of_torch()
    target(*args)


def _leave_threads_of_torch() -> None:
    """Have torch compute in the calling thread, as in its own DataLoader's workers.

    A fork copies torch's note of its threads and not the threads. So an operator that is divided among them would wait
    without end.
    """
    set_num_threads = getattr(sys.modules.get("torch"), "set_num_threads", None)  # to import it takes a second
    if set_num_threads is not None:
        set_num_threads(1)
