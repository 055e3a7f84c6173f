"""The options of a loader, the name of a member that has none, and the `state_dict` that says where a loader stands."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from os import getpid
from socket import gethostname
from typing import Any
from weakref import WeakKeyDictionary

from penstock_common.errors import StateMismatch
from penstock_common.hints import callable_of, seconds, whole
from penstock_common.stream.groups.roster import RankOrder
from penstock_common.tuning import LEASE_S, PREFETCH_BYTES, Canonical, Tuning, chosen
from penstock_common.waiting import Notify, to_stderr
from penstock_common.wire.spec import Spec
from penstock_consumer.stages.stage import StageMaker

ACKNOWLEDGE_EVERY_S = 0.0


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """The options of a loader, as far as reading needs them. See `loader.Loader`."""

    start: str | int
    batch_size: int
    prefetch_bytes: int
    lease_s: float
    notify: Notify
    acknowledge_every_s: float = ACKNOWLEDGE_EVERY_S
    """The time in which acknowledgements are sent together. 0: each batch has its own before the next."""
    order: RankOrder | None = None
    """None where reading is shared."""
    remainder: str = "pad"
    """The use of a last step, or in shared order of a member's last batch, that the epoch does not fill."""
    create: bool = True
    """Whether a group that is not there is made."""
    views: bool = False
    """Whether a batch that is one block of a segment is delivered where it lies."""
    url: str = ""
    """The server's address."""
    timeout_s: float | None = None
    """The longest wait, or None for any."""
    startup_s: float | None = None
    """The longest wait for a stream or a first epoch where `timeout_s` is None."""
    stages: list[StageMaker] = field(default_factory=list)
    """The stages that `Loader.shuffle` and `Loader.filter` added, in this order."""


SHORTEST_LEASE_S = 0.1
"""A shorter one would lapse between two renewals."""


def loader_options(start: str | int, batch_size: int, order: object, tuning: Tuning) -> LoaderOptions:
    """Return the checked options of a loader; see `loader.Loader`. Raises ValueError, TypeError."""
    batch_size = whole("batch_size", batch_size)
    prefetch_bytes = whole("prefetch_bytes", chosen(tuning.prefetch_bytes, PREFETCH_BYTES))
    lease_s, notify = chosen(tuning.lease_s, LEASE_S), chosen(tuning.notify, to_stderr)
    seconds("lease_s", lease_s)
    if lease_s < SHORTEST_LEASE_S:
        raise ValueError(
            f"lease_s is {lease_s}, expected seconds, {SHORTEST_LEASE_S} or more ({LEASE_S:.0f} if left out)"
        )
    acknowledge_every_s = chosen(tuning.acknowledge_every_s, ACKNOWLEDGE_EVERY_S)
    seconds("acknowledge_every_s", acknowledge_every_s)
    if acknowledge_every_s > lease_s / 3:
        raise ValueError(
            f"acknowledge_every_s is {acknowledge_every_s}, expected at most a third of the lease of {lease_s:g} s: "
            "0.02 is enough for any rate"
        )
    if tuning.timeout_s is not None:
        seconds("timeout_s", tuning.timeout_s)
    callable_of("notify", notify, "print")
    ranked, remainder = rank_options(order, batch_size, tuning)
    if start not in ("resume", "remaining", "earliest") and (type(start) is not int or start < 0):
        raise ValueError(
            f"start is {start!r}, expected 'resume', 'remaining', 'earliest' or an epoch's number; for new samples "
            "alone, the last number of `penstock epochs list`, plus 1"
        )
    return LoaderOptions(
        start=start,
        create=chosen(tuning.create, True),
        batch_size=batch_size,
        prefetch_bytes=prefetch_bytes,
        lease_s=lease_s,
        acknowledge_every_s=float(acknowledge_every_s),
        timeout_s=tuning.timeout_s,
        notify=notify,
        order=ranked,
        remainder=remainder,
        views=bool(tuning.views),
    )


