// The check of a shard before it is declared complete: its index holds what its writers committed, and no more.

import { BadEntry } from "../errors.js";
import { bytesOf, type Server, textOf } from "../server/client.js";
import { readable } from "../stream/damage.js";
import { type IndexRecord, indexRecord } from "../stream/indexRecords.js";
import type { Stream } from "../stream/stream.js";
import { parseHeader } from "../wire/header.js";
import { MAX_HEADER_BYTES } from "../wire/limits.js";
import { isAcknowledged } from "./acknowledged.js";
import type { ShardPlace } from "./commitCommands.js";

/** Records in the first page, which is all that most shards have. */
const FIRST_PAGE = 64;
const PAGE = 1000;
/** The payload that the server reads in one call. */
const PAGE_BYTES = 4 * 2 ** 20;

/** Return all records of a shard's index, without repairs. Raises DamagedKey. */
export async function readIndex(server: Server, { partition, manifest, shard }: ShardPlace): Promise<IndexRecord[]> {
  const key = partition.index(manifest.epoch, shard);
  const records: IndexRecord[] = [];
  for (let count = FIRST_PAGE; ; count = PAGE) {
    const last = records.at(-1);
    const reply = await server.run("read_index", [key], [last === undefined ? "-" : `(${last.end}-0`, count]);
    const page = readable(key, () => {
      const found = JSON.parse(bytesOf(reply).toString("latin1"));
      return Array.isArray(found) ? found : []; // cjson writes {} for an empty list
    }) as [string, string[]][];
    for (const [id, fields] of page) {
      const parts = fields.map((part) => Buffer.from(part, "latin1"));
      records.push(indexRecord(Buffer.from(id), parts, key));
    }
    if (page.length < count) return records;
  }
}

/** Say what is wrong with the records of a shard that its writer committed up to `end`. Empty where nothing is. */
export function firstFault(records: readonly IndexRecord[], end: number, token: string): string {
  let at = 0;
  for (const record of records) {
    const name = `the record ${record.end}-0`;
    if (record.writer !== token) return `${name} is another writer's`;
    const counted = record.first + record.count + record.holes.length;
    const isInside = record.holes.every((hole) => record.first <= hole && hole < record.end);
    const isWhole = record.first === at && counted === record.end && (record.entryId !== "") === record.count > 0;
    if (!isWhole || !isInside) return `${name} does not follow the offset ${at}`;
    at = record.end;
  }
  return at === end ? "" : `it ends at the offset ${at}, and this writer at ${end}`;
}

/** Return the first record whose entry is not there or is another's, or null. One that retention removed is neither. */
export async function findForged(
  server: Server,
  stream: Stream,
  place: ShardPlace,
  records: readonly IndexRecord[],
): Promise<IndexRecord | null> {
  const { partition, manifest } = place;
  const named = records.filter(({ entryId }) => entryId !== "");
  const some = Math.max(1, Math.min(PAGE, Math.floor(PAGE_BYTES / Math.max(1, stream.blockBytes))));
  for (let begin = 0; begin < named.length; begin += some) {
    const page = named.slice(begin, begin + some);
    const args = [MAX_HEADER_BYTES, ...page.map(({ entryId }) => entryId)];
    const headers = (await server.run("read_headers", [partition.entries(manifest.epoch)], args)) as unknown[];
    for (const [at, record] of page.entries()) {
      const meta = bytesOf(headers[at]);
      if (meta.length > 0 ? isOf(meta, stream, place, record) : await isTrimmed(server, stream, place, record))
        continue;
      return record;
    }
  }
  return null;
}

/** Return whether an entry's header agrees with its record. */
function isOf(meta: Buffer, stream: Stream, { manifest, shard }: ShardPlace, record: IndexRecord): boolean {
  try {
    const header = parseHeader(meta, stream.spec ?? [], { takesRefs: true });
    const said = [header.stream, header.epoch, header.shard, header.first, header.end, header.holes.join()];
    const known = [stream.id, manifest.epoch, shard, record.first, record.end, record.holes.join()];
    return said.every((one, place) => one === known[place]);
  } catch (error) {
    if (error instanceof BadEntry) return false;
    throw error;
  }
}

/** Return whether retention may have removed the entry: the epoch is marked, and every group has acknowledged it. */
async function isTrimmed(server: Server, stream: Stream, place: ShardPlace, record: IndexRecord): Promise<boolean> {
  const { partition, manifest } = place;
  const mark = await server.call("HGET", partition.roster, `t:${manifest.epoch}`);
  return textOf(mark) !== null && (await isAcknowledged(server, stream, place, record));
}
