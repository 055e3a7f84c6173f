"""The random numbers of a sample, which follow from its identity in every process.

A sample may draw from three kinds of generators:

- the sample's own, which a transform takes as a parameter. Prefer it, because only seeds of Compose and its like are
  drawn from it, too
- the global generators of Python, numpy and torch, from which libraries draw
- generators that a user's dataset or transform holds, such as numpy's, or those inside albumentations' Compose. Without
  a seed for each sample, forked workers would have copies in the same state, and other processes copies in another
  state
"""

from __future__ import annotations

import functools
import random
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from penstock_common.errors import SampleError
from penstock_producer.sources.names import blame

_HELD = 0xFFFF_FFFF
"""The key of the seeds of generators that a user's code holds. `spawn` counts its keys from 0."""
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
    _set_state(philox, state)
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
    seed: Callable[[int], object]
    """The function that seeds it, with 32 bits."""
    is_generator: bool
    """Whether it is a generator of numpy, Python or torch, and not an object with a ``set_random_seed``."""


def reseed(held: Sequence[Seeded], rng: np.random.Generator, key: str) -> None:
    """Seed these objects from the generator of a sample.

    Args:
        held: the objects.
        rng: the sample's generator. One number is drawn for each object with a ``set_random_seed``. Generators are
            seeded from what it was seeded with, so that it gives the user's code the same numbers as without them.
        key: the sample's name.

    Raises:
        SampleError: an object refused its seed.
    """
    generators = sum(one.is_generator for one in held)
    words = iter(_held_seed(rng).generate_state(generators).tolist() if generators else ())
    for one in held:
        try:
            one.seed(next(words) if one.is_generator else int(rng.integers(1 << 32)))
        except Exception as error:
            how = f"seeding {one.where}" if one.is_generator else f"{one.where}.set_random_seed(seed)"
            raise SampleError(f"{key}: {how} failed: {blame(error)}") from error


def _held_seed(rng: np.random.Generator) -> np.random.SeedSequence:
    seed: Any = rng.bit_generator.seed_seq
    return np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, _HELD))


def _seed_of(value: Any) -> Callable[[int], object] | None:
    """Return the function that seeds a generator, or None for another object.

    The global generators are not meant, because `seed_globals` seeds them. Nor are classes of the user's own, which
    may take another seed, or none.
    """
    if isinstance(value, np.random.Generator):
        is_known = type(value.bit_generator).__module__.startswith("numpy.random.")
        return functools.partial(_seed_bits, value.bit_generator) if is_known else None
    if type(value) is np.random.RandomState and value is not np.random.mtrand._rand:
        is_seeded = value.get_state(legacy=False)["bit_generator"] == "MT19937"  # numpy seeds no other
        return value.seed if is_seeded else None
    if type(value) is random.Random and value is not random._inst:
        return value.seed
    torch: Any = sys.modules.get("torch")
    kind: Any = getattr(torch, "Generator", ())
    if isinstance(value, kind) and value is not torch.default_generator:
        # a device's generator may not be used in a forked process
        return value.manual_seed if value.device.type == "cpu" else None
    return None


def _seed_bits(bits: np.random.BitGenerator, number: int) -> None:
    """Seed a bit generator in place, because a user's code holds it."""
    _set_state(bits, type(bits)(number).state)


def _set_state(bits: np.random.BitGenerator, state: Any) -> None:
    bits.state = state


def find_seeded(root: Any, name: str) -> tuple[Seeded, ...]:
    """Find the generators, and the objects with a ``set_random_seed``, that a dataset or transform holds.

    Args:
        root: the user's object. The search visits its attributes, those of its class, and items of lists and dicts. Of
            a function it visits its defaults, the variables in its closure, the globals that it names, and the
            functions of its module that it names.
        name: the object's name in messages.

    Returns:
        Each object once, in an order that depends on the code alone, generators last. An object with a
        ``set_random_seed`` seeds its own parts.
    """
    found: list[Seeded] = []
    generators: list[Seeded] = []
    seen = {id(root)}
    due = deque([(name, root, 0)])
    while due:
        where, value, depth = due.popleft()
        if callable(getattr(type(value), "set_random_seed", None)):
            found.append(Seeded(where, value, value.set_random_seed, is_generator=False))
            continue
        if (seed := _seed_of(value)) is not None:
            generators.append(Seeded(where, value, seed, is_generator=True))
            continue
        for label, part in _parts(value) if depth < DEEPEST else ():
            if id(part) not in seen and len(seen) < MOST and not isinstance(part, _WITHOUT_PARTS):
                seen.add(id(part))
                due.append((where + label, part, depth + 1))
    return (*found, *generators)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, BuiltinMethodType):
        yield "", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("", part) for part in (value.func, *value.args, *value.keywords.values()))
    elif isinstance(value, dict):  # another mapping may be a file that reads, or fails: an h5py.File, a shelf
        yield from ((f"[{key!r}]", part) for key, part in islice(value.items(), WIDEST))
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(islice(value, WIDEST)))
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
    for method in _methods_of(type(value)):
        yield from _of_function(method)
    for name, part in ((name, part) for kind in type(value).__mro__ for name, part in vars(kind).items()):
        if not name.startswith("__") and not hasattr(type(part), "__get__"):  # no methods, properties or slots
            yield f".{name}", part


def _methods_of(kind: type) -> Iterator[FunctionType]:
    """Yield the methods that make a sample, and those of the same class that they name."""
    methods: dict[str, list[FunctionType]] = {}
    for name, part in ((name, part) for base in kind.__mro__ for name, part in vars(base).items()):
        if isinstance(part, FunctionType):
            methods.setdefault(name, []).append(part)
    due: list[str] = [name for name in ("__getitem__", "__getitems__", "__call__") if name in methods]
    for name in due:
        for method in methods[name]:
            yield method
            due += [other for other in _globals_in(method.__code__) if other in methods and other not in due]


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for name, cell in cells:
        try:
            yield f" ({name})", cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from ((" (default)", part) for part in defaults)
    for name in _globals_in(function.__code__):
        part = function.__globals__.get(name)
        if not isinstance(part, FunctionType) or part.__globals__ is function.__globals__:  # of this module
            yield f" ({name})", part


def _globals_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function, with those in its comprehensions and inner functions."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _globals_in(part)
