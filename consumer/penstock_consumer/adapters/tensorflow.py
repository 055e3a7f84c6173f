"""A loader as a ``tf.data.Dataset``, acknowledged from the training step however far tf.data reads ahead.

``step_tracking`` decides what proves that a step is done. ``keras`` has the callbacks that ``fit`` takes.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, overload

import numpy as np
import tensorflow as tf

from penstock_common.errors import PenstockError
from penstock_common.hints import explained, one_argument, refuse_unpacking
from penstock_common.waiting import to_stderr
from penstock_common.wire.dtypes import BYTES
from penstock_common.wire.ragged import Ragged
from penstock_common.wire.spec import TensorSpec
from penstock_consumer.adapters.step_tracking import StepTracker, TrackedIteration, require_loader
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.read.mixture import Mixture
from penstock_consumer.read.options import State
from penstock_consumer.replay.passes import Passes
from penstock_consumer.stages.batch import Batch
from penstock_consumer.stages.selection import Select, chosen, shaped

_SAME_BATCHES = ("skip", "shuffle", "prefetch", "repeat", "cache", "with_options", "ragged_batch", "shard")
"""The transformations that pass each element on whole, so that its token goes with it."""
_SAME_NUMBER = ("shuffle", "prefetch", "cache", "with_options")
_REMAKING = (
    "unbatch", "rebatch", "flat_map", "interleave", "concatenate", "window", "padded_batch", "enumerate", "scan",
    "group_by_window", "bucket_by_sequence_length", "snapshot", "unique", "ignore_errors", "rejection_resample",
)  # fmt: skip
"""The transformations whose output cannot be traced to their input. All input has come out when the pass ends."""


@overload
def dataset(
    loader: Loader | Mixture, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "ragged"
) -> TrackedDataset: ...


@overload
def dataset(
    loader: Passes, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "ragged"
) -> tf.data.Dataset: ...


@explained
def dataset(
    loader: Loader | Mixture | Passes, *, select: Select = None, nested: bool = False, ragged: RaggedAs = "ragged"
) -> tf.data.Dataset:
    """Return a ``tf.data.Dataset`` of a loader's batches. Waits until the stream has a spec, and says so.

    Each pass is the group's next epoch, or the rest of an epoch that was left early. The element_spec is static. Its
    batch dimension is static, too, if the loader's ``remainder`` is 'pad' or 'drop'.

    With ``acknowledge='on_next'`` a batch is acknowledged when the training step asks for the next one. With
    ``'on_checkpoint'`` it then waits for `Loader.checkpointed`, which ``penstock.keras.ModelCheckpoint`` calls and
    which includes the batch of the running step. Transformations change when a batch is acknowledged:

    - ``map``, ``prefetch``, ``cache``, ``batch``, ``repeat``: when the step is done with the batch.
    - ``filter``, ``skip``: a dropped batch with the next batch that is not dropped, or at the end of the pass.
    - ``shuffle``: what left the buffer. What was in the buffer when a pass was left early comes again.
    - ``take``: what was not taken comes in the next pass, and so does what a buffer before it had pulled.
    - ``unbatch``, ``rebatch``, ``interleave``, ``concatenate`` and similar ones: at the end of the pass.
    - ``zip``, ``sample_from_datasets``, ``assert_cardinality`` hide the step, so they need `acknowledging`.

    A ``tf.function`` that loops takes ``iter(dataset)``. ``save``, and ``tf.distribute`` with ``fit``, are refused.

    For a `penstock.Replay` or `penstock.Files` it is a plain dataset. Each pass is the whole epoch, its length is
    known, nothing is acknowledged, and every transformation may follow.

    Args:
        loader: a Loader, a mixture, a Replay or Files.
        select: None gives dicts ``name -> [n, *shape]``. ``("x", "y")`` gives tuples, as ``fit`` wants them, and
            ``"x"`` gives bare tensors.
        nested: whether names like ``a/b`` become dicts within dicts.
        ragged: 'ragged' gives ``tf.RaggedTensor`` for a ragged tensor, and 'padded' gives a dense tensor that is filled
            with zeros. ``bytes`` are ``tf.string``.

    Returns:
        The dataset. That of a loader or a mixture has ``state_dict`` and ``load_state_dict``.

    Raises:
        ValueError: ``ragged`` is neither, or ``select`` names a tensor that the stream lacks.

    Example:
        >>> dataset = penstock.tensorflow.dataset(loader, select=("x", "y"))
        >>> model.fit(dataset, epochs=3)
    """
    if ragged not in ("ragged", "padded"):
        raise ValueError(f"ragged is {ragged!r}, expected 'ragged' or 'padded'")
    require_loader(loader)
    rows = None if isinstance(loader, Passes) else hooks_of(loader).rows
    tensors = [loader.spec[name] for name in chosen(loader.spec.names, select)]
    is_flat = any(is_composite(tensor, ragged) for tensor in tensors)
    form: Callable[[dict[str, Any]], Any] = dict if is_flat else functools.partial(_form, select, nested)

    def flat(batch: Batch) -> Any:
        return form({tensor.name: flat_value(tensor, batch[tensor.name], ragged) for tensor in tensors})

    spec = form({tensor.name: flat_spec(tensor, rows, ragged) for tensor in tensors})

    def assemble(element: Any) -> Any:
        values = {tensor.name: assembled(tensor, element[tensor.name], rows) for tensor in tensors}
        return _form(select, nested, values)

    if isinstance(loader, Passes):
        replayed = tf.data.Dataset.from_generator(lambda: map(flat, loader), output_signature=spec)
        replayed = replayed.apply(tf.data.experimental.assert_cardinality(len(loader)))
        return replayed.map(assemble) if is_flat else replayed
    _no_alarm_at_the_end()
    tracker = StepTracker.of(loader)

    def ahead() -> Iterator[tuple[Any, int]]:
        for batch, token in tracker.batches():
            yield flat(batch), token

    def asked() -> Iterator[Any]:
        for batch in tracker.asked():
            yield flat(batch)

    source = tf.data.Dataset.from_generator(ahead, output_signature=(spec, tf.TensorSpec((), tf.int64)))
    untouched = None if is_flat else tf.data.Dataset.from_generator(asked, output_signature=spec)
    if is_flat:  # with a map on the way, which tf.data may run ahead
        source = source.map(lambda element, token: (assemble(element), token))
    return TrackedDataset(source, tracker, is_ordered=True, is_drained=True, steps=_all, untouched=untouched)


def _form(select: Select, nested: bool, values: dict[str, Any]) -> Any:
    return shaped(values, select, is_nested=nested)


def acknowledging(made: tf.data.Dataset, source: tf.data.Dataset) -> TrackedDataset:
    """Return a dataset that was made of ``source`` by what hides the step, such as ``zip``, so that it acknowledges.

    Its batches are acknowledged when a pass runs to its end. It is not for ``tf.distribute``, which reads ahead of what
    is iterated here.

    Args:
        made: the dataset that a transformation made.
        source: the result of `dataset` that it was made of.

    Returns:
        The dataset ``made``, with the methods of `dataset`'s result.

    Raises:
        TypeError: ``source`` is no result of `dataset`.

    Example:
        >>> source = penstock.tensorflow.dataset(loader)
        >>> pairs = penstock.tensorflow.acknowledging(tf.data.Dataset.zip((source, others)), source)
    """
    if not isinstance(source, TrackedDataset):
        raise TypeError(f"source is a {type(source).__name__}, expected what penstock.tensorflow.dataset returned")
    return source.remade(made)


class TrackedDataset(tf.data.Dataset):  # tf.data's own classes are subclasses like this one
    """A dataset whose transformations carry each batch's token along, unseen, to where it is iterated."""

    def __init__(
        self, inner: tf.data.Dataset, tracker: StepTracker, *, is_ordered: bool, is_drained: bool,
        is_parallel: bool = False, steps: Steps | None = None, untouched: tf.data.Dataset | None = None,
    ) -> None:  # fmt: skip
        """Wrap ``inner``, whose elements are pairs of what the user sees and a token.

        ``untouched`` has the same elements without tokens, and reports each where it is made. So tf.data runs Python
        once for an element instead of twice. It is used only if no transformation follows that could read ahead.
        """
        self._untouched = untouched
        self._inner, self.tracker, self._is_parallel = inner, tracker, is_parallel
        self._is_ordered, self._is_drained, self._steps = is_ordered, is_drained, steps
        self._seen = inner.map(lambda element, _: element)
        self._position = CheckpointPosition(tracker)
        super().__init__(self._seen._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._seen]

    @property
    def element_spec(self) -> Any:
        """The spec of an element, as for any dataset."""
        return self._seen.element_spec

    def cardinality(self) -> tf.Tensor:
        """Return the steps of an epoch if the loader knows them, as every rank of an ordered group does."""
        if self._steps is None:
            return self._seen.cardinality()
        try:
            count = self._steps(len(self.tracker.loader))
        except TypeError:
            count = tf.data.UNKNOWN_CARDINALITY
        return tf.constant(count, tf.int64)

    # --- state ---

    def state_dict(self) -> State:
        """Return the loader's state: the position of the training step, however far tf.data has read ahead."""
        return self.tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next pass where the state was taken, and end one that is under way. Raises StateMismatch."""
        self.tracker.load_state_dict(state)

    def _trackable_children(self, save_type: str = "checkpoint", **settings: Any) -> dict[str, Any]:
        """Return the position of the training step, for ``tf.train.Checkpoint(model=model, data=ds)``."""
        if save_type != "checkpoint":
            children: dict[str, Any] = super()._trackable_children(save_type, **settings)
            return children
        return {"position": self._position}

    def _lookup_dependency(self, name: str, *others: Any) -> Any:
        """Return what a restored checkpoint saved under this name."""
        return self._position if name == "position" else super()._lookup_dependency(name, *others)

    # --- transformations ---

    def _then(
        self, inner: tf.data.Dataset, *, is_ordered: bool = True, is_drained: bool = True, is_parallel: bool = False,
        steps: Steps | None = None,
    ) -> TrackedDataset:  # fmt: skip
        return TrackedDataset(
            inner,
            self.tracker,
            is_ordered=self._is_ordered and is_ordered,
            is_drained=self._is_drained and is_drained,
            is_parallel=self._is_parallel or is_parallel,
            steps=_both(self._steps, steps),
        )

    def remade(self, made: tf.data.Dataset) -> TrackedDataset:
        """Return a dataset made of this one whose elements have no tokens."""
        return self._then(made.map(_without_token), is_ordered=False, is_parallel=True)

    def map(self, map_func: Callable[..., Any], *args: Any, **settings: Any) -> TrackedDataset:
        """Do as ``tf.data.Dataset.map`` does."""
        if isinstance(self.element_spec, dict):
            one_argument("map", map_func, "element", "dataset(loader, select=('x', 'y')) gives tuples")

        def with_token(element: Any, token: Any) -> tuple[Any, Any]:
            made = map_func(*element) if isinstance(element, tuple) else map_func(element)
            return (tuple(made) if isinstance(made, list) else made), token  # as tf.data itself takes a list

        made = self._inner.map(with_token, *args, **settings)
        is_parallel = bool(args) or settings.get("num_parallel_calls") is not None
        is_ordered = settings.get("deterministic") is not False
        return self._then(made, is_ordered=is_ordered, is_parallel=is_parallel, steps=_all)

    def take(self, count: Any, name: str | None = None) -> TrackedDataset:
        """Do as ``tf.data.Dataset.take`` does."""
        steps = _taking(count) if isinstance(count, int) and count >= 0 else None
        return self._then(self._inner.take(count, name=name), is_drained=False, steps=steps)

    def filter(self, predicate: Callable[..., Any], name: str | None = None) -> TrackedDataset:
        """Do as ``tf.data.Dataset.filter`` does."""

        def without_token(element: Any, _: Any) -> Any:
            return predicate(*element) if isinstance(element, tuple) else predicate(element)

        return self._then(self._inner.filter(without_token, name=name))

    def take_while(self, predicate: Callable[..., Any], name: str | None = None) -> TrackedDataset:
        """Do as ``tf.data.Dataset.take_while`` does."""

        def without_token(element: Any, _: Any) -> Any:
            return predicate(*element) if isinstance(element, tuple) else predicate(element)

        return self._then(self._inner.take_while(without_token, name=name), is_drained=False)

    def batch(self, batch_size: Any, *args: Any, **settings: Any) -> TrackedDataset:
        """Do as ``tf.data.Dataset.batch`` does. The elements are batches already, so it makes batches of batches."""
        if self._untouched is not None:
            to_stderr(
                f"penstock.tensorflow.dataset(loader) gives batches of {self.tracker.loader.batch_size} already, and "
                f".batch({batch_size}) makes batches of batches: leave it out, and give the Loader its batch_size"
            )
        return _batching(self, batch_size, *args, **settings)

    def reduce(self, *args: Any, **settings: Any) -> Any:
        """Do as ``tf.data.Dataset.reduce`` does, in one pass."""
        return self._watched().reduce(*args, **settings)

    def save(self, *_: Any, **__: Any) -> None:
        """Refuse. An incomplete file would be all that is left of samples that were acknowledged."""
        raise PenstockError("tf.data cannot save the batches of a stream: copy its epochs by `penstock export` instead")

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.element_spec, dict):
            refuse_unpacking(sys._getframe(1), self.element_spec, "penstock.tensorflow.dataset(loader, select=({}))")
            if sys._getframe(1).f_globals.get("__name__", "").startswith("keras."):
                self._tell_fit(", ".join(map(repr, self.element_spec)))
        return iter(self._watched())

    def _tell_fit(self, names: str) -> None:
        """Say that ``fit`` takes a dict as inputs without targets. A model with its own train_step may want that."""
        to_stderr(
            f"Keras is given dicts of {names}, which it takes for inputs without targets: for inputs and targets write "
            "penstock.tensorflow.dataset(loader, select=('x', 'y'))"
        )

    def _watched(self) -> tf.data.Dataset:
        """Return the dataset that is iterated. It reports each element when it is asked for, and the end of a pass."""
        watch = _IterationWatch(self.tracker)
        passes = functools.partial(watch.passes, is_ordered=self._is_ordered, is_drained=self._is_drained)
        rounds = tf.data.Dataset.from_generator(passes, output_signature=tf.TensorSpec((), tf.int64))
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False  # it would ask before the step does
        if not self._is_parallel and self._inner.options().threading.private_threadpool_size is None:
            # a batch comes from Python, one at a time, and further threads would only spin while they wait for it
            options.threading.private_threadpool_size = 1
        if (untouched := self._untouched) is not None:
            return rounds.flat_map(lambda _: untouched).with_options(options)
        return rounds.flat_map(lambda _: self._inner).take_while(watch.report).map(_alone).with_options(options)


class _IterationWatch:
    """A watch over one iteration. It reports what arrives until another pass or a loaded state takes over."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker
        self._mine: TrackedIteration | None = None

    def passes(self, **kind: bool) -> Iterator[int]:
        """Drive one pass, as `StepTracker.passes` says."""
        for number in self._tracker.passes(**kind):
            self._mine = self._tracker.running
            yield number

    def report(self, _: Any, tokens: Any) -> Any:
        """Report an element that the step asks for, in the graph. The result is False if another pass took over."""
        return tf.ensure_shape(tf.numpy_function(self._arrive, [tokens], tf.bool, stateful=True), ())

    def _arrive(self, tokens: Any) -> Any:
        if self._tracker.running is not self._mine:
            return np.bool_(False)
        self._tracker.arrive([token for token in np.ravel(tokens).tolist() if token >= 0])
        return np.bool_(True)


