"""The source and the transform that the workers of a run use.

The command is ``penstock produce dataset chaos.source:items --transform chaos.source:make``.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from chaos.options import from_environment
from chaos.payload import is_bad, sample

WORK_S = 0.001
"""The work for each sample in seconds, so that faults hit workers in the middle of a shard."""

_options = from_environment()


def items() -> range:
    """Return one number for each sample of an epoch."""
    return range(_options.samples)


def make(index: int, rng: np.random.Generator) -> dict[str, Any]:
    """Return the sample that the first word of its generator names. Raises for a sample that is planned as bad."""
    time.sleep(WORK_S)
    if is_bad(_options.seed, index):
        raise ValueError(f"sample {index} is bad on purpose")
    return sample(_options.seed, index, int(rng.bit_generator.random_raw()), _options.sample_bytes)
