// The entries that a member holds, what a batch acknowledges of them, and the rule for taking over those of others. No
// server, no clock.

import { RELEASED } from "../stream/keys.js";
import { mergeRanges, type Range } from "../stream/ledger.js";
import type { PendingEntry } from "../stream/pending.js";
import type { LoaderBatch } from "./batch.js";

/** Acknowledgements remembered after they were sent. Those without an answer are remembered besides. */
const REMEMBERED = 64;

/** A member's lease on one delivered entry. */
export class Lease {
  readonly partition: number;
  readonly epoch: number;
  /** -1 while nothing but the entry's id is known. */
  readonly shard: number;
  readonly entryId: string;
  /** The samples that are not acknowledged. */
  remaining: number;
  /** Whether another member holds the entry now. Its samples are delivered there, and acknowledged there. */
  isLost = false;
  /** The offsets that were acknowledged before the entry came, and then batch by batch. */
  readonly acknowledged: Range[];

  constructor(
    partition: number,
    epoch: number,
    shard: number,
    entryId: string,
    remaining: number,
    acknowledged: readonly Range[] = [],
  ) {
    this.partition = partition;
    this.epoch = epoch;
    this.shard = shard;
    this.entryId = entryId;
    this.remaining = remaining;
    this.acknowledged = [...acknowledged];
  }
}

/** The arguments of one acknowledging script: one partition of one epoch. */
export interface AckRequest {
  /** Entries all of whose samples are acknowledged with this call. */
  readonly ids: string[];
  /** Shard to offsets. */
  readonly ranges: Map<number, readonly Range[]>;
}

/**
 * Return, by partition, what is due for a batch that was trained on. Leases are counted down: call it once per batch.
 * What another member took meanwhile is left out.
 */
export function planAcknowledgement(batch: LoaderBatch): Map<number, AckRequest> {
  const byLease = new Map<Lease, Range[]>();
  for (const { lease, lo, hi } of batch.leased) {
    if (lease.isLost) continue;
    const ranges = byLease.get(lease);
    if (ranges === undefined) byLease.set(lease, [[lo, hi]]);
    else ranges.push([lo, hi]);
  }
  const plan = new Map<number, { ids: string[]; ranges: Map<number, Range[]> }>();
  for (const [lease, ranges] of byLease) {
    const due = plan.get(lease.partition) ?? { ids: [], ranges: new Map<number, Range[]>() };
    plan.set(lease.partition, due);
    const spans = due.ranges.get(lease.shard) ?? [];
    due.ranges.set(lease.shard, spans);
    spans.push(...ranges);
    lease.remaining -= ranges.reduce((sum, [lo, hi]) => sum + hi - lo, 0);
    if (lease.remaining === 0) {
      due.ids.push(lease.entryId);
      // and what was acknowledged of it before, here or by others: a server may have lost those bits alone
      spans.push(...lease.acknowledged);
    }
    lease.acknowledged.push(...ranges);
  }
  for (const { ranges } of plan.values()) for (const [shard, spans] of ranges) ranges.set(shard, mergeRanges(spans));
  return plan;
}

interface Remembered {
  readonly partition: number;
  readonly epoch: number;
  readonly ids: ReadonlySet<string>;
  isAnswered: boolean;
}

/** All leases of a member. */
export class Leases {
  /** `partition:epoch` to entry id to lease. */
  readonly #held = new Map<string, Map<string, Lease>>();
  readonly #acknowledging: Remembered[] = [];

  /** Add a newly received entry. It replaces an earlier lease of the same entry, which is lost. */
  add(lease: Lease): void {
    const key = `${lease.partition}:${lease.epoch}`;
    const held = this.#held.get(key) ?? new Map<string, Lease>();
    this.#held.set(key, held);
    const former = held.get(lease.entryId);
    if (former !== undefined) former.isLost = true;
    held.set(lease.entryId, lease);
  }

  /** Remove entries that are acknowledged. `answer` is the server's, which may come later. */
  remove(partition: number, epoch: number, ids: readonly string[], answer: Promise<unknown> = Promise.resolve()): void {
    if (ids.length === 0) return;
    const one = { partition, epoch, ids: new Set(ids), isAnswered: false };
    const done = () => {
      one.isAnswered = true;
    };
    answer.then(done, done);
    this.#acknowledging.push(one);
    while (this.#acknowledging.length > REMEMBERED) {
      const oldest = this.#acknowledging.findIndex(({ isAnswered }) => isAnswered);
      if (oldest < 0) break;
      this.#acknowledging.splice(oldest, 1);
    }
    this.#drop(partition, epoch, ids);
  }

