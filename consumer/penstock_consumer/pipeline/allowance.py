"""How much of the prefetch budget is used: little at first, more where the trainer runs dry, less where it never does.

Pure but for what it remembers; ``prefetch`` tells it what happens and holds the lock.
"""

from __future__ import annotations

START_BYTES = 8 << 20
"""Four requests of shared reading; a trainer that never waits needs no more. Smaller budgets are used whole."""
PATIENCE = 16
"""So many times the allowance was handed out with half of it always left: then half is enough."""


class Allowance:
    """Bytes that may wait for one trainer now, between `START_BYTES` and the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.nbytes = self._least = min(budget_bytes, START_BYTES)
        self._patience = PATIENCE
        self._was_full, self._taken = False, 0
        self._lowest: int | None = None

    def refused(self) -> None:
        """The reader could have read more and was not let."""
        self._was_full = True

    def starved(self) -> None:
        """The trainer found nothing: with more room, more would have been there, if it was ever full since."""
        if not self._was_full:
            return
        if self.nbytes < self.budget_bytes:
            self.nbytes = min(2 * self.nbytes, self.budget_bytes)
            self._patience *= 2  # were it halved as soon again, the trainer would starve as often
        self._forget()

    def took(self, nbytes: int, left_bytes: int) -> bool:
        """The trainer took a batch, so many bytes are left; whether half the allowance will do from now on."""
        self._taken += nbytes
        self._lowest = left_bytes if self._lowest is None else min(self._lowest, left_bytes)
        if self.nbytes == self._least or self._taken < self._patience * self.nbytes:
            return False
        is_enough = self._lowest > self.nbytes // 2
        self._forget()
        if is_enough:
            self.nbytes = max(self.nbytes // 2, self._least)
        return is_enough

    def _forget(self) -> None:
        """What was seen under another allowance says nothing about this one."""
        self._was_full, self._taken, self._lowest = False, 0, None
