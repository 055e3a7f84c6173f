"""The generators that code finds without being given one, set by a sample's identity: Python's, numpy's, torch's.

So a library that draws from them makes the same sample again, in whichever process. The generator that a transform is
given is ``plan``'s, and better: nobody else draws from it.
"""

from __future__ import annotations

import random
import struct
import sys
from hashlib import blake2b

import numpy as np


def seed_globals(seed: int, epoch: int, shard: int, offset: int) -> None:
    """For the sample that is made next in this process. Six microseconds, two more where torch is imported."""
    words = struct.pack("<4Q", seed & 0xFFFF_FFFF_FFFF_FFFF, epoch, shard, offset)
    number = int.from_bytes(blake2b(words, digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number & 0xFFFF_FFFF)  # noqa: NPY002 - it is the old generator that others' code draws from
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)  # torch.manual_seed asks every device, for 0.2 ms
    if generator is not None:
        generator.manual_seed(number & 0x7FFF_FFFF_FFFF_FFFF)
