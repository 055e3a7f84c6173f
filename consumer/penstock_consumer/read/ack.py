"""The batches that are outstanding, and when each is acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol, get_args

from penstock_common.errors import ServerUnavailable, StateMismatch
from penstock_common.waiting import Notify
from penstock_consumer.read.deadlock import ELSEWHERE_S, PATIENCE_S, OutstandingAmount, overdue, remedy_of, warning
from penstock_consumer.read.epochs import Reading
from penstock_consumer.read.heartbeat import IdleLoop
from penstock_consumer.stages.batch import UNKNOWN, Batch


class OutstandingBatch(NamedTuple):
    """One batch handed out and not settled."""

    batch: Batch
    """Without its arrays."""
    samples: int
    nbytes: int
    """Payload bytes."""


class OutstandingBatches:
    """The batches of one loader from handing out to acknowledgement. Its threads may call this at the same time.

    A batch is pulled, trained on, then settled. In a plain loop the first two are one; a framework that reads ahead
    pulls long before its step trains.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._pulled: dict[int, OutstandingBatch] = {}
        self._trained: dict[int, OutstandingBatch] = {}
        """In the order of training. Keys are the ids of the spans, which live as long as the value does."""
        self._covered = 0
        """Of the batches trained on, in order, those that a checkpoint covered."""
        self.promised = 0
        """Of them, those whose state was taken: somebody may be saving it."""
        self.batches = self.samples = 0
        """Trained on since the loader was made."""
        self.last: Batch | None = None
        """The last one trained on, without its arrays."""
        self.waiting = OutstandingAmount()
        """Trained on and not settled."""
        self._changed_s = clock()

    def pull(self, batch: Batch) -> None:
        """A batch was given to a framework."""
        with self._lock:
            self._pulled[id(batch.spans)] = _outstanding(batch)
            self._changed_s = self._clock()

    def train(self, batch: Batch) -> None:
        """A batch is given to a plain loop."""
        with self._lock:
            self._train(_outstanding(batch))

    def arrive(self, batch: Batch) -> bool:
        """A batch that was pulled reached the training step; False if it was handed back or forgotten meanwhile."""
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
        """A batch is to be settled by itself, or handed back; False if it was before."""
        with self._lock:
            pulled = self._pulled.pop(id(batch.spans), None)
            trained = self._trained.pop(id(batch.spans), None)
            if trained is not None:
                self._count(trained, -1)
            return pulled is not None or trained is not None

    def cover(self, batches: int | None) -> list[Batch]:
        """Return, in the order of training, what a checkpoint covers that was taken after ``batches`` (None: all)."""
        with self._lock:
            count = len(self._trained) if batches is None else max(0, batches - self._covered)
            ones = [self._trained.pop(key) for key in list(self._trained)[:count]]
            for one in ones:
                self._count(one, -1)
            self._covered += len(ones)
            return [one.batch for one in ones]

    def trained(self) -> list[Batch]:
        """Trained on and not settled."""
        with self._lock:
            return [one.batch for one in self._trained.values()]

    def forget(self) -> None:
        """Reading goes on elsewhere: nothing of what was handed out is to be settled."""
        with self._lock:
            self._covered += len(self._trained)
            self._pulled.clear()
            self._trained.clear()
            self.waiting, self.last = OutstandingAmount(), None

    def first(self, besides: Iterable[Batch] = (), *, pulled_only: bool = False) -> Batch | None:
        """In canonical order the first batch that is not settled, or not even trained on."""
        left_out = {id(batch.spans) for batch in besides}
        with self._lock:
            ones = [one.batch for key, one in self._pulled.items() if key not in left_out]
            ones += [] if pulled_only else [one.batch for one in self._trained.values()]
        return min(ones, key=canonical, default=None)

    def promise(self, batches: int) -> None:
        """Note that a state was taken after so many batches: somebody may be saving it."""
        self.promised = max(self.promised, batches)

    @property
    def is_being_saved(self) -> bool:
        """Return whether a state was taken of batches that no checkpoint covers yet."""
        return self.promised > self._covered

    @property
    def quiet_s(self) -> float:
        """For how long nothing was pulled, trained on or settled."""
        return self._clock() - self._changed_s

    def _count(self, one: OutstandingBatch, sign: int) -> None:
        batches, samples, nbytes = self.waiting
        self.waiting = OutstandingAmount(batches + sign, samples + sign * one.samples, nbytes + sign * one.nbytes)
        self._changed_s = self._clock()


def canonical(batch: Batch) -> tuple[int, int]:
    """Return the position of a batch of an ordered group, for comparison."""
    return batch.epoch, batch.position


def _outstanding(batch: Batch) -> OutstandingBatch:
    return OutstandingBatch(Batch({}, batch.epoch, batch.spans, batch.position), batch.size, batch.nbytes)


