"""Waiting for threads to end, also from a finalizer, which may run in any of them."""

from __future__ import annotations

import threading


def join(thread: threading.Thread, timeout_s: float | None = None) -> None:
    """Wait until a thread has ended.

    Returns at once in that thread itself, and for a thread that was never started.
    """
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(timeout_s)
