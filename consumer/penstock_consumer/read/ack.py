"""The outstanding batches of a loader, and when each is acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, get_args

from penstock_common.errors import PenstockError, ServerUnavailable, StateMismatch
from penstock_common.explain.deadlock import OTHER_THREAD_S, PATIENCE_S, OutstandingAmount, overdue, remedy_of, warning
from penstock_common.waiting import Notify
from penstock_consumer.read.heartbeat import IdleLoop
from penstock_consumer.read.member import Member
from penstock_consumer.stages.batch import UNKNOWN, Batch, BatchSpan

_Item = TypeVar("_Item")
_END: Any = object()


class OutstandingBatch(NamedTuple):
    """A batch that was delivered and is not acknowledged."""

    batch: Batch
    """The batch without its arrays."""
    samples: int
    nbytes: int
    """The payload bytes."""


class OutstandingBatches:
    """The batches of one loader from handing out to acknowledgement. Several threads may call this at the same time.

    A batch is pulled, trained on, then acknowledged. In a plain loop the first two are one. A framework that reads
    ahead pulls a batch long before its step trains on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._pulled: dict[int, OutstandingBatch] = {}
        self._trained: dict[int, OutstandingBatch] = {}
        """The batches that were trained on, in order. Keys are the ids of the spans, which live as long as the value.
        """
        self._covered = 0
        """The number of batches trained on, in order, that a checkpoint covered."""
        self.promised = 0
        """The number of batches whose state was taken. The training code may be saving it."""
        self.batches = self.samples = 0
        """The batches and samples trained on since the loader was made."""
        self.last: Batch | None = None
        """The last batch trained on, without its arrays."""
        self._before: tuple[Sequence[BatchSpan], int, int, Batch | None] | None = None
        """The spans of the batch that `train` was given last, and `batches`, `samples` and `last` before it."""
        self._waiting_samples = self._waiting_bytes = 0
        """The amount of `_trained`."""
        self._changed_s = clock()

    def pull(self, batch: Batch) -> None:
        """Note that a framework got a batch."""
        with self._lock:
            self._pulled[id(batch.spans)] = _outstanding(batch)
            self._changed_s = self._clock()

    def train(self, batch: Batch) -> None:
        """Note that a plain loop got a batch."""
        with self._lock:
            self._before = batch.spans, self.batches, self.samples, self.last  # without the arrays, which take memory
            self._train(_outstanding(batch))

    @property
    def newest(self) -> Sequence[BatchSpan] | None:
        """The spans of the batch that a plain loop got last."""
        return self._before[0] if self._before is not None else None

    def withdraw(self, spans: Sequence[BatchSpan]) -> None:
        """Undo what `pull` or `train` noted of a batch, also if they were interrupted halfway."""
        with self._lock:
            self._pulled.pop(id(spans), None)
            self._trained.pop(id(spans), None)
            if self._before is not None and self._before[0] is spans:
                _, self.batches, self.samples, self.last = self._before
            self._waiting_samples = sum(one.samples for one in self._trained.values())
            self._waiting_bytes = sum(one.nbytes for one in self._trained.values())

    def take_pulled(self) -> list[Batch]:
        """Take out the batches that a framework got and did not train on."""
        with self._lock:
            pulled, self._pulled = self._pulled, {}
            return [one.batch for one in pulled.values()]

    def arrive(self, batch: Batch) -> bool:
        """Note that a pulled batch reached the training step. False if it has been returned or forgotten."""
        with self._lock:
            one = self._pulled.pop(id(batch.spans), None)
            if one is not None:
                self._train(one)
            return one is not None

    def _train(self, one: OutstandingBatch) -> None:
        self._trained[id(one.batch.spans)] = one
        self.batches += 1
        self.samples += one.samples
        self.last = one.batch
        self._count(one, 1)

    def drop(self, batch: Batch) -> bool:
        """Take a batch out, to acknowledge it alone or to return it. False if it was taken out before."""
        with self._lock:
            pulled = self._pulled.pop(id(batch.spans), None)
            trained = self._trained.pop(id(batch.spans), None)
            if trained is not None:
                self._count(trained, -1)
            return pulled is not None or trained is not None

    def cover(self, batches: int | None) -> list[Batch]:
        """Take out, in the order of training, the batches of a checkpoint that was taken after ``batches``.

        None: all.
        """
        with self._lock:
            count = len(self._trained) if batches is None else max(0, batches - self._covered)
            ones = [self._trained.pop(key) for key in list(self._trained)[:count]]
            for one in ones:
                self._count(one, -1)
            self._covered += len(ones)
            return [one.batch for one in ones]

    def trained(self) -> list[Batch]:
        """Return the batches that were trained on and are not acknowledged."""
        with self._lock:
            return [one.batch for one in self._trained.values()]

    def forget(self) -> None:
        """Acknowledge nothing of what was delivered, because reading continues elsewhere."""
        with self._lock:
            self._covered += len(self._trained)
            self._pulled.clear()
            self._trained.clear()
            self._waiting_samples = self._waiting_bytes = 0
            self.last = None

    def first(self, besides: Iterable[Batch] = (), *, pulled_only: bool = False) -> Batch | None:
        """Return the first batch in canonical order that is not acknowledged (``pulled_only``: not trained on)."""
        left_out = {id(batch.spans) for batch in besides}
        with self._lock:
            ones = [one.batch for key, one in self._pulled.items() if key not in left_out]
            ones += [] if pulled_only else [one.batch for one in self._trained.values()]
        return min(ones, key=canonical, default=None)

    def promise(self, batches: int) -> None:
        """Note that a state was taken after this many batches. The training code may be saving it."""
        self.promised = max(self.promised, batches)

    @property
    def is_being_saved(self) -> bool:
        """Return whether a state was taken of batches that no checkpoint covers yet."""
        return self.promised > self._covered

    @property
    def waiting(self) -> OutstandingAmount:
        """The amount that was trained on and is not acknowledged."""
        with self._lock:
            return OutstandingAmount(len(self._trained), self._waiting_samples, self._waiting_bytes)

    @property
    def quiet_s(self) -> float:
        """The time since a batch was last pulled, trained on or acknowledged."""
        return self._clock() - self._changed_s

    def _count(self, one: OutstandingBatch, sign: int) -> None:
        self._waiting_samples += sign * one.samples
        self._waiting_bytes += sign * one.nbytes
        self._changed_s = self._clock()


