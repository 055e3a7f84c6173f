// Admission control for one shard: asks the rule, has the trimmer free bytes, notes a wait on the roster, and explains
// it.

import { PenstockError, TooLarge } from "../errors.js";
import { readableBytes } from "../printable.js";
import type { Server } from "../server/client.js";
import { findManifest } from "../stream/manifest.js";
import { serverMs } from "../stream/roster.js";
import { partitionOf, type Stream } from "../stream/stream.js";
import { now } from "../waiting.js";
import { unacknowledgedSamples } from "./acknowledged.js";
import type { ShardPlace } from "./commitCommands.js";
import { explainHolds, explainMemory, explainQuota } from "./explain.js";
import { type Holders, idleGroups, loadHolders, missingMembers, unfinishedGroups } from "./holders.js";
import type { ServerMemory } from "./memory.js";
import type { AdmissionOrder } from "./order.js";
import {
  type Decision,
  decide,
  isEnough,
  lacking,
  largestBlock,
  missingBytes,
  NO_WAIT,
  pauseMs,
  type QuotaState,
  waitAdmitted,
  waitBegun,
  waitClosed,
  waitedMs,
} from "./quota.js";
import type { Trimmer } from "./trimmer.js";

/** A wait this long is noted on the roster. Shorter waits are usual while a budget is full. */
const NOTE_AFTER_MS = 500;
const RENEW_MS = 1000;
const LOOK_EVERY_MS = 100;

/** The part of the server's memory that one writer may take. */
export interface MemoryQuota {
  readonly memory: ServerMemory | null;
  /** Return how many more bytes writers may write, or null without a limit. */
  leftBytes(wantedBytes: number, isAnew: boolean): Promise<number | null>;
  /** Ask the server, and return whether it is at its maxmemory. */
  isUsedUp(): Promise<boolean>;
  /** Count bytes that were written since the server was asked. */
  spend(bytes: number): void;
}

/** What one writer's shards share. */
export interface Shared {
  readonly memory: MemoryQuota;
  readonly order: Pick<AdmissionOrder, "isNext">;
  readonly clock?: () => number;
  readonly trimmer: Pick<Trimmer, "trim">;
}

/** The decision for one shard whether its next block may be written, and the note of its wait on the roster. */
export class Admission {
  readonly #server: Server;
  readonly #stream: Stream;
  readonly #place: ShardPlace;
  readonly #shared: Shared;
  readonly #clock: () => number;
  readonly #budgetBytes: number;
  #state: QuotaState;
  #decision: Decision = "admitted";
  #wait = NO_WAIT;
  /** The server refused a write at its maxmemory, and no block was admitted or refused since. */
  #isServerFull = false;
  #notedAt: number | null = null;
  #isNextNow = false;
  #lookedAt = Number.NEGATIVE_INFINITY;
  /** The bytes freed for the last block. The writer learns of them with that block's answer. */
  #freed = 0;

