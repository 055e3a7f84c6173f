// The committed blocks of a shard that its server may still lose, and the times at which it is asked about them. A
// failover loses a server's newest writes. The writer keeps what no replica, or no disk, has confirmed, and sends it
// again. So confirmations are asked for seldom, and no block waits for the one before.

import type { Durability } from "../stream/durability.js";
import { now } from "../waiting.js";
import type { PackedBlock } from "./block.js";

/** The payload of committed blocks that a shard's writer keeps while they are not confirmed. */
const UNCONFIRMED_BYTES = 64 * 2 ** 20;
/** The payload after which the server is asked again. An answer holds back the connection until a replica has all. */
const ASK_BYTES = 8 * 2 ** 20;
/** The time after which it is asked again, however little was written. */
const ASK_MS = 100;
/** The longest time that an answer may hold back the blocks behind it. */
export const ANSWER_MS = 20;
/** The time without a question after an answer that said no: a replica that stands still must not slow a writer down. */
const PAUSE_MS = 1000;

/** The reason for each hole of a block. */
export type Reasons = ReadonlyMap<number, string>;

/** A committed block. */
export interface KeptBlock {
  readonly block: PackedBlock;
  readonly bad: Reasons;
  /** The ids that it was given each time it was committed. */
  readonly entries: string[];
}

/** The committed blocks of one shard that are not confirmed at the level of the stream. */
export class UnconfirmedBlocks {
  readonly #isAuto: boolean;
  readonly #most: number;
  readonly #blocks: KeptBlock[] = [];
  #bytes = 0;
  #unaskedBytes = 0;
  #dueAt = Number.NEGATIVE_INFINITY;
  #pauseEnds = Number.NEGATIVE_INFINITY;
  /** All offsets below it have the level. */
  confirmed = 0;

  /** @param most The payload that is kept. */
  constructor({ isAuto }: Durability, most = UNCONFIRMED_BYTES) {
    this.#isAuto = isAuto;
    this.#most = most;
  }

  /** The first offset that can be sent again, or null if no block is kept. */
  get first(): number | null {
    return this.#blocks[0]?.block.first ?? null;
  }

  /** Return whether the server is to be asked for the level behind a block of so many bytes. */
  isDue(bytes: number): boolean {
    this.#unaskedBytes += bytes;
    if (now() < this.#pauseEnds || (this.#unaskedBytes < ASK_BYTES && now() < this.#dueAt)) return false;
    this.#unaskedBytes = 0;
    this.#dueAt = now() + ASK_MS;
    return true;
  }

  /**
   * Note a block that the server has committed. `auto` drops the oldest kept ones for it.
   *
   * @param isKept Whether the server may lose it, and the level forbids that.
   * @param entryId "" if nothing was appended, because every sample is bad.
   */
  committed(block: PackedBlock, bad: Reasons, isKept: boolean, entryId: string): void {
    const ids = entryId === "" ? [] : [entryId];
    if (!isKept) {
      // blocks behind it are still to be sent again to a server that lost them
      this.#dropWhile((kept) => kept.block.end <= block.end);
      return;
    }
    const last = this.#blocks.at(-1);
    if (last !== undefined && block.end <= last.block.end) {
      const kept = this.at(block.first);
      if (kept?.block.first === block.first) kept.entries.push(...ids);
      return;
    }
    this.#blocks.push({ block, bad, entries: ids });
    this.#bytes += block.bytes;
    if (this.#isAuto) this.#dropWhile(() => this.#bytes > this.#most);
  }

  /** Take the answer to a question that was sent behind the offset `end`. */
  answered(end: number, isConfirmed: boolean): void {
    if (!isConfirmed) {
      this.#pauseEnds = now() + PAUSE_MS;
      return;
    }
    this.confirmed = Math.max(this.confirmed, end);
    this.#pauseEnds = Number.NEGATIVE_INFINITY;
    this.#dropWhile((kept) => kept.block.end <= end);
  }

  /** Take the end of what the server has after a connection broke. */
  cameBack(end: number): void {
    this.confirmed = Math.min(this.confirmed, end);
  }

  /** Return whether an explicit level allows no further block of so many bytes before some are confirmed. */
  mustWait(bytes: number): boolean {
    return !this.#isAuto && this.#blocks.length > 0 && this.#bytes + bytes > this.#most;
  }

  /** Return the kept block that has this offset, or null. */
  at(offset: number): KeptBlock | null {
    return this.#blocks.find(({ block }) => block.first <= offset && offset < block.end) ?? null;
  }

  /** Return the kept blocks by offset. */
  all(): readonly KeptBlock[] {
    return this.#blocks;
  }

  #dropWhile(isOver: (oldest: KeptBlock) => boolean): void {
    let count = 0;
    for (const one of this.#blocks) {
      if (!isOver(one)) break;
      this.#bytes -= one.block.bytes;
      count += 1;
    }
    this.#blocks.splice(0, count);
  }
}
