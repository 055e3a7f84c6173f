"""The limits of wire format v1. Writers refuse what exceeds them; readers treat it as a bad entry.

docs/wire-format.md lists the same numbers, and a test compares the two.
"""

from __future__ import annotations

MAX_HEADER_BYTES = 1 << 20
"""Bytes of the largest ``meta`` field that is parsed."""
MAX_FIELD_BYTES = 512_000_000
"""Redis limits a string to 512 MiB (proto-max-bulk-len); this is a little less."""
MAX_ENTRY_BYTES = 1 << 30
"""Redis closes a connection at a larger command: client-query-buffer-limit is 1 GiB."""
MAX_SHARD_SAMPLES = 1 << 20
"""It bounds the ledger: a SETBIT at offset 2^32 allocates half a gigabyte."""
MAX_NUMBER = (1 << 53) - 1
"""Epoch and shard numbers up to here are exact as JSON numbers in every language."""
MAX_HOLES = 1024
"""Holes of one entry, so that the header stays small: a writer closes a block before it has more."""
MAX_TENSORS = 256
MAX_NDIM = 31
"""numpy 1.26 has 32 dimensions, and a batch needs one."""
MAX_PARTITIONS = 256
"""Partitions of a stream, and of an export."""

INLINE_SAMPLES = 64
"""The header holds the ragged shapes of up to this many samples; a field of their own holds those of more."""
INLINE_SIZES = 16_384
"""Sizes that a writer puts into a header at most, so that the header stays far below its limit."""