def _alone(element: Any, _: Any) -> Any:
    """Return the element without its token.

    This map follows the report. tf.data runs a map without side effects in parallel, and so ahead of the step.
    """
    with tf.control_dependencies([tf.timestamp()]):  # a side effect
        return tf.nest.map_structure(tf.identity, element, expand_composites=True)


class CheckpointPosition(tf.train.experimental.PythonState):
    """The position of a dataset in a ``tf.train.Checkpoint``: the JSON of its `TrackedDataset.state_dict`."""

    def __init__(self, tracker: StepTracker) -> None:
        self._tracker = tracker

    def serialize(self) -> str:
        """Return the state as the text that a checkpoint stores."""
        return json.dumps(self._tracker.state_dict())

    def deserialize(self, string_value: bytes | str) -> None:
        """Load the state that a checkpoint stored. Raises StateMismatch, ReplayTruncated."""
        self._tracker.load_state_dict(json.loads(string_value))


# --- steps of an epoch, if they are known -----------------------------------------------------------------------------


Steps = Callable[[int], int]
"""The loader's number of batches in an epoch -> the dataset's number."""


def _all(steps: int) -> int:
    return steps


def _taking(count: int) -> Steps:
    return lambda steps: min(steps, count)


def _both(first: Steps | None, second: Steps | None) -> Steps | None:
    return None if first is None or second is None else lambda steps: second(first(steps))


