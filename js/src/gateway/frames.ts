// The binary message that brings a batch from a gateway (`PSB1`): its entries, decoded and copied into one batch.
// docs/gateway-messages.md defines it.

import { BatchBuilder } from "../batch.js";
import { BadEntry } from "../errors.js";
import { decode, type Fields, offsetsOf } from "../wire/codec.js";
import { META, type Spec } from "../wire/spec.js";

const MAGIC = 0x31425350; // PSB1
const ALIGN = 8;
const UTF8 = new TextDecoder();

/** Return the number and the samples of a batch, from the bytes of one message. Raises BadEntry. */
export function readBatch(message: ArrayBuffer, spec: Spec, checksum: boolean) {
  const blocks = entriesOf(message).map((fields) => decode(fields, spec, { checksum }));
  const [first] = blocks;
  if (first === undefined) throw new BadEntry("a batch without entries");
  const size = blocks.reduce((sum, { header }) => sum + header.count, 0);
  const builder = new BatchBuilder(spec, first.header.epoch, size);
  for (const { header, columns } of blocks) {
    builder.add(columns, header.shard, offsetsOf(header), 0, header.count);
  }
  return { number: new DataView(message).getUint32(4, true), batch: builder.build() };
}

/** Return the fields of each entry. Values are views of the message. */
function entriesOf(message: ArrayBuffer): Fields[] {
  const view = new DataView(message);
  if (message.byteLength < ALIGN || view.getUint32(0, true) !== MAGIC) throw new BadEntry("this is no batch");
  const entries: [string, Uint8Array][][] = [];
  for (let at = ALIGN; at < message.byteLength; ) {
    if (message.byteLength - at < ALIGN) throw new BadEntry("a batch is cut short");
    const [nameBytes, valueBytes] = [view.getUint32(at, true), view.getUint32(at + 4, true)];
    const valueAt = at + ALIGN + aligned(nameBytes);
    if (valueAt + aligned(valueBytes) > message.byteLength) throw new BadEntry("a batch is cut short");
    const name = UTF8.decode(new Uint8Array(message, at + ALIGN, nameBytes));
    if (name === META) entries.push([]);
    entries.at(-1)?.push([name, new Uint8Array(message, valueAt, valueBytes)]);
    at = valueAt + aligned(valueBytes);
  }
  return entries;
}

function aligned(bytes: number): number {
  return Math.ceil(bytes / ALIGN) * ALIGN;
}
