// Chooses the hash tags of partitions, such that each server gets as many as every other, and the default number of
// partitions. Python chooses the same.

import type { SlotRange } from "../server/slotMap.js";
import { SLOTS, slotOf } from "../server/slots.js";

/** The partitions of a new stream for each of several servers. */
const PARTITIONS_EACH = 4;
/** The least budget of a partition that is not asked for. */
const LEAST_EACH_BYTES = 16 * 2 ** 20;
/** The most partitions that are not asked for. */
const MOST = 256;
const GOLDEN = (Math.sqrt(5) - 1) / 2;

/** Return the number of partitions of a stream that names none: one for one server. */
export function usualPartitions(servers: number, budgetBytes: number): number {
  if (servers < 2) return 1;
  return Math.max(1, Math.min(MOST, PARTITIONS_EACH * servers, Math.floor(budgetBytes / LEAST_EACH_BYTES)));
}

/**
 * Return the hash tag of each partition of a new stream.
 *
 * With several servers, partition 0 lies in the stream's own slot, and the others go to the servers in turn. With one,
 * partition p hashes into the p-th of `count` equal ranges.
 *
 * @param servers The slots of each server.
 */
export function chooseTags(name: string, id: string, count: number, servers: readonly SlotRange[][]): string[] {
  if (servers.length < 2) return spreadEvenly(name, id, count);
  const own = slotOf(`{${name}}`);
  const isOwn = (slots: readonly SlotRange[]) => slots.some(([first, end]) => first <= own && own < end);
  const first = Math.max(0, servers.findIndex(isOwn));
  const wanted = Array.from({ length: count }, (_, partition) =>
    partition === 0
      ? own
      : atShare(servers[(first + partition) % servers.length] as SlotRange[], ((partition + 1) * GOLDEN) % 1),
  );
  return search(name, id, wanted);
}

/** Return the slot below which a server has this share of its slots. */
function atShare(slots: readonly SlotRange[], share: number): number {
  let left = Math.floor(share * slots.reduce((sum, [first, end]) => sum + end - first, 0));
  for (const [first, end] of slots) {
    if (left < end - first) return first + left;
    left -= end - first;
  }
  throw new RangeError("a server has no slots");
}

function spreadEvenly(name: string, id: string, count: number): string[] {
  const tags: string[] = [];
  for (let number = 0; tags.length < count; number += 1) {
    const tag = `${id}.${number}`;
    if (Math.floor((slotOf(`${name}.${tag}`) * count) / SLOTS) === tags.length) tags.push(tag);
  }
  return tags;
}

/** Return a tag for each slot. Numbers are tried until every partition has one. */
function search(name: string, id: string, wanted: readonly number[]): string[] {
  const missing = new Map<number, number[]>();
  for (const [partition, slot] of wanted.entries()) missing.set(slot, [...(missing.get(slot) ?? []), partition]);
  const tags = new Array<string>(wanted.length);
  for (let number = 0; missing.size > 0; number += 1) {
    const tag = `${id}.${number}`;
    const slot = slotOf(`${name}.${tag}`);
    const partitions = missing.get(slot);
    if (partitions === undefined) continue;
    tags[partitions.shift() as number] = tag;
    if (partitions.length === 0) missing.delete(slot);
  }
  return tags;
}
