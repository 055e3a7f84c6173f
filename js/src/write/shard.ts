// The writer of one shard: it numbers samples, packs them into blocks, records bad ones, and decides when a block is
// sent.

import { PenstockError, ShardMismatch, TooLarge } from "../errors.js";
import { now } from "../waiting.js";
import { MAX_HOLES } from "../wire/limits.js";
import type { Spec } from "../wire/spec.js";
import { BlockBuilder, type PackedBlock } from "./block.js";
import { type Committer, ShardTaken } from "./commit.js";
import { checkRows, type Rows, type RowsLike } from "./rows.js";
import type { SampleLike } from "./spec.js";
import type { Reasons } from "./unconfirmed.js";

/** The first block of a shard is sent early, because trainers wait for it. The next one takes twice as long. */
const FIRST_LINGER_MS = 100;
/** A block begun this long ago is sent with the next write. There is no timer, so a program that pauses calls `flush`. */
const LINGER_MS = 1000;
const MAX_BLOCK_SAMPLES = 2 ** 16;

/** A shard that a writer took. */
export interface ShardSlot {
  readonly committer: Committer;
  readonly shard: number;
  /** Call it with the number of samples to declare the shard complete. */
  readonly finish: (size: number) => Promise<void>;
}

/** How a shard is written. */
export interface ShardOptions {
  readonly spec: Spec;
  readonly blockBytes: number;
  /** The most samples: the planned size, if there is one. */
  readonly limit: number;
  readonly isPlanned: boolean;
  /** Takes a new shard where this one turns out to be another writer's. Null: then it is an error. */
  readonly takeAnother: (() => Promise<ShardSlot>) | null;
  /** Receives the number of samples that are not committed when the program ends without closing the shard. */
  readonly lost: (count: number) => void;
}

const open = new Set<ShardWriter>();
process.on("exit", () => {
  for (const shard of open) shard.tellLost();
});

/** The writer of one shard, in order. Await each call before the next one. */
export class ShardWriter {
  readonly #options: ShardOptions;
  readonly #builder: BlockBuilder;
  #committer: Committer;
  #shard: number;
  #finish: ShardSlot["finish"];
  #limit: number;
  /** The offset of the first sample in the block that is gathered. */
  #first: number;
  #bad = new Map<number, string>();
  /** Blocks that ended, and that a committer refused that found no space or no server: kept, or there would be a gap. */
  readonly #uncommitted: [PackedBlock, Reasons][] = [];
  #lingerMs = FIRST_LINGER_MS;
  #dueAt = now() + FIRST_LINGER_MS;
  #hasFailed = false;
  #isBusy = false;
  #isClosed = false;
  #bytesWritten = 0;

  constructor({ committer, shard, finish }: ShardSlot, options: ShardOptions) {
    this.#committer = committer;
    this.#shard = shard;
    this.#finish = finish;
    this.#options = options;
    this.#limit = options.limit;
    this.#first = committer.position;
    this.#builder = new BlockBuilder(options.spec, options.blockBytes, MAX_BLOCK_SAMPLES);
    open.add(this);
  }

  /** The offset of the next sample: after a restart, where to go on. */
  get position(): number {
    return this.#first + this.#builder.size + this.#bad.size;
  }

  /** The offset after the last sample that is known to be committed. */
  get committed(): number {
    return this.#committer.position;
  }

  /** Whether no more samples may come. */
  get isOver(): boolean {
    return this.position >= this.#limit;
  }

  /** The samples of this writer whose offsets another run of the shard had committed before. */
  get leftOut(): number {
    return this.#committer.leftOut;
  }

  /** Whether an error ended the last flush, or one is under way. */
  get hasFailed(): boolean {
    return this.#hasFailed;
  }

  /** Offset after the last sample that was packed into a block. */
  get sent(): number {
    return this.#first;
  }

  /** The payload bytes that this writer sent. */
  get bytesWritten(): number {
    return this.#bytesWritten;
  }

