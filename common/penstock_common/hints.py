"""Hints on mistakes in Python calls: one table of what newcomers type from habit, and the messages made from it.

Pure text: no server, no framework. The checks that find a mistake are where the mistake is made.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import pairwise
from numbers import Real
from opcode import opmap
from types import FrameType
from typing import Any, NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

ON_DEVICE = (
    "its tensors are numpy arrays: write torch.from_numpy(batch['x']).to(device), or loop over "
    'penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), "cuda")'
)
TO_DEVICE = 'move its tensors, batch["x"].to(device), or loop over penstock.torch.prefetch_to_device(dataset, "cuda")'
FIT = (
    "model.fit takes penstock.tensorflow.dataset(loader, select=('x', 'y')), and with torch as Keras's backend "
    "penstock.torch.dataset(loader, select=('x', 'y'))"
)
HABITS: Sequence[tuple[str, str, str]] = (
    ("num_workers", "group", "the producer has the workers (`penstock produce --workers 4`); leave it out"),
    ("workers", "group", "the producer has the workers (`penstock produce --workers 4`); leave it out"),
    ("shuffle", "group", "producers shuffle each epoch already; loader.shuffle(samples=10_000) draws from a window"),
    ("pin_memory", "batch_size", 'penstock.torch.prefetch_to_device(dataset, "cuda") pins and copies; leave it out'),
    (
        "drop_last",
        "start",
        "write order=penstock.Canonical(drop_last=True), in shared order tuning=Tuning(remainder='drop')",
    ),
    ("drop_last", "window", "its last batch may be smaller, and batch.size says how large it is; leave it out"),
    ("group", "window", "it reads without a group; leave it out"),
    ("epochs", "group", "each iteration is one epoch: `for _ in range(epochs): for batch in loader: ...`"),
    ("collate_fn", "group", "write loader.view().collate(function)"),
    ("fast", "url", "there is one way to the server, the fast one; leave it out"),
    ("transform", "group", "write loader.view().map(function), or have the producer do it (`--transform`)"),
    ("device", "group", 'penstock.torch.prefetch_to_device(dataset, "cuda") copies batches; leave it out'),
    ("fit", "view", "it gives batches: write model.fit(penstock.tensorflow.dataset(loader, select=('x', 'y')))"),
    ("shape", "view", f"it gives batches: {FIT}"),
    ("dtype", "view", f"it gives batches: {FIT}"),
    ("host", "url", "write url='redis://host:6379'"),
    ("port", "url", "write url='redis://host:6379'"),
    ("password", "url", "write url='redis://:password@host:6379'"),
    ("map", "view", "write loader.view().map(function)"),
    ("select", "view", "write loader.view().select('x', 'y')"),
    ("take", "view", "write loader.view().take(3)"),
    ("dataset", "view", "it reads a stream: loader.spec says its tensors, loader.samples the samples of an epoch"),
    ("batch", "view", "batches are of the batch_size it was made with"),
    ("sampler", "view", "producers shuffle each epoch, and each iteration is the next one; leave it out"),
    ("set_epoch", "view", "each iteration is the next epoch, shuffled by its producer; leave it out"),
    ("reset", "view", "each iteration is the next epoch; penstock.Replay(stream, epoch=0, ...) reads one again"),
    ("ack", "acknowledge", "write loader.acknowledge(batch), with Loader(..., acknowledge='manual')"),
    ("to", "view", 'write penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), "cuda")'),
    ("cuda", "view", 'write penstock.torch.prefetch_to_device(penstock.torch.dataset(loader), "cuda")'),
    ("repeat", "view", "each iteration is the next epoch: `for _ in range(epochs): for batch in loader: ...`"),
    ("prefetch", "view", "it reads ahead in a thread already (Loader(..., prefetch=8) for more); leave it out"),
    ("cache", "view", "penstock.Replay(stream, epoch=0, batch_size=64) reads a retained epoch as often as wanted"),
    ("unbatch", "view", "write loader.view().samples()"),
    ("batch", "collate", "its batches are of the loader's batch_size"),
    ("shuffle", "collate", "write loader.shuffle(samples=10_000), then loader.view()"),
    ("filter", "collate", "write loader.filter(function), then loader.view()"),
    ("repeat", "collate", "each iteration is the next epoch: `for _ in range(epochs): for batch in view: ...`"),
    ("prefetch", "collate", "the loader reads ahead in a thread already; leave it out"),
    ("iter", "view", "write iter(loader)"),
    ("next", "view", "write batches = iter(loader) once, then next(batches)"),
    ("split", "view", "`penstock produce ... --split train:0.9,val:0.1` makes a stream of each part"),
    ("numpy", "view", "its batches are dicts of numpy arrays: write `for batch in loader: batch['x']`"),
    ("epoch", "view", "batch.epoch is a batch's; `penstock epochs list` lists those that are retained"),
    ("epochs", "view", "each iteration is one epoch: `for _ in range(epochs): for batch in loader: ...`"),
    ("view", "set_pass", "`for batch in replay` gives dicts; penstock.torch.dataset(replay, select=('x', 'y')) tuples"),
    ("shuffle", "set_pass", "write Replay(..., shuffle=0), which takes a seed"),
    ("acknowledge", "set_pass", "it reads without a group, so nothing is acknowledged; a Loader has one"),
    ("ack", "set_pass", "it reads without a group, so nothing is acknowledged; a Loader has one"),
    ("maxlen", "budget_bytes", "write budget_bytes=2 << 30: writers wait at that size, and nothing unread is removed"),
    ("max_len", "budget_bytes", "write budget_bytes=2 << 30: writers wait at that size, and nothing unread is removed"),
    ("weights", "loaders", "each loader has its weight beside it: mix({'a': (loader_a, 0.7), 'b': (loader_b, 0.3)})"),
    ("probabilities", "loaders", "each loader has its weight beside it: mix({'a': (loader_a, 0.7), ...})"),
    ("state_dict", "set_pass", "each iteration is the whole epoch again; a Loader has a state to go on from"),
    ("map", "set_pass", "write `for batch in map(function, replay)`"),
    ("select", "set_pass", "take what is wanted: batch['x'], batch['y']"),
    *(
        (habit, "load_state_dict", f"{advice} on the loader, before the dataset is made of it")
        for habit, advice in (
            ("shuffle", "write loader.shuffle(samples=10_000)"),
            ("filter", "write loader.filter(function)"),
            ("batch", "give batch_size= to it: batches are made"),
            ("batch_size", "it is loader.batch_size, set"),
        )
    ),
    ("map", "load_state_dict", "write `for batch in map(function, dataset)`"),
    ("take", "load_state_dict", "write `for batch in itertools.islice(dataset, 3)`"),
    (
        "repeat",
        "load_state_dict",
        "each iteration is the next epoch: `for _ in range(epochs): for batch in dataset: ...`",
    ),
    (
        "cache",
        "load_state_dict",
        "make it of a penstock.Replay(stream, epoch=0, batch_size=64), which reads as often as wanted",
    ),
    ("prefetch", "load_state_dict", "the loader reads ahead in a thread already; leave it out"),
    ("to", "load_state_dict", 'write penstock.torch.prefetch_to_device(dataset, "cuda")'),
    ("cuda", "load_state_dict", 'write penstock.torch.prefetch_to_device(dataset, "cuda")'),
    ("to", "identities", ON_DEVICE),
    ("cuda", "identities", ON_DEVICE),
    ("pin_memory", "identities", ON_DEVICE),
    ("numpy", "identities", "its tensors are numpy arrays already: batch['x']"),
    ("astype", "identities", "a tensor has it: batch['x'].astype('float32')"),
    ("shape", "identities", "a tensor has it: batch['x'].shape; batch.size is the number of samples"),
    ("dtype", "identities", "a tensor has it: batch['x'].dtype"),
    ("to", "torch", TO_DEVICE),
    ("cuda", "torch", TO_DEVICE),
    ("numpy", "torch", "a tensor has it: batch['x'].numpy(); a loop over the loader itself gives numpy arrays"),
    ("float", "torch", "a tensor has it: batch['x'].float()"),
    ("shape", "torch", "a tensor has it: batch['x'].shape"),
    ("size", "torch", "a tensor has it: len(batch['x'])"),
    ("dtype", "torch", "a tensor has it: batch['x'].dtype"),
    ("add", "write", "its verb is write({'x': ..., 'y': ...})"),
    ("append", "write", "its verb is write({'x': ..., 'y': ...})"),
    ("put", "write", "its verb is write({'x': ..., 'y': ...})"),
    ("send", "write", "its verb is write({'x': ..., 'y': ...})"),
    ("finish", "write", "write close(), or leave its `with` block"),
    ("end", "write", "write close(), or leave its `with` block"),
    ("commit", "write", "write flush()"),
)
"""(Argument or attribute of another library, the call or object to which the advice applies, advice)."""

NEEDED: Mapping[str, str] = {
    "stream": "the stream's name, 'train' for example",
    "group": "a name for this training job, group='resnet' for example; each group gets every sample",
    "batch_size": "samples in a batch, batch_size=64 for example",
    "epoch": "the number of a retained epoch, epoch=0 for example (`penstock inspect` lists them)",
    "path": "the folder that `penstock export` made",
    "dataset": "an object with a length and items, or arrays",
    "loaders": "each with its weight, {'a': (loader_a, 0.7), 'b': (loader_b, 0.3)} for example",
    "loader": "a loader, penstock.Loader('train', group='resnet', batch_size=64) for example",
    "batch": "the batch that was trained on, as the loop had it",
    "device": "where the step runs, 'cuda' for example",
    "filepath": "where the model is saved, 'model.keras' for example",
}
"""Required argument -> what belongs there."""


def near(name: object, names: Iterable[str]) -> str:
    """Return the one of ``names`` that ``name`` is probably a misspelling of, or '' if none is similar."""
    if not isinstance(name, str):
        return ""
    import difflib  # imported only after a mistake

    known = {one.casefold(): one for one in names}
    found = difflib.get_close_matches(name.casefold(), known, 1)
    return known[found[0]] if found else ""


def did_you_mean(name: object, names: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the name that is similar, else ''."""
    return f"; did you mean {found!r}?" if (found := near(name, names)) else ""


