// The writer of one epoch: it writes samples into one shard after the other, or into shards by number, and closes or
// abandons the epoch. It decides how many samples an unplanned shard gets.

import { PenstockError, ShardMismatch } from "../errors.js";
import { loadManifest, type Manifest } from "../stream/manifest.js";
import { MAX_SHARD_SAMPLES } from "../wire/limits.js";
import { abandonEpoch, sizeEpoch } from "./epochs.js";
import { checkRows, inferRows, type RowsLike } from "./rows.js";
import { notAwaited, type ShardWriter } from "./shard.js";
import { inferSpec, type SampleLike } from "./spec.js";
import type { WriterCore } from "./writerCore.js";

/** With several partitions, an unplanned epoch changes its shard, and so its partition, after this many samples. */
const SPREAD_SAMPLES = 2 ** 12;

/** The writer of one epoch. `close` completes it, `abandon` declares that it never will be. */
export class EpochWriter {
  readonly #core: WriterCore;
  readonly #owns: boolean;
  /** The most samples of a shard that is not planned. */
  readonly #shardLimit: number;
  #manifest: Manifest;
  #current: ShardWriter | null = null;
  readonly #sizes: number[] = [];
  #isClosed = false;
  #isOpening = false;

  constructor(core: WriterCore, manifest: Manifest, owns: boolean) {
    this.#core = core;
    this.#manifest = manifest;
    this.#owns = owns;
    this.#shardLimit = core.stream.partitions.length === 1 ? MAX_SHARD_SAMPLES : SPREAD_SAMPLES;
  }

  /** The number of the epoch. */
  get number(): number {
    return this.#manifest.epoch;
  }

  /** Whether the epoch takes samples, is not planned in shards, and got no sample. */
  get isUntouched(): boolean {
    return !this.#isClosed && this.#sizes.length === 0 && !this.#manifest.sizes?.length && this.#current === null;
  }

  /** Whether samples were written without an error and the epoch is not closed. */
  get isLeft(): boolean {
    return !this.#isClosed && this.#current?.hasFailed === false;
  }

  /**
   * Return the writer of one shard, positioned after what is committed.
   *
   * @param like A sample to infer a spec from, for a stream without one.
   */
  async shard(shard: number, { like }: { readonly like?: SampleLike } = {}): Promise<ShardWriter> {
    const { stream } = this.#core;
    if (stream.spec === null && like === undefined) {
      throw new PenstockError(`stream '${stream.name}' has no spec yet: give spec or like`);
    }
    if (like !== undefined) await this.#core.requireSpec(() => inferSpec(like));
    return await this.#core.openShard(this.#manifest, shard);
  }

  /**
   * Add a sample. An object among the values becomes tensors below its name: `{ y: { boxes } }` is `y/boxes`.
   *
   * @throws SpecMismatch if the sample does not fit the spec. Nothing is written then.
   */
  async write(sample: SampleLike): Promise<void> {
    const current = this.#current;
    if (current !== null && !current.isOver) return await current.write(sample);
    this.#requireOpen();
    await this.#core.requireSpec(() => inferSpec(sample));
    await (await this.#nextShard()).write(sample);
  }

  /** Add n samples. See `ShardWriter.writeBatch`. */
  async writeBatch(rows: RowsLike): Promise<void> {
    const checked = checkRows(await this.#core.requireSpec(() => inferRows(rows)), rows);
    for (let start = 0; start < checked.count; ) {
      const current = this.#current;
      const shard = current === null || current.isOver ? await this.#nextShard() : current;
      const stop = Math.min(checked.count, start + this.#shardLimit - shard.position);
      await shard.writeRows(checked, start, stop);
      start = stop;
    }
  }

  /** Record in the sample's place that it could not be made, and why. */
  async quarantine(reason: string): Promise<void> {
    const current = this.#current;
    if (current === null && this.#core.stream.spec === null) {
      throw new PenstockError("the first sample of a stream without spec cannot be a bad one: give spec");
    }
    await (current === null || current.isOver ? await this.#nextShard() : current).quarantine(reason);
  }

  /** Return once all samples written before are committed. */
  async flush(): Promise<void> {
    await this.#current?.commitAll();
  }

  /** Complete the epoch. Shards that are written by number are complete when their writers close them. */
  async close(): Promise<void> {
    if (this.#isClosed) return;
    const isWritten = this.#current !== null || this.#sizes.length > 0;
    if (this.#manifest.sizes === null && (this.#owns || isWritten)) {
      await this.#endShard();
      const { control, stream } = this.#core;
      const sizes = await this.#writtenSizes();
      await this.#core.onReplicas(() => sizeEpoch(control, stream, this.#manifest, sizes));
    }
    this.#isClosed = true;
  }

  /** Declare that the epoch will never be complete. Trainers end it with the samples that it has. */
  async abandon(): Promise<void> {
    this.#current?.abort();
    this.#current = null;
    this.#isClosed = true;
    const { control, stream } = this.#core;
    await this.#core.onAllReplicas(() => abandonEpoch(control, stream, this.#manifest));
  }

  #requireOpen(): void {
    if (this.#isClosed) throw new PenstockError(`epoch ${this.number} is closed: writer.epoch() opens the next one`);
    if (this.#manifest.sizes !== null) {
      throw new PenstockError(`epoch ${this.number} is planned in shards: write with .shard(n)`);
    }
  }

  /** Return the writer of the next shard. Raises PenstockError if two calls ask for it at once. */
  async #nextShard(): Promise<ShardWriter> {
    this.#requireOpen();
    if (this.#isOpening) throw notAwaited();
    this.#isOpening = true;
    try {
      await this.#endShard();
      this.#current = await this.#core.openShard(this.#manifest, this.#sizes.length, this.#shardLimit);
      return this.#current;
    } finally {
      this.#isOpening = false;
    }
  }

  async #endShard(): Promise<void> {
    const shard = this.#current;
    if (shard === null) return;
    await shard.close();
    this.#sizes.push(shard.position);
    this.#current = null;
    if (shard.leftOut > 0) {
      throw new ShardMismatch(
        `epoch ${this.number} of '${this.#core.stream.name}': ${shard.leftOut} samples or more of this program were left ` +
          "out, because another program wrote the same shard: give each shards of its own " +
          `(writer.epoch(${this.number}, { sizes }) and .shard(n)) or an epoch of its own (writer.epoch())`,
      );
    }
  }

  /** Return the size of every shard up to the last. Raises ShardMismatch if a shard written by number is not complete. */
  async #writtenSizes(): Promise<number[]> {
    this.#manifest = await loadManifest(this.#core.control, this.#core.stream, this.number);
    const done = new Map([...this.#manifest.done, ...this.#sizes.entries()]);
    const last = Math.max(-1, ...done.keys());
    const sizes = Array.from({ length: last + 1 }, (_, shard) => done.get(shard));
    const missing = sizes.flatMap((size, shard) => (size === undefined ? [shard] : [])).slice(0, 10);
    if (missing.length > 0) {
      throw new ShardMismatch(
        `shards [${missing.join(", ")}] of epoch ${this.number} are not complete: write and close them`,
      );
    }
    return sizes as number[];
  }
}
