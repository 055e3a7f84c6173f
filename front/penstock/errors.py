"""``penstock.errors``: the errors to catch. Each is a `penstock.PenstockError` and a builtin such as `ValueError`.

docs/troubleshooting.md has a section for each: its text, its causes, and what helps.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NoReturn

from penstock_common.errors import (
    BadEntry,
    BadExport,
    BadOption,
    BadSpec,
    BudgetFull,
    BudgetRefused,
    CheckpointOverdue,
    ChecksumMismatch,
    DamagedKey,
    DurabilityLost,
    EntryNotFound,
    EpochAbandoned,
    EpochFailed,
    EpochIncomplete,
    EpochNotFound,
    EpochsReleased,
    GroupBusy,
    GroupFinished,
    GroupKindMismatch,
    GroupNotFound,
    MemberReplaced,
    MissingExtra,
    OrderNeedsSizes,
    PenstockError,
    ReplayTruncated,
    SampleError,
    SegmentGone,
    SegmentsUnseen,
    ServerUnavailable,
    ServerUnsuitable,
    ShardMismatch,
    SourceError,
    SpecMismatch,
    StateMismatch,
    StreamConflict,
    StreamDeleted,
    StreamNotFound,
    TooLarge,
    TooManyDeadLetters,
    Unauthorized,
    UnsupportedVersion,
    WaitTimeout,
    WritesRefused,
)
from penstock_common.hints import no_such_name

__all__ = [
    "BadEntry",
    "BadExport",
    "BadOption",
    "BadSpec",
    "BudgetFull",
    "BudgetRefused",
    "CheckpointOverdue",
    "ChecksumMismatch",
    "DamagedKey",
    "DurabilityLost",
    "EntryNotFound",
    "EpochAbandoned",
    "EpochFailed",
    "EpochIncomplete",
    "EpochNotFound",
    "EpochsReleased",
    "GroupBusy",
    "GroupFinished",
    "GroupKindMismatch",
    "GroupNotFound",
    "MemberReplaced",
    "MissingExtra",
    "OrderNeedsSizes",
    "PenstockError",
    "ReplayTruncated",
    "SampleError",
    "SegmentGone",
    "SegmentsUnseen",
    "ServerUnavailable",
    "ServerUnsuitable",
    "ShardMismatch",
    "SourceError",
    "SpecMismatch",
    "StateMismatch",
    "StreamConflict",
    "StreamDeleted",
    "StreamNotFound",
    "TooLarge",
    "TooManyDeadLetters",
    "Unauthorized",
    "UnsupportedVersion",
    "WaitTimeout",
    "WritesRefused",
]

if not TYPE_CHECKING:  # with it, a type checker would accept any name

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name, __all__, sys._getframe(1))