def no_such_name(module: str, name: str, known: Sequence[str], caller: FrameType) -> AttributeError | ImportError:
    """Return the error for a public name that a module does not have. ``caller`` is the frame that asked for the name.

    An import asks, too. It would replace an AttributeError by a text without the public names and the suggestion.
    """
    hint = did_you_mean(name, known)
    if not name.startswith("_") and caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        return ImportError(f"{module} has no {name!r} to import; it has {', '.join(known)}{hint}")
    return AttributeError(f"module {module!r} has no attribute {name!r}; it has {', '.join(known)}{hint}")


def unknown_tensor(name: object, names: Iterable[str]) -> str:
    """Return the message for a tensor that a batch or a spec does not have."""
    known = list(names)
    hint = did_you_mean(name, known)
    if name == "y":
        hint = "; images have y where sub-folders are their classes, or with --labels"
    if not isinstance(name, str):
        hint = "; tensors are found by name, rows within a tensor: batch[name][0], or loader.view().samples()"
    return f"no tensor {name!r} here; there are: {', '.join(known)}{hint}"


def not_a_sample(value: object, names: Iterable[str] = ("x", "y")) -> str:
    """Return the message for a sample, or rows, that are not a dict."""
    example = ", ".join(f"{name!r}: ..." for name in names)
    return f"a sample is {an(value)}, expected a dict of tensors by name: {{{example}}}"