  /**
   * Add the next sample. Its arrays may be used again as soon as this returns.
   *
   * @throws SpecMismatch naming tensor, found and expected, TooLarge, ShardMismatch beyond the planned size.
   * @example
   * await shard.write({ x: image, y: 3 });
   */
  async write(sample: SampleLike): Promise<void> {
    this.#begin();
    try {
      if (this.#uncommitted.length > 0 || this.isOver) await this.#makeWay(1);
      this.#builder.add(sample);
      if (this.#builder.isFull || this.isOver || now() >= this.#dueAt) await this.#flushAdded();
    } finally {
      this.#isBusy = false;
    }
  }

  /**
   * Add n samples.
   *
   * @param rows Name to an array of all samples, to an array of n values, or to a column of a batch.
   * @throws SpecMismatch before anything is written.
   */
  async writeBatch(rows: RowsLike): Promise<void> {
    const checked = checkRows(this.#options.spec, rows);
    await this.writeRows(checked, 0, checked.count);
  }

  /** Add the rows [from, to) of `checkRows`. */
  async writeRows(checked: Rows, from: number, to: number): Promise<void> {
    this.#begin();
    try {
      await this.#makeWay(to - from);
      for (let at = from; at < to; ) {
        at += this.#builder.addRows(checked, at, to);
        if (this.#builder.isFull || this.isOver) await this.#flushAdded();
      }
      if (now() >= this.#dueAt) await this.#flushAdded();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Record that the next sample could not be made: its offset becomes a hole, which no group waits for. */
  async quarantine(reason: string): Promise<void> {
    this.#begin();
    try {
      await this.#makeWay(1);
      this.#bad.set(this.position, reason);
      if (this.#bad.size >= MAX_HOLES || this.isOver) await this.#flush();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Send the samples gathered so far, so that trainers can read them. An error loses nothing. */
  async flush(): Promise<void> {
    this.#begin();
    try {
      await this.#flush();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Flush, and return once everything is committed. */
  async commitAll(): Promise<void> {
    this.#begin();
    try {
      await this.#commitAll();
    } finally {
      this.#isBusy = false;
    }
  }

  /** Commit the rest and declare the shard complete. Raises ShardMismatch if fewer samples came than planned. */
  async close(): Promise<void> {
    if (this.#isClosed) return;
    this.#begin();
    try {
      await this.#commitWhole();
      if (this.#options.isPlanned && this.position !== this.#limit) {
        throw new ShardMismatch(
          `shard ${this.#shard} was closed after ${this.position} samples, its manifest plans ${this.#limit}: write or ` +
            "quarantine every one",
        );
      }
      await this.#finish(this.position);
      this.#isClosed = true;
      this.#limit = this.position;
      open.delete(this);
    } finally {
      this.#isBusy = false;
    }
  }

  /** Declare the shard complete with what is committed, for a writer that ends by an error. The rest is lost. */
  async closeAsCommitted(): Promise<void> {
    open.delete(this);
    await this.#committer.commitAll();
    await this.#committer.requireWhole(this.#committer.position);
    await this.#finish(this.#committer.position);
    this.#isClosed = true;
  }

  /** Stop without completing the shard. What was committed stays. */
  abort(): void {
    open.delete(this);
    this.#isClosed = true;
    this.#limit = this.position;
  }

  /** Report once how many uncommitted samples a shard has that no program will close. */
  tellLost(): void {
    open.delete(this);
    const count = this.position - this.committed;
    if (count > 0) this.#options.lost(count);
  }

  #begin(): void {
    if (this.#isBusy) throw notAwaited();
    this.#isBusy = true;
  }

  async #flush(): Promise<void> {
    this.#hasFailed = true;
    if (this.position > this.#first) {
      const block = this.#builder.finish(this.#first, [...this.#bad.keys()]);
      this.#uncommitted.push([block, this.#bad]);
      this.#bad = new Map();
      this.#first = block.end;
      this.#bytesWritten += block.bytes;
    }
    for (;;) {
      const next = this.#uncommitted[0];
      if (next === undefined) break;
      try {
        await this.#committer.commit(...next);
        this.#uncommitted.shift();
      } catch (error) {
        await this.#move(error);
      }
    }
    this.#lingerMs = Math.min(2 * this.#lingerMs, LINGER_MS);
    this.#dueAt = now() + this.#lingerMs;
    this.#hasFailed = false;
  }

  /** Flush after a sample was added. If the block is too large, that sample goes alone, or is taken back. */
  async #flushAdded(): Promise<void> {
    try {
      return await this.#flush();
    } catch (error) {
      if (!(error instanceof TooLarge) || this.#uncommitted.length > 1) throw error;
    }
    const [block, bad] = this.#uncommitted.pop() as [PackedBlock, Reasons];
    const last = block.end - 1;
    if (last > block.first) this.#uncommitted.push([block.head(last), bad], [block.tail(last), new Map()]);
    else this.#uncommitted.push([block, bad]);
    try {
      await this.#flush();
    } catch (error) {
      if (error instanceof TooLarge && this.#uncommitted.length === 1) {
        const [refused] = this.#uncommitted.pop() as [PackedBlock, Reasons];
        this.#first = refused.first;
        this.#hasFailed = false;
        this.#bytesWritten -= refused.bytes;
      }
      throw error;
    }
  }

  async #commitAll(): Promise<void> {
    for (;;) {
      await this.#flush();
      this.#hasFailed = true;
      try {
        await this.#committer.commitAll();
        this.#hasFailed = false;
        return;
      } catch (error) {
        await this.#move(error);
      }
    }
  }

  /** Commit everything, and look once whether the server holds all of the shard. */
  async #commitWhole(): Promise<void> {
    for (;;) {
      await this.#commitAll();
      try {
        return await this.#committer.requireWhole(this.position);
      } catch (error) {
        await this.#move(error);
      }
    }
  }

  /**
   * Go on in a new shard with what is not committed, under the identities that come next there.
   *
   * @throws The error itself where no other shard may be taken, and ShardMismatch where the server lost what it confirmed.
   */
  async #move(error: unknown): Promise<void> {
    const { takeAnother } = this.#options;
    if (!(error instanceof ShardTaken) || takeAnother === null) throw error;
    const blocks = [...(await this.#committer.unconfirmed()), ...this.#uncommitted];
    const slot = await takeAnother();
    this.#committer = slot.committer;
    this.#shard = slot.shard;
    this.#finish = slot.finish;
    this.#uncommitted.length = 0;
    let at = this.#committer.position;
    for (const [block, bad] of blocks) {
      const [to, from] = [at, block.first];
      const moved = [...bad].map(([offset, why]) => [to + offset - from, why] as const);
      this.#uncommitted.push([block.moved(at), new Map(moved)]);
      at += block.end - block.first;
    }
    this.#first = at;
  }

  /** Send what a flush could not send, before more samples come. */
  async #makeWay(count: number): Promise<void> {
    if (this.#isClosed) {
      throw new ShardMismatch(`shard ${this.#shard} is closed: open the next one, or write before you close it`);
    }
    if (this.position + count > this.#limit) {
      throw new ShardMismatch(`shard ${this.#shard} is full: ${this.#limit} samples are planned, one more was written`);
    }
    if (this.#uncommitted.length > 0) await this.#flush();
  }
}

/** Return the error for two calls of one writer at once: their samples would get lost. */
export function notAwaited(): PenstockError {
  return new PenstockError(
    "a call began while an earlier one of this writer goes on: await each of them, or give each task shards of its own",
  );
}
