"""The random numbers of a sample, which follow from its identity in every process.

A sample may draw from three kinds of generators:

- the sample's own, which a transform takes as a parameter. Prefer it, because no other code draws from it
- the global generators of Python, numpy and torch, from which libraries draw
- generators inside objects that a user's dataset or transform holds, such as albumentations' Compose. Without a seed
  for each sample, forked workers would have copies in the same state, and other processes copies in another state
"""

from __future__ import annotations

import functools
import random
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from penstock_common.errors import SampleError
from penstock_producer.sources.names import blame

_SAMPLE = 1
"""The last counter word of Philox. The permutation of an epoch has 0 there (see `order`)."""


def sample_rng(seed: int, epoch: int, shard: int, offset: int) -> np.random.Generator:
    """Return the generator of one sample. It depends on seed and identity alone.

    Example:
        >>> round(sample_rng(7, epoch=3, shard=2, offset=1).random(), 4)
        0.4144
    """
    # With a key and a counter alone, numpy would first ask the system for entropy, which is slow. So the generator is
    # made from a seed, which `spawn` uses, and then set.
    seed &= 0xFFFF_FFFF_FFFF_FFFF
    philox = np.random.Philox(np.random.SeedSequence((seed, epoch, shard, offset)))
    state: Any = {
        "bit_generator": "Philox",
        "state": {"counter": (0, offset, shard, _SAMPLE), "key": (seed, epoch)},
        "buffer": (0, 0, 0, 0),
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    philox.state = state
    return np.random.Generator(philox)


def seed_globals(seed: int, epoch: int, shard: int, offset: int) -> None:
    """Seed the global generators of this process for the sample that is made next.

    It takes 6 microseconds, and 2 more where torch is imported.
    """
    words = struct.pack("<4Q", seed & 0xFFFF_FFFF_FFFF_FFFF, epoch, shard, offset)
    number = int.from_bytes(blake2b(words, digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number & 0xFFFF_FFFF)  # noqa: NPY002 - the old generator is the one that libraries draw from
    torch = sys.modules.get("torch")
    generator = getattr(torch, "default_generator", None)  # torch.manual_seed asks every device, for 0.2 ms
    if generator is not None:
        generator.manual_seed(number & 0x7FFF_FFFF_FFFF_FFFF)


DEEPEST = 8
"""The most steps from the dataset to a seeded object: an attribute, an item of a list, a value of a dict."""
WIDEST = 64
"""The items of a list or dict that are searched. Transforms are few, and file names are many."""
MOST = 10_000
"""The objects that one search visits at most."""
_WITHOUT_PARTS = (str, bytes, bytearray, int, float, complex, type, ModuleType, np.ndarray, np.generic, type(None))


@dataclass(frozen=True, slots=True)
class Seeded:
    """An object that is seeded for each sample."""

    where: str
    """The expression that leads to it, for messages."""
    target: Any


def reseed(held: Sequence[Seeded], rng: np.random.Generator, key: str) -> None:
    """Seed these objects from the generator of a sample.

    Args:
        held: the objects.
        rng: the sample's generator, from which one number is drawn for each object.
        key: the sample's name.

    Raises:
        SampleError: an object refused its seed.
    """
    for one in held:
        try:
            one.target.set_random_seed(int(rng.integers(1 << 32)))
        except Exception as error:
            raise SampleError(f"{key}: {one.where}.set_random_seed(seed) failed: {blame(error)}") from error


def find_seeded(root: Any, name: str) -> tuple[Seeded, ...]:
    """Find the objects with a ``set_random_seed`` that a dataset or transform holds.

    Args:
        root: the user's object. The search visits its attributes, those of its class, and items of lists and dicts. Of
            a function it visits the variables in its closure, and the globals that it names.
        name: the object's name in messages.

    Returns:
        Each object once, in an order that depends on the code alone. A seeded object seeds its own parts.
    """
    found: list[Seeded] = []
    seen = {id(root)}
    due = deque([(name, root, 0)])
    while due:
        where, value, depth = due.popleft()
        if callable(getattr(type(value), "set_random_seed", None)):
            found.append(Seeded(where, value))
            continue
        for label, part in _parts(value) if depth < DEEPEST else ():
            if id(part) not in seen and len(seen) < MOST and not isinstance(part, _WITHOUT_PARTS):
                seen.add(id(part))
                due.append((where + label, part, depth + 1))
    return tuple(found)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict):  # another mapping may be a file that reads, or fails: an h5py.File, a shelf
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), WIDEST))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(islice(value, WIDEST)))
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
    for name, part in ((name, part) for kind in type(value).__mro__ for name, part in vars(kind).items()):
        if isinstance(part, FunctionType) and name in ("__getitem__", "__getitems__", "__call__"):
            yield from _of_function(part)
        elif not name.startswith("__") and not hasattr(type(part), "__get__"):  # no methods, properties or slots
            yield f".{name}", part


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            yield f" ({name})", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    for name in function.__code__.co_names:
        part = function.__globals__.get(name)
        if not isinstance(part, FunctionType):  # a helper function is not searched
            yield f" ({name})", part
