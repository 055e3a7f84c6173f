"""A loader as a ``tf.data.Dataset``, acknowledged from the training step however far tf.data reads ahead.

What counts as proof that a step is done is ``settling``'s; Keras's own callback is ``keras``'s.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from penstock_common.format.dtypes import BYTES
from penstock_common.format.ragged import Ragged
from penstock_common.format.spec import TensorSpec
from penstock_consumer.adapters.selection import Select
from penstock_consumer.adapters.selection import chosen as names_of
from penstock_consumer.adapters.settling import Feed
from penstock_consumer.loader import Loader
from penstock_consumer.mixture import Mixture
from penstock_consumer.pipeline.batch import Batch

_SAME_BATCHES = ("skip", "shuffle", "prefetch", "repeat", "cache", "with_options", "batch", "ragged_batch")
"""Elements go through whole, so their tokens go with them."""
_CUTTING = ("take", "shard")
_REMAKING = (
    "unbatch", "rebatch", "flat_map", "interleave", "concatenate", "window", "padded_batch", "enumerate", "scan",
    "group_by_window", "bucket_by_sequence_length", "snapshot", "unique", "ignore_errors", "rejection_resample",
)  # fmt: skip
"""What comes out cannot be told from what went in; all of it has come out when the pass ends."""


def dataset(loader: Loader | Mixture, *, select: Select = None) -> tf.data.Dataset:
    """The loader's batches: each pass over the dataset is the group's next epoch, or the rest of a broken-off one.

    Elements are dicts ``name -> [n, *shape]``; ``select=("x", "y")`` makes them tuples, as ``fit`` wants, and
    ``select="x"`` bare tensors. Ragged tensors are ``tf.RaggedTensor``, ``bytes`` are ``tf.string``. Waits, saying for
    what, until the stream has a spec. ``acknowledge='on_next'`` means here: a batch is acknowledged when the training
    step asks for the next one. With ``'on_checkpoint'`` it then waits for `Loader.checkpointed`, which counts the
    batch in the step's hands too, and which ``penstock.keras.ModelCheckpoint`` calls. What a transformation does:

    - ``map``, ``prefetch``, ``cache``, ``batch``, ``repeat``: acknowledged when the step is done with them.
    - ``filter``, ``skip``: a dropped batch counts as read, with the next batch that is not dropped or at the end.
    - ``shuffle``: acknowledged by what left the buffer; what was in it when the pass was broken off comes again.
    - ``take``: what was not taken comes in the next pass, also what a buffer before it had pulled.
    - ``unbatch``, ``rebatch``, ``interleave``, ``concatenate`` and their like: at the end of the pass.
    - ``zip``, ``tf.distribute`` and loops inside a ``tf.function`` hide the step: see `acknowledging`.
    """
    feed = Feed.of(loader)
    spec = loader.spec
    chosen = [spec[name] for name in names_of(spec.names, select)]
    _no_alarm_at_the_end()

    def shaped(values: list[Any]) -> Any:
        if select is None:
            return dict(zip(spec.names, values, strict=True))
        return values[0] if isinstance(select, str) else tuple(values)

    source = tf.data.Dataset.from_generator(
        functools.partial(_flat_batches, feed, chosen, shaped),
        output_signature=(shaped([_flat_spec(tensor) for tensor in chosen]), tf.TensorSpec((), tf.int64)),
    )
    if any(tensor.is_ragged and tensor.dtype != BYTES for tensor in chosen):

        def assemble(element: Any, token: Any) -> tuple[Any, Any]:
            parts = [element[t.name] for t in chosen] if select is None else element
            parts = [parts] if isinstance(select, str) else parts
            return shaped([_assembled(tensor, part) for tensor, part in zip(chosen, parts, strict=True)]), token

        source = source.map(assemble)
    return FedDataset(source, feed, is_ordered=True, is_drained=True)


def acknowledging(made: tf.data.Dataset, source: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset made of ``source`` where nobody could follow (``zip``): acknowledged when a pass ends by itself."""
    if not isinstance(source, FedDataset):
        raise TypeError(f"source is a {type(source).__name__}, expected what penstock.tensorflow.dataset returned")
    return source.remade(made)


