"""Every error a user of Penstock can meet, one class per cause.

An error says what was found, what was expected and what to do. Its fields carry the same facts for programs.
Foreign exceptions (redis, sockets) are translated into these in ``server/error_translation.py``.
"""

from __future__ import annotations

from typing import Self

from penstock_common.printable import printable


class PenstockError(Exception):
    """Base of all errors raised on purpose; the command prints its text as one line and exits with 1."""

    def __str__(self) -> str:
        """Return the text as one line. It may quote names and words of a server, which must not control a terminal."""
        return printable(super().__str__().replace("\n", " "))


class MissingExtra(PenstockError, ModuleNotFoundError):
    """An optional package is not installed; the text names the extra of penstock that installs it."""


# --- data -------------------------------------------------------------------------------------------------------------


class SpecMismatch(PenstockError, ValueError):
    """A sample or an entry does not fit the stream's spec."""

    def __init__(self, tensor: str, found: str, expected: str, hint: str = "") -> None:
        self.tensor, self.found, self.expected = tensor, found, expected
        text = f"tensor {tensor!r}: found {found}, expected {expected}"
        super().__init__(f"{text}; {hint}" if hint else text)


class BadSpec(PenstockError, ValueError):
    """A spec itself is malformed: an unknown dtype, a reserved name, a negative dimension."""


class BadEntry(PenstockError, ValueError):
    """Bytes read from a stream are not a valid entry; the entry is dead-lettered and never yielded."""


class UnsupportedVersion(BadEntry):
    """An entry was written by a newer wire format than this reader knows."""


class ChecksumMismatch(BadEntry):
    """The payload's xxh3 differs from the one in its header."""


class UncommittedEntry(BadEntry):
    """An entry is in a stream, but no index record names it: no commit wrote it, or its record was lost."""


class BadSegment(PenstockError, ValueError):
    """A file is not a segment, or is a damaged one."""


class BadExport(PenstockError, ValueError):
    """A folder is not a complete, undamaged export, or cannot become one."""


class SegmentGone(BadEntry):
    """The segment file of an entry's payload is missing, is too short, or has been used again since."""


class SegmentsUnseen(PenstockError, RuntimeError):
    """A stream keeps its payloads in a folder that this process cannot see, or may not use."""


class TooLarge(PenstockError, ValueError):
    """A sample, block or step is larger than a limit (512 MB a field, 1 GiB an entry, a quarter of the budget)."""


class BadOption(PenstockError, ValueError):
    """An option has none of the forms it may have, such as a durability, a retention policy or a payload setting."""


class SourceError(PenstockError, ValueError):
    """A source cannot be opened: an empty folder, no images in it, labels that name no file, an unknown import name."""


class SampleError(PenstockError, ValueError):
    """One sample of a source cannot be made (truncated image, failing transform); it is quarantined by name."""


# --- streams, epochs, groups ------------------------------------------------------------------------------------------


class StreamNotFound(PenstockError, LookupError):
    """No stream of that name exists on the server."""


class StreamDeleted(StreamNotFound):
    """The stream was deleted, or is being deleted, while this process used it: readers and writers stop."""


class DamagedKey(PenstockError, ValueError):
    """A key of the stream holds a value that Penstock did not write."""


class StreamConflict(PenstockError, ValueError):
    """A stream exists with other settings (partitions, id) than the caller asked for or remembers."""


class EpochNotFound(PenstockError, LookupError):
    """The epoch does not exist, or is no longer retained."""


class EpochAbandoned(PenstockError, RuntimeError):
    """The epoch was abandoned (by a command or a failed producer): it takes no more samples."""


class EpochFailed(PenstockError, RuntimeError):
    """A production cannot complete an epoch, and abandons it. The text names the shard and the reason."""


class EpochIncomplete(PenstockError, RuntimeError):
    """A produced epoch has identities that were neither delivered nor recorded as bad: ``missing`` names the ranges."""

    def __init__(self, message: str, missing: list[tuple[int, int, int]] | None = None) -> None:
        self.missing = missing or []
        """(shard, first offset, end offset) of each missing range."""
        super().__init__(message)


class EpochsReleased(PenstockError, RuntimeError):
    """A group that had stopped holding data returns after epochs that it had not read were released."""


class ReplayTruncated(PenstockError, RuntimeError):
    """A replay meets an entry that retention already removed: an error, never a gap."""