# --- transformations by name ------------------------------------------------------------------------------------------


def _passing(name: str, *, is_drained: bool = True) -> Callable[..., TrackedDataset]:
    def method(self: TrackedDataset, *args: Any, **settings: Any) -> TrackedDataset:
        made = getattr(self._inner, name)(*args, **settings)
        return self._then(
            made,
            is_ordered=name != "shuffle" and made.options().deterministic is not False,
            is_drained=is_drained,
            is_parallel=settings.get("num_parallel_calls") is not None,
            steps=_all if name in _SAME_NUMBER else None,
        )

    method.__name__, method.__doc__ = name, f"Do as ``tf.data.Dataset.{name}`` does."
    return method


def _remaking(name: str) -> Callable[..., TrackedDataset]:
    def method(self: TrackedDataset, *args: Any, **settings: Any) -> TrackedDataset:
        return self.remade(getattr(self._seen, name)(*args, **settings))

    method.__name__, method.__doc__ = name, f"Do as ``tf.data.Dataset.{name}`` does."
    return method


_batching = _passing("batch")

for _name in (*_SAME_BATCHES, *_REMAKING):
    if hasattr(tf.data.Dataset, _name):
        made = _remaking(_name) if _name in _REMAKING else _passing(_name, is_drained=_name != "shard")
        setattr(TrackedDataset, _name, made)