class FedDataset(tf.data.Dataset):  # tf.data's own classes are subclasses like this one
    """A dataset whose transformations carry each batch's token along, unseen, to where it is iterated."""

    def __init__(
        self, inner: tf.data.Dataset, feed: Feed, *, is_ordered: bool, is_drained: bool, is_parallel: bool = False
    ) -> None:
        """``inner`` has elements (what the user sees, token)."""
        self._inner, self.feed, self._is_parallel = inner, feed, is_parallel
        self._is_ordered, self._is_drained = is_ordered, is_drained
        self._seen = inner.map(lambda element, _: element)
        super().__init__(self._seen._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._seen]

    @property
    def element_spec(self) -> Any:
        """As of any dataset; the batch dimension is None."""
        return self._seen.element_spec

    def _then(
        self, inner: tf.data.Dataset, *, is_ordered: bool = True, is_drained: bool = True, is_parallel: bool = False
    ) -> FedDataset:
        return FedDataset(
            inner,
            self.feed,
            is_ordered=self._is_ordered and is_ordered,
            is_drained=self._is_drained and is_drained,
            is_parallel=self._is_parallel or is_parallel,
        )

    def remade(self, made: tf.data.Dataset) -> FedDataset:
        """A dataset whose elements have no tokens."""
        return self._then(made.map(_without_token), is_ordered=False, is_parallel=True)

    def map(self, map_func: Callable[..., Any], *args: Any, **settings: Any) -> FedDataset:
        """``tf.data.Dataset.map``."""

        def with_token(element: Any, token: Any) -> tuple[Any, Any]:
            return (map_func(*element) if isinstance(element, tuple) else map_func(element)), token

        made = self._inner.map(with_token, *args, **settings)
        is_parallel = bool(args) or settings.get("num_parallel_calls") is not None
        return self._then(made, is_ordered=settings.get("deterministic") is not False, is_parallel=is_parallel)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> FedDataset:
        """``tf.data.Dataset.filter``."""

        def without_token(element: Any, _: Any) -> Any:
            return predicate(*element) if isinstance(element, tuple) else predicate(element)

        return self._then(self._inner.filter(without_token, name=name))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> FedDataset:
        """``tf.data.Dataset.take_while``."""

        def without_token(element: Any, _: Any) -> Any:
            return predicate(*element) if isinstance(element, tuple) else predicate(element)

        return self._then(self._inner.take_while(without_token, name=name), is_drained=False)

    def reduce(self, *args: Any, **settings: Any) -> Any:
        """``tf.data.Dataset.reduce``: one pass."""
        return self._watched().reduce(*args, **settings)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._watched())

    def _watched(self) -> tf.data.Dataset:
        """What is iterated: each element is reported when it is asked for, and the end when it is reached."""
        passes = functools.partial(self.feed.passes, is_ordered=self._is_ordered, is_drained=self._is_drained)
        rounds = tf.data.Dataset.from_generator(passes, output_signature=tf.TensorSpec((), tf.int64))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would ask before the step does
        if not self._is_parallel and self._inner.options().threading.private_threadpool_size is None:
            # a batch comes from Python, one at a time; more threads only spin while they wait for it
            options.threading.private_threadpool_size = 1
        return rounds.flat_map(lambda _: self._inner).map(self._report).with_options(options)

    def _report(self, element: Any, tokens: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(self._arrive, [tokens], tf.int64, stateful=True)]):
            return tf.nest.map_structure(tf.identity, element, expand_composites=True)

    def _arrive(self, tokens: Any) -> Any:
        self.feed.arrive([token for token in np.ravel(tokens).tolist() if token >= 0])
        return np.int64(0)


