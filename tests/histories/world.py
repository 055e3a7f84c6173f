"""The world of a history: a server with one stream, the actors of now, and what they were told."""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import redis

from penstock_common.errors import EpochsReleased, GroupFinished, PenstockError, StreamNotFound
from penstock_common.segments.folder import INLINE
from penstock_common.server import scripts
from penstock_common.server.scripts import load_script
from penstock_common.stream.client import connect
from penstock_common.stream.feeds import close_epoch
from penstock_common.stream.keys import PartitionKeys
from penstock_common.stream.manifest import OPEN, abandon_epoch, retained_epochs
from penstock_common.stream.payloads import segments_of
from penstock_common.stream.removal.deletion import delete_stream
from penstock_common.stream.removal.reconcile import reconcile
from penstock_common.stream.streams import Stream, load_stream
from penstock_common.wire.header import parse_header
from penstock_producer.write.cleaner import Cleaner, clean_up, recycle
from tests.histories.actors import NAME, Producer, Trainer, open_writer, quiet
from tests.histories.interrupts import Hang, Interrupts, Killed
from tests.histories.slots import SlotState, SlotStore
from tests.histories.step import FEEDERS, PLANS, Step

JUMP_MS = 4_000_000_000_000
"""A clock that was set to the year 2096: ids count on from there, so that a loss brings the same ids again."""


SCRIPTS = Path(scripts.__file__).parent


@dataclass(slots=True)
class GroupFacts:
    """The facts that a history knows of a group."""

    delivered: set[int] = field(default_factory=set)
    """The values that its members were given."""
    first: int = 0
    """The first epoch that it reads."""
    was_left: bool = False
    """Whether a member left it: then epochs may be released before the group reads them."""
    is_told: bool = False
    """Whether a member got an error: its user starts again, and nothing is promised for what it read before."""


@dataclass(slots=True)
class Violation:
    """A broken promise."""

    kind: str
    text: str


class Arena:
    """A server for many histories, one after the other, with a stream that is made once."""

    def __init__(self, url: str, durability: str = "memory", payload: str = INLINE) -> None:
        """``payload`` is where the payloads of the stream are, as its writers say it."""
        self.url, self.durability, self.payload = url, durability, payload
        self.admin: Any = redis.Redis.from_url(url)
        self.admin.flushall()
        for path in SCRIPTS.glob("*.lua"):  # a script that the server does not know yet costs a point more
            self.admin.script_load(load_script(path.stem))
        with open_writer(url, durability, payload) as writer:
            self.slots, self.folder = SlotStore(self.admin, writer.stream), segments_of(writer.stream)
            self.spec = writer.stream.require_spec()
        self._empty = self.slots.save()

    def reset(self) -> None:
        """Bring the empty stream back."""
        self.admin.flushall()
        if self.folder is not None:
            gc.collect()  # a file that is mapped still is another history's
            for path in [*self.folder.path.glob("*.seg"), *self.folder.path.glob("*.checked")]:
                path.unlink()
        self.slots.bring_back(self._empty, self._empty, {})

    @property
    def is_durable(self) -> bool:
        """Return whether a replica has what is confirmed."""
        return self.durability != "memory"

    def close(self) -> None:
        """Close the connection."""
        self.admin.close()


