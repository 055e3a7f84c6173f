// Decodes an entry whose payload is in its fields or, if the header has a `ref`, in a segment.

import { type Block, decode } from "../wire/codec.js";
import { parseHeader } from "../wire/header.js";
import type { Spec } from "../wire/spec.js";
import type { SegmentReader } from "./reader.js";

/** Decode an entry with the payload that its header refers to. Raises BadEntry, SegmentGone. */
export async function decodeWhole(
  fields: readonly [string, Uint8Array][],
  spec: Spec,
  segments: SegmentReader | null,
  checksum: boolean,
): Promise<Block> {
  if (segments === null || fields.length !== 1) return decode(fields, spec, { checksum });
  const { ref, fields: named } = parseHeader((fields[0] as [string, Uint8Array])[1], spec, { takesRefs: true });
  if (ref === null) return decode(fields, spec, { checksum });
  const values = await segments.read(ref);
  const payload = named.map(({ name }, at) => [name, values[at] as Uint8Array] as const);
  return decode([...fields, ...payload], spec, { checksum, takesRefs: true });
}