LOOK_EVERY_S = 2.0
"""What all readers of a stream hold is counted from its indexes, so not at every turn of a wait."""

Acknowledge = Literal["on_next", "manual", "on_checkpoint"]


class Adapter(Protocol):
    """A link between a loader and a framework that pulls batches long before its step uses them."""

    def settle(self) -> None:
        """Reports to `Loader.trained` what the training step is done with."""

    def reached(self) -> list[Batch]:
        """Return what `settle` would report now."""


class UnacknowledgedNotice:
    """The last word on what a loader handed out and nobody acknowledged. It keeps no loader alive."""

    def __init__(self, policy: Acknowledge, outstanding: OutstandingBatches, notify: Notify) -> None:
        self._policy, self._outstanding, self._notify = policy, outstanding, notify

    def tell(self) -> None:
        """Say how many samples will be handed out again, and which call acknowledges them."""
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


class Acknowledger:
    """One loader's acknowledging; see `loader.Loader` for the policies. A framework's threads may call it."""

    def __init__(self, policy: Acknowledge, stream: str, notify: Notify) -> None:
        if policy not in get_args(Acknowledge):
            raise ValueError(f"acknowledge is {policy!r}, expected one of {', '.join(get_args(Acknowledge))}")
        self.policy: Acknowledge = policy
        self.adapter: Adapter | None = None
        self.reading: Reading | None = None
        """Set when the group was joined."""
        self._stream, self._notify = stream, notify
        self._lock = threading.Lock()
        """A framework's step and its read-ahead are different threads."""
        self._outstanding = OutstandingBatches()
        self.unacknowledged = UnacknowledgedNotice(policy, self._outstanding, notify)
        self._in_hand: Batch | None = None
        """The batch that a plain loop has, if asking for the next one acknowledges it."""
        self._is_warned = False
        self._looked_s = 0.0
        self._held_up: list[Batch] = []
        """Ordered groups settle by position: what was trained on before something that lies earlier waits for it."""

    def join(self, reading: Reading) -> None:
        """Learn how this loader reads, once it has joined its group."""
        self.reading = reading

    # --- handing out and acknowledging ---

    def hand(self, batch: Batch) -> None:
        """A batch goes to the loop, or to a framework."""
        self._go_on()
        if self.adapter is not None:
            self._outstanding.pull(batch)
            return
        self._outstanding.train(batch)
        if self.policy == "on_next":
            self._in_hand = batch
        else:
            self._warn()

    def unless_dropped(self, batch: Batch | None) -> Batch | None:
        """A batch to hand out; one that nobody is to be given counts as trained on instead."""
        if batch is None or not batch.is_dropped:
            return batch
        self._outstanding.train(batch)
        if self.policy != "on_checkpoint":
            self.acknowledge(batch)
        return None

    def asked_for_next(self) -> None:
        """The loop is done with what it had."""
        if self._in_hand is not None:
            batch, self._in_hand = self._in_hand, None
            self.acknowledge(batch)

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
        """See `Loader.trained`."""
        if not self._outstanding.arrive(batch):
            return
        if self.policy == "on_next":
            self.acknowledge(batch)
        else:
            self._warn()

    def checkpointed(self, batches: int | None) -> None:
        """Settles the first so many batches that were trained on since the loader was made; None: all."""
        if self.policy != "on_checkpoint":
            raise ValueError(f"checkpointed() belongs to acknowledge='on_checkpoint'; this loader has {self.policy!r}")
        if self.adapter is not None:
            self.adapter.settle()
        if batches is not None and not 0 <= batches <= self._outstanding.batches:
            hint = "pass what state_dict() returned, as it was"
            raise StateMismatch("batches", batches, f"{self._outstanding.batches} trained on", hint)
        self._acknowledge(self._outstanding.cover(batches))
        self.flush()
        self._is_warned = False

    def hand_back(self, batches: Iterable[Batch]) -> None:
        """See `Loader.hand_back`."""
        left = [batch for batch in batches if self._outstanding.drop(batch)]
        if self.reading is not None:
            with self._lock:
                self._held_up.clear()  # an ordered group reads all from the first of them on again
                self.reading.hand_back(left, self._outstanding.trained())

    def forget(self) -> None:
        """Reading goes on elsewhere: nothing of what was handed out is to be settled."""
        self._outstanding.forget()
        self._held_up.clear()
        self._in_hand = None

    def take_over(self, adapter: Adapter) -> None:
        """See `Loader.take_over`."""
        if self.policy == "manual":
            raise ValueError(
                "Loader(acknowledge='manual') leaves acknowledging to you, but a framework's dataset shows no batch to "
                "acknowledge; with 'on_next' it means the training step, however far is read ahead, and with "
                "'on_checkpoint' you say when a checkpoint is durable"
            )
        self.adapter = adapter

    def progress(self) -> dict[str, Any]:
        """Return what a state says of this loader's batches."""
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
        """An epoch was read to its end here: closes it for the group, unless something of it is still to be settled."""
        assert self.reading is not None
        self._go_on()
        member = self.reading.member
        with self._lock:
            if member.has_unacknowledged(epoch):
                member.unclosed.add(epoch)
            else:
                member.close_epochs(epoch)

    def close(self) -> None:
        """Settles what the loop, or the step, is done with."""
        self.asked_for_next()
        if self.adapter is not None:
            self.adapter.settle()
        self.flush()
        self.unacknowledged.tell()

    def _acknowledge(self, batches: list[Batch]) -> None:
        if self.reading is None:  # nothing was handed out yet
            return
        self._go_on()
        member = self.reading.member
        with self._lock:
            for batch in self._in_order(batches) if self.reading.is_ordered else batches:
                member.acknowledge(batch)
            for epoch in sorted({batch.epoch for batch in batches} & member.unclosed):
                if not member.has_unacknowledged(epoch):
                    member.close_epochs(epoch)

    def _in_order(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an ordered group that may be acknowledged: none beyond one that is outstanding."""
        if self.policy == "manual":  # the user's own word: all up to this one
            return batches
        first = self._outstanding.first()
        due = sorted((*self._held_up, *batches), key=canonical)
        ready = [batch for batch in due if first is None or canonical(batch) < canonical(first)]
        self._held_up = due[len(ready) :]
        return ready

    def frontier(self) -> tuple[Batch | None, Batch | None]:
        """Return (the last batch trained on, the first that was pulled before it and was not) of an ordered group."""
        reached = self.adapter.reached() if self.adapter is not None else []
        trained = (
            [self._outstanding.last] if self._outstanding.last is not None else []
        )  # without arrays it counts as empty
        last = max((*reached, *trained), key=canonical, default=None)
        left = self._outstanding.first(besides=reached, pulled_only=True)
        is_before = left is not None and (last is None or canonical(left) < canonical(last))
        return last, left if is_before else None

    def flush(self) -> None:
        """Returns once every acknowledgement is on the server."""
        if self.reading is not None:
            with self._lock:
                self.reading.member.flush()

    # --- what waits for a checkpoint ---

    def _warn(self) -> None:
        """Says, once for each checkpoint, that much is handed out and not settled."""
        assert self.reading is not None
        if self._is_warned:
            return
        budget = self.reading.member.stream.budget_bytes
        if (text := warning(self._outstanding.waiting, budget, self._stream, self._remedy(budget))) is not None:
            self._is_warned = True
            self._notify(text)

    def raise_if_overdue(self, waited_s: float) -> None:
        """Ends a wait for a batch that only this loop, or all loops together, could end: raises CheckpointOverdue.

        TooLarge where what all readers hold is parts of batches. Until then the roster says that this loop waits.
        """
        waited_s = min(waited_s, self._outstanding.quiet_s)
        self.wait_for_next(waited_s)
        is_alone = self.policy == "on_checkpoint" and self.adapter is None and not self._outstanding.is_being_saved
        if self.reading is None or waited_s < (PATIENCE_S if is_alone else ELSEWHERE_S):
            return
        with suppress(ServerUnavailable):  # the reader says so
            member = self.reading.member
            budget, held = member.stream.budget_bytes, self._outstanding.waiting
            # other members may be about to settle, too
            blocked_partitions = member.blocked_partitions(together=waited_s >= ELSEWHERE_S and self._is_time_to_look())
            if (error := overdue(blocked_partitions, held, budget, self._stream, self._remedy(budget))) is not None:
                raise error

    def wait_for_next(self, waited_s: float) -> None:
        """The loop has waited so long, for a batch or for an epoch: everyone else is told."""
        if self.reading is not None:
            since_s = time.monotonic() - min(waited_s, self._outstanding.quiet_s)
            self.reading.heartbeat.tell_idle(IdleLoop(since_s, self._outstanding.waiting.nbytes))

    def _go_on(self) -> None:
        """The loop waits no more."""
        if self.reading is not None and self.reading.heartbeat.idle is not None:
            self.reading.heartbeat.tell_idle(None)

    def _is_time_to_look(self) -> bool:
        now, last = time.monotonic(), self._looked_s
        if is_time := now - last >= LOOK_EVERY_S:
            self._looked_s = now
        return is_time

    def _remedy(self, budget_bytes: int) -> str:
        call = "call loader.checkpointed()" if self.policy == "on_checkpoint" else "acknowledge"
        return remedy_of(self._outstanding.waiting, budget_bytes, call)
