"""The ``payload`` setting of a stream: payloads in the entries themselves, or in segments under a folder."""

from __future__ import annotations

from pathlib import Path

from penstock_common.errors import BadOption
from penstock_common.segments.folder import SegmentFolder

INLINE = "inline"
SEGMENTS = "segments:"


def parse_payload(text: str) -> Path | None:
    """Return the folder of a ``payload`` setting, or None for ``inline``. Raises BadOption."""
    if text == INLINE:
        return None
    folder = Path(text.removeprefix(SEGMENTS)).expanduser()
    if not text.startswith(SEGMENTS) or not folder.is_absolute() or "\n" in text:
        raise BadOption(
            f"payload is {text!r}, expected 'inline' or 'segments:' and an absolute folder, such as "
            "segments:/dev/shm/penstock"
        )
    return folder


def folder_of(payload: str, stream: str, stream_id: str, seen_at: Path | None = None) -> SegmentFolder | None:
    """Return a stream's folder of segments, or None for inline payloads.

    ``seen_at`` is its mount point on this host.
    """
    root = parse_payload(payload)
    return None if root is None else SegmentFolder(seen_at or root, stream, stream_id)
