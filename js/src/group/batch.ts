// Batches of a group, with the leases on their rows, and the assembler that gives received samples their places in a
// batch.

import { Batch, BatchBuilder, type Span } from "../batch.js";
import { type Block, type Column, offsetsOf } from "../wire/codec.js";
import type { Spec } from "../wire/spec.js";
import type { Lease } from "./leases.js";

/** A span of rows, and the lease on their entry. A rank holds no leases. */
export interface LeasedSpan extends Span {
  readonly lease: Lease;
}

/** A batch that a group was given. */
export class LoaderBatch extends Batch {
  /** Where the step ends in canonical order, or 0 in shared order. */
  readonly position: number;
  /** The payload bytes. */
  readonly bytes: number;
  readonly #leased: readonly LeasedSpan[];
  #acknowledge: ((batch: LoaderBatch) => Promise<boolean>) | null = null;
  #answer: Promise<boolean> | null = null;

  constructor({ epoch, size, tensors }: Batch, leased: readonly LeasedSpan[], position: number) {
    super(
      epoch,
      size,
      tensors,
      leased.map(({ shard, lo, hi }) => ({ shard, lo, hi })),
    );
    this.#leased = leased;
    this.position = position;
    this.bytes = Object.values(tensors).reduce((sum, { data }) => sum + data.byteLength, 0);
  }

  /** The rows with their leases, in order. */
  get leased(): readonly LeasedSpan[] {
    return this.#leased;
  }

  /** Learn who acknowledges this batch, when it is delivered. */
  handTo(acknowledge: (batch: LoaderBatch) => Promise<boolean>): this {
    this.#acknowledge = acknowledge;
    return this;
  }

  /**
   * Acknowledge the batch: it is never delivered again to this group. A second call returns what the first one did.
   *
   * @returns True once the server has it. False if the leases on samples expired: another member is given those.
   * @throws ServerUnavailable if the server stays away, and PenstockError if the loader was closed before.
   */
  async ack(): Promise<boolean> {
    this.#answer ??= this.#acknowledge?.(this) ?? null;
    return (await this.#answer) ?? false;
  }

  /** Return the batch without the rows that another member holds now, or null if none is left. */
  withoutLost(spec: Spec): LoaderBatch | null {
    if (this.#leased.every(({ lease }) => !lease.isLost)) return this;
    const left = this.#leased.filter(({ lease }) => !lease.isLost);
    if (left.length === 0) return null;
    const columns = new Map<string, Column>(Object.entries(this.tensors));
    const builder = new BatchBuilder(spec, this.epoch, this.size);
    const offsets = this.#leased.flatMap(({ lo, hi }) => Array.from({ length: hi - lo }, (_, at) => lo + at));
    let row = 0;
    for (const { lease, shard, lo, hi } of this.#leased) {
      if (!lease.isLost) builder.add(columns, shard, offsets, row, row + hi - lo);
      row += hi - lo;
    }
    return new LoaderBatch(builder.build(), left, this.position);
  }
}

/** Fills batches with rows of entries. `take` gives the finished ones. */
export class Assembler {
  readonly #spec: Spec;
  readonly #epoch: number;
  readonly #batchSize: number;
  readonly #ready: [Batch, LeasedSpan[]][] = [];
  #builder: BatchBuilder;
  #spans: LeasedSpan[] = [];

  constructor(spec: Spec, epoch: number, batchSize: number) {
    this.#spec = spec;
    this.#epoch = epoch;
    this.#batchSize = batchSize;
    this.#builder = new BatchBuilder(spec, epoch, batchSize);
  }

  /** Add rows of an entry. `rows` are indices of its samples, or null for all. */
  append({ header, columns }: Block, lease: Lease, rows: readonly number[] | null): void {
    const { shard } = header;
    const offsets = offsetsOf(header);
    for (const [start, stop] of rows === null ? [[0, offsets.length] as const] : runsOf(rows)) {
      for (let from = start; from < stop; ) {
        const to = Math.min(stop, from + this.#builder.room);
        this.#builder.add(columns, shard, offsets, from, to);
        for (const [lo, hi] of runsOf(offsets.slice(from, to))) this.#spans.push({ lease, shard, lo, hi });
        from = to;
        if (this.#builder.room === 0) this.flush();
      }
    }
  }

  /** End the batch that is being filled, however small it is. */
  flush(): void {
    if (this.#builder.size === 0) return;
    this.#ready.push([this.#builder.build(), this.#spans]);
    this.#builder = new BatchBuilder(this.#spec, this.#epoch, this.#batchSize);
    this.#spans = [];
  }

  /** Return the next finished batch, or null. `position` is where its step ends, in canonical order. */
  take(position = 0): LoaderBatch | null {
    const next = this.#ready.shift();
    return next === undefined ? null : new LoaderBatch(next[0], next[1], position);
  }

  get hasReady(): boolean {
    return this.#ready.length > 0;
  }
}

/** Yield [first, last + 1] of each run of consecutive numbers. */
export function* runsOf(numbers: readonly number[]): Generator<readonly [number, number]> {
  for (let at = 0; at < numbers.length; ) {
    const first = numbers[at] as number;
    let next = first + 1;
    at += 1;
    while (at < numbers.length && numbers[at] === next) {
      next += 1;
      at += 1;
    }
    yield [first, next];
  }
}
