"""A loader as an iterable of ``jax.Array`` batches, placed by a sharding, acknowledged from the training step.

``step_tracking`` decides what proves that a step is done, and ``selection`` which tensors a batch has.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Literal, overload

import jax
import numpy as np
from numpy.typing import NDArray

from penstock_common.errors import SpecMismatch
from penstock_common.hints import Passing, an, callable_of, explained, refuse_unpacking, whole
from penstock_consumer.adapters.step_tracking import StepTracker, require_loader
from penstock_consumer.read.hooks import AlwaysTrue
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_consumer.read.options import State
from penstock_consumer.replay.passes import Passes, held_back
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.selection import Select, chosen, refuse_ragged, shaped

PREFETCH = 2
"""The batches on the device beyond the one in the step: one that is ready, and one whose transfer is under way."""

Sharding = Any
"""A ``jax.sharding.Sharding`` or a device. None is JAX's default device."""


def _flat(batch: Batch) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    """Return a batch's tensors by name, in the order that JAX gives dicts, and their names.

    The identities are left out. As part of the structure they would make JAX compile every step again.
    """
    names = tuple(sorted(batch.keys()))
    return [(jax.tree_util.DictKey(name), batch[name]) for name in names], names


def _whole(names: tuple[str, ...], values: Iterable[Any]) -> Batch:
    return Batch(zip(names, values, strict=True))


jax.tree_util.register_pytree_with_keys(Batch, _flat, _whole)


@overload
def dataset(
    loader: Loader | Mixture,
    *,
    select: Select = None,
    nested: bool = False,
    sharding: Sharding | Mapping[str, Sharding] = None,
    prefetch: int = PREFETCH,
    remainder: Literal["keep", "pad", "drop"] | None = None,
    map: Callable[[Batch], Mapping[str, Any]] | None = None,
) -> Dataset: ...


@overload
def dataset(
    loader: Passes,
    *,
    select: Select = None,
    nested: bool = False,
    sharding: Sharding | Mapping[str, Sharding] = None,
    prefetch: int = PREFETCH,
    remainder: Literal["keep", "pad", "drop"] | None = None,
    map: Callable[[Batch], Mapping[str, Any]] | None = None,
) -> ReplayArrays: ...


@explained
def dataset(
    loader: Loader | Mixture | Passes,
    *,
    select: Select = None,
    nested: bool = False,
    sharding: Sharding | Mapping[str, Sharding] = None,
    prefetch: int = PREFETCH,
    remainder: Literal["keep", "pad", "drop"] | None = None,
    map: Callable[[Batch], Mapping[str, Any]] | None = None,
) -> Dataset | ReplayArrays:
    """Return an iterable of a loader's batches on JAX's devices.

    Each iteration is the group's next epoch, or the rest of an epoch that was left early. With
    ``acknowledge='on_next'`` a batch is acknowledged when the loop asks for the next one, however many are on the
    device already. On the CPU an array shares the batch's memory, which is never written again while JAX refers to it.
    Without JAX's x64 mode, 64-bit types become the 32-bit ones.

    For a `penstock.Replay` or `penstock.Files` each iteration is the whole epoch, and nothing is acknowledged.

    Args:
        loader: a Loader, a mixture, a Replay or Files.
        select: None gives dicts ``name -> [n, *shape]``. ``("x", "y")`` gives tuples, and ``"x"`` gives bare arrays.
        nested: whether names like ``a/b`` become dicts within dicts.
        sharding: a ``jax.sharding.Sharding`` or a device for all tensors, or a dict with one for each name. None means
            JAX's default device. A sharding over several processes needs a loader in canonical order, and each rank
            gives its part of each global array.
        prefetch: the batches that are on the device beyond the one in the step. Nothing waits for them.
        remainder: the use of an epoch's last batch if it is smaller. 'keep' gives it as it is, 'pad' fills it with its
            own first rows, and 'drop' counts it as trained on. The default is 'pad' if ``sharding`` cuts batches into
            pieces, else 'keep'.
        map: a function that takes each batch in numpy and returns a dict of arrays. Ragged tensors need one that makes
            arrays of them.

    Returns:
        The iterable. That of a loader or a mixture has ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: the options do not fit the stream, such as a ragged tensor without ``map``.
        SpecMismatch: during iteration, if an integer does not fit into 32 bits.

    Example:
        >>> for batch in penstock.jax.dataset(loader):
        ...     state = step(state, batch["x"], batch["y"])
    """
    if isinstance(loader, Passes):
        return ReplayArrays(loader, select, nested, sharding, prefetch, remainder, map)
    require_loader(loader)
    return Dataset(loader, select, nested, sharding, prefetch, remainder, map)