  constructor(server: Server, stream: Stream, place: ShardPlace, shared: Shared) {
    this.#server = server;
    this.#stream = stream;
    this.#place = place;
    this.#shared = shared;
    this.#clock = shared.clock ?? now;
    this.#budgetBytes = Math.floor(stream.budgetBytes / stream.partitions.length);
    const partition = stream.partitions.length > 1 ? place.partition.number : null;
    this.#state = {
      heldBytes: 0,
      blockBytes: 0,
      budgetBytes: this.#budgetBytes,
      isNext: false,
      waitedMs: null,
      partition,
      leftBytes: null,
    };
  }

  /** Return what the block that was refused last waits for. */
  get lacking(): "memory" | "budget" {
    return lacking(this.#decision);
  }

  /** Record that the server refused a write at its maxmemory: the next block waits one round. */
  noteFullServer(): void {
    this.#isServerFull = true;
  }

  /**
   * Return whether the block may be written now.
   *
   * @param heldBytes The payload that the partition holds, as last read.
   * @throws TooLarge if the block is larger than a quarter of the partition's budget: it might wait for ever.
   */
  async admit(blockBytes: number, heldBytes: number): Promise<boolean> {
    if (blockBytes > largestBlock(this.#budgetBytes)) {
      throw new TooLarge(
        `a block of ${readableBytes(blockBytes)} does not fit a quarter of the budget of ` +
          `${readableBytes(this.#budgetBytes)} a partition of '${this.#stream.name}': raise budgetBytes to ` +
          `${4 * blockBytes * this.#stream.partitions.length}, or write smaller samples`,
      );
    }
    this.#freed = 0;
    const isRefused = await this.#takeRefusal();
    this.#wait = waitBegun(this.#wait, this.#clock(), isRefused);
    if (await this.#decide(blockBytes, heldBytes, isRefused)) return this.#goOn(blockBytes);
    this.#wait = waitClosed(this.#wait, this.#clock());
    const need = Math.max(missingBytes(this.#state), blockBytes);
    const freed = await this.#shared.trimmer.trim(this.#place.partition, need);
    this.#freed = freed;
    if (!isRefused && freed > 0 && (await this.#decide(blockBytes, heldBytes - freed))) return this.#goOn(blockBytes);
    await this.#note();
    return false;
  }

  /**
   * Return whether the block may be sent before the one ahead of it is answered.
   *
   * @param heldBytes The payload that the partition held before the block ahead, and that block's.
   */
  async admitNext(blockBytes: number, heldBytes: number): Promise<boolean> {
    const { closedAt, refusedAt } = this.#wait;
    if (closedAt !== null || refusedAt !== null || this.#isServerFull) return false;
    if (blockBytes > largestBlock(this.#budgetBytes)) return false;
    if (!(await this.#decide(blockBytes, heldBytes - this.#freed))) return false;
    this.#freed = 0;
    return this.#goOn(blockBytes);
  }

  /** Return the time to wait before asking again. */
  get pauseMs(): number {
    return pauseMs(waitedMs(this.#wait, this.#clock()) ?? 0, this.#wait.lastMs);
  }

  /** Remove the note of the wait from the roster, whether the block was admitted or not. */
  async endWait(): Promise<void> {
    if (this.#notedAt === null) return;
    this.#notedAt = null;
    const { partition, manifest, shard } = this.#place;
    try {
      await this.#server.call("HDEL", partition.roster, `w:${manifest.epoch}:${shard}`);
    } catch (error) {
      if (!(error instanceof PenstockError)) throw error; // a note that stays is soon stale
    }
  }

  async #takeRefusal(): Promise<boolean> {
    const wasTried = this.#isServerFull || this.#wait.refusedAt !== null;
    const isUsedUp = wasTried && (await this.#shared.memory.isUsedUp()); // it would refuse the next try as well
    const isRefused = this.#isServerFull || isUsedUp;
    this.#isServerFull = false;
    return isRefused;
  }

  /** Apply the rule. Ask whether the shard is next only if the answer matters. */
  async #decide(blockBytes: number, heldBytes: number, isRefused = false): Promise<boolean> {
    const waited = waitedMs(this.#wait, this.#clock());
    const leftBytes = await this.#shared.memory.leftBytes(blockBytes, waited !== null);
    const isNext = this.#isNextNow;
    this.#state = { ...this.#state, heldBytes, blockBytes, isNext, waitedMs: waited, leftBytes };
    if (!isNext && !isEnough(this.#state) && (await this.#isNext())) this.#state = { ...this.#state, isNext: true };
    this.#decision = decide(this.#state, isRefused);
    return this.#decision === "admitted";
  }

  #goOn(blockBytes: number): boolean {
    this.#wait = waitAdmitted(this.#wait, this.#clock());
    this.#shared.memory.spend(blockBytes);
    return true;
  }

  /** Note the wait on the roster: for the first time after a moment, then every second. */
  async #note(): Promise<void> {
    const at = this.#clock();
    const waited = waitedMs(this.#wait, at) ?? 0;
    if (waited < NOTE_AFTER_MS || (this.#notedAt !== null && at - this.#notedAt < RENEW_MS)) return;
    this.#notedAt = at;
    const { partition, manifest, shard } = this.#place;
    const { blockBytes, heldBytes } = this.#state;
    const isNext = Number(await this.#isNext()); // after a refusal the rule may not have asked that
    const args = [manifest.epoch, shard, Math.floor(waited), blockBytes, heldBytes, lacking(this.#decision), isNext];
    await this.#server.run("note_wait", [partition.roster], args);
  }

  /** Return whether the reserve is for this shard. One that is next stays next: epochs and shards only rise. */
  async #isNext(): Promise<boolean> {
    const at = this.#clock();
    if (!this.#isNextNow && at - this.#lookedAt >= LOOK_EVERY_MS) {
      this.#isNextNow = await this.#shared.order.isNext(this.#place.manifest.epoch, this.#place.shard);
      this.#lookedAt = at;
    }
    return this.#isNextNow;
  }

  /** Return the sentence that says what the shard waits for, and what helps. */
  async why(): Promise<string> {
    const { name } = this.#stream;
    const { memory } = this.#shared.memory;
    if (lacking(this.#decision) === "memory" && memory !== null) return explainMemory(name, this.#state, memory);
    const { partition } = this.#place;
    const holders = await loadHolders(this.#server, partition);
    const nowMs = await serverMs(this.#server, partition);
    const idle = idleGroups(holders, nowMs);
    // a group that waits for this shard is behind only because of it
    const blockers = (await this.#blockers(holders)).filter((group) => !(this.#isNextNow && idle.has(group)));
    const isDeadlock = this.#isNextNow && blockers.length === 0;
    const isKept = holders.pinned.size > 0 || holders.replays.some(({ till }) => till > nowMs);
    const reason = explainQuota(name, this.#state, {
      blockers,
      hasGroups: [...holders.groups.values()].some(({ holds }) => holds),
      unacknowledged: new Map(isDeadlock ? [...idle].filter(([, bytes]) => bytes > 0) : []),
      missing: isDeadlock ? await missingMembers(this.#server, partition, holders, idle.keys(), nowMs) : [],
      isKept,
    });
    const parts = [reason, explainHolds(name, holders, blockers, nowMs)];
    return parts.filter((part) => part !== "").join("; ");
  }

  /** Return the groups with more than half as many unacknowledged samples as the slowest group. */
  async #blockers(holders: Holders): Promise<string[]> {
    const unacknowledged = new Map<string, number>();
    for (const epoch of holders.epochs) {
      const manifest = await findManifest(this.#server, this.#stream, epoch);
      if (manifest === null) continue;
      const found = await unacknowledgedSamples(this.#server, this.#stream, manifest, unfinishedGroups(holders, epoch));
      for (const [group, count] of found) unacknowledged.set(group, (unacknowledged.get(group) ?? 0) + count);
    }
    const most = Math.max(0, ...unacknowledged.values());
    return [...unacknowledged]
      .filter(([, count]) => count > 0 && count > most / 2)
      .map(([group]) => group)
      .sort();
  }
}

/** Return the place of a shard. */
export function placeOf(stream: Stream, manifest: ShardPlace["manifest"], shard: number): ShardPlace {
  return { partition: partitionOf(stream, shard), manifest, shard };
}
