"""Samples that kill, hang, leak or walk out, for workers that import them by name."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 60
DEEDS = {5: "segfault", 17: "exit", 18: "exit quietly", 33: "hang", 34: "walk out", 50: "ctypes"}
CRASHES = (3, 17, 18, 40, 66)
LEAK_BYTES = 24 << 20
_kept: list[bytearray] = []


def numbers() -> list[int]:
    """A dataset."""
    return list(range(SAMPLES))


def good(number: int) -> dict[str, Any]:
    """Says who made it."""
    return {"x": np.full(4, number, np.int32), "pid": os.getpid()}


def deadly(number: int) -> dict[str, Any]:
    """Some samples always end the process that makes them."""
    faulthandler.disable()  # pytest's, which would fill the screen
    match DEEDS.get(number):
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "exit quietly":
            os._exit(0)
        case "hang":
            time.sleep(600)
        case "walk out":
            sys.exit("enough")
        case "ctypes":
            ctypes.string_at(0)
    return good(number)


def first_hangs(number: int) -> dict[str, Any]:
    """Number 0 takes for ever."""
    if number == 0:
        time.sleep(600)
    return good(number)


def fifth_walks_out(number: int) -> dict[str, Any]:
    """Number 5 ends its process without a word."""
    if number == 5:
        os._exit(0)
    return good(number)


def always_segfaults(number: int) -> dict[str, Any]:
    """Every sample."""
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)
    return good(number)


def crashes_at_random(number: int) -> dict[str, Any]:
    """Some attempts, whatever the sample. Which ones is fixed, so that no test fails once in a thousand runs."""
    faulthandler.disable()
    mark = Path(os.environ["PENSTOCK_TEST_MARK"])
    with mark.open("a") as file:
        file.write("x")
    if mark.stat().st_size in CRASHES:
        os.kill(os.getpid(), signal.SIGSEGV)
    return good(number)


def leaks(number: int) -> dict[str, Any]:
    """Every sample leaves 24 MiB behind."""
    _kept.append(bytearray(os.urandom(1) * LEAK_BYTES))
    time.sleep(0.05)
    return good(number)