class Placing(AlwaysTrue, Passing):
    """A source whose batches become arrays on JAX's devices."""

    def __init__(
        self,
        loader: Loader | Mixture | Passes,
        select: Select,
        nested: bool,
        sharding: Sharding | Mapping[str, Sharding],
        prefetch: int,
        remainder: str | None,
        map: Callable[[Batch], Mapping[str, Any]] | None,
    ) -> None:
        for one in sharding.values() if isinstance(sharding, Mapping) else [sharding]:
            if one is not None and not isinstance(one, (jax.sharding.Sharding, jax.Device)):
                raise TypeError(
                    f"sharding is {one!r:.60}, {an(one)}; expected a jax.sharding.Sharding such as "
                    "NamedSharding(mesh, PartitionSpec('data')), or a dict of them by tensor"
                )
        whole("prefetch", prefetch, 0)
        if prefetch < 0 or remainder not in (None, "keep", "pad", "drop"):
            raise ValueError(
                f"prefetch={prefetch}, remainder={remainder!r}: expected 0 or more batches, and 'keep', 'pad' or 'drop'"
            )
        if map is not None:
            callable_of("map", map, "lambda batch: {**batch, 'x': batch['x'] / 255}")
        self._loader, self._select, self._nested, self._prefetch, self._map = loader, select, nested, prefetch, map
        if map is None:
            refuse_ragged(loader.spec, chosen(loader.spec.names, select), "JAX")
        self._sharding = sharding
        self._remainder = remainder or ("pad" if self._checked_cuts() else "keep")

    def __len__(self) -> int:
        """Return the batches of an epoch in canonical order. Raises TypeError if it is not known."""
        return len(self._loader)

    def _refuse_tuples(self, loop: FrameType) -> None:
        """Raise TypeError for ``for x, y in dataset`` if the dataset gives dicts."""
        if self._select is None and self._map is None:
            refuse_unpacking(loop, self._loader.spec.names, "penstock.jax.dataset(loader, select=({}))")

    def _element(self, batch: Batch) -> Any:
        """Return a batch on the devices, or None if it is dropped."""
        size = batch.size
        made: Mapping[str, Any] = self._map(batch) if self._map is not None else batch
        if not isinstance(made, Mapping):
            raise TypeError(f"map's function gave {an(made)}, expected a dict of arrays by name")
        names = chosen(tuple(made), self._select)
        arrays = {name: _narrowed(name, made[name]) for name in names}
        if size < self._loader.batch_size and self._remainder != "keep":
            if self._remainder == "drop":
                return None
            arrays = {name: _padded(array, self._loader.batch_size) for name, array in arrays.items()}
        return shaped(self._placed(arrays), self._select, is_nested=self._nested)

    # --- shardings ---

    def _of(self, name: str) -> Sharding:
        if not isinstance(self._sharding, Mapping):
            return self._sharding
        if name not in self._sharding:
            raise ValueError(f"sharding= has nothing for tensor {name!r}; give it one, or leave it out with select=")
        return self._sharding[name]

    def _placed(self, arrays: dict[str, Any]) -> dict[str, jax.Array]:
        shardings = {name: self._of(name) for name in arrays}
        if any(_spans_processes(sharding) for sharding in shardings.values()):
            return {
                name: jax.make_array_from_process_local_data(shardings[name], array) for name, array in arrays.items()
            }
        for name, array in arrays.items():
            _check_cut(name, shardings[name], array.shape)
        placed: dict[str, jax.Array] = jax.device_put(arrays, shardings)
        return placed

    def _checked_cuts(self) -> bool:
        """Return whether a sharding cuts batches. Raises ValueError if one is known to cut them unequally."""
        given = self._sharding.values() if isinstance(self._sharding, Mapping) else [self._sharding]
        if any(_spans_processes(sharding) for sharding in given):
            _refuse_unequal_steps(self._loader)
        elif self._map is None:
            for name in chosen(self._loader.spec.names, self._select):
                shape = (self._loader.batch_size, *(dim or 0 for dim in self._loader.spec[name].shape))
                _check_cut(name, self._of(name), shape)
        return any(isinstance(one, jax.sharding.Sharding) and not one.is_fully_replicated for one in given)