_WRITE = r"(?:Epoch|Shard)?Writer\.write\(\)"


def require_one_sample(error: BaseException | None) -> None:
    """Explain ``write(x=...)`` or ``write(x, y)`` if a ``with`` block of a writer ended because of it.

    More parameters of ``write``, or `explained`, would show it earlier. Both would add to the cost of each small row.
    """
    if not isinstance(error, TypeError):
        return
    if found := re.match(rf"{_WRITE} (got an unexpected keyword argument '(.+?)'|takes \d+ positional)", str(error)):
        names = [found[2]] if found[2] else ["x", "y"]
        pairs = ", ".join(f"{name!r}: ..." for name in names)
        raise TypeError(f"write() takes a sample as one dict of tensors by name, as in write({{{pairs}}})") from None


def not_tuples(names: Iterable[str], verb: str = "loader.view().select({})") -> str:
    """Return the message for a loop that unpacks a batch.

    ``verb`` is a call in which the tensors' names are filled in.
    """
    known = list(names)
    verb = verb.format(", ".join(map(repr, known)))
    items = ", ".join(f"batch[{name!r}]" for name in known)
    return f"a batch is a dict, not a tuple: take {items}; `for x, y in {verb}` gives tuples"


def batch_attribute(name: str, names: Iterable[str], scope: str) -> str:
    """Return the message for an attribute that a batch does not have."""
    known = list(names)
    if name in known:
        return f"a batch has no attribute {name!r}: its tensors are items, batch[{name!r}]"
    for habit, of, advice in HABITS:
        if (habit, of) == (name, scope):
            return f"a batch has no attribute {name!r}: {advice}"
    return f"a batch has no attribute {name!r}, and {unknown_tensor(name, known)}"


