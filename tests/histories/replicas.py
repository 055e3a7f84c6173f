"""Replicas: that of a slot has what the slot had at the last mark, or at the last answer that it has everything.

The server of the histories has a real replica, which answers WAIT. On a cluster each slot would have its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from penstock_common.server.channel import Command, Reply
from penstock_common.stream.groups import outbox
from penstock_common.stream.servers import durability
from penstock_common.stream.servers.confirmed import Confirmer, Question, StreamPart
from penstock_common.stream.servers.durability import Durability
from penstock_common.stream.streams import Stream
from penstock_producer.write.commit import Committer
from tests.histories.step import SLOTS

_COMMITTED, _MAKE, _LACKING = Committer._note_safety, Question.__init__, Question.lacking
_UNSAFE, _IS_CONFIRMED = durability._lacking, outbox.is_confirmed


class Answers:
    """Reports to ``note`` the slots for which an answer just said that replicas have everything."""

    def __init__(self, note: Callable[[Iterable[str]], None]) -> None:
        self._note = note
        self._asked: dict[Question, set[str]] = {}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Follow every answer to WAIT in the block. The slots count as those of several servers."""
        with ExitStack() as stack:
            for target, name, new in (
                (Committer, "_note_safety", lambda *given: self._of_block(*given)),
                (Question, "__init__", lambda *given: self._make(*given)),
                (Question, "lacking", lambda question: self._of_fact(question)),
                (durability, "_lacking", self._of_all), (outbox, "is_confirmed", self._of_probe),
                (Confirmer, "are_apart", lambda _, *parts: len(_slots_of(parts)) > 1),
            ):  # fmt: skip
                stack.enter_context(patch.object(target, name, new))
            yield

    def _of_block(self, committer: Committer, level: Durability, end: int, safety: Sequence[Reply]) -> str:
        found = _COMMITTED(committer, level, end, safety)
        if safety and not found:
            self._note([f"p{committer._target.partition.number}"])
        return found

    def _make(self, question: Question, confirmer: Confirmer, parts: Sequence[StreamPart]) -> None:
        _MAKE(question, confirmer, parts)
        self._asked[question] = _slots_of(parts)

    def _of_fact(self, question: Question) -> dict[str, str]:
        found = _LACKING(question)
        if question._parts and not found:
            self._note(self._asked[question])
        return found

    def _of_all(self, *asked: Any) -> dict[str, str]:
        found = _UNSAFE(*asked)
        if not found:
            self._note(SLOTS)
        return found

    def _of_probe(self, wait: Command, reply: Reply) -> bool:
        if is_there := _IS_CONFIRMED(wait, reply):
            self._note(SLOTS)
        return is_there


def _slots_of(parts: Sequence[StreamPart]) -> set[str]:
    return {"s" if isinstance(part, Stream) else f"p{part.number}" for part in parts}
