"""Ctrl-C at a chosen moment of a call."""

from __future__ import annotations

import _weakrefset
import gc
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

CALLBACKS = (weakref.__file__, _weakrefset.__file__)
"""The files of callbacks that run when an object goes, such as the function of `weakref.finalize`."""


class Interruption:
    """A KeyboardInterrupt after so many calls. Python, too, looks for signals at calls."""

    def __init__(self, after: int = -1) -> None:
        self.calls, self._after, self._hook = 0, after, sys.unraisablehook

    def of(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function. The interruption comes in the midst of it."""
        gc.disable()  # Python would ignore an exception in a callback of the collector, and JAX has one
        self._hook, sys.unraisablehook = sys.unraisablehook, self._repeat
        sys.setprofile(self._look)
        try:
            return function(*arguments)
        finally:
            sys.setprofile(None)
            sys.unraisablehook = self._hook
            gc.enable()

    def _look(self, frame: FrameType, event: str, called: Any) -> None:
        is_within = frame.f_code not in (Interruption.of.__code__, Interruption._repeat.__code__)
        if event in ("call", "c_return") and is_within:
            self.calls += 1
            if self.calls >= self._after > 0 and not _is_ignored(frame):
                sys.setprofile(None)
                raise KeyboardInterrupt

    def _repeat(self, ignored: sys.UnraisableHookArgs) -> None:
        """Interrupt the next call, because Python ignored the exception, as in a generator that is dropped."""
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            self._hook(ignored)
        else:
            sys.setprofile(self._look)


def _is_ignored(frame: FrameType | None) -> bool:
    """Return whether Python would ignore an exception here, as it does in destructors and callbacks of weakref.

    One that is broken off would leave things that the next test meets.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in CALLBACKS:
            return True
        frame = frame.f_back
    return False