class Dataset(Placing):
    """The result of `dataset` for a loader or a mixture. Iterate over it.

    Example:
        >>> batches = penstock.jax.dataset(loader)
        >>> saved = batches.state_dict()
    """

    def __init__(self, loader: Loader | Mixture, *settings: Any) -> None:
        super().__init__(loader, *settings)
        self._tracker = StepTracker.of(loader)

    def __iter__(self) -> Iterator[Any]:
        self._refuse_tuples(sys._getframe(1))
        return self._passes()

    def _passes(self) -> Iterator[Any]:
        for _ in self._tracker.passes(is_ordered=True, is_drained=True):
            yield from self._one_pass()

    def state_dict(self) -> State:
        """Return the loader's state: the position of what was given to the loop, not of what is ready on the device.

        Returns:
            A dict that JSON can hold, for `load_state_dict`.
        """
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken. An iteration that is under way ends, and the next one begins there.

        Args:
            state: a dict that `state_dict` returned.

        Raises:
            StateMismatch: the state belongs to another loader.
        """
        self._tracker.load_state_dict(state)

    # --- one pass ---

    def _one_pass(self) -> Iterator[Any]:
        mine, source = self._tracker.running, self._tracker.batches()
        ahead: deque[tuple[Any, int]] = deque()
        while self._tracker.running is mine:
            self._fill(source, ahead)
            if not ahead:
                return
            element, token = ahead.popleft()
            self._tracker.arrive([token])
            yield element
            del element  # the memory is free as soon as the loop lets go of it
            if self._tracker.running is mine:
                self._tracker.report()  # before waiting: a writer may wait for just this space

    def _fill(self, source: Iterator[tuple[Batch, int]], ahead: deque[tuple[Any, int]]) -> None:
        """Put batches on the device that can be had without waiting. Wait for one only if there is none."""
        while len(ahead) <= self._prefetch and (not ahead or self._tracker.is_ready):
            batch, token = next(source, (None, 0))
            if batch is None:
                return
            element = self._element(batch)
            batch.clear()  # JAX keeps the memory that it reads from
            if element is not None:
                ahead.append((element, token))


class ReplayArrays(Placing):
    """A replay on JAX's devices. Each iteration is the whole epoch, and nothing is acknowledged."""

    def __iter__(self) -> Iterator[Any]:
        self._refuse_tuples(sys._getframe(1))
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        elements = map(self._element, self._loader)
        yield from held_back((element for element in elements if element is not None), self._prefetch)


def _refuse_unequal_steps(loader: Loader | Mixture | Passes) -> None:
    if isinstance(loader, Passes):
        raise ValueError(
            "this sharding spans several processes, and a replay gives each of them the same rows: give each process's "
            "arrays a sharding of its own devices, or read by a group with order='canonical'"
        )
    try:
        len(loader)
    except TypeError as error:
        raise ValueError(
            f"this sharding spans several processes, which must all have the same steps: {error}; give the Loader "
            "order=penstock.Canonical(jax.process_index(), jax.process_count())"
        ) from None


def _spans_processes(sharding: Sharding) -> bool:
    return isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable


def _check_cut(name: str, sharding: Sharding, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a sharding would cut a tensor into unequal pieces."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return
    try:
        sharding.shard_shape(shape)
    except (ValueError, IndexError) as error:  # IndexError: the sharding names more dimensions than there are
        raise ValueError(
            f"tensor {name!r} of shape {shape} cannot be cut into equal pieces: choose a batch_size that the devices "
            f"divide and remainder='pad' or 'drop' ({str(error).splitlines()[0]:.200})"
        ) from None


# --- what JAX can hold ------------------------------------------------------------------------------------------------


_X64 = "JAX has no 64-bit types unless jax_enable_x64 is set (JAX_ENABLE_X64=1); set it, or change the values with map="


def _narrowed(name: str, value: Any) -> Any:
    """Return a value as an array of a dtype that JAX keeps. Without x64 mode JAX cuts 64 bits to 32 silently."""
    if isinstance(value, jax.Array):
        return value
    if not isinstance(value, np.ndarray):
        raise SpecMismatch(name, f"a {type(value).__name__}", "a numpy or JAX array from map", "pad what is ragged")
    kept = np.dtype(jax.dtypes.canonicalize_dtype(value.dtype))
    if kept == value.dtype:
        return value
    if kept.kind in "iu" and value.size:
        low, high, limits = value.min(), value.max(), np.iinfo(kept)
        if low < limits.min or high > limits.max:
            raise SpecMismatch(
                name,
                f"{value.dtype} values from {low} to {high}",
                f"what {kept} can hold",
                _X64,
            )
    with np.errstate(over="ignore"):
        narrow: NDArray[Any] = value.astype(kept)
    is_suspect = kept.kind in "fc" and not np.isfinite(narrow).all()
    if is_suspect and (lost := np.isfinite(value) & ~np.isfinite(narrow)).any():
        raise SpecMismatch(name, f"a {value.dtype} value of {value[lost][0]:.6g}", f"what {kept} can hold", _X64)
    return narrow


def _padded(array: Any, size: int) -> NDArray[Any]:
    values: NDArray[Any] = np.asarray(array)
    return values[np.arange(size) % len(values)]
