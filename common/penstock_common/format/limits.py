"""Every bound of wire format v1, once. What lies beyond is refused by writers and is a bad entry to readers.

docs/wire-format.md lists the same numbers; a test compares the two.
"""

from __future__ import annotations

MAX_HEADER_BYTES = 1 << 20
"""The largest ``meta`` field that is parsed at all."""
MAX_FIELD_BYTES = 512_000_000
"""Redis' own limit is 512 MiB a string (proto-max-bulk-len); a little below leaves room for nothing to go wrong."""
MAX_ENTRY_BYTES = 1 << 30
"""client-query-buffer-limit is 1 GiB: a larger command closes the connection."""
MAX_SHARD_SAMPLES = 1 << 20
"""Bounds the ledger: SETBIT at 2^32 allocates half a gigabyte."""
MAX_NUMBER = (1 << 53) - 1
"""Epochs and shards stay exact in every language's JSON numbers."""
MAX_HOLES = 1024
"""Dropped samples one entry may carry: bounds the header; a block is closed before it has more."""
MAX_TENSORS = 256
MAX_NDIM = 31
"""numpy 1.26 has 32 dimensions, and a batch needs one of them."""

INLINE_SAMPLES = 64
"""Ragged shapes of up to this many samples travel in the header; those of more in a field of their own."""
INLINE_SIZES = 16_384
"""And no more than this many sizes in all, so that a header stays far below its limit. Writers' rule only."""
