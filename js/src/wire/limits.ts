// The limits of wire format v1: bytes, samples, holes, tensors, dimensions. Writers refuse what exceeds them, and
// readers treat it as a bad entry.

/** The limits of wire format v1, as docs/wire-format.md lists them. */
export const MAX_HEADER_BYTES = 2 ** 20;
export const MAX_FIELD_BYTES = 512_000_000;
export const MAX_ENTRY_BYTES = 2 ** 30;
export const MAX_SHARD_SAMPLES = 2 ** 20;
export const MAX_NUMBER = Number.MAX_SAFE_INTEGER;
export const MAX_HOLES = 1024;
export const MAX_TENSORS = 256;
export const MAX_NDIM = 31;
/** Objects and lists that a header may nest. */
export const MAX_DEPTH = 32;
