"""Ask questions in a thread of their own, so that the caller does not wait for a server that is away or silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class BackgroundQuery(Generic[Answer]):
    """A question that one thread asks again and again, one at a time.

    It is asked in that thread itself if its server is the one that the thread waits for anyway.
    """

    def __init__(self, *, is_elsewhere: bool) -> None:
        """``is_elsewhere`` is whether another server answers than the one that the thread waits for anyway."""
        self._is_elsewhere = is_elsewhere
        self._thread: threading.Thread | None = None
        self._answers: list[Answer] = []
        self._error: Exception | None = None

    def ask(self, question: Callable[[], Answer], patience_s: float) -> Answer | None:
        """Return the answer, or None if it takes longer than ``patience_s``. Then a later call returns it.

        Raises what the question raised.
        """
        if not self._is_elsewhere:
            return question()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(question,), name="penstock-query", daemon=True)
            self._thread.start()
        self._thread.join(patience_s)
        if self._thread.is_alive():
            return None
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error
        return self._answers.pop()

    def _run(self, question: Callable[[], Answer]) -> None:
        try:
            self._answers.append(question())
        except Exception as error:
            self._error = error