  /** Remove entries that someone else holds now. Returns how many of them were still held here. */
  lose(partition: number, epoch: number, ids: readonly string[]): number {
    const lost = this.#drop(partition, epoch, ids).filter(({ remaining }) => remaining > 0);
    for (const lease of lost) lease.isLost = true;
    return lost.length;
  }

  #drop(partition: number, epoch: number, ids: readonly string[]): Lease[] {
    const key = `${partition}:${epoch}`;
    const held = this.#held.get(key);
    const found: Lease[] = [];
    for (const id of ids) {
      const lease = held?.get(id);
      if (lease !== undefined) found.push(lease);
      held?.delete(id);
    }
    if (held?.size === 0) this.#held.delete(key);
    return found;
  }

  /** Return whether anything of an epoch is held. */
  holdsEpoch(epoch: number): boolean {
    return [...this.#held.keys()].some((key) => key.endsWith(`:${epoch}`));
  }

  /** Return epoch to ids held in one partition. */
  ids(partition: number): Map<number, string[]> {
    const found = new Map<number, string[]>();
    for (const [key, held] of this.#held) {
      const [number, epoch] = key.split(":").map(Number) as [number, number];
      if (number === partition) found.set(epoch, [...held.keys()]);
    }
    return found;
  }

  /** Return `ids` and what was acknowledged just now: the server may not have heard of it. */
  toRenew(partition: number): Map<number, string[]> {
    const found = this.ids(partition);
    for (const one of this.#acknowledging) {
      if (one.partition !== partition) continue;
      found.set(one.epoch, [...(found.get(one.epoch) ?? []), ...one.ids]);
    }
    return found;
  }

  /** Return whether this member tracks the entry. */
  holds(partition: number, epoch: number, entryId: string): boolean {
    return this.#held.get(`${partition}:${epoch}`)?.has(entryId) ?? false;
  }

  /** Return whether the entry was acknowledged so recently that it may still be pending on the server. */
  isAcknowledging(partition: number, epoch: number, entryId: string): boolean {
    return this.#acknowledging.some(
      (one) => one.partition === partition && one.epoch === epoch && one.ids.has(entryId),
    );
  }
}

/** An idle time that grew by less than this part of the time between two looks was reset in between. */
const RENEWED_BELOW = 0.5;

/** An entry as last seen, and since when it has been seen unrenewed. */
export interface LeaseSighting {
  readonly holder: string;
  readonly idleMs: number;
  readonly atMs: number;
  readonly sinceMs: number;
}

/** What to remember for the next look, and what to claim now. */
export interface ReclaimPlan {
  readonly seen: Map<string, LeaseSighting>;
  readonly claims: readonly PendingEntry[];
}

/**
 * Plan which entries of others are taken over.
 *
 * @param seen What the last look remembered.
 * @param pending Everything pending of the group.
 * @param me The member's name.
 * @param nowMs This process's clock.
 * @param leaseMs The length of a lease.
 */
export function planReclaim(
  seen: ReadonlyMap<string, LeaseSighting>,
  pending: Iterable<PendingEntry>,
  me: string,
  nowMs: number,
  leaseMs: number,
): ReclaimPlan {
  const remembered = new Map<string, LeaseSighting>();
  const claims: PendingEntry[] = [];
  for (const entry of pending) {
    if (entry.member === me) continue;
    // 1. handed back on purpose: free for anyone at once
    if (entry.member === RELEASED) {
      claims.push(entry);
      continue;
    }
    // 2. a new sighting, another holder, or one that renewed: the lease starts again on this clock
    const key = `${entry.partition.number}:${entry.epoch}:${entry.entryId}`;
    const before = seen.get(key);
    const isUnrenewed = before !== undefined && before.holder === entry.member && !wasRenewed(before, entry, nowMs);
    const sinceMs = isUnrenewed ? before.sinceMs : nowMs;
    // 3. unrenewed for a whole lease
    if (nowMs - sinceMs >= leaseMs) claims.push(entry);
    else remembered.set(key, { holder: entry.member, idleMs: entry.idleMs, atMs: nowMs, sinceMs });
  }
  return { seen: remembered, claims };
}

function wasRenewed(before: LeaseSighting, { idleMs }: PendingEntry, nowMs: number): boolean {
  return idleMs < before.idleMs + (nowMs - before.atMs) * RENEWED_BELOW;
}