class ShardMismatch(PenstockError, ValueError):
    """A shard got more, fewer or other offsets than its manifest plans, or its server lost some of them."""

    def __init__(self, message: str, lost: tuple[int, int] | None = None) -> None:
        self.lost = lost
        """The offsets [first, end) that the server had confirmed and lost, or None if it lost none."""
        super().__init__(message)


class EntryNotFound(PenstockError, LookupError):
    """The named entry does not exist, or is no dead letter, or was not given to the group."""


class TooManyDeadLetters(PenstockError, RuntimeError):
    """The first entries of an epoch cannot be read. Continuing would probably make dead letters of all its entries."""


class GroupNotFound(PenstockError, LookupError):
    """No group of that name is on the stream's roster."""


class GroupFinished(PenstockError, RuntimeError):
    """The group has read every epoch the stream will have, or begins behind the last one."""


class GroupBusy(PenstockError, RuntimeError):
    """The group has live members, so it cannot be reset or dropped now."""


class GroupKindMismatch(PenstockError, ValueError):
    """A group was made for another way of reading: shared or ordered, or with another batch size."""


class OrderNeedsSizes(PenstockError, RuntimeError):
    """Canonical order is not known yet: the epoch has no sizes, and more than one shard is being written."""


class CheckpointOverdue(PenstockError, RuntimeError):
    """A training job waits for itself: writers wait for space that its own unacknowledged batches take."""

    def __init__(self, message: str, batches: int, samples: int, nbytes: int, budget_bytes: int) -> None:
        self.batches, self.samples, self.nbytes, self.budget_bytes = batches, samples, nbytes, budget_bytes
        """The batches that were yielded and are not acknowledged. Bytes are payload bytes."""
        super().__init__(message)


class StateMismatch(PenstockError, ValueError):
    """A loader's saved state is of another stream, spec, group, way of reading, batch size or number of workers, or it
    is newer than the server.
    """

    def __init__(self, what: str, found: object, expected: object, hint: str) -> None:
        self.what, self.found, self.expected = what, found, expected
        super().__init__(f"this state has {what} {found!r}, the loader {expected!r}: {hint}")


class MemberReplaced(PenstockError, RuntimeError):
    """Another process took this member's name; this one must stop."""


class WaitTimeout(PenstockError, TimeoutError):
    """A wait ended after its timeout; the text says what was waited for and what to do."""


# --- server -----------------------------------------------------------------------------------------------------------


class ServerUnavailable(PenstockError, ConnectionError):
    """The server cannot be reached, or the connection broke and did not come back in time."""

    borne_s: float = 0.0
    """The seconds for which the request was repeated without success before this was raised."""

    what = ""
    """The name of what the server has, or '' if that is everything."""

    def __init__(self, *args: object, is_said: bool = False) -> None:
        super().__init__(*args)
        self.is_said = is_said
        """Whether the server itself reported the error, on a connection that did not break."""

    def borne(self, seconds: float) -> Self:
        """Return this error as one that was raised after the request had been repeated.

        Args:
            seconds: how long the request was repeated without success.
        """
        self.borne_s = seconds
        return self

    def of(self, what: str) -> Self:
        """Return this error with a text that begins with what the server has.

        Args:
            what: What the server has. '' leaves the text as it is.
        """
        self.what = what
        return self

    def __str__(self) -> str:
        text = super().__str__()
        return f"{self.what}: {text}" if self.what else text


class ServerLoading(ServerUnavailable):
    """The server is reading its data from disk. Clients wait for as long as it reports that."""


class ServerUnsuitable(PenstockError, RuntimeError):
    """The server's settings cannot keep the guarantees (eviction policy, version, missing executable)."""


class WritesRefused(ServerUnavailable, ServerUnsuitable):
    """The server answers, but takes no writes now: a read-only replica, above its maxmemory, a full disk."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args, is_said=True)


class DurabilityLost(PenstockError, TimeoutError):
    """A job had to stop before a write was as safe as its durability level promises."""


class BudgetRefused(PenstockError, ValueError):
    """The byte budgets of the streams do not fit under the server's maxmemory."""


class BudgetFull(PenstockError, TimeoutError):
    """A writer waited for quota longer than it may. What it committed stays."""


class Unauthorized(PenstockError, PermissionError):
    """The server refused the user, the password or a command."""