def canonical(batch: Batch) -> tuple[int, int]:
    """Return the position of a batch of an ordered group, for comparison."""
    return batch.epoch, batch.position


def _outstanding(batch: Batch) -> OutstandingBatch:
    return OutstandingBatch(Batch({}, batch.epoch, batch.spans, batch.position), batch.size, batch.nbytes)


DEADLOCK_LOOK_S = 2.0
"""The pause between two counts of what all readers hold, because a count reads their indexes."""

Acknowledge = Literal["on_next", "manual", "on_checkpoint"]


class Adapter(Protocol):
    """A link between a loader and a framework that pulls batches long before its step uses them."""

    def report(self) -> None:
        """Report to the loader which batches the training step is done with."""

    def reached(self) -> list[Batch]:
        """Return the batches that `report` would report now."""


class UnacknowledgedNotice:
    """The last notice on batches that a loader delivered and that were not acknowledged. It keeps no loader alive."""

    def __init__(self, policy: Acknowledge, outstanding: OutstandingBatches, notify: Notify) -> None:
        self._policy, self._outstanding, self._notify = policy, outstanding, notify

    def tell(self) -> None:
        """Say how many samples will be delivered again, and which call acknowledges them."""
        left = self._outstanding.waiting
        if not left.batches:
            return
        if self._policy == "on_checkpoint":
            self._notify(
                f"{left.samples} samples were trained on since the last checkpoint: they are handed out again; "
                "loader.checkpointed() after each saved checkpoint acknowledges them"
            )
        elif self._policy == "manual":
            self._notify(
                f"{left.samples} samples were handed out and not acknowledged: they are handed out again; "
                "loader.acknowledge(batch) acknowledges a batch"
            )


def handed_over(items: Iterable[_Item], ask: Callable[[], None], lost: Callable[[], None]) -> Iterator[_Item]:
    """Yield the same items. ``ask`` is called before each request, and ``lost`` if its item did not reach the loop."""
    iterator, is_given = iter(items), True
    try:
        while True:
            is_given = False
            ask()
            item = next(iterator, _END)
            # Python handles no signal between here and the end of `yield`, because nothing is called
            is_given = True
            if item is _END:
                return
            yield item
    except PenstockError:
        raise
    except BaseException:
        if not is_given:
            lost()
        raise


