import { entriesOf, hashOf, type Server } from "../server/server.js";
import type { PartitionKeys } from "../stream/keys.js";
import { deadNotes, settledBits } from "../stream/ledger.js";
import { begunShards, type Manifest } from "../stream/manifest.js";
import type { IndexRecord } from "../stream/records.js";
import { integer, partitionOf, readable, type Stream } from "../stream/stream.js";
import { type Holder, loadHolders } from "./holders.js";
import type { ShardPlace } from "./progress.js";

// What groups have acknowledged: by their ledgers, and ordered groups by the positions of their ranks.

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
    if (!(await hasAll(server, stream, manifest, name, group, shard, record))) return false;
  }
  return true;
}

async function hasAll(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  name: string,
  group: Holder,
  shard: number,
  { first, end, holes }: IndexRecord,
): Promise<boolean> {
  if (group.isOrdered) {
    const start = startsOf(manifest, shard + 1)[shard];
    return (
      start !== undefined && start + end <= (await lowestPosition(server, stream, manifest.epoch, name, group.world))
    );
  }
  const settled = await settledBits(server, partitionOf(stream, shard), manifest.epoch, name, shard, [first, end]);
  return settled.every((isSettled, at) => isSettled || holes.includes(first + at));
}

/** Return how many samples of an epoch are committed, and not acknowledged by each group. Bad ones count. */
export async function owedSamples(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  groups: ReadonlyMap<string, Holder>,
): Promise<Map<string, number>> {
  const ends = await shardEnds(server, stream, manifest);
  const owed = new Map<string, number>();
  for (const [name, group] of groups) {
    owed.set(name, group.isOrdered ? await behind(server, stream, manifest, name, group, ends) : 0);
    if (group.isOrdered) continue;
    const keys = ends.map((_, shard) => partitionOf(stream, shard).ledger(manifest.epoch, name, shard));
    const counts = await Promise.all(keys.map((key) => server.call("BITCOUNT", key)));
    owed.set(name, sum(ends) - sum(counts.map(Number)));
  }
  return owed;
}

async function behind(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  name: string,
  { world }: Holder,
  ends: readonly number[],
): Promise<number> {
  const lowest = await lowestPosition(server, stream, manifest.epoch, name, world);
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

/** Return the position of each shard's first sample, as far as it is known. */
function startsOf({ sizes, done }: Manifest, shards: number): number[] {
  const starts: number[] = [];
  let at = 0;
  for (let shard = 0; shard < shards; shard += 1) {
    starts.push(at);
    const size = sizes === null ? done.get(shard) : sizes[shard];
    if (size === undefined) break;
    at += size;
  }
  return starts;
}

/** Return the position below which all ranks of an ordered group are done. */
async function lowestPosition(
  server: Server,
  { partitions }: Stream,
  epoch: number,
  group: string,
  world: number,
): Promise<number> {
  const key = (partitions[0] as PartitionKeys).positions(epoch, group);
  const fields = hashOf(await server.call("HGETALL", key));
  return readable(key, () => {
    const floor = integer(fields.get("floor") ?? "0");
    const ranks = Array.from({ length: world }, (_, rank) => fields.get(String(rank)));
    return ranks.length === 0 ? floor : Math.min(...ranks.map((text) => (text === undefined ? floor : integer(text))));
  });
}

function sum(numbers: readonly number[]): number {
  return numbers.reduce((total, one) => total + one, 0);
}