def _passing(name: str, *, is_drained: bool = True) -> Callable[..., FedDataset]:
    def method(self: FedDataset, *args: Any, **settings: Any) -> FedDataset:
        made = getattr(self._inner, name)(*args, **settings)
        return self._then(
            made,
            is_ordered=name != "shuffle" and made.options().deterministic is not False,
            is_drained=is_drained,
            is_parallel=settings.get("num_parallel_calls") is not None,
        )

    method.__name__, method.__doc__ = name, f"``tf.data.Dataset.{name}``."
    return method


def _remaking(name: str) -> Callable[..., FedDataset]:
    def method(self: FedDataset, *args: Any, **settings: Any) -> FedDataset:
        return self.remade(getattr(self._seen, name)(*args, **settings))

    method.__name__, method.__doc__ = name, f"``tf.data.Dataset.{name}``."
    return method


for _name in (*_SAME_BATCHES, *_CUTTING, *_REMAKING):
    if hasattr(tf.data.Dataset, _name):
        made = _remaking(_name) if _name in _REMAKING else _passing(_name, is_drained=_name not in _CUTTING)
        setattr(FedDataset, _name, made)


def _without_token(*element: Any) -> tuple[Any, Any]:
    return (element if len(element) > 1 else element[0]), tf.constant(-1, tf.int64)


def _no_alarm_at_the_end() -> None:
    """Keras warns whenever a dataset of unknown length ends; no feed can know its length, and every epoch ends."""
    warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)


# --- batches as flat tensors, and back --------------------------------------------------------------------------------


def _tf_dtype(tensor: TensorSpec) -> tf.DType:
    return tf.string if tensor.dtype == BYTES else tf.as_dtype(tensor.dtype)


def _levels(tensor: TensorSpec) -> int:
    """Dimensions of a sample up to the last one that differs."""
    return max(position for position, dim in enumerate(tensor.shape) if dim is None) + 1


def _flat_spec(tensor: TensorSpec) -> Any:
    dtype = _tf_dtype(tensor)
    if not tensor.is_ragged or tensor.dtype == BYTES:
        return tf.TensorSpec((None, *tensor.shape), dtype)
    levels = _levels(tensor)
    splits = (tf.TensorSpec((None,), tf.int64),) * levels
    return (tf.TensorSpec((None, *tensor.shape[levels:]), dtype), *splits)


def _flat_batches(
    feed: Feed, chosen: list[TensorSpec], shaped: Callable[[list[Any]], Any]
) -> Iterator[tuple[Any, int]]:
    for batch, token in feed.batches():
        yield shaped([_flat_value(tensor, batch) for tensor in chosen]), token


def _flat_value(tensor: TensorSpec, batch: Batch) -> Any:
    value = batch[tensor.name]
    if not tensor.is_ragged:
        return value
    if tensor.dtype == BYTES:
        strings = np.empty(len(value), dtype=object)
        strings[:] = list(value)
        return strings
    return _flat_ragged(tensor, value)


def _flat_ragged(tensor: TensorSpec, value: Ragged) -> tuple[Any, ...]:
    """Values with the uniform inner dimensions, and where each row of each outer dimension ends."""
    levels = _levels(tensor)
    splits, rows = [], np.ones(len(value), dtype=np.int64)
    for level in range(levels):
        lengths = np.repeat(value.shapes[:, level], rows)
        splits.append(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        rows = rows * value.shapes[:, level]
    inner = tensor.shape[levels:]
    return (value.values.reshape(int(rows.sum()), *inner), *splits)


def _assembled(tensor: TensorSpec, part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    values, *splits = part
    for level in reversed(range(len(splits))):
        size = tensor.shape[level]
        if size is None:
            values = tf.RaggedTensor.from_row_splits(values, splits[level], validate=False)
        else:
            count = tf.shape(splits[level], tf.int64)[0] - 1
            values = tf.RaggedTensor.from_uniform_row_length(values, size, nrows=count, validate=False)
    return values