class Acknowledger:
    """The acknowledgement of one loader's batches; see `loader.Loader` for the policies. Any thread may call it."""

    def __init__(
        self, policy: Acknowledge, stream: str, notify: Notify, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if policy not in get_args(Acknowledge):
            raise ValueError(f"acknowledge is {policy!r}, expected one of {', '.join(get_args(Acknowledge))}")
        self.policy: Acknowledge = policy
        self.adapter: Adapter | None = None
        self.member: Member | None = None
        """The joined member, once there is one."""
        self._stream, self._notify, self._clock = stream, notify, clock
        self._lock = threading.Lock()
        """A framework's step and its readahead are different threads."""
        self._outstanding = OutstandingBatches(clock)
        self.unacknowledged = UnacknowledgedNotice(policy, self._outstanding, notify)
        self._delivered: Batch | None = None
        """The batch that a plain loop has, if asking for the next one acknowledges it."""
        self._on_its_way: Sequence[BatchSpan] | None = None
        """The spans of a batch that was delivered and has not reached the loop."""
        self.is_interrupted = False
        """Whether a loop was interrupted while it asked for a batch. Some of what was read ahead may be lost then."""
        self._is_warned = False
        self._looked_s = 0.0
        self._held_up: list[Batch] = []
        """The batches that wait for an earlier one, because ordered groups acknowledge by position."""

    def join(self, member: Member) -> None:
        """Learn as which member this loader reads, once it has joined its group."""
        self.member = member
        member.on_replaced(self.tell_replaced)

    def tell_replaced(self) -> None:
        """Say that the last batch comes again, because a newer loader took the member's name before `close`."""
        reached = self.adapter.reached() if self.adapter is not None else []
        if self.policy == "on_next" and (reached or self._delivered is not None):
            assert self.member is not None
            who = self.member.claim.who
            self._notify(
                f"another loader of this process joined group {who.group!r} as {who.member!r}, and the last batch of "
                "the older loader is not acknowledged: it may come again. Call close() of a loader before you make the "
                "next one"
            )

    # --- handing out and acknowledging ---

    def deliver(self, batch: Batch) -> None:
        """Deliver a batch to the loop or to a framework."""
        self._go_on()
        self._on_its_way = batch.spans
        if self.adapter is not None:
            self._outstanding.pull(batch)
            return
        self._outstanding.train(batch)
        if self.policy == "on_next":
            self._delivered = batch
        else:
            self._warn()

    def given(self, items: Iterable[_Item], *, is_made: bool = False) -> Iterator[_Item]:
        """Yield the same items, and note when the loop has each.

        Ctrl-C, or an error of the user's code, may come when a batch has been taken and not been given. Nothing of it
        counts as trained on then, and the next iteration reads it again.

        Args:
            items: the batches of one iteration, or what is made of them.
            is_made: whether a view makes something of each batch that the loader gave.
        """

        def lost() -> None:
            if not self.is_interrupted:
                self._withdraw(self._outstanding.newest if is_made else self._on_its_way)

        return handed_over(items, self._ask, lost)

    def _ask(self) -> None:
        self._on_its_way = None

    @property
    def newest(self) -> Sequence[BatchSpan] | None:
        """The spans of the batch that a plain loop got last."""
        return self._outstanding.newest

    @contextmanager
    def read_again_on_error(self) -> Iterator[None]:
        """Note on an error that a batch was taken from the queue and not given. The next iteration reads it again."""
        try:
            yield
        except PenstockError:  # `given` notes all others
            self.is_interrupted = True
            raise

    def withdraw_newest(self) -> None:
        """Note that the batch that a plain loop got last was lost on its way through a mixture."""
        if not self.is_interrupted:
            self._withdraw(self._outstanding.newest)

    def _withdraw(self, spans: Sequence[BatchSpan] | None) -> None:
        if spans is not None:
            self._outstanding.withdraw(spans)
            self._delivered = self._on_its_way = None
        self.is_interrupted = True

    def begin(self) -> None:
        """Note that a loop begins. After an interruption, read again what the loop before did not get."""
        self.asked_for_next()
        if not self.is_interrupted:
            return
        if self.policy == "on_next":
            self._acknowledge(self._outstanding.cover(None))
        if self.member is not None:
            with self._lock:
                self._held_up.clear()
                self.member.begin_again(self._outstanding.trained(), self._outstanding.last)
        self.is_interrupted = False

    def unless_dropped(self, batch: Batch | None) -> Batch | None:
        """Return a batch to hand out. A batch that the loop never gets counts as trained on instead."""
        if batch is None or not batch.is_dropped:
            return batch
        self._outstanding.train(batch)
        if self.policy != "on_checkpoint":
            self.acknowledge(batch)
        return None

    def asked_for_next(self) -> None:
        """Note that the loop is done with the batch that it had."""
        if self._delivered is not None:
            batch, self._delivered = self._delivered, None
            if self._outstanding.drop(batch):
                self._acknowledge([batch])

    def acknowledge(self, batch: Batch) -> None:
        """See `Loader.acknowledge`."""
        if self.policy == "on_checkpoint":
            raise ValueError(
                "with acknowledge='on_checkpoint' batches are acknowledged together, by loader.checkpointed() once a "
                "checkpoint is durable; for single batches there is acknowledge='manual'"
            )
        if getattr(batch, "epoch", UNKNOWN) == UNKNOWN:
            raise TypeError(
                f"acknowledge() got a {type(batch).__name__} without identities, expected one that this loader gave: "
                "keep that beside what you make of it"
            )
        if self._outstanding.drop(batch):
            self._acknowledge([batch])

    def trained(self, batch: Batch) -> None:
        """See `hooks.Hooks.trained`."""
        if not self._outstanding.arrive(batch):
            return
        if self.policy == "on_next":
            self.acknowledge(batch)
        else:
            self._warn()

    @property
    def has_trained(self) -> bool:
        """Return whether there are batches that were trained on and not acknowledged."""
        return bool(self._outstanding.trained())

    def checkpointed(self, batches: int | None) -> None:
        """Acknowledge the first batches that were trained on since the loader was made. None: all."""
        if self.policy != "on_checkpoint":
            raise ValueError(f"checkpointed() belongs to acknowledge='on_checkpoint'; this loader has {self.policy!r}")
        if self.adapter is not None:
            self.adapter.report()
        if batches is not None and not 0 <= batches <= self._outstanding.batches:
            hint = "pass what state_dict() returned, as it was"
            raise StateMismatch("batches", batches, f"{self._outstanding.batches} trained on", hint)
        self._acknowledge(self._outstanding.cover(batches))
        self.flush()
        self._is_warned = False

    def return_batches(self, batches: Iterable[Batch]) -> None:
        """See `hooks.Hooks.return_batches`."""
        left = [batch for batch in batches if self._outstanding.drop(batch)]
        left += self._outstanding.take_pulled()  # an interruption kept them from the framework
        if self.member is not None:
            with self._lock:
                self._held_up.clear()  # an ordered group reads everything again from the first of them
                self.member.return_batches(left, self._outstanding.trained())

    def forget(self) -> None:
        """Acknowledge nothing of what was delivered, because reading continues elsewhere."""
        self._outstanding.forget()
        self._held_up.clear()

    def take_over(self, adapter: Adapter) -> None:
        """See `hooks.Hooks.take_over`."""
        if self.policy == "manual":
            raise ValueError(
                "Loader(acknowledge='manual') leaves acknowledging to you, but a framework's dataset shows no batch to "
                "acknowledge; with 'on_next' it means the training step, however far is read ahead, and with "
                "'on_checkpoint' you say when a checkpoint is durable"
            )
        self.adapter = adapter

    def progress(self) -> dict[str, Any]:
        """Return the part of a state that describes this loader's batches."""
        reached = self.adapter.reached() if self.adapter is not None else []
        last = reached[-1] if reached else self._outstanding.last
        batches = self._outstanding.batches + len(reached)
        self._outstanding.promise(batches)
        return {
            "epoch": None if last is None else last.epoch,
            "batches": batches,
            "samples": self._outstanding.samples + sum(batch.size for batch in reached),
        }

    # --- ends ---

    def end_epoch(self, epoch: int) -> None:
        """Close an epoch for the group after it was read to its end, unless a part of it is not acknowledged."""
        assert self.member is not None
        self._go_on()
        claim = self.member.claim
        with self._lock:
            if claim.has_unacknowledged(epoch):
                claim.unclosed.add(epoch)
            else:
                claim.close_epochs(epoch)

    def close(self) -> None:
        """Acknowledge what the loop, or the step, is done with."""
        self.asked_for_next()
        if self.adapter is not None:
            self.adapter.report()
        self.flush()
        self.unacknowledged.tell()

    def _acknowledge(self, batches: list[Batch]) -> None:
        if self.member is None:  # nothing was delivered yet
            return
        self._go_on()
        claim = self.member.claim
        with self._lock:
            for batch in batches if self.member.rank is None else self._in_order(batches):
                claim.acknowledge(batch)
            if claim.unclosed:
                for epoch in sorted({batch.epoch for batch in batches} & claim.unclosed):
                    if not claim.has_unacknowledged(epoch):
                        claim.close_epochs(epoch)

    def _in_order(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an ordered group that may be acknowledged, which are those before every outstanding
        batch.
        """
        if self.policy == "manual":  # the user's own decision: everything up to this batch
            return batches
        first = self._outstanding.first()
        due = sorted((*self._held_up, *batches), key=canonical)
        ready = [batch for batch in due if first is None or canonical(batch) < canonical(first)]
        self._held_up = due[len(ready) :]
        return ready

    def frontier(self) -> tuple[Batch | None, Batch | None]:
        """Return, for an ordered group, the last batch trained on, and the first one pulled before it that was not."""
        reached = self.adapter.reached() if self.adapter is not None else []
        trained = (
            [self._outstanding.last] if self._outstanding.last is not None else []
        )  # without arrays it counts as empty
        last = max((*reached, *trained), key=canonical, default=None)
        left = self._outstanding.first(besides=reached, pulled_only=True)
        is_before = left is not None and (last is None or canonical(left) < canonical(last))
        return last, left if is_before else None

    def flush(self) -> None:
        """Return once every acknowledgement is on the server."""
        if self.member is not None:
            with self._lock:
                self.member.claim.flush()

    def attend(self) -> None:
        """See that no acknowledgement is lost with its connection."""
        if self.member is not None:
            with self._lock:
                self.member.claim.attend()

    # --- what waits for a checkpoint ---

    def _warn(self) -> None:
        """Say once for each checkpoint that much is delivered and not acknowledged."""
        assert self.member is not None
        if self._is_warned:
            return
        budget = self.member.stream.budget_bytes
        if (text := warning(self._outstanding.waiting, budget, self._stream, self._remedy(budget))) is not None:
            self._is_warned = True
            self._notify(text)

    def raise_if_overdue(self, waited_s: float) -> None:
        """Raise CheckpointOverdue or TooLarge if a wait for a batch can never end.

        CheckpointOverdue: only this loop, or all loops together, could end the wait. TooLarge: all readers hold
        parts of batches. Until then the roster says that this loop waits.
        """
        waited_s = min(waited_s, self._outstanding.quiet_s)
        self.wait_for_next(waited_s)
        is_alone = self.policy == "on_checkpoint" and self.adapter is None and not self._outstanding.is_being_saved
        if self.member is None or waited_s < (PATIENCE_S if is_alone else OTHER_THREAD_S):
            return
        with suppress(ServerUnavailable):  # the reader reports that
            claim = self.member.claim
            stream, held = claim.stream, self._outstanding.waiting
            # other members may be about to acknowledge, too
            blocked_partitions = claim.blocked_partitions(
                together=waited_s >= OTHER_THREAD_S and self._is_time_to_look()
            )
            error = overdue(blocked_partitions, held, stream, self._remedy(stream.budget_bytes))
            if error is not None:
                raise error

    def wait_for_next(self, waited_s: float) -> None:
        """Tell everyone how long the loop has waited for a batch or an epoch."""
        if self.member is not None:
            since_s = self._clock() - min(waited_s, self._outstanding.quiet_s)
            self.member.heartbeat.loop.tell_idle(IdleLoop(since_s, self._outstanding.waiting.nbytes))

    def _go_on(self) -> None:
        """Note that the loop waits no more."""
        assert self.member is not None
        if (loop := self.member.heartbeat.loop).idle is not None:
            loop.tell_idle(None)

    def _is_time_to_look(self) -> bool:
        now, last = self._clock(), self._looked_s
        if is_time := now - last >= DEADLOCK_LOOK_S:
            self._looked_s = now
        return is_time

    def _remedy(self, budget_bytes: int) -> str:
        call = "call loader.checkpointed()" if self.policy == "on_checkpoint" else "acknowledge"
        return remedy_of(self._outstanding.waiting, budget_bytes, call)
