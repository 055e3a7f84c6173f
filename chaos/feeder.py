"""A plain Writer that fills the endless feed, and journals which samples it wrote and which are committed.

Start it with ``python -m chaos.feeder URL FIRST JOURNAL``. SIGTERM makes it close the feed.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType

from chaos.journal import Journal
from chaos.options import FEED, Options, from_environment
from chaos.payload import feed_nonce, sample
from chaos.process import prepare
from penstock import PenstockError, Writer

FLUSH_EVERY = 40
LARGE_FLUSH_EVERY = 4
BYTES_PER_S = 8 << 20
MOST_PER_S = 250


class Feeder:
    """A writer of numbered samples that continues until it is asked to stop."""

    def __init__(self, writer: Writer, journal: Journal, options: Options, first: int) -> None:
        self._writer, self._journal, self._options, self._number = writer, journal, options, first
        self._is_stopping = self._has_begun = False
        signal.signal(signal.SIGTERM, self._stop)

    def run(self) -> None:
        """Write the feed; journal each stretch before it is written and when it is committed."""
        stretch = LARGE_FLUSH_EVERY if self._options.is_large else FLUSH_EVERY
        per_s = min(MOST_PER_S, BYTES_PER_S / self._options.sample_bytes)
        while not self._is_stopping:
            end = self._number + stretch
            self._journal.note("W", end)
            while self._number < end:
                nonce = feed_nonce(self._options.seed, self._number)
                self._writer.write(sample(self._options.seed, self._number, nonce, self._options.sample_bytes))
                self._number += 1
            self._writer.flush()
            if not self._has_begun:
                self._has_begun = True
                self._journal.note("B")  # from now on the writer keeps what a replica that follows now has not got
            self._journal.note("C", end)
            time.sleep(stretch / per_s)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        self._is_stopping = True


def main(first: str, path: str) -> int:
    """Return 0 after closing the feed, 3 after an error of Penstock."""
    prepare()
    options, journal = from_environment(), Journal(Path(path))
    try:
        with Writer(FEED) as writer:
            Feeder(writer, journal, options, int(first)).run()
        journal.note("L")
    except PenstockError as error:
        journal.note("E", type(error).__name__, error)
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
