"""Options in groups: `Canonical`, `Tuning`, and the names that calls took before the groups existed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar

from penstock_common.hints import HABITS, explained, near
from penstock_common.waiting import Notify

P = ParamSpec("P")
R = TypeVar("R")

PREFETCH_BYTES = 64 << 20
"""The payload bytes that are received and not yet trained on, by default."""
LEASE_S = 30.0
"""The time after which others may take what a silent member holds, by default. A replay that has not renewed its lease
for this long no longer keeps its epoch."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """Canonical order: a position of the epoch belongs to one rank, whichever workers made the samples, and however
    fast.

    Args:
        rank: the number of this rank, from 0.
        world_size: the number of ranks.
        drop_last: whether a last step that the epoch does not fill is left out. Otherwise several ranks fill it with
            the epoch's first samples, and one rank alone gets a smaller batch.

    Example:
        >>> penstock.Loader("train", group="ddp", batch_size=64, order=penstock.Canonical(rank=0, world_size=4))
    """

    rank: int = 0
    world_size: int = 1
    drop_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Options that most programs do not change, for ``tuning=`` of Loader, Replay, Writer and produce.

    Each call takes the fields that belong to it, and refuses the others. None is the default of every field.

    Args:
        member: Loader: the name of this process in the group. A process that restarts under its name continues with
            what it held. The default is host and process id, with a number in other threads than the main one. Of two
            loaders of one name and process, the older one ends with MemberReplaced.
        create: Loader: whether a group that does not exist is made, which is the default. It is announced if the
            stream has other groups.
        timeout_s: Loader: the longest wait in seconds. The default waits without limit and says for what, but at most
            60 s for a stream or a first epoch that never comes.
        remainder: Loader: the use of a last step that the epoch does not fill. 'pad' fills it with the epoch's first
            samples, and in shared order with the batch's own. 'drop' leaves it out. 'keep' makes it smaller, which
            several ranks refuse, because all have the same steps. The default is 'pad' for several ranks, else 'keep'.
        prefetch_bytes: Loader, Replay, Files: the payload bytes that are read ahead, 64 MiB by default.
        lease_s: Loader: the seconds after which others may take what this process holds, if it is silent; 30 by
            default. Replay: the seconds after which a silent replay keeps its epoch no longer.
        acknowledge_every_s: Loader: the seconds whose acknowledgements are sent together, for batches that take less
            than a millisecond. A killed trainer may repeat the batches of this time. The default is 0: each batch is
            acknowledged before the next is returned, and a kill repeats the batch in hand. See docs/performance.md.
        views: Loader, Replay, Files: whether a batch that is one block of a segment is yielded without a copy,
            read-only. See docs/segments.md.
        block_bytes: Writer: the payload bytes of one entry.
        checksum: Writer: whether entries carry checksums, which they do by default.
        room_wait_s: Writer: the longest wait in seconds for space in a full budget. The default waits without limit
            and says why.
        shuffle: produce: whether each epoch has an order of its own, which is the default.
        seed: produce: the seed of the order and of the samples' random numbers.
        block_transform: produce: a function of ``block_samples`` samples at once, or its import name.
        block_samples: produce: the samples of one block.
        shard_samples: produce: the samples of one job. The default follows from the number of workers.
        budget_bytes: produce: the payload bytes that the stream may hold. It changes the budget of an existing stream.
        retention: produce: the policy of the stream. It changes the policy of an existing stream.
        durability: Writer, produce: what must have happened to a write before it counts as safe: ``auto``,
            ``memory``, ``fsync``, ``replicas=2`` or ``fsync+replicas=2``. None keeps the value of a stream that
            exists, and is ``auto`` for a new one.
        compression: Writer, produce: how blocks are compressed: ``zstd`` or ``blosc2`` for all tensors,
            ``{"mask": "zstd"}`` for some, or ``none``. None keeps the value of a stream that exists. See
            docs/compression.md.
        on_error: produce: "quarantine" counts and names bad samples and ends the epoch above a share of them, "skip"
            accepts any number of them, and "fail" ends the epoch at the first one.
        sample_limit_s: produce: the seconds after which a sample counts as hanging.
        worker_memory_bytes: produce: a worker that grows beyond it is replaced. The default is a part of the host's
            memory.
        notify: all: called with each line for the user, which goes to stderr by default.

    Example:
        >>> penstock.Loader("train", group="resnet", batch_size=64, tuning=penstock.Tuning(prefetch_bytes=256 << 20))
    """

    member: str | None = None
    create: bool | None = None
    timeout_s: float | None = None
    remainder: Literal["pad", "drop", "keep"] | None = None
    prefetch_bytes: int | None = None
    lease_s: float | None = None
    acknowledge_every_s: float | None = None
    views: bool | None = None
    block_bytes: int | None = None
    checksum: bool | None = None
    room_wait_s: float | None = None
    shuffle: bool | None = None
    seed: int | None = None
    block_transform: Callable[..., Any] | str | None = None
    block_samples: int | None = None
    shard_samples: int | None = None
    budget_bytes: int | None = None
    retention: str | None = None
    durability: str | None = None
    compression: str | Mapping[str, str] | None = None
    on_error: Literal["quarantine", "skip", "fail"] | None = None
    sample_limit_s: float | None = None
    worker_memory_bytes: int | None = None
    notify: Notify | None = None


