"""Index records that were read, by position: pure. There may be gaps between them, of what other ranks need."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from penstock_consumer.ordered.canonical import Piece


class Known:
    """Pieces in order of position; no two of them overlap."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """What was known of its positions before gives way: a repair overrides."""
        pieces = self._pieces
        if not pieces or pieces[-1].end <= piece.start:
            pieces.append(piece)
            return
        first = bisect_right(pieces, piece.start, key=_end_of)
        pieces[first : bisect_left(pieces, piece.end, key=_start_of)] = [piece]

    def at(self, position: int) -> Piece | None:
        """The piece that covers a position, if it was read."""
        found = bisect_right(self._pieces, position, key=_end_of)
        if found < len(self._pieces) and self._pieces[found].start <= position:
            return self._pieces[found]
        return None

    def forget(self, below: int) -> None:
        """Pieces that end there are not needed any more."""
        del self._pieces[: bisect_right(self._pieces, below, key=_end_of)]


def _start_of(piece: Piece) -> int:
    return piece.start


def _end_of(piece: Piece) -> int:
    return piece.end
