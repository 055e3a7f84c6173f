"""A member of a group that reads for one client: a thread that hands batches out while the client has credits.

The thread blocks on Redis. Everything it finds goes to ``deliver``, which must not block.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.gateway.frames import message_of
from penstock.gateway.limits import MAX_CREDITS, Limits
from penstock.gateway.refusals import BAD_MESSAGE, BATCH_TOO_LARGE, FAILED, Refusal, refusal_of
from penstock.gateway.texts import error_for, notice_for
from penstock.gateway.tokens import Grant
from penstock_common.errors import PenstockError
from penstock_common.tuning import Tuning
from penstock_consumer.read.hooks import hooks_of
from penstock_consumer.read.loader import Loader
from penstock_consumer.stages.batch import Batch

STOP_S = 2.0
"""The time for a member's thread to end. One that waits for a stream or an epoch looks each second."""
UNSENT_BATCHES = 2
"""The batches that are encoded and not sent, at most."""


@dataclass(frozen=True, slots=True)
class Told:
    """A fact for the client, as JSON."""

    value: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchMessage:
    """A batch for the client, as bytes."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """The member reads no more. Without a refusal the client has left."""

    refusal: Refusal | None


Event = Told | BatchMessage | Ended
Deliver = Callable[[Event], None]
Report = Callable[[str, str], None]
"""Called with the kind of a line, and with the line for the operator."""


class GatewayMember:
    """A member that joins a group for one client, and leaves it with the client."""

    def __init__(
        self, url: str, grant: Grant, batch_size: int, limits: Limits, deliver: Deliver, report: Report
    ) -> None:
        self.name = f"gateway-{secrets.token_hex(6)}"
        self.grant = grant
        self._url, self._batch_size, self._limits, self._deliver = url, batch_size, limits, deliver
        self._report = report
        self._changed = threading.Condition()
        self._loader: Loader | None = None
        self._outstanding: dict[int, Batch] = {}
        """Number -> a batch without its tensors, which the client has not acknowledged."""
        self._credits = self._epochs_wanted = self._unsent = 0
        self._newest = 0
        """The number of the newest batch that the client was given. They count from 1."""
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    @property
    def is_running(self) -> bool:
        """Return whether its thread lives."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Join the group, in a thread."""
        try:
            self._thread.start()
        except RuntimeError:  # the process has as many threads as it may
            self._deliver(Ended(Refusal(FAILED, "the gateway has no thread for another member: try again later")))

    # --- what the client asks for ---

    def grant_credits(self, batches: int) -> None:
        """Allow this many further batches. Raises Refusal if the client would have too many."""
        with self._changed:
            if self._credits + batches > MAX_CREDITS:
                raise Refusal(BAD_MESSAGE, f"a client may have {MAX_CREDITS} credits at once: grant one a batch")
            self._credits += batches
            self._changed.notify_all()

    def want_epoch(self) -> None:
        """Read the group's next epoch once the one before has ended."""
        with self._changed:
            self._epochs_wanted = min(self._epochs_wanted + 1, 2)
            self._changed.notify_all()

    def sent(self) -> None:
        """Note that a batch has left the gateway."""
        with self._changed:
            self._unsent -= 1
            self._changed.notify_all()

    def acknowledge(self, numbers: list[int]) -> None:
        """Acknowledge batches, and return once the server has it, also of batches that were acknowledged before.

        Raises Refusal, and acknowledges nothing, for a number that was never given.
        """
        with self._changed:
            newest, loader = self._newest, self._loader
        if loader is None or max(numbers) > newest:
            raise Refusal(BAD_MESSAGE, f"batch {max(numbers)} was never given: batches count from 1, and {newest} were")
        try:
            for number in numbers:
                with self._changed:
                    batch = self._outstanding.pop(number, None)
                if batch is not None:
                    loader.acknowledge(batch)
            hooks_of(loader).acknowledger.flush()
        except PenstockError as error:
            raise refusal_of(error, error_for(self.grant, error)) from error

    def stop(self) -> int:
        """Leave the group, and wait until what was not acknowledged is returned to it.

        Returns:
            The batches that the client had and did not acknowledge.
        """
        with self._changed:
            self._is_stopped = True
            loader, left = self._loader, len(self._outstanding)
            self._changed.notify_all()
        if loader is not None:
            with suppress(PenstockError):  # the server is away: the leases lapse by themselves
                loader.close()
        if self.is_running:
            self._thread.join(STOP_S)
        return left

    # --- the thread ---

    def _run(self) -> None:
        refusal: Refusal | None = Refusal(FAILED, "the gateway failed, and its log says why: read again")
        try:
            loader = self._join()
            if loader is not None:
                self._read(loader)
            refusal = None
        except Refusal as error:
            refusal = error
        except PenstockError as error:
            refusal = refusal_of(error, error_for(self.grant, error))
        finally:  # a loader that `stop` closed ends its thread with an error, which is not needed
            self._deliver(Ended(None if self._is_stopped else refusal))

    def _join(self) -> Loader | None:
        tuning = Tuning(
            member=self.name,
            lease_s=self._limits.lease_s,
            prefetch_bytes=self._limits.buffer_bytes,
            notify=self._notify,
        )
        loader = Loader(
            self.grant.stream,
            group=self.grant.group,
            batch_size=self._batch_size,
            url=self._url,
            acknowledge="manual",
            tuning=tuning,
        )
        with self._changed:
            self._loader = loader
            is_stopped = self._is_stopped
        if is_stopped:
            loader.close()
            return None
        spec, fixed = loader.spec, sum(tensor.sample_bytes for tensor in loader.spec if not tensor.is_ragged)
        self._require_size(fixed * self._batch_size)
        hooks_of(loader).bound_batches(self._require_size)
        facts = {"spec": json.dumps(spec.as_json()), "stream": loader.stream.id, "info": loader.info}
        self._deliver(Told({"type": "opened", "member": self.name, "lease_s": self._limits.lease_s, **facts}))
        return loader

    def _notify(self, line: str) -> None:
        text = notice_for(self.grant, line)
        if text != line:
            self._report(f"{self.grant} {text[:20]}", line)
        if text:
            self._deliver(Told({"type": "notice", "text": text}))

    def _read(self, loader: Loader) -> None:
        while self._next_epoch():
            batches, epoch = iter(loader), None
            while (batch := self._next_batch(batches)) is not None:
                number, epoch = self._newest + 1, batch.epoch
                content = message_of(number, batch, loader.spec, loader.stream.id)
                with self._changed:
                    self._newest = number
                    self._outstanding[number] = Batch({}, batch.epoch, batch.spans, batch.position)
                    self._unsent += 1
                self._deliver(BatchMessage(content))
            if self._is_stopped:
                return
            self._deliver(Told({"type": "end", "epoch": epoch}))

    def _next_epoch(self) -> bool:
        """Wait until the client wants an epoch. False once the member is stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._epochs_wanted > 0)
            self._epochs_wanted -= 1
            return not self._is_stopped

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        """Return the next batch once the client has a credit for it, or None at the epoch's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or (self._credits > 0 and self._unsent < UNSENT_BATCHES))
            if self._is_stopped:
                return None
            self._credits -= 1
        batch = next(batches, None)
        if batch is None:
            with self._changed:
                self._credits += 1
        return batch

    def _require_size(self, nbytes: int) -> None:
        if nbytes > self._limits.batch_bytes:
            raise Refusal(
                BATCH_TOO_LARGE,
                f"a batch of {nbytes:,} bytes or more, and the gateway sends {self._limits.batch_bytes:,} at most "
                "(--batch-bytes): ask for a smaller batch_size",
            )