_UNPACKING = frozenset({opmap["UNPACK_SEQUENCE"], opmap["UNPACK_EX"]})
_LOOPING = (opmap["GET_ITER"], opmap["FOR_ITER"])
_CALL = opmap["CALL"]
_PRECALL = opmap.get("PRECALL", -1)


def is_unpacking(frame: FrameType) -> bool:
    """Return whether the running line unpacks its value. Only the bytecode tells ``x, y = batch`` from a loop."""
    return frame.f_code.co_code[frame.f_lasti] in _UNPACKING


def refuse_unpacking(frame: FrameType, names: Iterable[str], verb: str) -> None:
    """Raise TypeError if the loop that begins in ``frame`` unpacks each of its dicts, as in ``for x, y in ds``.

    Some iterables must yield plain dicts, which cannot raise this error themselves. Unrecognised bytecode passes.
    """
    code, at = frame.f_code.co_code, frame.f_lasti
    steps = [code[i] for i in range(at, min(at + 80, len(code)), 2) if code[i]]  # 0: an inline cache entry
    ops = [op for op in steps if op != _PRECALL]
    is_next = ops[:2] == [_CALL, _CALL] and ops[2] in _UNPACKING and _calls_next(frame)
    if steps[0] == _CALL and code[at + 1] == 1:  # enumerate: the second value of each pair is unpacked
        steps, positions = steps[1:], [2, 4]
    else:
        positions = [2]
    is_loop = tuple(steps[:2]) == _LOOPING and len(steps) > positions[-1]
    if is_next or (is_loop and all(steps[position] in _UNPACKING for position in positions)):
        raise TypeError(not_tuples(names, verb))


def _calls_next(frame: FrameType) -> bool:
    """Return whether the last call before a value is unpacked is next(iter(...))."""
    import dis  # imported only if the bytecode looks like that

    before = [step for step in dis.get_instructions(frame.f_code) if step.offset < frame.f_lasti]
    names = [step.argval for step in before if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")][-8:]
    return ("next", "iter") in pairwise(names)


def whole(name: str, value: Any, least: int | None = 1) -> int:
    """Return ``value`` as an int. With ``least`` None, the caller checks the bounds.

    Raises:
        TypeError: It is not a whole number: a text, a float, a bool.
        ValueError: It is below ``least``.
    """
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        advice = f": write {name}={value}" if isinstance(value, str) and value.isdecimal() else ""
        if name.endswith("_bytes") and isinstance(value, str) and not advice:
            advice = f" of bytes: write {name}=1 << 30 for 1 GiB"
        raise TypeError(f"{name} is {value!r:.40}, {an(value)}; expected a whole number{advice}")
    number = operator.index(value)
    if least is not None and number < least:
        raise ValueError(f"{name} is {number}, expected at least {least}")
    return number


def seconds(name: str, value: Any) -> None:
    """Raise TypeError unless ``value`` is a number, and ValueError if it is negative."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r:.40}, {an(value)}; expected seconds as a number")
    if not float(value) >= 0:
        raise ValueError(f"{name} is {value}, expected seconds, 0 or more")


def require_json(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is None, or a dict that JSON can hold."""
    if value is None:
        return
    import json

    why = f"it is {an(value)}" if not isinstance(value, Mapping) else ""
    try:
        json.dumps(value if why else dict(value))  # type: ignore[call-overload]
    except (TypeError, ValueError) as error:
        why = why or str(error)
    if why:
        raise TypeError(f"{name} is {value!r:.60}; expected a dict of what JSON holds, {{'source': 'lab 3'}}: {why}")


def callable_of(name: str, value: object, like: str) -> None:
    """Raise TypeError, with an example ``like``, unless ``value`` can be called."""
    if not callable(value):
        raise TypeError(f"{name} is {value!r:.40}, {an(value)}; expected a function such as {name}={like}")


def one_argument(verb: str, function: Callable[..., Any], what: str, instead: str) -> None:
    """Raise TypeError for a function that needs more than one argument, as ``lambda x, y: ...``."""
    import inspect

    try:
        needed = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):  # some builtins have no signature
        return
    if len(needed) > 1:
        raise TypeError(
            f"{verb}()'s function takes {', '.join(needed)}, expected one argument, the {what}, a dict of tensors; "
            f"{instead}"
        )


