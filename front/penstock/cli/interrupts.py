"""Ends of a command by keys and signals. All act like Ctrl-C, and restore the terminal."""

from __future__ import annotations

import _thread
import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

QUIT_KEY = "q"
_LFLAG, _CC = 3, 6
_report = sys.unraisablehook
_ENDS = (signal.SIGQUIT, signal.SIGTERM)
_AGAIN_S = 0.05
"""The time after which a signal that a destructor swallowed is sent again: the destructor has ended by then."""


@contextmanager
def quit_key(show_cursor: Callable[[bool], object], keyboard: TextIO | None = None) -> Iterator[bool]:
    """Raise KeyboardInterrupt in the main thread when a user presses ``q``, as for Ctrl-C, SIGTERM and SIGHUP.

    The terminal itself sends the signal, so the key works also while the command waits for a server. Ctrl-Z restores
    the terminal until the command continues.

    Args:
        show_cursor: Shows or hides the cursor of the terminal that is drawn on.
        keyboard: The source of keys (default: stdin). It is left alone if it is not a terminal, or belongs to another
            job.

    Returns:
        Whether the key works.
    """
    keyboard = keyboard or sys.stdin
    if not _is_ours(keyboard):
        yield False
        return
    terminal = keyboard.fileno()
    before = termios.tcgetattr(terminal)

    def suspend(*_: object) -> None:
        _leave(terminal, before, show_cursor)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # it stops here, and continues with SIGCONT
        signal.signal(signal.SIGTSTP, suspend)
        _take(terminal, before)
        show_cursor(False)

    handlers = {number: signal.getsignal(number) for number in (*_ENDS, signal.SIGHUP, signal.SIGTSTP)}
    try:
        for number in _ENDS:
            signal.signal(number, _end)
        signal.signal(signal.SIGHUP, hang_up)
        signal.signal(signal.SIGTSTP, suspend)
        _take(terminal, before)
        yield True
    finally:
        _leave(terminal, before, show_cursor)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_ours(keyboard: TextIO | None) -> bool:
    """Return whether it is a terminal with this process in its foreground.

    The terminal of another job must not be changed.
    """
    try:
        return keyboard is not None and os.tcgetpgrp(keyboard.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not a terminal, or closed
        return False


def _end(number: int, frame: FrameType | None) -> None:
    for each in _ENDS:  # once is enough: a second signal must not interrupt the cleaning up
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def _take(terminal: int, before: list[Any]) -> None:
    """Show no key, wait for no Enter, and let the key send SIGQUIT."""
    attributes = [*before[:_CC], [*before[_CC]]]
    attributes[_LFLAG] = before[_LFLAG] & ~(termios.ECHO | termios.ICANON) | termios.ISIG
    attributes[_CC][termios.VQUIT] = QUIT_KEY.encode()
    termios.tcsetattr(terminal, termios.TCSADRAIN, attributes)


def _leave(terminal: int, before: list[Any], show_cursor: Callable[[bool], object]) -> None:
    with suppress(termios.error, OSError):  # the terminal is gone
        termios.tcsetattr(terminal, termios.TCSAFLUSH, before)  # unread keys must not reach the shell
        show_cursor(True)


def end_by_signals() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, as SIGINT does.

    SIGHUP stays ignored if the parent process ignored it, as nohup does.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, hang_up)
    sys.unraisablehook = _interrupt_again


def _interrupt_again(ignored: sys.UnraisableHookArgs) -> None:
    """Interrupt the main thread again after a destructor, because Python drops what a destructor raises."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        timer = threading.Timer(_AGAIN_S, _thread.interrupt_main)
        timer.daemon = True
        timer.start()
    else:
        _report(ignored)


def hang_up(signum: int, frame: FrameType | None) -> None:
    """End as by Ctrl-C, and print nothing more.

    The terminal is gone, and an error of printing would interrupt the cleaning up.
    """
    signal.signal(signum, signal.SIG_IGN)  # a shell repeats what the kernel has sent
    _leave_lost_terminal()
    raise KeyboardInterrupt


@contextmanager
def without_terminal() -> Iterator[None]:
    """Go on without printing if the terminal is gone.

    Its signal may come a moment later. A user who ignores that signal wants the command to outlive the terminal.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO or not _leave_lost_terminal():
            raise


def _leave_lost_terminal() -> bool:
    """Discard what is printed from now on to a terminal that is gone. Return whether one is."""
    is_lost = False
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            is_lost = True
    return is_lost