for _kind in (Canonical, Tuning):
    _kind.__init__ = explained(_kind.__init__)  # type: ignore[method-assign]

FIELDS: Mapping[str, tuple[str, ...]] = {
    "Loader": ("member", "create", "timeout_s", "remainder", "prefetch_bytes", "lease_s", "acknowledge_every_s",
               "views", "notify"),
    "Replay": ("prefetch_bytes", "lease_s", "views", "notify"),
    "Files": ("prefetch_bytes", "views", "notify"),
    "Writer": ("block_bytes", "checksum", "compression", "durability", "room_wait_s", "notify"),
    "produce": (
        "shuffle", "seed", "block_transform", "block_samples", "shard_samples", "budget_bytes", "retention",
        "durability", "compression", "on_error", "sample_limit_s", "worker_memory_bytes", "notify",
    ),
}  # fmt: skip
"""Call -> the fields of a Tuning that it takes. Until the next version each is also an argument of the call."""
OLD_RANK = ("rank", "world_size")
"""The old arguments of a Loader that `Canonical` took over, until the next version."""


def tuning_of(call: str, tuning: Tuning | None) -> Tuning:
    """Return the tuning of a call, or one of defaults.

    Args:
        call: a key of `FIELDS`.
        tuning: the caller's argument.

    Raises:
        TypeError: it is not a Tuning, or has fields that this call does not take.
    """
    if tuning is None:
        return Tuning()
    if not isinstance(tuning, Tuning):
        raise TypeError(f"tuning is {tuning!r:.60}, expected penstock.Tuning({FIELDS[call][0]}=...)")
    for each in fields(tuning):
        if each.name not in FIELDS[call] and getattr(tuning, each.name) is not None:
            raise TypeError(f"{call}() takes no tuning {each.name!r}; it takes {', '.join(FIELDS[call])}")
    return tuning


def chosen(value: R | None, default: R) -> R:
    """Return the value of a field, or its default."""
    return default if value is None else value


def takes_old_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a call of `FIELDS` so that it still takes its former arguments, with a DeprecationWarning."""
    call_name = function.__qualname__.removesuffix(".__init__")
    moved = FIELDS[call_name]
    habits = {habit for habit, _, _ in HABITS}
    taken = {*signature(function).parameters, *moved, *(OLD_RANK if call_name == "Loader" else ())}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in taken and name not in habits and (meant := near(name, taken)) in moved:
                raise TypeError(
                    f"{call_name}() has no argument {name!r}; did you mean tuning=penstock.Tuning({meant}=...)?"
                )
        old = {name: kwargs.pop(name) for name in moved if name in kwargs}
        if old:
            _warn(call_name, old, "tuning=penstock.Tuning")
            kwargs["tuning"] = replace(tuning_of(call_name, kwargs.get("tuning")), **old)  # type: ignore[arg-type]
        if call_name == "Loader" and (rank := {name: kwargs.pop(name) for name in OLD_RANK if name in kwargs}):
            kwargs["order"] = _ranked(kwargs.get("order"), rank)
            _warn(call_name, rank, "order=penstock.Canonical")
        return function(*args, **kwargs)

    return call


def _ranked(order: object, rank: Mapping[str, Any]) -> object:
    if order is None:
        if rank.get("rank", 0) == 0 and rank.get("world_size", 1) == 1:
            return None
        raise ValueError(
            "rank and world_size belong to order=penstock.Canonical(rank=..., world_size=...): add it, or leave both "
            "out, since members of a group share its batches"
        )
    return Canonical(**rank) if order == "canonical" else order


def _warn(call: str, old: Mapping[str, Any], group: str) -> None:
    names = ", ".join(f"{name}=..." for name in old)
    warnings.warn(
        f"{call}({names}) is now {call}({group}({names})); the old form ends with the next version",
        DeprecationWarning,
        stacklevel=3,
    )
