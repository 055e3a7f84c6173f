"""How signals end a command that has something to clean up: as Ctrl-C does."""

from __future__ import annotations

import os
import signal
from types import FrameType


def end_by_signals() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, as SIGINT does.

    SIGHUP stays ignored where whoever started the command ignores it, as nohup does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)


def hang_up(signum: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C, and print nothing more on a terminal that is gone: the error would end the cleaning up."""
    signal.signal(signum, signal.SIG_IGN)  # a shell repeats what the kernel has sent
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    raise KeyboardInterrupt
