"""A small trainer process: it proves each batch from its payloads, journals it before and after the step, acknowledges.

Start it with ``python -m chaos.trainer URL STREAM GROUP MEMBER POLICY JOURNAL``. SIGTERM makes it leave the group.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from chaos.journal import Journal, note_stalls
from chaos.options import RANKS, Options, from_environment
from chaos.payload import prove
from chaos.process import prepare
from penstock import Canonical, Loader, PenstockError, Tuning

IDLE_S = 0.2


class Left(BaseException):
    """Raised when SIGTERM comes while the loop waits for a batch."""


class Trainer:
    """One member of one group, until it is asked to leave."""

    def __init__(self, loader: Loader, journal: Journal, options: Options, policy: str) -> None:
        self._loader, self._journal, self._options, self._policy = loader, journal, options, policy
        self._pace = random.Random(os.getpid())
        self._seq = self._noted = 0
        self._owed: deque[tuple[int, Any]] = deque()
        """The batches whose step ended and that are not acknowledged."""
        self._checkpoint: tuple[int, dict[str, Any]] | None = None
        """The last batch in a checkpoint that is being written, and the loader's state in it."""
        self._is_waiting = False
        self._leaving = False
        signal.signal(signal.SIGTERM, self._leave)

    def run(self) -> None:
        """Read epoch after epoch."""
        while not self._leaving:
            try:
                self._iterate()
            except PenstockError as error:
                if (kind := type(error).__name__) == "GroupFinished":
                    time.sleep(IDLE_S)
                elif kind == "CheckpointOverdue":  # several groups may hold all of the little space
                    self._journal.note("O", str(error).replace("\n", " "))
                    self._settle_all()
                else:
                    raise

    def _iterate(self) -> None:
        batches = iter(self._loader)
        while not self._leaving:
            batch = self._next(batches)
            if batch is None:
                self._end_epoch()
                return
            self._step(batch)
        if self._policy == "manual":
            self._acknowledge(len(self._owed) - 1)  # the last step does not count: its batch comes again

    def _next(self, batches: object) -> Any:
        self._is_waiting = True
        try:
            return next(batches, None)  # type: ignore[call-overload]
        finally:
            self._is_waiting = False

    def _step(self, batch: Any) -> None:
        self._note_acknowledged()
        self._seq += 1
        nonces = [prove(self._options.seed, x, int(y)) for x, y in zip(batch["x"], batch["y"], strict=True)]
        good = ",".join(f"{nonce:x}" for nonce in nonces if nonce is not None)
        self._journal.note("H", self._seq, batch.epoch, good or "-", batch.position)
        for row, nonce in enumerate(nonces):
            if nonce is None:
                self._journal.note("X", self._seq, f"row {row} of epoch {batch.epoch}: y {int(batch['y'][row])}")
        time.sleep(self._pace.uniform(0, 2 * self._options.step_s))
        self._journal.note("D", self._seq)
        if self._policy == "on_next":
            return
        self._owed.append((self._seq, batch))
        if self._policy == "on_checkpoint":
            self._write_checkpoint()
        elif len(self._owed) >= self._options.together:
            self._acknowledge(len(self._owed))

    def _write_checkpoint(self) -> None:
        """Begin a checkpoint, or end the one that was begun."""
        if self._checkpoint is None:
            if len(self._owed) >= self._options.checkpoint_every:
                self._checkpoint = self._seq, self._loader.state_dict()
        elif self._seq - self._checkpoint[0] >= self._options.durable_after:
            (upto, state), self._checkpoint = self._checkpoint, None
            self._loader.checkpointed(state)
            self._note_checkpointed(upto)

    def _note_checkpointed(self, upto: int) -> None:
        while self._owed and self._owed[0][0] <= upto:
            self._journal.note("A", self._owed.popleft()[0])
        self._journal.note("F")

    def _acknowledge(self, count: int) -> None:
        for _ in range(count):
            seq, batch = self._owed.popleft()
            self._loader.acknowledge(batch)
            self._journal.note("A", seq)

    def _end_epoch(self) -> None:
        self._settle_all()
        self._note_acknowledged()

    def _settle_all(self) -> None:
        if self._policy == "manual":
            self._acknowledge(len(self._owed))
        elif self._policy == "on_checkpoint":
            self._checkpoint = None
            self._loader.checkpointed()
            self._note_checkpointed(self._seq)

    def _note_acknowledged(self) -> None:
        """Record what an 'on_next' loader has acknowledged: the last batch, after it gave the next one or ended."""
        if self._policy == "on_next" and self._seq > self._noted:
            self._journal.note("A", self._seq)
            self._noted = self._seq

    def left(self) -> None:
        """Record that the loader was closed: its acknowledgements are on the server."""
        self._note_acknowledged()
        self._journal.note("L")

    def _leave(self, signum: int, frame: FrameType | None) -> None:
        self._leaving = True
        if self._is_waiting:
            self._is_waiting = False
            raise Left


def main(stream: str, group: str, member: str, policy: str, path: str) -> int:
    """Return 0 after leaving, 3 after an error of Penstock."""
    prepare()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # before it has joined, there is nothing to leave
    options, journal = from_environment(), Journal(Path(path))
    note_stalls(journal, options.lease_s / 4)
    try:
        with Loader(
            stream, group=group,
            acknowledge=policy,  # type: ignore[arg-type]
            **_place(options, group, member),
        ) as loader:  # fmt: skip
            trainer = Trainer(loader, journal, options, policy)
            journal.note("B")
            try:
                trainer.run()
            finally:
                journal.note("Z")
        trainer.left()
    except Left:
        journal.note("L")
    except PenstockError as error:
        journal.note("E", type(error).__name__, error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 3
    return 0


def _place(options: Options, group: str, member: str) -> dict[str, Any]:
    """Return the loader's options for a member with a name, or for a rank with a number."""
    tuning = Tuning(lease_s=options.lease_s, prefetch_bytes=options.prefetch_bytes)
    if group == RANKS:
        order = Canonical(rank=int(member), world_size=options.ranks)
        return {"order": order, "batch_size": options.rank_batch, "tuning": tuning}
    return {"batch_size": options.batch_size, "tuning": replace(tuning, member=member)}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
