// The acknowledgements of groups, as a writer reads them: by the ledgers, and of ordered groups by the positions of
// their ranks.

import { entriesOf, type Server } from "../server/client.js";
import { integer, readable } from "../stream/damage.js";
import type { IndexRecord } from "../stream/indexRecords.js";
import { deadNotes, ledgerBits, type Range } from "../stream/ledger.js";
import { begunShards, type Manifest, plannedSamples } from "../stream/manifest.js";
import { HEAD_STEPS, knownPositions, lowestPosition, startsOf } from "../stream/positions.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import type { ShardPlace } from "./commitCommands.js";
import { type Holder, loadHolders } from "./holders.js";

/** Return whether every group that data is held for has acknowledged the samples of a record. */
export async function isAcknowledged(
  server: Server,
  stream: Stream,
  { partition, manifest, shard }: ShardPlace,
  record: IndexRecord,
): Promise<boolean> {
  const { epoch } = manifest;
  const { groups } = await loadHolders(server, partition);
  for (const [name, group] of groups) {
    if (!group.holds || group.first > epoch) continue;
    const note = (await deadNotes(server, partition, epoch, name)).get(record.entryId);
    if (note !== undefined && !note.isGivenUp) continue; // the bits of what an operator gave up are set
    const bits = await acknowledgedBits(server, stream, { manifest, shard }, name, group, [record.first, record.end]);
    if (!covers(bits, record, record.first)) return false;
  }
  return true;
}

/** Return whether the bits, of the offsets from `base` on, are set for all samples of a record. */
export function covers(bits: readonly boolean[], { first, end, holes }: IndexRecord, base: number): boolean {
  for (let offset = first; offset < end; offset += 1) {
    if (!bits[offset - base] && !holes.includes(offset)) return false;
  }
  return true;
}

/**
 * Return for each offset of [lo, hi) of a shard whether the group has acknowledged it.
 *
 * @param mayGo Leave out what an ordered group may still need to fill the last step of a running epoch.
 */
export async function acknowledgedBits(
  server: Server,
  stream: Stream,
  { manifest, shard }: Pick<ShardPlace, "manifest" | "shard">,
  name: string,
  group: Holder,
  [lo, hi]: Range,
  mayGo = false,
): Promise<boolean[]> {
  const { epoch } = manifest;
  if (!group.isOrdered) return await ledgerBits(server, partitionOf(stream, shard), epoch, name, shard, [lo, hi]);
  const lowest = lowestPosition(await knownPositions(server, stream, epoch, name), group.world);
  const isOver = lowest >= (plannedSamples(manifest) ?? Number.POSITIVE_INFINITY);
  const kept = mayGo && !isOver ? HEAD_STEPS * group.world * group.batch : 0;
  const start = startsOf(manifest, shard + 1)[shard] ?? Number.POSITIVE_INFINITY;
  return Array.from({ length: hi - lo }, (_, at) => start + lo + at >= kept && start + lo + at < lowest);
}

/** Return how many samples of an epoch are committed, and not acknowledged by each group. Bad ones count. */
export async function unacknowledgedSamples(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  groups: ReadonlyMap<string, Holder>,
): Promise<Map<string, number>> {
  const ends = await shardEnds(server, stream, manifest);
  const unacknowledged = new Map<string, number>();
  for (const [name, group] of groups) {
    unacknowledged.set(name, group.isOrdered ? await behind(server, stream, manifest, name, group, ends) : 0);
    if (group.isOrdered) continue;
    const keys = ends.map((_, shard) => partitionOf(stream, shard).ledger(manifest.epoch, name, shard));
    const counts = await Promise.all(keys.map((key) => server.call("BITCOUNT", key)));
    unacknowledged.set(name, sum(ends) - sum(counts.map(Number)));
  }
  return unacknowledged;
}

async function behind(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  name: string,
  { world }: Holder,
  ends: readonly number[],
): Promise<number> {
  const lowest = lowestPosition(await knownPositions(server, stream, manifest.epoch, name), world);
  const starts = startsOf(manifest, ends.length);
  return sum(ends.map((end, shard) => end - Math.min(Math.max(lowest - (starts[shard] ?? lowest), 0), end)));
}

/** Return how far each begun shard is committed. */
async function shardEnds(server: Server, stream: Stream, manifest: Manifest): Promise<number[]> {
  const begun = await begunShards(server, stream, manifest);
  const keys = Array.from({ length: begun }, (_, shard) => partitionOf(stream, shard).index(manifest.epoch, shard));
  const newest = await Promise.all(keys.map((key) => server.call("XREVRANGE", key, "+", "-", "COUNT", 1)));
  return newest.map((reply, shard) => {
    const id = entriesOf(reply)[0]?.[0];
    return id === undefined ? 0 : readable(keys[shard] as string, () => integer(String(id).split("-")[0]));
  });
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((total, one) => total + one, 0);
}