def rank_options(order: object, batch_size: int, tuning: Tuning) -> tuple[RankOrder | None, str]:
    """Return the checked options of a rank, or None for shared order, and the use of a last step."""
    remainder = tuning.remainder
    if remainder not in (None, "pad", "drop", "keep"):
        raise ValueError(f"remainder is {remainder!r}, expected 'pad', 'drop' or 'keep'")
    if order is None:
        return None, remainder or "keep"
    if order == "canonical":
        order = Canonical()
    if not isinstance(order, Canonical):
        raise ValueError(
            f"order is {order!r:.60}, expected penstock.Canonical(rank=..., world_size=...), 'canonical' or None"
        )
    rank, world_size = whole("rank", order.rank, None), whole("world_size", order.world_size, None)
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}, expected the number of ranks, 1 or more")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank} of world_size {world_size}, expected 0 to {world_size - 1}")
    if remainder == "keep" and world_size > 1:
        raise ValueError("remainder is 'keep', expected 'pad' or 'drop': every rank has the same steps")
    if order.drop_last and remainder not in (None, "drop"):
        raise ValueError(f"drop_last=True and remainder={remainder!r} contradict each other: leave one out")
    if tuning.member is not None:
        raise ValueError("a rank's member name is its number: leave member out with order=penstock.Canonical(...)")
    default = "drop" if order.drop_last else "pad" if world_size > 1 else "keep"
    return RankOrder(rank, world_size, batch_size), remainder or default


STATE_VERSION = 1
"""The version of the `state_dict` of a loader, and of a mixture."""

State = dict[str, Any]


def spec_digest(spec: Spec) -> str:
    """Return a name for a spec. Equal specs have equal names."""
    return hashlib.sha256(json.dumps(spec.as_json()).encode()).hexdigest()[:16]


def check_state(state: object, own: Mapping[str, Any]) -> None:
    """Raise StateMismatch unless ``state`` is of the same stream, spec, group, order and batch size.

    ``own`` is what the loader itself would return.
    """
    if not isinstance(state, Mapping) or state.get("version") != STATE_VERSION:
        found = state.get("version") if isinstance(state, Mapping) else None
        raise StateMismatch("version", found, STATE_VERSION, _HINTS["version"])
    for what, hint in _HINTS.items():
        if what in own and state.get(what) != own[what]:
            raise StateMismatch(what, state.get(what), own[what], hint)
    if own["kind"] == "ordered":
        _check_position(state, own["batch_size"])


def _check_position(state: Mapping[str, Any], batch_size: int) -> None:
    for what, unit in {"epoch": 1, "position": batch_size}.items():
        found = state.get(what)
        if type(found) is not int or found < 0 or found % unit:
            raise StateMismatch(what, found, "an epoch" if unit == 1 else f"batches of {unit}", _HINTS["version"])


_HINTS = {
    "version": "pass what state_dict() returned, as it was",
    "stream": "load it into a Loader of that stream",
    "stream_id": "the stream was made again since, by a `penstock run` or after a deletion: begin without this state; "
    "to resume, keep one `penstock server` and run `penstock produce` beside it",
    "spec": "the stream's tensors differ from those the state was taken with",
    "group": "another group has another position: use the same group, or begin without this state",
    "kind": "give the Loader the order= it had",
    "loader": "numbers of batches are of one process: take a state of this loader before its checkpoint is saved",
    "batch_size": "positions are counted in batches: give the Loader the batch_size it had",
}
"""The fields in the order of comparison. The first that differs explains the others."""


_NEXT = count(2)
_NUMBERS: WeakKeyDictionary[threading.Thread, int] = WeakKeyDictionary()
"""The numbers of threads other than the main one."""


def default_member() -> str:
    """Return a name of host, process and thread, so that two threads are two members, as two processes are.

    The main thread has no number, so a restarted container is the same member.
    """
    own, thread = f"{host_prefix()}{getpid()}", threading.current_thread()
    if thread is threading.main_thread():
        return own
    if thread not in _NUMBERS:
        _NUMBERS[thread] = next(_NEXT)
    return f"{own}-{_NUMBERS[thread]}"


def host_prefix() -> str:
    """Return what the default names of this host's members begin with."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", gethostname())[:80] or "host"
    return f"{host}-"
