"""Handwritten digits behind a transform of 5 ms, as a torch user would have them: one object for every side.

The transform moves and blurs the picture, and then computes, or sleeps like one that waits for a disk or a service. It
computes a fixed number of turns, which is measured once. A fixed time would be shorter work while other processes have
the core.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

TRANSFORM_S = 0.005
SETTINGS = "PENSTOCK_BENCH_DIGITS"
"""The environment variable with ``samples side channels turns``. Without turns the transform sleeps. Workers that are
started elsewhere get it, too.
"""
HELD_OUT = 261
"""The digits that are held out for the test, of 1,797."""
WARM_UP = 64
"""Samples that are made before a clock starts."""


class Digits:
    """``{"x": uint8 [channels, side, side], "y": int}`` by index.

    Digits repeat if more samples are wanted.
    """

    def __init__(self, samples: int, side: int, channels: int, turns: int) -> None:
        self._samples, self._side, self._channels, self._turns = samples, side, channels, turns
        self._pictures, self._labels = _load()

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = self.quick(index)
        if self._turns:
            take_turns(self._turns)
        else:
            time.sleep(TRANSFORM_S)
        return made

    def quick(self, index: int) -> dict[str, Any]:
        """Return the same sample without the slow part."""
        place = index % (len(self._labels) - HELD_OUT)
        shift = random.randint(-1, 1), random.randint(-1, 1)
        picture = np.roll(self._pictures[place], shift, (0, 1)) + random.uniform(-1, 1)
        return {"x": self._drawn(picture), "y": int(self._labels[place])}

    def held_out(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return the digits that no training uses: ``[n, channels, side, side]`` and labels."""
        pictures = np.stack([self._drawn(picture) for picture in self._pictures[-HELD_OUT:]])
        return pictures, self._labels[-HELD_OUT:].astype(np.int64)

    def _drawn(self, picture: NDArray[Any]) -> NDArray[np.uint8]:
        times = self._side // 8
        large = np.kron(np.clip(picture, 0, 16) * 15.9, np.ones((times, times))).astype(np.uint8)
        return np.repeat(large[None], self._channels, axis=0)


def _load() -> tuple[NDArray[Any], NDArray[Any]]:
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return found.images, found.target


def take_turns(turns: int) -> float:
    """Do some Python and some numpy work, as transforms do."""
    picture, total = np.ones((32, 32), np.float32), 0.0
    for turn in range(turns):
        total += float((picture * turn).sum())
    return total


def count_turns() -> int:
    """Return how many turns take 5 ms of CPU here."""
    turns = 1000
    taken = []
    for _ in range(20):
        began = time.process_time()
        take_turns(turns)
        taken.append(time.process_time() - began)
    return round(turns * TRANSFORM_S / min(taken))


def digits() -> Digits:
    """Return all digits that are trained on."""
    return Digits(*map(int, os.environ[SETTINGS].split()))


def warm_up() -> Digits:
    """Return the first few digits."""
    _, *others = map(int, os.environ[SETTINGS].split())
    return Digits(WARM_UP, *others)
