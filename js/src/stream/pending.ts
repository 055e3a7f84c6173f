// Pending entries of a group: those that are overdue or held by a member, claiming one, and the last entry that was
// given.

import { ReplyError } from "../errors.js";
import { entriesOf, type Server, textOf } from "../server/client.js";
import { LAST, type PartitionKeys, RELEASED } from "./keys.js";
import { serverMs } from "./roster.js";

const PAGE = 10_000;

/** One delivered entry of a group that is not acknowledged. */
export interface PendingEntry {
  readonly partition: PartitionKeys;
  readonly epoch: number;
  readonly entryId: string;
  readonly member: string;
  readonly idleMs: number;
  /** How often it was given out. */
  readonly deliveries: number;
}

/** A partition and an epoch, which have one entries key. */
export interface EntriesKey {
  readonly partition: PartitionKeys;
  readonly epoch: number;
}

/** Return what was not renewed for `idleMs`, and all that was returned. */
export async function listOverdue(
  server: Server,
  keys: readonly EntriesKey[],
  group: string,
  idleMs: number,
): Promise<PendingEntry[]> {
  const listed = keys.flatMap((key) => [
    listPending(server, key, group, { idleMs }),
    listPending(server, key, group, { member: RELEASED }),
  ]);
  const found = new Map<string, PendingEntry>();
  for (const one of (await Promise.all(listed)).flat()) {
    found.set(`${one.partition.number}:${one.epoch}:${one.entryId}`, one);
  }
  return [...found.values()];
}

/** Return the pending entries of one member. */
export async function listHeld(
  server: Server,
  keys: readonly EntriesKey[],
  group: string,
  member: string,
): Promise<PendingEntry[]> {
  return (await Promise.all(keys.map((key) => listPending(server, key, group, { member })))).flat();
}

interface Chosen {
  readonly idleMs?: number;
  readonly member?: string;
}

async function listPending(
  server: Server,
  { partition, epoch }: EntriesKey,
  group: string,
  { idleMs, member }: Chosen,
): Promise<PendingEntry[]> {
  const found: PendingEntry[] = [];
  const idle = idleMs === undefined ? [] : ["IDLE", idleMs];
  const consumer = member === undefined ? [] : [member];
  for (let start = "-"; ; ) {
    const args = [partition.entries(epoch), group, ...idle, start, "+", PAGE, ...consumer];
    const page = (await unlessGone(server.call("XPENDING", ...args), [])) as unknown[][];
    for (const [id, holder, idleFor, deliveries] of page) {
      const entryId = textOf(id) as string;
      found.push({
        partition,
        epoch,
        entryId,
        member: textOf(holder) as string,
        idleMs: Number(idleFor),
        deliveries: Number(deliveries),
      });
    }
    if (page.length < PAGE) return found;
    start = `(${(found.at(-1) as PendingEntry).entryId}`;
  }
}

/** Return the names of the members that hold entries of these keys. */
export async function pendingMembers(server: Server, keys: readonly EntriesKey[], group: string): Promise<Set<string>> {
  const asked = keys.map(({ partition, epoch }) =>
    unlessGone(server.call("XPENDING", partition.entries(epoch), group)),
  );
  const found = new Set<string>();
  for (const reply of await Promise.all(asked)) {
    const consumers = ((reply as unknown[] | null)?.[3] ?? []) as unknown[][];
    for (const [name] of consumers) found.add(textOf(name) as string);
  }
  return found;
}

/** Claim one entry if its holder is still the one that was seen, and was idle that long. */
export async function claimEntry(
  server: Server,
  entry: PendingEntry,
  who: { readonly group: string; readonly member: string },
  minIdleMs: number,
  deliveries: number,
): Promise<boolean> {
  const args = [who.group, who.member, entry.member, minIdleMs, entry.entryId, deliveries];
  return Boolean(await server.run("claim_entry", [entry.partition.entries(entry.epoch)], args));
}

/** Return whether there is an entry that no member of the group was given yet. */
export async function hasUnread(server: Server, entries: EntriesKey, group: string): Promise<boolean> {
  const given = await lastGiven(server, entries);
  const [newest, mine] = [given.get(LAST), given.get(group)];
  if (newest === undefined || mine === undefined || compareIds(newest, mine) <= 0) return false;
  const key = entries.partition.entries(entries.epoch);
  return entriesOf(await server.call("XRANGE", key, `(${mine}`, "+", "COUNT", 1)).length > 0; // it may be deleted
}

/** Return whether a group was given the newest entry, and that was committed in the last `ms` milliseconds. */
export async function wasGivenSince(server: Server, entries: EntriesKey, group: string, ms: number): Promise<boolean> {
  const given = await lastGiven(server, entries);
  const [newest, mine] = [given.get(LAST), given.get(group)];
  if (newest === undefined || mine === undefined || compareIds(newest, mine) > 0) return false;
  return Number.parseInt(newest, 10) > (await serverMs(server, entries.partition)) - ms;
}

/** Return the id of the newest entry, or null if there is none, or no such epoch. */
export async function newestEntry(server: Server, entries: EntriesKey): Promise<string | null> {
  return (await lastGiven(server, entries)).get(LAST) ?? null;
}

/** Return the id of the last entry that a group was given, or undefined if the epoch does not know the group. */
export async function lastGivenTo(server: Server, entries: EntriesKey, group: string): Promise<string | undefined> {
  return (await lastGiven(server, entries)).get(group);
}

/** Return the id of the last entry that each group was given. */
async function lastGiven(server: Server, { partition, epoch }: EntriesKey): Promise<Map<string, string>> {
  const groups = (await unlessGone(server.call("XINFO", "GROUPS", partition.entries(epoch)), [])) as unknown[];
  return new Map(groups.map(lastDelivered));
}

function lastDelivered(info: unknown): [name: string, id: string] {
  const pairs: [unknown, unknown][] = Array.isArray(info)
    ? Array.from({ length: info.length / 2 }, (_, at) => [info[2 * at], info[2 * at + 1]])
    : [...(info instanceof Map ? info : Object.entries(info as object))];
  const found = new Map(pairs.map(([name, value]) => [textOf(name), value]));
  return [textOf(found.get("name")) as string, textOf(found.get("last-delivered-id")) as string];
}

/** Compare two ids of entries, as the stream sorts them. */
export function compareIds(a: string, b: string): number {
  const [highA, lowA] = a.split("-").map(BigInt) as [bigint, bigint | undefined];
  const [highB, lowB] = b.split("-").map(BigInt) as [bigint, bigint | undefined];
  if (highA !== highB) return highA < highB ? -1 : 1;
  const [low, other] = [lowA ?? 0n, lowB ?? 0n];
  return low === other ? 0 : low < other ? -1 : 1;
}

/** Return whether a command failed because the epoch was released or the group dropped. */
export function isGone(error: unknown): boolean {
  return error instanceof ReplyError && /NOGROUP|no such key/.test(error.message);
}

async function unlessGone(asked: Promise<unknown>, otherwise: unknown = null): Promise<unknown> {
  try {
    return await asked;
  } catch (error) {
    if (isGone(error)) return otherwise;
    throw error;
  }
}