def _without_token(*element: Any) -> tuple[Any, Any]:
    return (element if len(element) > 1 else element[0]), tf.constant(-1, tf.int64)


def _no_alarm_at_the_end() -> None:
    """Silence Keras, which warns when a dataset of unknown length ends. A feed's length is never known."""
    warnings.filterwarnings("ignore", "Your input ran out of data", UserWarning)


# --- batches as flat tensors, the only ones that tf.data takes from Python --------------------------------------------


RaggedAs = Literal["ragged", "padded"]


def is_composite(tensor: TensorSpec, ragged: RaggedAs) -> bool:
    """Return whether the tensor becomes a ``tf.RaggedTensor``, which Python cannot give in one piece."""
    return ragged == "ragged" and tensor.is_ragged and tensor.dtype != BYTES


def flat_spec(tensor: TensorSpec, rows: int | None, ragged: RaggedAs) -> Any:
    """Return the spec of what `flat_value` gives, for batches of ``rows`` (None: any number)."""
    dtype = tf.string if tensor.dtype == BYTES else tf.as_dtype(tensor.dtype)
    if not is_composite(tensor, ragged):
        return tf.TensorSpec((rows, *tensor.shape), dtype)
    levels = _levels(tensor)
    splits = (tf.TensorSpec((None,), tf.int64),) * levels
    return (tf.TensorSpec((None, *tensor.shape[levels:]), dtype), *splits)


