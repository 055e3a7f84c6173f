// The ledger: the arguments of an acknowledgement, which samples a group is done with, and the notes of dead letters.

import { type Argument, bytesOf, hashOf, type Server } from "../server/client.js";
import { indexRecords } from "./indexRecords.js";
import type { PartitionKeys } from "./keys.js";
import { begunShards, liveState, type Manifest, shardCount, shardSize } from "./manifest.js";
import { partitionOf, type Stream } from "./stream.js";

const SHARDS_AT_ONCE = 1024;
const NOTE = /^([0-9]{1,10}:)?[0-9]{1,18}-[0-9]{1,18}$/;

/** Offsets [lo, hi) of one shard. */
export type Range = readonly [lo: number, hi: number];

/** Return rising ranges, with neighbours as one. */
export function mergeRanges(ranges: readonly Range[]): Range[] {
  const merged: [number, number][] = [];
  for (const [lo, hi] of [...ranges].sort(([a], [b]) => a - b)) {
    const last = merged.at(-1);
    if (last !== undefined && lo <= last[1]) last[1] = Math.max(last[1], hi);
    else merged.push([lo, hi]);
  }
  return merged;
}

/** Return keys and arguments of the acknowledging script, which may run twice. */
export function acknowledgement(
  partition: PartitionKeys,
  manifest: Manifest,
  group: string,
  ids: readonly string[],
  ranges: ReadonlyMap<number, readonly Range[]>,
): [string[], Argument[]] {
  const { epoch } = manifest;
  const keys = [partition.state(epoch), partition.entries(epoch)];
  const args: Argument[] = [liveState(manifest), group, ids.length, ...ids];
  for (const [shard, spans] of ranges) {
    keys.push(partition.ledger(epoch, group, shard));
    args.push(spans.length, ...spans.flat());
  }
  return [keys, args];
}

/** Make an entry a dead letter of the group: it is acknowledged, and its id is kept with the reason. */
export async function bury(
  server: Server,
  partition: PartitionKeys,
  manifest: Manifest,
  group: string,
  entryId: string,
  reason: string,
): Promise<void> {
  const { epoch } = manifest;
  const keys = [partition.state(epoch), partition.entries(epoch), partition.dead(epoch, group)];
  await server.run("dead_letter", keys, [liveState(manifest), group, entryId, reason]);
}

/** Return for each offset of [lo, hi) whether the group has acknowledged it. */
export async function ledgerBits(
  server: Server,
  partition: PartitionKeys,
  epoch: number,
  group: string,
  shard: number,
  [lo, hi]: Range,
): Promise<boolean[]> {
  const key = partition.ledger(epoch, group, shard);
  const first = Math.floor(lo / 8);
  const bytes = bytesOf(await server.call("GETRANGE", key, first, Math.floor(Math.max(hi - 1, 0) / 8)));
  return Array.from({ length: hi - lo }, (_, at) => {
    const offset = lo + at;
    return (((bytes[Math.floor(offset / 8) - first] ?? 0) >> (7 - (offset % 8))) & 1) === 1;
  });
}

/** A note on an entry that a group could not read, or on samples that an operator gave up. */
export interface DeadNote {
  readonly isGivenUp: boolean;
  /** The shard of what was given up, or -1. */
  readonly shard: number;
  readonly first: number;
  readonly end: number;
}

/** Return the notes by entry id or, for ranges without an entry, by `shard:first-end`. */
export async function deadNotes(
  server: Server,
  partition: PartitionKeys,
  epoch: number,
  group: string,
): Promise<Map<string, DeadNote>> {
  const found = new Map<string, DeadNote>();
  for (const [name, text] of hashOf(await server.call("HGETALL", partition.dead(epoch, group)))) {
    const note = noteOf(text);
    if (NOTE.test(name) && (!name.includes(":") || note.isGivenUp)) found.set(name, note);
  }
  return found;
}

function noteOf(text: string): DeadNote {
  try {
    const { why, given_up, shard = -1, first = 0, end = 0 } = JSON.parse(text);
    if (why === undefined) throw new RangeError("it says no reason");
    return { isGivenUp: Boolean(given_up), shard: Number(shard), first: Number(first), end: Number(end) };
  } catch {
    return { isGivenUp: false, shard: -1, first: 0, end: 0 }; // it may be damaged, or of another version
  }
}

/** A part of a shard. */
export interface ShardRange {
  readonly shard: number;
  readonly lo: number;
  readonly hi: number;
}

/** Return what of an epoch a shared group has neither acknowledged nor given up, without holes. */
export async function uncovered(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  group: string,
): Promise<ShardRange[]> {
  const { epoch } = manifest;
  const missing: ShardRange[] = [];
  const begun = await begunShards(server, stream, manifest);
  const dead = await Promise.all(stream.partitions.map((partition) => deadNotes(server, partition, epoch, group)));
  for (let at = 0; at < shardCount(manifest); at += SHARDS_AT_ONCE) {
    const shards = Array.from({ length: Math.min(SHARDS_AT_ONCE, shardCount(manifest) - at) }, (_, i) => at + i);
    const counts = await Promise.all(
      shards.map((shard) => server.call("BITCOUNT", partitionOf(stream, shard).ledger(epoch, group, shard))),
    );
    for (const [place, shard] of shards.entries()) {
      const size = shardSize(manifest, shard);
      if (Number(counts[place]) === size) continue; // bits lie inside the manifest
      if (shard >= begun) missing.push({ shard, lo: 0, hi: size });
      else missing.push(...(await uncoveredOf(server, stream, manifest, group, shard, dead)));
    }
  }
  return missing;
}

async function uncoveredOf(
  server: Server,
  stream: Stream,
  manifest: Manifest,
  group: string,
  shard: number,
  dead: readonly ReadonlyMap<string, DeadNote>[],
): Promise<ShardRange[]> {
  const partition = partitionOf(stream, shard);
  const size = shardSize(manifest, shard);
  const acknowledged = await ledgerBits(server, partition, manifest.epoch, group, shard, [0, size]);
  for await (const { holes, entryId, first, end } of indexRecords(server, partition, manifest.epoch, shard)) {
    for (const hole of holes) acknowledged[hole] = true;
    const note = dead[partition.number]?.get(entryId);
    if (note !== undefined && !note.isGivenUp) acknowledged.fill(true, first, Math.min(end, size));
  }
  const found: ShardRange[] = [];
  for (let lo = acknowledged.indexOf(false); lo >= 0; ) {
    const end = acknowledged.indexOf(true, lo);
    const hi = end < 0 ? size : end;
    found.push({ shard, lo, hi });
    lo = end < 0 ? -1 : acknowledged.indexOf(false, hi);
  }
  return found;
}
