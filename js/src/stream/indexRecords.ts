// Shard indexes: the records of committed blocks, read in pages with repairs applied, and whether a record names an
// entry.

import { entriesOf, type Server, type StreamEntry } from "../server/client.js";
import { MAX_NUMBER } from "../wire/limits.js";
import { integer, readable } from "./damage.js";
import type { PartitionKeys } from "./keys.js";

/** Index records in the first page and in the largest one. */
const FIRST_PAGE = 32;
const PAGE = 1000;
/** Index records in a page of `recordsBehind`, whose reader follows the shard. */
const PAGE_BEHIND = 128;
const ENTRY_ID = /^[0-9]{1,20}-[0-9]{1,20}$/;

/** The index record of a committed block. */
export interface IndexRecord {
  /** The offset after the block's last one. */
  readonly end: number;
  /** Empty if every sample of the block was bad, because nothing was appended. */
  readonly entryId: string;
  readonly first: number;
  /** The samples in the entry. */
  readonly count: number;
  /** The payload bytes. */
  readonly bytes: number;
  readonly holes: readonly number[];
  /** The token of the feed writer that committed it, else empty. */
  readonly writer: string;
}

/** Yield a shard's records by offset, read in pages. A repair's record replaces those that it overrides. */
export async function* indexRecords(
  server: Server,
  partition: PartitionKeys,
  epoch: number,
  shard: number,
): AsyncGenerator<IndexRecord> {
  const repairsKey = partition.repairs(epoch, shard);
  const indexKey = partition.index(epoch, shard);
  const [repairs, first] = (
    await Promise.all([
      server.call("XRANGE", repairsKey, "-", "+"),
      server.call("XRANGE", indexKey, "-", "+", "COUNT", FIRST_PAGE),
    ])
  ).map(entriesOf) as [StreamEntry[], StreamEntry[]];
  const base = basePages(server, indexKey, first);
  if (repairs.length === 0) {
    yield* base;
    return;
  }
  let standing: IndexRecord[] = [];
  for await (const record of base) standing.push(record);
  for (const [, fields] of repairs) {
    const found = indexRecord(Buffer.from("0-0"), fields, repairsKey);
    const repair = { ...found, end: found.first + found.count + found.holes.length };
    standing = standing.filter(({ first, end }) => end <= repair.first || repair.end <= first);
    standing.push(repair);
  }
  yield* standing.sort((a, b) => a.first - b.first);
}

/**
 * Return a page of a shard's records by offset: those that end beyond `after`. Of a repaired shard all of them come.
 */
export async function recordsBehind(
  server: Server,
  partition: PartitionKeys,
  epoch: number,
  shard: number,
  after: number,
): Promise<IndexRecord[]> {
  const key = partition.index(epoch, shard);
  const [repairs, page] = await Promise.all([
    server.call("EXISTS", partition.repairs(epoch, shard)),
    server.call("XRANGE", key, after > 0 ? `(${after}-0` : "-", "+", "COUNT", PAGE_BEHIND),
  ]);
  if (Number(repairs) === 0) return entriesOf(page).map(([id, fields]) => indexRecord(id, fields, key));
  const found: IndexRecord[] = [];
  for await (const record of indexRecords(server, partition, epoch, shard)) if (record.end > after) found.push(record);
  return found;
}

/** Return whether the index record at `end`, or one of the shard's repairs, names an entry. */
export async function isIndexed(
  server: Server,
  partition: PartitionKeys,
  epoch: number,
  shard: number,
  end: number,
  entryId: string,
): Promise<boolean> {
  const found = await Promise.all([
    server.call("XRANGE", partition.index(epoch, shard), `${end}-0`, `${end}-0`),
    server.call("XRANGE", partition.repairs(epoch, shard), "-", "+"),
  ]);
  return found.flatMap(entriesOf).some(([, fields]) => {
    const at = fields.findIndex((name, number) => number % 2 === 0 && String(name) === "e");
    return at >= 0 && String(fields[at + 1]) === entryId;
  });
}

async function* basePages(server: Server, key: string, first: StreamEntry[]): AsyncGenerator<IndexRecord> {
  let page = first;
  for (let size = FIRST_PAGE; ; ) {
    for (const [id, fields] of page) yield indexRecord(id, fields, key);
    if (page.length < size) return;
    size = Math.min(2 * size, PAGE);
    const last = (page.at(-1) as StreamEntry)[0];
    page = entriesOf(await server.call("XRANGE", key, `(${last}`, "+", "COUNT", size));
  }
}

/** Return a record of a shard's index. Raises DamagedKey if no producer wrote it. */
export function indexRecord(id: Buffer, fields: readonly Buffer[], key: string): IndexRecord {
  return readable(`record ${id} of ${key}`, () => {
    const named = new Map<string, string>();
    for (let at = 0; at + 1 < fields.length; at += 2) named.set(String(fields[at]), String(fields[at + 1]));
    const entryId = named.get("e");
    if (entryId === undefined || (entryId !== "" && !ENTRY_ID.test(entryId))) throw new RangeError("e is no id");
    const holes = named.get("h") === "[]" ? [] : JSON.parse(named.get("h") as string);
    if (!Array.isArray(holes) || !holes.every((hole) => Number.isSafeInteger(hole) && Math.abs(hole) <= MAX_NUMBER)) {
      throw new RangeError("h is no list of offsets");
    }
    return {
      end: integer(String(id).split("-")[0]),
      entryId,
      first: integer(named.get("f")),
      count: integer(named.get("n")),
      bytes: integer(named.get("b")),
      holes,
      writer: named.get("w") ?? "",
    };
  });
}
