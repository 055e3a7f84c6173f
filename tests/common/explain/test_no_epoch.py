"""The reason why a group has no epoch to read: each state of a stream has its own sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock_common.explain.sentences import explain_unacknowledged, why_no_epoch
from penstock_common.stream.groups.roster import GroupRecord, Roster

GROUP = GroupRecord(first=0, declared=False, holds=True, seen_ms=0, read=-1, lost=None)


def why(
    roster: Roster, *, first: int = 0, begun: int = 0, given: tuple[int, ...] = (), half_open: int | None = None
) -> str:
    """Return the sentence for group g of stream t."""
    return why_no_epoch("t", "g", roster, first=first, begun=begun, given=given, half_open=half_open)


def test_what_was_released_closed_or_given_counts_as_read() -> None:
    """An operator compares these numbers with the epochs of the stream."""
    roster = Roster("1", groups={"g": replace(GROUP, read=2)}, closed=frozenset({("g", 3), ("other", 9)}))
    assert why(roster, begun=6, given=(5,)).startswith("group 'g' has read epochs 0-3,5 of 't'; there is no other: ")
    assert why(Roster("1"), begun=1, given=(0,)).startswith("group 'g' has read epoch 0 of 't'; ")


@pytest.mark.parametrize(
    ("first", "begun", "sentence"),
    [
        (0, 0, "stream 't' has no epoch yet for group 'g': `penstock produce` makes one"),
        (0, 1, "stream 't' has no other epoch for group 'g': `penstock produce` makes one"),
        (
            4,
            2,
            "group 'g' is to begin with epoch 4 of 't', of which 2 were begun (0 is the first): it is not there yet",
        ),
        (2, 2, "group 'g' came after epoch 1 of 't', which is not whole any more, and begins with epoch 2: it is not"),
        (1, 3, "stream 't' has no other epoch for group 'g': `penstock produce` makes one"),
    ],
)
def test_a_group_that_has_read_nothing_is_told_what_it_waits_for(first: int, begun: int, sentence: str) -> None:
    """A late group waits for another epoch than a group of an empty stream."""
    said = why(Roster("1"), first=first, begun=begun)
    assert said.startswith(sentence)
    assert first < max(begun, 1) or said.endswith(": it is not there yet; `penstock produce` makes epoch 2 next")


@pytest.mark.parametrize(("trimmed", "reason"), [((), "is to begin with epoch 2"), ((1,), "came after epoch 1 of 't'")])
def test_an_epoch_is_said_to_have_gaps_only_if_it_has(trimmed: tuple[int, ...], reason: str) -> None:
    """`Loader(start=2)` may name the next epoch, and a user who reads of a gap looks for a loss."""
    roster = Roster("1", epochs={0: "a", 1: "b"}, trimmed=frozenset(trimmed))
    assert why(roster, first=2, begun=2).startswith(f"group 'g' {reason}")


def test_blocks_of_other_members_are_named_by_size() -> None:
    """A member that reads alone has no other to wait for."""
    assert explain_unacknowledged({}) == ""
    held = {"a": 1, "b": 20, "c": 3, "d": 2, "e": 1}
    assert ": 20 by member 'b', 3 by member 'c', 2 by member 'd', 1 by member 'a' and 1 more. A new loader" in (
        explain_unacknowledged(held)
    )


def test_an_epoch_that_is_being_opened_is_named_first() -> None:
    """If its producer died, only an operator can end the wait, and the sentence holds the command."""
    sentence = (
        "epoch 7 of 't' is being opened by a producer; `penstock epochs abandon t 7` if that died, `penstock trim t` "
        "if a server did"
    )
    assert why(Roster("1"), begun=8, given=(6,), half_open=7) == sentence