def an(value: object) -> str:
    """Return the kind of a value with an article: ``a list``, ``an int``."""
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


class Answering:
    """Base of public objects: a missing attribute raises an error that says what to write."""

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        if name.startswith("_"):  # asked for by Python and its tools, not by people
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")
        known = [one for one in dir(type(self)) if not one.startswith("_")]
        raise AttributeError(f"{an(self)} has no attribute {name!r}{_instead(name, known, 'has')}")


class Mistaken:
    """An attribute of other libraries that this class does not have. Reading it raises an error that says what to
    write.

    For classes whose methods run once a sample. A ``__getattr__`` as in `Answering` would slow down every access to an
    attribute of theirs.
    """

    def __init__(self, name: str, advice: str) -> None:
        self._name, self._advice = name, advice

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise AttributeError(f"{an(owner)} has no attribute {self._name!r}{self._advice}")


def answering(kind: type[R]) -> type[R]:
    """Decorate a class so that the attributes of `HABITS` that it lacks become `Mistaken` ones."""
    for name, scope, advice in HABITS:
        if scope in vars(kind) and not hasattr(kind, name):
            setattr(kind, name, Mistaken(name, f": {advice}"))
    return kind


class NoLength(AttributeError, TypeError):
    """The error for a missing length: an AttributeError for ``hasattr``, and a TypeError for len() and list()."""


class Lengthless:
    """A ``__len__`` that frameworks see as missing: only len() itself raises the explanation."""

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise NoLength(
            f"{an(owner)} of a shared group has no length, because the group's members share its batches: "
            "loader.samples counts the samples of the epoch, and Loader(..., order='canonical') has one; parts of a "
            "stream are made by `penstock produce ... --split train:0.9,val:0.1`"
        )


class Passing(Answering):
    """Base of objects that give batches to a loop, and are neither sequences nor iterators."""

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse a conversion to an array, which numpy and the ``fit`` of Keras try."""
        raise TypeError(f"{an(self)} is no array, it gives batches: `for batch in loader`; {FIT}")

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"{an(self)} has no items by number: write `for batch in loader`, or next(iter(loader)) for one batch; a "
            "DataLoader takes penstock.torch.dataset(loader)"
        )

    def __next__(self) -> NoReturn:
        raise TypeError(f"{an(self)} is no iterator: write batches = iter(loader) once, then next(batches)")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public call: arguments that it does not take raise a TypeError that says what to write.

    Example:
        >>> @explained
        ... def load(stream, *, batch_size): ...
        >>> load("train", batchsize=64)
        Traceback (most recent call last):
        TypeError: load() has no argument 'batchsize'; did you mean 'batch_size'?
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # raised inside the function: the arguments fit
            raise TypeError(_mistake(function, args, kwargs) or str(error)) from None

    return call


def _mistake(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a call, or '' if they look right."""
    import inspect  # imported only after a mistake

    parameters = dict(inspect.signature(function).parameters)
    is_method = next(iter(parameters), "") == "self"
    call = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    if is_method:
        del parameters["self"]
    for name in kwargs:
        if name not in parameters:
            return f"{call}() has no argument {name!r}{_instead(name, parameters)}"
    given = args[1:] if is_method else args
    by_position = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    needed = [p.name for p in parameters.values() if p.default is p.empty]
    example = f"{call}({', '.join(name if name in by_position else f'{name}=...' for name in needed or parameters)})"
    if len(given) > len(by_position):
        is_all = len(by_position) == len(needed) == 1
        what = f"; {needed[0]}: {NEEDED[needed[0]]}" if is_all and needed[0] in NEEDED else ""
        taken = ", ".join(by_position) or "nothing"
        return f"{call}() takes {taken} by position and the rest by name: write {example}{what}"
    for name in needed:
        if name not in kwargs and name not in by_position[: len(given)]:
            return f"{call}() needs {name}: {NEEDED.get(name, 'see its help')}; write {example}"
    return ""


def _instead(name: str, parameters: Iterable[str], verb: str = "takes") -> str:
    known = list(parameters)
    for habit, scope, advice in HABITS:
        if habit == name and scope in known:
            return f": {advice}"
    return did_you_mean(name, known) or f"; it {verb} {', '.join(known)}"