class World:
    """Runs the steps of one history."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.interrupts = Interrupts(self._run_inner)
        self.values = count(1)
        self.producers: dict[str, Producer] = {}
        self.trainers: dict[str, Trainer] = {}
        self.former: list[Producer] = []
        """The producers that have ended."""
        self.groups: dict[str, GroupFacts] = {}
        self.violations: list[Violation] = []
        self.losses: list[tuple[int, tuple[str, ...]]] = []
        """(run of the server that was lost, slots) of each loss."""
        self.is_deleted = False
        self.remade: Producer | None = None
        """The writer of the stream that was made again under the name of the deleted one."""
        self.ended: set[int] = set()
        """The epochs that the operator closed or abandoned."""
        self._mark: dict[str, SlotState] = {}
        self._operator: Any = None
        self.names: set[str] = set()
        """The members that ever joined."""
        self._verbs: dict[str, Callable[[Step], object]] = {
            "plan": self._plan, "job": self._job, "feed": self._feed, "pour": self._pour, "end": self._close_feed,
            "join": self._join, "read": self._read, "ack": self._ack, "close": self._close, "beat": self._beat,
            "leave": self._leave, "die": self._die, "clean": self._clean, "seal": self._seal,
            "abandon": self._abandon, "delete": self._delete, "remake": self._remake, "mark": self._mark_now,
            "lose": self._lose, "jump": self._jump, "cut": self._cut, "restart": self._restart,
            "recycle": self._recycle, "fill": self._fill,
        }  # fmt: skip

    @property
    def operator(self) -> Any:
        """Return the client of the operator and of the cleaner."""
        if self._operator is None:
            self._operator = connect(self.arena.url, bears_outages=quiet)
        return self._operator

    # --- steps ---

    def run(self, history: tuple[Step, ...]) -> None:
        """Run a history on an empty stream."""
        self.arena.reset()
        self._mark = self.arena.slots.save()
        for step in history:
            self.take(step)
            self.judge_files()
            if self.violations:
                return

    def take(self, step: Step) -> None:
        """Run one step. Errors of Penstock end its actor, as they end a program. Others are violations."""
        with self.interrupts.step(step), self._told(step):
            self._verbs[step.kind](step)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Do in the block, as the operator, what is not a step."""
        step = Step(what)
        with self.interrupts.step(step), self._told(step):
            yield

    def _run_inner(self, step: Step) -> None:
        busy = [frame.who for frame in self.interrupts.frames]
        if step.kind == "die" and step.who == busy[-1]:
            raise Killed
        if step.who not in busy or step.who == "op":
            self.take(step)

    @contextmanager
    def _told(self, step: Step) -> Iterator[None]:
        try:
            yield
        except Killed:
            if len(self.interrupts.frames) > 1 and self.interrupts.frames[-1].who != step.who:
                raise
            self.end(step.who, "died")
        except Hang:
            self._violate("hang", f"{step} made too many requests")
            self.end(step.who, "died")
        except PenstockError as error:
            self.end(step.who, f"{type(error).__name__}: {error}")
        except Exception as error:
            self._violate("foreign", f"{step} ended with {type(error).__name__}: {error}")
            self.end(step.who, "died")

    def _violate(self, kind: str, text: str) -> None:
        self.violations.append(Violation(kind, text))

    def end(self, who: str, how: str = "died") -> None:
        """End the life of an actor."""
        producer, trainer = self.producers.pop(who, None), self.trainers.pop(who, None)
        if producer is not None:
            producer.ending = producer.ending or how
            producer.die()
            self.former.append(producer)
        if trainer is not None:
            trainer.ending = how
            trainer.die()
        if how != "died" and who[0] in self.groups:
            self.groups[who[0]].is_told = True
        if how != "died" and not (self.losses or self.ended or self.is_deleted):
            self._violate("refused", f"nothing was lost, and {who} ended with {how}")

    def producer(self, who: str) -> Producer:
        """Return the present life of a producer, which is started if there is none."""
        if who not in self.producers:
            self.producers[who] = Producer(self.arena.url, self.arena.durability, self.arena.payload)
        return self.producers[who]

    # --- producers ---

    def _plan(self, step: Step) -> None:
        self.producer("op").plan(step.number, PLANS[step.number])

    def _job(self, step: Step) -> None:
        self.producer(step.who).run_job(step.number, self.interrupts.runs)

    def _pour(self, step: Step) -> None:
        self.producer(step.who).write(self.values, step.number + 1, self.interrupts.runs)

    def _feed(self, step: Step) -> None:
        producer = self.producer(step.who)
        producer.write(self.values, step.number + 1, self.interrupts.runs)
        producer.flush(self.interrupts.runs)

    def _fill(self, step: Step) -> None:
        if step.who in self.producers:
            self.producers[step.who].fill()

    def _close_feed(self, step: Step) -> None:
        if step.who in self.producers:
            self.producers[step.who].close(self.interrupts.runs)
            self.former.append(self.producers.pop(step.who))

    # --- trainers ---

    def _join(self, step: Step) -> None:
        if step.who in self.trainers:
            return
        try:
            trainer = Trainer(self.arena.url, step.who, secrets.token_hex(8))
        except EpochsReleased:  # its user goes on with what there is, if a member had left before
            if not self.groups[step.who[0]].was_left:
                raise
            trainer = Trainer(self.arena.url, step.who, secrets.token_hex(8), "earliest")
        self.trainers[step.who] = trainer
        self.names.add(step.who)
        facts = self.groups.setdefault(step.who[0], GroupFacts(first=trainer.member.claim.first))
        facts.first = max(facts.first, trainer.member.claim.first)

    def _of_trainer(self, step: Step, act: Callable[[Trainer], object]) -> None:
        if step.who in self.trainers:
            act(self.trainers[step.who])

    def _read(self, step: Step) -> None:
        self._of_trainer(step, self.read)

    def read(self, trainer: Trainer) -> int:
        """Let a trainer read, and note what it was given. Return the number of samples."""
        facts = self.groups[trainer.group]
        with suppress(GroupFinished):
            found = trainer.read()
            for batch in found:
                facts.delivered.update(batch["y"].tolist())
            return len(found)
        return 0

    def _ack(self, step: Step) -> None:
        self._of_trainer(step, lambda trainer: trainer.acknowledge(step.number))

    def _close(self, step: Step) -> None:
        self._of_trainer(step, Trainer.close_epochs)

    def _beat(self, step: Step) -> None:
        self._of_trainer(step, Trainer.beat)

    def _leave(self, step: Step) -> None:
        if step.who in self.trainers:
            self.groups[step.who[0]].was_left = True
            self.trainers[step.who].leave()
            del self.trainers[step.who]

    def _die(self, step: Step) -> None:
        self.end(step.who, "died")

    # --- the operator and the cleaner ---

    def _clean(self, step: Step) -> None:
        self.clean(step.number)

    def clean(self, number: int, later_s: float = 0.0) -> None:
        """Let the cleaner pass, and free space of a partition: a little, or all that may go.

        ``later_s`` is how long after the rest of the history this is.
        """
        stream = load_stream(self.operator, NAME)
        reconcile(self.operator, stream, quiet, settle_s=0.0, clock=lambda: time.time() + later_s)
        clean_up(self.operator, stream, quiet)
        partition: PartitionKeys = stream.partitions[number % 2]
        Cleaner(self.operator, stream, quiet).free_bytes(partition, 1 if number < 2 else 1 << 40)

    def _recycle(self, _: Step) -> None:
        """Make the files of segments that nothing refers to ready to be used again, also those of now."""
        recycle(self.operator, load_stream(self.operator, NAME), grace_s=0.0, clock=lambda: time.time() + 1)

    def judge_files(self) -> None:
        """Require that every entry of a live epoch finds its payload, if replicas had what was done before.

        Without a replica a server that comes back older names files that are used again, and readers find that out.
        """
        folder = self.arena.folder
        if folder is None or not self.arena.is_durable or self.is_deleted:
            return
        for key in self.arena.admin.keys("*:entries"):
            prefix, epoch, _ = key.rsplit(b":", 2)
            if not self.arena.admin.hexists(prefix + b":roster", b"e:" + epoch):
                continue
            for entry_id, fields in self.arena.admin.xrange(key):
                ref = parse_header(fields[b"meta"], self.arena.spec, takes_refs=True).ref
                if ref is not None and ref.file not in folder.names():
                    self._violate("reused", f"entry {entry_id.decode()} names {ref.file}, which may be used again")
                    return

    def _seal(self, step: Step) -> None:
        """Close an open epoch as it is, once no writer of feeds lives."""
        if not {*FEEDERS} & {*self.producers}:
            self._end_open(step.number, close_epoch)

    def _abandon(self, step: Step) -> None:
        self._end_open(step.number, abandon_epoch)

    def _end_open(self, number: int, end: Callable[[Any, Stream, int], object]) -> None:
        stream = load_stream(self.operator, NAME)
        epochs = [epoch for epoch, state in retained_epochs(self.operator, stream).items() if state == OPEN]
        for epoch in epochs[number : number + 1]:
            self.ended.add(epoch)
            end(self.operator, stream, epoch)

    def _delete(self, step: Step) -> None:
        self.is_deleted = True
        with suppress(StreamNotFound):
            delete_stream(self.operator, NAME)

    def _remake(self, step: Step) -> None:
        """Delete the stream, and make it again, with a writer that feeds it. The actors of before may have paused."""
        if self.remade is None:
            self._delete(step)
            self.remade = Producer(self.arena.url, self.arena.durability, self.arena.payload)
            self.remade.write(self.values, 3, self.interrupts.runs)
            self.remade.flush(self.interrupts.runs)

    # --- the server ---

    def _mark_now(self, _: Step) -> None:
        self._mark = self.arena.slots.save()

    def replicated(self, slots: Iterable[str]) -> None:
        """Note that the replicas of these slots have everything."""
        now = self.arena.slots.save()
        self._mark = {**self._mark, **{slot: now.get(slot, {}) for slot in slots}}

    def _lose(self, step: Step) -> None:
        """Bring slots back to the last mark. Connections to their server break, and all connections for control."""
        slots = tuple(step.who.split("+"))
        self.arena.slots.bring_back(self._mark, slots, self.arena.slots.save())
        self.losses.append((self.interrupts.runs, slots))
        self.interrupts.note_run()
        for client, partition in self._clients():
            client.connection_pool.disconnect()
            if slots != ("s",) and (partition is None or f"p{partition}" in slots):
                client.drop_connections()

    def _cut(self, _: Step) -> None:
        """Cut all connections. What was sent may have been executed, and its answer is lost."""
        for client, _partition in self._clients():
            client.drop_connections()

    def _restart(self, step: Step) -> None:
        """Let the server come back as another run that has lost nothing."""
        self.interrupts.note_run()
        self._cut(step)

    def _clients(self) -> Iterator[tuple[Any, int | None]]:
        """Yield each client with the partition to which its channels lead, or None for any."""
        for producer in self.producers.values():
            yield producer.writer.client, producer.partition
        for trainer in self.trainers.values():
            yield trainer.client, None
        if self._operator is not None:
            yield self._operator, None

    def _jump(self, step: Step) -> None:
        """Let the clock of a partition's server jump ahead and back: ids go on from the highest one."""
        for key in self.arena.admin.keys("*:entries"):
            if self.arena.slots.slot_of(key) == step.who:
                last = self.arena.admin.xinfo_stream(key)["last-generated-id"]
                if int(last.partition(b"-")[0]) < JUMP_MS:
                    self.arena.admin.execute_command("XSETID", key, f"{JUMP_MS}-0")