def flat_value(tensor: TensorSpec, value: Any, ragged: RaggedAs) -> Any:
    """Return one tensor of a batch in a form that tf.data takes from Python.

    It is an array ``[n, *shape]``, for bytes an array of n objects, and for a ragged tensor its values and row splits.
    """
    if not tensor.is_ragged:
        return value
    if tensor.dtype == BYTES:
        strings = np.empty(len(value), dtype=object)
        strings[:] = list(value)
        return strings
    return _flat_ragged(tensor, value) if ragged == "ragged" else value.padded()


def assembled(tensor: TensorSpec, part: Any, rows: int | None) -> Any:
    """Make the tensor of what `flat_value` returned, in the graph."""
    if not isinstance(part, tuple):
        return part
    values, *splits = part
    for level in reversed(range(len(splits))):
        if level == 0 and rows is not None:
            splits[0] = tf.ensure_shape(splits[0], (rows + 1,))
        size = tensor.shape[level]
        if size is None:
            values = tf.RaggedTensor.from_row_splits(values, splits[level], validate=False)
        else:
            count = tf.shape(splits[level], tf.int64)[0] - 1
            values = tf.RaggedTensor.from_uniform_row_length(values, size, nrows=count, validate=False)
    return values


def _levels(tensor: TensorSpec) -> int:
    """Return the number of a sample's dimensions up to the last one that differs."""
    return max(position for position, dim in enumerate(tensor.shape) if dim is None) + 1


def _flat_ragged(tensor: TensorSpec, value: Ragged) -> tuple[Any, ...]:
    """Return values with the uniform inner dimensions, and the row splits of each outer dimension."""
    levels = _levels(tensor)
    splits, rows = [], np.ones(len(value), dtype=np.int64)
    for level in range(levels):
        lengths = np.repeat(value.shapes[:, level], rows)
        splits.append(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
        rows = rows * value.shapes[:, level]
    inner = tensor.shape[levels:]
    return (value.values.reshape(int(rows.sum()), *inner), *splits)
