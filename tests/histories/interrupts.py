"""Interrupts: what comes between two requests of an actor, and the limit of requests that shows a hang.

Inside `installed` no call sleeps, every source of chance is a counter, and what falls due with time is due always or
never. So a history is the same each time, however busy the machine is.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from unittest.mock import patch

from penstock_common.server import client as client_module
from penstock_common.server.channel import Channel, Command
from penstock_common.stall_detector import PendingRequest
from penstock_common.stream.groups import presence as presence_module
from penstock_consumer.read import heartbeat as heartbeat_module
from penstock_consumer.read import ordered as ordered_module
from penstock_consumer.read import shared as shared_module
from penstock_consumer.read.heartbeat import Heartbeat
from penstock_producer.write import resources as resources_module
from penstock_producer.write import shard as shard_module
from penstock_producer.write import unconfirmed as unconfirmed_module
from penstock_producer.write import writer as writer_module
from penstock_producer.write.cleaner import CleanupTimer
from tests.histories.step import Step

MOST_POINTS = 4000
"""Requests and pauses of one step, counted twice each, after which it counts as hanging."""


class Killed(BaseException):
    """The actor's process was killed with SIGKILL."""


class Hang(BaseException):
    """A step made more requests and pauses than any step needs."""


@dataclass(slots=True)
class Frame:
    """A step that runs now."""

    who: str
    inner: dict[int, list[Step]] = field(default_factory=dict)
    point: int = 0


class Interrupts:
    """Runs the inner steps of a step at their points."""

    def __init__(self, run: Callable[[Step], None]) -> None:
        """``run`` runs an inner step, or raises Killed for the death of the actor whose step is interrupted."""
        self._run = run
        self.frames: list[Frame] = []
        """The steps that run now, the innermost last."""
        self.runs = 0
        """The runs of the server: it is another one after each loss."""
        self.points: list[int] = []
        """The points of each step that has ended, which are the same in each repetition."""

    def note_run(self) -> None:
        """Note that the server is another run of itself from now on."""
        self.runs += 1

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """Count the requests in the block, and run the inner steps of ``step`` between them."""
        inner: dict[int, list[Step]] = {}
        for point, one in step.inner:
            inner.setdefault(point, []).append(one)
        self.frames.append(Frame(step.who, inner))
        try:
            yield
        finally:
            self.points.append(self.frames.pop().point)

    def reached(self) -> None:
        """Note that the actor is at its next point."""
        if not self.frames:
            return
        frame = self.frames[-1]
        point, frame.point = frame.point, frame.point + 1
        for step in frame.inner.pop(point, ()):
            self._run(step)
        if point > MOST_POINTS:
            raise Hang

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Interrupt the requests of the block."""
        send, of, sleep, thread = Channel.send, PendingRequest.of, time.sleep, threading.get_ident()
        tokens = count(1)

        def sending(channel: Channel, commands: list[Command]) -> None:
            self.reached()
            send(channel, commands)
            self.reached()

        def asking(request: PendingRequest, ask: Callable[[], object]) -> object:
            self.reached()
            answer = of(request, ask)
            self.reached()
            return answer

        def pause(seconds: float) -> None:
            if threading.get_ident() != thread:
                return sleep(seconds)
            self.reached()
            return self.reached()

        with ExitStack() as stack:
            for target, name, new in (
                (Channel, "send", sending), (PendingRequest, "of", asking), (time, "sleep", pause),
                (secrets, "token_hex", lambda size: f"{next(tokens):0{2 * size}x}"),
                (client_module, "read_run_id", lambda *_: f"run-{self.runs}"),
                (Heartbeat, "start", lambda _: None), (CleanupTimer, "start", lambda _: None),
                (shard_module, "FIRST_LINGER_S", 1e9), (shard_module, "LINGER_S", 1e9),
                (writer_module, "SEAL_CHECK_S", 1e9),
                (shared_module, "OTHERS_S", 0.0), (ordered_module, "BLOCK_MS", 1),
                (unconfirmed_module, "ASK_S", 1e9), (resources_module, "ASK_EVERY_S", 0.0),
                (heartbeat_module, "LONGEST_LOOK_S", 0.0), (presence_module, "UNSEEN_MS", 1e12),
            ):  # fmt: skip
                stack.enter_context(patch.object(target, name, new))
            yield
